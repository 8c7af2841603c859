"""Sizes as people write them, floored to bytes, and back to GiB text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import UnitError
from tonnage.units import GIB, MIB, gib, parse_size

SIZES = {
    "0": 0,
    "1048576": 1_048_576,
    "5373504512": 5_373_504_512,
    "1B": 1,
    "1.999B": 1,  # floored: supply is never rounded up
    "1KB": 1_000,
    "1KiB": 1_024,
    "1kib": 1_024,
    "96GB": 96_000_000_000,
    "94.010GiB": 100_942_468_874,  # 94.01 x 2^30 = 100,942,468,874.24
    "512MiB": 536_870_912,
    "2 TiB": 2_199_023_255_552,
    "1.5TB": 1_500_000_000_000,
    " 8GiB ": 8_589_934_592,
    "0.000000000001TiB": 1,  # 1.0995...
    "00010B": 10,
}


@pytest.mark.parametrize(("text", "nbytes"), SIZES.items(), ids=SIZES)
def test_size_is_floored_to_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


REFUSED = ["1", "94", "1.5", "1048575", "94.010", "", "GiB", "-1GiB", "+1", "1e9", "1,5GiB", "1_000", ".5GiB", "5.GiB", "1GiB/s", "1 XB", "nan", "inf", "0x10", "٣GiB", "1" * 25, "1.0000000000001GiB"]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_text_that_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_size(text, where="--supply")
    assert str(caught.value).startswith("--supply: not a size; expected a number and a unit")
    assert "\n" not in str(caught.value)


TEXTS = {
    "zero": (0, "0.000"),
    "one": (GIB, "1.000"),
    "half a thousandth rounds up": (GIB + 536_871, "1.001"),  # 0.5 / 1000 x 2^30 = 536,870.912
    "just under half rounds down": (GIB + 536_870, "1.000"),
    "seed case, largest rank": (94_526_085_728, "88.034"),
    "seed case, supply": (100_942_468_874, "94.010"),
    "negative": (-GIB // 2, "-0.500"),
    "negative that rounds to zero has no sign": (-1, "0.000"),
}


@pytest.mark.parametrize(("nbytes", "text"), TEXTS.values(), ids=TEXTS)
def test_gib_text_is_rounded_half_up(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text


def test_gib_digits() -> None:
    assert gib(94_541_026_549, digits=2) == "88.05"
    assert gib(GIB + GIB // 2, digits=0) == "2"


@given(st.integers(0, 2**60))
def test_whole_bytes_are_read_back(nbytes: int) -> None:
    assert parse_size(f"{nbytes}B") == nbytes
    assert parse_size(f"{nbytes}MiB") == nbytes * MIB


@given(st.integers(0, 2**50))
def test_gib_text_is_within_half_a_thousandth(nbytes: int) -> None:
    assert abs(parse_size(gib(nbytes) + "GiB") - nbytes) * 2000 <= GIB + 2000
