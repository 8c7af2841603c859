"""Tensors of a model put together again from the parts its ranks hold. Pure: it takes what headers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.errors import Problem, TonnageError

if TYPE_CHECKING:
    from tonnage.prepare.reader import TensorView


class CompareError(TonnageError):
    """Two directories cannot be compared: parts make no whole, or they are no two forms of one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Adjacent indices of the cut axis that one rank holds.

    Attributes:
        begin: First index in the whole.
        end: One behind the last.
        rank: Who holds them.
        at: Index of the first in that rank's tensor.
    """

    begin: int
    end: int
    rank: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One stored tensor of a model, and where its elements are.

    Attributes:
        name: As stored.
        dtype: As safetensors spells it.
        shape: Of the whole.
        axis: Which axis runs are on; 0 where nobody cut it.
        runs: Ascending, without gaps or overlaps.
        copies: What further ranks hold of the same indices.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    runs: tuple[Run, ...]
    copies: tuple[Run, ...] = ()


def put_together(name: str, parts: Mapping[int, TensorView], *, where: str) -> Whole:
    """Return the whole of what ranks hold of a tensor; zeros behind a part do not count.

    Args:
        name: Of the tensor.
        parts: By rank.
        where: Name of the directory, for refusals.

    Raises:
        CompareError: The parts are of several dtypes, shapes or axes, or some index is held by no rank.
    """
    cuts = {(part.cut[0], part.cut[2]) for part in parts.values() if part.cut is not None}
    cuts |= {(next(iter(cuts))[0] if cuts else 0, part.shape) for part in parts.values() if part.cut is None}
    dtypes = {part.dtype for part in parts.values()}
    if len(cuts) != 1 or len(dtypes) != 1:
        found = ", ".join(sorted(dtypes) + sorted(f"axis {axis} of {list(shape)}" for axis, shape in cuts))
        raise CompareError(Problem(where=where, tensor=name, what="parts of ranks make no whole", found=found))
    axis, shape = cuts.pop()
    size = shape[axis] if shape else 1
    try:
        runs, copies = _cover(_runs(parts, size), size)
    except ValueError as error:
        raise CompareError(Problem(where=where, tensor=name, what=str(error), expected=f"all of {size}")) from error
    return Whole(name=name, dtype=dtypes.pop(), shape=shape, axis=axis, runs=runs, copies=copies)


def _runs(parts: Mapping[int, TensorView], size: int) -> Iterator[Run]:
    """Yield what every rank holds; a part's ranges stand one behind the other in it."""
    for rank, part in parts.items():
        at = 0
        for begin, end in ((0, size),) if part.cut is None else part.cut[1]:
            yield Run(begin=begin, end=end, rank=rank, at=at)
            at += end - begin


def _cover(found: Iterable[Run], size: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return runs that hold every index once, and what is held beside them."""
    runs: list[Run] = []
    copies: list[Run] = []
    reached = 0
    for run in sorted(found, key=lambda run: (run.begin, -run.end, run.rank)):
        if run.begin > reached:
            break
        if run.begin < reached:
            copies.append(_between(run, run.begin, min(run.end, reached)))
        if run.end > reached:
            runs.append(_between(run, reached, run.end))
            reached = run.end
    if reached < size:
        raise ValueError(f"no rank holds index {reached}")
    return tuple(runs), tuple(copies)


def _between(run: Run, begin: int, end: int) -> Run:
    return Run(begin=begin, end=end, rank=run.rank, at=run.at + begin - run.begin)
