"""``plan.json``: the plan a package was made for, held against what was prepared, and what is to be served with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tonnage.errors import Problem, raise_if_any
from tonnage.export.manifest import PackageError, Parallel
from tonnage.saved_plan import SavedPlan, SavedProfile, SavedRank


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


def check_plan(plan: SavedPlan, prepared: Prepared, recorded: SavedPlan, *, where: str) -> None:
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


def with_profile(document: Mapping[str, Any], given: SavedProfile) -> dict[str, Any]:
    """Return a plan with what is given of a profile in its profile."""
    changes = {name: value for name, value in msgspec.to_builtins(given).items() if value is not None}
    return {**document, "profile": {**document["profile"], **changes}}


def _differences(plan: SavedPlan, prepared: Prepared, recorded: SavedPlan, where: str) -> Iterator[Problem]:
    facts = (
        ("checkpoint", prepared.checkpoint, plan.checkpoint.digest),
        ("estimator", "exact", plan.estimator),
        ("engine", prepared.engine, plan.engine),
        ("topology", prepared.topology.words, plan.topology.cut),
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
        elif expected := _misses(planned, payload):
            yield Problem(where=where, what=f"written for rank {number}", expected=expected, found=f"{payload} bytes")


def _misses(rank: SavedRank, payload: int) -> str:
    """Return what would have been as planned, if this is not; plans of early versions tell it within bounds."""
    least, most = rank.role_bytes, rank.weights_bytes
    if rank.payload_bytes is not None:
        least = most = rank.payload_bytes
    if least <= payload <= most:
        return ""
    return f"{least}{f'..{most}' if most > least else ''} bytes, as planned"


def _conversion(converted: bool) -> str:  # noqa: FBT001 - one word of two
    return "mxfp8" if converted else "none"
