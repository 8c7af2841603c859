"""Time planning Kimi-K3 (96 files, 497,220 tensors) end to end against plain ``json.loads`` of its headers.

    python bench/bench_plan.py [--checkpoint DIR] [--rounds 7]

Every run is a fresh process; a round runs every way once, and only ratios within a round are compared, because the
speed of shared machines moves by more than the differences of interest. ``kept`` keeps all decoded headers, as a loader
that plans from them does; ``dropped`` decodes one shard file at a time. Both leave out the index and every check.
``headers`` reads and checks headers and index; ``plan`` goes on to roles, formats, placement for vLLM at TP 8 and
ledger; ``command`` is the same as ``tonnage plan --json``, its output included. Without ``--checkpoint`` the rehearsal
checkpoint is written to a temporary directory first. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MOST_OF_KEPT = 0.30
AIM_OF_KEPT = 0.15
MOST_OF_DROPPED = 0.80
MOST_PEAK_MIB = 100
K3_CONFIG = Path(__file__).resolve().parent.parent / "tests" / "data" / "configs" / "moonshotai__Kimi-K3.json"


class Run(NamedTuple):
    """One run in its own process."""

    seconds: float
    process_seconds: float
    peak_mib: float
    tensors: int


def header_of(path: Path) -> dict[str, object]:
    """Return the decoded header of a file, believed blindly."""
    with path.open("rb") as file:
        header: dict[str, object] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def kept(directory: Path) -> int:
    """Decode all headers and keep them."""
    headers = [header_of(path) for path in sorted(directory.glob("*.safetensors"))]
    return sum(map(len, headers))


def dropped(directory: Path) -> int:
    """Decode one header at a time."""
    return sum(len(header_of(path)) for path in sorted(directory.glob("*.safetensors")))


def headers(directory: Path) -> int:
    """Read and check all headers and the index."""
    from tonnage.checkpoint.io import read_checkpoint_headers  # noqa: PLC0415 - the other ways must not import it

    return read_checkpoint_headers(directory).tensor_count


def plan(directory: Path) -> int:
    """Plan end to end: headers, index, digest, roles, formats, placement, ledger."""
    from tonnage import PlanRequest, open_checkpoint, plan_checkpoint  # noqa: PLC0415 - as above

    checkpoint = open_checkpoint(directory)
    ledger = plan_checkpoint(checkpoint, PlanRequest(tp=8, engine="vllm")).ranks[0]
    if ledger.weights_bytes != 205_955_238_384:
        raise SystemExit(f"planned {ledger.weights_bytes} bytes per rank")
    return checkpoint.assignment.tensors


def command(directory: Path) -> int:
    """Run the command line in this process, its output thrown away."""
    import contextlib  # noqa: PLC0415 - as above
    import io  # noqa: PLC0415 - as above

    from tonnage.cli import app  # noqa: PLC0415 - as above

    with contextlib.redirect_stdout(io.StringIO()):
        app(["plan", str(directory), "--tp", "8", "--engine", "vllm", "--json"], standalone_mode=False)
    return 0


WAYS: dict[str, Callable[[Path], int]] = {
    "kept": kept, "dropped": dropped, "headers": headers, "plan": plan, "command": command,
}  # fmt: skip


def run_here(way: str, directory: Path) -> None:
    """Run one way in this process, imports included, and print its figures."""
    begin = time.perf_counter()
    tensors = WAYS[way](directory)
    seconds = time.perf_counter() - begin
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tensors]))


def run_alone(way: str, directory: Path) -> Run:
    """Run one way in a fresh process."""
    command = [sys.executable, __file__, "--checkpoint", str(directory), "--way", way]
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    process_seconds = time.perf_counter() - begin
    seconds, peak_mib, tensors = json.loads(done.stdout)
    return Run(seconds, process_seconds, peak_mib, tensors)


def compare(directory: Path, rounds: int) -> bool:
    """Run all rounds, print medians and ratios, and say whether the targets are met."""
    results: dict[str, list[Run]] = {way: [] for way in WAYS}
    for way in WAYS:
        run_alone(way, directory)  # fills the page cache and the compiled modules
    for number in range(rounds):
        order = list(WAYS)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            results[way].append(run_alone(way, directory))
    print(f"{results['plan'][0].tensors} tensors, median of {rounds} rounds; seconds include imports")
    print(f"{'way':<14} {'seconds':>8} {'process':>8} {'of kept':>8} {'of dropped':>10} {'peak MiB':>9}")
    met = aim = False
    for way, runs in results.items():
        ratios = [
            statistics.median(run.seconds / other.seconds for run, other in zip(runs, results[base], strict=True))
            for base in ("kept", "dropped")
        ]
        seconds, process = (statistics.median(run[field] for run in runs) for field in (0, 1))
        peak = max(run.peak_mib for run in runs)
        print(f"{way:<14} {seconds:8.3f} {process:8.3f} {ratios[0]:8.3f} {ratios[1]:10.3f} {peak:9.1f}")
        if way == "plan":
            met = ratios[0] <= MOST_OF_KEPT and ratios[1] <= MOST_OF_DROPPED and peak < MOST_PEAK_MIB
            aim = ratios[0] <= AIM_OF_KEPT
    print(
        f"plan at most {MOST_OF_KEPT} of kept, {MOST_OF_DROPPED} of dropped, under {MOST_PEAK_MIB} MiB: "
        f"{'met' if met else 'MISSED'}; aim {AIM_OF_KEPT} of kept: {'met' if aim else 'missed'}"
    )
    return met


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, help="Kimi-K3, may be sparse files; written to a temporary directory if not given"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_here(options.way, options.checkpoint)
        return 0
    if options.checkpoint:
        return 0 if compare(options.checkpoint, options.rounds) else 1
    with tempfile.TemporaryDirectory() as scratch:
        rehearsal = Path(scratch) / "kimi-k3"
        tonnage = Path(sys.executable).with_name("tonnage")
        subprocess.run([tonnage, "synth", str(K3_CONFIG), "-o", str(rehearsal)], check=True)
        return 0 if compare(rehearsal, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
