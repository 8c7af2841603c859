"""An object of a stranger's JSON, read key by key: what is wrong is collected, not raised; no key is overlooked."""

from __future__ import annotations

from collections.abc import Container, Iterable

from tonnage.errors import Problem

_ABSENT = object()


class Section:
    """A JSON object being read. Reading methods return None for a value that is wrong, having noted the problem.

    Attributes:
        where: File and path of the object.
        problems: Where problems are noted; shared with the sections inside.
        is_mapping: Whether it is an object at all.
    """

    __slots__ = ("_members", "_separator", "_taken", "is_mapping", "problems", "where")

    def __init__(self, value: object, where: str, problems: list[Problem], *, separator: str = ": ") -> None:
        """Begin to read ``value``; note a problem if it is no object."""
        self.where = where
        self.problems = problems
        self._separator = separator
        self.is_mapping = isinstance(value, dict)
        self._members: dict[str, object] = value if isinstance(value, dict) else {}
        self._taken: set[str] = set()
        if not self.is_mapping and value is not _ABSENT:
            problems.append(Problem(where=where, what="not an object", expected="an object", found=describe(value)))

    def keys(self) -> tuple[str, ...]:
        """Return all keys, in the order written."""
        return tuple(self._members)

    def has(self, key: str) -> bool:
        """Say whether the key is there."""
        return key in self._members

    def refuse(self, key: str, what: str, *, expected: str | None = None, found: str | None = None) -> None:
        """Note a problem with one key."""
        self.problems.append(Problem(where=self._path(key), what=what, expected=expected, found=found))

    def take(self, key: str) -> object:
        """Return the value as it is, None if it is absent; a key that is required is read by the typed methods."""
        self._taken.add(key)
        return self._members.get(key)

    def section(self, key: str) -> Section:
        """Return the object inside."""
        return Section(self._required(key), self._path(key), self.problems, separator=".")

    def integer(self, key: str) -> int | None:
        """Return an integer; true and false are none."""
        value = self._required(key)
        if value is _ABSENT or type(value) is int:
            return value if isinstance(value, int) else None
        self.refuse(key, "not an integer", expected="an integer", found=describe(value))
        return None

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of integers."""
        value = self._required(key)
        if isinstance(value, list):
            found = tuple(item for item in value if type(item) is int)
            if len(found) == len(value):
                return found
        if value is not _ABSENT:
            self.refuse(key, "not a list of integers", expected="a list of integers", found=describe(value))
        return None

    def boolean(self, key: str) -> bool | None:
        """Return true or false."""
        value = self._required(key)
        if value is _ABSENT or isinstance(value, bool):
            return value if isinstance(value, bool) else None
        self.refuse(key, "not true or false", expected="true or false", found=describe(value))
        return None

    def text(self, key: str) -> str | None:
        """Return a text."""
        value = self._required(key)
        if value is _ABSENT or isinstance(value, str):
            return value if isinstance(value, str) else None
        self.refuse(key, "not a text", expected="a text", found=describe(value))
        return None

    def one_of(self, key: str, allowed: Iterable[str]) -> str | None:
        """Return a text out of a set."""
        value = self.text(key)
        choices = tuple(allowed)
        if value is None or value in choices:
            return value
        self.refuse(key, "unknown value", expected=" or ".join(choices), found=f"{value!r:.80}")
        return None

    def texts(self, key: str, allowed: Container[str]) -> tuple[str, ...] | None:
        """Return a list of texts out of a set."""
        value = self._required(key)
        if isinstance(value, list):
            found = tuple(item for item in value if isinstance(item, str) and item in allowed)
            if len(found) == len(value):
                return found
        if value is not _ABSENT:
            expected = "a list of " + ", ".join(allowed) if isinstance(allowed, Iterable) else None
            self.refuse(key, "not a list of known values", expected=expected, found=describe(value))
        return None

    def equal(self, key: str, expected: int) -> None:
        """Note a problem unless the value is this integer."""
        value = self.integer(key)
        if value is not None and value != expected:
            self.refuse(key, "wrong value", expected=str(expected), found=describe(value))

    def close(self, *unread: str) -> None:
        """Note every key that was not read and is not in ``unread``: a key nobody knows is an error."""
        for key in sorted(self._members.keys() - self._taken - set(unread)):
            self.refuse(f"{key:.80}", "unknown key")

    def _path(self, key: str) -> str:
        return f"{self.where}{self._separator}{key}"

    def _required(self, key: str) -> object:
        self._taken.add(key)
        value = self._members.get(key, _ABSENT)
        if value is _ABSENT and self.is_mapping:
            self.refuse(key, "required key is missing")
        return value


_LONGEST_INT_SHOWN_BITS = 128


def describe(value: object) -> str:
    """Return value and type of a single value, the type alone of anything that may be large or deep."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            str(value) if value.bit_length() <= _LONGEST_INT_SHOWN_BITS else f"an integer of {value.bit_length()} bits"
        )
    if value is None or isinstance(value, (bool, float, str)):
        return f"{type(value).__name__} {value!r:.80}"
    return type(value).__name__
