"""Regular expressions from a stranger's config, matched against module names in bounded time.

``re`` backtracks, and a pattern such as ``(.|..)+x`` keeps it busy for ages. Here a pattern walks the *set* of
positions it can have reached, one bit each, so that every part of it looks at a position once. The language is the
part of Python's that quantisation configs use: literals, ``.``, classes, groups, ``|``, ``* + ? {m,n}``, ``^ $`` and
lookahead. Anything else is refused, never guessed.

Source:
    Thompson, "Regular expression search algorithm", Communications of the ACM 11(6), 1968, for walking sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LONGEST_PATTERN = 512
DEEPEST_GROUP = 16
MOST_REPEATS = 1_000
COSTLIEST = 20_000
"""Steps one pattern may nominally take on one name; nested repetition multiplies them."""

_NOMINAL_LENGTH = 64
_SPECIAL = frozenset("\\^$.|?*+()[]{}")
_COUNTED = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}", re.ASCII)
_IN_CLASS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}


class BadPatternError(ValueError):
    """A pattern outside the language, or too costly; the text says which."""


@dataclass(slots=True, eq=False)
class _Name:
    """One name: for every character the positions it stands at, as bits."""

    length: int
    at: dict[str, int]
    looked: dict[int, int] = field(default_factory=dict)


_Step = Callable[[_Name, int], int]


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a pattern: what it does to a set of positions, and how many steps that takes on a usual name."""

    step: _Step
    cost: int


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A compiled pattern.

    Attributes:
        text: As written.
        cost: Nominal steps for one name.
    """

    text: str
    cost: int
    _step: _Step = field(repr=False, compare=False)

    def matches(self, name: str) -> bool:
        """Say whether the pattern matches from the start of a name, as ``re.match`` does."""
        at: dict[str, int] = {}
        for position, character in enumerate(name):
            at[character] = at.get(character, 0) | 1 << position
        return self._step(_Name(len(name), at), 1) != 0


def compile_name_pattern(text: str) -> NamePattern:
    """Return a pattern ready to match.

    Raises:
        BadPatternError: It is too long, too costly, or uses what the module docstring does not list.
    """
    if len(text) > LONGEST_PATTERN:
        raise BadPatternError(f"longer than {LONGEST_PATTERN} characters")
    parser = _Parser(text)
    node = parser.alternatives(0)
    if parser.at < len(text):
        raise BadPatternError(f"unbalanced ) at {parser.at}")
    if node.cost > COSTLIEST:
        raise BadPatternError("nested repetition is too costly")
    return NamePattern(text, node.cost, node.step)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def alternatives(self, depth: int) -> _Node:
        """Parse ``a|b|c`` up to a closing bracket or the end."""
        if depth > DEEPEST_GROUP:
            raise BadPatternError(f"groups nest deeper than {DEEPEST_GROUP}")
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        if len(branches) == 1:
            return branches[0]
        steps = tuple(branch.step for branch in branches)
        return _Node(lambda name, here: _union(step(name, here) for step in steps), sum(b.cost for b in branches))

    def _sequence(self, depth: int) -> _Node:
        nodes = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            nodes.append(self._repeated(depth))
        steps = tuple(node.step for node in nodes)

        def run(name: _Name, here: int) -> int:
            for step in steps:
                if not here:
                    return 0
                here = step(name, here)
            return here

        return _Node(run, 1 + sum(node.cost for node in nodes))

    def _repeated(self, depth: int) -> _Node:
        """Parse one atom with its quantifier."""
        begin = self.at
        node, may_repeat = self._atom(depth)
        counts = self._quantifier()
        if counts is None:
            return node
        if not may_repeat:
            raise BadPatternError(f"nothing to repeat at {begin}")
        if self._peek() == "+" or self._quantifier() is not None:
            raise BadPatternError(f"repeated repetition at {self.at}")
        low, high = counts
        times = low + (_NOMINAL_LENGTH if high is None else high - low)
        if self.text[begin] == "." and high is None:
            return _Node(_anything(low), 1 + low)
        return _Node(_repetition(node.step, low, high), times * node.cost)

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Return fewest and most repetitions; a lazy quantifier finds the same names as a greedy one."""
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if simple is not None:
            self.at += 1
            self._take("?")
            return simple
        if self._peek() != "{":
            return None
        found = _COUNTED.match(self.text, self.at)
        if found is None or not (found[1] or found[3]):
            raise BadPatternError(f"not a repetition at {self.at}")
        self.at = found.end()
        self._take("?")
        low = int(found[1] or 0)
        high = low if not found[2] else int(found[3]) if found[3] else None
        if max(low, high or 0) > MOST_REPEATS or (high is not None and high < low):
            raise BadPatternError(f"not a repetition up to {MOST_REPEATS}: {found[0]}")
        return low, high

    def _atom(self, depth: int) -> tuple[_Node, bool]:
        """Return a part and whether it may be repeated."""
        character = self.text[self.at]
        self.at += 1
        if character == "(":
            return self._group(depth)
        if character == "[":
            return _Node(_one(self._class()), 1), True
        if character == ".":
            return _Node(_one(lambda c: c != "\n"), 1), True
        if character in "^$":
            at_start = character == "^"
            return _Node(lambda name, here: here & (1 if at_start else 1 << name.length), 1), False
        if character == "\\":
            return _Node(self._escaped(), 1), True
        if character in _SPECIAL - frozenset("]}"):
            raise BadPatternError(f"unexpected {character} at {self.at - 1}")
        return _Node(_literal(character), 1), True

    def _escaped(self) -> _Step:
        character = self._peek()
        self.at += 1
        if character.lower() in _IN_CLASS and character:
            return _one(_class_of(character))
        if not character or character.isalnum():
            raise BadPatternError(f"unknown escape \\{character}")
        return _literal(character)

    def _group(self, depth: int) -> tuple[_Node, bool]:
        ahead: bool | None = None
        if self._take("?"):
            kind = self._peek()
            self.at += 1
            if kind not in (":", "=", "!"):
                raise BadPatternError(f"unknown group (?{kind}")
            ahead = None if kind == ":" else kind == "="
        node = self.alternatives(depth + 1)
        if not self._take(")"):
            raise BadPatternError("unbalanced (")
        if ahead is None:
            return node, True
        return _Node(_lookahead(node.step, wanted=ahead), _NOMINAL_LENGTH * node.cost), False

    def _class(self) -> Callable[[str], bool]:
        """Parse ``[...]`` after its opening bracket."""
        negated = self._take("^")
        tests: list[Callable[[str], bool]] = []
        begin = self.at
        while self._peek() != "]" or self.at == begin:
            if self.at >= len(self.text):
                raise BadPatternError("unbalanced [")
            low = self._class_item(tests)
            if low and self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._class_item(tests)
                if not high or high < low:
                    raise BadPatternError(f"not a range of characters at {self.at}")
                tests.append(_between(low, high))
            elif low:
                tests.append(_between(low, low))
        self.at += 1
        return lambda c: any(test(c) for test in tests) is not negated

    def _class_item(self, tests: list[Callable[[str], bool]]) -> str:
        """Return one character, or add a class such as a digit to the tests and return nothing."""
        character = self._peek()
        self.at += 1
        if character != "\\":
            return character
        character = self._peek()
        self.at += 1
        if character.lower() in _IN_CLASS and character:
            tests.append(_class_of(character))
            return ""
        if not character or character.isalnum():
            raise BadPatternError(f"unknown escape \\{character}")
        return character

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, character: str) -> bool:
        found = self._peek() == character
        self.at += found
        return found


def _class_of(letter: str) -> Callable[[str], bool]:
    test = _IN_CLASS[letter.lower()]
    return test if letter.islower() else lambda c: not test(c)


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda c: low <= c <= high


def _union(sets: Iterable[int]) -> int:
    result = 0
    for positions in sets:
        result |= positions
    return result


def _literal(character: str) -> _Step:
    return lambda name, here: (here & name.at.get(character, 0)) << 1


def _one(test: Callable[[str], bool]) -> _Step:
    """Step over one character that passes a test."""

    def run(name: _Name, here: int) -> int:
        return _union(here & at for character, at in name.at.items() if here & at and test(character)) << 1

    return run


def _anything(fewest: int) -> _Step:
    """Step over ``.`` any number of times: every position from the first one on."""

    def run(name: _Name, here: int) -> int:
        first = (here & -here).bit_length() - 1 + fewest
        end = name.length + 1
        newline = name.at.get("\n", 0)
        if newline:
            return _repetition(_one(lambda c: c != "\n"), fewest, None)(name, here)
        return (1 << end) - (1 << first) if here and first < end else 0

    return run


def _repetition(step: _Step, low: int, high: int | None) -> _Step:
    def run(name: _Name, here: int) -> int:
        for _ in range(low):
            if not here:
                return 0
            here = step(name, here)
        reached = frontier = here
        times = 0
        while frontier and (high is None or times < high - low):
            frontier = step(name, frontier) & ~reached
            reached |= frontier
            times += 1
        return reached

    return run


def _lookahead(step: _Step, *, wanted: bool) -> _Step:
    def run(name: _Name, here: int) -> int:
        held = name.looked.get(id(run))
        if held is None:
            held = _union(1 << p for p in range(name.length + 1) if (step(name, 1 << p) != 0) is wanted)
            name.looked[id(run)] = held
        return here & held

    return run
