"""A plan as ``plan --json`` wrote it, read again: whole, by itself true, and every text of it printable on one line.

What pictures and pages show is made from this value and nothing else, so that all of it is in the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tonnage.errors import ObservationError, Problem, one_line, raise_if_any
from tonnage.memory.supply import Basis
from tonnage.plan import WEIGHT_LINES
from tonnage.topology import Device

PLAN_LIMIT_BYTES = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What was planned: name, digest of its headers, family."""

    name: str
    digest: str
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTopology:
    """Parallel sizes."""

    tp: _Positive
    ep: _Positive
    pp: _Positive
    dcp: _Positive

    @property
    def words(self) -> str:
        """Those that say something: ``tp8 pp2``."""
        sizes = (("tp", self.tp), ("ep", self.ep), ("pp", self.pp), ("dcp", self.dcp))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProfile:
    """What is to be served; ``None`` where nothing was said."""

    name: str | None = None
    concurrency: _Count | None = None
    prefill_chunk_tokens: _Count | None = None
    context_tokens: _Count | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSupply:
    """How the supply is known."""

    basis: Basis
    source: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLine:
    """One reason a rank's memory is in use."""

    component: str
    nbytes: _Count
    bound_nbytes: _Count
    transient: bool
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """The ledger of one rank; the totals follow from its lines."""

    rank: _Count
    lines: tuple[SavedLine, ...]
    weights_bytes: _Count
    fixed_bytes: _Count
    expected_bytes: _Count
    cache_bytes: _Count
    loading_bytes: _Count = 0
    payload_bytes: _Count | None = None
    spare_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRemark:
    """Bytes that are not plainly cut, and why."""

    kind: str
    role: str
    nbytes: _Count
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGrowth:
    """What the cache needs for so many requests of one length."""

    concurrency: _Positive
    context_tokens: _Positive
    nbytes: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCache:
    """What the cache takes and holds; ``None`` where nothing is served. ``rank`` needs most of it."""

    rank: _Count | None = None
    bytes_per_token_per_rank: _Count | None = None
    state_bytes_per_request: _Count | None = None
    concurrency: _Count | None = None
    context_tokens: _Count | None = None
    given_bytes: _Count | None = None
    capacity_tokens: _Count | None = None
    expected_capacity_tokens: _Count | None = None
    shared_capacity_tokens: _Count | None = None
    expected_shared_capacity_tokens: _Count | None = None
    basis: Basis | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedConversion:
    """One kind of module that preparation converts."""

    module: str
    format: str
    instances: _Count
    bytes_before: _Count
    bytes_after: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNumerics:
    """Whether the bytes of the weights stay what they are."""

    kind: str
    converted: tuple[SavedConversion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A whole document.

    Attributes:
        schema: Of the document.
        checkpoint: What was planned.
        engine: Whose placement rules.
        estimator: ``exact`` or ``credit``.
        topology: Parallel sizes.
        profile: What is served.
        supply_bytes: Of one GPU; ``None`` if only the need was asked for.
        supply: How that is known.
        ranks: All, in order.
        binding_rank: The one that needs most.
        fits: The verdict; ``None`` for none.
        reasons: Why it is refused.
        suggestions: Changes that would fit.
        pessimism: Where it may hold more than a real rank will.
        notes: What a reader must know.
        remarks: What is not plainly cut.
        cache: Of the rank that needs most of it.
        cache_growth: What it needs for other contexts and numbers of requests.
        numerics: What a conversion changes.
        tonnage_version: What wrote it; empty in documents from before it was written down.
        options: The options it was asked for with.
        device: What the engine runs on.
    """

    schema: Literal["tonnage.plan/1"]
    checkpoint: SavedCheckpoint
    engine: str
    estimator: str
    topology: SavedTopology
    profile: SavedProfile
    supply_bytes: _Count | None
    supply: SavedSupply | None = None
    ranks: Annotated[tuple[SavedRank, ...], msgspec.Meta(min_length=1)]
    binding_rank: _Count
    fits: bool | None
    reasons: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    pessimism: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[SavedRemark, ...] = ()
    cache: SavedCache
    cache_growth: tuple[SavedGrowth, ...] = ()
    numerics: SavedNumerics
    tonnage_version: str = ""
    options: tuple[str, ...] = ()
    device: Device = "gpu"

    @property
    def binding(self) -> SavedRank:
        """The rank that needs most."""
        return self.ranks[self.binding_rank]

    def needed_bytes(self, rank: SavedRank) -> int:
        """Return what a rank needs while it serves, at its bounds: the fixed lines and the cache."""
        given = self.cache.given_bytes
        return rank.fixed_bytes + (rank.cache_bytes if given is None else given)


def read_saved(document: Mapping[str, Any], *, where: str = "plan") -> SavedPlan:
    """Return what a plan document says, control characters in its texts escaped.

    Args:
        document: What ``plan --json`` printed, parsed.
        where: It is from, for the refusal.

    Raises:
        ObservationError: It is none, or its figures contradict each other; with all problems of the latter.
    """
    expected = "what `tonnage plan --json` prints"
    schema = document.get("schema")
    if schema != "tonnage.plan/1":
        found = repr(schema)
        raise ObservationError(Problem(where=where, what="not a plan", expected="schema 'tonnage.plan/1'", found=found))
    try:
        numerics = document.get("numerics")
        renamed = {"kind": numerics.get("class"), **numerics} if isinstance(numerics, dict) else numerics
        plan = msgspec.convert({**document, "numerics": renamed}, SavedPlan)
    except msgspec.ValidationError as error:
        raise ObservationError(Problem(where=where, what="not a plan", expected=expected, found=str(error))) from error
    raise_if_any(ObservationError, _contradictions(plan, where))
    return msgspec.convert(_printable(msgspec.to_builtins(plan)), SavedPlan)


def _printable(value: Any) -> Any:
    """Return a value with every text in it made one printable line; values of a checked document are not deep."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {key: _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value


def _contradictions(plan: SavedPlan, where: str) -> Iterator[Problem]:
    def differs(what: str, expected: object, found: object) -> Iterator[Problem]:
        if expected != found:
            yield Problem(where=where, what=what, expected=str(expected), found=str(found))

    count = len(plan.ranks)
    yield from differs("number of ranks", plan.topology.tp * plan.topology.pp, count)
    if plan.binding_rank >= count:
        yield Problem(where=where, what="binding_rank", expected=f"below {count}", found=str(plan.binding_rank))
    if plan.cache.rank is not None and plan.cache.rank >= count:
        yield Problem(where=where, what="cache.rank", expected=f"below {count}", found=str(plan.cache.rank))
    for number, rank in enumerate(plan.ranks):
        yield from differs(f"ranks[{number}].rank", number, rank.rank)
        for line in rank.lines:
            if line.bound_nbytes < line.nbytes:
                what = f"bound_nbytes of {line.component}, rank {number}"
                yield Problem(where=where, what=what, expected=f"at least {line.nbytes}", found=str(line.bound_nbytes))
        bounds = [(line.transient, line.bound_nbytes) for line in rank.lines]
        yield from differs(f"ranks[{number}].fixed_bytes", held_together(bounds), rank.fixed_bytes)
        values = [(line.transient, line.nbytes) for line in rank.lines]
        yield from differs(f"ranks[{number}].expected_bytes", held_together(values), rank.expected_bytes)
        weights = sum(line.nbytes for line in rank.lines if line.component.startswith(WEIGHT_LINES))
        yield from differs(f"ranks[{number}].weights_bytes", weights, rank.weights_bytes)
        spare = None if plan.supply_bytes is None else plan.supply_bytes - plan.needed_bytes(rank)
        yield from differs(f"ranks[{number}].spare_bytes", spare, rank.spare_bytes)
    if plan.binding_rank < count:
        most = max(map(plan.needed_bytes, plan.ranks))
        yield from differs("needed bytes of binding_rank", most, plan.needed_bytes(plan.binding))
    yield from differs("fits", _verdict(plan), plan.fits)


def _verdict(plan: SavedPlan) -> bool | None:
    """Return the verdict that follows from the figures and the reasons; what is refused for others states them."""
    given, supply = plan.cache.given_bytes, plan.supply_bytes
    refused = bool(plan.reasons) or any(
        (given is not None and rank.cache_bytes > given)
        or (supply is not None and max(plan.needed_bytes(rank), rank.loading_bytes) > supply)
        for rank in plan.ranks
    )
    return False if refused else None if supply is None else True


def held_together(sizes: list[tuple[bool, int]]) -> int:
    """Return what lines hold at most at once: persistent ones add up, of transient ones the largest counts.

    >>> held_together([(False, 5), (True, 2), (True, 3)])
    8
    """
    persistent = sum(nbytes for transient, nbytes in sizes if not transient)
    return persistent + max((nbytes for transient, nbytes in sizes if transient), default=0)
