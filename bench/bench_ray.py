"""Time preparation by the nodes of a Ray cluster against processes of this machine.

    python bench/bench_ray.py [--quick] [--directory DIR] [--rounds 3]

A cluster of two nodes with one CPU each is started on this machine; the local executor has two workers. Both
write a checkpoint of 4 GB at TP 2, in turn, each into a new directory on the disk of ``--directory``, and the bytes are
compared; only ratios within a round count. ``inside`` leaves out starting the command and planning, ``tasks`` is what
the tasks took in all, as they say. Exit status 1 if a byte differs. ``--quick`` is 0.4 GB and one round.
Where Ray is not installed nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench_prepare import make_source

COMMAND = (sys.executable, "-c", "from tonnage.cli import main; main()")
STORE_BYTES = 80 << 20
COMPARED_BYTES = 8 << 20


class Timed(NamedTuple):
    """One preparation."""

    seconds: float
    inside: float
    tasks: float


@contextmanager
def cluster() -> Iterator[str]:
    """Start two nodes with one CPU each and yield their address."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - an extra

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        found.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield found.address
    finally:
        found.shutdown()


def prepare(source: Path, output: Path, *words: str) -> Timed:
    """Prepare into a new directory; all files are synced by then."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "prepare", source, "--tp", "2", "-o", output, "--json", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    document = json.loads(done.stdout)
    return Timed(time.perf_counter() - begin, document["seconds"], document["worker_seconds"])


def is_same(one: Path, other: Path) -> bool:
    """Whether two directories hold the same weights, byte for byte."""
    relatives = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    if relatives != sorted(path.relative_to(other) for path in other.rglob("*.safetensors")):
        return False
    for relative in relatives:
        with (one / relative).open("rb") as here, (other / relative).open("rb") as there:
            while piece := here.read(COMPARED_BYTES):
                if piece != there.read(len(piece)):
                    return False
            if there.read(1):
                return False
    return bool(relatives)


def main() -> int:
    """Run the rounds and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: not measured")
        return 0
    layers, rounds = (1, 1) if options.quick else (30, options.rounds)
    runs: dict[str, list[Timed]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as name, cluster() as address:
        scratch = Path(name)
        payload = make_source(scratch / "source", layers, filled=True)
        ways = {"local": ("--workers", "2"), "ray": ("--executor", "ray", "--address", address)}
        for number in range(rounds):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                runs[way].append(prepare(scratch / "source", scratch / way, *ways[way]))
        same = is_same(scratch / "local", scratch / "ray")
    print(f"{payload / 1e9:.2f} GB at TP 2, two tasks at once, synced, median of {rounds} rounds")
    print(f"{'way':<6} {'seconds':>8} {'inside':>7} {'tasks':>7}")
    for way, timed in runs.items():
        figures = [statistics.median(getattr(run, field) for run in timed) for field in Timed._fields]
        print(f"{way:<6} {figures[0]:8.2f} {figures[1]:7.2f} {figures[2]:7.2f}")
    ratio = statistics.median(ray.seconds / local.seconds for local, ray in zip(*runs.values(), strict=True))
    print(f"ray takes {ratio:.2f} of local; the same bytes: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
