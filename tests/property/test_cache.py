"""Laws of a pool of blocks, over models of every kind of cache."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tonnage.memory.cache import Attention, ConvRun, Indexer, Kept, Latent, LayerCache, State
from tonnage.memory.cache_vllm import VllmCache, vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.memory.cache_vllm_pages import layer_pages

sizes = st.sampled_from((64, 128, 256))
heads = st.sampled_from((8, 16, 32))
full = st.builds(lambda h, d: Attention(kv_heads=h, head_size=d, value_size=d), heads, sizes)
windows = st.builds(
    lambda h, d, w: Attention(kv_heads=h, head_size=d, value_size=d, window_tokens=w),
    heads,
    sizes,
    st.integers(1, 5000),
)
chunks = st.builds(
    lambda h, d, c: Attention(kv_heads=h, head_size=d, value_size=d, chunk_tokens=c), heads, sizes, st.integers(1, 9000)
)
states = st.builds(
    lambda h, d: State(
        kind="gdn",
        heads=h,
        key_size=d,
        value_size=d,
        conv=(ConvRun(units=h, unit_size=3 * d),),
        conv_kernel=4,
        dtype="F32",
    ),
    heads,
    sizes,
)
latents = st.just(Latent(rank=512, rope_size=64))
options = st.builds(
    VllmCacheOptions,
    tp_size=st.sampled_from((1, 2, 4, 8)),
    kv_dtype=st.sampled_from(("auto", "fp8", "int8_per_token_head")),
    draft_tokens=st.integers(0, 4),
    prefix_caching=st.booleans(),
    max_batched_tokens=st.sampled_from((512, 8192)),
)


def stacked(kinds: list[tuple[Kept, int]]) -> tuple[LayerCache, ...]:
    caches, start = [], 0
    for kept, count in kinds:
        caches.append(LayerCache(kept=kept, layers=tuple(range(start, start + count))))
        start += count
    return tuple(caches)


def several(*kinds: st.SearchStrategy[Kept]) -> st.SearchStrategy[tuple[LayerCache, ...]]:
    return st.tuples(*(st.tuples(kind, st.integers(1, 30)) for kind in kinds)).map(lambda found: stacked(list(found)))


models = st.one_of(
    several(full),
    several(latents),
    several(full, windows),
    several(full, windows, chunks),
    several(states, full),
    several(states, latents),
    several(states),
)
pools = st.builds(vllm_cache, models, options)
contexts = st.integers(1, 1 << 18)


@given(pool=pools)
def test_every_page_is_in_one_group(pool: VllmCache) -> None:
    grouped = sorted((entry.draft, entry.layer) for group in pool.groups for entry in group.pages)
    assert grouped == sorted((entry.draft, entry.layer) for entry in layer_pages(pool.caches, pool.options))


@given(pool=pools, context=contexts, concurrency=st.integers(1, 64))
def test_what_is_needed_is_enough_and_no_block_less(pool: VllmCache, context: int, concurrency: int) -> None:
    needed = pool.needed_bytes(concurrency, context)
    assert pool.concurrency(needed, context) == concurrency
    assert pool.concurrency(needed - 1, context) < concurrency
    assert pool.allocated_bytes(pool.blocks(needed)) == needed


@given(pool=pools, budget=st.integers(0, 1 << 38), concurrency=st.integers(1, 8))
def test_longest_context_is_the_last_that_fits(pool: VllmCache, budget: int, concurrency: int) -> None:
    longest = pool.longest_context(budget, concurrency=concurrency, most_tokens=1 << 20)
    if longest:
        assert pool.needed_bytes(concurrency, longest) <= budget
    if longest < 1 << 20:
        assert pool.needed_bytes(concurrency, longest + 1) > budget


@given(pool=pools, context=contexts, more=st.integers(1, 1 << 18))
def test_longer_requests_never_hold_fewer_blocks(pool: VllmCache, context: int, more: int) -> None:
    assert pool.request_blocks(context) <= pool.request_blocks(context + more)


@given(pool=pools, budget=st.integers(0, 1 << 38), more=st.integers(0, 1 << 34), context=contexts)
def test_capacity_never_falls_as_the_budget_grows(pool: VllmCache, budget: int, more: int, context: int) -> None:
    assert pool.capacity_tokens(budget, context) <= pool.capacity_tokens(budget + more, context)


@given(pool=pools, context=st.integers(1 << 15, 1 << 20))
def test_bytes_per_token_are_those_of_a_long_request(pool: VllmCache, context: int) -> None:
    span = 1 << 22
    grown = pool.request_bytes(context + span) - pool.request_bytes(context)
    slack = pool.bytes_per_block * len(pool.groups)
    assert grown - slack <= pool.bytes_per_token * span <= grown + slack + span


@given(caches=models, asked=options, cut=st.integers(1, 89))
def test_stages_together_hold_what_one_rank_would(
    caches: tuple[LayerCache, ...], asked: VllmCacheOptions, cut: int
) -> None:
    whole = vllm_cache(caches, asked)
    parts = [vllm_cache(caches, asked, layers=span) for span in (range(cut), range(cut, 90))]
    for group in whole.groups:
        assert sum(group.nbytes(part.layers) for part in parts) == group.nbytes(None)
    assert whole.bytes_per_block <= sum(part.bytes_per_block for part in parts)
    assert whole.state_bytes_per_slot == sum(part.state_bytes_per_slot for part in parts)


@given(caches=models, asked=options)
def test_keys_are_the_same_bytes_however_many_ranks_share_tokens(
    caches: tuple[LayerCache, ...], asked: VllmCacheOptions
) -> None:
    if any(isinstance(c.kept, Attention) and c.kept.window_tokens for c in caches):
        return
    alone = vllm_cache(caches, asked)
    shared = vllm_cache(caches, replace(asked, dcp_size=4))
    assert shared.bytes_per_block == alone.bytes_per_block
    assert alone.bytes_per_token <= 4 * shared.bytes_per_token <= alone.bytes_per_token + 3


@given(count=st.integers(1, 40), size=sizes)
def test_index_keys_add_to_latents(count: int, size: int) -> None:
    latent = LayerCache(kept=Latent(rank=512, rope_size=64, sparse=True), layers=tuple(range(count)))
    indexer = LayerCache(kept=Indexer(head_size=size), layers=tuple(range(count)))
    alone, both = vllm_cache((latent,)), vllm_cache((latent, indexer))
    assert both.bytes_per_token == alone.bytes_per_token + count * (size + size // 128 * 4)
