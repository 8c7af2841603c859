"""Sizes as people write them, and back: ``94.010GiB`` is 100942468874 bytes, floored.

Only integers leave this module. A fraction such as ``94.010GiB`` is read as an exact fraction and floored here, in
this one place, because supply must never be rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from tonnage.errors import Problem, UnitError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_TOKENS = re.compile(r"(?P<number>\d{1,16})\s?(?P<unit>[km]?)", re.ASCII)
_TOKEN_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_SIZE = re.compile(r"(?P<number>\d{1,24}(?:\.\d{1,12})?)\s*(?P<unit>[A-Za-z]+)?", re.ASCII)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is no less than a value."""
    return -(-value // multiple) * multiple


def parse_size(text: str, *, where: str = "size") -> int:
    """Return the bytes a size such as ``94.010GiB``, ``512MiB`` or ``1000`` stands for, floored.

    Raises:
        UnitError: The text is no number with an optional unit out of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = (match["unit"] or "B").upper() if match else ""
    bare = match is not None and not match["unit"]
    if match is None or unit not in UNITS or (bare and not _is_bytes(match["number"])):
        raise UnitError(
            Problem(
                where=where,
                what="not a size",
                expected="a number and a unit, such as 94.010GiB or 96GB; bytes without one from 1048576",
                found=repr(text),
            )
        )
    return int(Fraction(match["number"]) * UNITS[unit])


def _is_bytes(number: str) -> bool:
    """Whether a bare number can be meant as bytes: whole, and none or at least a MiB, so that 94 is no size."""
    return "." not in number and (int(number) == 0 or int(number) >= MIB)


def parse_number(text: str, *, where: str = "number") -> Fraction:
    """Return a plain decimal such as ``2.5`` as an exact fraction.

    Raises:
        UnitError: The text is no such number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"]:
        raise UnitError(
            Problem(where=where, what="not a number", expected="digits, such as 2 or 2.5", found=repr(text))
        )
    return Fraction(match["number"])


def gib(nbytes: int, *, digits: int = 3) -> str:
    """Return bytes as GiB text, rounded half up, exactly: ``gib(GIB) == '1.000'``."""
    return _scaled(nbytes, GIB, digits)


def mib(nbytes: int, *, digits: int = 3) -> str:
    """Return bytes as MiB text, rounded half up, exactly."""
    return _scaled(nbytes, MIB, digits)


def unit_for(nbytes: int) -> tuple[str, Callable[[int], str]]:
    """Return the unit a report about so many bytes is written in, GiB or MiB, and what writes it."""
    return ("GiB", gib) if nbytes >= GIB else ("MiB", mib)


def parse_tokens(text: str, *, where: str = "tokens") -> int:
    """Return a number of tokens such as ``32768``, ``32k`` or ``1M``: k is 1,024 of them, M 1,024 k.

    >>> parse_tokens("8192"), parse_tokens("8k"), parse_tokens("1M")
    (8192, 8192, 1048576)

    Raises:
        UnitError: It is none, or not one token.
    """
    match = _TOKENS.fullmatch(text.strip().lower())
    tokens = int(match["number"]) * _TOKEN_UNITS[match["unit"]] if match else 0
    if tokens < 1:
        expected = "a whole number such as 32768, 32k or 1M (k is 1,024)"
        raise UnitError(Problem(where=where, what="not a number of tokens", expected=expected, found=repr(text)))
    return tokens


def counted(number: int, noun: str) -> str:
    """Return how many there are of something, in words that suit one of them as well.

    >>> counted(1, "request"), counted(1200, "shard file")
    ('1 request', '1,200 shard files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _scaled(nbytes: int, unit: int, digits: int) -> str:
    scale = 10**digits
    scaled = (2 * abs(nbytes) * scale + unit) // (2 * unit)
    whole, rest = divmod(scaled, scale)
    sign = "-" if nbytes < 0 and scaled else ""
    return f"{sign}{whole}.{rest:0{digits}d}" if digits else f"{sign}{whole}"
