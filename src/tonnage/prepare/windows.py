"""Which bytes of a stored tensor a take stands for, and in which pieces they are read.

A cut axis makes of a tensor a grid: rows of equal length, one for every index before the axis, each of them cut at the
same places. Everything here is in bytes within the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from tonnage.formats.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tonnage.prepare.jobs import Step, Take

Span = tuple[int, int]
BLOCK_ELEMENTS = 32
"""Elements that share a scale in MXFP8."""
CODE_BITS = 8
"""Of an element in MXFP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A tensor as rows that are all cut alike.

    Attributes:
        rows: How many; one if the first axis is cut or nothing.
        row_bytes: Bytes of each.
    """

    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one rank takes of every row of a grid.

    Attributes:
        take: For whom.
        spans: Bytes within a row, ascending, not empty.
    """

    take: Take
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes taken of each row."""
        return sum(end - begin for begin, end in self.spans)


def cut_step(step: Step) -> tuple[Grid, tuple[Cut, ...]]:
    """Return the grid of a step's tensor, and every take in it."""
    source = step.source
    return cut_tensor(step.takes, source.shape, DTYPE_BITS[source.dtype], where=source.name)


def cut_tensor(takes: Iterable[Take], shape: tuple[int, ...], bits: int, *, where: str) -> tuple[Grid, tuple[Cut, ...]]:
    """Return the grid of a tensor with elements of so many bits, and every take in it."""
    takes = tuple(takes)
    axes = {take.axis for take in takes} - {None}
    if len(axes) > 1:
        raise ValueError(f"{where}: cut along several axes in one step")
    axis = axes.pop() if axes else None
    rows = 1 if axis is None else prod(shape[:axis])
    grid = Grid(rows=rows, row_bytes=_whole_bytes(prod(shape) * bits, where) // max(rows, 1))
    inner_bits = 0 if axis is None else prod(shape[axis + 1 :]) * bits
    return grid, tuple(Cut(take=take, spans=_spans(take, grid, inner_bits, where)) for take in takes)


def step_spans(step: Step, window_bytes: int) -> Iterator[Span]:
    """Yield the bytes of its source file that a step reads, ascending, however small the windows they are read in.

    Args:
        step: Of a job.
        window_bytes: Most that is read at once: it decides whether rows are read whole.
    """
    source = step.source
    if step.convert:
        rows, columns = source.shape
        _, cuts = cut_tensor(step.takes, source.shape, CODE_BITS, where=source.name)
        needed = converted_rows(cuts, rows, columns)
        row_bytes = columns * DTYPE_BITS[source.dtype] // 8
        yield from ((source.begin + first * row_bytes, source.begin + last * row_bytes) for first, last in needed)
        return
    grid, cuts = cut_step(step)
    if not is_read_in_runs(grid, window_bytes):
        yield source.begin, source.begin + grid.rows * grid.row_bytes
        return
    runs = needed_runs(cuts)
    for begin in range(source.begin, source.begin + grid.rows * grid.row_bytes, max(1, grid.row_bytes)):
        yield from ((begin + first, begin + last) for first, last in runs)


def is_read_in_runs(grid: Grid, window_bytes: int) -> bool:
    """Whether of every row only what is taken is read; else whole rows are read and the columns gathered."""
    return grid.rows == 1 or grid.row_bytes > window_bytes


def needed_runs(cuts: Iterable[Cut]) -> list[Span]:
    """Return the bytes of every row that anyone takes."""
    return merged(span for cut in cuts for span in cut.spans)


def converted_rows(cuts: tuple[Cut, ...], rows: int, columns: int) -> list[Span]:
    """Return the rows of a converted weight that anyone takes; all of them if columns are cut."""
    if any(cut.take.axis == 1 for cut in cuts):
        return [(0, rows)]
    return [(begin // columns, end // columns) for begin, end in needed_runs(cuts)] if columns else []


def converted_elements(step: Step) -> int:
    """Return how many elements a step converts: those of the rows that anyone takes."""
    rows, columns = step.source.shape
    _, cuts = cut_tensor(step.takes, step.source.shape, CODE_BITS, where=step.source.name)
    return columns * sum(last - first for first, last in converted_rows(cuts, rows, columns))


def scale_takes(takes: Iterable[Take]) -> Iterator[Take]:
    """Yield the takes of a converted weight as takes of its scales ``[out, in / 32]``."""
    for take in takes:
        ranges = take.ranges
        if take.axis == 1:
            if any(edge % BLOCK_ELEMENTS for span in ranges for edge in span):
                raise ValueError(f"cut inside a block of {BLOCK_ELEMENTS}: {ranges}")
            ranges = tuple((begin // BLOCK_ELEMENTS, end // BLOCK_ELEMENTS) for begin, end in ranges)
        yield replace(take, ranges=ranges)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap made one."""
    whole: list[Span] = []
    for begin, end in sorted(spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        else:
            whole.append((begin, end))
    return whole


def pieces(spans: Iterable[Span], most: int) -> Iterator[Span]:
    """Yield spans cut into pieces of at most so much."""
    for begin, end in spans:
        for start in range(begin, end, most):
            yield start, min(start + most, end)


def overlaps(spans: Iterable[Span], window: Span) -> Iterator[Span]:
    """Yield what of the spans lies within a window."""
    for begin, end in spans:
        if begin < window[1] and window[0] < end:
            yield max(begin, window[0]), min(end, window[1])


def _spans(take: Take, grid: Grid, inner_bits: int, where: str) -> tuple[Span, ...]:
    if take.axis is None:
        return ((0, grid.row_bytes),) if grid.row_bytes else ()
    if any(later[0] < earlier[1] for earlier, later in pairwise(take.ranges)):
        raise ValueError(f"{where}: ranges of one rank do not ascend: {take.ranges}")
    edges = [[_whole_bytes(edge * inner_bits, where) for edge in span] for span in take.ranges]
    spans = tuple((begin, end) for begin, end in edges if begin < end)
    if spans and not 0 <= spans[0][0] < spans[-1][1] <= grid.row_bytes:
        raise ValueError(f"{where}: ranges outside the tensor: {take.ranges}")
    return spans


def _whole_bytes(bits: int, where: str) -> int:
    if bits % 8:
        raise ValueError(f"{where}: cut inside a byte")
    return bits // 8
