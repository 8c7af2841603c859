"""Which slice of which tensor each rank holds, and why: the one value both the plan and the preparation follow.

:func:`place` takes an assignment, a topology and an engine. For every module it cuts a logical axis; what that means
for each stored tensor (codes, scales, markers) follows from the storage format (:mod:`tonnage.shares`). Where an engine
keeps other bytes than the slice (padding, a finer scale grid, another dtype) the difference is kept apart, with its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.container import slot_bytes, slot_extents
from tonnage.engines.model import Deal, EngineModel, Extra, How
from tonnage.errors import PlacementError, Problem
from tonnage.shares import NOTHING, Grains, Piece, Share, Shares, axis_grains
from tonnage.topology import Topology, stage_layers
from tonnage.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.schema import EngineRule, Split, Stage

__all__ = ["TP_SIZES_TRIED", "Piece", "Placed", "Placement", "Share", "can_place", "place"]

MOST_NAMED = 6
"""Tensors that are written out when a topology is refused."""

TP_SIZES_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 48, 64, 72, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A module placed.

    Attributes:
        entry: What is placed.
        how: Split, replicated, whole experts, or absent.
        why: The reason, unless it is split plainly.
        stage: Pipeline stages that hold it.
        shares: One per tensor-parallel rank.
    """

    entry: Assigned
    how: How
    why: str
    stage: Stage
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every tensor's slice on every rank.

    Attributes:
        assignment: What is placed.
        topology: Over which ranks.
        engine: By whose rules.
        placed: In recipe order.
        extras: What the engine holds beyond the checkpoint.
        stages: Decoder layers of every pipeline stage.
        slots: For every layer of an exl3-v1 container, the bytes of every tensor-parallel rank.
    """

    assignment: Assignment
    topology: Topology
    engine: EngineModel
    placed: tuple[Placed, ...]
    extras: tuple[Extra, ...]
    stages: tuple[range, ...]
    slots: tuple[tuple[int, ...], ...] = ()

    def multiplicity(self, placed: Placed, pp_rank: int) -> int:
        """Return for how many values of its first index a stage holds a module."""
        first = placed.entry.first
        return self._held(placed.stage, first if placed.entry.module.layered else (), len(first) or 1, pp_rank)

    def extra_multiplicity(self, extra: Extra, pp_rank: int) -> int:
        """Return how many times a stage holds an extra."""
        return sum(layer in self.stages[pp_rank] for layer in extra.first)

    def module_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of all placed modules on one rank: without what the engine adds, and without slots."""
        return sum(self.multiplicity(p, pp_rank) * p.shares[tp_rank].held_bytes for p in self.placed)

    def file_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of all placed modules in one rank's files, where what an engine converts is as stored."""
        return sum(self.multiplicity(p, pp_rank) * p.shares[tp_rank].file_bytes for p in self.placed)

    def payload_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of all tensors in one rank's files."""
        return self.file_bytes(pp_rank, tp_rank) + self.slot_bytes(pp_rank, tp_rank)

    def rank_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return all bytes one rank holds."""
        held = self.module_bytes(pp_rank, tp_rank)
        added = sum(self.extra_multiplicity(extra, pp_rank) * extra.nbytes[tp_rank] for extra in self.extras)
        return held + added + self.slot_bytes(pp_rank, tp_rank)

    def slot_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of one rank's slots of an exl3-v1 container."""
        container = self.assignment.container
        if container is None:
            return 0
        mine = self.stages[pp_rank]
        return sum(ranks[tp_rank] for layer, ranks in zip(container.layers, self.slots, strict=True) if layer in mine)

    def _held(self, stage: Stage, layers: tuple[int, ...], count: int, pp_rank: int) -> int:
        last = self.topology.pp - 1
        if stage == "layer":
            if last == 0:
                return len(layers)
            mine = self.stages[pp_rank]
            return sum(layer in mine for layer in layers)
        here = {"first": pp_rank == 0, "last": pp_rank == last, "ends": pp_rank in (0, last), "all": True}[stage]
        return count if here else 0


def place(assignment: Assignment, topology: Topology, engine: EngineModel, *, name_sizes: bool = True) -> Placement:
    """Return the placement.

    The container of an exl3-v1 checkpoint is cut by slots; whole experts per rank do not exist in it.

    Args:
        assignment: What is placed.
        topology: Over which ranks.
        engine: By whose rules.
        name_sizes: Say which sizes work, if this one does not; off where nobody reads it, since it takes long.

    Raises:
        PlacementError: An axis cannot be cut over the ranks; every such tensor is named, with the sizes that work.
    """
    if assignment.container is not None and topology.ep > 1:
        raise PlacementError(
            Problem(
                where="--ep",
                what="an exl3-v1 container is cut by channels, not by experts",
                expected="1",
                found=str(topology.ep),
            )
        )
    refusals = engine.check(assignment, topology)
    if refusals:
        raise PlacementError(*refusals)
    placed, problems = _try_place(assignment, topology, engine)
    if problems:
        tried = TP_SIZES_TRIED if name_sizes else ()
        works = [str(tp) for tp in tried if can_place(assignment, _with_tp(topology, tp), engine)]
        where = f"--tp {topology.tp} --engine {engine.name}"
        sizes = "tensor-parallel sizes that work: " + (", ".join(works) or "none of those tried")
        more = (
            [Problem(where=where, what=f"and {counted(len(problems) - MOST_NAMED, 'more tensor')}")]
            if len(problems) > MOST_NAMED
            else []
        )
        raise PlacementError(Problem(where=where, what=sizes), *problems[:MOST_NAMED], *more)
    layers = 1 + max((max(p.entry.first) for p in placed if p.entry.module.layered and p.entry.first), default=-1)
    container = assignment.container
    return Placement(
        assignment=assignment,
        topology=topology,
        engine=engine,
        placed=tuple(placed),
        extras=tuple(engine.extras(assignment, topology)),
        stages=stage_layers(layers, topology.pp),
        slots=slot_bytes(container, topology.tp) if container else (),
    )


def can_place(assignment: Assignment, topology: Topology, engine: EngineModel) -> bool:
    """Whether :func:`place` would succeed."""
    try:
        return not (engine.check(assignment, topology) or _try_place(assignment, topology, engine)[1])
    except PlacementError:
        return False


def _with_tp(topology: Topology, tp: int) -> Topology:
    return Topology(tp=tp, ep=tp if topology.ep > 1 else 1, pp=topology.pp)


def _try_place(assignment: Assignment, topology: Topology, engine: EngineModel) -> tuple[list[Placed], list[Problem]]:
    try:
        deals = engine.deal(assignment, topology) if topology.tp > 1 else {}
    except PlacementError as error:
        return [], list(error.problems)
    placed: list[Placed] = []
    problems: dict[str, Problem] = {}
    splits = ((entry, _split(entry, _exception(entry, engine))) for entry in assignment.entries)
    grains = axis_grains(splits) if engine.uneven else {}
    for number, entry in enumerate(assignment.entries):
        try:
            if number in deals:
                placed.extend(_dealt(entry, deals[number], topology, engine))
            else:
                placed.append(_by_recipe(entry, topology, engine, grains))
        except PlacementError as error:
            problems.update((str(problem), problem) for problem in error.problems)
    if assignment.container is not None:
        try:
            slot_extents(assignment.container, topology.tp)
        except PlacementError as error:
            problems.update((str(problem), problem) for problem in error.problems)
    return placed, list(problems.values())


def _by_recipe(entry: Assigned, topology: Topology, engine: EngineModel, grains: Grains) -> Placed:
    """Place an entry as its recipe line and the engine's exception to it say."""
    rule = entry.module.rule
    exception = _exception(entry, engine)
    names = _names(entry, topology)
    stage = _stage(entry, exception, names)
    split = _split(entry, exception)
    why = (exception.why if exception else "") or rule.why
    ranks = range(topology.tp)
    if exception and exception.absent_if is not None and exception.absent_if.evaluate_bool(names):
        return Placed(entry=entry, how="absent", why=why, stage=stage, shares=(NOTHING,) * topology.tp)
    whole = split == "replicated" or (
        exception is not None and exception.whole_if is not None and exception.whole_if.evaluate_bool(names)
    )
    maker = Shares(entry, topology, engine, exception, names)
    if rule.is_routed and topology.ep > 1:
        experts = tuple(maker.experts(rank) for rank in ranks)
        return Placed(entry=entry, how="whole experts", why="", stage=stage, shares=experts)
    if whole or topology.tp == 1:
        shares = (maker.whole(split),) * topology.tp
        return Placed(entry=entry, how="replicated", why=why, stage=stage, shares=shares)
    shares = tuple(_unless_refused(maker.split(split, rank, grains)) for rank in ranks)
    return Placed(entry=entry, how="split", why=why, stage=stage, shares=shares)


def _dealt(entry: Assigned, deals: Iterable[Deal], topology: Topology, engine: EngineModel) -> Iterable[Placed]:
    """Place an entry as the engine deals it out, which may differ by layer."""
    names = _names(entry, topology)
    stage = _stage(entry, None, names)
    for deal in deals:
        part = replace(entry, first=deal.first)
        maker = Shares(part, topology, engine, None, names)
        shares = tuple(maker.dealt(deal, rank) for rank in range(topology.tp))
        yield Placed(entry=part, how=deal.how, why=deal.why, stage=stage, shares=shares)


def _names(entry: Assigned, topology: Topology) -> Mapping[str, object]:
    return {**entry.module.names, "tp": topology.tp, "ep": topology.ep, "etp": topology.expert_tp}


def _split(entry: Assigned, exception: EngineRule | None) -> Split:
    return (exception.split if exception else None) or entry.module.rule.split


def _stage(entry: Assigned, exception: EngineRule | None, names: Mapping[str, object]) -> Stage:
    rule = entry.module.rule
    stage = (exception.stage if exception else None) or rule.stage
    if stage == "first" and rule.last_if is not None and rule.last_if.evaluate_bool(names):
        return "ends"
    return stage


def _unless_refused(share: Share | Problem) -> Share:
    if isinstance(share, Problem):
        raise PlacementError(share)
    return share


def _exception(entry: Assigned, engine: EngineModel) -> EngineRule | None:
    """Return what the engine does differently with a module: its own table first, then those it takes over."""
    for table in (engine.name, *engine.takes_over):
        rules = entry.module.section.engines.get(table)
        rule = (rules.every or rules.modules.get(entry.module.rule.pattern)) if rules else None
        if rule is not None:
            return rule if table == engine.name else replace(rule, why=f"as {table}: {rule.why}")
    return None
