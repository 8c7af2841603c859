"""Time reading all headers and the index of a checkpoint against plain ``json.loads`` of the headers.

    python bench/headers.py --checkpoint DIR [--rounds 7]

Every run is a fresh process; a round runs every way once, and only ratios within a round are compared, because the
speed of shared machines moves by more than the differences of interest. ``kept`` keeps all decoded headers, as a loader
that plans from them does; ``dropped`` decodes one shard file at a time. Both leave out the index and every check.
The targets are for the 497,220 tensors of Kimi-K3; exit status 1 if they are missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MOST_OF_KEPT = 0.10
MOST_PEAK_MIB = 100


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


def ours(directory: Path) -> int:
    """Read and check all headers and the index."""
    from tonnage.checkpoint.io import read_checkpoint_headers  # noqa: PLC0415 - the other ways must not import it

    return read_checkpoint_headers(directory).tensor_count


def digest(directory: Path) -> int:
    """Read and check as above, and digest the headers."""
    from tonnage.checkpoint.io import digest_headers, read_checkpoint_headers  # noqa: PLC0415 - as above

    headers = read_checkpoint_headers(directory)
    digest_headers(directory, headers)
    return headers.tensor_count


WAYS: dict[str, Callable[[Path], int]] = {"kept": kept, "dropped": dropped, "ours": ours, "ours + digest": digest}


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
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own arguments
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
    print(f"{results['ours'][0].tensors} tensors, median of {rounds} rounds; seconds include imports")
    print(f"{'way':<14} {'seconds':>8} {'process':>8} {'of kept':>8} {'of dropped':>10} {'peak MiB':>9}")
    met = True
    for way, runs in results.items():
        ratios = [
            statistics.median(run.seconds / other.seconds for run, other in zip(runs, results[base], strict=True))
            for base in ("kept", "dropped")
        ]
        seconds, process = (statistics.median(run[field] for run in runs) for field in (0, 1))
        peak = max(run.peak_mib for run in runs)
        print(f"{way:<14} {seconds:8.3f} {process:8.3f} {ratios[0]:8.3f} {ratios[1]:10.3f} {peak:9.1f}")
        met = met and (way != "ours" or (ratios[0] <= MOST_OF_KEPT and peak < MOST_PEAK_MIB))
    print(f"target: ours at most {MOST_OF_KEPT} of kept, under {MOST_PEAK_MIB} MiB: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of safetensors files, may be sparse")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_here(options.way, options.checkpoint)
        return 0
    return 0 if compare(options.checkpoint, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
