"""What a rank holds while it serves: weights as the engine holds them, draft, buffers, activations, and the cache.

Placement and profile in, terms and a cache per rank out. The rules are an engine's (``memory/``, ``logged/``); here it
is decided which of them apply. A topology without an engine (``split``) is served by vLLM's rules, because the runtimes
that cut everything are forks of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from tonnage.cuts import extent
from tonnage.draft import Draft, PlacedDraft, place_draft
from tonnage.draft_terms import draft_terms
from tonnage.engine_cache import Cache, CacheRequest, engine_cache
from tonnage.errors import Problem, UnitError
from tonnage.logged.lines import cpu_lines, logged_lines
from tonnage.logged.step_buffers import step_buffers
from tonnage.memory.cache_vllm import VllmCache
from tonnage.memory.runtime import graph_estimate_term, load_terms, runtime_terms, serving_of
from tonnage.memory.supply import Basis, Gpu
from tonnage.memory.term import Term
from tonnage.memory.terms import TermRecord
from tonnage.memory.workspace_shape import Deployment, GpuClass, ModelShape, Release, Serving, gpu_class, parse_release
from tonnage.model_shape import model_shape
from tonnage.placement import Placement
from tonnage.profile import Profile

if TYPE_CHECKING:
    from tonnage.assignment import Assignment
    from tonnage.topology import Device, Engine

CONTEXT = "runtime.context"
GPT_OSS_CAPTURE = 1024
GRAPHS = "runtime.graphs"
CPU_BLOCK_TOKENS = 128
"""vLLM 0.32.0 ``platforms/cpu.py``; latents may have blocks of 16 there, whose cache is then more than needed."""
GRAPHS_COUNTED: Release = (0, 21)
"""The first release of vLLM that takes its graphs off the cache when it sizes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is to be served, on what.

    Attributes:
        profile: Concurrency, prefill chunk, context and KV dtype.
        gpu: The GPU, if it is one of the table.
        total_bytes: What it supplies to an allocator, if known: an engine's defaults depend on it.
        version: Of the engine, if known.
        draft: What drafts tokens, if anything does.
        context_held: Whether the supply is that of a bare GPU, on which a process first makes its context; free memory
            measured in a process is without it.
        budgeted: The engine is started with a share of the GPU (``--utilization``) and sizes its cache itself: vLLM
            then takes its own estimate of the graphs off, not what they will take.
        eager: No CUDA graphs.
        device: On a CPU there are weights, what the engine keeps beside them, and the cache: nothing else is planned.
    """

    profile: Profile
    gpu: Gpu | None = None
    total_bytes: int | None = None
    version: str | None = None
    draft: Draft | None = None
    context_held: bool = True
    budgeted: bool = False
    eager: bool = False
    device: Device = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankService:
    """What one rank holds beside the placed weights.

    Attributes:
        terms: Draft, engine, buffers, activations; in report order.
        load: What loading holds for a moment, for its own verdict.
        cache: Its cache; ``None`` for a model that keeps nothing.
        concurrency: Requests of the profile; one where it does not say.
        context_tokens: Their length.
        cache_bytes: What the profile needs of the cache.
        outside_bytes: What it holds at most outside the share of a GPU that vLLM asks for.
    """

    terms: tuple[Term, ...]
    load: tuple[Term, ...]
    cache: Cache | None
    concurrency: int
    context_tokens: int
    cache_bytes: int
    outside_bytes: int

    @property
    def cache_basis(self) -> tuple[Basis, str]:
        """How the layout of the cache is known, and where to check it where that is not the engine's source."""
        if isinstance(self.cache, VllmCache) and self.cache.joins_keys:
            return "calibrated", "index keys in the pages of latents: by the published capacity, docs/k31-ranks.md"
        if isinstance(self.cache, VllmCache) and self.cache.packed_by_release:
            return (
                "modelled",
                "packed as before vLLM 0.26, which takes more than later ones; --engine-version says which",
            )
        return "exact", ""

    def capacity_tokens(self, budget_bytes: int, *, shared: bool = False) -> int | None:
        """Return the tokens a budget holds; ``None`` where that is no question.

        Args:
            budget_bytes: Memory for the cache.
            shared: Tokens of all requests together beside the states of those of the profile, which only a pool that
                states and tokens share has; otherwise as the engine counts.
        """
        if self.cache is None:
            return None
        if not shared:
            return self.cache.capacity_tokens(budget_bytes, self.context_tokens)
        if isinstance(self.cache, VllmCache) and self.cache.state_slots_per_request:
            return self.cache.shared_capacity_tokens(budget_bytes, self.concurrency, self.context_tokens)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """What of one rank does not depend on what is served.

    Attributes:
        model: Its part of the model.
        logged: What the engine keeps beside the parameters.
    """

    model: ModelShape
    logged: tuple[Term, ...]


def rank_shapes(placement: Placement, service: Service) -> tuple[RankShape, ...]:
    """Return the shape of every rank, in order of global ranks: made once, served under many profiles."""
    found: dict[tuple[int, Hashable], RankShape] = {}
    shapes = []
    for pp_rank in range(placement.topology.pp):
        for tp_rank in range(placement.topology.tp):
            key = pp_rank, _held(placement, tp_rank)
            if key not in found:
                found[key] = _rank_shape(placement, service, pp_rank, tp_rank)
            shapes.append(found[key])
    return tuple(shapes)


def _held(placement: Placement, tp_rank: int) -> Hashable:
    """Return how much of everything a rank of any stage holds; ranks that hold as much have one shape."""
    shares = (placed.shares[tp_rank] for placed in placement.placed)
    return (
        tuple((extent(share.ranges), share.copies, share.held_bytes) for share in shares),
        tuple(extra.nbytes[tp_rank] for extra in placement.extras),
        tuple(ranks[tp_rank] for ranks in placement.slots),
    )


def _rank_shape(placement: Placement, service: Service, pp_rank: int, tp_rank: int) -> RankShape:
    if service.device == "cpu":
        logged = cpu_lines(placement, pp_rank=pp_rank, tp_rank=tp_rank, engine_version=service.version)
    else:
        logged = logged_lines(
            placement, pp_rank=pp_rank, tp_rank=tp_rank, gpu_arch=_gpu_arch(service), engine_version=service.version
        )
    return RankShape(model=model_shape(placement, pp_rank=pp_rank, tp_rank=tp_rank), logged=logged)


def serve(
    placement: Placement, service: Service, records: Sequence[TermRecord], shapes: Sequence[RankShape]
) -> tuple[RankService, ...]:
    """Return what every rank holds while it serves, in order of global ranks.

    Args:
        placement: Of the target's weights.
        shapes: Of its ranks.
        service: What is to be served.
        records: Calibrated terms of the engine.

    Raises:
        UnitError: Nobody says how long a context may be.
        PlacementError: The cache cannot be shared so.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    topology = placement.topology
    deployment = Deployment(
        engine=cast("Engine", placement.engine.name),
        release=parse_release(service.version),
        gpu_class=_gpu_class(service, placement.engine.name),
        topology=topology,
    )
    limits = _limits(placement, service, deployment)
    requests = service.profile.concurrency or 1  # an engine starts if one request fits
    draft = place_draft(service.draft, placement) if service.draft else None
    ranks = []
    for pp_rank in range(topology.pp):
        cache = engine_cache(
            CacheRequest(
                placement=placement,
                profile=service.profile,
                limits=limits,
                draft=service.draft,
                version=service.version or "",
                pp_rank=pp_rank,
                block_tokens=CPU_BLOCK_TOKENS if service.device == "cpu" else None,
            )
        )
        cache_bytes = cache.needed_bytes(requests, limits.context_tokens) if cache else 0
        paged = _paged(limits, cache)
        steps = tuple(
            step_buffers(
                placement,
                pp_rank=pp_rank,
                step_tokens=limits.batched_tokens,
                context_tokens=limits.context_tokens if service.device == "gpu" else 0,
            )
        )
        alike: dict[tuple[RankShape, Hashable], RankService] = {}
        for tp_rank in range(topology.tp):
            shape = shapes[pp_rank * topology.tp + tp_rank]
            key = shape, _held_of_draft(draft, pp_rank, tp_rank) if draft else None
            if key not in alike:
                drafted = _drafted(draft, service, paged, deployment, (pp_rank, tp_rank)) if draft else ()
                terms = _runtime(shape, service, paged, deployment, records)
                outside = _outside(service, deployment)
                kept = (term for term in terms if term.component not in outside)
                alike[key] = RankService(
                    terms=(*shape.logged, *steps, *drafted, *kept),
                    load=() if service.device == "cpu" else load_terms(shape.model, deployment),
                    cache=cache,
                    concurrency=requests,
                    context_tokens=limits.context_tokens,
                    cache_bytes=cache_bytes,
                    outside_bytes=sum(term.bound_nbytes for term in terms if term.component in outside),
                )
            ranks.append(alike[key])
    return tuple(ranks)


def _held_of_draft(draft: PlacedDraft, pp_rank: int, tp_rank: int) -> Hashable:
    """Return how much of a draft a rank holds; ``None`` for none of it."""
    rank = draft.tp_rank(pp_rank, tp_rank)
    return None if rank is None or draft.placement is None else _held(draft.placement, rank)


def _drafted(
    draft: PlacedDraft, service: Service, limits: Serving, deployment: Deployment, place: tuple[int, int]
) -> tuple[Term, ...]:
    """Return what the draft adds to the rank at a pipeline stage and a place in it."""
    return draft_terms(
        draft, pp_rank=place[0], tp_rank=place[1], serving=limits, deployment=deployment, gpu_arch=_gpu_arch(service)
    )


def _runtime(
    rank: RankShape, service: Service, limits: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> tuple[Term, ...]:
    """Return the terms of a rank beside weights and cache; a vLLM that sizes its cache takes off its own estimate."""
    if service.device == "cpu":
        return ()
    terms = runtime_terms(rank.model, limits, deployment, records)
    if not service.budgeted or deployment.engine != "vllm" or service.eager or GRAPHS in _outside(service, deployment):
        return terms
    estimate = replace(graph_estimate_term(rank.model, limits, deployment, records), component=GRAPHS)
    return tuple(estimate if term.component == GRAPHS else term for term in terms)


def _outside(service: Service, deployment: Deployment) -> frozenset[str]:
    """Return what does not come out of the supply: the context, and graphs where vLLM does not count them."""
    outside = set() if service.context_held else {CONTEXT}
    uncounted = deployment.release is not None and deployment.release < GRAPHS_COUNTED
    if service.budgeted and deployment.engine == "vllm" and uncounted:
        outside.add(GRAPHS)
    return frozenset(outside)


def _gpu_arch(service: Service) -> str | None:
    return service.gpu.compute_capability if service.gpu else None


def _gpu_class(service: Service, engine: str) -> GpuClass | None:
    """Return what the ranks run on. The package runtime (``split``) was only ever measured on SM 12.0."""
    if service.gpu is not None:
        return gpu_class(service.gpu)
    return "sm120" if engine == "split" else None


def _limits(placement: Placement, service: Service, deployment: Deployment) -> Serving:
    """Return what the engine is told; a context nobody states is the model's own."""
    stated = service.profile.context_tokens or model_context(placement.assignment)
    if not stated:
        raise UnitError(
            Problem(where="--context", what="the config does not say how long a context may be", expected="--context N")
        )
    limits = serving_of(service.profile, deployment, total_bytes=service.total_bytes, context_tokens=stated)
    limits = replace(limits, eager=service.eager, largest_capture=_largest_capture(placement, deployment))
    return service.draft.serving(limits) if service.draft else limits


def _largest_capture(placement: Placement, deployment: Deployment) -> int | None:
    """Return the largest batch captured where an engine sets it for a model: it then does not follow the concurrency.

    Source:
        vLLM 0.32.0 ``model_executor/models/config.py`` GptOssForCausalLMConfig.
    """
    family = placement.assignment.blueprint.recipe.family
    return GPT_OSS_CAPTURE if family == "gpt_oss" and deployment.engine == "vllm" else None


def model_context(assignment: Assignment) -> int:
    """Return the longest context the config states; 0 if it states none."""
    fields = assignment.blueprint.config.fields
    for scope in (fields.get("text_config"), fields.get("llm_config"), fields):
        found = scope.get("max_position_embeddings") if isinstance(scope, dict) else None
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return 0


def _paged(limits: Serving, cache: Cache | None) -> Serving:
    """Return what is served with the pages that block tables depend on."""
    if not isinstance(cache, VllmCache) or not cache.groups:
        return limits
    return replace(limits, page_tokens=cache.block_tokens, cache_groups=len(cache.groups))
