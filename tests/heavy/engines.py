"""Whole engines on the CPU, one after the other in one process: how each goes on from the same prompts, greedily.

Run: python engines.py OUTPUT JOB...
A job is a JSON object of options of vLLM, with ``model``. OUTPUT gets a JSON list: of every job the ``tokens``, and what
every worker's plug-in ``reports``; or why the engine is ``refused``.

Workers are forked, which spares each of them the 15 s of an import. So this process itself must never compute: an engine of
one rank runs in it and therefore after those of several. Ranks talk through sockets, not through shared memory, where they
would wait without sleeping.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm.model_executor.models.registry as model_registry
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.v1.executor import multiproc_executor

KV_CACHE_BYTES = 64 << 20
PROMPTS = [[(37 * number + 11 * place) % 250 + 1 for place in range(6)] for number in range(8)]
TOKENS = 32


def main(output: str, *jobs: str) -> None:
    """Do the jobs, those of several ranks first; answers are in the order given."""
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    model_registry._run_in_subprocess = lambda inspect: inspect()  # else an import for every class
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
    _take_local_experts()
    options = [json.loads(job) for job in jobs]
    answers = {}
    for number in sorted(range(len(options)), key=lambda number: options[number].get("tensor_parallel_size", 1) == 1):
        answers[number] = _answer(options[number])
    Path(output).write_text(json.dumps([answers[number] for number in range(len(options))]))


def _answer(options: dict[str, Any]) -> dict[str, Any]:
    try:
        engine = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            disable_log_stats=True,
            **options,
        )
    except Exception as error:  # noqa: BLE001 - whatever ends a worker ends the engine as another exception
        return {"refused": str(error)}
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in engine.generate(prompts, sampling, use_tqdm=False)]
    reports = engine.collective_rpc(_report)
    engine.llm_engine.engine_core.shutdown()
    return {"tokens": tokens, "reports": reports}


def _report(worker: Any) -> dict[str, Any] | None:
    report = getattr(worker.get_model(), "tonnage_report", None)
    return None if report is None else asdict(report)


def _take_local_experts() -> None:
    """Give vLLM's experts for CPUs the numbers of a rank's own experts; others count nothing.

    Those of 0.32.0 take the numbers of all experts for those of their own, read beyond them, and crash, whatever loads the
    weights. What is compared here is two ways to load them.
    """
    apply = cpu_moe.CPUUnquantizedExperts.apply

    def apply_local(self: Any, *arguments: Any, **named: Any) -> None:
        expert_map = named.get("expert_map")
        if expert_map is not None:
            local = expert_map[named["topk_ids"].long()]
            named["topk_weights"] = named["topk_weights"].masked_fill(local < 0, 0)
            named["topk_ids"] = local.clamp(min=0).to(named["topk_ids"].dtype)
        apply(self, *arguments, **named)

    cpu_moe.CPUUnquantizedExperts.apply = apply_local


if __name__ == "__main__":
    main(*sys.argv[1:])
