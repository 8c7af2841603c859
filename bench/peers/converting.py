"""Conversion of one checkpoint to MXFP8 by this tool, torchao and llm-compressor: time, bytes, and equal codes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from bench_prepare import Timed, make_source, model_free_ptq, prepare
from environments import CONVERTERS, versions

from tonnage.checkpoint.io import read_checkpoint_headers

SCRIPT = Path(__file__).with_name("convert_torchao.py")
LAYERS = 4
ROUNDS = 2
OWN = "tonnage"
SCALE = "_scale"
CONVERT = ("--layout", "hf", "--convert", "mxfp8")
RULES = {"torchao, eager": "rceil", "torchao, compiled": "rceil", "llm-compressor": "compressed-tensors"}
"""By which rule of this tool another one derives its scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where the bytes of a tensor lie."""

    path: Path
    begin: int
    nbytes: int


def torchao(how: str) -> Callable[[Path, Path], Timed]:
    """Return a conversion with torchao in a process of its own."""

    def convert(source: Path, output: Path) -> Timed:
        shutil.rmtree(output, ignore_errors=True)
        begin = time.perf_counter()
        words = [CONVERTERS.python(), SCRIPT, how, source, output]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return Timed(time.perf_counter() - begin, float(done.stdout.splitlines()[-1]))

    return convert


def llm_compressor(source: Path, output: Path) -> Timed:
    """Convert with llm-compressor, whose files compressed-tensors describes."""
    return model_free_ptq(source, output, CONVERTERS.python())


def own(source: Path, output: Path) -> Timed:
    """Convert with this tool."""
    return prepare(source, output, *CONVERT)


WAYS: dict[str, Callable[[Path, Path], Timed]] = {
    OWN: own,
    "torchao, eager": torchao("eager"),
    "torchao, compiled": torchao("compiled"),
    "llm-compressor": llm_compressor,
}


def stored(directory: Path) -> dict[str, Stored]:
    """Return where every tensor of a checkpoint lies; its headers are checked."""
    found = {}
    for shard in read_checkpoint_headers(directory).shards:
        for name, tensor in zip(shard.names(), shard.skeleton.tensors, strict=True):
            path, begin = directory / shard.shard_file, shard.data_begin + tensor.begin
            found[name] = Stored(path=path, begin=begin, nbytes=tensor.end - tensor.begin)
    return found


def equal_share(left: Mapping[str, Stored], right: Mapping[str, Stored], names: list[str]) -> float:
    """Return the share of the bytes of these tensors that are the same in both; one of another size has none.

    Raises:
        ValueError: There is nothing to compare.
    """
    same = total = 0
    for name in names:
        one, other = left[name], right.get(name)
        total += one.nbytes
        if other is not None and other.nbytes == one.nbytes:
            same += int(np.count_nonzero(_bytes(one) == _bytes(other)))
    if not total:
        raise ValueError("no converted tensor to compare")
    return same / total


def _bytes(tensor: Stored) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.fromfile(tensor.path, np.uint8, count=tensor.nbytes, offset=tensor.begin)


def equality(ours: Path, theirs: Path) -> str:
    """Return the columns of equal scales and codes."""
    left, right = stored(ours), stored(theirs)
    scales = [name for name in left if name.endswith(SCALE)]
    codes = [name.removesuffix(SCALE) for name in scales]
    return f"{_share(equal_share(left, right, scales))} | {_share(equal_share(left, right, codes))}"


def _share(share: float) -> str:
    return "all" if share == 1 else f"{share:.4%}"


def payload(directory: Path) -> int:
    """Return the bytes of all weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def section(scratch: Path) -> tuple[list[str], bool]:
    """Return the table, and whether this tool has the codes of every peer under that peer's rule."""
    source = scratch / "source"
    nbytes = make_source(source, LAYERS, filled=True)
    outputs = {way: scratch / way.replace(", ", "-") for way in WAYS}
    runs: dict[str, list[Timed]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        order = list(WAYS)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            runs[way].append(WAYS[way](source, outputs[way]))
    rules = {rule: scratch / rule for rule in set(RULES.values())}
    for rule, output in rules.items():
        prepare(source, output, *CONVERT, "--scale-rule", rule)
    found = versions(CONVERTERS.python(), ["torchao", "torch", "llmcompressor", "compressed-tensors"])
    named = ", ".join(f"{name} {version}" for name, version in found.items())
    lines = [
        f"{named}. {nbytes / 1e9:.2f} GB of BF16; median of {ROUNDS} rounds, ratios within a round.",
        "",
        "| way | s, process | inside | inside, of ours | written, of source | rule | scales equal | codes equal |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for way, timed in runs.items():
        ratio = median(other.inside / ours.inside for other, ours in zip(timed, runs[OWN], strict=True))
        process, inside = (median(run[field] for run in timed) for field in (0, 1))
        compared = f"{RULES[way]} | {equality(rules[RULES[way]], outputs[way])}" if way in RULES else "rceil |  | "
        name = f"**{way}**" if way == OWN else way
        size = payload(outputs[way]) / nbytes
        lines.append(f"| {name} | {process:.1f} | {inside:.2f} | {ratio:.1f} | {size:.4f} | {compared} |")
    return lines, True
