"""What vLLM allocates for one layer's cache on one rank: blocks of tokens, pages of bytes.

Source:
    vLLM 0.32.0 ``v1/kv_cache_interface.py`` (specs), ``platforms/interface.py`` (_align_hybrid_block_size),
    ``model_executor/layers/mamba/mamba_utils.py`` (shapes and dtypes of states), ``models/deepseek_v4``;
    ``docs/k31-ranks.md`` for index keys next to states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache import Attention, Compressed, Indexer, Latent, LayerCache, State, StateKind
from tonnage.memory.cache_dtypes import (
    NVFP4,
    attention_bytes,
    dtype_bytes,
    index_key_bytes,
    latent_bytes,
    latent_elements_bytes,
    record_bytes,
    scaled_fp8_bytes,
)
from tonnage.memory.cache_ranks import local_conv_channels, local_kv_heads, local_state_elements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tonnage.memory.cache_vllm_options import VllmCacheOptions

PageKind = Literal["full", "latent", "index", "sliding", "sliding_latent", "chunked", "state"]
GROWING: frozenset[PageKind] = frozenset({"full", "latent", "index"})
"""Kinds that keep every token of a request."""

DEFAULT_BLOCK_TOKENS = 16
LATENT_BLOCK_TOKENS = 64
COMPRESSED_BLOCK_TOKENS = 256
HYBRID_LATENT_KERNEL_BLOCK_TOKENS = 128
_WINDOW_BLOCK_TOKENS = 64
_COMPRESSOR_BLOCK_TOKENS = {4: 4, 128: 8}
_PACKED_ALIGNMENT = 576
_PLAIN_ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What one cache of one layer takes of one block.

    Attributes:
        kind: Which tokens it keeps.
        layout: What must be equal for two pages to be alike beyond their sizes, such as heads and element bytes.
        block_tokens: Tokens of a block; of a state, without meaning.
        content_bytes: Bytes of one stored record; of a state, all of it.
        tokens_per_record: Tokens one record stands for.
        alignment: The page is rounded up to this.
        padded_bytes: The page is padded to this; 0 for no more than its own bytes.
        window_tokens: Of a sliding page.
        chunk_tokens: Of a chunked page.
        sharded: Ranks of decode context parallelism share the tokens.
        state: Which recurrence a state is of.
    """

    kind: PageKind
    layout: tuple[int | str, ...]
    block_tokens: int
    content_bytes: int
    tokens_per_record: int = 1
    alignment: int = 1
    padded_bytes: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0
    sharded: bool = True
    state: StateKind | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of a page before padding."""
        if self.kind == "state":
            return self.content_bytes
        return self.block_tokens // self.tokens_per_record * self.content_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return max(self.padded_bytes, _round_up(self.own_bytes, self.alignment))

    def blocks(self, context_tokens: int, options: VllmCacheOptions) -> int:
        """Return the blocks one request of this length holds, at most."""
        if self.state is not None:
            return options.state_slots(self.state)
        if self.kind in GROWING:
            return _ceil(context_tokens, self.block_tokens * (options.dcp_size if self.sharded else 1))
        if self.kind == "chunked":
            return _ceil(min(self.chunk_tokens + options.in_flight_tokens, context_tokens), self.block_tokens)
        kept = self.window_tokens - 1 + options.retained_tokens + options.in_flight_tokens
        return _ceil(min(kept, context_tokens), self.block_tokens) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPage:
    """One page of one layer."""

    layer: int
    page: Page
    draft: bool = False


def layer_pages(caches: Sequence[LayerCache], options: VllmCacheOptions) -> tuple[LayerPage, ...]:
    """Return every page of every layer in the order layers are built, a draft's after the target's.

    Raises:
        PlacementError: Heads or channels do not divide by the ranks.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    block = block_tokens_of(caches, options)
    padded = _hybrid_page_bytes(caches, block, options)
    key = joined_key_bytes(caches, options)
    pages = [
        LayerPage(layer=layer, page=page, draft=cache.draft)
        for cache in caches
        for page in _pages(cache, block, padded, 0 if cache.draft else key, options)
        for layer in cache.layers
    ]
    return tuple(sorted(pages, key=lambda page: (page.draft, page.layer)))


def block_tokens_of(caches: Sequence[LayerCache], options: VllmCacheOptions) -> int:
    """Return the tokens of an attention block: as asked, the default, or what a recurrent state needs.

    Next to a recurrent state a block is raised until the page of one attention layer holds the state of one layer.
    """
    kept = [cache.kept for cache in caches if not cache.draft] or [cache.kept for cache in caches]
    if options.block_tokens is not None:
        block = options.block_tokens
    elif any(isinstance(k, Compressed) for k in kept):
        block = COMPRESSED_BLOCK_TOKENS
    elif any(isinstance(k, Latent) for k in kept):
        block = LATENT_BLOCK_TOKENS
    else:
        block = DEFAULT_BLOCK_TOKENS
    states = [k for k in kept if isinstance(k, State)]
    per_token = _hybrid_token_bytes(caches, options)
    if not states or not per_token:
        return block
    state_bytes = max(_state_bytes(state, options) for state in states)
    unit = max(options.kernel_block_tokens, options.block_tokens or options.kernel_block_tokens)
    if any(isinstance(k, Latent) for k in kept):
        unit = max(unit, HYBRID_LATENT_KERNEL_BLOCK_TOKENS)
    raised = unit * _ceil(state_bytes, unit * per_token)
    return max(block if options.block_tokens else 0, _round_up(raised, options.kernel_block_tokens))


def joined_key_bytes(caches: Sequence[LayerCache], options: VllmCacheOptions) -> int:
    """Return the bytes of the index key in every token of a latent's page; 0 where keys have pages of their own.

    Next to recurrent states, latents whose layers all have an indexer keep its keys in their own page. No released
    source shows such a model: the published capacity of one gives the rule (``docs/k31-ranks.md``).
    """
    kept = [cache for cache in caches if not cache.draft]
    keys = {index_key_bytes(c.kept, options.model_dtype) for c in kept if isinstance(c.kept, Indexer)}
    chosen = {layer for c in kept if isinstance(c.kept, Indexer) for layer in c.layers}
    latents = {layer for c in kept if isinstance(c.kept, Latent) and c.kept.sparse for layer in c.layers}
    hybrid = any(isinstance(c.kept, State) for c in kept)
    return keys.pop() if hybrid and len(keys) == 1 and chosen == latents else 0


def state_bytes_per_slot(caches: Sequence[LayerCache], options: VllmCacheOptions) -> int:
    """Return the bytes of one slot of every recurrent state on one rank, without padding."""
    return sum(_state_bytes(c.kept, options) * len(c.layers) for c in caches if isinstance(c.kept, State))


def full_page(page: Page, block_tokens: int) -> Page:
    """Return a page that keeps all tokens in place of a window or chunk, in blocks of this size."""
    kind: PageKind = "latent" if page.kind == "sliding_latent" else "full"
    return replace(page, kind=kind, block_tokens=block_tokens, window_tokens=0, chunk_tokens=0)


# --- one layer -------------------------------------------------------------------------------------------------------


def _pages(cache: LayerCache, block: int, padded: int, key: int, options: VllmCacheOptions) -> Iterator[Page]:
    kv_dtype = options.draft_kv_dtype if cache.draft and options.draft_kv_dtype else options.kv_dtype
    sharded = not (cache.draft and options.draft_replicated)
    match cache.kept:
        case Attention() as kept:
            yield _attention_page(kept, block, kv_dtype, sharded=sharded, options=options)
        case Latent() as kept:
            content = latent_bytes(kept, kv_dtype, options.model_dtype) + key
            yield Page(
                kind="sliding_latent" if kept.window_tokens else "latent",
                layout=("latent", kept.rank + kept.rope_size, kv_dtype, key),
                block_tokens=block,
                content_bytes=content,
                window_tokens=kept.window_tokens,
                sharded=sharded,
            )
        case Indexer() as kept if not key:
            content = index_key_bytes(kept, options.model_dtype)
            yield Page(
                kind="index", layout=("index", content), block_tokens=block, content_bytes=content, sharded=sharded
            )
        case Compressed() as kept:
            yield from _compressed_pages(kept, block, kv_dtype, options)
        case State() as kept:
            yield Page(
                kind="state",
                layout=("state",),
                state=kept.kind,
                block_tokens=block,
                content_bytes=_state_bytes(kept, options),
                padded_bytes=padded,
                sharded=False,
            )


def _attention_page(kept: Attention, block: int, kv_dtype: str, *, sharded: bool, options: VllmCacheOptions) -> Page:
    heads = local_kv_heads(kept, options.tp_size)
    if kept.window_tokens:  # a window's block is one the kernels take unsplit
        kernel = options.kernel_block_tokens
        block = max(kernel, block // kernel * kernel)
    return Page(
        kind="sliding" if kept.window_tokens else "chunked" if kept.chunk_tokens else "full",
        layout=(heads * (2 if kv_dtype in NVFP4 else 1), kept.head_size, kept.value_size, kv_dtype),
        block_tokens=block,
        content_bytes=heads * attention_bytes(kept, kv_dtype, options.model_dtype),
        window_tokens=kept.window_tokens,
        chunk_tokens=kept.chunk_tokens,
        sharded=sharded,
    )


def _compressed_pages(kept: Compressed, block: int, kv_dtype: str, options: VllmCacheOptions) -> Iterator[Page]:
    """Yield the sliding window, the compressed records, the index keys, and the state of each compressor."""
    record = record_bytes(kept, kv_dtype, options.model_dtype)
    alignment = _PACKED_ALIGNMENT if kv_dtype in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla") else _PLAIN_ALIGNMENT

    def page(kind: PageKind, what: str, tokens: int, content: int, *, ratio: int = 1, window: int = 0) -> Page:
        return Page(
            kind=kind, layout=(what,), block_tokens=tokens, content_bytes=content, tokens_per_record=ratio,
            alignment=alignment, window_tokens=window,
        )  # fmt: skip

    yield page("sliding_latent", "window", _WINDOW_BLOCK_TOKENS, record, window=kept.window_tokens)
    if not kept.ratio:
        return
    state_tokens = _COMPRESSOR_BLOCK_TOKENS.get(kept.ratio)
    if state_tokens is None:
        raise PlacementError(
            Problem(where="cache", what="compression ratio without a rule", expected="4 or 128", found=str(kept.ratio))
        )

    def compressor(elements: int) -> Page:
        content = 2 * kept.overlap * elements * dtype_bytes("F32")
        return page("sliding_latent", f"compressor {elements}", state_tokens, content, window=kept.overlap * kept.ratio)

    if kept.index_size:
        yield page("index", "index", block, scaled_fp8_bytes(kept.index_size), ratio=kept.ratio)
        yield compressor(kept.index_size)
    yield page("latent", "compressed", block, record, ratio=kept.ratio)
    yield compressor(kept.head_size)


# --- states ----------------------------------------------------------------------------------------------------------


def _state_bytes(kept: State, options: VllmCacheOptions) -> int:
    """Return the bytes of one slot of one layer on one rank."""
    conv_dtype = options.conv_dtype or options.model_dtype
    default = "F32" if kept.kind == "kda" else conv_dtype
    state_dtype = options.state_dtype or kept.dtype or default
    tokens = kept.conv_kernel - 1 + (options.draft_tokens if kept.kind != "mamba1" else 0)
    channels = local_conv_channels(kept, options.tp_size)
    state = local_state_elements(kept, options.tp_size) * dtype_bytes(state_dtype)
    return state + (channels * tokens * dtype_bytes(conv_dtype) if kept.conv else 0)


def _hybrid_token_bytes(caches: Sequence[LayerCache], options: VllmCacheOptions) -> int:
    """Return the bytes of one token in the widest attention layer of the target; 0 without one."""
    sizes = [0]
    key = joined_key_bytes(caches, options)
    for cache in caches:
        match cache.kept:
            case Attention() as kept if not cache.draft:
                sizes.append(
                    local_kv_heads(kept, options.tp_size) * attention_bytes(kept, options.kv_dtype, options.model_dtype)
                )
            case Latent() as kept if not cache.draft:
                record = latent_bytes if key else latent_elements_bytes
                sizes.append(record(kept, options.kv_dtype, options.model_dtype) + key)
    return max(sizes)


def _hybrid_page_bytes(caches: Sequence[LayerCache], block: int, options: VllmCacheOptions) -> int:
    """Return what the page of a recurrent state is padded to: the page of an attention layer."""
    return block * _hybrid_token_bytes(caches, options)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _round_up(value: int, multiple: int) -> int:
    return _ceil(value, multiple) * multiple
