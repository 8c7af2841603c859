"""The rows of ``tests/data/vllm_kv_rows.json`` are what vLLM's classes say; the fast tests hold the plan to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm_kv
from kv_rows import DEFAULTS
from vllm_kv import Question

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


@pytest.mark.parametrize("row", [r for r in ROWS if r["config"] in CONFIGS], ids=lambda row: row["config"])
def test_row_is_what_vllm_says(row: dict[str, Any]) -> None:
    config = json.loads((DATA / "configs" / f"{row['config']}.json").read_text())
    question = Question(**{key: row.get(key, value) for key, value in DEFAULTS.items()})
    said = vllm_kv.answer(config, question)
    assert {key: said[key] for key in row if key != "config"} == {k: v for k, v in row.items() if k != "config"}
