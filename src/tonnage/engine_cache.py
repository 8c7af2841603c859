"""The cache of one pipeline stage by the rules of the engine that serves it, from a placement and a profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tonnage.draft import BLOCK_METHODS
from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache import Attention
from tonnage.memory.cache_dtypes import engine_kv_dtype
from tonnage.memory.cache_exllamav3 import Exllamav3CacheOptions, cache_bits, exllamav3_cache
from tonnage.memory.cache_sglang import sglang_cache
from tonnage.memory.cache_sglang_options import SglangCacheOptions, sglang_kv_dtype, splits_sliding
from tonnage.memory.cache_vllm import packs_tuples, token_count, vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions

if TYPE_CHECKING:
    from tonnage.draft import Draft
    from tonnage.memory.cache import LayerCache
    from tonnage.memory.workspace_shape import Serving
    from tonnage.placement import Placement
    from tonnage.profile import Profile


class Cache(Protocol):
    """An engine's cache on one rank; the same questions whatever the engine."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token of a long request takes."""

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of the recurrent states of one request."""

    def needed_bytes(self, concurrency: int, context_tokens: int) -> int:
        """Return what so many requests of this length need."""

    def capacity_tokens(self, budget_bytes: int, context_tokens: int) -> int:
        """Return the tokens a budget holds."""

    def concurrency(self, budget_bytes: int, context_tokens: int) -> int:
        """Return how many requests of this length a budget holds."""

    def longest_context(self, budget_bytes: int, *, concurrency: int = 1, most_tokens: int = ...) -> int:
        """Return the longest context at which so many requests fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """What a cache depends on.

    Attributes:
        placement: Of the target's weights.
        profile: KV dtype, and the concurrency where it is stated.
        limits: What the engine is told.
        draft: What drafts tokens, if anything does.
        version: Of the engine; empty if it is not known.
        pp_rank: The pipeline stage.
        block_tokens: Tokens of a block of vLLM, where they are not those of a GPU.
    """

    placement: Placement
    profile: Profile
    limits: Serving
    draft: Draft | None = None
    version: str = ""
    pp_rank: int = 0
    block_tokens: int | None = None

    @property
    def kv_dtype(self) -> str:
        """As it was asked for."""
        return self.profile.kv_dtype or "auto"

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What the layers of the target keep, and those of the draft."""
        kept = self.placement.assignment.blueprint.caches
        return self.draft.with_caches(kept) if self.draft else kept

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last, which runs the draft."""
        return self.pp_rank == self.placement.topology.pp - 1

    @property
    def caches_here(self) -> tuple[LayerCache, ...]:
        """The same without the draft's on stages that do not run it."""
        return tuple(cache for cache in self.caches if self.is_last or not cache.draft)

    @property
    def layers(self) -> range | None:
        """Layers of the stage; ``None`` for all."""
        return self.placement.stages[self.pp_rank] if self.placement.topology.pp > 1 else None


def engine_cache(request: CacheRequest) -> Cache | None:
    """Return the cache of the ranks of one pipeline stage; ``None`` for a model that keeps nothing.

    Raises:
        PlacementError: The cache cannot be shared so.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    if not request.caches:
        return None
    match request.placement.engine.name:
        case "exllamav3":
            return _exllamav3(request)
        case "sglang":
            return _sglang(request)
        case _:
            return _vllm(request)


def _exllamav3(request: CacheRequest) -> Cache:
    k_bits, v_bits = cache_bits(request.kv_dtype)
    options = Exllamav3CacheOptions(
        tp_size=request.placement.topology.tp,
        k_bits=k_bits,
        v_bits=v_bits,
        slots=request.limits.max_seqs,
        draft_tokens=request.limits.draft_tokens,
    )
    return exllamav3_cache(request.caches_here, options, layers=request.layers)


def _sglang(request: CacheRequest) -> Cache:
    """Return SGLang's pools: with a stated concurrency it is told the slots of states, else it splits by its ratio."""
    blueprint, topology, draft = request.placement.assignment.blueprint, request.placement.topology, request.draft
    options = SglangCacheOptions(
        tp_size=topology.tp,
        dcp_size=topology.dcp,
        kv_dtype=sglang_kv_dtype(request.kv_dtype, stated=blueprint.kv_dtype),
        hybrid_sliding=splits_sliding(blueprint.config.architectures),
        draft_tokens=request.limits.draft_tokens,
        draft_charge="own" if draft and draft.method in (*BLOCK_METHODS, "dspark") else "layers",
        max_running=request.limits.max_seqs,
    )
    cache = sglang_cache(request.caches_here, options, layers=request.layers)
    slots = cache.state_slots_per_request * (request.profile.concurrency or 0)
    if not slots:
        return cache
    return sglang_cache(request.caches_here, replace(options, max_state_slots=slots), layers=request.layers)


def _check_context_parallel(request: CacheRequest) -> None:
    """Refuse to share the tokens of keys and values among ranks that hold different heads of them.

    Source:
        vLLM 0.32.0 ``config/model.py`` verify_with_parallel_config.
    """
    topology = request.placement.topology
    heads = [cache.kept.kv_heads for cache in request.caches if isinstance(cache.kept, Attention) and not cache.draft]
    if topology.dcp > 1 and heads and topology.dcp > topology.tp // max(heads):
        most = topology.tp // max(heads)
        expected = f"at most --tp by {max(heads)} KV heads, {most}" if most > 1 else "1: no KV head is held twice"
        raise PlacementError(
            Problem(
                where="--dcp", what="more ranks than hold the same keys", expected=expected, found=str(topology.dcp)
            )
        )


def _vllm(request: CacheRequest) -> Cache:
    """Return vLLM's pool of blocks, whose groups are those of all stages."""
    _check_context_parallel(request)
    topology, stated = request.placement.topology, request.placement.assignment.blueprint.kv_dtype
    options = VllmCacheOptions(
        tp_size=topology.tp,
        dcp_size=topology.dcp,
        kv_dtype=engine_kv_dtype(request.kv_dtype, request.caches, stated=stated),
        block_tokens=request.block_tokens,
        max_batched_tokens=request.limits.batched_tokens,
        concurrent_batches=topology.pp + 1,
        counts=token_count(request.version),
        tuple_packing=packs_tuples(request.version),
    )
    return vllm_cache(
        request.caches,
        request.draft.cache_options(options) if request.draft else options,
        layers=request.layers,
        holds_draft=request.is_last,
    )
