"""A stored tensor's name to the placed module it belongs to, and so to what every rank takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tonnage.checkpoint.headers import Header, TensorEntry
from tonnage.checkpoint.skeletons import PLACEHOLDER, ShardHeader
from tonnage.checkpoint.tally import Masker
from tonnage.errors import CheckpointError, PlacementError, Problem, raise_if_any
from tonnage.matching import spelled_names
from tonnage.placement import Placed, Placement
from tonnage.prepare.takes import Part, TensorParts, tensor_parts
from tonnage.recipes.modules import masked

_SKELETONS_KEPT = 4


@dataclass(frozen=True, slots=True)
class _Holding:
    """One placed tensor on some layers: its parts, the pipeline stages that hold it, and for which experts."""

    parts: TensorParts
    pp_ranks: tuple[int, ...]
    members: frozenset[int]


class Found(NamedTuple):
    """A stored tensor among the placed ones: its position in its file, its bytes, its parts, its stages, its expert."""

    position: int
    nbytes: int
    parts: TensorParts
    pp_ranks: tuple[int, ...]
    expert: int

    def taken(self, tp: int) -> Iterator[tuple[int, tuple[Part, ...]]]:
        """Yield the global ranks that take any of it, ascending, with their parts."""
        for pp_rank in self.pp_ranks:
            for tp_rank in range(tp):
                parts = self.parts.taken_by(tp_rank, self.expert)
                if parts is not None:
                    yield pp_rank * tp + tp_rank, parts


class Finder:
    """Looks stored tensors up in a placement; owns the table of their names."""

    def __init__(self, placement: Placement) -> None:
        """Check every cut of the placement.

        Raises:
            PlacementError: A tensor cannot be cut as the ranks hold it; every such tensor is named.
        """
        self._placement = placement
        self._masker = Masker(spelled_names(placement.assignment.blueprint))
        self._by_name: dict[tuple[str, int | None], list[_Holding]] = {}
        self._split = lru_cache(maxsize=_SKELETONS_KEPT)(self._split_names)
        problems: dict[str, Problem] = {}
        for placed in placement.placed:
            try:
                self._add(placed)
            except PlacementError as error:
                problems.update((str(problem), problem) for problem in error.problems)
        raise_if_any(PlacementError, problems.values())

    def find(self, shard: ShardHeader, begin: int = 0, end: int | None = None) -> Iterator[Found]:
        """Yield the tensors of a shard file in payload order, those from position ``begin`` to ``end``.

        Raises:
            CheckpointError: A tensor is not among the placed ones, or has another dtype or shape.
        """
        names, tensors = self._split(shard.skeleton), shard.skeleton.tensors
        for position in range(begin, len(tensors) if end is None else end):
            entry, (name, numbers) = tensors[position], names[position]
            first = numbers[0] if numbers else None
            if shard.layer is not None and PLACEHOLDER in entry.name:
                first = shard.layer
            expert = numbers[1] if len(numbers) > 1 else 0
            for holding in self._by_name.get((name, first), ()):
                if not holding.members or expert in holding.members:
                    break
            else:
                raise _stranger(shard, entry, "no placed module stores this tensor", None)
            parts = holding.parts
            if entry.shape != parts.shape or entry.dtype not in parts.dtypes:
                raise _stranger(shard, entry, "not the tensor that was placed", parts)
            yield Found(position, entry.nbytes, parts, holding.pp_ranks, expert)

    def _add(self, placed: Placed) -> None:
        entry = placed.entry
        base, members = masked(entry.module.rule.pattern), frozenset(entry.members)
        stages = {first: _stages(self._placement, placed, first) for first in entry.first or (None,)}
        for parts in tensor_parts(placed):
            shared = {pp_ranks: _Holding(parts, pp_ranks, members) for pp_ranks in stages.values()}
            for first, pp_ranks in stages.items():
                self._by_name.setdefault((base + parts.suffix, first), []).append(shared[pp_ranks])

    def _split_names(self, skeleton: Header) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(self._masker.split(entry.name.replace(PLACEHOLDER, "0")) for entry in skeleton.tensors)


def _stages(placement: Placement, placed: Placed, first: int | None) -> tuple[int, ...]:
    """Return the pipeline stages that hold a module on one layer."""
    last = placement.topology.pp - 1
    if placed.stage == "layer":
        layer = first if placed.entry.module.layered else None
        return tuple(stage for stage, layers in enumerate(placement.stages) if layer in layers)
    ends = {"first": (0,), "last": (last,), "ends": (0, last), "all": range(last + 1)}[placed.stage]
    return tuple(sorted(set(ends)))


def _stranger(shard: ShardHeader, entry: TensorEntry, what: str, parts: TensorParts | None) -> CheckpointError:
    expected = None if parts is None else f"{' or '.join(sorted(parts.dtypes))} {list(parts.shape)}"
    found = f"{entry.dtype} {list(entry.shape)}"
    name = shard.real_name(entry.name)
    return CheckpointError(Problem(where=shard.shard_file, tensor=name, what=what, expected=expected, found=found))
