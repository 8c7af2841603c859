"""What of a plan its placement alone decides: the lines of the weights, and what is held otherwise than stored."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.memory.term import Term
from tonnage.recipes.schema import ROLES
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.memory.supply import Basis
    from tonnage.placement import Placement

LedgerLine = Term
"""One reason a rank's memory is in use: ``weights.ROLE``, ``engine.rotary``, ``runtime.context`` and so on."""


def exact_line(component: str, nbytes: int, source: str, basis: Basis = "exact") -> LedgerLine:
    """Return a line whose bound is its value."""
    return LedgerLine(component=component, nbytes=nbytes, bound_nbytes=nbytes, basis=basis, source=source)


RemarkKind = Literal["whole on every rank", "beyond the checkpoint, all ranks", "not held", "held smaller than stored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Bytes of one role that are not plainly cut, and why.

    Per rank of the stage that holds most; ``not held`` and ``beyond the checkpoint`` in all.
    """

    kind: RemarkKind
    role: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """What of a plan its placement alone decides: made once, planned under many profiles.

    Attributes:
        lines: Of the weights of every rank, in order of global ranks.
        remarks: What is held otherwise than stored.
    """

    lines: tuple[tuple[LedgerLine, ...], ...]
    remarks: tuple[Remark, ...]


def placed_weights(placement: Placement) -> PlacedWeights:
    """Return the lines of the weights, and the remarks on them."""
    topology = placement.topology
    ranks = (divmod(rank, topology.tp) for rank in range(topology.world_size))
    lines = tuple(_weight_lines(placement, pp_rank, tp_rank) for pp_rank, tp_rank in ranks)
    return PlacedWeights(lines=lines, remarks=_remarks(placement))


def _weight_lines(placement: Placement, pp_rank: int, tp_rank: int) -> tuple[LedgerLine, ...]:
    """Return one line per role, then padding by reason, then what the engine adds."""
    by_role: dict[str, int] = defaultdict(int)
    tensors: dict[str, int] = defaultdict(int)
    padding: dict[tuple[str, str], int] = defaultdict(int)
    for placed in placement.placed:
        times = placement.multiplicity(placed, pp_rank)
        share = placed.shares[tp_rank]
        role = placed.entry.module.rule.role
        for piece in share.pieces:
            count = times * share.copies
            if not count:
                continue
            more = max(piece.held_bytes - piece.slice_bytes, 0)
            by_role[role] += count * (piece.held_bytes - more)
            tensors[role] += count
            if more:
                padding[role, piece.why] += count * more
    slots = placement.slot_bytes(pp_rank, tp_rank)
    if slots:
        by_role["expert"] += slots
    family = placement.assignment.blueprint.recipe.family
    sources = {role: f"recipe {family}: {counted(count, 'tensor')}" for role, count in tensors.items()}
    if slots:
        sources["expert"] = "slots of the exl3-v1 container"
    lines = [exact_line(f"weights.{role}", by_role[role], sources[role]) for role in ROLES if by_role.get(role)]
    lines += [exact_line(f"padding.{role}", nbytes, why) for (role, why), nbytes in sorted(padding.items())]
    for extra in placement.extras:
        nbytes = placement.extra_multiplicity(extra, pp_rank) * extra.nbytes[tp_rank]
        if nbytes:
            lines.append(exact_line(extra.component, nbytes, f"{extra.why} ({extra.source})"))
    return tuple(lines)


def _remarks(placement: Placement) -> tuple[Remark, ...]:
    """Say what is held whole, by several ranks, not at all, or smaller than stored, and why."""
    sums: dict[tuple[RemarkKind, str, str], int] = defaultdict(int)
    for placed in placement.placed:
        role = placed.entry.module.rule.role
        times = max(placement.multiplicity(placed, pp_rank) for pp_rank in range(placement.topology.pp))
        if placed.how == "absent":
            sums["not held", role, placed.why] += placed.entry.nbytes
        elif placed.how == "replicated" and placement.topology.tp > 1:
            sums["whole on every rank", role, placed.why] += placed.shares[0].held_bytes * times
        elif placed.how == "split":
            more = sum(share.held_bytes for share in placed.shares) - placed.entry.copies * placed.entry.instance_bytes
            if more > 0:
                why = placed.why or "fewer heads than ranks: each is held by several"
                sums["beyond the checkpoint, all ranks", role, why] += more * (len(placed.entry.first) or 1)
        for piece in placed.shares[0].pieces:
            if piece.held_bytes < piece.slice_bytes:
                less = (piece.slice_bytes - piece.held_bytes) * placed.shares[0].copies * times
                sums["held smaller than stored", role, piece.why] += less
    rows = sorted(sums.items(), key=lambda item: (item[0][0], -item[1], item[0]))
    return tuple(Remark(kind=kind, role=role, nbytes=nbytes, why=why) for (kind, role, why), nbytes in rows)
