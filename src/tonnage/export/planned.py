"""``plan.json``: the plan a package was made for, held against what was prepared, and what is to be served with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tonnage.errors import Problem, raise_if_any
from tonnage.export.manifest import PackageError, Parallel
from tonnage.plan import WEIGHT_LINES

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProfile:
    """What is to be served, as a plan says it; ``None`` where it does not.

    Attributes:
        name: Written ``cC-pP``.
        concurrency: Requests served at once.
        prefill_chunk_tokens: Tokens of one prefill step.
        context_tokens: Longest context.
        draft_name: Of the draft model.
        draft_tokens: Guessed at once.
    """

    name: str | None = None
    concurrency: _Positive | None = None
    prefill_chunk_tokens: _Positive | None = None
    context_tokens: _Positive | None = None
    draft_name: str | None = None
    draft_tokens: _Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a plan must be of.

    Attributes:
        checkpoint: Digest of the source's headers.
        engine: Whose placement rules.
        topology: Parallel sizes.
        converted: Whether weights were converted.
        payload_bytes: Written, by rank.
    """

    checkpoint: str
    engine: str
    topology: Parallel
    converted: bool
    payload_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    digest: str
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    component: str
    nbytes: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    rank: _Count
    lines: tuple[_Line, ...]
    weights_bytes: _Count
    payload_bytes: _Count | None = None

    @property
    def role_bytes(self) -> int:
        """Bytes of weights alone: padding may be written, and what an engine adds never is."""
        return self._sum(("weights.",))

    @property
    def line_bytes(self) -> int:
        """Bytes of all lines that make up the weights."""
        return self._sum(WEIGHT_LINES)

    def misses(self, payload: int) -> str:
        """Return what would have been as planned, if this is not; plans of early versions tell it within bounds."""
        least, most = self.role_bytes, self.weights_bytes
        if self.payload_bytes is not None:
            least = most = self.payload_bytes
        if least <= payload <= most:
            return ""
        return f"{least}{f'..{most}' if most > least else ''} bytes, as planned"

    def _sum(self, begins: tuple[str, ...]) -> int:
        return sum(line.nbytes for line in self.lines if line.component.startswith(begins))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numerics:
    converted: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The part of a plan that a package is held to.

    Attributes:
        checkpoint: Digest of the headers, and family.
        engine: Whose placement rules.
        estimator: ``exact`` for a plan tensor by tensor.
        topology: Parallel sizes.
        profile: What is to be served.
        ranks: Weights of every rank.
        numerics: What is converted.
    """

    schema: Literal["tonnage.plan/1"]
    checkpoint: _Checkpoint
    engine: str
    estimator: str
    topology: Parallel
    profile: PlannedProfile
    ranks: tuple[_Rank, ...]
    numerics: _Numerics


def read_plan(document: Mapping[str, Any], *, where: str) -> Planned:
    """Return what a plan says.

    Raises:
        PackageError: It is none.
    """
    try:
        return msgspec.convert(document, Planned)
    except msgspec.ValidationError as error:
        expected = "what `tonnage plan --json` prints"
        raise PackageError(Problem(where=where, what="not a plan", expected=expected, found=str(error))) from error


def check_plan(plan: Planned, prepared: Prepared, recorded: Planned, *, where: str) -> None:
    """Refuse a plan of anything else than was prepared.

    Args:
        plan: To go into the package.
        prepared: What it must be of.
        recorded: The plan that was on record while preparing.
        where: The plan is from.

    Raises:
        PackageError: Naming everything that differs.
    """
    raise_if_any(PackageError, _differences(plan, prepared, recorded, where))


def with_profile(document: Mapping[str, Any], given: PlannedProfile) -> dict[str, Any]:
    """Return a plan with what is given of a profile in its profile."""
    changes = {name: value for name, value in msgspec.to_builtins(given).items() if value is not None}
    return {**document, "profile": {**document["profile"], **changes}}


def _differences(plan: Planned, prepared: Prepared, recorded: Planned, where: str) -> Iterator[Problem]:
    facts = (
        ("checkpoint", prepared.checkpoint, plan.checkpoint.digest),
        ("estimator", "exact", plan.estimator),
        ("engine", prepared.engine, plan.engine),
        ("topology", prepared.topology.words, plan.topology.words),
        ("conversion", _conversion(prepared.converted), _conversion(bool(plan.numerics.converted))),
    )
    for name, expected, found in facts:
        if expected != found:
            yield Problem(where=where, what=f"plan of another {name}", expected=expected, found=found)
    weights = {rank.rank: rank for rank in plan.ranks}
    world_size = plan.topology.world_size
    if len(plan.ranks) != world_size or len(weights) != world_size or max(weights) >= world_size:
        found = f"{len(plan.ranks)} ranks"
        yield Problem(where=where, what="ranks", expected=f"each of {world_size}, once", found=found)
    for rank in plan.ranks:
        if rank.lines and rank.line_bytes != rank.weights_bytes:
            expected, found = f"the sum of its lines, {rank.line_bytes}", str(rank.weights_bytes)
            yield Problem(where=where, what=f"weights_bytes of rank {rank.rank}", expected=expected, found=found)
    before = {rank.rank: rank.weights_bytes for rank in recorded.ranks}
    for number, payload in prepared.payload_bytes.items():
        planned = weights.get(number)
        if planned is None or planned.weights_bytes != before.get(number):
            expected, found = str(before.get(number)), str(planned.weights_bytes if planned else None)
            yield Problem(where=where, what=f"weights_bytes of rank {number}", expected=expected, found=found)
        elif expected := planned.misses(payload):
            yield Problem(where=where, what=f"written for rank {number}", expected=expected, found=f"{payload} bytes")


def _conversion(converted: bool) -> str:  # noqa: FBT001 - one word of two
    return "mxfp8" if converted else "none"
