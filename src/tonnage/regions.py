"""Which contexts and concurrencies fit, on a grid: every point is planned, none is guessed from its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tonnage.api import PlanRequest
from tonnage.fit import Planner

LEAST_CONTEXT = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a grid.

    Attributes:
        fits: The verdict.
        spare_bytes: Of the tightest rank; negative is refused.
        cache_bytes: What that rank needs of its cache.
    """

    fits: bool
    spare_bytes: int | None
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """What fits on a grid.

    Attributes:
        contexts: Tokens, ascending.
        concurrencies: Requests, ascending.
        cells: One row per concurrency, one cell per context.
    """

    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]


def find_regions(
    planner: Planner, request: PlanRequest, *, most_context: int, most_concurrency: int, steps: int = 1
) -> Regions:
    """Return what fits of a placement.

    Args:
        planner: Plans the placement.
        request: How it is shared and served, context and concurrency aside.
        most_context: Last context of the grid, in tokens.
        most_concurrency: Last concurrency of the grid.
        steps: Contexts per doubling.

    Raises:
        TonnageError: What is to be served has no rule.
    """
    profile = request.profile
    contexts = _with(doublings(min(LEAST_CONTEXT, most_context), most_context, steps), profile.context_tokens)
    concurrencies = _with(doublings(1, most_concurrency), profile.concurrency)

    def cell(requests: int, tokens: int) -> Cell:
        served = replace(profile, concurrency=requests, context_tokens=tokens)
        plan = planner.plan_request(replace(request, profile=served))
        tightest = plan.ranks[plan.binding_rank]
        spare = plan.spare_bytes(plan.binding_rank)
        return Cell(fits=bool(plan.fits), spare_bytes=spare, cache_bytes=tightest.cache_bytes)

    return Regions(
        contexts=contexts,
        concurrencies=concurrencies,
        cells=tuple(tuple(cell(requests, tokens) for tokens in contexts) for requests in concurrencies),
    )


def _with(numbers: Iterator[int], asked: int | None) -> tuple[int, ...]:
    """Return a grid that what is asked for lies on."""
    return tuple(sorted({*numbers, *(() if asked is None else (asked,))}))


def doublings(first: int, last: int, steps: int = 1) -> Iterator[int]:
    """Yield a number, its doublings with so many steps in each, and the last.

    >>> list(doublings(1024, 5000, 2))
    [1024, 1536, 2048, 3072, 4096, 5000]
    """
    low = first
    while low < last:
        yield from sorted({low + low * step // steps for step in range(steps) if low + low * step // steps < last})
        low *= 2
    yield last
