"""How a quantised checkpoint's config names modules: each method's lists as a test, with what it costs to ask.

The lists come from strangers. Every one is bounded in length, every entry too; patterns are those of
:mod:`tonnage.checkpoint.name_patterns`, which cannot run away; and each test says about how many steps one name takes,
so that a long list times many layers is refused before it is walked.

Sources:
    compressed-tensors 0.20.0 ``utils/match.py``; nvidia-modelopt 0.47.0 ``exclude_modules`` as vLLM 0.32.0
    ``quantization/modelopt.py`` reads it; vLLM 0.32.0 ``quantization/utils/quant_utils.py`` ``is_layer_skipped``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any, Literal

from tonnage.checkpoint.name_patterns import BadPatternError, NamePattern, compile_name_pattern
from tonnage.errors import ConfigError, Problem

Kind = Literal["linear", "expert", "head", "tower"]
"""What the config's rules tell apart: linear layers, routed experts, the output head, towers of images and sound."""

MOST_ENTRIES = 1 << 16
MOST_PATTERNS = 1 << 12
LONGEST_ENTRY = 512
WHERE = "quantization_config"
_ENTRIES_PER_STEP = 16
"""Literal entries looked for in a name take as long as one step of a pattern."""


@dataclass(frozen=True, slots=True)
class NameTest:
    """A test of module name and kind; ``steps`` is about what one name costs."""

    matches: Callable[[str, Kind], bool]
    steps: int = 1


EVERYTHING = NameTest(lambda _name, _kind: True)
EXPERTS = NameTest(lambda _name, kind: kind == "expert")
HEAD = NameTest(lambda _name, kind: kind == "head")
NOT_HEAD = NameTest(lambda _name, kind: kind != "head")
TOWERS = NameTest(lambda _name, kind: kind == "tower")


def names_in(stated: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of names out of a config, empty where there is none.

    Raises:
        ConfigError: It is no list of texts, or too long.
    """
    value = stated.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _refusal(f"{key} is no list of names", "a list of strings", type(value).__name__)
    if len(value) > MOST_ENTRIES:
        raise _refusal(f"{key} is too long", f"at most {MOST_ENTRIES} entries", str(len(value)))
    longest = max(value, key=len, default="")
    if len(longest) > LONGEST_ENTRY:
        raise _refusal(f"entry of {key} is too long", f"at most {LONGEST_ENTRY} characters", str(len(longest)))
    return tuple(value)


def listed(names: Collection[str]) -> NameTest:
    """Return the test for names listed one by one: the module itself, or its parent (one entry for all experts)."""
    known = frozenset(names)

    def test(name: str, _kind: Kind) -> bool:
        while name:
            if name in known:
                return True
            name = name.rpartition(".")[0]
        return False

    return NameTest(test)


def named_inside(ignored: Iterable[str]) -> NameTest:
    """Return the test for entries that name a module, a parent of it, or path components inside it."""
    known = frozenset(ignored)

    def test(name: str, _kind: Kind) -> bool:
        parts = name.split(".")
        spans = ((begin, end) for begin in range(len(parts)) for end in range(begin + 1, len(parts) + 1))
        return any(".".join(parts[begin:end]) in known for begin, end in spans)

    return NameTest(test if known else _nothing, 8)


def spelled_in(parts: Collection[str]) -> NameTest:
    """Return the test for names that have one of these texts anywhere in them."""
    return NameTest(lambda name, _kind: any(part in name for part in parts), 1 + len(parts) // _ENTRIES_PER_STEP)


def nowhere_in(parts: Collection[str]) -> NameTest:
    """Return the test for names that have none of these texts in them."""
    inside = spelled_in(parts)
    return NameTest(lambda name, kind: not inside.matches(name, kind), inside.steps)


def matched(entries: Iterable[str]) -> NameTest:
    """Return the test of compressed-tensors: an exact name, or ``re:`` and a pattern matched from the start."""
    exact, patterns = frozenset(e for e in entries if not e.startswith("re:")), _patterns(entries)

    def test(name: str, _kind: Kind) -> bool:
        return name in exact or any(pattern.matches(name) for pattern in patterns)

    return NameTest(test, 1 + sum(pattern.cost for pattern in patterns))


def excluded(entries: Collection[str]) -> NameTest:
    """Return the test of modelopt: wildcards; an entry without one also matches as a substring, as vLLM reads it."""
    literal = tuple(entry for entry in entries if "*" not in entry)
    exact = frozenset(literal)
    wild = [entry for entry in entries if "*" in entry]
    _check_count(wild)
    wildcard = re.compile("|".join(map(translate, wild)) or r"(?!)")

    def test(name: str, _kind: Kind) -> bool:
        return name in exact or wildcard.match(name) is not None or any(entry in name for entry in literal)

    return NameTest(test, 1 + len(literal) // _ENTRIES_PER_STEP + len(wild))


def _nothing(_name: str, _kind: Kind) -> bool:
    return False


def _patterns(entries: Iterable[str]) -> tuple[NamePattern, ...]:
    texts = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    _check_count(texts)
    return tuple(map(_pattern, texts))


def _check_count(patterns: Collection[str]) -> None:
    if len(patterns) > MOST_PATTERNS:
        raise _refusal("too many patterns", f"at most {MOST_PATTERNS}", str(len(patterns)))


@lru_cache(maxsize=1024)
def _pattern(text: str) -> NamePattern:
    try:
        return compile_name_pattern(text)
    except BadPatternError as error:
        raise _refusal("pattern not accepted", "a plain regular expression", f"{text}: {error}") from error


def _refusal(what: str, expected: str, found: str) -> ConfigError:
    return ConfigError(Problem(where=WHERE, what=what, expected=expected, found=found))
