"""Cutting one axis over ranks: which elements of it a rank holds.

An axis is a row of runs (fused parts), each of whole units (heads). Every run is cut by itself, so that a rank's slice of a
fused axis is one range per run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.recipes.blueprint import Run

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Uncuttable:
    """Why an axis cannot be cut: a run of ``size`` elements in ``units`` steps, which the ranks do not divide."""

    size: int
    units: int


def cut_axis(
    runs: Sequence[Run], ranks: int, rank: int, *, replicas: bool, uneven: bool, grain: int = 1
) -> Ranges | Uncuttable:
    """Return the ranges of an axis that one rank holds, in elements, one per run.

    Args:
        runs: The axis; offsets follow from the order.
        ranks: Number of ranks.
        rank: Which one.
        replicas: Several ranks may hold the same unit where there are fewer units than ranks.
        uneven: Units may be shared out unequally: the first ``units mod ranks`` ranks take one more.
        grain: Cuts fall on multiples of this many elements of the axis, as far as units allow.
    """
    if ranks == 1:
        return ((0, sum(run.size for run in runs)),)
    ranges, offset = [], 0
    for run in runs:
        if run.size:
            found = _cut_run(run, ranks, rank, replicas=replicas, uneven=uneven, grain=grain)
            if isinstance(found, Uncuttable):
                return found
            ranges.append((offset + found[0], offset + found[1]))
        offset += run.size
    return tuple(ranges)


def extent(ranges: Ranges) -> int:
    """Return how many elements ranges cover."""
    return sum(end - begin for begin, end in ranges)


def _cut_run(
    run: Run, ranks: int, rank: int, *, replicas: bool, uneven: bool, grain: int
) -> tuple[int, int] | Uncuttable:
    units, step = run.units, run.size // run.units
    if units % ranks == 0 and (not uneven or (run.size // ranks) % grain == 0):
        share = run.size // ranks
        return rank * share, (rank + 1) * share
    if replicas and ranks % units == 0:
        unit = rank * units // ranks
        return unit * step, (unit + 1) * step
    if uneven:
        if step % grain and units == run.size:
            units, step = -(-run.size // grain), grain
        if units >= ranks:
            base, spare = divmod(units, ranks)
            begin = rank * base + min(rank, spare)
            end = begin + base + (rank < spare)
            return begin * step, min(end * step, run.size)
    return Uncuttable(run.size, units)
