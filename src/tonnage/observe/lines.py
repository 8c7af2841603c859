"""Patterns of log lines as data: a marker that is cheap to find, and an expression whose groups are named by figures.

An expression is tried only on a line that holds its marker, and every repeat in it is bounded, so that the time a line
takes grows with its length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tonnage.errors import one_line
from tonnage.observe.figures import FIGURES, Quantity, Reading, width_of

NUMBER = r"-?\d{1,12}(?:\.\d{1,9})?"
COUNT = r"-?\d[\d,]{0,18}"
_LONGEST_TEXT = 200


def figure(name: str) -> str:
    """Return the expression of a figure: its number as printed, in a group of its name."""
    kind = FIGURES[name].kind
    return rf"(?P<{name}>{NUMBER if kind in ('bytes', 'number') else COUNT})"


Seen = dict[str, tuple[Reading, ...]]
"""The readings of one rank in the order of the log, by figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One kind of line.

    Attributes:
        marker: Text every such line holds.
        regex: Groups named by figures.
        build: Makes the readings of a match; by default one per group that matched.
    """

    marker: str
    regex: re.Pattern[str]
    build: Callable[[re.Match[str]], tuple[Reading, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """How one engine writes its log.

    Attributes:
        name: The engine.
        patterns: Lines that carry figures.
        markers: Short texts; every line that matters holds at least one.
        starts: Texts of lines that begin a start.
        again: A text, and figures after which it begins another start, for logs without such lines.
        ready: Figures printed only when the engine got its cache; what was refused before was no refusal.
        settle: Derives what takes several readings of one rank.
    """

    name: str
    patterns: tuple[Pattern, ...]
    markers: tuple[str, ...]
    starts: tuple[str, ...]
    again: tuple[str, tuple[str, ...]]
    ready: tuple[str, ...]
    settle: Callable[[Seen], Seen] = dict


def pattern(marker: str, regex: str, build: Callable[[re.Match[str]], tuple[Reading, ...]] | None = None) -> Pattern:
    """Return a pattern; the expression is compiled for ASCII digits only."""
    return Pattern(marker=marker, regex=re.compile(regex, re.ASCII), build=build or _groups)


def refusal(marker: str, what: str) -> Pattern:
    """Return the pattern of a refusal that says no figure."""
    return pattern(marker, re.escape(marker), lambda _: (Reading(name="refusal", text=what),))


def readings(line: str, patterns: tuple[Pattern, ...]) -> tuple[Reading, ...]:
    """Return all figures of one line."""
    found: list[Reading] = []
    for one in patterns:
        if one.marker in line:
            match = one.regex.search(line)
            if match is not None:
                found += one.build(match)
    return tuple(found)


def quantity(text: str, *, unit: int) -> Quantity:
    """Return a decimal such as ``-1,234.50`` exactly, with what its rounding hides."""
    whole, _, rest = text.replace(",", "").partition(".")
    return Quantity(number=int(whole + rest), digits=len(rest), unit=unit, width=width_of(len(rest), unit))


def reading(name: str, text: str) -> Reading:
    """Return a figure as its kind reads it."""
    spec = FIGURES[name]
    if spec.kind == "text":
        return Reading(name=name, text=one_line(text[:_LONGEST_TEXT]))
    return Reading(name=name, quantity=quantity(text, unit=spec.unit), text=text)


def _groups(match: re.Match[str]) -> tuple[Reading, ...]:
    return tuple(reading(name, text) for name, text in match.groupdict().items() if text is not None)


def setting_reader(keys: dict[str, str]) -> Callable[[str], tuple[Reading, ...]]:
    """Return what reads ``key=value`` and ``'key': value`` out of a line of arguments.

    Args:
        keys: Figure by the engine's name of the argument.
    """
    names = "|".join(map(re.escape, keys))
    regex = re.compile(
        rf"""(?<![\w.])'?(?P<key>{names})'?(?:=|:\s?)(?:'(?P<quoted>[^']{{1,400}})'|(?P<bare>[^\s,'"(){{}}\[\]]{{1,200}}))"""
    )

    def read(line: str) -> tuple[Reading, ...]:
        found: dict[str, Reading] = {}
        for match in regex.finditer(line):
            name, text = keys[match["key"]], match["quoted"] or match["bare"]
            if text == "None" or name in found:
                continue
            if FIGURES[name].kind == "text" or re.fullmatch(NUMBER, text, re.ASCII):
                found[name] = reading(name, text)
        return tuple(found.values())

    return read
