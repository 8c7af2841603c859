"""Half a million tensor names to a few thousand counts, without losing what can be wrong.

Every name is split into a masked name (``#`` for every number between dots), its first number (the layer) and the rest
(the expert). Tensors that agree in masked name, first number, dtype and shape are counted together. A header shared by many
files (:mod:`tonnage.checkpoint.skeletons`) is counted once. Names are distinct by then, so a count that reaches the number of
instances, with no number beyond their range, means that all of them are there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tonnage.checkpoint.skeletons import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tonnage.checkpoint.headers import Header
    from tonnage.checkpoint.skeletons import ShardHeader

_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.|$)", re.ASCII)
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


def mask(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name with ``#`` for its numbers, and the numbers.

    >>> mask("model.layers.3.mlp.experts.17.w1.weight")
    ('model.layers.#.mlp.experts.#.w1.weight', (3, 17))
    """
    return _NUMBER.sub("#", name), tuple(map(int, _NUMBER.findall(name)))


def tally(shards: Iterable[ShardHeader]) -> Tally:
    """Return the counts over all shard files."""
    total: Tally = {}
    counted: dict[int, tuple[Tally, Header]] = {}
    for shard in shards:
        known = counted.get(id(shard.skeleton))
        if known is None:
            known = counted[id(shard.skeleton)] = (_count(shard), shard.skeleton)
        for (name, first), kinds in known[0].items():
            number = shard.layer if first == _LAYER else first
            key = (name, number)
            already = total.get(key)
            total[key] = kinds if already is None else _merged(already, kinds)
    return total


def matching_names(shards: Iterable[ShardHeader], wanted: set[tuple[str, int | None]]) -> Iterator[tuple[str, Kind, tuple[int, ...]]]:
    """Yield masked name, kind and numbers of every tensor whose masked name and first number are wanted."""
    for shard in shards:
        for entry in shard.entries():
            masked_name, numbers = mask(entry.name)
            if (masked_name, numbers[0] if numbers else None) in wanted:
                yield masked_name, Kind(entry.dtype, entry.shape), numbers


_LAYER = -1


def _count(shard: ShardHeader) -> Tally:
    """Count one skeleton; ``_LAYER`` stands for the layer number of the file."""
    result: Tally = {}
    by_expert: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for entry in shard.skeleton.tensors:
        prefix, found, rest = entry.name.partition(_EXPERTS)
        number, _, suffix = rest.partition(".")
        if found and number.isdecimal() and suffix and not _NUMBER.search(suffix):
            group = by_expert.setdefault((prefix, suffix, entry.dtype, entry.shape), [0, 0])
            group[0] += 1
            group[1] = max(group[1], int(number))
        else:
            _add(result, entry.name, Kind(entry.dtype, entry.shape), 1, ())
    for (prefix, suffix, dtype, shape), (instances, largest) in by_expert.items():
        _add(result, f"{prefix}{_EXPERTS}#.{suffix}", Kind(dtype, shape), instances, (largest,))
    return result


def _add(result: Tally, name: str, kind: Kind, instances: int, expert: tuple[int, ...]) -> None:
    layered = PLACEHOLDER in name
    masked_name, numbers = mask(name.replace(PLACEHOLDER, "0") if layered else name)
    first = None
    if numbers:
        first = _LAYER if layered else numbers[0]
    count = Count(instances, (*numbers[1:], *expert))
    kinds = result.setdefault((masked_name, first), {})
    kinds[kind] = _sum(kinds[kind], count) if kind in kinds else count


def _merged(left: Kinds, right: Kinds) -> Kinds:
    merged = dict(left)
    for kind, count in right.items():
        merged[kind] = _sum(merged[kind], count) if kind in merged else count
    return merged


def _sum(left: Count, right: Count) -> Count:
    return Count(left.instances + right.instances, tuple(map(max, left.largest, right.largest)))
