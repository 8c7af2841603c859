"""The plan: one ledger per rank, what a GPU can supply, and the verdict.

Everything here is integer arithmetic over a :class:`~tonnage.placement.Placement`. A plan that does not fit is a value
with ``fits == False`` and reasons; it is never an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.credit import CreditInputs, credit_estimate, credit_savings
from tonnage.memory.supply import Basis, Supply
from tonnage.memory.term import Term
from tonnage.placed_weights import LedgerLine, PlacedWeights, Remark, exact_line, placed_weights
from tonnage.units import gib, unit_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.placement import Placement
    from tonnage.serving import RankService


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Everything one rank holds.

    Attributes:
        rank: Global rank, ``pp_rank * tp + tp_rank``.
        lines: In report order.
        service: Its cache and what loading takes, where a profile is served.
    """

    rank: int
    lines: tuple[LedgerLine, ...]
    service: RankService | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights, padding and what the engine adds to them included."""
        return sum(line.nbytes for line in self.lines if line.component.startswith(WEIGHT_LINES))

    @property
    def fixed_bytes(self) -> int:
        """Everything that does not grow with KV capacity, at its bound; of transient lines the largest."""
        persistent = sum(line.bound_nbytes for line in self.lines if not line.transient)
        return persistent + max((line.bound_nbytes for line in self.lines if line.transient), default=0)

    @property
    def expected_bytes(self) -> int:
        """The same as it is expected to be."""
        persistent = sum(line.nbytes for line in self.lines if not line.transient)
        return persistent + max((line.nbytes for line in self.lines if line.transient), default=0)

    @property
    def cache_bytes(self) -> int:
        """What the profile needs of the cache."""
        return self.service.cache_bytes if self.service else 0

    @property
    def loading_bytes(self) -> int:
        """The most that is held while weights are loaded, before there is a cache; 0 where nothing is served."""
        if self.service is None:
            return 0
        held = sum(line.bound_nbytes for line in self.lines if line.component.startswith(_LOADED_LINES))
        return held + max((term.bound_nbytes for term in self.service.load), default=0)


PLAN_SCHEMA = "tonnage.plan/1"
"""Of its document."""
LOWER_SHARE = "at most --utilization"
"""How a reason says that a smaller share would do."""
WEIGHT_LINES = ("weights.", "padding.", "engine.")
"""How the components of lines begin that make up the weights."""
_DRAFT_WEIGHT_LINES = ("draft.weights", "draft.embedding", "draft.head", "draft.engine")
_LOADED_LINES = (*WEIGHT_LINES, *_DRAFT_WEIGHT_LINES, "runtime.context", "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A line outside the weights, the same on every rank: a draft, a reserve."""

    component: str
    nbytes: int
    basis: Basis
    source: str


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
        kv_bytes: What the cache is given, where that is said; otherwise what the profile needs.
    """

    placement: Placement | None
    supply: Supply | None
    ranks: tuple[RankLedger, ...]
    notes: tuple[str, ...]
    remarks: tuple[Remark, ...] = ()
    pessimism: tuple[str, ...] = ()
    kv_bytes: int | None = None

    @property
    def binding_rank(self) -> int:
        """The rank that needs most."""
        return max(self.ranks, key=lambda ledger: (self._needed(ledger), -ledger.rank)).rank

    def spare_bytes(self, rank: int) -> int | None:
        """Return what is left on a rank; negative means refused."""
        return None if self.supply is None else self.supply.nbytes - self._needed(self.ranks[rank])

    @property
    def fits(self) -> bool | None:
        """Whether every rank serves, loads, and has room for the profile; ``None`` where nothing says how much it may.

        A cache that is too small for the profile is refused without a supply, too.
        """
        return None if self.supply is None and not self.reasons else not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is refused: the binding rank, by how much, and its largest lines."""
        if self.supply is not None:
            refused = self._outside(self.supply) or self._short(self.supply) or self._not_loaded(self.supply)
            if refused:
                return refused
        cache = max(ledger.cache_bytes for ledger in self.ranks)
        if self.kv_bytes is not None and cache > self.kv_bytes:
            return (f"the cache of the profile needs {_more(cache, self.kv_bytes)} (--kv-bytes)",)
        return ()

    def capacity_tokens(self, *, expected: bool = False, shared: bool = False) -> int | None:
        """Return the tokens the cache holds in what is left beside the fixed lines; the least of all ranks.

        Args:
            expected: With the lines as they are expected to be, instead of at their bounds.
            shared: Of all requests together beside the states of those of the profile; ``None`` without states.
        """
        asked = {  # ranks that hold the same have one service
            (id(ledger.service), budget): ledger.service
            for ledger in self.ranks
            if ledger.service and (budget := self.cache_budget(ledger, expected=expected)) is not None
        }
        held = (service.capacity_tokens(budget, shared=shared) for (_, budget), service in asked.items())
        return min((tokens for tokens in held if tokens is not None), default=None)

    def cache_budget(self, ledger: RankLedger, *, expected: bool = False) -> int | None:
        """Return what is left for the cache of a rank, never negative; ``None`` if nothing says how much there is."""
        if self.kv_bytes is not None:
            return self.kv_bytes
        if self.supply is None:
            return None
        return max(self.supply.nbytes - (ledger.expected_bytes if expected else ledger.fixed_bytes), 0)

    def _needed(self, ledger: RankLedger) -> int:
        return ledger.fixed_bytes + (ledger.cache_bytes if self.kv_bytes is None else self.kv_bytes)

    def _outside(self, supply: Supply) -> tuple[str, ...]:
        """Say that a share of the GPU leaves no room for what is outside of it."""
        if supply.whole_bytes is None:
            return ()
        outside = max((ledger.service.outside_bytes for ledger in self.ranks if ledger.service), default=0)
        free = supply.whole_bytes - outside
        if supply.nbytes <= free:
            return ()
        from tonnage.memory.budget import utilization_text  # noqa: PLC0415 - few plans need it

        less = _more(supply.nbytes, free)
        most = f"; {LOWER_SHARE} {utilization_text(Fraction(free, supply.whole_bytes))}" if free > 0 else ""
        beside = "sure to be free beside its context (and graphs, before vLLM 0.21)"
        return (f"the engine may not start: {supply.source} is {less} {beside}{most}",)

    def _short(self, supply: Supply) -> tuple[str, ...]:
        ledger = self.ranks[self.binding_rank]
        needed = self._needed(ledger)
        if needed <= supply.nbytes:
            return ()
        unit, text = unit_for(needed)
        cache = needed - ledger.fixed_bytes
        needs = f"{text(ledger.fixed_bytes)} {unit} fixed" + (f" + {text(cache)} {unit} cache" if cache else "")
        less = needed - supply.nbytes
        short = f"short by {text(less)} {unit} ({less:,} bytes)"
        largest = sorted(ledger.lines, key=lambda line: -line.bound_nbytes)[:3]
        lines = ", ".join(f"{line.component} {text(line.bound_nbytes)} {unit}" for line in largest)
        return (
            f"rank {ledger.rank} needs {needs} > supply {text(supply.nbytes)} {unit}, {short}",
            f"largest lines: {lines}",
        )

    def _not_loaded(self, supply: Supply) -> tuple[str, ...]:
        ledger = max(self.ranks, key=lambda one: one.loading_bytes)
        if ledger.loading_bytes <= supply.nbytes:
            return ()
        needs = _more(ledger.loading_bytes, supply.nbytes, "supply ")
        return (f"fits serving, does not fit while loading: rank {ledger.rank} needs {needs}",)


def _more(needed: int, there: int, what: str = "") -> str:
    """Say that one size is more than another."""
    unit, text = unit_for(needed)
    return f"{text(needed)} {unit} > {what}{text(there)} {unit}"


def make_plan(
    placement: Placement,
    *,
    supply: Supply | None,
    held: Sequence[Held] = (),
    services: Sequence[RankService] = (),
    kv_bytes: int | None = None,
    weights: PlacedWeights | None = None,
) -> Plan:
    """Return the plan of a placement: weights by role, padding and engine lines, then what else is held.

    Args:
        placement: What every rank holds of the weights.
        supply: Of one GPU.
        held: Lines that are the same on every rank.
        services: Of every rank in order, where a profile is served; :func:`tonnage.serving.serve`.
        kv_bytes: What the cache is given.
        weights: Of the placement, where they are at hand; :func:`placed_weights`.
    """
    weights = weights or placed_weights(placement)
    ranks = tuple(
        RankLedger(
            rank=rank,
            lines=(*lines, *_terms(services, rank), *_held_lines(held)),
            service=services[rank] if services else None,
        )
        for rank, lines in enumerate(weights.lines)
    )
    return Plan(
        placement=placement,
        supply=supply,
        ranks=ranks,
        notes=(*placement.assignment.notes, *_scope(placement, held, served=bool(services))),
        remarks=weights.remarks,
        pessimism=_held_pessimism(held),
        kv_bytes=kv_bytes,
    )


def _terms(services: Sequence[RankService], rank: int) -> tuple[Term, ...]:
    return tuple(term for term in services[rank].terms if term.bound_nbytes) if services else ()


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


def _scope(placement: Placement, held: Sequence[Held], *, served: bool) -> tuple[str, ...]:
    """Say what the ledger leaves out, and what the engine does not promise."""
    reserved = any(h.component == "reserve" and h.nbytes for h in held)
    room = "held only by the reserve" if reserved else "and nothing is reserved for them (--reserve)"
    weights_only = f"weights only: KV cache, activations, graphs and communication are not counted, {room}"
    notes = [] if served else [weights_only]
    assignment = placement.assignment
    exl3 = assignment.container is not None or any(e.fmt.name.startswith("exl3") for e in assignment.entries)
    if exl3 and placement.engine.name in ("vllm", "sglang"):
        notes.append(
            f"upstream {placement.engine.name} loads no EXL3: this is how a fork with its rules would place it"
        )
    return tuple(notes)
