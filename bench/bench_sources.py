"""Time planning Kimi-K3 from a hub on loopback that is as far away as real ones.

    python bench/bench_sources.py [--latency-ms 40] [--rounds 3]

The hub and the server of its large files let every answer wait for the latency. ``remote`` plans through
huggingface_hub's client and concurrent ranges, nothing kept; ``one by one`` is the same with one request at a time;
``kept`` plans again with everything kept of the first time; ``local`` plans from the directory. Every run is a fresh
process, a round runs every way once, and ratios are those within a round. Bytes are what the servers sent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
K3_CONFIG = ROOT / "tests" / "data" / "configs" / "moonshotai__Kimi-K3.json"
WAYS = ("remote", "one by one", "kept", "local")


def plan(source: str, parallel: int) -> None:
    """Plan in this process and print the seconds it took, imports included."""
    begin = time.perf_counter()
    from tonnage import PlanRequest, open_checkpoint, plan_checkpoint  # noqa: PLC0415 - timed
    from tonnage.sources.limits import Limits  # noqa: PLC0415 - as above

    checkpoint = open_checkpoint(source, limits=Limits(parallel=parallel))
    plan_checkpoint(checkpoint, PlanRequest(tp=8, engine="vllm"))
    print(json.dumps(time.perf_counter() - begin))


def run(source: str, parallel: int, settings: dict[str, str]) -> float:
    """Plan in a fresh process; return its seconds."""
    command = [sys.executable, __file__, "--plan", source, "--parallel", str(parallel)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | settings)
    seconds: float = json.loads(done.stdout)
    return seconds


def compare(directory: Path, scratch: Path, latency: float, rounds: int) -> None:
    """Run all rounds and print medians and ratios."""
    from samples import header_bytes_in  # noqa: PLC0415 - of the tests
    from servers import hub  # noqa: PLC0415 - as above

    def late(_handler: Any, _seen: Any) -> bool:
        time.sleep(latency)
        return False

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with hub(directory, large=1 << 20) as there:
        there.api.trick = there.store.trick = late
        for number in range(rounds):
            base = {"HF_ENDPOINT": there.api.url, "HF_HOME": str(scratch / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
            fresh, single = (base | {"XDG_CACHE_HOME": str(scratch / f"{name}{number}")} for name in ("a", "b"))
            before = there.nbytes
            seconds["remote"].append(run("hf:org/name", 16, fresh))
            sent = there.nbytes - before
            seconds["one by one"].append(run("hf:org/name", 1, single))
            seconds["kept"].append(run("hf:org/name", 16, fresh))
            seconds["local"].append(run(str(directory), 1, base))
    share = sent / header_bytes_in(directory)
    print(f"{latency * 1000:.0f} ms for every answer, median of {rounds} rounds; {share:.3f} of the headers sent")
    for way in WAYS:
        ratio = statistics.median(a / b for a, b in zip(seconds[way], seconds["local"], strict=True))
        print(f"{way:<12} {statistics.median(seconds[way]):7.2f} s  {ratio:7.2f} of local")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--parallel", type=int, default=16, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        plan(options.plan, options.parallel)
        return
    from tonnage.api import read_config  # noqa: PLC0415 - a plan is timed without
    from tonnage.synth.io import RehearsalOptions, write_rehearsal  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "Kimi-K3"
        write_rehearsal(read_config(K3_CONFIG), directory, RehearsalOptions())
        compare(directory, Path(folder), options.latency_ms / 1000, options.rounds)


if __name__ == "__main__":
    main()
