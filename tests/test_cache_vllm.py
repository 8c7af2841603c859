"""vLLM's cache: its own classes' figures, published vectors, groups, stages and refusals."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tonnage.api import read_config
from tonnage.errors import PlacementError, UnknownFormatError
from tonnage.memory.cache import Attention, Compressed, ConvRun, Indexer, Latent, LayerCache, State
from tonnage.memory.cache_dtypes import engine_kv_dtype
from tonnage.memory.cache_vllm import VllmCache, packs_tuples, token_count, vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.memory.cache_vllm_pages import layer_pages
from tonnage.recipes.blueprint import Blueprint, blueprint_of

DATA = Path(__file__).parent / "data"
GIB = 1 << 30
BUDGET = 40 * GIB
FIRST = json.loads((DATA / "vllm_kv_oracle.json").read_text())["rows"]
MORE = json.loads((DATA / "vllm_kv_rows.json").read_text())["rows"]
KINDS = {
    "full": "FullAttentionSpec",
    "latent": "MLAAttentionSpec",
    "index": "MLAAttentionSpec",
    "sliding": "SlidingWindowSpec",
    "sliding_latent": "SlidingWindowMLASpec",
    "chunked": "ChunkedLocalAttentionSpec",
    "state": "MambaSpec",
}
DENSE = Attention(kv_heads=8, head_size=128, value_size=128)
WINDOW = Attention(kv_heads=8, head_size=128, value_size=128, window_tokens=1024)
QWEN = State(
    kind="gdn",
    heads=48,
    key_size=128,
    value_size=128,
    conv=(ConvRun(units=16, unit_size=128), ConvRun(units=16, unit_size=128), ConvRun(units=48, unit_size=128)),
    conv_kernel=4,
    dtype="F32",
)
QWEN_FULL = Attention(kv_heads=4, head_size=256, value_size=256)
HYBRID = (
    LayerCache(kept=QWEN, layers=tuple(i for i in range(64) if i % 4 != 3)),
    LayerCache(kept=QWEN_FULL, layers=tuple(range(3, 64, 4))),
)


@lru_cache(maxsize=128)
def blueprint(config: str) -> Blueprint:
    return blueprint_of(read_config(DATA / "configs" / f"{config}.json"))


def layers(kept: Any, count: int, *, start: int = 0, draft: bool = False) -> LayerCache:
    return LayerCache(kept=kept, layers=tuple(range(start, start + count)), draft=draft)


def cache(*caches: LayerCache, **options: Any) -> VllmCache:
    return vllm_cache(caches, VllmCacheOptions(**options))


# --- vLLM's own classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FIRST, ids=lambda row: f"{row['config']}-tp{row['tp']}-{row['kv_dtype']}")
def test_first_rows_of_vllms_specs_are_equal(row: dict[str, Any]) -> None:
    model = blueprint(row["config"])
    options = VllmCacheOptions(
        tp_size=row["tp"],
        kv_dtype=row["kv_dtype"],
        block_tokens=16,
        kernel_block_tokens=row.get("kernel_block_tokens", 16),
        prefix_caching=False,
        max_batched_tokens=8192,
        concurrent_batches=1,
    )
    plan = vllm_cache(model.caches, options)
    pages = layer_pages(plan.caches, options)

    assert len(pages) == row["layers"]
    assert sum(entry.page.nbytes for entry in pages) == row["sum_page_bytes"]
    if "bytes_per_block" in row:
        blocks = plan.blocks(BUDGET)
        assert (plan.bytes_per_block, blocks) == (row["bytes_per_block"], row["num_blocks"])
        concurrency = Fraction(blocks, plan.request_blocks(row["max_model_len"]))
        assert abs(concurrency - Fraction(str(row["concurrency"]))) <= Fraction(1, 10_000)


@pytest.mark.parametrize(
    ("config", "rows"),
    [(name, list(rows)) for name, rows in groupby(MORE, key=lambda row: row["config"])],
    ids=[name for name, _ in groupby(MORE, key=lambda row: row["config"])],
)
def test_rows_of_vllms_classes_are_equal(config: str, rows: list[dict[str, Any]]) -> None:
    model = blueprint(config)
    for row in rows:
        asked = {"tp": 1, "dcp": 1, "kv_dtype": "auto", "block_tokens": 16, "kernel_block_tokens": 16, "context_tokens": 131072,
                 "prefix_caching": False, "draft_tokens": 0, "draft_layers": 0, "packed": False} | row  # fmt: skip
        caches = model.caches
        if asked["draft_layers"]:
            last = max((c for c in caches if isinstance(c.kept, Attention | Latent)), key=lambda c: c.layers[-1])
            caches = (*caches, layers(last.kept, asked["draft_layers"], draft=True))
        options = VllmCacheOptions(
            tp_size=asked["tp"],
            dcp_size=asked["dcp"],
            kv_dtype=model.kv_dtype if asked["kv_dtype"] == "auto" and model.kv_dtype else asked["kv_dtype"],
            block_tokens=asked["block_tokens"],
            kernel_block_tokens=asked["kernel_block_tokens"],
            draft_tokens=asked["draft_tokens"],
            prefix_caching=asked["prefix_caching"],
            max_batched_tokens=row["in_flight_tokens"],
            concurrent_batches=1,
            packed=asked["packed"],
        )
        context = asked["context_tokens"]
        plan = vllm_cache(caches, options)
        pages = Counter((KINDS[entry.page.kind], entry.page.nbytes) for entry in layer_pages(plan.caches, options))
        groups = sorted([len(g.pages), g.block_tokens * (g.pages[0].page.state is None)] for g in plan.groups)
        found = {
            "block_size": plan.block_tokens,
            "pages": sorted([count, *page] for page, count in pages.items()),
            "groups": groups,
            "bytes_per_block": plan.bytes_per_block,
            "num_blocks": plan.blocks(BUDGET),
            "tokens": plan.capacity_tokens(BUDGET, context),
            "request_blocks": plan.request_blocks(context),
            "needed_bytes": plan.request_bytes(context),
            "half_context": plan.longest_context(row["half_bytes"], most_tokens=context, null_block=False),
        }
        assert 0 <= found.pop("tokens") - row["tokens"] <= 1  # vLLM rounds a float down
        assert found == {key: row[key] for key in found}, {k: v for k, v in asked.items() if k not in found}


# --- Kimi K3 ---------------------------------------------------------------------------------------------------------


def test_kimi_k3_at_tp8_keeps_the_published_bytes() -> None:
    plan = vllm_cache(blueprint("moonshotai__Kimi-K3").caches, VllmCacheOptions(tp_size=8))
    assert plan.bytes_per_token == 27_648
    assert plan.block_tokens == 768
    assert plan.bytes_per_block == 21_233_664
    assert plan.state_bytes_per_slot == 56_171_520  # 69 x (12 x 128 x 128 x 4 + 3 x 4608 x 2)
    assert plan.state_slots_per_request == 2


def test_kimi_k3_in_fp8_keeps_half_per_token_and_twice_the_tokens_per_block() -> None:
    plan = vllm_cache(blueprint("moonshotai__Kimi-K3").caches, VllmCacheOptions(tp_size=8, kv_dtype="fp8"))
    assert (plan.bytes_per_token, plan.block_tokens, plan.bytes_per_block) == (13_824, 1536, 21_233_664)
    shared = vllm_cache(plan.caches, VllmCacheOptions(tp_size=8, dcp_size=8, kv_dtype="fp8"))
    assert shared.bytes_per_token == 13_824 // 8
    assert shared.state_bytes_per_slot == plan.state_bytes_per_slot


def test_kimi_k31_keeps_index_keys_in_the_pages_of_latents() -> None:
    plan = vllm_cache(blueprint("Kimi-K3.1-Pro").caches, VllmCacheOptions(tp_size=8))
    assert plan.joins_keys
    assert plan.bytes_per_token == 27_648 + 24 * 132
    assert plan.block_tokens == 640  # 5 x 128: 814,080 bytes of state / (128 x 1284)
    assert plan.bytes_per_block == 640 * 24 * (1152 + 132)
    assert [len(group.pages) for group in plan.groups] == [23, 23, 23, 24]
    assert plan.state_bytes_per_slot == 56_171_520


def test_kimi_k31_with_seven_draft_tokens_holds_the_published_tokens_in_248_blocks() -> None:
    options = VllmCacheOptions(tp_size=8, dcp_size=8, kv_dtype="fp8_ds_mla", draft_tokens=7)
    plan = vllm_cache(blueprint("Kimi-K3.1-Pro").caches, options)
    assert plan.block_tokens == 1152  # 9 x 128: 884,736 / (128 x 788)
    assert plan.bytes_per_block == 24 * 1152 * (656 + 132) == 21_786_624
    assert plan.state_slots_per_request == 1 + 7 + 1
    blocks = 139 + 4 * 3 * 9 + 1
    budget = plan.allocated_bytes(blocks)
    assert budget == 5_403_082_752
    assert plan.shared_capacity_tokens(budget, 4, 262_144) == 139 * 1152 * 8 == 1_281_024
    assert plan.shared_capacity_tokens(budget - 1, 4, 262_144) == 138 * 1152 * 8
    assert plan.shared_capacity_tokens(budget, 3, 262_144) == (139 + 27) * 1152 * 8
    assert plan.shared_capacity_tokens(budget, 10, 262_144) == 0


def test_keys_stay_in_pages_of_their_own_without_states_or_where_some_latents_have_none() -> None:
    latents = layers(Latent(rank=512, rope_size=64, sparse=True), 4)
    keys = layers(Indexer(head_size=128), 4)
    assert not cache(latents, keys).joins_keys
    some = cache(latents, layers(Indexer(head_size=128), 2), layers(QWEN, 4, start=4))
    assert not some.joins_keys
    assert {entry.page.kind for group in some.groups for entry in group.pages} == {"latent", "index", "state"}
    every = cache(latents, keys, layers(QWEN, 4, start=4))
    assert every.joins_keys
    assert {entry.page.kind for group in every.groups for entry in group.pages} == {"latent", "state"}


# --- worked vectors --------------------------------------------------------------------------------------------------

HYBRID_VECTORS = {
    "bf16 keys, f32 state": ({}, 784, 3_211_264),
    "fp8 keys": ({"kv_dtype": "fp8"}, 1568, 3_211_264),
    "kernels of 64 tokens": ({"kernel_block_tokens": 64}, 832, 3_407_872),
    "bf16 state, kernels of 64 tokens": ({"kernel_block_tokens": 64, "state_dtype": "BF16"}, 448, 1_835_008),
    "three draft tokens": ({"draft_tokens": 3}, 800, 3_276_800),
}


@pytest.mark.parametrize(("options", "block", "page"), HYBRID_VECTORS.values(), ids=HYBRID_VECTORS)
def test_block_of_a_hybrid_holds_the_state_of_a_layer(options: dict[str, Any], block: int, page: int) -> None:
    plan = cache(*HYBRID, **options)
    assert plan.block_tokens == block
    assert plan.bytes_per_block == 16 * page


def test_request_of_a_hybrid_takes_blocks_of_every_group() -> None:
    plan = cache(*HYBRID)
    assert plan.request_blocks(262_144) == 335 + 3 * 2
    assert plan.request_bytes(262_144) == 341 * 51_380_224


def test_state_without_own_dtype_is_of_the_models() -> None:
    state = State(
        kind="gdn", heads=32, key_size=128, value_size=128, conv=(ConvRun(units=64, unit_size=128),), conv_kernel=4
    )
    full = Attention(kv_heads=2, head_size=256, value_size=256)
    plan = cache(layers(state, 36), layers(full, 12, start=36))
    assert plan.state_bytes_per_slot == 36 * 1_097_728
    assert plan.block_tokens == 544


def test_kda_state_is_f32_unless_asked_otherwise() -> None:
    state = State(kind="kda", heads=8, key_size=128, value_size=128)
    assert cache(layers(state, 1)).state_bytes_per_slot == 8 * 128 * 128 * 4
    assert cache(layers(state, 1), state_dtype="BF16").state_bytes_per_slot == 8 * 128 * 128 * 2


def test_groups_of_mamba_are_held_once_per_rank_where_they_do_not_divide() -> None:
    runs = (ConvRun(units=64, unit_size=64), ConvRun(units=2, unit_size=128, replicas=True))
    state = State(kind="mamba2", heads=64, key_size=128, value_size=64, conv=runs, conv_kernel=4, dtype="F32")
    per_rank = 8 * 128 * 64 * 4 + (8 * 64 + 128) * 3 * 2
    assert cache(layers(state, 1), tp_size=8).state_bytes_per_slot == per_rank


def test_sparse_latents_and_their_index_keys_are_one_group() -> None:
    plan = cache(
        layers(Latent(rank=512, rope_size=64, sparse=True), 61),
        layers(Indexer(head_size=128), 61),
        kv_dtype="fp8_ds_mla",
    )
    assert plan.bytes_per_token == 61 * (656 + 132) == 48_068
    assert plan.block_tokens == 64


def test_two_kv_heads_at_tp8_are_held_by_every_rank() -> None:
    assert cache(layers(Attention(kv_heads=2, head_size=64, value_size=64), 24), tp_size=8).bytes_per_token == 24 * 256
    assert cache(layers(Attention(kv_heads=2, head_size=64, value_size=64), 24)).bytes_per_block * 1280 == 251_658_240


# --- groups ----------------------------------------------------------------------------------------------------------


def test_windows_are_grouped_by_the_rarer_kind() -> None:
    plan = cache(layers(WINDOW, 52), layers(DENSE, 10, start=52))
    assert sorted(len(group.pages) for group in plan.groups) == [8, 8, 9, 9, 9, 9, 10]
    assert plan.bytes_per_block == 10 * 65_536


def test_kinds_nearly_as_frequent_are_one_group_each() -> None:
    plan = cache(layers(WINDOW, 12), layers(DENSE, 13, start=12))
    assert sorted(len(group.pages) for group in plan.groups) == [12, 13]
    slackless = cache(layers(WINDOW, 12), layers(DENSE, 13, start=12), group_slack_permille=1000)
    assert sorted(len(group.pages) for group in slackless.groups) == [6, 7, 12]


def test_page_that_does_not_divide_is_padded() -> None:
    odd = Attention(kv_heads=8, head_size=192, value_size=128)
    plan = cache(layers(DENSE, 4), layers(odd, 4, start=4), layers(WINDOW, 4, start=8))
    assert {entry.page.nbytes for group in plan.groups for entry in group.pages} == {8 * 320 * 2 * 16}


def test_latent_next_to_a_window_of_another_size_keeps_the_window_whole() -> None:
    plan = cache(layers(Latent(rank=512, rope_size=64), 6), layers(WINDOW, 2, draft=True))
    assert len(plan.groups) == 1
    assert plan.request_blocks(100_000) == -(-100_000 // 64)


def test_latent_page_that_does_not_fit_a_state_is_refused() -> None:
    with pytest.raises(PlacementError, match="neither padded nor enlarged"):
        cache(
            layers(Latent(rank=512, rope_size=0), 2), layers(Latent(rank=300, rope_size=0), 2, start=2), layers(QWEN, 4)
        )


def test_without_hybrid_manager_windows_keep_every_token() -> None:
    plan = cache(layers(WINDOW, 12), layers(DENSE, 12, start=12), hybrid_manager=False)
    assert len(plan.groups) == 1
    assert plan.bytes_per_token == 24 * 4096
    assert cache(layers(WINDOW, 12), layers(DENSE, 12, start=12)).bytes_per_token == 12 * 4096


def test_draft_layers_join_the_groups() -> None:
    plan = cache(*HYBRID, layers(QWEN_FULL, 1, draft=True), draft_tokens=3)
    assert [len(group.pages) for group in plan.groups] == [16, 16, 16, 17]
    assert plan.bytes_per_block == 17 * 3_276_800
    assert plan.state_slots_per_request == 5


def test_replicated_draft_keeps_all_tokens_on_every_rank() -> None:
    latent = Latent(rank=512, rope_size=64)
    shared = cache(layers(latent, 8), layers(latent, 8, draft=True), dcp_size=4)
    alone = cache(layers(latent, 8), layers(latent, 8, draft=True), dcp_size=4, draft_replicated=True)
    assert shared.request_blocks(65_536) == 256
    assert alone.request_blocks(65_536) == 256 + 1024


def test_draft_may_have_a_dtype_of_its_own() -> None:
    plan = cache(layers(DENSE, 2), layers(DENSE, 2, draft=True), kv_dtype="fp8", draft_kv_dtype="bfloat16")
    assert plan.bytes_per_token == 2 * 2048 + 2 * 4096


def test_stage_holds_its_layers_of_every_group() -> None:
    whole = (layers(DENSE, 8),)
    stages = [vllm_cache(whole, layers=range(start, start + 4)) for start in (0, 4)]
    assert [stage.bytes_per_block for stage in stages] == [4 * 65_536] * 2
    assert stages[0].request_blocks(1000) == 63
    drafted = vllm_cache((*whole, layers(DENSE, 1, draft=True)), layers=range(4, 8))
    assert drafted.bytes_per_block == 5 * 65_536
    undrafted = vllm_cache(drafted.caches, layers=range(4), holds_draft=False)
    assert undrafted.bytes_per_block == 4 * 65_536


def test_stage_that_keeps_nothing_limits_nothing() -> None:
    empty = vllm_cache((layers(DENSE, 4),), layers=range(4, 8))
    assert (empty.bytes_per_block, empty.needed_bytes(4, 4096)) == (0, 0)
    assert empty.blocks(0) > vllm_cache((layers(DENSE, 4),), layers=range(4)).blocks(1 << 50)


def test_deepseek_v4_of_old_releases_packs_tuples_of_pages() -> None:
    caches = blueprint("deepseek-ai__DeepSeek-V4-Flash").caches
    assert vllm_cache(caches).bytes_per_block == 21 * (37_440 + 8_640) + 20 * 1_728
    assert vllm_cache(caches, VllmCacheOptions(tuple_packing=True)).bytes_per_block == 22 * (37_440 + 8_640 + 1_728)


def test_deepseek_v4_of_an_unknown_release_takes_what_any_release_takes() -> None:
    caches = blueprint("deepseek-ai__DeepSeek-V4-Flash").caches
    unknown = VllmCacheOptions(tuple_packing=None)
    plan = vllm_cache(caches, unknown)
    assert plan.packed_by_release
    assert plan.bytes_per_block == 22 * (37_440 + 8_640 + 1_728)
    assert not vllm_cache((layers(DENSE, 4),), unknown).packed_by_release


def test_tuples_of_a_stage_are_those_of_its_layers() -> None:
    caches = blueprint("deepseek-ai__DeepSeek-V4-Flash").caches  # 43 layers: two of windows alone, then by turns
    stages = (range(21), range(21, 43))
    blocks = [vllm_cache(caches, VllmCacheOptions(tuple_packing=True), layers=mine).bytes_per_block for mine in stages]
    assert blocks == [11 * (37_440 + 8_640 + 1_728)] * 2


# --- capacity --------------------------------------------------------------------------------------------------------


def test_block_never_given_out_is_part_of_what_is_needed() -> None:
    plan = cache(layers(DENSE, 4))
    assert plan.needed_bytes(3, 1600) == (300 + 1) * plan.bytes_per_block
    assert plan.concurrency(plan.needed_bytes(3, 1600), 1600) == 3
    assert plan.concurrency(plan.needed_bytes(3, 1600) - 1, 1600) == 2
    assert plan.allocated_bytes(7) == 7 * plan.bytes_per_block


def test_shared_capacity_sets_states_and_windows_aside() -> None:
    hybrid = cache(*HYBRID)  # one group of 784 tokens, three of states with two slots each
    assert hybrid.shared_capacity_tokens(hybrid.allocated_bytes(100), 4, 4096) == (100 - 1 - 4 * 6) * 784
    plain = cache(layers(DENSE, 4))
    assert plain.shared_capacity_tokens(plain.allocated_bytes(100), 4, 4096) == 99 * 16
    windowed = cache(layers(WINDOW, 12), layers(DENSE, 12, start=12))  # a window holds at most all of 160 tokens
    assert windowed.shared_capacity_tokens(windowed.allocated_bytes(100), 4, 160) == (100 - 1 - 4 * 11) * 16
    assert cache(layers(QWEN, 4)).shared_capacity_tokens(GIB, 1, 4096) == 0


def test_longest_context_fits_and_one_more_token_does_not() -> None:
    plan = cache(*HYBRID)
    budget = 20 * GIB
    for concurrency in (1, 3):
        longest = plan.longest_context(budget, concurrency=concurrency)
        assert plan.needed_bytes(concurrency, longest) <= budget < plan.needed_bytes(concurrency, longest + 1)


def test_too_small_a_budget_holds_nothing() -> None:
    plan = cache(*HYBRID)
    assert plan.longest_context(plan.bytes_per_block) == 0
    assert plan.capacity_tokens(-5, 4096) == 0
    assert plan.concurrency(0, 4096) == 0


def test_model_without_cache_needs_none() -> None:
    plan = cache()
    assert (plan.bytes_per_block, plan.needed_bytes(4, 4096), plan.capacity_tokens(GIB, 4096)) == (0, 0, 0)
    assert plan.bytes_per_token == 0
    assert plan.longest_context(0, most_tokens=4096) == 4096


def test_old_releases_count_the_blocks_of_one_group() -> None:
    groups = (layers(WINDOW, 12), layers(DENSE, 12, start=12))
    assert cache(*groups, counts="blocks").tokens_of_blocks(1001, 8192) == 1001 // 2 * 16
    assert cache(*groups).tokens_of_blocks(1026, 8192) == 1026 * 8192 // (512 + 513)
    shared = cache(layers(Latent(rank=512, rope_size=64), 4), dcp_size=4, counts="blocks")
    assert shared.tokens_of_blocks(10, 8192) == 10 * 64 * 4


@pytest.mark.parametrize(
    ("version", "count", "tuples"),
    [
        ("0.19.0", "blocks", True),
        ("v0.20.2rc1.dev249 (fork image)", "blocks", True),
        ("0.25.1", "requests", True),
        ("0.26.1rc0 fork", "requests", False),
        ("0.33.0", "requests", False),
        ("1.0", "requests", False),
        ("0.11.2.dev280+somebody", "requests", None),
        ("", "requests", None),
        ("main", "requests", None),
    ],
)
def test_release_says_what_it_counts_and_packs(version: str, count: str, tuples: bool | None) -> None:
    assert (token_count(version), packs_tuples(version)) == (count, tuples)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_window_is_not_shared_by_ranks_of_context_parallelism() -> None:
    with pytest.raises(PlacementError, match="--dcp: a sliding window"):
        cache(layers(WINDOW, 4), dcp_size=2)


def test_heads_of_a_state_must_divide() -> None:
    with pytest.raises(PlacementError, match="channels do not divide by tp"):
        cache(*HYBRID, tp_size=5)
    with pytest.raises(PlacementError, match="state heads do not divide by tp"):
        cache(layers(State(kind="kda", heads=8, key_size=8, value_size=8), 1), tp_size=3)


def test_unknown_compression_ratio_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"compression ratio without a rule.*found 16"):
        cache(layers(Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=16), 1))


@pytest.mark.parametrize(
    "options", [{"tp_size": 0}, {"block_tokens": 0}, {"draft_tokens": -1}, {"max_batched_tokens": 0}]
)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(PlacementError, match="out of range"):
        VllmCacheOptions(**options)


@pytest.mark.parametrize(
    ("kept", "kv_dtype"),
    [
        (DENSE, "fp8_ds_mla"),
        (DENSE, "q8"),
        (Latent(rank=512, rope_size=64), "fp8_ds_mla"),
        (Latent(rank=512, rope_size=64, sparse=True), "nvfp4"),
        (Compressed(head_size=512, rope_size=64, window_tokens=128), "nvfp4"),
    ],
)
def test_kv_dtype_without_a_rule_for_the_cache_is_refused(kept: Any, kv_dtype: str) -> None:
    with pytest.raises(UnknownFormatError, match="no rule for"):
        cache(layers(kept, 1), kv_dtype=kv_dtype)


def test_precision_becomes_the_record_of_the_cache() -> None:
    sparse = (layers(Latent(rank=512, rope_size=64, sparse=True), 1),)
    dense = (layers(DENSE, 1),)
    assert engine_kv_dtype("fp8", sparse) == "fp8_ds_mla"
    assert engine_kv_dtype("nvfp4", sparse) == "nvfp4_ds_mla"
    assert [engine_kv_dtype(choice, dense) for choice in ("bf16", "fp8", "nvfp4", "int8", "int4")] == [
        "bfloat16", "fp8", "nvfp4", "int8_per_token_head", "int4_per_token_head",
    ]  # fmt: skip
    assert engine_kv_dtype("auto", dense, stated="fp8") == "fp8"
    assert engine_kv_dtype("auto", dense) == "auto"
    with pytest.raises(UnknownFormatError, match=r"no KV dtype.*found q4"):
        engine_kv_dtype("q4", dense)
