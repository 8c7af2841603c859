"""What SGLang takes for one token and for one recurrent state on one rank.

Source:
    SGLang 0.5.23 ``model_executor/pool_configurator.py`` (cell sizes), ``mem_cache/kv_cache_configurator.py``
    (calculate_mla_kv_cache_dim), ``configs/mamba_utils.py`` (states), ``configs/model_config.py`` (get_num_kv_heads;
    get_hybrid_layer_ids counts every layer, those that read what earlier ones keep as well).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache import Attention, Compressed, Indexer, Latent, State
from tonnage.memory.cache_dtypes import (
    PLAIN_BYTES,
    dtype_bytes,
    index_key_bytes,
    latent_bytes,
    record_bytes,
    scaled_fp8_bytes,
)
from tonnage.memory.cache_ranks import local_conv_channels, local_kv_heads, local_state_elements
from tonnage.memory.cache_sglang_options import FP4

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tonnage.memory.cache import LayerCache
    from tonnage.memory.cache_sglang_options import SglangCacheOptions

_RINGS = {4: (8, 16), 128: (128, 256)}
"""Rows of a compressor's ring by ratio, without and with a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCells:
    """Bytes of one token on one rank, by what grows with it.

    Attributes:
        full_bytes: Layers that keep every token, index keys with them.
        sliding_bytes: Layers with a pool of their own; they keep the last tokens only.
        window_tokens: Their window.
        compressed_bytes: DeepSeek-V4's layers, for one token of the whole pool; a fraction.
        draft_bytes: What is set aside for a draft.
        draft_own_bytes: What the layers of the draft take.
        request_rows: Rows a request has of DeepSeek-V4's wide compressor states, which do not grow.
        request_row_bytes: Bytes of one, in all layers.
    """

    full_bytes: int = 0
    sliding_bytes: int = 0
    window_tokens: int = 0
    compressed_bytes: Fraction = Fraction(0)
    draft_bytes: int = 0
    draft_own_bytes: int = 0
    request_rows: int = 0
    request_row_bytes: int = 0


def page_tokens_of(caches: Iterable[LayerCache], options: SglangCacheOptions) -> int:
    """Return the tokens of a page: as asked, or what the model's kernels need; backends may ask for more."""
    if options.page_tokens is not None:
        return options.page_tokens
    kept = [cache.kept for cache in caches if not cache.draft]
    if any(isinstance(k, Compressed) for k in kept):
        return 256
    if any(isinstance(k, Latent) and k.sparse for k in kept):
        return 64 * options.index_pool_tokens
    return 128 if any(isinstance(k, Indexer) for k in kept) else 1


def sliding_permille_of(caches: Iterable[LayerCache], options: SglangCacheOptions) -> int:
    """Return the tokens of the sliding pool to those of the other, in thousandths."""
    if options.sliding_permille is not None:
        return options.sliding_permille
    return 100 if any(isinstance(cache.kept, Compressed) for cache in caches) else 800


def sglang_cells(caches: Sequence[LayerCache], options: SglangCacheOptions) -> SglangCells:
    """Return what one token takes on one rank that holds these layers.

    Raises:
        PlacementError: A compression ratio has no rule.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    target = [cache for cache in caches if not cache.draft]
    draft = [cache for cache in caches if cache.draft]
    drafted = bool(draft or options.draft_tokens)
    sliding = [cache for cache in target if options.hybrid_sliding and _window(cache)]
    full = [cache for cache in target if cache not in sliding]
    tokens, index = sum(_tokens_bytes(cache, options) for cache in full), _index_bytes(full, options)
    if options.kv_dtype in FP4:
        heads = (_attention_elements(c.kept, options) for c in full if isinstance(c.kept, Attention))
        tokens += max(heads, default=0)
    sliding_bytes = sum(_tokens_bytes(cache, options) for cache in sliding)
    own = sum(_tokens_bytes(cache, options) for cache in draft) * options.dcp_size + _index_bytes(draft, options)
    like = full if tokens else sliding
    charged = ((tokens or sliding_bytes) * options.dcp_size + index) * _depth(draft) // max(_depth(like), 1)
    wide = [(kept, len(c.layers)) for c in target if isinstance(kept := c.kept, Compressed) and _is_wide(kept)]
    return SglangCells(
        full_bytes=tokens + index,
        sliding_bytes=sliding_bytes,
        window_tokens=max((_window(cache) for cache in sliding), default=0),
        compressed_bytes=_compressed_bytes(target, options, drafted=drafted),
        draft_bytes=own if options.draft_charge == "own" else charged,
        draft_own_bytes=own,
        request_rows=max((_ring(kept, drafted=drafted) for kept, _ in wide), default=0),
        request_row_bytes=sum(_compressor_bytes(kept) * layers for kept, layers in wide),
    )


# --- tokens ----------------------------------------------------------------------------------------------------------


def _window(cache: LayerCache) -> int:
    kept = cache.kept
    return kept.window_tokens or kept.chunk_tokens if isinstance(kept, Attention) else 0


def _depth(caches: Iterable[LayerCache]) -> int:
    return sum(len(cache.layers) for cache in caches if isinstance(cache.kept, Attention | Latent))


def _tokens_bytes(cache: LayerCache, options: SglangCacheOptions) -> int:
    """Return the bytes of one token in all layers of a cache, without index keys."""
    kv_dtype = options.draft_kv_dtype if cache.draft and options.draft_kv_dtype else options.kv_dtype
    match cache.kept:
        case Attention() as kept:
            nbytes = _elements_bytes(_attention_elements(kept, options), kv_dtype, options.model_dtype)
        case Latent() as kept if kept.sparse and kv_dtype == "fp8_e4m3" and not options.raw_records:
            nbytes = latent_bytes(kept, "fp8_ds_mla", options.model_dtype)
        case Latent() as kept:
            nbytes = _elements_bytes(kept.rank + kept.rope_size, kv_dtype, options.model_dtype)
        case _:
            nbytes = 0
    return nbytes * len(cache.layers)


def _attention_elements(kept: Attention, options: SglangCacheOptions) -> int:
    heads = local_kv_heads(kept, max(1, options.tp_size // options.dcp_size))
    return heads * (kept.head_size + kept.value_size)


def _elements_bytes(elements: int, kv_dtype: str, model_dtype: str) -> int:
    if kv_dtype == "auto":
        return elements * dtype_bytes(model_dtype)
    if kv_dtype in FP4:
        return elements // 2 + elements // 16
    if kv_dtype == "mxfp8":
        return elements + elements // 32
    return elements * PLAIN_BYTES[kv_dtype]


def _index_bytes(caches: Sequence[LayerCache], options: SglangCacheOptions) -> int:
    """Return the bytes of one token's index keys; every rank that shares the tokens keeps all of them."""
    nbytes = 0
    for cache in caches:
        if isinstance(cache.kept, Indexer):
            sparse = [c for c in caches if isinstance(c.kept, Latent) and c.kept.sparse]
            layers = _depth(sparse) if options.index_every_layer and sparse else len(cache.layers)
            nbytes += index_key_bytes(cache.kept, options.model_dtype) * layers
    return -(-nbytes * options.dcp_size // options.index_pool_tokens)


# --- DeepSeek-V4 -----------------------------------------------------------------------------------------------------


def _compressed_bytes(caches: Sequence[LayerCache], options: SglangCacheOptions, *, drafted: bool) -> Fraction:
    """Return what one token of the whole pool takes: windows in their ratio, records, index keys, rings of states.

    A draft is set aside for as one layer more.
    """
    sliding = Fraction(sliding_permille_of(caches, options), 1000)
    total, layers = Fraction(0), 0
    for cache in caches:
        if not isinstance(kept := cache.kept, Compressed):
            continue
        record = record_bytes(kept, "fp8", options.model_dtype)
        nbytes = sliding * record
        if kept.ratio:
            nbytes += Fraction(record + (scaled_fp8_bytes(kept.index_size) if kept.index_size else 0), kept.ratio)
            if not _is_wide(kept):
                nbytes += sliding * Fraction(_compressor_bytes(kept) * _ring(kept, drafted=drafted), kept.window_tokens)
        total += nbytes * len(cache.layers)
        layers += len(cache.layers)
    return total * Fraction(layers + 1, layers) if drafted and layers else total


def _is_wide(kept: Compressed) -> bool:
    """Whether a compressor's groups do not overlap: its states then belong to requests, not to the sliding pool."""
    return bool(kept.ratio) and kept.overlap == 1


def _ring(kept: Compressed, *, drafted: bool) -> int:
    if kept.ratio not in _RINGS:
        raise PlacementError(
            Problem(where="cache", what="compression ratio without a rule", expected="4 or 128", found=str(kept.ratio))
        )
    return _RINGS[kept.ratio][drafted]


def _compressor_bytes(kept: Compressed) -> int:
    return 2 * kept.overlap * (kept.head_size + kept.index_size) * dtype_bytes("F32")


# --- states ----------------------------------------------------------------------------------------------------------


def state_part_bytes(caches: Iterable[LayerCache], options: SglangCacheOptions) -> int:
    """Return the bytes of the recurrent part of one slot in all layers of a rank."""
    return sum(
        local_state_elements(c.kept, options.tp_size) * dtype_bytes(options.state_dtype or c.kept.dtype or "F32")
        * len(c.layers)
        for c in caches
        if isinstance(c.kept, State)
    )  # fmt: skip


def conv_columns_bytes(caches: Iterable[LayerCache], options: SglangCacheOptions, *, columns: int) -> int:
    """Return the bytes of the last inputs of all convolutions of a rank: the kernel less one, and so many more."""
    return sum(
        local_conv_channels(c.kept, options.tp_size) * (c.kept.conv_kernel - 1 + columns)
        * dtype_bytes(options.conv_dtype) * len(c.layers)
        for c in caches
        if isinstance(c.kept, State) and c.kept.conv
    )  # fmt: skip
