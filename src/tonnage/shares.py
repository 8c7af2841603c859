"""One module's part on every rank: which elements of its axis, and what that means for each tensor it is stored in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm, prod

from tonnage.assignment import Assigned
from tonnage.cuts import Ranges, Uncuttable, cut_axis, deal_axis, extent, unit_grain
from tonnage.engines.model import Deal, EngineModel, Local
from tonnage.errors import Problem
from tonnage.formats.dtypes import DTYPE_BITS, payload_bytes
from tonnage.recipes.modules import Run, Stored
from tonnage.recipes.schema import EngineRule, Rule
from tonnage.topology import Topology, expert_counts

Grains = Mapping[tuple[str, int], int]
"""Cut step, in units, of every axis: the parent module and the number of units name it."""

UNEVEN_ROLES = frozenset({"vision", "projector", "audio"})
"""Parts whose heads may be shared out unequally: every rank sees every token of an image anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored tensor of one instance on one rank.

    Attributes:
        shape: Shape the rank holds.
        slice_bytes: Bytes taken from the stored tensor.
        held_bytes: Bytes held; more than the slice is padding, less is what the engine drops.
        zero_bytes: Zeros behind the slice on the axis that is cut, in the stored dtype. What neither they nor the slice
            account for, the engine makes itself.
        why: Reason for the difference.
        copied: The engine makes what it holds by copying the stored slice and those zeros, as with any checkpoint: into
            another dtype, or one fused part over the other.
    """

    shape: tuple[int, ...]
    slice_bytes: int
    held_bytes: int
    zero_bytes: int = 0
    why: str = ""
    copied: bool = False

    @property
    def file_bytes(self) -> int:
        """Bytes of the slice as stored, and of the zeros behind it: what can be written."""
        return self.slice_bytes + self.zero_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A module's part on one tensor-parallel rank.

    Attributes:
        axis: Logical axis that is cut; ``none`` where the rank holds the whole.
        ranges: Elements of that axis as stored, one range per fused part.
        copies: Instances held for one value of the first index.
        pieces: Every stored tensor of one instance.
    """

    axis: str
    ranges: Ranges
    copies: int
    pieces: tuple[Piece, ...]

    @property
    def slice_bytes(self) -> int:
        """Bytes taken from the checkpoint for one value of the first index."""
        return self.copies * sum(piece.slice_bytes for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        """Bytes held for one value of the first index."""
        return self.copies * sum(piece.held_bytes for piece in self.pieces)

    @property
    def file_bytes(self) -> int:
        """Bytes written for one value of the first index."""
        return self.copies * sum(piece.file_bytes for piece in self.pieces)


NOTHING = Share(axis="none", ranges=(), copies=0, pieces=())
"""The share of a rank that holds no part of a module, its small whole tensors included."""


def axis_runs(entry: Assigned, split: str) -> tuple[Run, ...]:
    """Return the runs of the axis a split cuts, as stored: padding of the format is part of the last run.

    Heads are never padded: their cut would have to fall on whole blocks anyway.
    """
    module = entry.module
    if not module.rule.is_linear:
        return (module.shape[-1] if split == "row" else module.shape[0]) if module.shape else ()
    runs = module.in_ if split == "row" else module.out
    missing = -sum(run.size for run in runs) % entry.fmt.pads_to
    if not missing or runs[-1].units != runs[-1].size:
        return runs
    last = runs[-1].size + missing
    return (*runs[:-1], Run(last, last))


def axis_grains(entries: Iterable[tuple[Assigned, str]]) -> Grains:
    """Return the cut step of every axis: what suits all storage formats of the modules that share it.

    Args:
        entries: Every entry with how it is split.
    """
    grains: dict[tuple[str, int], int] = {}
    for entry, split in entries:
        for key, grain in _entry_grains(entry, split):
            grains[key] = lcm(grains.get(key, 1), grain)
    return grains


def _entry_grains(entry: Assigned, split: str) -> Iterator[tuple[tuple[str, int], int]]:
    if split != "replicated":
        grain = entry.fmt.in_grain if split == "row" else entry.fmt.out_grain
        for run in axis_runs(entry, split):
            if run.size:
                yield (parent_of(entry.module.rule), run.units), unit_grain(run, grain)


def parent_of(rule: Rule) -> str:
    """Return the name of the module around a rule's module."""
    pattern = rule.pattern if rule.is_linear else rule.pattern.removesuffix(".weight").removesuffix(".bias")
    return pattern.rpartition(".")[0]


def has_heads(rule: Rule) -> bool:
    """Whether the axis that is cut consists of attention or recurrent heads, of which every rank holds equally many."""
    if rule.role in UNEVEN_ROLES or rule.is_routed:
        return False
    axes = (*rule.out, *rule.in_, *(extent for axis in rule.shape for extent in axis))
    return any(axis.units is not None for axis in axes)


class Shares:
    """Makes the shares of one module; what ranks hold alike is computed once."""

    def __init__(
        self,
        entry: Assigned,
        topology: Topology,
        engine: EngineModel,
        exception: EngineRule | None,
        names: Mapping[str, object],
    ) -> None:
        self._entry, self._module = entry, entry.module
        self._topology, self._engine, self._exception, self._names = topology, engine, exception, names
        self._alike = lru_cache(maxsize=64)(self._make_pieces)

    def whole(self, split: str) -> Share:
        """The rank holds everything; a vocabulary is padded all the same."""
        axis = "out" if split == "vocab" else "none"
        size = _size(axis_runs(self._entry, "column"))
        rows = self._engine.vocab_rows(size, 1) if split == "vocab" else size
        return Share(axis="none", ranges=(), copies=self._entry.copies, pieces=self._pieces(axis, ((0, size),), rows))

    def experts(self, rank: int, counts: tuple[int, ...] = ()) -> Share:
        """The rank holds whole experts: as many as dealt to it, or as expert parallelism gives it."""
        module, entry = self._module, self._entry
        experts = module.stack or module.experts
        edges = (0, *accumulate(counts or expert_counts(experts, self._topology.ep)))
        begin, end = edges[rank : rank + 2]
        ranges: Ranges = ((begin, end),)
        if module.stack:
            return Share(axis="stack", ranges=ranges, copies=entry.copies, pieces=self._pieces("stack", ranges, 1))
        copies = (end - begin) * (entry.copies // experts) if experts else 0
        if entry.members:
            copies = sum(begin <= expert < end for expert in entry.members)
        return Share(axis="stack", ranges=ranges, copies=copies, pieces=self._pieces("none", (), 1))

    def dealt(self, deal: Deal, rank: int) -> Share:
        """The rank holds what the engine deals to it."""
        if deal.how == "absent" or (deal.how != "replicated" and not deal.counts[rank]):
            return NOTHING
        if deal.how in ("replicated", "one rank"):
            return self.whole("replicated")
        if deal.how == "whole experts":
            return self.experts(rank, deal.counts)
        split = self._module.rule.split
        grain = self._entry.fmt.in_grain if split == "row" else self._entry.fmt.out_grain
        ranges = deal_axis(axis_runs(self._entry, split), deal.counts, rank, step=deal.step, grain=grain)
        return self._cut("in" if split == "row" else "out", ranges, 0)

    def split(self, split: str, rank: int, grains: Grains) -> Share | Problem:
        """The rank holds its slice."""
        axis = "in" if split == "row" else "out"
        runs = axis_runs(self._entry, split)
        tp, engine, total = self._topology.tp, self._engine, _size(runs)
        slice_size = self._slice_size()
        if split == "vocab" and not (engine.uneven and self._entry.fmt.out_grain > 1):
            rows = engine.vocab_rows(total, tp)
            if rows % tp:
                return self._refusal(axis, Uncuttable(rows, rows))
            slice_size = rows // tp
        if slice_size is not None and (split == "vocab" or not engine.uneven):
            if slice_size * tp < total:
                return self._refusal(axis, Uncuttable(total, total))
            begin = min(rank * slice_size, total)
            return self._cut(axis, ((begin, min(begin + slice_size, total)),), slice_size)
        parent = parent_of(self._module.rule)
        grain = lcm(*(grains.get((parent, run.units), 1) for run in runs))
        uneven = engine.uneven and not has_heads(self._module.rule)
        found = cut_axis(runs, tp, rank, replicas=self._replicas, uneven=uneven, grain=grain)
        if isinstance(found, Uncuttable):
            return self._refusal(axis, found)
        return self._cut(axis, found, 0) if extent(found) else NOTHING

    @property
    def _replicas(self) -> bool:
        exception = self._exception
        if exception is None or exception.replicas is None:
            return self._module.rule.replicas
        return exception.replicas.evaluate_bool(self._names)

    def _cut(self, axis: str, ranges: Ranges, padded: int) -> Share:
        return Share(axis=axis, ranges=ranges, copies=self._entry.copies, pieces=self._pieces(axis, ranges, padded))

    def _refusal(self, axis: str, found: Uncuttable) -> Problem:
        tp = self._topology.tp
        grain = f" that leaves multiples of {found.grain}" if found.grain > 1 else ""
        return Problem(
            where=f"--tp {tp} --engine {self._engine.name}",
            tensor=self._module.rule.pattern,
            what=f"axis {axis} of {found.size} elements in {found.units} units cannot be cut over {tp} ranks",
            expected=f"a divisor of {found.units}{grain}" + (" or a multiple" if self._replicas else ""),
            found=str(tp),
        )

    def _slice_size(self) -> int | None:
        if self._exception is None or self._exception.slice_size is None:
            return None
        return self._exception.slice_size.evaluate_int(self._names)

    def _pieces(self, axis: str, ranges: Ranges, padded: int) -> tuple[Piece, ...]:
        """Return every stored tensor's piece for a cut of ``axis``; ``padded`` elements of it are held if more."""
        mine = extent(ranges)
        held = max(mine, padded) if axis in ("out", "in") else mine
        later = axis == "in" and ranges[0][0] > 0 and self._entry.fmt.pads_to > 1
        return self._alike(axis, mine, held, later=later)

    def _make_pieces(self, axis: str, mine: int, held: int, *, later: bool) -> tuple[Piece, ...]:
        """Return the pieces of a rank that takes ``mine`` elements and holds ``held``; ``later`` ones add no bias."""
        module = self._module
        local = Local(
            out=held if axis == "out" else module.out_size,
            in_=held if axis == "in" else module.in_size,
            experts=mine if axis == "stack" else module.stack,
        )
        return tuple(
            Piece(shape=(0,), slice_bytes=0, held_bytes=0, why="the first rank adds the bias")
            if later and stored.suffix == ".bias"
            else self._piece(stored, axis, mine, held, local)
            for stored in self._entry.stored
        )

    def _piece(self, stored: Stored, axis: str, mine: int, held: int, local: Local) -> Piece:
        sliced = _local_shape(stored, axis, mine)
        kept = _local_shape(stored, axis, held)
        why = "" if kept == sliced else "rounded up for the kernel"
        changed = self._engine.held_shape(self._entry, stored, local, self._topology)
        if changed is not None:
            kept, why = changed
        dtype, exception = stored.dtype, self._exception
        wider = self._engine.held_dtype(self._entry, stored)
        if wider is not None:
            dtype, why = wider
        slice_bytes = payload_bytes(stored.dtype, sliced)
        if exception is not None and exception.held is not None:
            kept, why = (exception.held.evaluate_int(self._names),), exception.why
        decoded = False
        if exception is not None and exception.dtype and self._holds_dtype(exception):
            dtype, why = exception.dtype, exception.why
            decoded = not self._entry.fmt.is_plain and stored.suffix in {part.suffix for part in self._entry.fmt.parts}
            if decoded:
                kept = (local.out, local.in_) if stored is self._entry.stored[0] else (0,)
        if exception is not None and exception.copies is not None:
            copies = exception.copies.evaluate_int(self._names)
            kept, why = ((copies, *kept), exception.why) if copies != 1 else (kept, why)
        held_bytes = _nbytes(dtype, kept)
        if exception is not None and exception.slice_size is not None and held_bytes != slice_bytes:
            why = exception.why
        padded = kept == _local_shape(stored, axis, held)
        zero_bytes = _nbytes(stored.dtype, kept) - slice_bytes if padded else 0
        return Piece(
            shape=kept,
            slice_bytes=slice_bytes,
            held_bytes=held_bytes,
            zero_bytes=zero_bytes,
            why=why,
            copied=(padded and not decoded) or self._engine.copies(self._entry, stored),
        )

    def _holds_dtype(self, exception: EngineRule) -> bool:
        return exception.dtype_if is None or exception.dtype_if.evaluate_bool(self._names)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def _size(runs: tuple[Run, ...]) -> int:
    return sum(run.size for run in runs)


def _local_shape(stored: Stored, axis: str, mine: int) -> tuple[int, ...]:
    """Return a stored shape with the cut axis at ``mine`` logical elements, rounded up to whole stored indices."""
    return tuple(
        -(-mine // dim.per) if dim.axis == axis and dim.axis != "none" else size
        for dim, size in zip(stored.dims, stored.shape, strict=True)
    )
