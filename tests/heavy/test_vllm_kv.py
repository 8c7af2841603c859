"""The rows of ``tests/data/vllm_kv_rows.json`` are what vLLM's classes say; the fast tests hold the plan to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm_kv
from kv_rows import DEFAULTS
from vllm_kv import Question

from tonnage.api import read_config
from tonnage.memory.cache_vllm import vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.recipes.blueprint import blueprint_of
from tonnage.topology import stage_layers

pytestmark = pytest.mark.heavy

DATA = Path(__file__).parent.parent / "data"
ROWS = json.loads((DATA / "vllm_kv_rows.json").read_text())["rows"]
CONFIGS = (
    "meta-llama__Meta-Llama-3.1-70B",
    "google__gemma-4-26B-A4B",
    "openai__gpt-oss-20b",
    "meta-llama__Llama-4-Scout-17B-16E-Instruct",
    "deepseek-ai__DeepSeek-V3.2",
    "deepseek-ai__DeepSeek-V4-Flash",
    "moonshotai__Kimi-K3",
    "Qwen__Qwen3.5-27B",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)
"""One of every kind of cache."""


STAGES = {
    "plain": ("meta-llama__Meta-Llama-3.1-70B", Question(tp=16), 3),
    "windows and full layers": ("google__gemma-4-26B-A4B", Question(tp=4, kv_dtype="fp8", block_tokens=32), 4),
    "windows by turns": ("openai__gpt-oss-20b", Question(tp=8), 5),
    "chunks": (
        "meta-llama__Llama-4-Scout-17B-16E-Instruct",
        Question(tp=2, kernel_block_tokens=64, block_tokens=64),
        5,
    ),
    "latents and index keys": ("deepseek-ai__DeepSeek-V3.2", Question(tp=8, block_tokens=64), 3),
    "packed records": (
        "deepseek-ai__DeepSeek-V4-Flash",
        Question(tp=8, kv_dtype="fp8", block_tokens=256, packed=True, context_tokens=30000),
        2,
    ),
    "states": ("Qwen__Qwen3.5-27B", Question(tp=4, prefix_caching=True), 3),
    "states of Mamba": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", Question(tp=2), 5),
}
"""Stages of unequal numbers of layers, over ranks that do and do not divide the KV heads."""


@pytest.mark.parametrize("row", [r for r in ROWS if r["config"] in CONFIGS], ids=lambda row: row["config"])
def test_row_is_what_vllm_says(row: dict[str, Any]) -> None:
    config = json.loads((DATA / "configs" / f"{row['config']}.json").read_text())
    question = Question(**{key: row.get(key, value) for key, value in DEFAULTS.items()})
    said = vllm_kv.answer(config, question)
    assert {key: said[key] for key in row if key != "config"} == {k: v for k, v in row.items() if k != "config"}


@pytest.mark.parametrize(("name", "question", "pp"), STAGES.values(), ids=STAGES)
def test_every_pipeline_stage_holds_what_vllm_says(name: str, question: Question, pp: int) -> None:
    path = DATA / "configs" / f"{name}.json"
    in_flight, stated = vllm_kv.stage_bytes(json.loads(path.read_text()), question, pp)
    model = blueprint_of(read_config(path))
    options = VllmCacheOptions(
        tp_size=question.tp,
        kv_dtype=question.kv_dtype,
        block_tokens=question.block_tokens,
        kernel_block_tokens=question.kernel_block_tokens,
        prefix_caching=question.prefix_caching,
        max_batched_tokens=in_flight,
        concurrent_batches=1,
        packed=question.packed,
    )
    fields = model.config.fields
    layers = fields.get("text_config", fields)["num_hidden_layers"]
    stages = [vllm_cache(model.caches, options, layers=mine) for mine in stage_layers(layers, pp)]

    assert [(stage.bytes_per_block, stage.request_bytes(question.context_tokens)) for stage in stages] == stated
