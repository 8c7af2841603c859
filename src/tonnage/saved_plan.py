"""A plan document read again (``tonnage.plan/1``, what ``plan --json`` prints): whole, every field of its type.

Whether its figures add up is asked by who uses them: :mod:`tonnage.report.saved` for pictures and pages,
:mod:`tonnage.export.planned` for packages, :mod:`tonnage.explain` for measurements. Structs and no dataclasses, because
``tonnage plan`` starts with them and they take a tenth of the time to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tonnage.errors import Problem, TonnageError, raise_if_any
from tonnage.memory.supply import Basis
from tonnage.plan import PLAN_SCHEMA, WEIGHT_LINES
from tonnage.topology import MOST_RANKS, Device, cut_words

PLAN_LIMIT_BYTES = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned: name, digest of its headers, family."""

    name: str
    digest: str
    family: str


class SavedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel sizes."""

    tp: _Size
    ep: _Size
    pp: _Size
    dcp: _Size

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    @property
    def words(self) -> str:
        """Those that say something: ``tp8 pp2``."""
        sizes = (("tp", self.tp), ("ep", self.ep), ("pp", self.pp), ("dcp", self.dcp))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "tp")

    @property
    def cut(self) -> str:
        """Those that ranks are cut for, as packages and measurements say them: ``tp8 ep1 pp2``."""
        return cut_words(self.tp, self.ep, self.pp)


class SavedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served; ``None`` where nothing was said.

    Attributes:
        name: Written ``cC-pP``.
        concurrency: Requests served at once.
        prefill_chunk_tokens: Tokens of one prefill step.
        context_tokens: Longest context.
        kv_dtype: Of the cache.
        draft_name: Of the draft model; said of packages.
        draft_tokens: Guessed at once; likewise.
    """

    name: str | None = None
    concurrency: _Positive | None = None
    prefill_chunk_tokens: _Positive | None = None
    context_tokens: _Positive | None = None
    kv_dtype: str | None = None
    draft_name: str | None = None
    draft_tokens: _Positive | None = None


class SavedSupply(msgspec.Struct, frozen=True, kw_only=True):
    """How the supply is known."""

    basis: Basis
    source: str
    gpu: str | None = None


class SavedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One reason a rank's memory is in use."""

    component: str
    nbytes: _Count
    bound_nbytes: _Count
    transient: bool
    basis: Basis
    source: str


class SavedRank(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def role_bytes(self) -> int:
        """Bytes of weights alone: padding may be written, and what an engine adds never is."""
        return self._sum(("weights.",))

    @property
    def line_bytes(self) -> int:
        """Bytes of all lines that make up the weights."""
        return self._sum(WEIGHT_LINES)

    def _sum(self, begins: tuple[str, ...]) -> int:
        return sum(line.nbytes for line in self.lines if line.component.startswith(begins))


class SavedRemark(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are not plainly cut, and why."""

    kind: str
    role: str
    nbytes: _Count
    why: str


class SavedGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache needs for so many requests of one length."""

    concurrency: _Positive
    context_tokens: _Positive
    nbytes: _Count


class SavedCache(msgspec.Struct, frozen=True, kw_only=True):
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


class SavedConversion(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of module that preparation converts."""

    module: str
    format: str
    instances: _Count
    bytes_before: _Count
    bytes_after: _Count


class SavedNumerics(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the bytes of the weights stay what they are."""

    kind: str
    converted: tuple[SavedConversion, ...]


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True):
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


def check_ranks(plan: SavedPlan, *, where: str, kind: type[TonnageError]) -> None:
    """Refuse lines that nothing can be held against.

    Raises:
        TonnageError: Of that kind: a bound is below its value, or ranks are not those of the topology.
    """
    problems = [
        Problem(
            where=where, what=f"rank {rank.rank}: {line.component} above its bound", expected=f"{line.bound_nbytes}"
        )
        for rank in plan.ranks
        for line in rank.lines
        if line.nbytes > line.bound_nbytes
    ]
    world_size = plan.topology.world_size
    if len(plan.ranks) != world_size or any(rank.rank != number for number, rank in enumerate(plan.ranks)):
        expected = f"0..{world_size - 1} ({plan.topology.cut})"
        problems.append(Problem(where=where, what="ranks of a plan", expected=expected, found=f"{len(plan.ranks)}"))
    raise_if_any(kind, problems)


def read_plan_document(document: Mapping[str, Any], *, where: str, kind: type[TonnageError]) -> SavedPlan:
    """Return what a plan document says.

    Args:
        document: Parsed.
        where: It is from, for the refusal.
        kind: Of the refusal.

    Raises:
        TonnageError: Of that kind: it is no plan, or a field is missing or of another type.
    """
    schema = document.get("schema")
    if schema != PLAN_SCHEMA:
        raise kind(Problem(where=where, what="not a plan", expected=f"schema {PLAN_SCHEMA!r}", found=repr(schema)))
    numerics = document.get("numerics")
    renamed = {"kind": numerics.get("class"), **numerics} if isinstance(numerics, dict) else numerics
    try:
        return msgspec.convert({**document, "numerics": renamed}, SavedPlan)
    except msgspec.ValidationError as error:
        expected = "what `tonnage plan --json` prints"
        raise kind(Problem(where=where, what="not a plan", expected=expected, found=str(error))) from error
