"""Hold the planned ranks of Kimi-K3.1-Pro EXL3-2bit against the measured ones and write ``docs/k31-ranks.md``.

The measurement (tests/data/seed_case.json) gives two totals, largest and smallest rank, of 12 identical exports made by
another preparer; it does not say which tensor class holds what. The report says what this plan holds class by class,
how far the totals are apart, and which classes could carry the difference.

Run: python scripts/k31_ranks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tonnage import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.api import read_config
from tonnage.plan import Plan, RankLedger
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.units import mib

ROOT = Path(__file__).resolve().parent.parent
SEED = ROOT / "tests" / "data" / "seed_case.json"
CONFIG = ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json"
REPORT = ROOT / "docs" / "k31-ranks.md"


def plans() -> tuple[Plan, Plan]:
    """Return the plan as stored and the plan converted, both with the draft cut evenly."""
    seed = json.loads(SEED.read_text())
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / "kimi-k3.1-pro"
        write_rehearsal(read_config(CONFIG), directory, RehearsalOptions(experts="exl3-v1"))
        checkpoint = open_checkpoint(directory)
    request = PlanRequest(tp=seed["tp_size"], engine="split", draft_bytes=seed["draft_bytes"])
    converted = PlanRequest(tp=seed["tp_size"], engine="split", draft_bytes=seed["draft_bytes"], convert="mxfp8")
    return plan_checkpoint(checkpoint, request), plan_checkpoint(checkpoint, converted)


def report(stored: Plan, converted: Plan) -> str:
    """Return the Markdown report."""
    measured = json.loads(SEED.read_text())["measured"]
    ordered = sorted(converted.ranks, key=lambda ledger: ledger.fixed_bytes)
    smallest, largest = ordered[0], ordered[-1]
    lines = [
        "# Kimi-K3.1-Pro EXL3-2bit at TP 8: planned and measured ranks",
        "",
        "`tonnage plan DIR --tp 8 --engine split --convert mxfp8 --draft-bytes 5373504512` on the full-size rehearsal",
        "checkpoint, against the measured ranks of the seed case (12 identical exports of another preparer;",
        "`tests/data/seed_case.json`). Written by `scripts/k31_ranks.py`; a test holds it true.",
        "",
        "| class | stored BF16, rank 0 | planned, largest rank | planned, smallest rank |",
        "| --- | ---: | ---: | ---: |",
    ]
    before = {line.component: line.nbytes for line in stored.ranks[largest.rank].lines}
    least = {line.component: line.nbytes for line in smallest.lines}
    lines += [
        f"| {line.component} | {before[line.component]:,} | {line.nbytes:,} | {least[line.component]:,} |"
        for line in largest.lines
    ]
    spread = largest.fixed_bytes - smallest.fixed_bytes
    measured_spread = measured["largest_rank_bytes"] - measured["smallest_rank_bytes"]
    total = stored.ranks[largest.rank].fixed_bytes
    apart = [
        _difference(ledger, measured[f"{name}_rank_bytes"])
        for ledger, name in ((largest, "largest"), (smallest, "smallest"))
    ]
    lines += [
        f"| **sum** | {total:,} | {largest.fixed_bytes:,} | {smallest.fixed_bytes:,} |",
        f"| measured | | {measured['largest_rank_bytes']:,} | {measured['smallest_rank_bytes']:,} |",
        f"| **planned - measured** | | {apart[0]} | {apart[1]} |",
        "",
        f"The spread between largest and smallest rank: {spread:,} bytes planned, {measured_spread:,} measured. It is",
        "one vision head of `wqkv` in MXFP8 over 27 blocks: 12 heads over 8 ranks are 2, 2, 2, 2, 1, 1, 1, 1.",
        "",
        "What the plan holds whole and another preparer may cut bounds where the rest can lie:",
        "",
        "| held whole by this plan | bytes per rank | cut over 8 ranks it would save |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| {remark.role}: {remark.why} | {remark.nbytes:,} | {remark.nbytes * 7 // 8:,} |"
        for remark in converted.remarks
        if remark.kind == "whole on every rank" and remark.nbytes >= 1 << 20
    ]
    lines += [
        "",
        "The draft's own placement is unknown (its config is not published); its bytes are taken to be cut evenly.",
        "The plan is above every measured rank, as it has to be.",
    ]
    return "\n".join(lines) + "\n"


def _difference(ledger: RankLedger, measured: int) -> str:
    difference = ledger.fixed_bytes - measured
    permille = 1000 * difference / measured
    return f"{difference:,} ({mib(difference, digits=1)} MiB, {permille:.2f} permille)"


def main() -> int:
    """Write the report and print it."""
    text = report(*plans())
    REPORT.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
