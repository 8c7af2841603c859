"""A plan that fits, as what a command is wanted for: every figure the engine would otherwise choose itself."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.errors import FlagsError, Problem
from tonnage.flags.values import DraftPlan, Layout, ServePlan
from tonnage.memory.cache_exllamav3 import Exllamav3Cache
from tonnage.memory.cache_sglang import SglangCache
from tonnage.memory.cache_vllm import VllmCache

if TYPE_CHECKING:
    from tonnage.memory.supply import Supply
    from tonnage.plan import Plan, RankLedger
    from tonnage.profile import Profile
    from tonnage.topology import Topology

_POOL_LINES = ("weights.", "padding.", "engine.", "draft.", "runtime.multimodal")
_CONTEXT = "runtime.context"
_PAGE_TOKENS = 256
_DIGITS = 1000


def serve_plan(  # noqa: PLR0913 - what a plan does not know of a command
    plan: Plan,
    profile: Profile,
    *,
    model: str,
    release: str | None = None,
    gpu_bytes: int | None = None,
    draft: DraftPlan | None = None,
    quantization: str | None = None,
    eager: bool = False,
    layout: Layout = "hf",
    public_key: str | None = None,
    utilization: Fraction | None = None,
) -> ServePlan:
    """Return what the command is wanted for: the cache gets all that is left beside the lines at their bounds.

    Args:
        plan: One that fits, of an engine and a profile.
        profile: What is served.
        model: Path or hub name.
        release: Of the engine.
        gpu_bytes: Total of the GPU, if it is known.
        draft: How tokens are drafted.
        quantization: What the engine is told where its config does not say it.
        eager: No CUDA graphs.
        layout: Of what is served.
        public_key: Who must have signed it, where every rank verifies its own files.
        utilization: The share of the GPU that vLLM is started with, if it is said.

    Raises:
        FlagsError: The plan does not fit, or says nothing of what is served.
    """
    binding = plan.ranks[plan.binding_rank]
    if not plan.fits or plan.supply is None or plan.placement is None or binding.service is None:
        raise FlagsError(Problem(where="flags", what="no command for a plan that does not fit, or serves nothing"))
    engine = plan.placement.engine.name
    service, budget = binding.service, _budget(plan, plan.supply)
    given: dict[str, object] = {}
    match service.cache:
        case VllmCache():
            free = _free(gpu_bytes, binding)
            given = {"kv_bytes": budget, "total_bytes": gpu_bytes, "free_bytes": free, "fraction": utilization}
        case SglangCache() as cache:
            pools = cache.pools_for(service.concurrency, service.context_tokens)
            given = {
                "kv_tokens": plan.capacity_tokens(),
                "fraction": _fraction(plan, plan.supply, budget),
                "page_tokens": cache.page_tokens if cache.page_tokens > 1 else None,
                "state_slots": pools.state_slots or None,
            }
        case Exllamav3Cache():
            given = {"kv_tokens": max((plan.capacity_tokens() or 0) // _PAGE_TOKENS * _PAGE_TOKENS, _PAGE_TOKENS)}
        case _:
            pass
    return ServePlan(
        engine=engine,  # type: ignore[arg-type]
        release=release,
        model=model,
        topology=_topology(plan),
        context_tokens=service.context_tokens,
        concurrency=service.concurrency,
        prefill_chunk_tokens=profile.prefill_chunk_tokens or service.context_tokens,
        kv_dtype=profile.kv_dtype or "auto",
        draft=draft,
        quantization=quantization,
        eager=eager,
        layout=layout,
        public_key=public_key,
        **given,  # type: ignore[arg-type]
    )


def _topology(plan: Plan) -> Topology:
    assert plan.placement is not None
    return plan.placement.topology


def _budget(plan: Plan, supply: Supply) -> int:
    """Return what every rank has left for its cache."""
    if plan.kv_bytes is not None:
        return plan.kv_bytes
    return min(supply.nbytes - ledger.fixed_bytes for ledger in plan.ranks)


def _free(gpu_bytes: int | None, binding: RankLedger) -> int | None:
    """Return what is free on the GPU when the engine looks first: all but the context at its bound and the reserve."""
    context = _bound(binding, _CONTEXT)
    return gpu_bytes - context - _bound(binding, "reserve") if gpu_bytes is not None and context else None


def _fraction(plan: Plan, supply: Supply, budget: int) -> Fraction:
    """Return the share of the memory free before weights that weights, draft, pools and their reserve take; rounded up.

    What is free then is least beside a context at its bound; if more is, the tokens of the plan are the limit.
    """
    taken = max(_bound(ledger, *_POOL_LINES) for ledger in plan.ranks)
    free = supply.nbytes - max(_bound(ledger, _CONTEXT) for ledger in plan.ranks)
    return Fraction(min(-(-(taken + budget) * _DIGITS // free), _DIGITS - 1), _DIGITS)


def _bound(ledger: RankLedger, *lines: str) -> int:
    return sum(line.bound_nbytes for line in ledger.lines if line.component.startswith(lines))
