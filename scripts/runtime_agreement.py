"""Hold what the terms say against what engines logged and write ``docs/runtime-agreement.md``.

Every log of ``tests/data/logs_runtime.json`` that prints weights, activations and other memory is compared: the
measured weights, and the expected bytes and bounds of every other term. The records are once those the package ships,
once those fitted to two thirds of the logs and reported on the other third.

Run: python scripts/runtime_agreement.py [--check]
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from tonnage.calibrations.term_records import shipped_terms
from tonnage.cli.fit_terms import with_model
from tonnage.errors import PlacementError
from tonnage.fit_terms import fit_files
from tonnage.memory.runtime import runtime_terms
from tonnage.memory.supply import gpu_table
from tonnage.memory.terms import TermRecord
from tonnage.term_evidence import Logged, LogRow, consumed_gib, seen_in, seen_in_table
from tonnage.units import GIB, gib

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "data" / "logs_runtime.json"
CONFIGS = ROOT / "tests" / "data" / "configs"
REPORT = ROOT / "docs" / "runtime-agreement.md"


PREFACE = """\
# Agreement with logged memory beside weights and cache

{source}

Compared is the total without the cache: measured weights, and the expected bytes and bounds of the terms, without what
is held before the engine's first snapshot, which no such total counts. Graphs count where the log prints them. Newer
logs print `consumed` for weights and all that stays, and count the graph estimate with the peak. vLLM's first engine
(V0) counts the driver context with other memory: its logs are no evidence, and are compared with the context. Limits a
log does not state are the engine's defaults. Written by `scripts/runtime_agreement.py`; a test holds it true.

* shipped records, fitted to all logs: {shipped}
* fitted to two thirds (by a hash of the log's id), reported on the other third: {held_back}

Activations by rule, before calibration: P is tokens of a step, C sequences, V the vocabulary, H the hidden size.

* always: P H, P k (max(A, H) + max(2A, H)) of Triton's experts (others: `memory/workspace_experts.py`), 64 Ki latents
  of MLA or the contexts its indexer reads, 2 P H of images, 58 MiB
* the largest of: P (gate + up + down + 2 H) of the widest layer; 14.5 C V bytes of logits in BF16 (head, FP32 and
  sorted copies, indices, masks); the encoder over its largest items

The constants of the rules (14.5 bytes per logit, 58 MiB, bytes per captured size and layer) were set by hand with all
logs in view, most of them vLLM 0.19 on H100; the split above tests the factors, not those constants.

How far the logs were from the rules, in thousandths, by the narrowest records:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One log: its total without the cache, and what the terms say of it."""

    id: str
    model: str
    gpu: str
    version: str
    tp: int
    measured: int
    expected: int
    bound: int

    @property
    def error_permille(self) -> int:
        """Expected over measured, less one, in thousandths."""
        return round((self.expected - self.measured) * 1000 / self.measured)


def records_of(logs: Sequence[Logged]) -> tuple[TermRecord, ...]:
    """Return the records of vLLM fitted to some logs and the GPU table."""
    return fit_files([*(one for log in logs for one in seen_in(log)), *seen_in_table(gpu_table().gpus)])["vllm"].records


@cache
def document() -> dict[str, Any]:
    """Return the collected logs."""
    return dict(json.loads(LOGS.read_text()))


def lines(part: str = "rows") -> list[bytes]:
    """Return the logs as the fitting command reads them: one JSON object per line, each with its model."""
    found = []
    for facts in document()[part]:
        row = dict(facts)
        if "config_file" in row:
            row["config"] = json.loads((CONFIGS / f"{row.pop('config_file')}.json").read_text())
        elif "shape" not in row:
            row["config"] = document()["configs"][row["model_id"]]
        found.append(json.dumps(row).encode())
    return found


@cache
def logs() -> tuple[tuple[Logged, ...], tuple[Logged, ...]]:
    """Return the logs that are evidence, and those of vLLM's first engine, which are only compared."""
    used: list[Logged] = []
    first_engine: list[Logged] = []
    for line in lines():
        row = msgspec.json.decode(line, type=LogRow)
        try:
            used.append(with_model(row, None))
        except PlacementError:
            first_engine.append(with_model(msgspec.structs.replace(row, engine_version=None), None))
    return tuple(used), tuple(first_engine)


def row_of(log: Logged, records: Sequence[TermRecord], *, with_context: bool = False) -> Row | None:
    """Return the comparison of a log that prints enough, else ``None``."""
    row, consumed = log.row, consumed_gib(log.row)
    weights, peak, other, graphs = (
        row.weights_gib_per_gpu, row.activation_gib, row.non_torch_gib, row.graph_gib or Decimal(0),
    )  # fmt: skip
    if row.engine != "vllm" or weights is None or peak is None or (other is None and consumed is None):
        return None
    measured = weights + peak + other + graphs if other is not None else (consumed or Decimal(0)) + peak
    left_out = {"runtime.context"} - ({"runtime.context"} if with_context else set())
    if row.graph_gib is None and consumed is None:
        left_out.add("runtime.graphs")
    terms = [t for t in runtime_terms(log.shape, log.serving, log.deployment, records) if t.component not in left_out]
    held = int(weights * GIB)
    return Row(
        id=row.id,
        model=row.model_id or "",
        gpu=row.gpu or "",
        version=row.engine_version or "",
        tp=row.tp,
        measured=int(measured * GIB),
        expected=held + sum(term.nbytes for term in terms),
        bound=held + sum(term.bound_nbytes for term in terms),
    )


def shipped_rows() -> list[Row]:
    """Return every log beside the shipped records."""
    used, first_engine = logs()
    records = shipped_terms("vllm")
    rows = [row_of(log, records) for log in used]
    rows += [row_of(log, records, with_context=True) for log in first_engine]
    return [row for row in rows if row is not None]


def is_held_back(row_id: str) -> bool:
    """Whether a log belongs to the third that is only reported on while fitting is judged."""
    return hashlib.sha256(row_id.encode()).digest()[0] % 3 == 0


def held_back_rows() -> list[Row]:
    """Return a third of the logs beside records fitted to the others."""
    used, _ = logs()
    records = records_of([log for log in used if not is_held_back(log.row.id)])
    rows = [row_of(log, records) for log in used if is_held_back(log.row.id)]
    return [row for row in rows if row is not None]


def report(shipped: list[Row], held_back: list[Row]) -> str:
    """Return the Markdown report."""
    records = shipped_terms("vllm")
    text = [
        PREFACE.format(source=document()["source"], shipped=_summary(shipped), held_back=_summary(held_back)),
        "| term | GPU | ranks | models | releases | logs | expected | bound |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: |",
        *(_record_line(record) for record in records if not record.given_up),
        "",
        "| log | model | GPU | version | tp | measured GiB | expected | bound |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        *map(_line, shipped),
        "",
        f"Not compared, for want of a config or a rule for the topology ({len(document()['without_model'])} logs):",
        "",
        *(f"* {row['id']}" for row in document()["without_model"]),
    ]
    return "\n".join(text) + "\n"


def _summary(rows: list[Row]) -> str:
    errors = sorted(abs(row.error_permille) for row in rows)
    under = sum(row.bound < row.measured for row in rows)
    within = sum(error <= 100 for error in errors)
    return (
        f"{len(rows)} logs, error of the expected total median {median(errors) / 10:.1f} %, "
        f"largest {errors[-1] / 10:.1f} %, within 10 % on {within}; bound under the log on {under}"
    )


def _record_line(record: TermRecord) -> str:
    ranks = f"{record.ranks[0]}-{record.ranks[1]}" if record.ranks[1] < 1 << 10 else f"{record.ranks[0]}+"
    releases = f"before {'.'.join(map(str, record.before))}" if record.before else "all"
    kinds = ", ".join(record.kinds) or "all"
    return (
        f"| {record.term} | {record.gpu_class or 'all'} | {ranks} | {kinds} | {releases} | {len(record.evidence)} "
        f"| {record.expected_permille} | {record.bound_permille} |"
    )


def _line(row: Row) -> str:
    bound = round((row.bound - row.measured) * 100 / row.measured)
    return (
        f"| {row.id} | {row.model} | {row.gpu} | {row.version} | {row.tp} | {gib(row.measured, digits=2)} "
        f"| {row.error_permille / 10:+.1f} % | {bound:+d} % |"
    )


def main() -> int:
    """Write the report, or with ``--check`` say whether it is up to date."""
    shipped, held_back = shipped_rows(), held_back_rows()
    text = report(shipped, held_back)
    if "--check" in sys.argv[1:]:
        return 0 if REPORT.exists() and REPORT.read_text() == text else 1
    REPORT.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
