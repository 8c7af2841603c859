"""Plan every row of ``tests/data/vllm_oracle.json`` from its config alone and write ``docs/vllm-agreement.md``.

Run: python scripts/vllm_agreement.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tonnage import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.api import Checkpoint, checkpoint_from_config
from tonnage.checkpoint.io import read_bytes
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
ORACLE = ROOT / "tests" / "data" / "vllm_oracle.json"
CONFIGS = ROOT / "tests" / "data" / "configs"
REPORT = ROOT / "docs" / "vllm-agreement.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of vLLM's own classes and the plan's answer to it."""

    group: str
    config: str
    tp: int
    ep: bool
    pp: int
    rank: int
    quant: str
    oracle_bytes: int
    planned_bytes: int

    @property
    def difference(self) -> int:
        """Planned minus measured bytes."""
        return self.planned_bytes - self.oracle_bytes


def rows() -> Iterator[Row]:
    """Yield every row with its plan."""
    oracle = json.loads(ORACLE.read_text())
    for group in ("first", "more"):
        for facts in oracle[group]:
            plan = plan_checkpoint(
                _checkpoint(facts["config"], facts["quant"]),
                PlanRequest(tp=facts["tp"], ep=facts["tp"] if facts["ep"] else 1, pp=facts["pp"], engine="vllm"),
            )
            planned = plan.ranks[facts["rank"]].weights_bytes
            yield Row(group=group, planned_bytes=planned, oracle_bytes=facts["params_bytes"],
                      **{key: facts[key] for key in ("config", "tp", "ep", "pp", "rank", "quant")})  # fmt: skip


def report(found: list[Row]) -> str:
    """Return the Markdown report."""
    first = [row for row in found if row.group == "first"]
    lines = [
        "# Agreement with vLLM's own classes",
        "",
        json.loads(ORACLE.read_text())["source"],
        "",
        "Every row is planned from its config alone, `tonnage plan CONFIG --engine vllm`. Written by",
        "`scripts/vllm_agreement.py`; a test holds it true.",
        "",
        f"* first rows: {_equal(first)} of {len(first)} equal to the byte",
        f"* all rows: {_equal(found)} of {len(found)} equal to the byte",
        "",
        "| config | tp | ep | pp | rank | quantisation | vLLM bytes | planned - vLLM |",
        "| --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    lines += [_line(row) for row in first]
    unequal = [row for row in found if row.difference and row.group == "more"]
    if unequal:
        lines += ["", "Further rows that differ:", "", *lines[10:12], *map(_line, unequal)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    ep = "yes" if row.ep else ""
    quant = "as stated" if row.quant == "config" else "removed"
    return (
        f"| {row.config.replace('__', '/')} | {row.tp} | {ep} | {row.pp} | {row.rank} | {quant} "
        f"| {row.oracle_bytes:,} | {row.difference:,} |"
    )


def _equal(some: list[Row]) -> int:
    return sum(row.difference == 0 for row in some)


@lru_cache(maxsize=2)
def _checkpoint(config: str, quant: str) -> Checkpoint:
    path = CONFIGS / f"{config}.json"
    if quant == "config":
        return open_checkpoint(path)
    fields = parse_object(read_bytes(path), where=path.name, kind=ConfigError, constants=True)
    return checkpoint_from_config(_without_quantization(fields), name=config)


def _without_quantization(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in fields.items() if key not in ("quantization_config", "_hf_quant_config")}
    return {key: _without_quantization(value) if key == "text_config" else value for key, value in kept.items()}


def main() -> int:
    """Write the report, or with ``--check`` say whether it is up to date."""
    text = report(list(rows()))
    if "--check" in sys.argv[1:]:
        return 0 if REPORT.exists() and REPORT.read_text() == text else 1
    REPORT.write_text(text)
    print("\n".join(text.splitlines()[7:9]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
