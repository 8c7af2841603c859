"""What would fit: the longest context, the largest concurrency, and every way to share a model over some GPUs.

Nothing here knows an engine: a plan is made for what is asked, and asked again with what its caches say is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from tonnage.api import Checkpoint, PlanRequest, place_checkpoint, plan_placement, shapes_of
from tonnage.errors import PlacementError, Problem, UnitError
from tonnage.placed_weights import placed_weights
from tonnage.placement import TP_SIZES_TRIED, Placement
from tonnage.plan import Plan
from tonnage.profile import Profile
from tonnage.serving import model_context

MOST_CONCURRENCY = 1 << 12
"""Requests beyond this are not looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One way to share a model, and what it has room for.

    Attributes:
        request: The way.
        plan: Of the profile that was asked for.
        longest_context: Tokens at which the concurrency asked for fits; 0 for none.
        most_concurrency: Requests of the context asked for that fit; 0 for none.
    """

    request: PlanRequest
    plan: Plan
    longest_context: int
    most_concurrency: int


def fit_checkpoint(checkpoint: Checkpoint, request: PlanRequest) -> Fit:
    """Return what one way to share a model has room for.

    Raises:
        UnitError: No supply, no engine, or nothing is said of what is served.
        TonnageError: The model cannot be shared so.
    """
    check_supplied(request)
    return _fit(checkpoint, place_checkpoint(checkpoint, request), request)


def ways(checkpoint: Checkpoint, request: PlanRequest, *, gpus: int) -> Iterator[Fit]:
    """Yield every way to share a model over so many GPUs or fewer: tensor-parallel sizes, and whole experts per rank.

    Raises:
        UnitError: As :func:`fit_checkpoint`.
    """
    check_supplied(request)
    routed = any(entry.module.rule.is_routed for entry in checkpoint.assignment.entries)
    for tp in (size for size in TP_SIZES_TRIED if size * request.pp <= gpus):
        for ep in (1, tp) if routed and tp > 1 else (1,):
            asked = replace(request, tp=tp, ep=ep, dcp=request.dcp if tp % request.dcp == 0 else 1)
            with suppress(PlacementError):  # weights or cache cannot be shared so
                yield _fit(checkpoint, place_checkpoint(checkpoint, asked, name_sizes=False), asked)


def asked_ways(
    checkpoint: Checkpoint, request: PlanRequest, *, tp: int | None, ep: int | None, gpus: int
) -> tuple[Fit, ...]:
    """Return the ways that are asked for: of one tensor-parallel size or all, of one expert-parallel size or both.

    Raises:
        UnitError: As :func:`fit_checkpoint`.
        TonnageError: The model cannot be shared over the one size that is asked for.
    """
    found = [fit_checkpoint(checkpoint, request)] if tp is not None else ways(checkpoint, request, gpus=gpus)
    return tuple(one for one in found if ep in (None, one.request.ep))


def _fit(checkpoint: Checkpoint, placement: Placement, request: PlanRequest) -> Fit:
    planner = Planner(checkpoint=checkpoint, placement=placement, request=request)
    return Fit(
        request=request,
        plan=planner.plan(request.profile),
        longest_context=planner.longest_context(),
        most_concurrency=planner.most_concurrency(),
    )


class Planner:
    """Plans one placement for many profiles."""

    def __init__(self, *, checkpoint: Checkpoint, placement: Placement, request: PlanRequest) -> None:
        """Take what does not change.

        Args:
            checkpoint: What is planned.
            placement: Where its weights go, made for this request.
            request: What is asked, with the profile to start from.
        """
        self._checkpoint, self._placement, self._request = checkpoint, placement, request
        self._shapes = shapes_of(checkpoint, placement, request)
        self._weights = placed_weights(placement)

    def plan(self, profile: Profile) -> Plan:
        """Return the plan for a profile."""
        return self.plan_request(replace(self._request, profile=profile))

    def plan_request(self, request: PlanRequest) -> Plan:
        """Return the plan for a request that shares the model alike."""
        return plan_placement(self._checkpoint, self._placement, request, self._shapes, self._weights)

    def longest_context(self) -> int:
        """Return the longest context at which the concurrency asked for fits, at most the model's own; 0 for none.

        What a rank holds beside the cache grows a little with the context: what the caches allow with the least of it
        is the most, what they allow with the most of it is enough.
        """
        most = model_context(self._checkpoint.assignment) or self._request.profile.context_tokens or 0
        high = _allowed(self._with_context(1), most)
        if not high or self._context_fits(high):
            return high
        low = _allowed(self._with_context(high), most)
        if not self._context_fits(low):
            low = 0
        return _largest(self._context_fits, low, high)

    def most_concurrency(self) -> int:
        """Return the most requests of the context asked for that fit; 0 for none."""
        low, high = 0, 1
        while high <= MOST_CONCURRENCY and self._serves(high):
            low, high = high, 2 * high
        return _largest(self._serves, low, min(high, MOST_CONCURRENCY + 1))

    def _with_context(self, tokens: int) -> Plan:
        return self.plan(replace(self._request.profile, context_tokens=tokens))

    def _context_fits(self, tokens: int) -> bool:
        return tokens > 0 and bool(self._with_context(tokens).fits)

    def _serves(self, concurrency: int) -> bool:
        return bool(self.plan(replace(self._request.profile, concurrency=concurrency)).fits)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low``, which fits or is 0, to below ``high``, which does not."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _allowed(plan: Plan, most: int) -> int:
    """Return the context the caches of all ranks allow beside everything else the plan holds."""
    tokens = most
    for ledger in plan.ranks:
        budget = plan.cache_budget(ledger)
        service = ledger.service
        if budget is not None and service is not None and service.cache is not None:
            longest = service.cache.longest_context(budget, concurrency=service.concurrency, most_tokens=most)
            tokens = min(tokens, longest)
    return tokens


def check_supplied(request: PlanRequest) -> None:
    """Refuse a request that asks for no room, or nothing to be served in it.

    Raises:
        UnitError: It says no supply, no engine, or nothing of what is served.
    """
    if request.supply is None:
        raise UnitError(
            Problem(where="--gpu, --supply", what="what there is room on is not said", expected="one of them")
        )
    if not request.serves:
        expected = "--engine, or --profile and --context"
        raise UnitError(Problem(where="--profile", what="nothing is said of what is served", expected=expected))
