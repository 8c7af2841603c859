"""One process that fuzzes one target until it has used so much CPU time.

``python -m fuzz.worker TARGET SECONDS CORPUS FOUND [--at-random]``.

With atheris inputs are chosen by the coverage they add; without it, changed at random. What is found is written to a
file of its own and the work goes on; the last line is a JSON document of figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

try:
    import atheris
except ImportError:
    atheris = None

if TYPE_CHECKING:
    from fuzz.target import Target

_KEPT = 2000
_MOST_WALL_SECONDS = 600
"""Of one input: what takes no CPU time at all, or never ends, is ended by libFuzzer."""


class Worker:
    """Feeds one target, counts, and keeps what it finds."""

    def __init__(self, target: Target, seconds: float, corpus: Path, findings: Path) -> None:
        """Begin to count."""
        self.target, self.corpus, self.findings = target, corpus, findings
        self.executions = 0
        self._began = time.process_time()
        self.seconds = seconds
        self._seen: set[tuple[str, str]] = set()

    @property
    def found(self) -> int:
        """How many different findings there were."""
        return len(self._seen)

    def feed(self, raw: bytes) -> None:
        """Try one input; end the process when the time is used up."""
        from fuzz.attempt import attempt  # with the parsers, once they are instrumented

        self.executions += 1
        finding = attempt(self.target, raw)
        if finding is not None and (finding.kind, finding.place) not in self._seen:
            self._seen.add((finding.kind, finding.place))
            name = hashlib.sha256(raw).hexdigest()[:12]
            (self.findings / f"{self.target.name}-{name}").write_bytes(raw)
            said = f"{finding.kind} {finding.place}\n{finding.text}\n"
            (self.findings / f"{self.target.name}-{name}.txt").write_text(said, errors="backslashreplace")
            print(f"FOUND {self.target.name}: {finding.kind} {finding.place}", file=sys.stderr, flush=True)
        if time.process_time() - self._began > self.seconds:
            self.leave()

    def leave(self) -> None:
        """Say the figures and end at once: libFuzzer has no other way to be stopped by CPU time."""
        figures = {
            "target": self.target.name,
            "executions": self.executions,
            "cpu_seconds": round(time.process_time() - self._began, 1),
            "found": self.found,
        }
        (self.findings / f"{self.target.name}-running").unlink(missing_ok=True)
        print("FIGURES " + json.dumps(figures), file=sys.stderr, flush=True)
        sys.stderr.flush()
        os._exit(0)


def by_coverage(worker: Worker) -> None:
    """Let libFuzzer choose; half of the changes are ours, half its own."""

    def mutate(raw: bytes, longest: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.randrange(4) == 0:
            return bytes(atheris.Mutate(raw, longest))
        return worker.target.mutate(raw, rng)[:longest]

    options = (
        "-seed=1", f"-max_len={worker.target.longest}", f"-timeout={_MOST_WALL_SECONDS}", "-rss_limit_mb=3000", "-detect_leaks=0",
        f"-artifact_prefix={worker.findings}/", "-len_control=0", "-print_final_stats=0", "-verbosity=1",
    )  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(worker.corpus)], worker.feed, custom_mutator=mutate)
    atheris.Fuzz()


def at_random(worker: Worker, seeds: list[bytes]) -> None:
    """Change seeds, and what came of them. What never ends is ended by the kernel; what it was stays in a file."""
    rng = Random(1)
    pool = [*seeds]
    running = worker.findings / f"{worker.target.name}-running"
    resource.setrlimit(resource.RLIMIT_CPU, (round(worker.seconds) + _MOST_WALL_SECONDS, resource.RLIM_INFINITY))
    for raw in seeds:
        worker.feed(raw)
    while True:
        raw = worker.target.mutate(rng.choice(pool), rng)[: worker.target.longest]
        running.write_bytes(raw)
        worker.feed(raw)
        if len(pool) < _KEPT:
            pool.append(raw)
        else:
            pool[rng.randrange(len(seeds), _KEPT)] = raw


def main() -> None:
    """Fuzz."""
    name, seconds, corpus, findings = sys.argv[1:5]
    guided = atheris is not None and "--at-random" not in sys.argv
    with atheris.instrument_imports(include=["tonnage"]) if guided else nullcontext():
        from fuzz.every import TARGETS
    worker = Worker(TARGETS[name], float(seconds), Path(corpus), Path(findings))
    seeds = worker.target.corpus()
    for raw in seeds:
        (worker.corpus / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)
    if guided:
        by_coverage(worker)
    else:
        at_random(worker, seeds)


if __name__ == "__main__":
    main()
