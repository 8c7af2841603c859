"""JSON as a tree that keeps what parsers lose: duplicate keys, digits of numbers, halves of surrogate pairs.

An object is a list of pairs, an array a list of trees, a number :class:`Number` with its text. ``read`` and ``write`` are
inverse on what ``json`` reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is spelled."""

    text: str


@dataclass(slots=True, eq=False)
class Object:
    """The members of an object, in order, duplicates included."""

    members: list[tuple[str, Tree]]


@dataclass(slots=True, eq=False)
class Array:
    """The items of an array."""

    items: list[Tree]


@dataclass(frozen=True, slots=True)
class Nested:
    """Arrays or objects that nest without anything in them; written out without recursion."""

    levels: int
    of_objects: bool


Tree = Object | Array | Nested | Number | str | bool | None


def read(text: str) -> Tree:
    """Return the tree of a JSON text.

    Raises:
        ValueError: It is none.
        RecursionError: It nests too deeply.
    """
    return _tree(
        json.loads(text, object_pairs_hook=_Pairs, parse_int=Number, parse_float=Number, parse_constant=Number)
    )


def write(tree: Tree) -> str:
    """Return the text of a tree, in one line and in ASCII."""
    if isinstance(tree, Object):
        return "{" + ",".join(f"{json.dumps(key)}:{write(value)}" for key, value in tree.members) + "}"
    if isinstance(tree, Array):
        return "[" + ",".join(map(write, tree.items)) + "]"
    if isinstance(tree, Nested):
        begin, end = ('{"a":', "}") if tree.of_objects else ("[", "]")
        return begin * tree.levels + "0" + end * tree.levels
    return tree.text if isinstance(tree, Number) else json.dumps(tree)


def nodes(tree: Tree) -> list[Object | Array]:
    """Return every object and array of a tree, the outer ones first."""
    found: list[Object | Array] = []
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Object):
            found.append(here)
            waiting += [value for _, value in here.members]
        elif isinstance(here, Array):
            found.append(here)
            waiting += here.items
    return found


def copied(tree: Tree) -> Tree:
    """Return a tree that shares nothing that can change."""
    if isinstance(tree, Object):
        return Object([(key, copied(value)) for key, value in tree.members])
    return Array([copied(item) for item in tree.items]) if isinstance(tree, Array) else tree


class _Pairs(list[tuple[str, object]]):
    """The members of an object, to tell it from an array."""


def _tree(value: object) -> Tree:
    if isinstance(value, _Pairs):
        return Object([(key, _tree(member)) for key, member in value])
    if isinstance(value, list):
        return Array([_tree(item) for item in value])
    assert value is None or isinstance(value, (str, bool, Number))
    return value
