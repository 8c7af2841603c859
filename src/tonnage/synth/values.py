"""Bytes for the tensors of a small rehearsal: the same seed and name give the same bytes.

Standard library only, so that rehearsals need nothing that planning does not. Floats are drawn from a pool of 65,536
values per kind and dtype, in runs that begin at random places of it; codes are fresh random bytes. No function of the C
library is involved, whose last bit differs between machines: a normal value is the sum of six even ones.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from tonnage.formats.dtypes import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tonnage.synth.fills import Fill
    from tonnage.synth.layout import LaidTensor

PIECE_BYTES = 1 << 20
_POOL_ELEMENTS = 1 << 16
_RUN_ELEMENTS = 1 << 12
_STRUCT_CODES = {"F16": "e", "BF16": "f", "F32": "f", "F64": "d"}

_TERMS = 6
_TERM_SCALE = 0.0282842712474619
"""0.02 times the square root of 2: six terms of variance 1/12 have a standard deviation of the square root of 1/2."""


def _nearly_normal(random: Random) -> float:
    """Return a value around 0 with standard deviation 0.02, at most 0.085 in size."""
    return _TERM_SCALE * (sum(random.random() for _ in range(_TERMS)) - _TERMS // 2)


_DRAWS: dict[str, Callable[[Random], float]] = {
    "normal": _nearly_normal,
    "near_one": lambda random: 1 + _nearly_normal(random),
    "positive": lambda random: random.uniform(0.004, 0.012),
    "signed": lambda random: random.uniform(0.05, 0.15) * random.choice((-1, 1)),
}


def _table(value: Callable[[int], int]) -> bytes:
    return bytes(map(value, range(256)))


_E4M3_NAN, _E5M2_EXPONENT = 0x7F, 0x7C
_TABLES = {
    "bytes": _table(lambda byte: byte),
    "e4m3": _table(lambda byte: byte - 1 if byte & _E4M3_NAN == _E4M3_NAN else byte),
    "e4m3_positive": _table(lambda byte: 0x20 + byte % 0x28),
    "e5m2": _table(lambda byte: byte & 0xFB if byte & _E5M2_EXPONENT == _E5M2_EXPONENT else byte),
    "e8m0": _table(lambda byte: 118 + byte % 9),
    "below_8": _table(lambda byte: byte % 8),
}


class Values:
    """Makes the bytes of tensors from one seed."""

    def __init__(self, seed: int) -> None:
        """Keep the seed; pools are made when first asked for."""
        self._seed = seed
        self._pool = lru_cache(maxsize=None)(self._make_pool)

    def pieces(self, shard_file: str, tensor: LaidTensor) -> Iterator[bytes]:
        """Yield the bytes of one tensor, at most 1 MiB at a time."""
        random = Random(f"{self._seed}/{shard_file}/{tensor.name}")  # noqa: S311 - reproducible on purpose
        yield from _sliced(self._content(random, tensor), tensor.end - tensor.begin)

    def _content(self, random: Random, tensor: LaidTensor) -> Iterator[bytes]:
        """Yield the bytes of a tensor; past its end is allowed."""
        fill, nbytes = tensor.fill, tensor.end - tensor.begin
        if fill.kind in _DRAWS:
            pool = self._pool(fill.kind, tensor.dtype)
            width = payload_bytes(tensor.dtype, (1,))
            for _ in range(0, nbytes, _RUN_ELEMENTS * width):
                begin = random.randrange(_POOL_ELEMENTS - _RUN_ELEMENTS) * width
                yield pool[begin : begin + _RUN_ELEMENTS * width]
        elif fill.kind == "rows":
            used, stride = fill.numbers
            for _ in range(0, nbytes, stride):
                yield random.randbytes(used) + bytes(stride - used)
        elif fill.kind in _TABLES:
            for begin in range(0, nbytes, PIECE_BYTES):
                yield random.randbytes(min(PIECE_BYTES, nbytes - begin)).translate(_TABLES[fill.kind])
        else:
            yield _integers(random, fill, tensor)

    def _make_pool(self, kind: str, dtype: str) -> bytes:
        random = Random(f"{self._seed}/{kind}/{dtype}")  # noqa: S311 - reproducible on purpose
        draw = _DRAWS[kind]
        drawn = struct.pack(f"<{_POOL_ELEMENTS}{_STRUCT_CODES[dtype]}", *(draw(random) for _ in range(_POOL_ELEMENTS)))
        if dtype != "BF16":
            return drawn
        upper = bytearray(2 * _POOL_ELEMENTS)
        upper[0::2], upper[1::2] = drawn[2::4], drawn[3::4]
        return bytes(upper)


def _integers(random: Random, fill: Fill, tensor: LaidTensor) -> bytes:
    width = payload_bytes(tensor.dtype, (1,))
    count = (tensor.end - tensor.begin) // width
    if fill.kind == "integers":
        numbers: Iterator[int] = iter(fill.numbers)
    elif fill.kind == "steps":
        numbers = (i // fill.numbers[0] for i in range(count))
    else:
        numbers = (random.randrange(2 if tensor.dtype == "BOOL" else 4) for _ in range(count))
    return b"".join(number.to_bytes(width, "little") for number in numbers)


def _sliced(content: Iterator[bytes], nbytes: int) -> Iterator[bytes]:
    """Yield exactly ``nbytes`` of the content in pieces of at most 1 MiB, small parts joined."""
    waiting: list[bytes] = []
    size = 0
    for part in content:
        waiting.append(part[: nbytes - size])
        size += len(waiting[-1])
        if sum(map(len, waiting)) >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting = []
    yield b"".join(waiting)
    if size != nbytes:
        raise ValueError(f"{nbytes} bytes wanted, {size} made")
