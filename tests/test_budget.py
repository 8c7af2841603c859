"""What an engine lets a process use of a GPU."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.memory.budget import (
    Allowance,
    Profiled,
    VllmBudget,
    VllmUse,
    least_free_rank,
    profiled_before_0_27,
    profiled_from_0_27,
    utilization_text,
    vllm_defaults,
)
from tonnage.memory.budget_exllamav3 import Exllamav3Device, default_reserves, split_bytes
from tonnage.memory.budget_sglang import (
    SglangBudget,
    SglangUse,
    default_fraction,
    default_reserve,
    unbalanced,
    vision_factor,
)
from tonnage.memory.supply import find_gpu
from tonnage.memory.workspace_shape import gpu_class

MIB, GIB = 1 << 20, 1 << 30
HUNDREDTH = GIB // 100 + 1

# Printed by vLLM, GiB: total, utilization, weights, peak activation, outside PyTorch, graph estimate, KV cache.
# llm-d-planner, pull request 205, logs of 0.19.0 on H100; the last three are builds of later sources.
LOGGED = {
    "CodeLlama-7b": (79.19, "0.95", 12.56, 0.77, 0.25, 0.84, 61.66, (0, 19)),
    "Llama-3.3-70B FP8, 4 ranks": (79.19, "0.95", 16.96, 1.97, 2.21, 1.70, 54.09, (0, 19)),
    "gemma-2-27b": (79.19, "0.95", 50.72, 3.66, 0.26, 1.13, 20.59, (0, 19)),
    "Kimi-Dev-72B, 2 ranks": (79.19, "0.95", 67.82, 2.29, 2.09, 1.63, 3.02, (0, 19)),
    "Qwen3.8-27B EXL3 on 5090": (31.40, "0.95", 18.85, 1.04, 0.33, 0.14, 9.47, None),
    "the same, larger": (31.40, "0.95", 19.17, 1.22, 0.32, 0.13, 8.99, None),
    "the same at 0.85": (31.40, "0.85", 20.56, 2.86, 0.28, 0.14, 2.85, None),
}


def gib(value: float) -> int:
    return round(value * GIB)


@pytest.mark.parametrize("row", LOGGED.values(), ids=LOGGED)
def test_cache_of_vllm_logs_is_what_the_budget_leaves(row: tuple) -> None:
    total, utilization, weights, peak, non_torch, graphs, cache, release = row
    budget = VllmBudget(total_bytes=gib(total), free_bytes=gib(total), utilization=Fraction(utilization))
    profiled = profiled_before_0_27(gib(weights), gib(peak), gib(non_torch), gib(graphs))
    # six figures rounded to hundredths
    assert abs(budget.kv_bytes(profiled, release) - gib(cache)) <= 3 * HUNDREDTH


def test_vllm_takes_graphs_off_the_cache_from_0_21_on() -> None:
    budget = VllmBudget(total_bytes=1000, free_bytes=1000, utilization=Fraction(9, 10))
    profiled = Profiled(consumed_bytes=500, transient_bytes=100, graph_estimate_bytes=50)
    assert budget.kv_bytes(profiled, (0, 20)) == 300
    assert budget.kv_bytes(profiled, (0, 21)) == 250
    assert budget.kv_bytes(profiled) == 250


def test_both_printed_splits_mean_the_same() -> None:
    # 0.27 prints consumed 15.24 = weights 14.99 + other 0.25, and a peak of 2.73 = 1.89 + graphs 0.84
    assert profiled_before_0_27(1499, 189, 25, 84) == profiled_from_0_27(1524, 273, 84)
    assert profiled_before_0_27(1499, 189, -25, 0).consumed_bytes == 1474


def test_requested_memory_is_rounded_up() -> None:
    budget = VllmBudget(total_bytes=101, free_bytes=95, utilization=Fraction("0.92"))
    assert budget.requested_bytes == 93  # 92.92
    assert budget.baseline_bytes == 6
    assert budget.refusal is None
    assert budget.allowance.pool_bytes == 93
    assert [(term.component, term.nbytes) for term in budget.allowance.held_back] == [
        ("budget.baseline", 6),
        ("budget.unrequested", 2),
    ]


def test_worker_that_asks_for_more_than_is_free_is_refused_with_the_highest_it_may_ask_for() -> None:
    total, free = 97_250 * MIB, 84_000 * MIB  # 0.86375...
    budget = VllmBudget(total_bytes=total, free_bytes=free)
    assert utilization_text(budget.highest_utilization) == "0.8637"
    assert str(budget.refusal) == (
        "--gpu-memory-utilization: vLLM does not start: free memory is less than it asks for; expected at most 0.8637; "
        "found 0.92, 87.373 GiB of 82.031 GiB free"
    )
    assert budget.allowance.refusal == budget.refusal
    legal = VllmBudget(total_bytes=total, free_bytes=free, utilization=budget.highest_utilization)
    assert legal.refusal is None


def test_cache_given_in_bytes_ignores_the_profile_and_still_needs_a_legal_utilization() -> None:
    budget = VllmBudget(
        total_bytes=1000, free_bytes=900, utilization=Fraction("0.92"), cache_bytes=300, multimodal_bytes=10
    )
    assert budget.kv_bytes(Profiled(consumed_bytes=999, transient_bytes=999)) == 290
    assert budget.refusal is not None
    assert budget.allowance.pool_bytes == 900


@given(total=st.integers(10_000, 1 << 40), data=st.data())
def test_highest_utilization_is_legal_and_a_digit_more_is_not(total: int, data: st.DataObject) -> None:
    free = data.draw(st.integers(total // 5000 + 1, total))
    highest = VllmBudget(total_bytes=total, free_bytes=free).highest_utilization
    assert VllmBudget(total_bytes=total, free_bytes=free, utilization=highest).refusal is None
    more = highest + Fraction(1, 10_000)
    assert more > 1 or VllmBudget(total_bytes=total, free_bytes=free, utilization=more).refusal is not None


@given(total=st.integers(1, 1 << 40), free=st.integers(0, 100), share=st.integers(1, 100), fixed=st.booleans())
def test_allowance_and_what_is_held_back_are_the_gpu(total: int, free: int, share: int, fixed: bool) -> None:
    free_bytes = total * free // 100
    fraction = Fraction(share, 100)
    cache = 1 if fixed else None
    vllm = VllmBudget(total_bytes=total, free_bytes=free_bytes, utilization=fraction, cache_bytes=cache).allowance
    assert vllm.total_bytes == total
    if share < 100:
        sglang = SglangBudget(total_bytes=total, free_bytes=free_bytes, fraction=fraction, multimodal_bytes=share)
        assert sglang.allowance.total_bytes == total
        assert sglang.allowance.usable_bytes <= free_bytes
    device = Exllamav3Device(
        total_bytes=total, free_bytes=free_bytes, reserve_bytes=share * MIB, split_bytes=share * GIB if fixed else None
    )
    assert device.allowance.total_bytes == total


LIMITS = {
    "B200": ("b200", 16384, 1024, 16384),
    "H100": ("h100", 8192, 1024, 16384),
    "RTX PRO 6000": ("rtx-pro-6000", 8192, 1024, 16384),
    "A100 80GB is held down": ("a100-80gb", 2048, 256, 8192),
    "GB10 is held down": ("gb10", 2048, 256, 8192),
    "RTX 4090": ("rtx-4090", 2048, 256, 8192),
}


@pytest.mark.parametrize("row", LIMITS.values(), ids=LIMITS)
def test_vllm_defaults_by_gpu(row: tuple[str, int, int, int]) -> None:
    slug, tokens, seqs, offline_tokens = row
    gpu = find_gpu(slug)
    total, where = gpu.nominal_gb * GIB * 98 // 100, gpu_class(gpu)
    assert vllm_defaults(total, where, context_tokens=1 << 20) == (tokens, seqs)
    assert vllm_defaults(total, where, VllmUse(offline=True), context_tokens=1 << 20) == (offline_tokens, seqs)
    assert vllm_defaults(total, where, VllmUse(throughput=True), context_tokens=1 << 20) == (2 * tokens, 2 * seqs)


def test_vllm_defaults_follow_context_and_sequences() -> None:
    whole = VllmUse(chunked_prefill=False)
    assert vllm_defaults(80 * GIB, "hopper", whole, context_tokens=131_072) == (131_072, 1024)
    assert vllm_defaults(80 * GIB, "hopper", context_tokens=1000, max_seqs=4) == (4000, 4)
    assert vllm_defaults(80 * GIB, "hopper", VllmUse(throughput=True), context_tokens=1 << 20, max_seqs=4) == (16384, 4)
    assert vllm_defaults(None, None, context_tokens=4096) == (2048, 256)


# nvidia-smi total, ranks, prefill chunk, largest decode graph; MiB by hand: 512 + 1.5 P + 128 a rank + 2 a sequence +
# 8 a prefill size; sizes: 34 up to 2048, 50 up to 4096, 58 up to 8192, 74 up to 16384
FRACTIONS = {
    "H100": (SglangUse(driver_total_mib=81_559), 512 + 12_288 + 128 + 512 + 464, "0.830"),
    "H100, 4 ranks": (SglangUse(driver_total_mib=81_559, tp=4), 512 + 12_288 + 512 + 1024 + 464, "0.819"),
    "RTX 4090": (SglangUse(driver_total_mib=24_564), 512 + 6144 + 128 + 96 + 400, "0.704"),
    "B200, MLA": (SglangUse(driver_total_mib=183_359, tp=8, latent=True), 512 + 24_576 + 1024 + 1024 + 1536, "0.844"),
    "floor of large cards": (SglangUse(driver_total_mib=81_559, prefill_tokens=2048), 10_240, "0.874"),
    "no floor at 60 GiB": (SglangUse(driver_total_mib=61_440, prefill_tokens=100), 512 + 3072 + 128 + 512 + 96, "0.930"),
    "attention replicas": (
        SglangUse(driver_total_mib=81_559, tp=8, attention_dp=8, decode_batch=512, prefill_graphs=False),
        512 + 12_288 + 1024 + 1024 + 512 * 8 * 4.5, "0.592",
    ),
    "few sequences": (
        SglangUse(driver_total_mib=81_559, tp=2, attention_dp=2, decode_batch=100, prefill_graphs=False),
        512 + 12_288 + 256 + 200 + 600, "0.830",
    ),
    "no graphs": (
        SglangUse(driver_total_mib=143_771, tp=8, decode_graphs=False, prefill_graphs=False, deepep=True),
        512 + 12_288 + 1024, "0.904",
    ),
    "DeepEP": (
        SglangUse(driver_total_mib=143_771, tp=8, deepep=True, breakable_prefill=True, latent=True),
        512 + 12_288 + 1024 + 1024 + 1536 + 1024 + 2048, "0.865",
    ),
    "sized after capture": (SglangUse(driver_total_mib=81_559, tp=2, post_capture=True), 1536 + 256, "0.978"),
}  # fmt: skip


@pytest.mark.parametrize("row", FRACTIONS.values(), ids=FRACTIONS)
def test_default_fraction_of_sglang(row: tuple[SglangUse, float, str]) -> None:
    use, reserve_mib, fraction = row
    assert sum(term.nbytes for term in default_reserve(use)) == reserve_mib * MIB
    assert default_fraction(use) == Fraction(fraction)
    assert all(term.source.startswith("SGLang 0.5.23: ") for term in default_reserve(use))


@given(total=st.integers(20_000, 300_000), tokens=st.integers(1, 16_384), tp=st.sampled_from((1, 2, 4, 8)))
def test_default_fraction_is_what_double_precision_gives(total: int, tokens: int, tp: int) -> None:
    use = SglangUse(driver_total_mib=total, tp=tp, prefill_tokens=tokens, prefill_graphs=False, decode_batch=64)
    reserve = 512 + max(tokens, 2048) * 1.5 + tp / 8 * 1024 + 128
    if total > 61_440:
        reserve = max(reserve, 10_240)
    assert abs(float(default_fraction(use)) - (total - reserve) / total) <= 0.0005 + 1e-9


def test_vision_towers_lower_the_default_fraction() -> None:
    assert vision_factor(24, 1024) == Fraction(95, 100)
    assert vision_factor(1, 8) == Fraction("0.9975")  # 1.05 at most
    assert vision_factor(64, 4096) == Fraction("0.76")  # 0.8 at least
    assert vision_factor(48, 1024) == Fraction(95, 100) * Fraction(9, 10)
    seen = SglangUse(driver_total_mib=81_559, vision=(24, 1024))
    assert default_fraction(seen) == Fraction("0.830") * Fraction("0.95")
    late = SglangUse(driver_total_mib=81_920, vision=(24, 1024), post_capture=True)
    assert default_fraction(late) == Fraction("0.980") - Fraction(1, 10)


@pytest.mark.parametrize(
    ("total_mib", "tp", "limits"),
    [(16_380, 1, (2048, 8)), (24_564, 1, (4096, 48)), (24_564, 4, (4096, 160)), (49_140, 2, (4096, 32)), (81_559, 1, (8192, 256)),
     (97_887, 8, (8192, 512)), (143_771, 2, (8192, 256)), (183_359, 1, (16384, 512))],
)  # fmt: skip
def test_sglang_defaults_by_driver_total(total_mib: int, tp: int, limits: tuple[int, int]) -> None:
    use = SglangUse(driver_total_mib=total_mib, tp=tp)
    assert (use.tokens, use.batch) == limits
    assert SglangUse(driver_total_mib=total_mib, tp=tp, max_running=4).batch == 4
    assert SglangUse(driver_total_mib=total_mib, tp=tp, max_running=1000).batch == limits[1]


# Printed by SGLang, GB of 2**30: before weights, after them, fraction, KV cache.
SGLANG_LOGGED = {
    "0.5.9, B200, 4 ranks": (176.56, 74.46, "0.85", 48.01),
    "0.5.9, B200, 8 ranks": (176.56, 124.40, "0.85", 97.95),
    "RTX PRO 6000, 8 ranks": (57.06 + 36.93, 36.93, "0.92", 29.32),
}


@pytest.mark.parametrize("row", SGLANG_LOGGED.values(), ids=SGLANG_LOGGED)
def test_cache_of_sglang_logs_is_what_the_fraction_leaves(row: tuple[float, float, str, float]) -> None:
    before, after, fraction, cache = row
    budget = SglangBudget(total_bytes=gib(before), free_bytes=gib(before), fraction=Fraction(fraction))
    assert abs(budget.kv_bytes(gib(after)) - gib(cache)) <= gib(0.1)


@pytest.mark.parametrize(("after", "smallest"), [(12.25, 0.9113), (12.25 - 3.07, 0.9335)])
def test_fraction_too_small_for_the_weights_is_refused_with_the_smallest(after: float, smallest: float) -> None:
    # H200 with 125.65 GB of weights: 0.88 failed, and SGLang named these two
    budget = SglangBudget(total_bytes=gib(140), free_bytes=gib(125.65 + 12.25), fraction=Fraction("0.88"))
    assert budget.kv_bytes(gib(after)) < 0
    least = budget.smallest_fraction(gib(after))
    assert abs(float(least) - smallest) <= 0.0002
    assert f"at least {utilization_text(least)}; found 0.88" in str(budget.refusal(gib(after)))
    enough = SglangBudget(total_bytes=gib(140), free_bytes=budget.free_bytes, fraction=least)
    assert enough.refusal(gib(after)) is None
    tight = SglangBudget(total_bytes=gib(140), free_bytes=budget.free_bytes, fraction=least - Fraction(1, 10_000))
    assert tight.refusal(gib(after)) is not None


def test_sglang_pool_and_slack() -> None:
    budget = SglangBudget(total_bytes=1100, free_bytes=1001, fraction=Fraction("0.85"), multimodal_bytes=50)
    assert budget.slack_bytes == 151  # 150.15
    allowance = budget.allowance
    assert (allowance.pool_bytes, allowance.slack_bytes, allowance.usable_bytes) == (800, 151, 951)
    assert budget.kv_bytes(601) == 400


def test_sglang_refuses_unbalanced_gpus() -> None:
    assert unbalanced((90, 100)) is None
    assert unbalanced((100,)) is None
    assert str(unbalanced((81 * GIB, 100 * GIB, 89 * GIB))).endswith("found 81.000 and 100.000 GiB")


def test_exllamav3_keeps_the_larger_of_reserve_and_margin() -> None:
    device = Exllamav3Device(total_bytes=24 * GIB, free_bytes=23 * GIB)
    assert device.allowance.pool_bytes == 23 * GIB - 256 * MIB
    assert device.allowance.held_back[1].source.startswith("256 MiB stay physically free")
    large = Exllamav3Device(total_bytes=24 * GIB, free_bytes=20 * GIB, own_bytes=2 * GIB, reserve_bytes=512 * MIB)
    assert large.allowance.pool_bytes == 22 * GIB - 512 * MIB
    assert large.allowance.held_back[1].source == "model.autosplit_reserve"
    assert Exllamav3Device(total_bytes=GIB, free_bytes=MIB).allowance.pool_bytes == 0


def test_gpu_split_replaces_the_reserve() -> None:
    split = Exllamav3Device(total_bytes=24 * GIB, free_bytes=23 * GIB, split_bytes=split_bytes(Fraction("20.5")))
    assert split.allowance.pool_bytes == 20 * GIB + 512 * MIB
    greedy = Exllamav3Device(total_bytes=24 * GIB, free_bytes=23 * GIB, split_bytes=24 * GIB)
    assert greedy.allowance.pool_bytes == 23 * GIB - 256 * MIB


def test_tabbyapi_reserves_little_on_the_first_gpu_and_the_library_half_a_gib_on_others() -> None:
    assert default_reserves(3) == (96 * MIB, 512 * MIB, 512 * MIB)


def test_least_free_rank_is_the_first_of_the_fullest() -> None:
    assert least_free_rank([5, 3, 9, 3]) == 1
    with pytest.raises(ValueError, match="empty"):
        least_free_rank([])


@pytest.mark.parametrize(
    ("value", "text"),
    [("1", "1"), ("0.92", "0.92"), ("0.94999", "0.9499"), ("0.9", "0.9"), ("1/3", "0.3333"), ("0.1001", "0.1001")],
)
def test_utilization_is_written_with_four_digits_rounded_down(value: str, text: str) -> None:
    assert utilization_text(Fraction(value)) == text


IMPOSSIBLE = [
    lambda: VllmBudget(total_bytes=10, free_bytes=11),
    lambda: VllmBudget(total_bytes=0, free_bytes=0),
    lambda: VllmBudget(total_bytes=10, free_bytes=10, utilization=Fraction(0)),
    lambda: VllmBudget(total_bytes=10, free_bytes=10, utilization=Fraction(11, 10)),
    lambda: VllmBudget(total_bytes=10, free_bytes=10, cache_bytes=-1),
    lambda: SglangBudget(total_bytes=10, free_bytes=10, fraction=Fraction(1)),
    lambda: SglangBudget(total_bytes=10, free_bytes=11, fraction=Fraction(1, 2)),
    lambda: SglangUse(driver_total_mib=0),
    lambda: SglangUse(driver_total_mib=1000, prefill_tokens=0),
    lambda: SglangUse(driver_total_mib=1000, vision=(0, 1)),
    lambda: Exllamav3Device(total_bytes=10, free_bytes=8, own_bytes=3),
    lambda: Exllamav3Device(total_bytes=10, free_bytes=-1),
    lambda: Allowance(pool_bytes=-1, held_back=()),
]


@pytest.mark.parametrize("make", IMPOSSIBLE)
def test_impossible_budgets_are_no_values(make: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        make()
