"""vLLM's command.

Source:
    vLLM 0.32.0 and 0.33.0 ``engine/arg_utils.py``, ``config/{cache,scheduler,speculative}.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tonnage.errors import FlagsError, Problem, raise_if_any
from tonnage.flags.values import (
    ServeCommand,
    choice_problem,
    common_problems,
    kv_dtype_problems,
    parse_version,
    unused,
)
from tonnage.memory.budget import DEFAULT_UTILIZATION, highest_utilization, requested_bytes, utilization_text
from tonnage.memory.cache_dtypes import engine_kv_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.draft import DraftMethod
    from tonnage.flags.values import DraftPlan, ServePlan, Version

NEWEST: Version = (0, 33)
OLDEST: Version = (0, 27)
LOAD_FORMAT = "tonnage"
"""Of the plug-in, :mod:`tonnage.vllm_plugin`."""
METHODS: dict[DraftMethod, str] = {
    "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark",
    "draft-model": "draft_model", "ngram": "ngram", "suffix": "suffix",
}  # fmt: skip
"""A DFlash2 draft is told from a DFlash one by its config."""
QUANTIZATIONS = frozenset({
    "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8", "fp8",
    "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "humming", "inc",
    "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16",
    "mxfp4", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
})  # fmt: skip


def vllm_command(serve: ServePlan) -> ServeCommand:
    """Return ``vllm serve`` with everything memory depends on.

    A step is lowered to what all requests hold at most; a utilization to what is free. Both take less memory.

    Raises:
        FlagsError: vLLM has no flag for something, or would refuse the values together; all problems at once.
    """
    parse_version(serve.release, NEWEST, OLDEST, "vLLM")
    raise_if_any(FlagsError, _problems(serve))
    tokens = min(serve.prefill_chunk_tokens, serve.concurrency * serve.context_tokens)
    notes = []
    if tokens < serve.prefill_chunk_tokens:
        notes.append(f"prefill step lowered to {tokens}: all requests together hold no more")
    words = ["vllm", "serve", serve.model, *_topology_words(serve), "--max-model-len", str(serve.context_tokens)]
    words += ["--max-num-seqs", str(serve.concurrency), "--max-num-batched-tokens", str(tokens)]
    words += _load_words(serve)
    words += _memory_words(serve, notes)
    if serve.page_tokens is not None:
        words += ["--block-size", str(serve.page_tokens)]
    if serve.quantization is not None:
        words += ["--quantization", serve.quantization]
    if serve.eager:
        words.append("--enforce-eager")
    if serve.draft is not None:
        words += ["--speculative-config", _draft_text(serve.draft)]
    return ServeCommand(words=tuple(words), notes=tuple(notes))


def _problems(serve: ServePlan) -> Iterator[Problem]:
    yield from common_problems(serve)
    yield from unused(serve, "vLLM", "kv_tokens", "state_slots")
    yield from kv_dtype_problems(serve, _kv_dtype)
    if serve.prefill_chunk_tokens < serve.concurrency:
        yield Problem(
            where="prefill chunk", what="vLLM refuses steps of fewer tokens than sequences",
            expected=f"at least {serve.concurrency}", found=str(serve.prefill_chunk_tokens),
        )  # fmt: skip
    memory = _memory(serve)
    if memory is not None and not highest_utilization(*memory):
        yield Problem(where="free memory", what="less than a ten-thousandth of the GPU", found=str(serve.free_bytes))
    if serve.quantization is not None and serve.quantization not in QUANTIZATIONS:
        yield choice_problem("quantization", serve.quantization, QUANTIZATIONS)
    if serve.draft is not None and serve.draft.method not in METHODS:
        yield choice_problem("draft method", serve.draft.method, tuple(METHODS))


def _kv_dtype(word: str) -> str:
    return engine_kv_dtype(word, ())


def _topology_words(serve: ServePlan) -> list[str]:
    topology = serve.topology
    words = ["--tensor-parallel-size", str(topology.tp)]
    if topology.pp > 1:
        words += ["--pipeline-parallel-size", str(topology.pp)]
    if topology.ep > 1:
        words.append("--enable-expert-parallel")
    if topology.dcp > 1:
        words += ["--decode-context-parallel-size", str(topology.dcp)]
    return words


def _load_words(serve: ServePlan) -> list[str]:
    """Return what makes vLLM read one directory per rank; nothing for a standard checkpoint."""
    if serve.layout != "tp":
        return []
    words = ["--load-format", LOAD_FORMAT]
    if serve.public_key is not None:
        words += ["--model-loader-extra-config", json.dumps({"public_key": serve.public_key})]
    return words


def _memory_words(serve: ServePlan, notes: list[str]) -> list[str]:
    utilization, memory = serve.fraction or DEFAULT_UTILIZATION, _memory(serve)
    if memory is not None and requested_bytes(memory[0], utilization) > memory[1]:
        utilization = highest_utilization(*memory)
        notes.append(f"utilization lowered to {utilization_text(utilization)}: no more is free")
    words = ["--kv-cache-dtype", _kv_dtype(serve.kv_dtype)]
    words += ["--gpu-memory-utilization", utilization_text(utilization)]
    if serve.kv_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(serve.kv_bytes)]
    return words


def _memory(serve: ServePlan) -> tuple[int, int] | None:
    """Return the GPU and what is free on it, of a plan that states both and states them right."""
    total, free = serve.total_bytes, serve.free_bytes
    return (total, free) if total and free is not None and 0 <= free <= total else None


def _draft_text(draft: DraftPlan) -> str:
    config: dict[str, str | int] = {"method": METHODS[draft.method], "num_speculative_tokens": draft.tokens}
    if draft.model is not None:
        config["model"] = draft.model
    return json.dumps(config, separators=(",", ":"))
