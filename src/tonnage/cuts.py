"""Cutting one axis over ranks: which elements of it a rank holds.

An axis is a row of runs (fused parts), each of whole units (heads, or single channels). Every run is cut by itself, so
that a rank's slice of a fused axis is one range per run. Runs of one axis, and axes that meet (the columns of
``up_proj`` and the rows of ``down_proj``), are cut at the same units as long as they are cut with the same grain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from tonnage.recipes.modules import Run

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Uncuttable:
    """Why an axis cannot be cut: a run of ``size`` elements in ``units`` units, cut at multiples of ``grain`` units."""

    size: int
    units: int
    grain: int = 1


def cut_axis(
    runs: Sequence[Run], ranks: int, rank: int, *, replicas: bool, uneven: bool, grain: int = 1
) -> Ranges | Uncuttable:
    """Return the ranges of an axis that one rank holds, in elements, one per run.

    Args:
        runs: The axis; offsets follow from the order.
        ranks: Number of ranks.
        rank: Which one.
        replicas: Several ranks may hold the same unit where there are fewer units than ranks.
        uneven: Ranks may hold unequal numbers of units, even none; otherwise the ranks must divide the units.
        grain: Cuts fall on multiples of this many units.
    """
    ranges, offset = [], 0
    for run in runs:
        if run.size:
            found = _cut_run(run, ranks, rank, replicas=replicas, uneven=uneven, grain=grain)
            if isinstance(found, Uncuttable):
                return found
            ranges.append((offset + found[0], offset + found[1]))
        offset += run.size
    return tuple(ranges)


def deal_axis(runs: Sequence[Run], counts: Sequence[int], rank: int, *, step: int = 0, grain: int = 1) -> Ranges:
    """Return the ranges one rank holds where every rank's number of units is given.

    Args:
        runs: The axis.
        counts: Units of every rank.
        rank: Which one.
        step: Elements of a unit, the last one may have fewer; 0 where every run is as many equal units.
        grain: Cuts fall on multiples of this many elements; a run whose units are not is held whole.
    """
    edges = (0, *accumulate(counts))
    ranges, offset = [], 0
    for run in runs:
        each = step or run.size // edges[-1]
        begin, end = (min(edge * each, run.size) for edge in edges[rank : rank + 2])
        ranges.append((offset, offset + run.size) if each % grain else (offset + begin, offset + end))
        offset += run.size
    return tuple(ranges)


def share_out(units: int, ranks: int) -> tuple[int, ...]:
    """Return the units of every rank: as equal as can be, the first ranks take one more.

    >>> share_out(12, 8)
    (2, 2, 2, 2, 1, 1, 1, 1)
    """
    base, spare = divmod(units, ranks)
    return tuple(base + (rank < spare) for rank in range(ranks))


def unit_grain(run: Run, grain: int) -> int:
    """Return a grain of so many elements in units of a run: the fewest units that are whole grains.

    >>> unit_grain(Run(576, 9), 128)
    2
    """
    step = run.size // run.units
    return grain // gcd(grain, step)


def extent(ranges: Ranges) -> int:
    """Return how many elements ranges cover."""
    return sum(end - begin for begin, end in ranges)


def _cut_run(
    run: Run, ranks: int, rank: int, *, replicas: bool, uneven: bool, grain: int
) -> tuple[int, int] | Uncuttable:
    units, step = run.units, run.size // run.units
    if ranks == 1:
        return 0, run.size
    if replicas and units < ranks:
        unit = rank * units // ranks
        cuttable = ranks % units == 0 and grain == 1
        return (unit * step, (unit + 1) * step) if cuttable else Uncuttable(run.size, units, grain)
    if uneven:
        edges = (0, *accumulate(share_out(-(-units // grain), ranks)))
        begin, end = (min(edge * grain, units) for edge in edges[rank : rank + 2])
        return begin * step, end * step
    share, rest = divmod(units, ranks)
    if rest or share % grain:
        return Uncuttable(run.size, units, grain)
    return rank * share * step, (rank + 1) * share * step
