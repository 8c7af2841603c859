"""Lines of vLLM's start-up log, 0.10 to 0.33.

The closing summary is read in pieces, because a release that changes its tail must not cost the rest. To 0.26 it splits
weights, activation peak and memory outside of torch; from 0.27 it says what was consumed, and its activation peak holds
the estimate of the graphs.

Source: vllm/v1/worker/gpu_worker.py, gpu_model_runner.py and vllm/v1/core/kv_cache_utils.py of the releases named; the
expressions were tried on public logs.
"""

from __future__ import annotations

import re

from tonnage.observe.figures import Quantity, Reading
from tonnage.observe.lines import EngineLog, figure, pattern, reading, refusal, setting_reader

_ARGUMENTS = setting_reader(
    {
        "model": "model",
        "model_tag": "model",
        "tensor_parallel_size": "tp",
        "pipeline_parallel_size": "pp",
        "data_parallel_size": "dp",
        "enable_expert_parallel": "ep",
        "decode_context_parallel_size": "dcp",
        "max_model_len": "max_model_len",
        "max_seq_len": "max_model_len",
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "kv_cache_dtype": "kv_cache_dtype",
        "dtype": "dtype",
        "quantization": "quantization",
        "block_size": "block_size",
        "gpu_memory_utilization": "gpu_memory_utilization",
    }
)
_VERSION = r"(?P<version>\d[\w.+-]{0,80})"

_SPECULATION = re.compile(r"speculative_config'?(?:=|: ?)(?P<draft>\{[^{}]{1,400}\}|\w{1,40}\([^()]{1,400}\))")


def _settings(match: re.Match[str]) -> tuple[Reading, ...]:
    """Return the settings that follow; those of a draft stand inside and come later."""
    rest = match.string[match.end() :]
    draft = _SPECULATION.search(rest)
    return _ARGUMENTS(rest) + (() if draft is None else (reading("draft", draft["draft"]),))


def _device(match: re.Match[str]) -> tuple[Reading, ...]:
    """Return free, total and their difference, which was taken before the engine looked: B0.

    More free memory than there is says nothing of what was taken.
    """
    free, total = reading("free", match["free"]), reading("total", match["total"])
    assert free.quantity is not None
    assert total.quantity is not None
    taken = total.quantity - free.quantity
    return (free, total) if taken.nbytes < 0 else (free, total, Reading(name="baseline", quantity=taken))


def _exact(match: re.Match[str]) -> tuple[Reading, ...]:
    return (Reading(name="kv_in_use", quantity=Quantity(number=int(match["exact"]))),)


_PATTERNS = (
    pattern("vLLM API server version", rf"vLLM API server version v?{_VERSION}"),
    pattern("LLM engine (v", rf"Initializing a V\d LLM engine \(v{_VERSION}\)"),
    pattern("LLM engine (v", r"LLM engine \(v", _settings),
    pattern("non-default args", r"non-default args:", _settings),
    pattern("Model loading took", rf"Model loading took {figure('weights')} GiB"),
    pattern("weights memory:", rf"weights memory: {figure('weights_summary')} ?GiB"),
    pattern("torch peak memory increase:", rf"torch peak memory increase: {figure('activation_peak')} ?GiB"),
    pattern("non-torch forward increase", rf"non-torch forward increase memory: {figure('non_torch')} ?GiB"),
    pattern("total consumed", rf"total consumed \(from mem_get_info\): {figure('consumed')} ?GiB"),
    pattern("Total non KV cache memory:", rf"Total non KV cache memory: {figure('non_kv')} ?GiB"),
    pattern("Available KV cache memory:", rf"Available KV cache memory: {figure('kv_budget')} GiB"),
    pattern("KV cache size:", rf"KV cache size: {figure('kv_tokens')} tokens"),
    pattern(
        "Maximum concurrency for",
        rf"Maximum concurrency for {figure('concurrency_tokens')} tokens per request: {figure('max_concurrency')}x",
    ),
    pattern(
        "Free memory on device",
        rf"Free memory on device (?:[^\s()]{{1,40}} )?\({figure('free')}/{figure('total')} GiB\) on startup\.",
        _device,
    ),
    pattern(
        "utilization is (",
        rf"[Dd]esired GPU memory utilization is \({figure('utilization')}, {figure('requested')} GiB\)",
    ),
    pattern("GiB for weight", rf"{figure('weights_summary')} GiB for weights?\b"),
    pattern("GiB for consumed", rf"{figure('consumed')} GiB for consumed memory"),
    pattern("GiB for peak activation", rf"{figure('activation_peak')} GiB for peak activation"),
    pattern("GiB for non-torch", rf"{figure('non_torch')} GiB for non-torch memory"),
    pattern("GiB for CUDAGraph", rf"{figure('graphs')} GiB for CUDAGraph"),
    pattern("--kv-cache-memory=", rf"--kv-cache-memory={figure('kv_suggested')}`?(?: \([^()]{{0,40}}\))? to fit"),
    pattern("--kv-cache-memory=", rf"--kv-cache-memory={figure('kv_suggested_full')}`?(?: \([^()]{{0,40}}\))? to full"),
    pattern("cache memory in use", rf"[Cc]urrent kv cache memory in use is {figure('kv_in_use')} GiB"),
    pattern("cache memory in use", r"[Cc]urrent kv cache memory in use is (?P<exact>\d{1,18}) bytes", _exact),
    pattern(
        "Graph capturing finished", rf"Graph capturing finished in [\d.]{{1,12}} secs, took {figure('graphs')} GiB"
    ),
    pattern(
        "CUDA graph pool memory:",
        rf"CUDA graph pool memory: {figure('graphs')} GiB \(actual\), {figure('graphs_estimated')} GiB \(estimated\)",
    ),
    pattern("attention block size", rf"Setting attention block size to {figure('attention_block_tokens')} tokens"),
    pattern("Padding mamba page size", rf"Padding mamba page size by {figure('state_padding_percent')}%"),
    pattern(
        "padding layers",
        rf"Add {figure('padding_layers')} padding layers, may waste at most {figure('padding_waste_percent')}%",
    ),
    pattern(
        "Auto-fit max_model_len",
        rf"Auto-fit max_model_len: reduced from {figure('auto_fit_from')} to {figure('auto_fit_to')}",
    ),
    pattern(
        "Initial free memory",
        rf"Initial free memory:? {figure('free')} GiB(?:, reserved {figure('kv_reserved')} GiB memory for KV Cache)?",
    ),
    pattern(
        "less than desired GPU memory",
        rf"Free memory on device (?:[^\s()]{{1,40}} )?\({figure('refused_free')}/{figure('refused_total')} GiB\) on "
        r"startup is less than desired GPU memory utilization "
        rf"\({figure('refused_utilization')}, {figure('refused_requested')} GiB\)",
    ),
    refusal("less than desired GPU memory", "less memory is free than the utilization asks for"),
    refusal("No available memory for the cache blocks", "no memory is left for the cache"),
    pattern("max seq len (", rf"max seq len \({figure('refused_length')}\)"),
    pattern("KV cache is needed", rf"{figure('kv_needed')} GiB KV cache is needed"),
    refusal("KV cache is needed", "the cache of one request of the longest context does not fit"),
    pattern("available KV cache memory (", rf"available KV cache memory \({figure('kv_available')} GiB\)"),
    pattern("maximum model length is", rf"estimated maximum model length is {figure('kv_est_max_len')}"),
)

_CPU_PATTERNS = (
    pattern(
        "bytes in",
        rf"read {figure('weights_read')} bytes in \d{{1,12}} tensors, planned \d{{1,18}}, in [\d.]{{1,12}} s, "
        rf"(?:not )?verified; the model holds {figure('weights_held')}, of these",
    ),
    pattern(
        "GiB for KV cache on node",
        rf"Explicitly set \({figure('kv_reserved')}/{figure('node_total')}\) GiB for KV cache on node",
    ),
    pattern(
        "GiB for KV cache on node",
        rf"Auto set \({figure('kv_budget')}/{figure('node_total')}\) GiB for KV cache on node",
    ),
    pattern("was consumed by non-kv usages", rf"{figure('process')} GiB memory was consumed by non-kv usages"),
    refusal("less than desired CPU memory utilization", "less memory is free than the utilization asks for"),
    refusal("less than requested memory for kv", "less memory is free than the cache asks for"),
)
"""What the plug-in of this program says, and vLLM's worker on a CPU, where no line says what weights take.

Source: tonnage/vllm_plugin/loader.py; vllm 0.32.0 v1/worker/cpu_worker.py.
"""

_MARKERS = (
    "GiB", "bytes in", "LLM engine (v", "vLLM API server version", "non-default args", "KV cache size:",
    "Maximum concurrency for", "--kv-cache-memory=", "cache memory in use", "attention block size",
    "Padding mamba page size", "padding layers", "Auto-fit max_model_len", "No available memory for the cache blocks",
    "max seq len (", "maximum model length is",
)  # fmt: skip
"""Short texts of which every line above holds at least one."""

VLLM = EngineLog(
    name="vllm",
    patterns=(*_PATTERNS, *_CPU_PATTERNS),
    markers=_MARKERS,
    starts=("vLLM API server version", "LLM engine (v"),
    again=("Model loading took", ("kv_budget", "refusal")),
    ready=("kv_in_use", "kv_tokens"),
)
"""vLLM: a start begins with the line of the server, or of the engine."""
