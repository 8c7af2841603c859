"""Fuzz every parser for so many CPU seconds in all: ``PYTHONPATH=tests python -m fuzz [--seconds N] [TARGET...]``.

Exits with 1 if anything was found. The inputs stand in the directory that is printed, each with what it did beside it;
put them below ``tests/hostile/fuzz`` once they are understood, and ``tests/test_fuzz.py`` tries them for good.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from fuzz.every import TARGETS

_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+)")
_MOST_STARTS = 20
"""A target that libFuzzer ends for a hang or its memory is started again."""


def main() -> int:
    """Run all targets one after the other and print a table."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=float, default=600, help="CPU seconds of all targets together")
    parser.add_argument("--work", type=Path, help="directory of corpora and findings; a new one by default")
    parser.add_argument("--at-random", action="store_true", help="without coverage, which takes seconds to begin")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all by default: {', '.join(TARGETS)}")
    asked = parser.parse_args()
    unknown = [name for name in asked.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}")
    names = asked.targets or [*TARGETS]
    work = asked.work or Path(mkdtemp(prefix="tonnage-fuzz-"))
    rows = [fuzz(name, asked.seconds / len(names), work, at_random=asked.at_random) for name in names]
    print(f"{'target':20} {'executions':>10} {'CPU s':>7} {'edges':>6} {'features':>8} {'found':>5}")
    for row in rows:
        print(
            f"{row['target']:20} {row['executions']:>10,} {row['cpu_seconds']:>7.1f} {row['edges']:>6} {row['features']:>8}"
            f" {row['found']:>5}"
        )
    print(
        f"{sum(row['executions'] for row in rows):,} executions, {sum(row['cpu_seconds'] for row in rows):.0f} CPU seconds; {work}"
    )
    return 1 if any(row["found"] for row in rows) else 0


def fuzz(name: str, seconds: float, work: Path, *, at_random: bool) -> dict[str, float]:
    """Fuzz one target until it has used its time; return its figures."""
    corpus, found = work / "corpus" / name, work / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    row = {"target": name, "executions": 0, "cpu_seconds": 0.0, "edges": 0, "features": 0, "found": 0}
    for _ in range(_MOST_STARTS):
        left = seconds - row["cpu_seconds"]
        if left <= 0:
            break
        command = [sys.executable, "-m", "fuzz.worker", name, str(left), str(corpus), str(found)]
        command += ["--at-random"] if at_random else []
        done = subprocess.run(command, capture_output=True, check=False)
        said = done.stderr.decode("utf-8", "replace")
        (work / f"{name}.log").write_text(said)
        figures = _figures(said)
        if not figures:
            row["found"] += 1
            print(f"{name}: ended with {done.returncode}, see {work / name}.log", file=sys.stderr)
            row["cpu_seconds"] += 60
            continue
        for key in ("executions", "cpu_seconds", "found"):
            row[key] += figures[key]
        for edges, features in _COVERAGE.findall(said)[-1:]:
            row |= {"edges": int(edges), "features": int(features)}
    with (work / "figures.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def _figures(said: str) -> dict[str, float]:
    lines = [line for line in said.splitlines() if line.startswith("FIGURES ")]
    return json.loads(lines[-1].removeprefix("FIGURES ")) if lines else {}


if __name__ == "__main__":
    sys.exit(main())
