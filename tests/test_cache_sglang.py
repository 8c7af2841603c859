"""SGLang's pools: published vectors, public logs, hand-worked bytes, and what must hold for any budget."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import caches_of
from tonnage.errors import PlacementError, UnknownFormatError
from tonnage.memory.cache import Attention, Compressed, ConvRun, Indexer, Latent, LayerCache, State
from tonnage.memory.cache_sglang import SglangCache, SglangPools, request_table_bytes, sglang_cache
from tonnage.memory.cache_sglang_options import SglangCacheOptions, sglang_kv_dtype, splits_sliding
from tonnage.memory.cache_vllm import vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.memory.cache_vllm_pages import layer_pages

GIB = 1 << 30
ROWS = json.loads((Path(__file__).parent / "data" / "logs_pools.json").read_text())["rows"]
COMPARED = {row["id"]: row for row in ROWS if row["engine"].startswith("sglang") and "aside" not in row}
DENSE = Attention(kv_heads=8, head_size=128, value_size=128)
WINDOW = Attention(kv_heads=8, head_size=128, value_size=128, window_tokens=1024)
LATENT = Latent(rank=512, rope_size=64)
SPARSE = Latent(rank=512, rope_size=64, sparse=True)
INDEX = Indexer(head_size=128)
GDN = State(
    kind="gdn", heads=32, key_size=128, value_size=128, conv_kernel=4, dtype="F32",
    conv=(ConvRun(units=16, unit_size=128), ConvRun(units=16, unit_size=128), ConvRun(units=32, unit_size=128)),
)  # fmt: skip
HYBRID = (LayerCache(kept=GDN, layers=tuple(range(3))), LayerCache(kept=DENSE, layers=(3,)))
SLOT = 3 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
"""Bytes of a state of HYBRID: F32 matrices, and three columns of 2 x 2048 + 4096 channels in BF16."""


def layers(kept: Any, count: int, *, draft: bool = False) -> LayerCache:
    return LayerCache(kept=kept, layers=tuple(range(count)), draft=draft)


def cache(*caches: LayerCache, **options: Any) -> SglangCache:
    return sglang_cache(caches, SglangCacheOptions(**options))


def row_cache(row: dict[str, Any]) -> SglangCache:
    return sglang_cache(caches_of(row["config"]), SglangCacheOptions(tp_size=row["tp"], **row.get("options", {})))


# --- published figures -----------------------------------------------------------------------------------------------


def test_kimi_k25_takes_what_its_log_says() -> None:
    kimi = sglang_cache(caches_of("moonshotai__Kimi-K2.5"))
    assert kimi.bytes_per_token == 70_272
    assert round(Fraction(kimi.allocated_bytes(SglangPools(tokens=2_454_421)), GIB), 2) == Fraction("160.63")
    assert kimi.capacity_tokens(2_454_421 * 70_272, 262_144) == 2_454_421


def test_deepseek_v32_keeps_a_scaled_record_and_an_index_key() -> None:
    deepseek = sglang_cache(caches_of("deepseek-ai__DeepSeek-V3.2"), SglangCacheOptions(tp_size=8, kv_dtype="fp8_e4m3"))
    assert (deepseek.bytes_per_token, deepseek.page_tokens) == (61 * (656 + 132), 64)


def test_kimi_k3_keeps_latents_whole_and_states_in_parts() -> None:
    k3 = sglang_cache(caches_of("moonshotai__Kimi-K3"), SglangCacheOptions(tp_size=8))
    assert (k3.bytes_per_token, k3.state_bytes_per_slot) == (27_648, 56_171_520)


def test_qwen2_takes_an_eighth_of_a_gib_for_keys_and_as_much_for_values() -> None:
    qwen = cache(layers(Attention(kv_heads=2, head_size=64, value_size=64), 24))
    half = Fraction(qwen.allocated_bytes(SglangPools(tokens=20_480)), 2 * GIB)
    assert qwen.bytes_per_token == 12_288
    assert round(half, 2) == Fraction("0.12")


@pytest.mark.parametrize("name", COMPARED)
def test_tokens_of_public_logs_are_within_a_percent_or_their_rounding(name: str) -> None:
    row = COMPARED[name]
    gib = Fraction(str(row["kv_gib"]))
    planned = row_cache(row).tokens_within(int(gib * GIB))
    rounding = Fraction(1, 100) / gib  # the log rounds keys and values, each by up to half of a hundredth
    assert abs(Fraction(planned, row["kv_tokens"]) - 1) <= max(Fraction(1, 100), rounding)


def test_all_rows_but_one_are_within_a_percent() -> None:
    planned = {name: row_cache(row).tokens_within(int(row["kv_gib"] * GIB)) for name, row in COMPARED.items()}
    off = [name for name, row in COMPARED.items() if abs(planned[name] - row["kv_tokens"]) * 100 > row["kv_tokens"]]
    assert (off, len(COMPARED)) == (["qwen3-30b-a3b-sgl-tp1-348"], 13)


@pytest.mark.parametrize("name", [name for name, row in COMPARED.items() if "state_slots" in row])
def test_states_of_public_logs_are_equal_to_what_they_print(name: str) -> None:
    row, planned = COMPARED[name], row_cache(COMPARED[name])
    slots = row["state_slots"] + 1
    assert round(Fraction(slots * planned.state_part_bytes, GIB), 2) == Fraction(str(row["ssm_gib"]))
    if "conv_gib" in row:
        assert round(Fraction(slots * planned.conv_part_bytes, GIB), 2) == Fraction(str(row["conv_gib"]))


def test_states_get_the_share_a_public_log_shows() -> None:
    """Qwen3.5-9B: 9.48 GiB of budget become 186 slots (4.49 GiB with the spare one) and 4.99 GiB of tokens."""
    row = COMPARED["qwen3.5-9b-sgl-tp2-267"]
    pools = row_cache(row).pools(int(9.48 * GIB), 262_144)
    assert pools.state_slots == row["state_slots"]
    assert abs(pools.tokens - row["kv_tokens"]) * 1000 <= row["kv_tokens"]
    assert pools.max_running == 186 // 3


def test_sliding_pool_of_a_public_log_has_four_fifths_of_the_tokens() -> None:
    row = COMPARED["gemma-4-26b-a4b-it-sgl-tp1-270"]
    planned = row_cache(row)
    pools = planned.pools(row["kv_tokens"] * planned.bytes_per_token, 262_144)
    assert (pools.tokens, pools.sliding_tokens) == (row["kv_tokens"], row["sliding_tokens"])
    assert planned.bytes_per_token == 5 * 2 * 1024 * 2 + 25 * 8 * 512 * 2 * 8 // 10


def test_layers_that_read_what_others_keep_have_a_pool_too() -> None:
    """Gemma-4-E4B: 7 full and 35 sliding layers of 2 heads, of which 18 keep nothing of their own under vLLM."""
    row = COMPARED["gemma-4-e4b-it-sgl-tp1-340"]
    planned = row_cache(row)
    assert planned.bytes_per_token == 7 * 2 * 1024 * 2 + 35 * 2 * 512 * 2 * 8 // 10 == 86_016
    assert planned.capacity_tokens(int(row["kv_gib"] * GIB), 131_072) == pytest.approx(row["kv_tokens"], rel=1e-4)
    own = [cache for cache in caches_of(row["config"]) if not cache.borrowed]
    assert (
        sum(len(cache.layers) for cache in own)
        == 42 - 18
        == len(layer_pages(vllm_cache(own).caches, VllmCacheOptions()))
    )
    assert vllm_cache(caches_of(row["config"])).bytes_per_token == vllm_cache(own).bytes_per_token


def test_rows_not_compared_say_why() -> None:
    assert all(len(row["aside"]) > 10 for row in ROWS if "config" not in row)
    assert len(ROWS) == 25


# --- one token -------------------------------------------------------------------------------------------------------

CELLS: dict[str, tuple[tuple[LayerCache, ...], dict[str, Any], int]] = {
    "bf16": ((layers(DENSE, 2),), {}, 2 * 8 * 256 * 2),
    "f16 of the model": ((layers(DENSE, 1),), {"model_dtype": "F16"}, 8 * 256 * 2),
    "heads are cut over ranks": ((layers(DENSE, 2),), {"tp_size": 4}, 2 * 2 * 256 * 2),
    "and never below one": ((layers(DENSE, 2),), {"tp_size": 16}, 2 * 256 * 2),
    "fp8": ((layers(DENSE, 2),), {"kv_dtype": "fp8_e5m2"}, 2 * 2048),
    "mxfp8 has a scale per 32": ((layers(DENSE, 2),), {"kv_dtype": "mxfp8"}, 2 * (2048 + 64)),
    "fp4 has a scale per 16 and one layer in FP8": ((layers(DENSE, 2),), {"kv_dtype": "nvfp4"}, 2 * (1024 + 128) + 2048),
    "latent": ((layers(LATENT, 3),), {"tp_size": 8}, 3 * 576 * 2),
    "latent in fp8 has no scales": ((layers(LATENT, 3),), {"kv_dtype": "fp8_e4m3"}, 3 * 576),
    "latent in fp4": ((layers(LATENT, 3),), {"kv_dtype": "nvfp4"}, 3 * (288 + 36)),
    "sparse latent": ((layers(INDEX, 3), layers(SPARSE, 3)), {}, 3 * (1152 + 132)),
    "sparse latent in fp8": ((layers(INDEX, 3), layers(SPARSE, 3)), {"kv_dtype": "fp8_e4m3"}, 3 * (656 + 132)),
    "read without scales": (
        (layers(INDEX, 3), layers(SPARSE, 3)), {"kv_dtype": "fp8_e4m3", "raw_records": True}, 3 * (576 + 132),
    ),
    "an index key for layers without an indexer": ((layers(INDEX, 1), layers(SPARSE, 3)), {}, 3 * (1152 + 132)),
    "or not": ((layers(INDEX, 1), layers(SPARSE, 3)), {"index_every_layer": False}, 3 * 1152 + 132),
    "an index key for four tokens": ((layers(INDEX, 1), layers(SPARSE, 1)), {"index_pool_tokens": 4}, 1152 + 33),
    "plain index keys": ((layers(Indexer(head_size=128, scaled=False), 2), layers(DENSE, 4)), {}, 4 * 4096 + 2 * 256),
    "windows in four fifths": ((layers(WINDOW, 5), layers(DENSE, 1)), {}, 4096 + 5 * 4096 * 8 // 10),
    "windows in a tenth": ((layers(WINDOW, 5), layers(DENSE, 1)), {"sliding_permille": 100}, 4096 + 2048),
    "windows alone": ((layers(WINDOW, 5),), {}, 5 * 4096),
    "windows like all tokens": ((layers(WINDOW, 5), layers(DENSE, 1)), {"hybrid_sliding": False}, 6 * 4096),
    "chunks are windows": (
        (layers(Attention(kv_heads=8, head_size=128, value_size=128, chunk_tokens=8192), 5), layers(DENSE, 1)),
        {}, 4096 + 5 * 4096 * 8 // 10,
    ),
    "a draft like a layer of the target": ((layers(LATENT, 3), layers(LATENT, 1, draft=True)), {}, 4 * 1152),
    "whatever its widths": ((layers(LATENT, 3), layers(DENSE, 1, draft=True)), {}, 4 * 1152),
    "or with its own": ((layers(LATENT, 3), layers(DENSE, 1, draft=True)), {"draft_charge": "own"}, 3 * 1152 + 4096),
    "in a dtype of its own": (
        (layers(LATENT, 3), layers(DENSE, 1, draft=True)), {"draft_charge": "own", "draft_kv_dtype": "fp8_e4m3"},
        3 * 1152 + 2048,
    ),
    "a draft beside windows": ((layers(WINDOW, 5), layers(DENSE, 2), layers(DENSE, 1, draft=True)), {}, 3 * 4096 + 16384),
    "states take nothing per token": (HYBRID, {}, 4096),
}  # fmt: skip


@pytest.mark.parametrize(("caches", "options", "expected"), CELLS.values(), ids=CELLS)
def test_bytes_of_a_token(caches: tuple[LayerCache, ...], options: dict[str, Any], expected: int) -> None:
    assert cache(*caches, **options).bytes_per_token == expected


def test_ranks_of_context_parallelism_share_latents_but_not_index_keys_or_drafts() -> None:
    shared = cache(
        layers(INDEX, 3), layers(SPARSE, 3), layers(DENSE, 1, draft=True), tp_size=8, dcp_size=8, draft_charge="own",
        page_tokens=1,
    )  # fmt: skip
    assert shared.cell_bytes == 3 * 1152 + 8 * (3 * 132) + 8 * 4096
    assert shared.bytes_per_token == 3 * 144 + 3 * 132 + 4096
    assert shared.capacity_tokens(1000 * int(shared.cell_bytes), 4096) == 8000


def test_draft_like_a_layer_of_the_target_is_whole_on_ranks_that_share_tokens() -> None:
    caches = layers(INDEX, 3), layers(SPARSE, 3), layers(SPARSE, 1, draft=True), layers(INDEX, 1, draft=True)
    like, own = (cache(*caches, tp_size=8, dcp_size=8, draft_charge=charge).cells for charge in ("layers", "own"))
    assert like.draft_bytes == own.draft_bytes == 8 * (1152 + 132)


def test_context_parallelism_keeps_more_heads_of_fewer_tokens() -> None:
    shared = cache(layers(DENSE, 1), tp_size=8, dcp_size=2)
    assert (shared.cell_bytes, shared.bytes_per_token) == (2 * 256 * 2, 512)


def test_deepseek_v4_by_hand() -> None:
    """43 windows of 584 in a tenth; 21 layers of (584 + 132) / 4 with rings of 8 in 128; 20 of 584 / 128."""
    v4 = sglang_cache(caches_of("deepseek-ai__DeepSeek-V4-Flash"), SglangCacheOptions(max_running=8))
    ring = Fraction(8 * 2 * 2 * (512 + 128) * 4, 128)
    expected = Fraction(43 * 584, 10) + 21 * (179 + ring / 10) + 20 * Fraction(584, 128)
    assert (v4.cell_bytes, v4.page_tokens) == (expected, 256)
    states = -(-((8 + 2) * 128 + 1) // 128) * 128 * 20 * 2 * 512 * 4
    assert v4.pools(states + 25_600 * 7706, 1 << 20).tokens == 25_600
    assert v4.allocated_bytes(SglangPools(tokens=25_600, max_running=8)) == int(25_856 * expected) + states


def test_deepseek_v4_sets_a_layer_aside_for_a_draft_and_doubles_the_rings() -> None:
    kept = Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=128)
    plain, drafted = cache(layers(kept, 4)), cache(layers(kept, 4), draft_tokens=4)
    assert drafted.cell_bytes == plain.cell_bytes * Fraction(5, 4)
    assert (plain.cells.request_rows, drafted.cells.request_rows) == (128, 256)
    assert cache(layers(kept, 4)).pools(40 * GIB, 1 << 20).max_running == 256


PAGES = {
    "keys and values": ((layers(DENSE, 1),), {}, 1),
    "latents": ((layers(LATENT, 1),), {}, 1),
    "sparse latents": ((layers(SPARSE, 1),), {}, 64),
    "pooled index keys": ((layers(SPARSE, 1),), {"index_pool_tokens": 4}, 256),
    "indexed keys and values": ((layers(Indexer(head_size=128, scaled=False), 1), layers(DENSE, 1)), {}, 128),
    "as asked": ((layers(SPARSE, 1),), {"page_tokens": 32}, 32),
}


@pytest.mark.parametrize(("caches", "options", "expected"), PAGES.values(), ids=PAGES)
def test_tokens_of_a_page(caches: tuple[LayerCache, ...], options: dict[str, Any], expected: int) -> None:
    assert cache(*caches, **options).page_tokens == expected


# --- pools -----------------------------------------------------------------------------------------------------------


def test_tokens_are_whole_pages_and_a_page_more_is_allocated() -> None:
    paged = cache(layers(DENSE, 1), page_tokens=64)
    assert paged.pools(4096 * 1000, 4096).tokens == 960
    assert paged.allocated_bytes(SglangPools(tokens=960)) == 1024 * 4096
    assert cache(layers(DENSE, 1), max_total_tokens=100).pools(4096 * 1000, 4096).tokens == 100
    assert paged.pools(-1, 4096).tokens == 0


RUNNING = {
    "at least 2048": (1_000_000, 262_144, {}, 2048),
    "512 for every context": (1_000_000, 200_000, {}, 2560),
    "at most 4096": (10_000_000, 1000, {}, 4096),
    "half the tokens": (1000, 1000, {}, 500),
    "as asked": (1_000_000, 1000, {"max_running": 16}, 16),
}


@pytest.mark.parametrize(("tokens", "context", "options", "expected"), RUNNING.values(), ids=RUNNING)
def test_requests_that_run(tokens: int, context: int, options: dict[str, Any], expected: int) -> None:
    assert cache(layers(DENSE, 1), **options).pools(tokens * 4096, context).max_running == expected


STATES = {
    # nine nineteenths of 1900 slots are 900, one of them spare
    "share": ({}, 1900, 899, 1900 - 900, 899 // 3),
    "extra buffer": ({"extra_state_slots": 2}, 1900, 899, 1900 - 900, 899 // 5),
    "another share": ({"state_permille": 1000}, 1000, 499, 500, 499 // 3),
    "as stated": ({"max_state_slots": 30}, 1900, 30, 1900 - 31, 10),
    "without radix cache": ({"radix_cache": False, "max_running": 20}, 1900, 20, 1900 - 21, 20),
    # (900 - 5) / (1 + 4 / 3) = 383 slots; 127 requests and a spare one keep four states each
    "drafts": ({"draft_tokens": 4}, 1900, 383, 1900 - 384 - 128 * 4, 127),
    "drafts of few requests": ({"draft_tokens": 4, "max_running": 9}, 1900, 383, 1900 - 384 - 40, 9),
}


@pytest.mark.parametrize(("options", "budget", "slots", "left", "running"), STATES.values(), ids=STATES)
def test_states_take_their_share(options: dict[str, Any], budget: int, slots: int, left: int, running: int) -> None:
    pools = cache(*HYBRID, **options).pools(budget * SLOT, 1 << 20)
    assert (pools.state_slots, pools.tokens, pools.max_running) == (slots, left * SLOT // 4096, running)


def test_states_of_verified_drafts_are_kept_with_a_window_of_their_inputs() -> None:
    drafted = cache(*HYBRID, draft_tokens=4)
    matrices, columns = 3 * 32 * 128 * 128 * 4, 3 * 8192 * 2
    assert drafted.state_bytes_per_slot == SLOT
    assert drafted.state_bytes_per_request == 3 * SLOT + 4 * matrices + (4 + 4 - 2) * columns
    spare = drafted.allocated_bytes(SglangPools(tokens=0, state_slots=0, max_running=0))
    assert spare == 4096 + SLOT + 4 * matrices + 6 * columns


def test_state_dtypes_are_the_launchs_then_the_configs_then_f32() -> None:
    undeclared = LayerCache(kept=State(kind="kda", heads=4, key_size=8, value_size=8), layers=(0,))
    declared = LayerCache(kept=State(kind="kda", heads=4, key_size=8, value_size=8, dtype="BF16"), layers=(0,))
    sizes = [
        cache(undeclared).state_bytes_per_slot, cache(declared).state_bytes_per_slot,
        cache(undeclared, state_dtype="BF16").state_bytes_per_slot, cache(undeclared, tp_size=2).state_bytes_per_slot,
    ]  # fmt: skip
    assert sizes == [1024, 512, 512, 512]


def test_needed_is_what_the_requests_keep_and_what_is_spare() -> None:
    paged = cache(*HYBRID, page_tokens=64)
    assert paged.needed_bytes(4, 1000) == (4 * 1024 + 64) * 4096 + (4 * 3 + 1) * SLOT
    assert paged.request_bytes(1000) == 1024 * 4096 + 3 * SLOT
    assert paged.pools_for(4, 1000) == SglangPools(tokens=4096, state_slots=12, max_running=4)


def test_short_contexts_need_a_sliding_pool_of_whole_windows() -> None:
    """Two contexts of 1000 keep 2000 tokens in windows, so that both pools are made larger."""
    split = cache(layers(WINDOW, 5), layers(DENSE, 1))
    pools = split.pools_for(2, 1000)
    assert (pools.tokens, pools.sliding_tokens) == (2500, 2000)
    assert split.pools_for(1, 1).sliding_tokens == 1024 + 1 + 1
    assert split.pools_for(1, 100_000).sliding_tokens == 80_000
    assert cache(layers(WINDOW, 5)).pools_for(1, 100_000) == SglangPools(
        tokens=100_000, sliding_tokens=100_000, max_running=1
    )


def test_stated_limits_bound_what_fits() -> None:
    for limit in ({"max_running": 3}, {"max_total_tokens": 3000}, {"max_state_slots": 9}):
        assert cache(*HYBRID, **limit).concurrency(100 * GIB, 1000) == 3
    assert cache(*HYBRID, max_running=3).longest_context(100 * GIB, concurrency=4) == 0


def test_stages_of_a_pipeline_keep_their_own_layers() -> None:
    first = sglang_cache([layers(DENSE, 10), layers(DENSE, 1, draft=True)], layers=range(4))
    assert first.bytes_per_token == 5 * 4096
    assert sglang_cache([layers(DENSE, 10)], layers=range(10, 12)).bytes_per_token == 0


def test_request_table_has_a_row_more_than_requests() -> None:
    assert request_table_bytes(2048, 262_144) == 2049 * 262_144 * 4


# --- names and refusals ----------------------------------------------------------------------------------------------


def test_precisions_have_sglangs_names() -> None:
    names = [sglang_kv_dtype(choice) for choice in ("auto", "bf16", "fp8", "nvfp4", "mxfp8")]
    assert names == ["auto", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp8"]
    assert (sglang_kv_dtype("auto", stated="fp8"), sglang_kv_dtype("bf16", stated="fp8")) == ("fp8_e4m3", "bfloat16")


def test_architectures_that_split_windows_are_known() -> None:
    assert splits_sliding(["Gemma4ForConditionalGeneration"])
    assert not splits_sliding(["Gemma3ForConditionalGeneration", "LlamaForCausalLM"])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_ds_mla", "fp3"])
def test_other_kv_dtypes_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownFormatError, match=name):
        sglang_kv_dtype(name)
    with pytest.raises(UnknownFormatError, match=name):
        SglangCacheOptions(kv_dtype=name)


def test_impossible_sizes_are_refused_together() -> None:
    with pytest.raises(PlacementError) as caught:
        SglangCacheOptions(tp_size=0, page_tokens=0, draft_tokens=-1)
    assert [problem.what for problem in caught.value.problems] == [
        "tp_size out of range", "page_tokens out of range", "draft_tokens out of range",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("caches", "options", "match"),
    [
        ((layers(GDN, 1),), {"tp_size": 5}, "do not divide"),
        ((layers(GDN, 1, draft=True),), {}, "recurrent state of a draft"),
        ((layers(Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=8), 1),), {}, "without a rule"),
    ],
)
def test_caches_that_cannot_work_are_refused(
    caches: tuple[LayerCache, ...], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(PlacementError, match=match):
        cache(*caches, **options)


# --- laws ------------------------------------------------------------------------------------------------------------

MODELS = st.sampled_from(
    [
        (layers(DENSE, 4),),
        (layers(WINDOW, 5), layers(DENSE, 1)),
        (layers(WINDOW, 5),),
        HYBRID,
        (layers(INDEX, 3), layers(SPARSE, 3), layers(LATENT, 1, draft=True)),
        (layers(Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=4, index_size=128), 3),),
        (layers(Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=128), 3),),
    ]
)
OPTIONS = st.fixed_dictionaries(
    {
        "dcp_size": st.sampled_from([1, 2]),
        "tp_size": st.sampled_from([2, 4]),
        "draft_tokens": st.integers(0, 4),
        "page_tokens": st.sampled_from([None, 1, 64]),
        "radix_cache": st.booleans(),
    }
)


@given(caches=MODELS, options=OPTIONS, count=st.integers(1, 300), context=st.integers(1, 300_000))
def test_what_is_needed_is_enough_and_no_more(
    caches: tuple[LayerCache, ...], options: dict[str, Any], count: int, context: int
) -> None:
    planned = cache(*caches, **options)
    needed = planned.needed_bytes(count, context)
    holds, longest = planned.concurrency(needed, context), planned.longest_context(needed, concurrency=count)
    assert holds >= count
    assert longest >= context
    assert planned.needed_bytes(holds + 1, context) > needed
    assert planned.needed_bytes(count, longest + 1) > needed


@given(caches=MODELS, options=OPTIONS, count=st.integers(1, 100), context=st.integers(1, 300_000))
def test_sglang_gives_the_stated_sizes_within_what_is_needed(
    caches: tuple[LayerCache, ...], options: dict[str, Any], count: int, context: int
) -> None:
    planned = cache(*caches, **options)
    asked = planned.pools_for(count, context)
    stated = cache(*caches, **options, max_running=count, max_state_slots=max(asked.state_slots, 1))
    got = stated.pools(planned.needed_bytes(count, context), context)
    assert got.tokens >= asked.tokens
    assert got.sliding_tokens >= asked.sliding_tokens
    assert got.state_slots >= asked.state_slots


@given(caches=MODELS, options=OPTIONS, budget=st.integers(0, 100 * GIB))
def test_pools_never_exceed_a_budget_by_more_than_what_is_spare(
    caches: tuple[LayerCache, ...], options: dict[str, Any], budget: int
) -> None:
    planned = cache(*caches, **options)
    pools = planned.pools(budget, 32_768)
    empty = planned.allocated_bytes(SglangPools(tokens=0))
    assert planned.allocated_bytes(pools) <= budget + empty


@given(caches=MODELS, options=OPTIONS, budget=st.integers(0, 50 * GIB), more=st.integers(0, GIB))
def test_more_memory_never_holds_less(
    caches: tuple[LayerCache, ...], options: dict[str, Any], budget: int, more: int
) -> None:
    planned = cache(*caches, **options)
    assert planned.concurrency(budget + more, 5000) >= planned.concurrency(budget, 5000)
    assert planned.longest_context(budget + more) >= planned.longest_context(budget)
