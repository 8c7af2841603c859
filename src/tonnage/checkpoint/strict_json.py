"""JSON from strangers, read strictly: UTF-8, no duplicate keys, no NaN, bounded depth, one line per refusal.

``members`` keeps every key of every object, so that a caller can name a duplicate where it stands. ``parse_object`` is
for small files such as config.json: it refuses duplicates itself and returns plain dicts and lists.
"""

from __future__ import annotations

import json
import re
from math import isfinite

from tonnage.errors import Problem, TonnageError

DEEPEST = 64
_LONGEST_NUMBER = 400


MOST_VALUES = 1_000_000
MOST_CONTAINERS = 100_000
"""Beyond these a small JSON file costs more than any config is worth. The largest one known has 12,000 objects."""
MOST_PROBLEMS = 40
_MOST_QUOTES = 4  # of a key and its value
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class Members(tuple[tuple[str, object], ...]):
    """The members of one JSON object in the order written, duplicates included."""

    __slots__ = ()


class NotJsonError(ValueError):
    """Bytes that are not JSON; carries what was expected and found, without a file name."""

    def __init__(self, what: str, *, expected: str | None = None, found: str | None = None) -> None:
        """Keep the parts of the problem a caller will complete with its file name."""
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.found = found

    def problem(self, where: str) -> Problem:
        """Return the refusal as a problem of one file."""
        return Problem(where=where, what=self.what, expected=self.expected, found=self.found)


def members(raw: bytes, *, constants: bool = False) -> object:
    """Return the value of a JSON text with every object as ``Members``, so that nothing written in it is lost.

    Integers are exact; ``-0`` is a float, as in safetensors, so that it cannot pass for a size.

    Args:
        raw: The text.
        constants: Accept ``NaN`` and ``Infinity``, which are no JSON but which Python writes into config.json.

    Raises:
        NotJsonError: The bytes are not UTF-8, not JSON, or nested beyond any use.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise NotJsonError("not UTF-8", expected="UTF-8 text", found=found) from error
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=Members,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=float if constants else _constant,
        )
    except json.JSONDecodeError as error:
        found = f"{error.msg} (character {error.pos})"
        raise NotJsonError("not JSON", expected="one JSON value", found=found) from error
    except RecursionError as error:
        raise NotJsonError("nested too deeply", expected=f"at most {DEEPEST} levels", found="more") from error
    return value


def parse_object(raw: bytes, *, where: str, kind: type[TonnageError], constants: bool = False) -> dict[str, object]:
    """Return a small JSON file that must hold one object, as plain dicts and lists.

    Args:
        raw: The whole file.
        where: File name for the refusal.
        kind: Which refusal to raise, ``ConfigError`` for a config.json.
        constants: As in ``members``.

    Raises:
        TonnageError: As ``kind``, with all problems: not UTF-8, not JSON, not an object, duplicate keys, too deep.
    """
    if has_too_much(raw, values=MOST_VALUES, containers=MOST_CONTAINERS):
        expected = f"at most {MOST_VALUES} values and {MOST_CONTAINERS} arrays and objects"
        raise kind(Problem(where=where, what="too many values", expected=expected))
    try:
        value = members(raw, constants=constants)
    except NotJsonError as error:
        raise kind(error.problem(where)) from error
    if not isinstance(value, Members):
        raise kind(Problem(where=where, what="not a JSON object", expected="an object", found=kind_of(value)))
    if too_deep(value):
        expected = f"at most {DEEPEST} levels"
        raise kind(Problem(where=where, what="nested too deeply", expected=expected, found="more"))
    problems: list[Problem] = []
    plain = _plain(value, "", where, problems)
    if problems:
        raise kind(*problems)
    assert isinstance(plain, dict)
    return plain


def has_too_much(raw: bytes, *, values: int, containers: int) -> bool:
    """Whether a text has more values, or more arrays and objects; what its strings spell, as of a log, is not counted.

    Nothing is decoded, and no more time is spent on it than the values would take.
    """

    def counted(text: bytes) -> bool:
        return text.count(b",") > values or text.count(b"[") + text.count(b"{") > containers

    if raw.count(b'"') > _MOST_QUOTES * values:
        return True
    return counted(raw) and counted(_STRING.sub(b"", raw))


def kind_of(value: object) -> str:
    """Return what a JSON value is, in the words of a refusal."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


def repeated(pairs: Members) -> tuple[tuple[str, int], ...]:
    """Return each key an object holds more than once, with how often, in order of first appearance."""
    if len(dict(pairs)) == len(pairs):
        return ()
    counts: dict[str, int] = {}
    for key, _ in pairs:
        counts[key] = counts.get(key, 0) + 1
    return tuple((key, count) for key, count in counts.items() if count > 1)


def is_unicode(text: str) -> bool:
    """Say whether a string can be written out: half of a surrogate pair, which JSON can spell, cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def too_deep(value: object) -> bool:
    """Say whether arrays and objects nest beyond ``DEEPEST``, without recursion."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, Members):
        return [child for _, child in value]
    return value if isinstance(value, list) else []


def _plain(value: object, path: str, where: str, problems: list[Problem]) -> object:
    """Turn ``Members`` into dicts, noting duplicate keys with the path to them."""
    if isinstance(value, list):
        return [_plain(item, f"{path}[{number}]", where, problems) for number, item in enumerate(value)]
    if len(problems) >= MOST_PROBLEMS:
        return None
    if isinstance(value, str) and not is_unicode(value):
        problems.append(Problem(where=where, what=path, expected="Unicode text", found="half of a surrogate pair"))
    if not isinstance(value, Members):
        return value
    problems.extend(
        Problem(where=where, what=f"a key of {path or 'the whole'}", expected="Unicode text", found=ascii(key)[:80])
        for key, _ in value
        if not is_unicode(key)
    )
    problems.extend(
        Problem(where=where, what=f"duplicate key {path}{'.' if path else ''}{key}", expected="1", found=str(count))
        for key, count in repeated(value)
    )
    return {key: _plain(item, f"{path}.{key}" if path else key, where, problems) for key, item in value}


def _integer(text: str) -> int | float:
    if text == "-0":
        return -0.0
    return int(_short(text))


def _number(text: str) -> float:
    number = float(_short(text))
    if not isfinite(number):
        raise NotJsonError("number out of range", expected="a finite number", found=text[:40])
    return number


def _short(text: str) -> str:
    if len(text) > _LONGEST_NUMBER:
        raise NotJsonError("number too long", expected=f"at most {_LONGEST_NUMBER} digits", found=f"{len(text)} digits")
    return text


def _constant(text: str) -> float:
    raise NotJsonError("not JSON", expected="a finite number", found=text)
