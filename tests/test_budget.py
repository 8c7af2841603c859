"""The share of a GPU that vLLM asks for."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.memory.budget import highest_utilization, requested_bytes, utilization_text

MIB = 1 << 20


def test_requested_memory_is_rounded_up() -> None:
    assert requested_bytes(101, Fraction("0.92")) == 93  # 92.92


def test_highest_utilization_has_four_digits_rounded_down() -> None:
    assert utilization_text(highest_utilization(97_250 * MIB, 84_000 * MIB)) == "0.8637"  # 0.86375...
    assert highest_utilization(1 << 30, 100) == 0


@given(total=st.integers(10_000, 1 << 40), data=st.data())
def test_highest_utilization_is_legal_and_a_digit_more_is_not(total: int, data: st.DataObject) -> None:
    free = data.draw(st.integers(total // 5000 + 1, total))
    highest = highest_utilization(total, free)
    assert requested_bytes(total, highest) <= free
    more = highest + Fraction(1, 10_000)
    assert more > 1 or requested_bytes(total, more) > free


@pytest.mark.parametrize(
    ("value", "text"),
    [("1", "1"), ("0.92", "0.92"), ("0.94999", "0.9499"), ("0.9", "0.9"), ("1/3", "0.3333"), ("0.1001", "0.1001")],
)
def test_utilization_is_written_with_four_digits_rounded_down(value: str, text: str) -> None:
    assert utilization_text(Fraction(value)) == text
