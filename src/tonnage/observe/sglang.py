"""Lines of SGLang's start-up log, 0.5.9 to 0.5.23. What it prints as GB is GiB.

Weights are loaded once for the target and once for a draft; cache pools are made in the same order. A sliding-window
pool is announced after the two pools it consists of, so those are not counted again.

Source: python/sglang/srt/model_executor/model_runner.py and mem_cache/memory_pool.py of the releases named; the
expressions were tried on public logs.
"""

from __future__ import annotations

import re

from tonnage.observe.figures import Quantity, Reading, total
from tonnage.observe.lines import NUMBER, EngineLog, Seen, figure, pattern, quantity, refusal, setting_reader
from tonnage.units import GIB

_START = "server_args=ServerArgs("

_ARGUMENTS = setting_reader(
    {
        "model_path": "model",
        "tp_size": "tp",
        "pp_size": "pp",
        "dp_size": "dp",
        "ep_size": "ep",
        "dcp_size": "dcp",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "chunked_prefill_size": "max_num_batched_tokens",
        "kv_cache_dtype": "kv_cache_dtype",
        "dtype": "dtype",
        "quantization": "quantization",
        "page_size": "block_size",
        "mem_fraction_static": "gpu_memory_utilization",
        "speculative_algorithm": "draft",
    }
)


def _pool(match: re.Match[str]) -> tuple[Reading, ...]:
    """Return one pool: its bytes, keys and values together, and the tokens it holds."""
    sizes = [quantity(match[group], unit=GIB) for group in ("k", "v", "kv") if match[group] is not None]
    return (Reading(name="pool", quantity=total(sizes), tokens=int(match["tokens"])),)


_PATTERNS = (
    pattern(_START, re.escape(_START), lambda match: _ARGUMENTS(match.string[match.end() :])),
    pattern("Init torch distributed ends", rf"Init torch distributed ends\..{{0,120}}?mem usage={figure('init')} GB"),
    pattern("Memory baseline taken", rf"Memory baseline taken\. mem usage={figure('init')} GB"),
    pattern("Load weight begin", rf"Load weight begin\. avail mem={figure('before_weights')} GB"),
    pattern(
        "Load weight end",
        rf"Load weight end\..{{0,300}}?avail mem={figure('after_weights')} GB, mem usage={figure('weights')} GB",
    ),
    pattern(
        "KV Cache is allocated",
        rf"KV Cache is allocated\.(?: dtype: [^,]{{1,60}},)? #tokens: (?P<tokens>\d{{1,15}}), "
        rf"(?:K size: (?P<k>{NUMBER}) GB, V size: (?P<v>{NUMBER}) GB|KV size: (?P<kv>{NUMBER}) GB)",
        _pool,
    ),
    pattern(
        "SWAKVPool mem usage",
        rf"SWAKVPool mem usage: {figure('swa_pool')} GB, swa size: {figure('swa_tokens')}, "
        rf"full size: {figure('full_tokens')}",
    ),
    pattern(
        "swa_layer_tokens=", rf"full_layer_tokens={figure('full_tokens')}, swa_layer_tokens={figure('swa_tokens')}"
    ),
    pattern(
        "Mamba Cache is allocated",
        rf"Mamba Cache is allocated\. max_mamba_cache_size: {figure('state_slots')}, "
        rf"conv_state size: {figure('state_conv')} ?GB, ssm_state size: {figure('state_ssm')} ?GB"
        rf"(?: intermediate_ssm_state_cache size: {figure('state_intermediate')} ?GB)?"
        rf"(?: intermediate_conv_window_cache size: {figure('state_conv_window')} ?GB)?",
    ),
    pattern("Memory pool end", rf"Memory pool end\. avail mem={figure('pool_end')} GB"),
    pattern(
        "Capture cuda graph end",
        rf"Capture cuda graph end\. Time elapsed: [\d.]{{1,12}} s\. mem usage={figure('graphs')} GB",
    ),
    pattern(
        "CUDA graph end",
        rf"Capture target (?:decode|verify|prefill|extend) CUDA graph end\..{{0,120}}?mem usage={figure('graphs')} GB",
    ),
    pattern(
        "CUDA graph end",
        rf"Capture draft (?:decode|verify|prefill|extend) CUDA graph end\..{{0,120}}?"
        rf"mem usage={figure('draft_graphs')} GB",
    ),
    pattern(
        "max_total_num_tokens=",
        rf"max_total_num_tokens={figure('kv_tokens')}, chunked_prefill_size={figure('prefill_chunk_tokens')}"
        rf"(?:, max_prefill_tokens=\d{{1,12}})?(?:, max_running_requests={figure('max_running')})?"
        rf", context_len={figure('context_tokens')}, available_gpu_mem={figure('available')} GB",
    ),
    pattern(
        "by the mamba state cache",
        rf"max_running_requests is capped to {figure('max_running')} by the mamba state cache",
    ),
    pattern(
        "reduced from the requested",
        rf"max_running_requests was reduced from the requested {figure('max_running_asked')} "
        rf"to {figure('max_running')}",
    ),
    refusal("Loaded weights leave no GPU memory for the KV cache", "the weights leave no memory for the cache"),
    pattern("--mem-fraction-static above", rf"Raise --mem-fraction-static above {figure('least_fraction')}"),
    refusal("Not enough memory. Please try to increase --mem-fraction-static", "not enough memory for the cache"),
    refusal("The memory capacity is unbalanced", "the GPUs do not have the same memory free"),
)

_MARKERS = (
    "mem usage=", "avail mem=", "server_args=ServerArgs(", "Cache is allocated", "SWAKVPool", "swa_layer_tokens=",
    "max_total_num_tokens=", "max_running_requests is capped", "max_running_requests was reduced",
    "mem-fraction-static", "The memory capacity is unbalanced",
)  # fmt: skip
"""Short texts of which every line above holds at least one."""


def _settle(seen: Seen) -> Seen:
    """Tell target from draft by order, and add up what one process made several of."""
    result = dict(seen)
    loads = result.get("weights", ())
    if len(loads) > 1:
        result["weights"] = loads[:1]
        result["draft_weights"] = (_sum("draft_weights", loads[1:]),)
    result["before_weights"] = result.get("before_weights", ())[:1]
    result["after_weights"] = result.get("after_weights", ())[-1:]
    for name in ("graphs", "draft_graphs"):
        if result.get(name):
            result[name] = (_sum(name, result[name]),)
    pools = _free_standing(result.get("pool", ()), result.get("swa_pool", ()), result)
    target = 0 if result.get("swa_pool") else 1
    result["pool"], drafts = pools[:target], pools[target:]
    if drafts:
        result["draft_pool"] = (_sum("draft_pool", drafts),)
    if not result.get("kv_tokens") and pools:
        tokens = result["pool"][0].tokens if result["pool"] else None
        result["kv_tokens"] = (Reading(name="kv_tokens", quantity=Quantity(number=tokens)),) if tokens else ()
    return {name: found for name, found in result.items() if found}


def _free_standing(pools: tuple[Reading, ...], sliding: tuple[Reading, ...], seen: Seen) -> tuple[Reading, ...]:
    """Return the pools that are no part of a sliding-window pool: parts stand before it and hold its tokens."""
    if not sliding:
        return pools
    sizes = {r.quantity.number for name in ("swa_tokens", "full_tokens") for r in seen.get(name, ()) if r.quantity}
    last = max(one.order for one in sliding)
    return tuple(one for one in pools if one.order > last or one.tokens not in sizes)


def _sum(name: str, several: tuple[Reading, ...]) -> Reading:
    return Reading(
        name=name, quantity=total(one.quantity for one in several if one.quantity is not None), order=several[-1].order
    )


SGLANG = EngineLog(
    name="sglang",
    patterns=_PATTERNS,
    markers=_MARKERS,
    starts=(_START,),
    again=("Load weight begin", ("available",)),
    ready=("available",),
    settle=_settle,
)
"""SGLang: a start begins with its arguments."""
