"""Time preparation against ``cp`` and fsync, and watch its memory while the source grows tenfold.

    python bench/bench_prepare.py [--quick] [--directory DIR] [--rounds 7]

``pass-through`` writes a checkpoint of 4 GB unconverted at TP 1, in layout tp and in layout hf, over what the round
before wrote, as ``cp`` then does with the same files; both sides end with every file synced, and only ratios within a
round count. ``inside`` leaves out starting the interpreter and planning. ``mxfp8`` converts the same checkpoint.
``memory`` samples the anonymous memory of all processes of a conversion at TP 2 from sources of 2 GB and 20 GB; both
are sparse, what is written of them is not. Everything is written to a temporary directory below ``--directory``, which
must be on the disk that is meant, and removed. llm-compressor is compared with where it can be imported. Exit status 1
if a target is missed. ``--quick`` is a small part of the size and three rounds: for seeing that it runs.
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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.io import read_checkpoint_headers
from tonnage.synth.io import RehearsalOptions, write_rehearsal

LEAST_OF_CP = 0.85
MOST_WORKER_MIB = 300
MOST_GROWTH = 0.10
LEAST_OF_PTQ = 6.0
TONNAGE = Path(sys.executable).with_name("tonnage")
PIECE_ELEMENTS = 32 << 20


class Timed(NamedTuple):
    """One run of something that writes."""

    seconds: float
    inside: float


def config(layers: int) -> dict[str, Any]:
    """Return a Llama of 130 MB per layer and half a GB beside."""
    return {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": layers, "vocab_size": 32000, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip


def make_source(directory: Path, layers: int, *, filled: bool) -> int:
    """Write a checkpoint, filled with weights or sparse, and return its payload bytes."""
    write_rehearsal(parse_config(config(layers), name="bench"), directory, RehearsalOptions(sharded=True))
    headers = read_checkpoint_headers(directory)
    if filled:
        values = np.random.default_rng(0).standard_normal(PIECE_ELEMENTS, dtype=np.float32)
        piece = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        for shard in headers.shards:
            with (directory / shard.shard_file).open("r+b") as file:
                file.seek(shard.data_begin)
                for begin in range(0, shard.payload_bytes, len(piece)):
                    file.write(piece[: shard.payload_bytes - begin])
                os.fsync(file.fileno())
    return headers.payload_bytes


def prepare(source: Path, output: Path, *words: str) -> Timed:
    """Prepare over what is there; all files are synced by then."""
    begin = time.perf_counter()
    done = subprocess.run(
        [TONNAGE, "prepare", source, "-o", output, "--force", "--json", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return Timed(time.perf_counter() - begin, json.loads(done.stdout)["seconds"])


def copy(source: Path, output: Path) -> Timed:
    """Copy over what is there with cp, then sync every file and the directory."""
    output.mkdir(exist_ok=True)
    begin = time.perf_counter()
    files = sorted(source.iterdir())
    subprocess.run(["/bin/cp", *files, output], check=True)
    for path in [*(output / file.name for file in files), output]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    return Timed(seconds, seconds)


def pass_through(source: Path, scratch: Path, payload: int, rounds: int) -> bool:
    """Print throughput and ratios, and say whether the target is met."""
    ways: dict[str, Callable[[], Timed]] = {
        "cp": lambda: copy(source, scratch / "cp"),
        "prepare tp": lambda: prepare(source, scratch / "tp", "--layout", "tp"),
        "prepare hf": lambda: prepare(source, scratch / "hf", "--layout", "hf"),
    }
    runs: dict[str, list[Timed]] = {way: [] for way in ways}
    for way in ways.values():
        way()  # so that every round overwrites
    for number in range(rounds):
        order = list(ways)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            os.sync()
            runs[way].append(ways[way]())
    print(f"pass-through, {payload / 1e9:.2f} GB, synced, overwriting, median of {rounds} rounds")
    print(f"{'way':<12} {'GB/s':>6} {'inside':>7} {'of cp':>6} {'inside':>7}  (throughput)")
    met = True
    for way, timed in runs.items():
        ratios = [
            statistics.median(base.seconds / run[field] for base, run in zip(runs["cp"], timed, strict=True))
            for field in (0, 1)
        ]
        speeds = [payload / 1e9 / statistics.median(run[field] for run in timed) for field in (0, 1)]
        print(f"{way:<12} {speeds[0]:6.2f} {speeds[1]:7.2f} {ratios[0]:6.2f} {ratios[1]:7.2f}")
        met &= way == "cp" or ratios[0] >= LEAST_OF_CP
    print(f"at least {LEAST_OF_CP} of cp as a process: {'met' if met else 'MISSED'}")
    return met


def conversion(source: Path, scratch: Path, payload: int, rounds: int) -> bool:
    """Print the speed of conversion; compare with llm-compressor if it is there."""
    words = ("--layout", "hf", "--convert", "mxfp8")
    prepare(source, scratch / "mxfp8", *words)
    runs = [prepare(source, scratch / "mxfp8", *words) for _ in range(rounds)]
    seconds, inside = (statistics.median(run[field] for run in runs) for field in (0, 1))
    speed, speed_inside = payload / 1e9 / seconds, payload / 1e9 / inside
    print(f"mxfp8, {payload / 1e9:.2f} GB read, synced: {speed:.2f} GB/s, inside {speed_inside:.2f}")
    if importlib.util.find_spec("llmcompressor") is None:
        print("llm-compressor is not installed: not compared")
        return True
    ratios = []
    for _ in range(max(1, rounds // 3)):
        theirs, ours = model_free_ptq(source, scratch / "ptq"), prepare(source, scratch / "mxfp8", *words)
        ratios.append((theirs.inside / ours.inside, theirs.seconds / ours.seconds))
    faster, as_process = (statistics.median(ratio[field] for ratio in ratios) for field in (0, 1))
    met = faster >= LEAST_OF_PTQ and as_process >= LEAST_OF_PTQ - 1
    print(f"of model_free_ptq: {faster:.1f} x inside, {as_process:.1f} x as a process: {'met' if met else 'MISSED'}")
    return met


def model_free_ptq(source: Path, output: Path, python: Path = Path(sys.executable)) -> Timed:
    """Convert with llm-compressor on the CPU, in a process of its own, by an interpreter that has it."""
    script = (
        "import sys, time; from llmcompressor import model_free_ptq; begin = time.perf_counter();"
        "model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme='MXFP8',"
        " ignore=['re:.*embed_tokens.*', 'lm_head'], device='cpu', max_workers=2); print(time.perf_counter() - begin)"
    )
    shutil.rmtree(output, ignore_errors=True)
    begin = time.perf_counter()
    done = subprocess.run([python, "-c", script, source, output], check=True, capture_output=True, text=True)
    return Timed(time.perf_counter() - begin, float(done.stdout.splitlines()[-1]))


# --- memory -----------------------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """Most anonymous memory seen."""

    tree_mib: float
    worker_mib: float


@contextmanager
def watched(process: int, found: list[Peak]) -> Iterator[None]:
    """Sample a process and its children until left, then report the peaks."""
    over = threading.Event()
    peaks = [0.0, 0.0]

    def sample() -> None:
        while not over.wait(0.02):
            workers = [anonymous_mib(child) for child in children(process)]
            peaks[0] = max(peaks[0], anonymous_mib(process) + sum(workers))
            peaks[1] = max(peaks[1], *workers, 0)

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    over.set()
    thread.join()
    found.append(Peak(*peaks))


def children(process: int) -> list[int]:
    """Return the children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def anonymous_mib(process: int) -> float:
    """Return the anonymous memory of a process; none if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def peak_of(source: Path, output: Path) -> Peak:
    """Prepare with conversion at TP 2 and return the peaks."""
    found: list[Peak] = []
    command = [TONNAGE, "prepare", source, "--tp", "2", "--convert", "mxfp8", "-o", output, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with watched(process.pid, found):
        status = process.wait()
    if status:
        raise SystemExit(f"prepare ended with {status}")
    shutil.rmtree(output)
    return found[0]


def memory(scratch: Path, layers: int) -> bool:
    """Print the peaks for a source and one ten times its size, and say whether the targets are met."""
    peaks = []
    for factor in (1, 10):
        source = scratch / f"sparse-{factor}"
        payload = make_source(source, layers * factor + 2 * (factor - 1), filled=False)  # two weigh what is beside them
        free = shutil.disk_usage(scratch).free
        if free < payload:
            print(f"memory: {payload / 1e9:.1f} GB need {payload} bytes of disk, {free} are free: not measured")
            return False
        peaks.append(peak_of(source, scratch / "memory"))
        shutil.rmtree(source)
        tree, worker = peaks[-1]
        print(f"memory, {payload / 1e9:5.2f} GB: {tree:6.1f} MiB in all, {worker:6.1f} MiB largest worker")
    growth = peaks[1].tree_mib / peaks[0].tree_mib - 1
    met = abs(growth) < MOST_GROWTH and max(peak.worker_mib for peak in peaks) < MOST_WORKER_MIB
    target = f"at most {MOST_GROWTH:.0%} and {MOST_WORKER_MIB} MiB per worker"
    print(f"growth {growth:+.1%}, {target}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of the size, three rounds")
    parser.add_argument(
        "--directory", type=Path, help="on the disk to be measured; the system's temporary one by default"
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    layers, rounds = (2, 3) if options.quick else (28, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        scratch = Path(name)
        payload = make_source(scratch / "source", layers, filled=True)
        met = [
            pass_through(scratch / "source", scratch, payload, rounds),
            conversion(scratch / "source", scratch, payload, rounds),
        ]
        for left in ("source", "cp", "tp", "hf", "mxfp8"):
            shutil.rmtree(scratch / left)
        met.append(memory(scratch, 4 if options.quick else 14))
    return 0 if all(met) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
