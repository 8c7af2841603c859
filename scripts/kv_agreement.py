"""Compare planned KV capacity with what vLLM printed at start, given its KV bytes; write ``docs/kv-agreement.md``.

Run: python scripts/kv_agreement.py [--check]

Rows are ``tests/data/logs_kv.json``. What a log leaves out is taken as vLLM's default: the longest context from the
config, the tokens of a step from the size of the GPU, prefix caching on, two steps in flight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tonnage.api import read_config
from tonnage.checkpoint.config import parse_config
from tonnage.memory.cache import State
from tonnage.memory.cache_dtypes import engine_kv_dtype
from tonnage.memory.cache_vllm import VllmCache, packs_tuples, token_count, vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.recipes.blueprint import Blueprint, blueprint_of
from tonnage.topology import stage_layers

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "data" / "logs_kv.json"
CONFIGS = ROOT / "tests" / "data" / "configs"
REPORT = ROOT / "docs" / "kv-agreement.md"
GIB = 1 << 30
STEP_TOKENS = ((160, 16384), (70, 8192), (0, 2048))
"""vLLM's default tokens of a step by GiB of the GPU, for its API server (0.24 to 0.33)."""

ASIDE = {
    "no recipe": "no recipe describes the family, or no config of the model is known",
    "context": "windows or states, and the row does not say for which longest context",
    "draft": "it ran a draft whose tokens per step the log does not say",
}
REASONS = {
    "llama-3.1-8b-instruct-vllm-tp1-026": "blocks of 65.63 GiB: those of the rank that has the least",
    "qwen3-235b-a22b-fp8-vllm-tp4-264": "blocks of 8.02 GiB: those of the rank that has the least",
    "qwen3.6-35b-a3b-nvfp4-vllm-tp1-221": "KV dtype not stated; with FP8: equal",
    "qwen3.6-27b-autoround-int4-vllm-tp2-205": "draft and tokens of a step not stated",
    "gemma-4-31b-it-int4-autoround-vllm-tp2-206": "release not stated; one that enlarges the pages of full layers "
    "before it pads them gives the figure within 0.1 %",
    "gemma-4-26b-a4b-it-vllm-tp1-279": "release not stated; the printed figure counts blocks of 32 tokens",
    "gemma-4-31b-it-id-suffix-not-checked-vllm-tp2-341": "tokens of a step not stated, an XPU with blocks of 64; with "
    "4,096: equal",
    "qwen3.6-27b-quantised-vllm-tp1-228": "draft not stated; with three tokens of MTP: 6.64 GiB",
}
REASONS |= dict.fromkeys(
    (
        "qwen3.8-27b-exl3-hydrated-k5k6-vllm-tp1-131",
        *(f"qwen3.8-27b-exl3-frontier-build-vllm-tp1-{n}" for n in (119, 120, 121, 122, 123)),
    ),
    "prefix caching not stated; without: equal",
)


def was_refused(row: Mapping[str, Any]) -> bool:
    """Whether the engine did not start, because the cache could not hold the longest context."""
    return bool(row.get("needed_gib") or row.get("refused"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One log row and the plan's answer.

    Attributes:
        row: The row.
        aside: Why it cannot be compared; empty where it can.
        tokens: Planned tokens, where the log prints them.
        needed_bytes: Planned bytes of one request, of a refusal.
        longest_tokens: Planned longest context, of a refusal.
        fits: Whether the plan takes the launch that was refused.
    """

    row: Mapping[str, Any]
    aside: str = ""
    tokens: int | None = None
    needed_bytes: int | None = None
    longest_tokens: int | None = None
    fits: bool = False

    @property
    def excess_permyriad(self) -> int:
        """Planned tokens over printed ones, in hundredths of a percent, away from zero."""
        logged = self.row["kv_tokens"]
        excess = 10_000 * ((self.tokens or 0) - logged)
        return -(-excess // logged) if excess > 0 else -(excess // -logged)

    @property
    def is_close(self) -> bool:
        """Whether tokens are within 1 %."""
        return -100 <= self.excess_permyriad <= 100


def answers() -> Iterator[Answer]:
    """Yield every row with its answer."""
    for row in json.loads(LOGS.read_text())["rows"]:
        aside = _aside(row)
        yield Answer(row=row, aside=aside) if aside else _answer(row)


def _aside(row: Mapping[str, Any]) -> str:
    if "config" not in row:
        return "no recipe"
    return "draft" if row.get("draft", "none") not in ("none", "") and not _draft_known(row) else ""


def _draft_known(row: Mapping[str, Any]) -> bool:
    """Gemma's MTP layers read the cache of the target, and any other draft's tokens must be stated."""
    return row["draft_tokens"] > 0 or row["draft"].startswith("Gemma4")


def _answer(row: Mapping[str, Any]) -> Answer:
    blueprint = _blueprint(json.dumps(row["config"]))
    cache, context = plan(row, blueprint)
    if not row.get("context_tokens") and not all(group.grows for group in cache.groups):
        return Answer(row=row, aside="context")
    budget = round(row["kv_gib"] * GIB)
    tokens = None
    if row.get("kv_tokens"):
        tokens = cache.capacity_tokens(budget, context)
    return Answer(
        row=row,
        tokens=tokens,
        needed_bytes=cache.request_bytes(context),
        longest_tokens=cache.longest_context(budget, most_tokens=context),
        fits=cache.needed_bytes(1, context) <= budget,
    )


def plan(row: Mapping[str, Any], blueprint: Blueprint, **changes: Any) -> tuple[VllmCache, int]:
    """Return the planned cache of a row, and its longest context."""
    drafts = blueprint.draft_caches if row["draft_tokens"] and "MTP" in row.get("draft", "") else ()
    caches = blueprint.caches + drafts
    hybrid = any(isinstance(cache.kept, State) for cache in caches)
    version = row.get("version", "")
    options = {
        "tp_size": row["tp"],
        "dcp_size": row["dcp"],
        "kv_dtype": engine_kv_dtype(row["kv_dtype"], caches, stated=blueprint.kv_dtype),
        "model_dtype": "F32" if row.get("dtype") == "float32" else "BF16",
        "block_tokens": None if hybrid else row.get("block_tokens"),  # of a hybrid it is printed as raised
        "draft_tokens": row["draft_tokens"],
        "prefix_caching": row.get("prefix_caching", True),
        "max_batched_tokens": row.get("max_batched_tokens")
        or next(tokens for gib, tokens in STEP_TOKENS if row["gpu_gib"] >= gib),
        "counts": row.get("counts") or token_count(version),
        "tuple_packing": packs_tuples(version),
        **changes,
    }
    layers = None
    if row["pp"] > 1:
        layers = stage_layers(blueprint.config.fields["num_hidden_layers"], row["pp"])[-1]
    text = blueprint.config.fields.get("text_config", blueprint.config.fields)
    context = row.get("context_tokens") or text.get("max_position_embeddings") or 8192
    return vllm_cache(caches, VllmCacheOptions(**options), layers=layers), context


@lru_cache(maxsize=64)
def _blueprint(config: str) -> Blueprint:
    stated = json.loads(config)
    if isinstance(stated, str):
        return blueprint_of(read_config(CONFIGS / f"{stated}.json"))
    return blueprint_of(parse_config(stated, name="config.json", hf_quant=None))


def report(found: list[Answer]) -> str:
    """Return the Markdown report."""
    compared = [a for a in found if not a.aside and a.tokens is not None]
    exact = [a for a in compared if a.row["exact"]]
    refused = [a for a in found if not a.aside and was_refused(a.row)]
    lines = [
        "# Agreement with the KV capacity vLLM prints",
        "",
        "Given the KV bytes of a log, `tonnage.memory.cache_vllm` plans the tokens vLLM prints as `KV cache size`.",
        "What each log states, with its source, is in `tests/data/logs_kv.json`; what it does not state is taken as",
        "vLLM's default. Logged bytes are rounded to 0.01 GiB. Written by `scripts/kv_agreement.py`; a test holds it",
        "true.",
        "",
        f"* rows with a model id that is exact: {_close(exact)}",
        f"* all rows with a config: {_close(compared)}",
        f"* refusals: {sum(not a.fits for a in refused)} of {len(refused)} refused by the plan too",
        "",
        "## Rows outside 1 %",
        "",
        "| row | exact id | printed tokens | planned | excess | reason |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        *(_outside(a) for a in compared if not a.is_close),
        "",
        "## Refusals",
        "",
        "| row | exact id | needed GiB, logged | planned | longest, logged | planned | remark |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        *(_refusal(a) for a in refused),
        "",
        "## Rows set aside",
        "",
        *(f"* `{a.row['id']}`: {ASIDE[a.aside]}" for a in found if a.aside),
        "",
        "## Rows within 1 %",
        "",
        "| row | exact id | KV GiB | printed tokens | planned | excess |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(_within(a) for a in compared if a.is_close),
    ]
    return "\n".join(lines) + "\n"


def _close(some: list[Answer]) -> str:
    over = sum(a.excess_permyriad > 100 for a in some)
    within = sum(a.is_close for a in some)
    return f"{within} of {len(some)} within 1 % ({100 * within // len(some)} %), {over} over by more than 1 %"


def _percent(permyriad: int) -> str:
    sign = "+" if permyriad > 0 else "-" if permyriad < 0 else ""
    return f"{sign}{abs(permyriad) // 100}.{abs(permyriad) % 100:02} %"


def _outside(a: Answer) -> str:
    logged = f"{a.row['kv_tokens']:,} | {a.tokens:,} | {_percent(a.excess_permyriad)}"
    return f"| `{a.row['id']}` | {_exact(a)} | {logged} | {_why(a)} |"


def _within(a: Answer) -> str:
    return (
        f"| `{a.row['id']}` | {_exact(a)} | {a.row['kv_gib']} | {a.row['kv_tokens']:,} | {a.tokens:,} "
        f"| {_percent(a.excess_permyriad)} |"
    )


def _refusal(a: Answer) -> str:
    hundredths = -(-(a.needed_bytes or 0) * 100 // GIB)
    longest = a.row.get("longest_tokens")
    return (
        f"| `{a.row['id']}` | {_exact(a)} | {a.row.get('needed_gib', 'not printed')} "
        f"| {hundredths // 100}.{hundredths % 100:02} "
        f"| {f'{longest:,}' if longest else 'not printed'} | {a.longest_tokens:,} | {_why(a)} |"
    )


def _exact(a: Answer) -> str:
    return "yes" if a.row["exact"] else ""


def _why(a: Answer) -> str:
    return REASONS.get(a.row["id"], "")


def main() -> int:
    """Write the report, or with ``--check`` say whether it is up to date."""
    text = report(list(answers()))
    if "--check" in sys.argv[1:]:
        return 0 if REPORT.exists() and REPORT.read_text() == text else 1
    REPORT.write_text(text)
    print("\n".join(text.splitlines()[6:9]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
