"""A measured ledger beside a plan: what each is comparable with, and whether a measurement exceeds a bound.

A plan's lines are grouped by their component names, whatever lines the plan has; a group it has no line of is not
judged. A figure exceeds its bound only if no value that prints like it is within the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tonnage.observe.figures import Quantity, total
from tonnage.observe.ledger import Entry
from tonnage.observe.ranks import Rank
from tonnage.observe.reader import Observation, RankObservation


class PlannedLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a line of a plan document."""

    component: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    bound_nbytes: Annotated[int, msgspec.Meta(ge=0)]
    transient: bool


class PlannedRank(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a rank of a plan document."""

    rank: int
    lines: tuple[PlannedLine, ...]


class PlannedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes the plan is for."""

    tp: int
    pp: int = 1


class PlannedCache(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan says of the cache; nothing if it holds none."""

    bytes_per_token_per_rank: int | None = None
    capacity_tokens: int | None = None
    given_bytes: int | None = None


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is of."""

    name: str = ""


class PlannedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What it is for; nothing if it is of weights alone."""

    concurrency: int | None = None


class PlannedSupply(msgspec.Struct, frozen=True, kw_only=True):
    """Which GPU of the table, if it is one."""

    gpu: str | None = None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a plan document, ``tonnage.plan/1``."""

    topology: PlannedTopology
    ranks: tuple[PlannedRank, ...]
    engine: str = ""
    cache: PlannedCache = PlannedCache()
    checkpoint: PlannedModel = PlannedModel()
    profile: PlannedProfile = PlannedProfile()
    supply: PlannedSupply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measured figure beside the plan's.

    Attributes:
        rank: Of the log.
        what: Component of the measured ledger, or ``non-cache`` for all but the cache.
        measured: The measured figure.
        planned_nbytes: Expected by the plan.
        bound_nbytes: The plan's bound.
        exceeds: Whether the figure, whatever it was rounded from, is over the bound; ``None`` where a bound means
            nothing, as for a cache that fills what is left.
    """

    rank: str
    what: str
    measured: Quantity
    planned_nbytes: int
    bound_nbytes: int
    exceeds: bool | None


def compare(observation: Observation, plan: PlanDocument) -> tuple[Comparison, ...]:
    """Return every figure of every rank that the plan has lines for."""
    return tuple(row for rank in observation.ranks for row in _compare_rank(rank, plan))


def topology_mismatch(observation: Observation, plan: PlanDocument) -> tuple[str, int, int] | None:
    """Return the axis whose size differs, with the plan's and the log's size; nothing if none is known to differ."""
    for axis, planned in (("tp", plan.topology.tp), ("pp", plan.topology.pp)):
        said = observation.settings.get(axis)
        if said is not None and said.quantity is not None and said.quantity.nbytes != planned:
            return axis, planned, said.quantity.nbytes
    return None


_MEASURED = {
    "runtime.baseline": ("baseline",),
    "weights": ("weights",),
    "draft.weights": ("draft",),
    "runtime.persistent": ("persistent",),
    "workspace.activation": ("activation",),
    "workspace.transient": ("activation",),
    "graphs": ("graphs",),
    "cache": ("cache",),
}
"""Groups of planned lines, by component of the measured ledger."""

_NOT_CACHE = ("runtime.baseline", "weights", "draft.weights", "runtime.persistent", "workspace.activation", "graphs")
_BY_FIRST = {
    "reserve": "reserve",
    "weights": "weights",
    "padding": "weights",
    "engine": "weights",
    "logged": "weights",
}
_BY_ANY = {
    "load": "load",
    "cache": "cache",
    "kv": "cache",
    "state": "cache",
    "graphs": "graphs",
    "baseline": "baseline",
    "context": "baseline",
    "communication": "baseline",
    "draft": "draft",
}
"""Groups by the first part of a component, and then by any part, in this order."""


def group_of(line: PlannedLine) -> str:
    """Return which measured figure a planned line belongs to."""
    parts = line.component.split(".")
    if "load" not in parts and parts[0] in _BY_FIRST:
        return _BY_FIRST[parts[0]]
    named = (group for part, group in _BY_ANY.items() if part in parts)
    return next(named, "activation" if line.transient else "persistent")


def _compare_rank(rank: RankObservation, plan: PlanDocument) -> Iterable[Comparison]:
    planned = [_grouped(one.lines) for one in _ranks_for(rank.rank, plan)]
    entries = {entry.component: entry for entry in rank.ledger}
    split = "draft.weights" in entries
    for component, groups in _MEASURED.items():
        if component not in entries:
            continue
        wanted = (*groups, "draft") if component == "weights" and not split else groups
        held = _largest(planned, wanted)
        if component == "cache" and held is None and plan.cache.given_bytes is not None:
            held = plan.cache.given_bytes, plan.cache.given_bytes
        if held is not None:
            yield _comparison(rank, component, entries[component].quantity, held, judged=component != "cache")
    yield from _compare_sum(rank, entries, planned)


def _compare_sum(
    rank: RankObservation, entries: Mapping[str, Entry], planned: list[dict[str, tuple[int, int]]]
) -> Iterable[Comparison]:
    """Compare all but the cache, if the log has every part and the plan has lines for every part."""
    parts = [name for name in _NOT_CACHE if name in entries]
    groups = {group for name in parts for group in _MEASURED[name]}
    complete = all(name in entries for name in _NOT_CACHE if name != "draft.weights")
    if complete and all(groups <= set(one) for one in planned):
        held = _largest(planned, ("baseline", "weights", "draft", "persistent", "activation", "graphs"))
        measured = total(entries[name].quantity for name in parts)
        if held is not None and measured is not None:
            yield _comparison(rank, "non-cache", measured, held, judged=True)


def _comparison(
    rank: RankObservation, what: str, measured: Quantity, held: tuple[int, int], *, judged: bool
) -> Comparison:
    return Comparison(
        rank=rank.rank.label,
        what=what,
        measured=measured,
        planned_nbytes=held[0],
        bound_nbytes=held[1],
        exceeds=measured.least_nbytes > held[1] if judged else None,
    )


def _grouped(lines: Iterable[PlannedLine]) -> dict[str, tuple[int, int]]:
    """Add up the lines of each group: persistent ones all, of transient ones the largest."""
    sums: dict[str, list[int]] = {}
    peaks: dict[str, list[int]] = {}
    for line in lines:
        group = group_of(line)
        if line.transient:
            peak = peaks.setdefault(group, [0, 0])
            peak[:] = max(peak[0], line.nbytes), max(peak[1], line.bound_nbytes)
        else:
            held = sums.setdefault(group, [0, 0])
            held[:] = held[0] + line.nbytes, held[1] + line.bound_nbytes
    nothing = [0, 0]
    return {
        group: (
            sums.get(group, nothing)[0] + peaks.get(group, nothing)[0],
            sums.get(group, nothing)[1] + peaks.get(group, nothing)[1],
        )
        for group in {**sums, **peaks}
    }


def _largest(planned: Iterable[Mapping[str, tuple[int, int]]], groups: tuple[str, ...]) -> tuple[int, int] | None:
    """Return expected bytes and bound of some groups, of the rank whose bound is largest; nothing if none has any."""
    sums = [
        (sum(one[group][1] for group in groups if group in one), sum(one[group][0] for group in groups if group in one))
        for one in planned
        if any(group in one for group in groups)
    ]
    if not sums:
        return None
    bound, expected = max(sums)
    return expected, bound


def _ranks_for(rank: Rank, plan: PlanDocument) -> tuple[PlannedRank, ...]:
    """Return the planned rank a logged one is, or all of them where its prefix does not say."""
    tp_rank, pp_rank = rank.place("TP"), rank.place("PP")
    known = (tp_rank is not None or plan.topology.tp == 1) and (pp_rank is not None or plan.topology.pp == 1)
    number = (pp_rank or 0) * plan.topology.tp + (tp_rank or 0)
    found = tuple(one for one in plan.ranks if known and one.rank == number)
    return found or plan.ranks
