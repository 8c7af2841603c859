"""SGLang's command.

Source:
    SGLang 0.5.23 and 0.5.14 ``srt/server_args.py``, ``srt/arg_groups/fields``; 0.5.9 for the older words.
"""

from __future__ import annotations

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
from tonnage.memory.budget import utilization_text
from tonnage.memory.cache_sglang_options import sglang_kv_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.draft import DraftMethod
    from tonnage.flags.values import DraftPlan, ServePlan, Version

NEWEST: Version = (0, 5, 23)
OLDEST: Version = (0, 5, 9)
OLD_GRAPH_WORDS: Version = (0, 5, 10)
"""Last release read with one set of flags for all graphs; from :data:`PHASES` there is one per phase."""
PHASES: Version = (0, 5, 14)
DEFAULT_MAX_PREFILL_TOKENS = 16384
ALGORITHMS: dict[DraftMethod, str] = {
    "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK",
    "draft-model": "STANDALONE", "ngram": "NGRAM",
}  # fmt: skip
STEPWISE: tuple[DraftMethod, ...] = ("eagle", "eagle3", "mtp", "draft-model")
"""Methods that draft one token after another; the others propose a block at once."""
QUANTIZATIONS = frozenset({
    "auto-round", "auto-round-int8", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq",
    "gptq_marlin", "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "moe_wna16", "mxfp4", "mxfp8",
    "nvfp4_online", "petit_nvfp4", "quark", "quark_int4fp8_moe", "quark_mxfp4", "unquant", "w4afp8", "w8a8_fp8",
    "w8a8_int8",
})  # fmt: skip


def sglang_command(serve: ServePlan) -> ServeCommand:
    """Return ``sglang.launch_server`` with everything memory depends on; long forms only.

    Raises:
        FlagsError: SGLang has no flag for something, or not in this release; all problems at once.
    """
    version = parse_version(serve.release, NEWEST, OLDEST, "SGLang")
    raise_if_any(FlagsError, _problems(serve, version))
    words = ["python", "-m", "sglang.launch_server", "--model-path", serve.model, *_topology_words(serve)]
    words += ["--context-length", str(serve.context_tokens), "--max-running-requests", str(serve.concurrency)]
    words += ["--chunked-prefill-size", str(serve.prefill_chunk_tokens)]
    if serve.prefill_chunk_tokens > DEFAULT_MAX_PREFILL_TOKENS:
        words += ["--max-prefill-tokens", str(serve.prefill_chunk_tokens)]
    words += ["--kv-cache-dtype", sglang_kv_dtype(serve.kv_dtype)]
    if serve.fraction is not None:
        words += ["--mem-fraction-static", utilization_text(serve.fraction)]
    if serve.kv_tokens is not None:
        words += ["--max-total-tokens", str(serve.kv_tokens)]
    if serve.state_slots is not None:
        words += ["--max-mamba-cache-size", str(serve.state_slots)]
    if serve.page_tokens is not None:
        words += ["--page-size", str(serve.page_tokens)]
    if serve.quantization is not None:
        words += ["--quantization", serve.quantization]
    if serve.eager:
        words += _eager_words(version)
    if serve.draft is not None:
        words += _draft_words(serve.draft)
    return ServeCommand(words=tuple(words))


def _problems(serve: ServePlan, version: Version) -> Iterator[Problem]:
    yield from common_problems(serve)
    yield from unused(serve, "SGLang", "kv_bytes")
    yield from kv_dtype_problems(serve, sglang_kv_dtype)
    if serve.fraction == 1:
        yield Problem(where="memory fraction", what="leaves nothing beside the pool", expected="below 1", found="1")
    if serve.quantization is not None and serve.quantization not in QUANTIZATIONS:
        yield choice_problem("quantization", serve.quantization, QUANTIZATIONS)
    if OLD_GRAPH_WORDS < version[:3] < PHASES and serve.eager:
        yield Problem(
            where="CUDA graphs", what="flags of this SGLang release are not known",
            expected="0.5.10 or earlier, 0.5.14 or later", found=".".join(map(str, version)),
        )  # fmt: skip
    if serve.draft is None:
        return
    if serve.draft.method not in ALGORITHMS:
        yield choice_problem("draft method", serve.draft.method, tuple(ALGORITHMS))


def _topology_words(serve: ServePlan) -> list[str]:
    topology = serve.topology
    words = ["--tp-size", str(topology.tp)]
    for flag, size in (("--pp-size", topology.pp), ("--ep-size", topology.ep), ("--dcp-size", topology.dcp)):
        if size > 1:
            words += [flag, str(size)]
    return words


def _eager_words(version: Version) -> list[str]:
    if version[:3] < PHASES:
        return ["--disable-cuda-graph"]
    return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]


def _draft_words(draft: DraftPlan) -> list[str]:
    """Return the words of a chain of drafted tokens; the token they follow is verified with them."""
    words = ["--speculative-algorithm", ALGORITHMS[draft.method]]
    if draft.model is not None:
        words += ["--speculative-draft-model-path", draft.model]
    if draft.method in STEPWISE:
        words += ["--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(draft.tokens + 1)]
    return words
