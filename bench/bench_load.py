"""Time the load of a package through vLLM's plug-in against vLLM's default load of the same weights, in the same run.

    .venv-heavy/bin/python bench/bench_load.py [--quick] [--directory DIR] [--pairs 7]

A random Qwen3 of 2.0 GB in BF16 from a warm page cache, TP 1 and TP 2. Every rank is loaded in this one process, as
tests/heavy does: vLLM's classes and loaders are real, and nobody listens in its process groups. So ranks do not
compete, and the time of a topology is that of its slowest rank. Both ways are taken in turn, who is first alternates,
and the ratio is taken within a pair: other work on a machine meets both. Two spans: *fill* is the loader's
``load_weights``, *load* is ``load_model``, in which both allocate the same model, and the plug-in checks its files
before. ``--quick`` is a small part of the size and two pairs: for seeing that it runs. Without vLLM it says so and does
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tonnage.checkpoint.config import parse_config
from tonnage.synth.io import RehearsalOptions, write_rehearsal

HEAVY = Path(__file__).resolve().parent.parent / "tests" / "heavy"
TONNAGE = Path(sys.executable).with_name("tonnage")
CHUNK_BYTES = 16 << 20
FEWEST_PAIRS = 5
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class Spans(NamedTuple):
    """Seconds of one load of one rank."""

    fill: float
    load: float


def main() -> None:
    """Print medians of both ways and of their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("bench_load: no vLLM here; make heavy, then .venv-heavy/bin/python bench/bench_load.py")
        return
    if not asked.quick and asked.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs: at least {FEWEST_PAIRS}")
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        _compare(Path(folder), 2 if asked.quick else asked.pairs, 2 if asked.quick else CONFIG["num_hidden_layers"])


def _compare(folder: Path, pairs: int, layers: Any) -> None:
    source = _write_source(folder / "source", {**CONFIG, "num_hidden_layers": layers})
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"source {nbytes / 1e9:.2f} GB, {pairs} pairs, seconds; package/default is the ratio within a pair")
    print("topology span   package  default  ratio (median; least, most)   GB/s of the package")
    for tp in (1, 2):
        package = folder / f"tp{tp}"
        words = ("prepare", source, "--tp", str(tp), "--engine", "vllm", "--no-source-digests", "-o", package)
        subprocess.run([TONNAGE, *words], check=True, stdout=subprocess.DEVNULL)
        _warm(source)
        _warm(package)
        _print(tp, _measure(source, package, tp, pairs), nbytes / tp)
        shutil.rmtree(package)


def _write_source(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of random bytes: what they mean is nobody's concern here."""
    write_rehearsal(parse_config(config, name="source"), folder, RehearsalOptions())
    noise = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8).tobytes()
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            while (left := size - file.tell()) > 0:
                file.write(noise[:left])
    return folder


def _warm(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass


def _measure(source: Path, package: Path, tp: int, pairs: int) -> list[tuple[Spans, Spans]]:
    """Return package and default of every pair, each of its slowest rank; one pair before is not counted."""
    sys.path.insert(0, str(HEAVY))
    importlib.import_module("conftest")  # settings vLLM reads once
    contents = importlib.import_module("rank_contents")
    importlib.import_module("tonnage.vllm_plugin").register()
    ways = (
        contents.engine_config(str(package), tp=tp, load_format="tonnage"),
        contents.engine_config(str(source), tp=tp),
    )
    found = []
    for number in range(pairs + 1):
        spans: list[list[Spans]] = [[], []]
        for rank in range(tp):
            for way in (0, 1) if (number + rank) % 2 else (1, 0):
                spans[way].append(_load(contents, ways[way], rank))
        slowest = tuple(Spans(*map(max, zip(*one, strict=True))) for one in spans)
        found.append((slowest[0], slowest[1]))
    return found[1:]


def _load(contents: Any, engine: Any, rank: int) -> Spans:
    begin = time.perf_counter()
    fill = contents.load_rank(engine, rank).seconds
    return Spans(fill, time.perf_counter() - begin)


def _print(tp: int, found: list[tuple[Spans, Spans]], nbytes: float) -> None:
    for span in Spans._fields:
        pairs = [(getattr(ours, span), getattr(theirs, span)) for ours, theirs in found]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ratios)
        print(
            f"TP {tp}     {span}   {ours:7.3f}  {theirs:7.3f}  {ratio:5.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
            f"            {nbytes / ours / 1e9:.2f}"
        )
        print(json.dumps({"tp": tp, "span": span, "package": ours, "default": theirs, "ratio": ratio}), file=sys.stderr)


if __name__ == "__main__":
    main()
