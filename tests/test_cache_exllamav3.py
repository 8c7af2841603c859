"""exllamav3's cache: hand-worked bytes, published sizes, differences between measured processes, and laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import caches_of
from tonnage.errors import PlacementError, UnknownFormatError
from tonnage.memory.cache import Attention, Compressed, ConvRun, Indexer, Latent, LayerCache, State, StateKind
from tonnage.memory.cache_exllamav3 import Exllamav3Cache, Exllamav3CacheOptions, cache_bits, exllamav3_cache

MIB = 1 << 20
ROWS = json.loads((Path(__file__).parent / "data" / "logs_pools.json").read_text())["rows"]
DENSE = Attention(kv_heads=8, head_size=128, value_size=128)
WINDOW = Attention(kv_heads=8, head_size=128, value_size=128, window_tokens=1024)
LATENT = Latent(rank=512, rope_size=64)
GDN = State(
    kind="gdn", heads=48, key_size=128, value_size=128, conv_kernel=4,
    conv=(ConvRun(units=16, unit_size=128), ConvRun(units=16, unit_size=128), ConvRun(units=48, unit_size=128)),
)  # fmt: skip


def layers(kept: Any, count: int, *, draft: bool = False) -> LayerCache:
    return LayerCache(kept=kept, layers=tuple(range(count)), draft=draft)


def cache(*caches: LayerCache, **options: Any) -> Exllamav3Cache:
    return exllamav3_cache(caches, Exllamav3CacheOptions(**options))


# --- one token -------------------------------------------------------------------------------------------------------

TOKENS: dict[str, tuple[tuple[LayerCache, ...], dict[str, int], int]] = {
    "fp16": ((layers(DENSE, 2),), {}, 2 * 4 * 8 * 128),
    "8 bits are 8.5": ((layers(DENSE, 1),), {"k_bits": 8, "v_bits": 8}, 2 * 1024 * 17 // 16),
    "6 bits are 6.5": ((layers(DENSE, 1),), {"k_bits": 6, "v_bits": 6}, 2 * 1024 * 13 // 16),
    "4 bits are 4.5": ((layers(DENSE, 1),), {"k_bits": 4, "v_bits": 4}, 2 * 1024 * 9 // 16),
    "keys and values differ": ((layers(DENSE, 1),), {"k_bits": 5, "v_bits": 3}, 32 * (4 * 5 + 2) + 32 * (4 * 3 + 2)),
    "latent": ((layers(LATENT, 3),), {}, 3 * 1152),
    "latent in 8 bits, positions in FP16": ((layers(LATENT, 1),), {"k_bits": 8, "v_bits": 8}, 672),
    "latent in 6 bits": ((layers(LATENT, 1),), {"k_bits": 6, "v_bits": 6}, 544),
    "latent in 4 bits": ((layers(LATENT, 1),), {"k_bits": 4, "v_bits": 4}, 416),
    "index keys stay FP16": ((layers(Indexer(head_size=128), 2),), {"k_bits": 4, "v_bits": 4}, 2 * 256),
    "a draft in bits of its own": (
        (layers(DENSE, 1), layers(DENSE, 1, draft=True)), {"draft_k_bits": 4, "draft_v_bits": 4}, 4096 + 1152,
    ),
    "a latent is whole on every GPU": ((layers(LATENT, 1),), {"tp_size": 4}, 1152),
    "heads are shared out": ((layers(DENSE, 1),), {"tp_size": 4}, 1024),
    "one GPU has more of them": ((layers(DENSE, 1),), {"tp_size": 3}, 3 * 512),
    "chunks keep every token": (
        (layers(Attention(kv_heads=8, head_size=128, value_size=128, chunk_tokens=8192), 1),), {}, 4096,
    ),
    "windows and states take none": ((layers(WINDOW, 5), layers(GDN, 3)), {}, 0),
    "compressed records": (
        (layers(Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=4, index_size=128), 2),), {}, 2 * 320,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("caches", "options", "expected"), TOKENS.values(), ids=TOKENS)
def test_bytes_of_a_token(caches: tuple[LayerCache, ...], options: dict[str, int], expected: int) -> None:
    assert cache(*caches, **options).bytes_per_token == expected


def test_kimi_k25_keeps_as_much_as_in_any_engine() -> None:
    assert exllamav3_cache(caches_of("moonshotai__Kimi-K2.5")).bytes_per_token == 70_272


# --- one slot --------------------------------------------------------------------------------------------------------


def test_ring_has_two_pages_beside_its_window() -> None:
    assert cache(layers(WINDOW, 5)).state_bytes_per_slot == 5 * 1536 * 4096
    odd = Attention(kv_heads=8, head_size=128, value_size=128, window_tokens=1025)
    assert cache(layers(odd, 1), tp_size=2).state_bytes_per_slot == 1792 * 2048


def test_rings_are_never_quantised() -> None:
    assert cache(layers(WINDOW, 1), k_bits=4, v_bits=4).state_bytes_per_slot == 1536 * 4096


def test_slot_of_a_gated_delta_net_by_hand() -> None:
    """10240 channels by a kernel of 4; two states of 48 x 128 x 128; a staged input of channels, heads and decays."""
    conv, state, staged = 10_240 * 4 * 2, 2 * 48 * 128 * 128 * 2, 2 * 10_240 + 2 * 48 + 4 * 48
    assert cache(layers(GDN, 1)).state_bytes_per_slot == conv + state + staged
    drafted = 10_240 * (4 + 3) * 2 + state + 4 * staged
    assert cache(layers(GDN, 3), draft_tokens=3).state_bytes_per_slot == 3 * drafted


def test_state_is_shared_out_by_groups_of_heads() -> None:
    """16 key heads, each with 3 value heads, over 3 GPUs: one has six of them."""
    channels, heads = 10_240 * 6 // 16, 18
    staged = 2 * channels + 2 * heads + 4 * heads
    expected = channels * 8 + 2 * heads * 128 * 128 * 2 + staged
    assert cache(layers(GDN, 1), tp_size=3).state_bytes_per_slot == expected


KINDS: dict[StateKind, int] = {
    "gdn": 2 * 8 * 16 * 16 * 2 + 2 * 8 + 4 * 8,
    "kda": 2 * 8 * 16 * 16 * 2 + 2 * 8 + 4 * 8 * 16,
    "mamba2": 2 * 8 * 16 * 16 * 4 + 2 * 8 + 4 * 8,
}


@pytest.mark.parametrize(("kind", "expected"), KINDS.items(), ids=KINDS)
def test_slot_depends_on_the_recurrence(kind: StateKind, expected: int) -> None:
    """Eight heads of 16 x 16 and a convolution of 128 channels."""
    kept = State(kind=kind, heads=8, key_size=16, value_size=16, conv=(ConvRun(units=8, unit_size=16),), conv_kernel=4)
    assert cache(layers(kept, 1)).state_bytes_per_slot == 128 * 4 * 2 + 2 * 128 + expected


def test_short_convolution_keeps_its_inputs_alone() -> None:
    kept = State(kind="short_conv", conv=(ConvRun(units=2048, unit_size=1),), conv_kernel=3)
    assert cache(layers(kept, 2), draft_tokens=1).state_bytes_per_slot == 2 * 2048 * (3 + 1) * 2


def test_slot_of_deepseek_v4_by_hand() -> None:
    """A ring of 768 records; inputs of a page and a group, twice as wide where groups overlap; 66 snapshots in F32."""
    ring = 768 * 512 * 2
    plain = Compressed(head_size=512, rope_size=64, window_tokens=128)
    wide = Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=128)
    narrow = Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=4, index_size=128)
    sizes = [cache(layers(kept, 1)).state_bytes_per_slot for kept in (plain, wide, narrow)]
    assert sizes == [
        ring, ring + 2 * (256 + 128) * 512 * 2, ring + 2 * 260 * 2 * 640 * 2 + 66 * 2 * 4 * 640 * 4,
    ]  # fmt: skip


# --- the cache -------------------------------------------------------------------------------------------------------


def test_cache_size_is_whole_pages_and_slots_are_as_configured() -> None:
    mixed = cache(layers(DENSE, 1), layers(WINDOW, 1), slots=2)
    slot = 1536 * 4096
    assert mixed.allocated_bytes(1000) == 1024 * 4096 + 2 * slot
    assert mixed.capacity_tokens(2 * slot + 1300 * 4096) == 1280
    assert mixed.capacity_tokens(2 * slot - 1) == 0
    assert mixed.needed_bytes(1, 1000) == 1024 * 4096 + 2 * slot
    assert mixed.needed_bytes(3, 1000) == 3 * 1024 * 4096 + 3 * slot
    assert mixed.request_bytes(1) == 256 * 4096 + slot


def test_draft_shares_the_pages_of_its_target() -> None:
    both = cache(layers(DENSE, 2), layers(DENSE, 1, draft=True))
    assert both.capacity_tokens(256 * 3 * 4096) == 256


def test_layers_are_spread_over_gpus() -> None:
    caches = [layers(DENSE, 10), layers(WINDOW, 10)]
    first = exllamav3_cache(caches, layers=range(4))
    assert (first.bytes_per_token, first.state_bytes_per_slot) == (4 * 4096, 4 * 1536 * 4096)


def test_models_of_states_alone_hold_any_context() -> None:
    states = cache(layers(GDN, 1), slots=2)
    size = states.state_bytes_per_slot
    assert states.longest_context(2 * size, most_tokens=5000) == 5000
    assert states.longest_context(2 * size - 1, most_tokens=5000) == 0
    assert (states.concurrency(5 * size, 10**6), states.concurrency(2 * size - 1, 10**6)) == (5, 0)


def test_cache_modes_of_measured_processes_differ_by_the_planned_bytes() -> None:
    """Qwen2.5-32B (64 layers of 8 heads) at 8192 tokens; whole processes, so that FP16 brings buffers along."""
    rows = {row["cache_mode"]: row["process_mib"] for row in ROWS if row["id"].startswith("cogito")}
    modes = {"fp16": "FP16", "q4": "Q4", "q4_q8": "4,8"}
    planned = {}
    for mode, name in modes.items():
        k_bits, v_bits = cache_bits(name)
        planned[mode] = cache(layers(DENSE, 64), k_bits=k_bits, v_bits=v_bits).allocated_bytes(8192, 0) // MIB
    assert planned == {"fp16": 2048, "q4": 576, "q4_q8": 832}
    measured = rows["q4_q8"] - rows["q4"]
    assert abs(measured - (832 - 576)) * 100 <= 6 * measured
    assert rows["fp16"] - rows["q4"] > 2048 - 576


# --- names and refusals ----------------------------------------------------------------------------------------------

MODES = {"FP16": (0, 0), "Q8": (8, 8), "q6": (6, 6), "Q4": (4, 4), "8,4": (8, 4), "2, 3": (2, 3), "auto": (0, 0),
         "int8": (8, 8), "int4": (4, 4)}  # fmt: skip


@pytest.mark.parametrize(("mode", "bits"), MODES.items(), ids=MODES)
def test_cache_modes(mode: str, bits: tuple[int, int]) -> None:
    assert cache_bits(mode) == bits


@pytest.mark.parametrize("mode", ["fp8", "nvfp4", "9,4", "1,4", "4", ""])
def test_other_modes_are_refused_by_name(mode: str) -> None:
    with pytest.raises(UnknownFormatError, match="no such cache mode"):
        cache_bits(mode)


def test_impossible_sizes_are_refused_together() -> None:
    with pytest.raises(PlacementError) as caught:
        Exllamav3CacheOptions(tp_size=0, k_bits=1, slots=0, draft_tokens=-1)
    assert [problem.what for problem in caught.value.problems] == [
        "tp_size out of range", "k_bits out of range", "slots out of range", "draft_tokens out of range",
        "keys and values are both quantised or neither",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kept", "options", "match"),
    [
        (Attention(kv_heads=1, head_size=80, value_size=80), {"k_bits": 4, "v_bits": 4}, "whole groups"),
        (Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=3), {}, "divide a page"),
    ],
)
def test_caches_that_cannot_work_are_refused(kept: Any, options: dict[str, int], match: str) -> None:
    with pytest.raises(PlacementError, match=match):
        cache(layers(kept, 1), **options)


@pytest.mark.parametrize("kind", ["mamba1", "linear"])
def test_recurrences_the_engine_has_not_are_refused_by_name(kind: StateKind) -> None:
    with pytest.raises(UnknownFormatError, match=kind):
        cache(layers(State(kind=kind, heads=8, key_size=16, value_size=16), 1))


# --- laws ------------------------------------------------------------------------------------------------------------

MODELS = st.sampled_from(
    [
        (layers(DENSE, 4),),
        (layers(WINDOW, 5), layers(DENSE, 1)),
        (layers(GDN, 3), layers(DENSE, 1)),
        (layers(LATENT, 3),),
    ]
)


@given(caches=MODELS, slots=st.integers(1, 8), count=st.integers(1, 100), context=st.integers(1, 300_000))
def test_what_is_needed_is_enough_and_no_more(
    caches: tuple[LayerCache, ...], slots: int, count: int, context: int
) -> None:
    planned = cache(*caches, slots=slots)
    needed = planned.needed_bytes(count, context)
    holds, longest = planned.concurrency(needed, context), planned.longest_context(needed, concurrency=count)
    assert holds >= count
    assert longest >= context
    assert planned.needed_bytes(holds + 1, context) > needed
    assert planned.needed_bytes(count, longest + 1) > needed


@given(caches=MODELS, budget=st.integers(0, 1 << 36))
def test_capacity_fits_and_one_page_more_does_not(caches: tuple[LayerCache, ...], budget: int) -> None:
    planned = cache(*caches)
    tokens = planned.capacity_tokens(budget)
    if tokens:
        assert planned.allocated_bytes(tokens) <= budget
    assert planned.allocated_bytes(tokens + 1) > budget
