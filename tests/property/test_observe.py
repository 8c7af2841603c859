"""Laws of reading logs: nothing crashes it, blocks do not matter, and a decimal's bytes are the decimal's."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tonnage.observe.io import observe_blocks
from tonnage.observe.lines import quantity
from tonnage.observe.reader import ENGINES, MARKERS
from tonnage.observe.record import row
from tonnage.units import GIB

LOGS = sorted((Path(__file__).parent.parent / "data" / "logs").glob("*.log"))
PIECES = [line for path in LOGS for line in path.read_bytes().splitlines(keepends=True)]
MARKED = [*MARKERS, *(one.marker.encode() for engine in ENGINES for one in engine.patterns)]
DECIMALS = st.from_regex(r"-?(0|[1-9][0-9]{0,6})(\.[0-9]{1,9})?", fullmatch=True)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """Lines of real shapes, cut, repeated, interleaved and broken by any bytes."""
    parts = []
    for _ in range(draw(st.integers(1, 12))):
        line = draw(st.sampled_from(PIECES) | st.sampled_from(MARKED) | st.binary(max_size=40))
        begin, end = sorted((draw(st.integers(0, len(line))), draw(st.integers(0, len(line)))))
        parts.append(
            draw(
                st.sampled_from(
                    [line, line[:begin], line[begin:], line[:begin] + draw(st.binary(max_size=6)) + line[end:]]
                )
            )
        )
    return b"".join(parts)


def cut(raw: bytes, width: int):
    return (raw[at : at + width] for at in range(0, len(raw), width))


@given(raw=st.binary(max_size=300) | spoiled(), width=st.integers(1, 200))
def test_any_bytes_are_read_without_a_crash_and_blocks_do_not_matter(raw, width):
    whole = observe_blocks(iter([raw]))
    assert observe_blocks(cut(raw, width)) == whole
    if whole is not None:
        assert row(whole)["engine"] in ("vllm", "sglang", "exllamav3")
        for one in whole.ranks:
            assert all(entry.quantity.rounding_nbytes >= 0 for entry in one.ledger)


@given(text=DECIMALS)
def test_bytes_are_the_floor_of_the_decimal_and_the_text_is_kept(text):
    read = quantity(text, unit=GIB)
    exact = Fraction(text) * GIB
    assert read.nbytes <= exact < read.nbytes + 1
    assert Fraction(read.text) == Fraction(text)


@given(left=DECIMALS, right=DECIMALS)
def test_sums_of_decimals_are_exact(left, right):
    a, b = quantity(left, unit=GIB), quantity(right, unit=GIB)
    assert Fraction((a + b).text) == Fraction(left) + Fraction(right)
    assert Fraction((a - b).text) == Fraction(left) - Fraction(right)
    assert (a - b).rounding_nbytes >= max(a.rounding_nbytes, b.rounding_nbytes)


@given(size=st.integers(0, 200 * GIB), digits=st.sampled_from([2, 4]))
def test_a_size_is_never_under_the_least_that_prints_like_it(size, digits):
    scale = 10**digits
    rounded = (2 * size * scale + GIB) // (2 * GIB)
    read = quantity(f"{rounded // scale}.{rounded % scale:0{digits}d}", unit=GIB)
    assert read.least_nbytes <= size


@given(order=st.permutations(range(3)))
def test_the_order_of_ranks_does_not_matter(order):
    lines = [f"(Worker_TP{n} pid={n}) Model loading took {n}.5 GiB memory and 1 seconds\n".encode() for n in range(3)]
    seen = observe_blocks(iter([b"".join(lines[n] for n in order)]))
    assert seen is not None
    assert [one.rank.label for one in seen.ranks] == ["TP0", "TP1", "TP2"]
    assert seen.figures["weights"].quantity is not None
    assert seen.figures["weights"].quantity.nbytes == 2 * GIB + GIB // 2
