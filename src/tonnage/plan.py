"""The plan: one ledger per rank, what a GPU can supply, and the verdict.

Everything here is integer arithmetic over a :class:`~tonnage.placement.Placement`. A plan that does not fit is a value
with ``fits == False`` and reasons; it is never an exception.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.credit import CreditInputs, credit_estimate, credit_savings
from tonnage.memory.supply import Basis, Supply
from tonnage.recipes.schema import ROLES
from tonnage.units import gib, unit_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One reason a rank's memory is in use.

    Attributes:
        component: What holds the memory, e.g. ``weights.expert``.
        nbytes: Expected bytes on this rank.
        bound_nbytes: Bytes at or above all evidence; the verdict uses these. Equal to ``nbytes`` where it is exact.
        transient: Released before another transient line begins; of those only the largest counts.
        basis: How the number is known.
        source: Where to check it.
    """

    component: str
    nbytes: int
    bound_nbytes: int
    transient: bool = False
    basis: Basis
    source: str

    def __post_init__(self) -> None:
        """Refuse a line that cannot describe memory."""
        if not 0 <= self.nbytes <= self.bound_nbytes:
            raise ValueError(f"{self.component}: {self.nbytes} bytes, bound {self.bound_nbytes}")


def exact_line(component: str, nbytes: int, source: str, basis: Basis = "exact") -> LedgerLine:
    """Return a line whose bound is its value."""
    return LedgerLine(component=component, nbytes=nbytes, bound_nbytes=nbytes, basis=basis, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Everything one rank holds.

    Attributes:
        rank: Global rank, ``pp_rank * tp + tp_rank``.
        lines: In report order.
    """

    rank: int
    lines: tuple[LedgerLine, ...]

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights, padding and what the engine adds to them included."""
        return sum(line.nbytes for line in self.lines if line.component.startswith(WEIGHT_LINES))

    @property
    def fixed_bytes(self) -> int:
        """Everything that does not grow with KV capacity, at its bound; of transient lines the largest."""
        persistent = sum(line.bound_nbytes for line in self.lines if not line.transient)
        return persistent + max((line.bound_nbytes for line in self.lines if line.transient), default=0)


WEIGHT_LINES = ("weights.", "padding.", "engine.")
"""How the components of lines begin that make up the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A line outside the weights, the same on every rank: a draft, a reserve."""

    component: str
    nbytes: int
    basis: Basis
    source: str


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
class Plan:
    """Ledgers, supply and verdict.

    Attributes:
        placement: What the weights follow from; ``None`` under the credit estimator.
        supply: Bytes a process can use on one GPU; ``None`` if the question was only how much.
        ranks: One ledger per global rank.
        notes: What the reader must know about the checkpoint.
        remarks: What is held whole, not held, or held smaller than stored, each with its reason.
        pessimism: Where the plan may hold more than a real rank will, and by how much.
    """

    placement: Placement | None
    supply: Supply | None
    ranks: tuple[RankLedger, ...]
    notes: tuple[str, ...]
    remarks: tuple[Remark, ...] = ()
    pessimism: tuple[str, ...] = ()

    @property
    def binding_rank(self) -> int:
        """The rank that holds most."""
        return max(self.ranks, key=lambda ledger: (ledger.fixed_bytes, -ledger.rank)).rank

    def spare_bytes(self, rank: int) -> int | None:
        """Return what is left on a rank; negative means refused."""
        return None if self.supply is None else self.supply.nbytes - self.ranks[rank].fixed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits; ``None`` without a supply."""
        spare = self.spare_bytes(self.binding_rank)
        return None if spare is None else spare >= 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is refused: the binding rank, by how much, and its largest lines."""
        spare = self.spare_bytes(self.binding_rank)
        if self.supply is None or spare is None or spare >= 0:
            return ()
        ledger = self.ranks[self.binding_rank]
        largest = sorted(ledger.lines, key=lambda line: -line.bound_nbytes)[:3]
        unit, text = unit_for(ledger.fixed_bytes)
        needs, supply = f"{text(ledger.fixed_bytes)} {unit}", f"{text(self.supply.nbytes)} {unit}"
        short = f"short by {text(-spare)} {unit} ({-spare:,} bytes)"
        lines = ", ".join(f"{line.component} {text(line.bound_nbytes)} {unit}" for line in largest)
        return (f"rank {ledger.rank} needs {needs} fixed > supply {supply}, {short}", f"largest lines: {lines}")


def make_plan(placement: Placement, *, supply: Supply | None, held: Sequence[Held] = ()) -> Plan:
    """Return the plan of a placement: weights by role, padding and engine lines, then what else is held."""
    topology = placement.topology
    ranks = tuple(
        RankLedger(
            rank=pp_rank * topology.tp + tp_rank,
            lines=(*_weight_lines(placement, pp_rank, tp_rank), *_held_lines(held)),
        )
        for pp_rank in range(topology.pp)
        for tp_rank in range(topology.tp)
    )
    return Plan(
        placement=placement,
        supply=supply,
        ranks=ranks,
        notes=(*placement.assignment.notes, *_scope(placement, held)),
        remarks=_remarks(placement),
        pessimism=_held_pessimism(held),
    )


def make_credit_plan(
    inputs: CreditInputs, permille: int, *, basis: Basis, source: str, supply: Supply | None, held: Sequence[Held] = ()
) -> Plan:
    """Return the plan of a package made elsewhere, its conversion only known as a share of its counted bytes.

    The weights line is what every rank would hold before the credit, less the rank's share of the savings.
    """
    savings = credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, permille)
    estimate = credit_estimate(inputs.device_bytes, inputs.tp_size, savings)
    line = exact_line("weights.credit", estimate, source, basis)
    ranks = tuple(RankLedger(rank=rank, lines=(line, *_held_lines(held))) for rank in range(inputs.tp_size))
    note = (
        f"credit {permille} permille of {inputs.counted_bf16_bytes:,} counted + 1/16 of {inputs.latent_pair_bytes:,} "
        f"latent: saves {savings:,} of {inputs.device_bytes:,} bytes over {inputs.tp_size} ranks"
    )
    notes = [note]
    if basis == "assumed":
        notes.append("the credit is assumed: a rank may hold more than estimated, until a package is measured")
    return Plan(
        placement=None,
        supply=supply,
        ranks=ranks,
        notes=tuple(notes),
        pessimism=(*_credit_pessimism(inputs, savings), *_held_pessimism(held)),
    )


def _credit_pessimism(inputs: CreditInputs, savings: int) -> tuple[str, ...]:
    """Say how far the credit stays under what MXFP8 saves at most."""
    less = (inputs.ideal_savings_bytes - savings) // inputs.tp_size
    if less <= 0:
        return ()
    return (f"pessimism: the credit is {gib(less)} GiB per rank under the ideal of MXFP8 (48.4 % of counted bytes)",)


def _held_pessimism(held: Sequence[Held]) -> tuple[str, ...]:
    return tuple(
        f"pessimism: {h.component} {gib(h.nbytes)} GiB is {h.basis} ({h.source})"
        for h in held
        if h.nbytes and h.basis == "assumed"
    )


def _held_lines(held: Sequence[Held]) -> tuple[LedgerLine, ...]:
    return tuple(exact_line(h.component, h.nbytes, h.source, h.basis) for h in held if h.nbytes)


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
    sources = {role: f"recipe {family}: {count:,} tensors" for role, count in tensors.items()}
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


def _scope(placement: Placement, held: Sequence[Held]) -> tuple[str, ...]:
    """Say what the ledger leaves out, and what the engine does not promise."""
    reserved = any(h.component == "reserve" and h.nbytes for h in held)
    room = "held only by the reserve" if reserved else "and nothing is reserved for them (--reserve)"
    notes = [f"weights only: KV cache, activations, graphs and communication are not counted, {room}"]
    assignment = placement.assignment
    exl3 = assignment.container is not None or any(e.fmt.name.startswith("exl3") for e in assignment.entries)
    if exl3 and placement.engine.name in ("vllm", "sglang"):
        notes.append(
            f"upstream {placement.engine.name} loads no EXL3: this is how a fork with its rules would place it"
        )
    return tuple(notes)
