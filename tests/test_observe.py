from __future__ import annotations

import codecs
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plan_documents import by_hand
from tonnage.cli import app
from tonnage.errors import ObservationError, UnknownGpuError
from tonnage.observe.compare import group_of
from tonnage.observe.figures import Quantity, Reading, total, worst_of
from tonnage.observe.io import observe_blocks, read_log, read_plan, whole_lines
from tonnage.observe.lines import quantity
from tonnage.observe.ranks import rank_of
from tonnage.observe.reader import MOST_RANKS, MOST_READINGS
from tonnage.observe.record import row
from tonnage.observe.scan import LONGEST_LINE, lines_with
from tonnage.saved_plan import SavedLine
from tonnage.units import GIB, MIB

LOGS = Path(__file__).parent / "data" / "logs"


def observed(*lines: str):
    """What a log of these lines says."""
    return observe_blocks(iter(["".join(f"{line}\n" for line in lines).encode()]))


def numbers(figures):
    """Bytes, tokens and counts as integers, ratios as text."""
    return {
        name: one.quantity.text if one.quantity.unit == 1 and one.quantity.digits else one.quantity.nbytes
        for name, one in figures.items()
        if one.quantity
    }


# --- decimals -------------------------------------------------------------------------------------------------------

DECIMALS = {
    # 14.99 x 1073741824 = 16095389941.76; a hundredth is 10737418.24
    "two digits": ("14.99", GIB, 16_095_389_941, 10_737_419),
    # 13.4874 x 1073741824 = 14481985477.01; 107374.1824
    "four digits": ("13.4874", GIB, 14_481_985_477, 107_375),
    # one digit is a zero that was dropped: 19.5 is 19.50
    "one digit": ("19.5", GIB, 20_937_965_568, 10_737_419),
    "whole": ("16", GIB, 17_179_869_184, 10_737_419),
    # -0.49 x 1073741824 = -526133493.76
    "negative is floored too": ("-0.49", GIB, -526_133_494, 10_737_419),
    "zero": ("0.0", GIB, 0, 10_737_419),
    "MiB": ("548", MIB, 574_619_648, 1_048_576),
    "bytes are exact": ("45175492096", 1, 45_175_492_096, 0),
    "thousands": ("1,226,984", 1, 1_226_984, 0),
}  # fmt: skip


@pytest.mark.parametrize(("text", "unit", "nbytes", "rounding"), DECIMALS.values(), ids=DECIMALS)
def test_decimals_become_bytes_exactly(text, unit, nbytes, rounding):
    read = quantity(text, unit=unit)
    assert (read.nbytes, read.rounding_nbytes) == (nbytes, rounding)
    assert read.text == text.replace(",", "")


def test_sums_are_of_decimals_and_their_rounding_adds_up():
    both = total([quantity("1.005", unit=GIB), quantity("0.2", unit=GIB)])
    assert both == Quantity(number=1205, digits=3, unit=GIB, width=1_000_000 + 10_000_000)
    assert (quantity("79.18", unit=GIB) - quantity("78.04", unit=GIB)).text == "1.14"
    assert (quantity("0.1", unit=GIB) - quantity("0.35", unit=GIB)).text == "-0.25"


def test_sums_of_different_units_are_in_bytes():
    # 0.5 GiB = 536870912 bytes, known to 10737419
    mixed = quantity("0.5", unit=GIB) - quantity("36870912", unit=1)
    assert (mixed.nbytes, mixed.rounding_nbytes) == (500_000_000, 10_737_419)


def test_least_bytes_are_half_a_rounding_below():
    assert quantity("14.99", unit=GIB).least_nbytes == 16_095_389_941 - 5_368_710
    assert quantity("77", unit=1).least_nbytes == 77


def test_the_worst_of_several_is_the_one_that_hurts():
    def of(name, *texts: str):
        return worst_of(
            [Reading(name=name, quantity=quantity(text, unit=GIB), order=n) for n, text in enumerate(texts)]
        ).quantity.text

    assert of("weights", "6.61", "7.84", "7.8") == "7.84"
    assert of("free", "6.61", "7.84", "6.7") == "6.61"
    assert of("utilization", "0.9", "0.8") == "0.8"


# --- one line of every kind -----------------------------------------------------------------------------------------

SUMMARY = "Free memory on device (78.1/79.18 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB). "
DEVICE = {
    "total": 85_018_877_624,
    "free": 83_859_236_454,
    "utilization": "0.92",
    "requested": 78_222_091_878,
    "baseline": 1_159_641_169,
}

LINES = {
    # vLLM
    "more free than there is": (
        "Free memory on device (90.0/10.0 GiB) on startup. ", {"total": 10 << 30, "free": 90 << 30}
    ),
    "weights, 0.10": ("Model loading took 13.4874 GiB and 17.310925 seconds", {"weights": 14_481_985_477}),
    "weights, memory": ("Model loading took 33.9 GiB memory and 45.12 seconds", {"weights": 36_399_847_833}),
    "budget": ("Available KV cache memory: 26.01 GiB", {"kv_budget": 27_928_024_842}),
    "budget below zero": ("Available KV cache memory: -0.49 GiB", {"kv_budget": -526_133_494}),
    "capacity, to 0.29": ("GPU KV cache size: 486,992 tokens", {"kv_tokens": 486_992}),
    "capacity, of a device": ("NVIDIA RTX 5090 KV cache size: 212,977 tokens", {"kv_tokens": 212_977}),
    "capacity, with the host": ("CPU + host KV cache size: 90,112 tokens", {"kv_tokens": 90_112}),
    "concurrency, to 0.27": ("Maximum concurrency for 16,384 tokens per request: 29.72x", {"concurrency_tokens": 16_384, "max_concurrency": "29.72"}),
    "concurrency, from 0.28": ("GPU KV cache size: 70,240 tokens, Maximum concurrency for 2,048 tokens per request: 34.30x", {"kv_tokens": 70_240, "concurrency_tokens": 2_048, "max_concurrency": "34.30"}),
    "summary, to 0.26": (
        SUMMARY + "Actual usage is 33.88 GiB for weight, 1.61 GiB for peak activation, -0.01 GiB for non-torch memory, and 1.7 GiB for CUDAGraph memory.",
        {**DEVICE, "weights_summary": 36_378_372_997, "non_torch": -10_737_419, "activation_peak": 1_728_724_336, "graphs": 1_825_361_100},
    ),
    "summary, from 0.27": (
        SUMMARY + "Actual usage is 18.4 GiB for consumed memory (weights + non-torch), 2.26 GiB for peak activation, and 0.31 GiB for CUDAGraph memory.",
        {**DEVICE, "consumed": 19_756_849_561, "activation_peak": 2_426_656_522, "graphs": 332_859_965},
    ),
    "profile, to 0.26": (
        "Memory profiling takes 7.26 seconds. Total non KV cache memory: 2.78GiB; torch peak memory increase: 0.45GiB; non-torch forward increase memory: 0.02GiB; weights memory: 2.32GiB.",
        {"weights_summary": 2_491_081_031, "non_torch": 21_474_836, "activation_peak": 483_183_820, "non_kv": 2_985_002_270},
    ),
    "profile, from 0.27": (
        "Memory profiling takes 2.50 seconds. Total non KV cache memory: 2.78GiB; torch peak memory increase: 0.45GiB; total consumed (from mem_get_info): 2.43GiB; weights memory: 2.32GiB.",
        {"weights_summary": 2_491_081_031, "consumed": 2_609_192_632, "activation_peak": 483_183_820, "non_kv": 2_985_002_270},
    ),
    "suggestions": (
        "with `--kv-cache-memory=27206221312` to fit into requested memory, or `--kv-cache-memory=31769725440` to fully utilize gpu memory.",
        {"kv_suggested": 27_206_221_312, "kv_suggested_full": 31_769_725_440},
    ),
    "suggestions with GiB": (
        "with `--kv-cache-memory=2358995846` (2.2 GiB) to fit into requested memory, or `--kv-cache-memory=2590736384` (2.41 GiB) to fully utilize gpu memory.",
        {"kv_suggested": 2_358_995_846, "kv_suggested_full": 2_590_736_384},
    ),
    "in use, bytes": ("Current kv cache memory in use is 27928023040 bytes.", {"kv_in_use": 27_928_023_040}),
    "in use, GiB": ("Current kv cache memory in use is 34.98 GiB.", {"kv_in_use": 37_559_489_003}),
    "graphs": ("Graph capturing finished in 8 secs, took 0.55 GiB", {"graphs": 590_558_003}),
    "graphs below zero": ("Graph capturing finished in 8 secs, took -0.02 GiB", {"graphs": -21_474_837}),
    "graph pool": ("CUDA graph pool memory: 1.7 GiB (actual), 1.52 GiB (estimated), difference: 0.18 GiB (10.6%).", {"graphs": 1_825_361_100, "graphs_estimated": 1_632_087_572}),
    "hybrid block": ("Setting attention block size to 832 tokens to ensure that attention page size is >= mamba page size.", {"attention_block_tokens": 832}),
    "hybrid padding": ("Padding mamba page size by 0.13% to ensure that mamba page size and attention page size are exactly equal.", {"state_padding_percent": "0.13"}),
    "padding layers": ("Add 3 padding layers, may waste at most 6.25% KV cache memory", {"padding_layers": 3, "padding_waste_percent": "6.25"}),
    "auto fit": ("Auto-fit max_model_len: reduced from 262144 to 204800", {"auto_fit_from": 262_144, "auto_fit_to": 204_800}),
    "byte flag": ("Initial free memory 44.16 GiB, reserved 5.5 GiB memory for KV Cache as specified", {"free": 47_416_438_947, "kv_reserved": 5_905_580_032}),
    "refused: free": (
        "ValueError: Free memory on device (24.05/191.69 GiB) on startup is less than desired GPU memory utilization (0.85, 162.94 GiB). Decrease it",
        {"refused_free": 25_823_490_867, "refused_total": 205_825_570_242, "refused_requested": 174_955_492_802, "refused_utilization": "0.85"},
    ),
    "refused: free, named device": (
        "ValueError: Free memory on device cuda:0 (24.05/191.69 GiB) on startup is less than desired GPU memory utilization (0.85, 162.94 GiB).",
        {"refused_free": 25_823_490_867, "refused_total": 205_825_570_242, "refused_requested": 174_955_492_802, "refused_utilization": "0.85"},
    ),
    "refused: length": (
        "To serve at least one request with the model's max seq len (262144), 9.29 GiB KV cache is needed, which is larger than the available KV cache memory (9.28 GiB). Based on the available memory, the estimated maximum model length is 260800.",
        {"refused_length": 262_144, "kv_needed": 9_975_061_544, "kv_available": 9_964_324_126, "kv_est_max_len": 260_800},
    ),
    "refused: length, older words": (
        "To serve at least one request with the models's max seq len (16,384), (9.29 GiB KV cache is needed, which is larger than the available KV cache memory (9.28 GiB). Based on the available memory, the estimated maximum model length is 10,240.",
        {"refused_length": 16_384, "kv_needed": 9_975_061_544, "kv_available": 9_964_324_126, "kv_est_max_len": 10_240},
    ),
    # SGLang
    "init, to 0.5.14": ("Init torch distributed ends. elapsed=0.50 s, mem usage=0.09 GB", {"init": 96_636_764}),
    "init, oldest": ("Init torch distributed ends. mem usage=0.09 GB", {"init": 96_636_764}),
    "init, 0.5.23": ("Memory baseline taken. mem usage=-0.01 GB", {"init": -10_737_419}),
    "before weights": ("Load weight begin. avail mem=78.58 GB", {"before_weights": 84_374_632_529}),
    "after weights": ("Load weight end. type=ExampleForCausalLM, dtype=torch.bfloat16, avail mem=64.20 GB, mem usage=14.30 GB.", {"after_weights": 68_934_225_100, "weights": 15_354_508_083}),
    "pool": ("KV Cache is allocated. #tokens: 421000, K size: 27.25 GB, V size: 27.25 GB", {"pool": 58_518_929_408, "kv_tokens": 421_000}),
    "pool with dtype": ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1933682, KV size: 12.45 GB", {"pool": 13_368_085_708, "kv_tokens": 1_933_682}),
    "pool with a label": ("DSA KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 1933682, KV size: 12.45 GB", {"pool": 13_368_085_708, "kv_tokens": 1_933_682}),
    "sliding pool": ("SWAKVPool mem usage: 21.98 GB, swa size: 51189, full size: 63987", {"swa_pool": 23_600_845_291, "swa_tokens": 51_189, "full_tokens": 63_987}),
    "sliding tokens": ("Use sliding window memory pool. full_layer_tokens=63987, swa_layer_tokens=51189", {"swa_tokens": 51_189, "full_tokens": 63_987}),
    "sliding tokens below zero": ("Use sliding window memory pool. full_layer_tokens=-40934, swa_layer_tokens=-32747", {"swa_tokens": -32_747, "full_tokens": -40_934}),
    "state": ("Mamba Cache is allocated. max_mamba_cache_size: 614, conv_state size: 0.28GB, ssm_state size: 8.07GB", {"state_slots": 614, "state_conv": 300_647_710, "state_ssm": 8_665_096_519}),
    "state of drafts": (
        "Mamba Cache is allocated. max_mamba_cache_size: 117, conv_state size: 0.28GB, ssm_state size: 8.07GB intermediate_ssm_state_cache size: 3.50GB intermediate_conv_window_cache size: 0.12GB",
        {"state_slots": 117, "state_conv": 300_647_710, "state_ssm": 8_665_096_519, "state_intermediate": 3_758_096_384, "state_conv_window": 128_849_018},
    ),
    "pool end": ("Memory pool end. avail mem=9.20 GB", {"pool_end": 9_878_424_780}),
    "graphs, to 0.5.10": ("Capture cuda graph end. Time elapsed: 18.95 s. mem usage=1.42 GB. avail mem=7.48 GB.", {"graphs": 1_524_713_390}),
    "graphs, from 0.5.14": ("Capture target decode CUDA graph end. elapsed=10.10 s, mem usage=0.79 GB, avail mem=10.39 GB.", {"graphs": 848_256_040}),
    "graphs of prefill": ("Capture target prefill CUDA graph end. backend=full, elapsed=10.10 s, mem usage=-0.02 GB, avail mem=10.39 GB.", {"graphs": -21_474_837}),
    "graphs of verification": ("Capture target verify CUDA graph end. elapsed=10.10 s, mem usage=0.79 GB, avail mem=10.39 GB.", {"graphs": 848_256_040}),
    "graphs of the draft": ("Capture draft decode CUDA graph end. elapsed=10.10 s, mem usage=0.20 GB, avail mem=10.39 GB.", {"draft_graphs": 214_748_364}),
    "final": (
        "max_total_num_tokens=421000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768, available_gpu_mem=7.48 GB",
        {"kv_tokens": 421_000, "prefill_chunk_tokens": 8_192, "max_running": 2_048, "context_tokens": 32_768, "available": 8_031_588_843},
    ),
    "final, short": (
        "max_total_num_tokens=421000, chunked_prefill_size=-1, context_len=32768, available_gpu_mem=7.48 GB",
        {"kv_tokens": 421_000, "prefill_chunk_tokens": -1, "context_tokens": 32_768, "available": 8_031_588_843},
    ),
    "capped": ("max_running_requests is capped to 24 by the mamba state cache (max_mamba_cache_size=120, 5 state slots per request).", {"max_running": 24}),
    "reduced": ("max_running_requests was reduced from the requested 512 to 200", {"max_running_asked": 512, "max_running": 200}),
    "refused: fraction": (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7. Raise --mem-fraction-static above 0.778 (minimum viable = 1 - available/pre = 0.7774).",
        {"least_fraction": "0.778"},
    ),
    # exllamav3
    "cache size": ("Using configured cache_size: 65536 tokens.", {"cache_size_tokens": 65_536}),
    "transient": ("largest measured transient 548 MiB, 1203 MiB free after load", {"transient": 574_619_648, "free_after_load": 1_261_436_928}),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES.values(), ids=LINES)
def test_every_kind_of_line_is_read(line, expected):
    assert numbers(observed(f"INFO 01-01 00:00:00 [x.py:1] {line}").figures) == expected


REFUSALS = {
    "vllm free": ("Free memory on device (24.05/191.69 GiB) on startup is less than desired GPU memory utilization (0.85, 162.94 GiB)", "less memory is free than the utilization asks for"),
    "vllm blocks": ("No available memory for the cache blocks. Try increasing it", "no memory is left for the cache"),
    "vllm length": ("(9.29 GiB KV cache is needed, which is larger", "the cache of one request of the longest context does not fit"),
    "sglang weights": ("Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7.", "the weights leave no memory for the cache"),
    "sglang memory": ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "not enough memory for the cache"),
    "sglang unbalanced": ("The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", "the GPUs do not have the same memory free"),
    "exllamav3 split": ("RuntimeError: Insufficient VRAM in split for model and cache", "the split has too little memory for model and cache"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_every_kind_of_refusal_is_named(line, reason):
    assert observed(line).refusals == (reason,)


def test_a_warning_before_a_cache_is_no_refusal():
    seen = observed(
        "The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        "max_total_num_tokens=421000, chunked_prefill_size=8192, context_len=32768, available_gpu_mem=7.48 GB",
    )
    assert seen.refusals == ()
    assert seen.notes == ("warned and started: the GPUs do not have the same memory free",)


# --- ranks ----------------------------------------------------------------------------------------------------------

PREFIXES = {
    "vllm worker": ("(Worker_TP1 pid=32) INFO", "TP1"),
    "vllm worker, experts": ("(Worker_DP2_TP0_EP4 pid=473166) INFO", "DP2 TP0 EP4"),
    "vllm worker, pipeline": ("(Worker_PP1_TP3 pid=4) INFO", "PP1 TP3"),
    "vllm engine": ("(EngineCore_DP0 pid=4021) INFO", "DP0"),
    "vllm engine, no number": ("(EngineCore pid=4021) INFO", "all"),
    "vllm server": ("(APIServer pid=11) INFO", "all"),
    "vllm worker by rank": ("(VllmWorker rank=3 pid=5) INFO", "RANK3"),
    "vllm worker by process": ("(VllmWorkerProcess pid=77) INFO", "pid 77"),
    "ray": ("(EngineCore_DP1 pid=3) (RayWorkerWrapper pid=9, ip=10.0.0.2) INFO", "DP1 pid 9 at 10.0.0.2"),
    "behind compose": ("serve-1  | (Worker_TP1 pid=32) INFO", "TP1"),
    "behind a clock": ("2026-04-19 13:25:28.455 | (Worker_TP1 pid=32) INFO", "TP1"),
    "sglang": ("[2026-06-01 10:00:06 TP1] Load", "TP1"),
    "sglang, several": ("[2026-06-01 10:00:06 DP0 TP0 EP0] Load", "DP0 TP0 EP0"),
    "sglang, bare": ("TP0 Load weight", "TP0"),
    "sglang, bracketed": ("[DP1 TP2] Load weight", "DP1 TP2"),
    "torch": ("[rank1]: ValueError", "RANK1"),
    "torch behind a worker": ("(Worker_TP1 pid=3) [rank1]: ValueError", "TP1"),
    "none": ("INFO 10-02 09:00:31 [gpu_model_runner.py:2653] Model", "all"),
    "a model is no rank": ("INFO model=/models/TP4_EP2/x", "all"),
}  # fmt: skip


@pytest.mark.parametrize(("prefix", "label"), PREFIXES.values(), ids=PREFIXES)
def test_the_rank_stands_in_the_prefix(prefix, label):
    assert rank_of(f"{prefix} and TP7 in the message").label == label


def test_interleaved_ranks_are_kept_apart_and_the_worst_counts():
    seen = observed(
        "(Worker_TP0 pid=1) Model loading took 6.61 GiB memory and 1.0 seconds",
        "(Worker_TP1 pid=2) Model loading took 7.84 GiB memory and 1.0 seconds",
        "(Worker_TP1 pid=2) Available KV cache memory: 8.2 GiB",
        "(Worker_TP0 pid=1) Available KV cache memory: 9.28 GiB",
        "(EngineCore_DP0 pid=3) GPU KV cache size: 1,024 tokens",
    )
    assert {one.rank.label: numbers(one.figures) for one in seen.ranks} == {
        "TP0": {"weights": 7_097_433_456, "kv_budget": 9_964_324_126, "kv_tokens": 1_024},
        "TP1": {"weights": 8_418_135_900, "kv_budget": 8_804_682_956, "kv_tokens": 1_024},
    }
    assert numbers(seen.figures) == {"weights": 8_418_135_900, "kv_budget": 8_804_682_956, "kv_tokens": 1_024}
    assert seen.starts == 1


def test_an_engine_speaks_for_its_own_workers_only():
    seen = observed(
        "(EngineCore_DP0 pid=3) GPU KV cache size: 1,024 tokens",
        "(EngineCore_DP1 pid=4) GPU KV cache size: 2,048 tokens",
        "(Worker_DP1_TP0 pid=2) Model loading took 7.84 GiB memory and 1.0 seconds",
    )
    assert [numbers(one.figures)["kv_tokens"] for one in seen.ranks] == [2_048]
    assert numbers(seen.figures)["kv_tokens"] == 1_024


# --- whole logs -----------------------------------------------------------------------------------------------------


def log(name):
    return read_log(str(LOGS / f"{name}.log"))[0]


def ledger(one):
    return {entry.component: entry.quantity.nbytes for entry in one.ledger}


def test_vllm_0_11_is_read():
    seen = log("vllm_0_11_tp1")
    facts = row(seen)
    assert (facts["engine"], facts["engine_version"], facts["model_id"]) == ("vllm", "0.11.0", "example/Small-7B")
    assert (facts["tp"], facts["max_model_len"], facts["kv_tokens"], facts["dtype_or_quant"]) == (
        1,
        16_384,
        486_992,
        "torch.bfloat16",
    )
    assert (facts["kv_cache_dtype"], facts["weights_gib_per_gpu"].text, facts["max_concurrency"].text) == (
        "auto",
        "13.4874",
        "29.72",
    )
    # 47.53 - 0.50 - 13.4874 - 0.26 - 3.02 - 0.55 = 29.7126 GiB = 31903661335 bytes, less 27928023040
    assert ledger(seen.ranks[0]) == {
        "runtime.baseline": 536_870_912,
        "weights": 14_481_985_477,
        "runtime.persistent": 279_172_874,
        "workspace.activation": 3_242_700_308,
        "graphs": 590_558_003,
        "cache": 27_928_023_040,
        "residual": 31_903_661_319 - 27_928_023_040,
    }


def test_vllm_0_26_with_colours_is_read_rank_by_rank():
    seen = log("vllm_0_26_tp2_colours_crlf")
    facts = row(seen)
    assert [
        facts[name] for name in ("engine_version", "tp", "ep", "max_num_seqs", "kv_cache_dtype", "dtype_or_quant")
    ] == ["0.26.0", 2, 2, 64, "fp8", "fp8"]
    assert [one.rank.label for one in seen.ranks] == ["TP0 EP0", "TP1 EP1"]
    # TP1: 79.18 - 1.14 - (33.9 + 0.8) - 1.61 - 1.7 - 34.98 = 5.05 GiB; the estimate is not in the peak yet
    assert ledger(seen.ranks[1]) == {
        "runtime.baseline": 1_224_065_679,
        "weights": 36_399_847_833,
        "runtime.persistent": 858_993_459,
        "workspace.activation": 1_728_724_336,
        "graphs": 1_825_361_100,
        "cache": 37_559_489_003,
        "residual": 5_422_396_211,
    }


def test_vllm_0_27_holds_the_estimate_of_the_graphs_in_its_peak():
    seen = log("vllm_0_27_tp1")
    held = ledger(seen.ranks[0])
    # 18.4 - 17.05 = 1.35; 2.26 - 0.62 = 1.64; 31.37 - 0.49 - 18.4 - 1.64 - 0.31 - 8.2 = 2.33
    assert held["runtime.persistent"] == 1_449_551_462
    assert held["workspace.activation"] == 1_760_936_591
    assert held["residual"] == 2_501_818_449
    assert row(seen)["draft"] == "SpeculativeConfig(method='mtp', model='example/Mixed-30B', num_spec_tokens=2)"


def test_vllm_0_33_hybrid_is_read():
    seen = log("vllm_0_33_hybrid_tp2_pp2")
    facts = row(seen)
    assert [facts[name] for name in ("engine_version", "tp", "pp", "block_size", "max_model_len", "kv_tokens")] == [
        "0.33.0",
        2,
        2,
        832,
        204_800,
        212_977,
    ]
    assert facts["draft"] == "{'method': 'mtp', 'num_speculative_tokens': 2}"
    assert [(one.rank.label, ledger(one)["weights"]) for one in seen.ranks] == [
        ("PP0 TP0", 7_097_433_456), ("PP0 TP1", 7_097_433_456), ("PP1 TP0", 8_418_135_900), ("PP1 TP1", 8_418_135_900),
    ]  # fmt: skip


def test_vllm_with_a_byte_flag_has_no_summary():
    seen = log("vllm_0_31_byte_flag")
    assert ledger(seen.ranks[0]) == {"weights": 15_300_820_992, "cache": 5_905_580_032}
    assert row(seen)["kv_available_gib"].text == "5.5"


def test_vllm_refusals_say_what_was_needed():
    facts = row(log("vllm_refused_length"))
    assert [
        facts["kv_needed_gib"].text,
        facts["kv_available_gib"].text,
        facts["kv_est_max_len"],
        facts["max_model_len"],
    ] == ["9.29", "9.28", 260_800, 262_144]
    assert log("vllm_refused_free").refusals == ("less memory is free than the utilization asks for",)
    assert row(log("vllm_refused_free"))["gpu_mem_gib"].text == "191.69"
    assert row(log("vllm_refused_blocks"))["kv_available_gib"].text == "-0.49"


def test_sglang_0_5_9_is_read():
    seen = log("sglang_0_5_9_tp1")
    facts = row(seen)
    assert [facts[name] for name in ("engine", "model_id", "tp", "pp", "dp", "ep", "max_num_seqs", "block_size")] == [
        "sglang",
        "example/Small-7B",
        1,
        1,
        1,
        1,
        2_048,
        1,
    ]
    # 64.20 - 9.20 = 55.00; 78.58 - 14.30 - 55.00 - 1.42 - 7.48 = 0.38
    assert ledger(seen.ranks[0]) == {
        "runtime.init": 96_636_764,
        "weights": 15_354_508_083,
        "cache": 59_055_800_320,
        "cache.pool": 58_518_929_408,
        "graphs": 1_524_713_390,
        "runtime.persistent": 408_021_893,
        "residual": 8_031_588_843,
    }


def test_sglang_0_5_14_tells_the_draft_from_the_target():
    seen = log("sglang_0_5_14_draft_state")
    held = ledger(seen.ranks[0])
    assert held["weights"] == 44_882_408_243
    assert held["draft.weights"] == 1_181_116_006
    # 50.00 - 18.40, after the draft's weights; 9.21 + 9.21; 0.60 + 0.60; 0.79 + 0.20 + 0.11
    assert held["cache"] == 33_930_241_638
    assert held["cache.pool"] == 19_778_324_398
    assert held["cache.draft_pool"] == 1_288_490_188
    assert held["graphs"] == 1_181_116_006
    assert numbers(seen.figures)["weights"] == 44_936_095_334
    assert seen.starts == 1


def test_sglang_0_5_23_counts_a_sliding_pool_once():
    seen = log("sglang_0_5_23_sliding_caps")
    held = ledger(seen.ranks[0])
    assert {name: size for name, size in held.items() if name.startswith("cache")} == {
        "cache": 23_729_694_310,
        "cache.swa_pool": 23_600_845_291,
    }
    # -0.02 + 0.61
    assert held["graphs"] == 633_507_676
    assert row(seen)["max_num_seqs"] == 24
    assert row(seen)["kv_available_gib"].text == "21.98"


def test_sglang_refusal_names_the_fraction():
    seen = log("sglang_refused_weights")
    assert seen.refusals == ("the weights leave no memory for the cache",)
    assert numbers(seen.figures)["least_fraction"] == "0.778"


def test_a_log_without_settings_has_no_line_of_them():
    lines = run(LOGS / "tabby_refused.log")[1].splitlines()
    assert lines[1].startswith("figure ")


def test_ranks_are_told_apart_in_one_unit():
    lines = run(LOGS / "vllm_0_26_tp2_colours_crlf.log")[1].splitlines()
    spreads = [line.split(" ranks, ")[1] for line in lines if " ranks, " in line]
    assert "34.661 to 34.701 GiB" in spreads  # both are bytes in the log
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+ GiB", spread) for spread in spreads)


def test_tabby_is_read_device_by_device():
    seen = log("tabby_cache_size")
    assert row(seen)["kv_tokens"] == 65_536
    assert [(one.rank.label, ledger(one)) for one in seen.ranks] == [
        ("GPU0", {"workspace.transient": 548 * MIB, "residual": 1203 * MIB}),
        ("GPU1", {"workspace.transient": 612 * MIB, "residual": 894 * MIB}),
    ]
    assert log("tabby_refused").refusals == ("the split has too little memory for model and cache",)


# --- what logs are like ---------------------------------------------------------------------------------------------


def fixture_bytes(name="vllm_0_33_hybrid_tp2_pp2"):
    return (LOGS / f"{name}.log").read_bytes()


@pytest.mark.parametrize("blocks", [1, 7, 4096])
@pytest.mark.parametrize("name", ["vllm_0_26_tp2_colours_crlf", "sglang_0_5_14_draft_state", "tabby_cache_size"])
def test_blocks_of_any_size_say_the_same(name, blocks):
    raw = fixture_bytes(name)
    assert observe_blocks(raw[at : at + blocks] for at in range(0, len(raw), blocks)) == observe_blocks(iter([raw]))


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF8])
def test_a_byte_order_mark_is_understood(mark):
    encoding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(mark, "utf-8")
    raw = mark + fixture_bytes().decode().encode(encoding)
    parts = [raw[:1023], raw[1023:]]
    assert observe_blocks(iter(parts)) == observe_blocks(iter([fixture_bytes()]))


def test_progress_bars_before_a_line_do_not_hide_it():
    seen = observed(
        "Loading: 10%|#\rLoading: 100%|##########\r(Worker_TP1 pid=2) Model loading took 7.84 GiB memory and 1.0 seconds"
    )
    assert [(one.rank.label, numbers(one.figures)) for one in seen.ranks] == [("TP1", {"weights": 8_418_135_900})]


def test_colours_inside_a_figure_do_not_hide_it():
    seen = observed(
        "Model loading took \x1b[1;32m7.84\x1b[0m GiB memory and 1.0 seconds",
        "\x1b]0;title\x07GPU KV cache size: \x1b[1m1,024\x1b[0m tokens",
    )
    assert numbers(seen.figures) == {"weights": 8_418_135_900, "kv_tokens": 1_024}


def test_bytes_that_are_no_text_are_passed_over():
    raw = b"\xff\xfe\x00\x81\n" * 3 + b"\x80\x81 Model loading took 7.84 GiB memory and 1.0 seconds \xc3\n\x00\n"
    assert numbers(observe_blocks(iter([b"x", raw])).figures) == {"weights": 8_418_135_900}


def test_the_last_of_several_starts_counts():
    seen = observe_blocks(iter([fixture_bytes("vllm_0_11_tp1"), fixture_bytes("vllm_0_27_tp1")]))
    assert seen.starts == 2
    assert row(seen)["engine_version"] == "0.27.1"
    assert numbers(seen.figures) == numbers(log("vllm_0_27_tp1").figures)


def test_starts_without_a_first_line_are_told_apart():
    tries = ["Model loading took {} GiB memory and 1.0 seconds", "Available KV cache memory: {} GiB"]
    assert numbers(observed(*(text.format(size) for size in ("7.84", "6.61") for text in tries)).figures) == {
        "weights": 7_097_433_456,
        "kv_budget": 7_097_433_456,
    }
    cached = [
        "Using configured cache_size: 638976 tokens.",
        "Insufficient VRAM in split for model and cache",
        "Using configured cache_size: 65536 tokens.",
    ]
    seen = observed(*cached)
    assert (seen.starts, seen.refusals, numbers(seen.figures)) == (2, (), {"cache_size_tokens": 65_536})


def test_a_start_that_said_nothing_yet_is_said_so():
    seen = observed("INFO vLLM API server version 0.33.0")
    assert seen.notes == ("the last start in this log says no figure yet",)
    assert row(seen)["engine_version"] == "0.33.0"


def test_only_the_beginning_of_an_endless_line_is_read():
    begin = b"Model loading took 7.84 GiB memory and 1.0 seconds "
    endless = begin + b"x" * (3 * LONGEST_LINE) + b" Available KV cache memory: 8.2 GiB"
    assert numbers(observe_blocks(iter([endless])).figures) == {"weights": 8_418_135_900}
    assert numbers(observe_blocks(endless[at : at + 5000] for at in range(0, len(endless), 5000)).figures) == {
        "weights": 8_418_135_900
    }
    after = iter([endless[:90_000], endless[90_000:], b"\nGPU KV cache size: 1,024 tokens\n"])
    assert numbers(observe_blocks(after).figures) == {"weights": 8_418_135_900, "kv_tokens": 1_024}
    assert max(map(len, whole_lines(endless[at : at + 5000] for at in range(0, len(endless), 5000)))) <= LONGEST_LINE


@pytest.mark.parametrize(
    "text",
    ["1", "1.1 GiB", "[2026-01-01 00:00:00 TP0", "Load weight end. avail mem=1 GB", "'model': '", "(W_TP0 pid=1"],
)
def test_a_hostile_line_takes_no_more_than_its_length(text):
    markers = "GiB for weight GiB for consumed KV cache is needed server_args=ServerArgs( Load weight end. "
    began = time.process_time()
    observed(markers + text * (LONGEST_LINE // len(text)))
    assert time.process_time() - began < 10


def test_memory_is_bounded_by_ranks_and_readings():
    many = [f"(Worker_TP{n} pid=1) Available KV cache memory: {n}.5 GiB" for n in range(MOST_RANKS + 300)]
    seen = observed(*many)
    assert len(seen.ranks) == MOST_RANKS + 1
    again = observed(*(f"Available KV cache memory: {n}.5 GiB" for n in range(MOST_READINGS + 300, 0, -1)))
    assert numbers(again.figures) == {"kv_budget": GIB + GIB // 2}


def test_a_line_of_a_log_of_many_ranks_takes_as_long_as_one_of_few():
    loaded = [f"(Worker_TP{n} pid=1) Model loading took 1.5 GiB and 1 seconds" for n in range(MOST_RANKS)]
    began = time.process_time()
    assert observed(*loaded, *["Model loading took 1.5 GiB and 1 seconds"] * 10_000).starts == 1
    assert time.process_time() - began < 5


def test_lines_without_a_marker_are_not_cut_out():
    block = b"one\n" * 5 + b"two GiB\n" + b"three\n"
    assert list(lines_with(block, [b"GiB", b"two"])) == ["two GiB"]


def test_a_log_of_no_engine_is_refused(tmp_path):
    (tmp_path / "x.log").write_bytes(b"hello\n")
    with pytest.raises(ObservationError, match="no line of a known engine"):
        read_log(str(tmp_path / "x.log"))


# --- beside a plan --------------------------------------------------------------------------------------------------

GROUPS = {
    "weights.expert": "weights", "padding.embedding": "weights", "engine.rope": "weights", "draft.weights": "draft", "draft.cache": "cache",
    "runtime.context": "baseline", "runtime.communication": "baseline", "runtime.buffers": "persistent", "workspace.graphs": "graphs",
    "graphs": "graphs", "workspace.logits": "persistent", "cache.attention": "cache", "reserve": "reserve", "load.repack": "load",
}  # fmt: skip


def line_of(component, *, transient=False):
    return SavedLine(component=component, nbytes=1, bound_nbytes=1, transient=transient, basis="exact", source="x")


@pytest.mark.parametrize(("component", "group"), GROUPS.items())
def test_planned_lines_are_grouped_by_their_names(component, group):
    assert group_of(line_of(component)) == group


def test_a_transient_of_no_other_group_is_activation():
    assert group_of(line_of("workspace.moe", transient=True)) == "activation"
    assert group_of(line_of("load.repack", transient=True)) == "load"


def plan_file(tmp_path, lines, *, tp=1, pp=1, **more: Any):
    names = ("component", "nbytes", "bound_nbytes", "transient")
    ranks = [[dict(zip(names, one, strict=True)) for one in lines]] * (tp * pp)
    more["checkpoint"] = {"name": "", "digest": "a" * 64, "family": "llama"} | more.get("checkpoint", {})
    if more.get("supply"):
        more["supply"] = {"basis": "assumed", "source": "by hand"} | more["supply"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(by_hand(ranks, **{"topology": {"tp": tp, "ep": 1, "pp": pp, "dcp": 1}, **more})))
    return path


WIDE = [
    ("weights.mlp", 17_000_000_000, 18_000_000_000, False), ("engine.rope", 307_000_000, 308_000_000, False),
    ("runtime.context", 500_000_000, 530_000_000, False), ("runtime.buffers", 1_400_000_000, 1_500_000_000, False),
    ("workspace.mlp", 1_000_000_000, 1_100_000_000, True), ("workspace.logits", 1_700_000_000, 1_800_000_000, True),
    ("graphs", 300_000_000, 400_000_000, False), ("cache.attention", 1_000, 1_000, False), ("reserve", 5, 5, False),
]  # fmt: skip


def run(*words: object):
    """Exit code, output (read, if it is JSON) and errors of the command, in this process."""
    done = CliRunner().invoke(app, ["observe", *map(str, words)])
    if isinstance(done.exception, ObservationError | UnknownGpuError):
        return 2, "", str(done.exception)
    return done.exit_code, json.loads(done.stdout) if "--json" in words else done.stdout, done.stderr


def test_measurements_within_their_bounds_exit_with_zero(tmp_path):
    plan = plan_file(tmp_path, WIDE, cache={"bytes_per_token_per_rank": 100, "capacity_tokens": 90_000})
    code, document, _ = run(LOGS / "vllm_0_27_tp1.log", "--plan", plan, "--json")
    assert code == 0
    assert document["exceeds"] is False
    compared = {
        one["component"]: (one["planned_nbytes"], one["planned_bound_nbytes"], one["exceeds"])
        for one in document["comparisons"]
    }
    assert compared == {
        "runtime.baseline": (500_000_000, 530_000_000, False),
        "weights": (17_307_000_000, 18_308_000_000, False),
        "runtime.persistent": (1_400_000_000, 1_500_000_000, False),
        "workspace.activation": (1_700_000_000, 1_800_000_000, False),
        "graphs": (300_000_000, 400_000_000, False),
        "cache": (1_000, 1_000, None),
        "non-cache": (21_207_000_000, 22_538_000_000, False),
    }
    code, shown, _ = run(LOGS / "vllm_0_27_tp1.log", "--plan", plan)
    assert "within every bound: 6 figures compared" in shown
    assert "cache: 87,552 tokens measured, 90,000 planned" in shown


# 17.05 GiB is printed for every size from 18301929390 bytes on
@pytest.mark.parametrize(("bound", "code"), [(18_301_929_389, 0), (18_301_929_388, 5), (10**10, 5), (10**11, 0)])
def test_a_figure_over_its_bound_exits_with_five(tmp_path, bound, code):
    plan = plan_file(tmp_path, [("weights.mlp", 10**10, bound, False)])
    found, document, errors = run(LOGS / "vllm_0_27_tp1.log", "--plan", plan, "--json")
    assert (found, document["exceeds"]) == (code, code == 5)
    assert [one["component"] for one in document["comparisons"]] == ["weights"]
    assert ("rank all: weights: measured 17.050 GiB" in errors) is (code == 5)


def test_every_rank_is_held_against_its_own_plan(tmp_path):
    plan = plan_file(tmp_path, [("weights.mlp", 7 * GIB, 7 * GIB, False)], tp=2, pp=2)
    document = json.loads(plan.read_text())
    for rank in document["ranks"][2:]:
        rank["lines"][0].update(nbytes=8 * GIB, bound_nbytes=8 * GIB)
    plan.write_text(json.dumps(document))
    code, found, _ = run(LOGS / "vllm_0_33_hybrid_tp2_pp2.log", "--plan", plan, "--json")
    assert code == 0
    assert [(one["rank"], one["planned_bound_nbytes"]) for one in found["comparisons"]] == [
        ("PP0 TP0", 7 * GIB), ("PP0 TP1", 7 * GIB), ("PP1 TP0", 8 * GIB), ("PP1 TP1", 8 * GIB),
    ]  # fmt: skip


def test_draft_weights_count_with_the_target_where_the_log_does_not_split_them(tmp_path):
    lines = [("weights.mlp", 1, 40 * GIB, False), ("draft.weights", 1, 2 * GIB, False)]
    _, merged, _ = run(LOGS / "vllm_0_27_tp1.log", "--plan", plan_file(tmp_path, lines), "--json")
    assert [one["planned_bound_nbytes"] for one in merged["comparisons"]] == [42 * GIB]
    plan = plan_file(tmp_path, lines, tp=2, engine="sglang")
    code, split, _ = run(LOGS / "sglang_0_5_14_draft_state.log", "--plan", plan, "--json")
    assert code == 5
    assert [(one["rank"], one["component"], one["exceeds"]) for one in split["comparisons"]] == [
        ("TP0", "weights", True), ("TP0", "draft.weights", False), ("TP1", "weights", True), ("TP1", "draft.weights", False),
    ]  # fmt: skip


UNUSABLE = {
    "no file": (["missing.log"], "cannot be read"),
    "a file that fails": (["/proc/self/mem"], "/proc/self/mem: cannot be read; found Input/output error"),
    "a directory": (["."], "not a regular file"),
    "no engine": (["pyproject.toml"], "no line of a known engine"),
    "plan of another size": ([LOGS / "vllm_0_27_tp1.log", "--plan", "TP2"], "the log is of another tp than the plan; expected 2; found 1"),
    "no plan": ([LOGS / "vllm_0_27_tp1.log", "--plan", "NOPLAN"], "not a plan; expected schema 'tonnage.plan/1'; found 'tonnage.gpus/1'"),
    "plan of nonsense": ([LOGS / "vllm_0_27_tp1.log", "--plan", "BROKEN"], "not a plan; expected what `tonnage plan --json` prints; found Expected `int`, got `str` - at `$.topology.tp`"),
    "pipe for a plan": ([LOGS / "vllm_0_27_tp1.log", "--plan", "/dev/null"], "/dev/null: not a regular file"),
    "plan below itself": ([LOGS / "vllm_0_27_tp1.log", "--plan", "BELOW"], "rank 0: weights.mlp above its bound; expected 1"),
    "plan of other ranks": ([LOGS / "vllm_0_27_tp1.log", "--plan", "TWICE"], "ranks of a plan; expected 0..0 (tp1 ep1 pp1); found 2"),
    "GPU": ([LOGS / "vllm_0_27_tp1.log", "--gpu", "abacus"], "abacus"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_input_exits_with_two(tmp_path, words, message):
    made = {"TP2": plan_file(tmp_path, WIDE, tp=2)}
    for name, document in (
        ("NOPLAN", {"schema": "tonnage.gpus/1"}),
        ("BROKEN", by_hand([[]], topology={"tp": "x"})),
        ("BELOW", by_hand([[{"component": "weights.mlp", "nbytes": 2, "bound_nbytes": 1}]])),
        ("TWICE", by_hand([[], []]) | {"topology": {"tp": 1, "ep": 1, "pp": 1, "dcp": 1}}),
    ):
        made[name] = tmp_path / f"{name}.json"
        made[name].write_text(json.dumps(document))
    code, _, errors = run(*(made.get(str(word), word) for word in words))
    assert code == 2
    assert message in errors


def test_a_plan_of_this_command_is_understood(tonnage, tmp_path, configs):
    path = tmp_path / "plan.json"
    planned = tonnage("plan", min(configs.glob("*.json")), "--json")
    path.write_text(planned.stdout)
    document = json.loads(planned.stdout)
    assert [len(one.lines) for one in read_plan(path).ranks] == [len(one["lines"]) for one in document["ranks"]]


# --- records and output ---------------------------------------------------------------------------------------------


def test_a_record_is_saved_once(tmp_path):
    target = tmp_path / "record.json"
    words = (LOGS / "vllm_0_26_tp2_colours_crlf.log", "--save", target, "--gpu", "h100")
    code, _, errors = run(*words)
    assert (code, errors) == (0, "")
    record = json.loads(target.read_text())
    assert (record["schema"], record["gpu"], record["weights_gib_per_gpu"], record["tp"]) == (
        "tonnage.observation/1",
        "h100",
        33.9,
        2,
    )
    assert record["log"]["nbytes"] == len(fixture_bytes("vllm_0_26_tp2_colours_crlf"))
    assert record["figures"]["weights"] == {"nbytes": 36_399_847_833, "rounding_nbytes": 10_737_419}
    assert [one["rank"] for one in record["ranks"]] == ["TP0 EP0", "TP1 EP1"]
    code, _, errors = run(*words)
    assert code == 2
    assert "already there" in errors
    assert json.loads(target.read_text()) == record


def test_the_document_names_its_schema_and_says_bytes_as_integers():
    code, document, _ = run(LOGS / "sglang_0_5_9_tp1.log", "--json")
    assert code == 0
    assert document["schema"] == "tonnage.observe/1"
    assert document["figures"]["pool"] == {"nbytes": 58_518_929_408, "rounding_nbytes": 21_474_837}
    assert document["ranks"][0]["ledger"][0] == {
        "component": "runtime.init",
        "nbytes": 96_636_764,
        "rounding_nbytes": 10_737_419,
        "source": "init",
    }
    assert document["figures"]["kv_tokens"] == 421_000


def test_standard_input_is_read():
    command = Path(sys.executable).with_name("tonnage")
    done = subprocess.run([command, "observe", "-", "--json"], input=fixture_bytes(), capture_output=True, check=True)
    assert json.loads(done.stdout)["kv_tokens"] == 212_977


def test_the_command_itself_exits_with_two_and_with_five(tonnage, tmp_path):
    assert tonnage("observe", "pyproject.toml").returncode == 2
    plan = plan_file(tmp_path, [("weights.mlp", 1, 1, False)])
    done = tonnage("observe", LOGS / "vllm_0_27_tp1.log", "--plan", plan)
    assert done.returncode == 5
    assert "CONTRADICTS THE PLAN: rank all: weights: measured 17.050 GiB" in done.stdout
    assert done.stderr == ""


def test_nothing_of_a_log_reaches_the_terminal_raw(tonnage, tmp_path):
    evil = tmp_path / "evil.log"
    model = "\x9b31m\x1b[2J\u202e\x07"
    evil.write_text(
        f"non-default args: {{'model': 'a{model}b', 'kv_cache_dtype': '[bold]{model}'}}\nModel loading took 7.84 GiB memory and 1 seconds\n"
    )
    for words in ((evil,), (evil, "--json")):
        done = tonnage("observe", *words)
        assert done.returncode == 0
        assert "[bold]" in done.stdout
        assert not [c for c in done.stdout if not c.isprintable() and c != "\n"]


def test_the_page_shows_what_the_command_prints(tonnage):
    page = (Path(__file__).parent.parent / "docs" / "observe.md").read_text()
    shown = page.split("```console\n$ tonnage observe ")[1].split("```")[0].splitlines()
    done = tonnage("observe", *shown[0].split())
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown[1:]


def test_a_plan_of_another_engine_or_with_negative_lines_is_refused(tmp_path):
    lines = [("weights.mlp", 1, 40 * GIB, False)]
    code, out, errors = run(LOGS / "vllm_0_27_tp1.log", "--plan", plan_file(tmp_path, lines, engine="sglang"))
    assert (code, out) == (2, "")
    assert "of another engine than the plan; expected sglang; found vllm" in errors
    negative = plan_file(tmp_path, [("weights.mlp", -5, -10, False)])
    assert run(LOGS / "vllm_0_27_tp1.log", "--plan", negative)[0] == 2


TP2 = LOGS / "vllm_0_26_tp2_colours_crlf.log"
"""Of Dense-70B-FP8 with 64 requests at once."""
TP1 = LOGS / "vllm_0_27_tp1.log"
"""Of Mixed-30B: 17.05 GiB of weights, on a GPU of 31.37 GiB."""
ALIKE = [("weights.mlp", 18 * 10**9, 19 * 10**9, False)]
SMALL = [("weights.mlp", 10**10, 19 * 10**9, False)]
OTHERS = {
    "concurrency": (TP2, ALIKE, {"tp": 2, "profile": {"concurrency": 4}}, (), ["concurrency than the plan; expected 4; found 64"]),
    "GPU by its memory": (
        TP1, ALIKE, {"supply": {"gpu": "rtx-4090"}}, (),
        ["GPU than the plan; expected rtx-4090, 25253904384 bytes; found 33683281018 bytes in all"],
    ),
    "GPU by name": (
        TP1, ALIKE, {"supply": {"gpu": "rtx-5090"}}, ("--gpu", "rtx-5080"),
        ["GPU than the plan; expected rtx-5090; found rtx-5080"],
    ),
    "model": (
        TP1, SMALL, {"checkpoint": {"name": "Qwen3-8B"}}, (),
        ["model than the plan; expected Qwen3-8B, weights of 10000000000 bytes; found example/Mixed-30B, 18307298099 bytes"],
    ),
    "two at once": (
        TP1, SMALL, {"checkpoint": {"name": "Qwen3-8B"}, "supply": {"gpu": "rtx-4090"}}, (),
        ["GPU than the plan; expected rtx-4090, 25253904384 bytes; found 33683281018 bytes in all",
         "model than the plan; expected Qwen3-8B, weights of 10000000000 bytes; found example/Mixed-30B, 18307298099 bytes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("log", "lines", "facts", "words", "expected"), OTHERS.values(), ids=OTHERS)
def test_a_log_of_something_else_is_refused_and_not_compared(tmp_path, log, lines, facts, words, expected):
    code, shown, errors = run(log, "--plan", plan_file(tmp_path, lines, **facts), *words)
    assert (code, shown) == (2, "")
    assert errors.splitlines() == [f"{log}: the log is of another {words}" for words in expected]


SAME = {
    "the same facts": {"checkpoint": {"name": "example__Mixed-30B"}, "supply": {"gpu": "rtx-5090"}, "profile": {"concurrency": 4}},
    "nothing said": {"supply": {"gpu": None}, "profile": {"concurrency": None}},
    "a GPU of a later table": {"supply": {"gpu": "rtx-9090"}},
    "weights alone": {"supply": None},
}  # fmt: skip


@pytest.mark.parametrize("facts", SAME.values(), ids=SAME)
def test_a_log_of_what_was_planned_is_compared(tmp_path, facts):
    code, shown, _ = run(TP1, "--plan", plan_file(tmp_path, ALIKE, **facts))
    assert code == 0
    assert "the log calls the model" not in shown


def test_a_model_of_another_name_is_compared_where_its_weights_are_the_same(tmp_path):
    plan = plan_file(tmp_path, ALIKE, checkpoint={"name": "mine"})
    code, document, _ = run(TP1, "--plan", plan, "--json")
    assert code == 0
    assert "the log calls the model example/Mixed-30B, the plan mine" in document["notes"]


def test_weights_of_the_same_name_that_differ_are_a_contradiction(tmp_path):
    lines = [("weights.mlp", 10**10, 10**10, False)]
    assert run(TP1, "--plan", plan_file(tmp_path, lines, checkpoint={"name": "Mixed-30B"}))[0] == 5


def test_a_plan_says_which_gpu_it_is_for(tonnage, configs):
    words = ("plan", configs / "Qwen__Qwen3-8B.json", "--json")
    assert json.loads(tonnage(*words, "--gpu", "RTX 4090").stdout)["supply"]["gpu"] == "rtx-4090"
    assert json.loads(tonnage(*words, "--supply", "24GiB").stdout)["supply"]["gpu"] is None
