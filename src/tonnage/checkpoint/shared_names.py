"""No tensor twice: names that stand in more than one shard file of a checkpoint.

Files of one layer each are compared by their skeletons: names of different layers differ by their number, so only files
of the same layer, names without a number and names written out need a look.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tonnage.checkpoint.skeletons import PLACEHOLDER
from tonnage.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tonnage.checkpoint.headers import Header
    from tonnage.checkpoint.skeletons import ShardHeader

_LAYER = re.compile(r"\.layers\.(0|[1-9][0-9]{0,5})\.", re.ASCII)
_WRITTEN_OUT = 20


def check_distinct(shards: Sequence[ShardHeader]) -> tuple[Problem, ...]:
    """Return a problem for every tensor name found in two shard files, at most 20 written out."""
    problems: list[Problem] = []
    count = 0
    for name, first, second in _shared(shards):
        count += 1
        if count <= _WRITTEN_OUT:
            found = f"in {first} and {second}"
            problems.append(
                Problem(where=second, tensor=name, what="name in two shard files", expected="one file", found=found)
            )
    if count > _WRITTEN_OUT:
        problems.append(Problem(where=shards[-1].shard_file, what=f"and {count - _WRITTEN_OUT} more shared names"))
    return tuple(problems)


def _shared(shards: Sequence[ShardHeader]) -> Iterator[tuple[str, str, str]]:
    """Yield each shared name with the two files."""
    masked = _MaskedNames()
    by_layer: dict[int, list[ShardHeader]] = {}
    written: dict[str, str] = {}
    for shard in shards:
        names: Iterable[str] = shard.names()
        if shard.layer is not None:
            for other in by_layer.setdefault(shard.layer, []):
                both = masked.of(shard.skeleton) & masked.of(other.skeleton)
                yield from ((shard.real_name(name), other.shard_file, shard.shard_file) for name in sorted(both))
            by_layer[shard.layer].append(shard)
            names = masked.without_number(shard.skeleton)
        for name in names:
            first = written.setdefault(name, shard.shard_file)
            if first != shard.shard_file:
                yield name, first, shard.shard_file
    if by_layer:
        yield from _in_layer_files(written, by_layer, masked)


def _in_layer_files(
    written: dict[str, str], by_layer: dict[int, list[ShardHeader]], masked: _MaskedNames
) -> Iterator[tuple[str, str, str]]:
    """Yield names written out in one file that a file of their layer holds too."""
    for name, first in written.items():
        number = _LAYER.search(name)
        if number is None:
            continue
        template = name.replace(number[0], f".layers.{PLACEHOLDER}.")
        for shard in by_layer.get(int(number[1]), ()):
            if template in masked.of(shard.skeleton):
                yield name, first, shard.shard_file


class _MaskedNames:
    """The names of each skeleton as sets, made when first asked for."""

    def __init__(self) -> None:
        self._numbered: dict[Header, frozenset[str]] = {}
        self._plain: dict[Header, tuple[str, ...]] = {}

    def of(self, skeleton: Header) -> frozenset[str]:
        """Return the names that hold the layer number."""
        if skeleton not in self._numbered:
            names = (tensor.name for tensor in skeleton.tensors)
            self._numbered[skeleton] = frozenset(name for name in names if PLACEHOLDER in name)
        return self._numbered[skeleton]

    def without_number(self, skeleton: Header) -> tuple[str, ...]:
        """Return the other names."""
        if skeleton not in self._plain:
            names = (tensor.name for tensor in skeleton.tensors)
            self._plain[skeleton] = tuple(name for name in names if PLACEHOLDER not in name)
        return self._plain[skeleton]
