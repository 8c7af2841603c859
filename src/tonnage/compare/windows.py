"""Elements of a whole, window by window, out of the mapped files of all ranks: as stored, as values, as BF16.

A window is some rows and columns of one matrix: the last two axes at one place of those before them. It never has more
than ``WINDOW_ELEMENTS`` elements, and where it begins does not depend on who holds what, so that a model gives the same
figures in whichever layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.compare.wholes import CompareError, Run, Whole
from tonnage.errors import Problem
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.formats.quantized import MX_BLOCK
from tonnage.prepare.mxfp8 import decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tonnage.compare.pairs import Tensor
    from tonnage.prepare.reader import RankView

WINDOW_ELEMENTS = 1 << 18
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BITS = {bits: np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)}

Views = Mapping[int, "RankView"]
"""Open ranks by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of one matrix of a tensor; a vector is a matrix of one row, a scalar one of one element.

    Attributes:
        place: Index on every axis before the last two.
        rows: Of the matrix.
        columns: Likewise; they begin on whole blocks of MX scales.
    """

    place: tuple[int, ...]
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Where it stands in an array of all matrices."""
        return (*self.place, self.rows, self.columns)

    def blocks(self) -> Window:
        """Return the window of the scales of this one."""
        columns = slice(self.columns.start // MX_BLOCK, -(-self.columns.stop // MX_BLOCK))
        return Window(place=self.place, rows=self.rows, columns=columns)


def windows(shape: tuple[int, ...], *, elements: int = WINDOW_ELEMENTS) -> Iterator[Window]:
    """Yield windows that cover a tensor once, in order.

    Args:
        shape: Of the tensor.
        elements: Most elements of a window, at least 32.
    """
    *leading, rows, columns = (1,) * (2 - len(shape)) + shape
    width = min(columns, elements // MX_BLOCK * MX_BLOCK)
    height = max(elements // max(width, 1), 1)
    for place in product(*map(range, leading)):
        for row in range(0, rows, height):
            for column in range(0, columns, max(width, 1)):
                right, bottom = min(column + width, columns), min(row + height, rows)
                yield Window(place=place, rows=slice(row, bottom), columns=slice(column, right))


def stored_bits(whole: Whole, views: Views, window: Window) -> NDArray[np.unsignedinteger[Any]]:
    """Return a window as unsigned integers of the dtype's width.

    Raises:
        CompareError: Two ranks hold different bits of one index.
    """
    kind = _BITS[DTYPE_BITS[whole.dtype]]
    pad = max(2 - len(whole.shape), 0)
    axis = whole.axis + pad - len(window.place)  # 0 rows, 1 columns, below 0 one of the axes before
    out = np.empty(window.shape, kind)
    for run, copied in [(run, False) for run in whole.runs] + [(run, True) for run in whole.copies]:
        begin, end = _limits(run, axis, window)
        if begin >= end:
            continue
        held = _part(views[run.rank][whole.name], kind, run, axis, begin, end, window)
        target = out[_on_axis(axis, begin, end, window)]
        if not copied:
            target[...] = held
        elif not np.array_equal(target, held):
            what, found = "ranks hold different copies", f"rank {run.rank} differs"
            raise CompareError(Problem(where=str(views[run.rank].directory), tensor=whole.name, what=what, found=found))
    return out


def _limits(run: Run, axis: int, window: Window) -> tuple[int, int]:
    """Return which indices of the cut axis both a run and a window have."""
    span = _span(axis, window)
    return max(run.begin, span.start), min(run.end, span.stop)


def _span(axis: int, window: Window) -> slice:
    if axis < 0:
        index = window.place[axis]
        return slice(index, index + 1)
    return (window.rows, window.columns)[axis]


def _on_axis(axis: int, begin: int, end: int, window: Window) -> tuple[slice, ...]:
    """Return where indices of the cut axis stand in the array of a window."""
    if axis < 0:
        return ()
    start = _span(axis, window).start
    place = slice(begin - start, end - start)
    return (place,) if axis == 0 else (slice(None), place)


def _part(  # noqa: PLR0913, PLR0917 - where it is in the rank's tensor, and what of it
    held: NDArray[Any], kind: np.dtype[Any], run: Run, axis: int, begin: int, end: int, window: Window
) -> NDArray[Any]:
    """Return what a rank holds of a window."""
    array = held.reshape((1,) * (2 - held.ndim) + held.shape).view(kind)
    local = slice(run.at + begin - run.begin, run.at + end - run.begin)
    index = list(window.index)
    if axis < 0:
        index[len(window.place) + axis] = local.start
    else:
        index[len(window.place) + axis] = local
    part: NDArray[Any] = array[tuple(index)]
    return part


def values(tensor: Tensor, views: Views, window: Window) -> NDArray[np.floating[Any]]:
    """Return the values of a window: float32 holds all of them but those of F64.

    Raises:
        CompareError: Two ranks hold different bits of one index.
    """
    bits = stored_bits(tensor.stored, views, window)
    if tensor.scales is not None:
        out = np.empty(window.shape, np.float32)
        decode(bits.astype(np.uint8, copy=False), _bytes(tensor.scales, views, window.blocks()), out)
        return out
    if tensor.stored.dtype == "BF16":
        widened: NDArray[np.floating[Any]] = (bits.astype(np.uint32) << 16).view(np.float32)
        return widened
    floats: NDArray[np.floating[Any]] = bits.view(_FLOATS[tensor.stored.dtype])
    return floats if floats.dtype == np.float64 else floats.astype(np.float32, copy=False)


def bf16_bits(tensor: Tensor, views: Views, window: Window) -> NDArray[np.unsignedinteger[Any]]:
    """Return the values of a window of MXFP8 as BF16, rounded to nearest even where they are its subnormals.

    Raises:
        CompareError: Two ranks hold different bits of one index.
    """
    assert tensor.scales is not None
    codes, out = stored_bits(tensor.stored, views, window), np.empty(window.shape, np.uint16)
    decode(codes.astype(np.uint8, copy=False), _bytes(tensor.scales, views, window.blocks()), out)
    return out


def _bytes(scales: Whole, views: Views, window: Window) -> NDArray[np.uint8]:
    return stored_bits(scales, views, window).astype(np.uint8, copy=False)
