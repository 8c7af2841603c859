"""Which slice of which tensor each rank holds, and why: the one value both the plan and the preparation follow.

:func:`place` takes an assignment, a topology and an engine. For every module it cuts a logical axis; what that means for
each stored tensor (codes, scales, markers) follows from the storage format. Where an engine keeps other bytes than the
slice (padding, a finer scale grid, another dtype) the difference is kept apart, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from tonnage.container import slot_bytes
from tonnage.cuts import Ranges, Uncuttable, cut_axis, extent
from tonnage.engines.model import EngineModel, Extra, Local
from tonnage.errors import PlacementError, Problem
from tonnage.formats.dtypes import DTYPE_BITS, payload_bytes
from tonnage.formats.storage import joint_grain
from tonnage.topology import Topology, expert_counts, stage_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.blueprint import Run, Stored
    from tonnage.recipes.schema import EngineRule, Stage

How = Literal["split", "replicated", "whole experts", "absent"]
TP_SIZES_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 48, 64, 72, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored tensor of one instance on one rank.

    Attributes:
        shape: Shape the rank holds.
        slice_bytes: Bytes taken from the stored tensor.
        held_bytes: Bytes held; more than the slice is padding, less is what the engine drops.
        why: Reason for the difference.
    """

    shape: tuple[int, ...]
    slice_bytes: int
    held_bytes: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A module's part on one tensor-parallel rank.

    Attributes:
        axis: Logical axis that is cut; ``none`` where the rank holds the whole.
        ranges: Elements of that axis, one range per fused part.
        copies: Instances held for one value of the first index.
        pieces: Every stored tensor of one instance.
    """

    axis: str
    ranges: Ranges
    copies: int
    pieces: tuple[Piece, ...]

    @property
    def slice_bytes(self) -> int:
        """Bytes taken from the checkpoint for one value of the first index."""
        return self.copies * sum(piece.slice_bytes for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        """Bytes held for one value of the first index."""
        return self.copies * sum(piece.held_bytes for piece in self.pieces)


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

    def rank_bytes(self, pp_rank: int, tp_rank: int) -> int:
        """Return all bytes one rank holds."""
        held = sum(self.multiplicity(p, pp_rank) * p.shares[tp_rank].held_bytes for p in self.placed)
        added = sum(self.extra_multiplicity(extra, pp_rank) * extra.nbytes for extra in self.extras)
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
            mine = self.stages[pp_rank]
            return sum(layer in mine for layer in layers)
        here = {"first": pp_rank == 0, "last": pp_rank == last, "ends": pp_rank in (0, last), "all": True}[stage]
        return count if here else 0


def place(assignment: Assignment, topology: Topology, engine: EngineModel) -> Placement:
    """Return the placement.

    The container of an exl3-v1 checkpoint is cut by slots; whole experts per rank do not exist in it.

    Raises:
        PlacementError: An axis cannot be cut over the ranks; every such tensor is named, with the sizes that work.
    """
    if assignment.container is not None and topology.ep > 1:
        raise PlacementError(
            Problem(where="--ep", what="an exl3-v1 container is cut by channels, not by experts", expected="1", found=str(topology.ep))
        )
    placed, problems = _try_place(assignment, topology, engine)
    if problems:
        works = [str(tp) for tp in TP_SIZES_TRIED if can_place(assignment, _with_tp(topology, tp), engine)]
        raise PlacementError(
            *problems,
            Problem(
                where=f"--tp {topology.tp} --engine {engine.name}",
                what="tensor-parallel sizes that work: " + (", ".join(works) or "none of those tried"),
            ),
        )
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
        return not _try_place(assignment, topology, engine)[1]
    except PlacementError:
        return False


def _with_tp(topology: Topology, tp: int) -> Topology:
    return Topology(tp=tp, ep=tp if topology.ep > 1 else 1, pp=topology.pp)


def _try_place(
    assignment: Assignment, topology: Topology, engine: EngineModel
) -> tuple[list[Placed], list[Problem]]:
    placed: list[Placed] = []
    problems: dict[str, Problem] = {}
    grains = _axis_grains(assignment) if engine.uneven else {}
    for entry in assignment.entries:
        result = _place_entry(entry, topology, engine, grains)
        if isinstance(result, Problem):
            problems.setdefault(str(result), result)
        else:
            placed.append(result)
    return placed, list(problems.values())


def _place_entry(
    entry: Assigned, topology: Topology, engine: EngineModel, grains: dict[tuple[str, int], int]
) -> Placed | Problem:
    module, rule = entry.module, entry.module.rule
    exception = _exception(entry, engine)
    names = {**module.names, "tp": topology.tp, "ep": topology.ep, "etp": topology.expert_tp}
    stage = (exception.stage if exception and exception.stage else None) or rule.stage
    if stage == "first" and rule.last_if is not None and rule.last_if.evaluate_bool(names):
        stage = "ends"
    split = (exception.split if exception and exception.split else None) or rule.split
    why = (exception.why if exception else "") or rule.why
    ranks = range(topology.tp)
    if exception and exception.absent_if is not None and exception.absent_if.evaluate_bool(names):
        nothing = Share(axis="none", ranges=(), copies=0, pieces=())
        return Placed(entry=entry, how="absent", why=why, stage=stage, shares=tuple(nothing for _ in ranks))
    whole = split == "replicated" or (
        exception is not None and exception.whole_if is not None and exception.whole_if.evaluate_bool(names)
    )
    maker = _Shares(entry, topology, engine, exception, names)
    if rule.is_routed and topology.ep > 1:
        return Placed(
            entry=entry, how="whole experts", why="", stage=stage, shares=tuple(maker.experts(r) for r in ranks)
        )
    if whole or topology.tp == 1:
        share = maker.whole(split)
        return Placed(entry=entry, how="replicated", why=why, stage=stage, shares=tuple(share for _ in ranks))
    shares = []
    for rank in ranks:
        share = maker.split(split, rank, grains)
        if isinstance(share, Problem):
            return share
        shares.append(share)
    return Placed(entry=entry, how="split", why=why, stage=stage, shares=tuple(shares))


def _exception(entry: Assigned, engine: EngineModel) -> EngineRule | None:
    rules = entry.module.section.engines.get(engine.name)
    return (rules.every or rules.modules.get(entry.module.rule.pattern)) if rules else None


class _Shares:
    """Makes the shares of one module; equal local extents are computed once."""

    def __init__(
        self,
        entry: Assigned,
        topology: Topology,
        engine: EngineModel,
        exception: EngineRule | None,
        names: dict[str, object],
    ) -> None:
        self._entry, self._module = entry, entry.module
        self._topology, self._engine, self._exception, self._names = topology, engine, exception, names
        self._pieces = lru_cache(maxsize=64)(self._make_pieces)

    def whole(self, split: str) -> Share:
        """The rank holds everything; a vocabulary is padded all the same."""
        axis = "out" if split == "vocab" else "none"
        ranges: Ranges = ((0, self._module.out_size or self._axis_size(self._runs("column"))),)
        return Share(axis="none", ranges=(), copies=self._entry.copies, pieces=self._pieces(axis, ranges, 1))

    def experts(self, rank: int) -> Share:
        """The rank holds whole experts."""
        module, ep = self._module, self._topology.ep
        experts = module.stack or module.experts
        counts = expert_counts(experts, ep)
        begin, mine = sum(counts[:rank]), counts[rank]
        if module.stack:
            ranges: Ranges = ((begin, begin + mine),)
            return Share(axis="stack", ranges=ranges, copies=self._entry.copies, pieces=self._pieces("stack", ranges, 1))
        copies = mine * (self._entry.copies // experts) if experts else 0
        if self._entry.members:
            copies = sum(begin <= expert < begin + mine for expert in self._entry.members)
        return Share(axis="stack", ranges=((begin, begin + mine),), copies=copies, pieces=self._pieces("none", (), 1))

    def split(self, split: str, rank: int, grains: dict[tuple[str, int], int]) -> Share | Problem:
        """The rank holds its slice."""
        tp, engine, rule = self._topology.tp, self._engine, self._module.rule
        runs = self._runs(split)
        replicas = rule.replicas if self._exception is None or self._exception.replicas is None else self._exception.replicas
        axis = "in" if split == "row" else "out"
        slice_size = self._slice_size()
        if split == "vocab":
            rows = engine.vocab_rows(self._axis_size(runs), tp)
            if rows % tp == 0:
                share, real = rows // tp, self._axis_size(runs)
                begin = min(rank * share, real)
                found: Ranges | Uncuttable = ((begin, min(begin + share, real)),)
                slice_size = share
            else:
                found = Uncuttable(rows, rows)
        elif slice_size is not None and not engine.uneven:
            begin = min(rank * slice_size, self._axis_size(runs))
            found = ((begin, min(begin + slice_size, self._axis_size(runs))),)
        else:
            grain = grains.get(_axis_key(self._entry, axis), 1)
            found = cut_axis(runs, tp, rank, replicas=replicas, uneven=engine.uneven, grain=grain)
        if isinstance(found, Uncuttable):
            return Problem(
                where=f"--tp {tp} --engine {engine.name}",
                tensor=rule.pattern,
                what=f"axis {axis} of {found.size} elements in {found.units} units cannot be cut over {tp} ranks",
                expected=f"a divisor of {found.units}" + (" or a multiple" if replicas else ""),
                found=str(tp),
            )
        return Share(
            axis=axis, ranges=found, copies=self._entry.copies, pieces=self._pieces(axis, found, slice_size or 0)
        )

    def _slice_size(self) -> int | None:
        if self._exception is None or self._exception.slice_size is None:
            return None
        return self._exception.slice_size.evaluate_int(self._names)

    def _runs(self, split: str) -> tuple[Run, ...]:
        module = self._module
        if module.rule.is_linear:
            return module.in_ if split == "row" else module.out
        return module.shape[-1] if split == "row" else module.shape[0] if module.shape else ()

    @staticmethod
    def _axis_size(runs: tuple[Run, ...]) -> int:
        return sum(run.size for run in runs)

    def _make_pieces(self, axis: str, ranges: Ranges, padded: int) -> tuple[Piece, ...]:
        """Return every stored tensor's piece for a cut of ``axis``; ``padded`` elements of it are held if more."""
        module = self._module
        mine = extent(ranges)
        held = max(mine, padded) if axis in ("out", "in") else mine
        local = Local(
            out=held if axis == "out" else module.out_size,
            in_=held if axis == "in" else module.in_size,
            experts=mine if axis == "stack" else module.stack,
        )
        return tuple(self._piece(stored, axis, mine, held, local) for stored in self._entry.stored)

    def _piece(self, stored: Stored, axis: str, mine: int, held: int, local: Local) -> Piece:
        sliced = _local_shape(stored, axis, mine)
        kept = _local_shape(stored, axis, held)
        why = "" if kept == sliced else "rounded up for the kernel"
        changed = self._engine.held_shape(self._entry, stored, local, self._topology)
        if changed is not None:
            kept, why = changed
        dtype, exception = stored.dtype, self._exception
        wider = self._engine.held_dtype(self._entry, stored)
        if wider is not None:
            dtype, why = wider
        slice_bytes = payload_bytes(stored.dtype, sliced)
        if exception is not None and exception.held is not None:
            kept, why = (exception.held.evaluate_int(self._names),), exception.why
        if exception is not None and exception.dtype:
            dtype, why = exception.dtype, exception.why
            if not self._entry.fmt.is_plain and stored.suffix in {part.suffix for part in self._entry.fmt.parts}:
                kept = (local.out, local.in_) if stored is self._entry.stored[0] else (0,)
        if exception is not None and exception.copies is not None:
            copies = exception.copies.evaluate_int(self._names)
            kept, why = ((copies, *kept), exception.why) if copies != 1 else (kept, why)
        held_bytes = -(-_elements(kept) * DTYPE_BITS[dtype] // 8)
        if exception is not None and exception.slice_size is not None and held_bytes != slice_bytes:
            why = exception.why
        return Piece(shape=kept, slice_bytes=slice_bytes, held_bytes=held_bytes, why=why)


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _local_shape(stored: Stored, axis: str, mine: int) -> tuple[int, ...]:
    """Return a stored shape with the cut axis at ``mine`` logical elements, rounded up to whole stored indices."""
    return tuple(
        -(-mine // dim.per) if dim.axis == axis and dim.axis != "none" else size
        for dim, size in zip(stored.dims, stored.shape, strict=True)
    )


def _axis_key(entry: Assigned, axis: str) -> tuple[str, int]:
    """Name the axis siblings share: the parent module and the size that is cut."""
    module = entry.module
    size = module.in_size if axis == "in" else module.out_size
    return module.rule.pattern.rpartition(".")[0], size


def _axis_grains(assignment: Assignment) -> dict[tuple[str, int], int]:
    """Return the cut step of every axis: what suits all storage formats that share it."""
    grains: dict[tuple[str, int], int] = {}
    for entry, axis, grain in _cut_grains(assignment):
        key = _axis_key(entry, axis)
        grains[key] = joint_grain(grains.get(key, 1), grain)
    return grains


def _cut_grains(assignment: Assignment) -> Iterator[tuple[Assigned, str, int]]:
    for entry in assignment.entries:
        if entry.module.rule.split == "row":
            yield entry, "in", entry.fmt.in_grain
        elif entry.module.rule.split == "column":
            yield entry, "out", entry.fmt.out_grain
