"""Half a million tensor names to a few thousand counts, without losing what can be wrong.

Every name is split into a masked name (``#`` for every number between dots, ``##`` for every ``#`` that was there), its
first number (the layer) and the rest (the expert). Tensors that agree in masked name, first number, dtype and shape are
counted together. A header shared by many files (:mod:`tonnage.checkpoint.skeletons`) is counted once. Names are
distinct by then, and so are their numbers, as one without leading zeros stands for a number: a count that reaches the
number of instances, with no number beyond their range, means that all of them are there.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tonnage.checkpoint.skeletons import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tonnage.checkpoint.headers import Header
    from tonnage.checkpoint.skeletons import ShardHeader

_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.|$)", re.ASCII)
_INDEX = re.compile(r"\{[a-z_]+\}")
_NUMBER_OR_INDEX = re.compile(r"(?<=\.)(?:\{[a-z_]+\}|0|[1-9][0-9]{0,8})(?=\.|$)", re.ASCII)
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_MASK = re.compile(r"(?<=\.)#(?=\.|$)")
_EXPERTS = ".experts."


class Kind(NamedTuple):
    """What is stored under a name."""

    dtype: str
    shape: tuple[int, ...]


class Count(NamedTuple):
    """How many instances, and the largest of each further number in their names."""

    instances: int
    largest: tuple[int, ...]


Kinds = dict[Kind, Count]
Tally = dict[tuple[str, int | None], Kinds]
"""(masked name, first number) -> kinds."""


class Masker:
    """Splits names into masked name and numbers; numbers a recipe spells out stay in the name.

    >>> Masker(("layers.{layer}.mlp.0.weight",)).split("layers.3.mlp.0.weight")
    ('layers.#.mlp.0.weight', (3,))
    >>> Masker(()).split("model.layers.3.mlp.experts.17.w1.weight")
    ('model.layers.#.mlp.experts.#.w1.weight', (3, 17))
    >>> Masker(()).split("model.layers.#.w1.weight")
    ('model.layers.##.w1.weight', ())
    """

    def __init__(self, spelled: Iterable[str]) -> None:
        """Take the full patterns (with suffix) that spell out a number."""
        self._spelled: dict[str, list[tuple[str, tuple[int | None, ...]]]] = {}
        for pattern in spelled:
            numbers = tuple(None if t.startswith("{") else int(t) for t in _NUMBER_OR_INDEX.findall(pattern))
            key = _NUMBER_OR_INDEX.sub("#", pattern)
            self._spelled.setdefault(key, []).append((_INDEX.sub("#", pattern), numbers))

    def split(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the masked name and the numbers it stands for."""
        parts = _NUMBER.split(name.replace("#", "##"))  # a number after every part but the last
        masked_name, numbers = "#".join(parts[::2]), tuple(map(int, parts[1::2]))
        for pattern, spelled in self._spelled.get(masked_name, ()):
            if all(fixed is None or fixed == number for fixed, number in zip(spelled, numbers, strict=True)):
                return pattern, tuple(n for fixed, n in zip(spelled, numbers, strict=True) if fixed is None)
        return masked_name, numbers


def unmasked(masked_name: str, first: int | None) -> str:
    """Return a masked name for a reader: its first number written out, ``*`` for the others.

    >>> unmasked("layers.#.experts.#.a##b", 3)
    'layers.3.experts.*.a#b'
    """
    return _MASK.sub("*", _MASK.sub(str(first), masked_name, count=1)).replace("##", "#")


def tally(shards: Iterable[ShardHeader], masker: Masker) -> Tally:
    """Return the counts over all shard files."""
    total: Tally = {}
    counted: dict[Header, Tally] = {}
    for shard in shards:
        known = counted.get(shard.skeleton)
        if known is None:
            known = counted[shard.skeleton] = _count(shard, masker)
        for (name, first), kinds in known.items():
            key = (name, shard.layer if first == _LAYER else first)
            already = total.get(key)
            total[key] = kinds if already is None else _merged(already, kinds)
    return total


def matching_names(
    shards: Iterable[ShardHeader], wanted: set[tuple[str, int | None]], masker: Masker
) -> Iterator[tuple[str, Kind, tuple[int, ...]]]:
    """Yield masked name, kind and numbers of every tensor whose masked name and first number are wanted."""
    for shard in shards:
        for entry in shard.entries():
            masked_name, numbers = masker.split(entry.name)
            if (masked_name, numbers[0] if numbers else None) in wanted:
                yield masked_name, Kind(entry.dtype, entry.shape), numbers


_LAYER = -1


def _count(shard: ShardHeader, masker: Masker) -> Tally:
    """Count one skeleton; ``_LAYER`` stands for the layer number of the file."""
    result: Tally = {}
    shared = shard.layer is not None  # else the placeholder is a name's own
    by_expert: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for entry in shard.skeleton.tensors:
        prefix, found, rest = entry.name.partition(_EXPERTS)
        number, _, suffix = rest.partition(".")
        if found and suffix and _WHOLE_NUMBER.fullmatch(number) and _is_layered(prefix) and not _NUMBER.search(suffix):
            group = by_expert.setdefault((prefix, suffix, entry.dtype, entry.shape), [0, 0])
            group[0] += 1
            group[1] = max(group[1], int(number))
        else:
            _add(result, masker, entry.name, Kind(entry.dtype, entry.shape), 1, shared)
    for (prefix, suffix, dtype, shape), (instances, largest) in by_expert.items():
        _add(result, masker, f"{prefix}{_EXPERTS}{largest}.{suffix}", Kind(dtype, shape), instances, shared)
    return result


@lru_cache(maxsize=1024)
def _is_layered(prefix: str) -> bool:
    """Whether a number stands before that of the expert, which is then not the first."""
    return PLACEHOLDER in prefix or _NUMBER.search(prefix) is not None


def _add(result: Tally, masker: Masker, name: str, kind: Kind, instances: int, shared: bool) -> None:  # noqa: FBT001
    """Count instances whose names differ in their last number only; the name has the largest."""
    layered = shared and PLACEHOLDER in name
    masked_name, numbers = masker.split(name.replace(PLACEHOLDER, "0") if layered else name)
    first = None
    if numbers:
        first = _LAYER if layered else numbers[0]
    count = Count(instances, numbers[1:])
    kinds = result.setdefault((masked_name, first), {})
    kinds[kind] = _sum(kinds[kind], count) if kind in kinds else count


def _merged(left: Kinds, right: Kinds) -> Kinds:
    merged = dict(left)
    for kind, count in right.items():
        merged[kind] = _sum(merged[kind], count) if kind in merged else count
    return merged


def _sum(left: Count, right: Count) -> Count:
    return Count(left.instances + right.instances, tuple(map(max, left.largest, right.largest)))
