"""Time conversion of BF16 weights to MXFP8 (rule rceil) against memory and against other converters.

    python bench/bench_kernels.py [--mib 256] [--rounds 9]

A round runs every way once, in an order that rotates, each as the best of a few repetitions; only ratios within a round
are compared, and their medians count, because the speed of shared machines moves by more than the differences of
interest. ``memcpy`` copies the same input bytes. GB/s are 10**9 bytes of source per second, or of what is written when
decoding. torchao is measured if it and torch can be imported, on one thread. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tonnage.prepare.mxfp8 import decode, quantize

COLUMNS = 4096
SLOW_SHARE = 4  # all but the ways with a target take this part of the rows


class Way(NamedTuple):
    """Something to time: a call, the bytes it stands for, and how often it is repeated within a round."""

    call: Callable[[], object]
    nbytes: int
    repetitions: int = 3


class Target(NamedTuple):
    """The speed of one way is to be at least so many times another's."""

    way: str
    other: str
    least: float


TARGETS = (
    Target("tonnage", "memcpy", 0.6),
    Target("tonnage, 2 threads", "tonnage", 1.8),
    Target("tonnage", "torchao eager", 40),
    Target("tonnage", "torchao compiled", 6),
)


def main_ways(bits: np.ndarray[Any, Any]) -> dict[str, Way]:
    """Return memcpy, and the conversion that the targets are about."""
    copy, codes = np.zeros_like(bits), np.zeros(bits.shape, np.uint8)
    scales = np.zeros((len(bits), COLUMNS // 32), np.uint8)

    def convert(**how: Any) -> Callable[[], object]:
        return lambda: quantize(bits, "BF16", codes, scales, **how)

    return {
        "memcpy": Way(lambda: np.copyto(copy, bits), bits.nbytes),
        "tonnage": Way(convert(errors=False), bits.nbytes),
        "tonnage, 2 threads": Way(convert(errors=False, threads=2), bits.nbytes),
        "tonnage with errors": Way(convert(), bits.nbytes),
        "tonnage with errors, 2 threads": Way(convert(threads=2), bits.nbytes),
    }


def other_ways(bits: np.ndarray[Any, Any]) -> dict[str, Way]:
    """Return another rule, other sources, and the way back."""
    codes, scales = np.zeros(bits.shape, np.uint8), np.zeros((len(bits), COLUMNS // 32), np.uint8)
    wide, values, narrow = bits.astype(np.uint32) << 16, np.zeros(bits.shape, np.float32), np.zeros_like(bits)
    half = wide.view(np.float32).astype(np.float16).view(np.uint16)
    return {
        "rule floor": Way(lambda: quantize(bits, "BF16", codes, scales, errors=False, rule="floor"), bits.nbytes),
        "from F16": Way(lambda: quantize(half, "F16", codes, scales, errors=False), half.nbytes),
        "from F32": Way(lambda: quantize(wide, "F32", codes, scales, errors=False), wide.nbytes),
        "decode to float32": Way(lambda: decode(codes, scales, values), values.nbytes),
        "decode to BF16": Way(lambda: decode(codes, scales, narrow), narrow.nbytes),
    }


def numpy_way(bits: np.ndarray[Any, Any]) -> dict[str, Way]:
    """Return numpy with the casts of ml_dtypes, if that is installed."""
    if importlib.util.find_spec("ml_dtypes") is None:
        return {}
    import ml_dtypes  # noqa: PLC0415 - not everybody has it

    def convert() -> object:
        blocks = bits.view(ml_dtypes.bfloat16).astype(np.float32).reshape(len(bits), -1, 32)
        largest = np.abs(blocks).max(axis=2).view(np.uint32)
        scales = np.maximum(((largest + 0x1FFFFF) >> 23).astype(np.int32), 8) - 8
        codes = np.ldexp(blocks, 127 - scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
        return codes, scales.astype(np.uint8)

    return {"numpy and ml_dtypes": Way(convert, bits.nbytes, repetitions=1)}


def torchao_ways(bits: np.ndarray[Any, Any]) -> dict[str, Way]:
    """Return torchao's conversion as it is and under torch.compile, if both packages are installed."""
    if importlib.util.find_spec("torchao") is None or importlib.util.find_spec("torch") is None:
        return {}
    import torch  # noqa: PLC0415 - not everybody has it
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: PLC0415 - as above
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    weight = torch.from_numpy(bits).view(torch.bfloat16)

    def convert(source: Any) -> object:
        return to_mx(source, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    compiled = torch.compile(convert)
    return {
        "torchao eager": Way(lambda: convert(weight), bits.nbytes, repetitions=1),
        "torchao compiled": Way(lambda: compiled(weight), bits.nbytes, repetitions=1),
    }


def seconds_per_byte(way: Way) -> float:
    """Run a way and return its best time per byte."""
    best = float("inf")
    for _ in range(way.repetitions):
        begin = time.perf_counter()
        way.call()
        best = min(best, time.perf_counter() - begin)
    return best / way.nbytes


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Run all rounds; return seconds per byte of every way and round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way.call()  # compiles, and touches its memory
    for number in range(rounds):
        order = list(ways)
        start = number % len(order)
        for name in order[start:] + order[:start]:
            found[name].append(seconds_per_byte(ways[name]))
    return found


def ratio(found: dict[str, list[float]], way: str, other: str) -> float:
    """Return how many times as fast a way is as another, the median of all rounds."""
    return statistics.median(theirs / ours for ours, theirs in zip(found[way], found[other], strict=True))


def report(found: dict[str, list[float]]) -> bool:
    """Print the table and the targets, and say whether all are met."""
    print("| way | GB/s, median | of memcpy | times numpy |")
    print("| --- | ---: | ---: | ---: |")
    for name, times in found.items():
        numpy = f"{ratio(found, name, 'numpy and ml_dtypes'):.1f}" if "numpy and ml_dtypes" in found else ""
        print(f"| {name} | {1e-9 / statistics.median(times):.2f} | {ratio(found, name, 'memcpy'):.3f} | {numpy} |")
    print()
    met = True
    for way, other, least in TARGETS:
        if other not in found:
            print(f"{way} / {other}: not measured, torch and torchao are not installed")
            continue
        value = ratio(found, way, other)
        met = met and value >= least
        print(f"{way} / {other}: {value:.2f}, at least {least}: {'met' if value >= least else 'MISSED'}")
    return met


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="input, in MiB of BF16; far larger than the caches")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = options.mib * 2**20 // (2 * COLUMNS)
    weights = np.random.default_rng(0).normal(0, 0.02, (rows, COLUMNS)).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    few = bits[: max(1, rows // SLOW_SHARE)]
    found = measure(main_ways(bits) | other_ways(few) | numpy_way(few) | torchao_ways(few), options.rounds)
    print(f"{options.mib} MiB of BF16, {options.rounds} rounds; conversion on one thread unless stated\n")
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
