"""From a placed module to stored indices: what every rank takes of each of its tensors, or why no slice can be that.

A placement says which elements of a logical axis a rank holds. Here that becomes ranges of a stored axis, exactly: a
range that does not begin and end on whole stored indices is refused, and so is a tensor of which an engine keeps other
bytes than its slice and zeros behind it, unless it makes them by copying these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.assignment import CONVERTIBLE
from tonnage.cuts import Ranges
from tonnage.errors import PlacementError, Problem
from tonnage.formats.dtypes import payload_bytes
from tonnage.placement import Placed
from tonnage.recipes.modules import Stored
from tonnage.shares import Piece, Share

NOT_THE_SLICE = "the engine does not hold the slice"
"""What the refusal of a tensor begins with that an engine makes something else of while it loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of one stored tensor.

    Attributes:
        axis: Stored axis that is cut; ``None`` for the whole.
        ranges: Stored indices on it, in output order, neither empty nor adjacent.
        shape: Shape of the part, padding included.
        zero_bytes: Zeros after what is taken, for every index of the axes before the cut one.
        note: Axis, ranges and full shape as compact JSON; empty if whole.
    """

    axis: int | None
    ranges: Ranges
    shape: tuple[int, ...]
    zero_bytes: int
    note: str


def whole_part(shape: tuple[int, ...]) -> Part:
    """Return the part that is all of a tensor."""
    return Part(axis=None, ranges=(), shape=shape, zero_bytes=0, note="")


def range_part(shape: tuple[int, ...], axis: int, begin: int, end: int) -> Part:
    """Return the part between two stored indices."""
    if (begin, end) == (0, shape[axis]):
        return whole_part(shape)
    ranges = ((begin, end),)
    local = (*shape[:axis], end - begin, *shape[axis + 1 :])
    return Part(axis=axis, ranges=ranges, shape=local, zero_bytes=0, note=_note(axis, ranges, shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParts:
    """What every tensor-parallel rank takes of one stored tensor of a module.

    Attributes:
        suffix: What follows the module's name in the checkpoint.
        dtypes: Stored dtypes it may have.
        shape: Stored shape.
        outputs: Suffix and dtype of what is written: the tensor itself, or codes and scales.
        parts: For every rank one part per output; ``None`` for a rank that takes nothing.
        experts: For every rank the experts it holds whole; ``None`` where experts are no matter.
    """

    suffix: str
    dtypes: frozenset[str]
    shape: tuple[int, ...]
    outputs: tuple[tuple[str, str], ...]
    parts: tuple[tuple[Part, ...] | None, ...]
    experts: tuple[range, ...] | None = None

    @property
    def convert(self) -> bool:
        """Whether the tensor is turned into codes and scales."""
        return len(self.outputs) > 1

    def taken_by(self, tp_rank: int, expert: int) -> tuple[Part, ...] | None:
        """Return what a rank takes of the tensor of one expert."""
        if self.experts is not None and expert not in self.experts[tp_rank]:
            return None
        return self.parts[tp_rank]

    def nbytes(self, tp_rank: int) -> int:
        """Return the bytes a rank takes, padding included."""
        parts = self.parts[tp_rank] or ()
        return sum(payload_bytes(dtype, part.shape) for (_, dtype), part in zip(self.outputs, parts, strict=False))


def tensor_parts(placed: Placed) -> Iterator[TensorParts]:
    """Yield the parts of every tensor one instance of a placed module is stored in; none of a module that is absent.

    Raises:
        PlacementError: A tensor cannot be cut as the ranks hold it; every such tensor is named.
    """
    entry = placed.entry
    experts = _experts(placed)
    problems: dict[str, Problem] = {}
    rows = [_row(placed, number, problems) for number in range(len(entry.stored))]
    if entry.converted_from and not problems:
        problems.update((str(problem), problem) for problem in _conversion_problems(placed, rows[0]))
    if problems:
        raise PlacementError(*problems.values())
    begin = 0
    if entry.converted_from:
        codes, scales = entry.stored[:2]
        yield TensorParts(
            suffix="" if entry.module.rule.bare else ".weight",
            dtypes=CONVERTIBLE,
            shape=codes.shape,
            outputs=((codes.suffix, codes.dtype), (scales.suffix, scales.dtype)),
            parts=tuple((a, b) if a and b else None for a, b in zip(rows[0], rows[1], strict=True)),
            experts=experts,
        )
        begin = 2
    for stored, row in zip(entry.stored[begin:], rows[begin:], strict=True):
        yield TensorParts(
            suffix=stored.suffix,
            dtypes=frozenset({stored.dtype}),
            shape=stored.shape,
            outputs=((stored.suffix, stored.dtype),),
            parts=tuple((part,) if part else None for part in row),
            experts=experts,
        )


_Row = list[Part | None]


def _row(placed: Placed, number: int, problems: dict[str, Problem]) -> _Row:
    """Return every rank's part of one stored tensor; what cannot be is added to the problems."""
    row: _Row = []
    known: dict[tuple[str, Ranges, Piece], Part | Problem | None] = {}
    for share in placed.shares:
        if not share.copies:
            row.append(None)
            continue
        key = (share.axis, share.ranges, share.pieces[number])
        if key not in known:
            known[key] = _part(placed, number, share)
        found = known[key]
        if isinstance(found, Problem):
            problems.setdefault(str(found), found)
            row.append(None)
        else:
            row.append(found)
    return row


def _part(placed: Placed, number: int, share: Share) -> Part | Problem | None:
    stored, piece = placed.entry.stored[number], share.pieces[number]
    if piece.slice_bytes == piece.held_bytes == 0 < stored.nbytes:
        return None
    if piece.held_bytes != piece.file_bytes and not piece.copied:
        what = f"{NOT_THE_SLICE}: {piece.why or 'another shape'}"
        return _problem(placed, stored, what, f"{piece.slice_bytes} bytes", f"{piece.held_bytes} bytes")
    axis = _cut_axis(stored, share, piece)
    if axis is None:
        return whole_part(stored.shape)
    ranges: Ranges | Problem = ((0, stored.shape[axis]),)
    if share.axis == stored.dims[axis].axis:
        ranges = _indices(placed, stored, axis, share.ranges)
    return ranges if isinstance(ranges, Problem) else _ranges_part(placed, stored, piece, axis, ranges)


def _ranges_part(placed: Placed, stored: Stored, piece: Piece, axis: int, ranges: Ranges) -> Part | Problem:
    """Return the part that is some ranges of an axis and what the rank holds behind them."""
    size, taken = stored.shape[axis], sum(end - begin for begin, end in ranges)
    if ranges == ((0, size),) and not piece.zero_bytes:
        return whole_part(stored.shape)
    before, behind = stored.shape[:axis], stored.shape[axis + 1 :]
    shape = (*before, piece.shape[axis] if piece.zero_bytes else taken, *behind)
    nbytes = payload_bytes(stored.dtype, shape)
    if nbytes != piece.file_bytes:
        what = "the slice has another size than planned"
        return _problem(placed, stored, what, f"{piece.file_bytes} bytes", f"{nbytes} bytes")
    zeros = payload_bytes(stored.dtype, (shape[axis] - taken, *behind))
    return Part(axis=axis, ranges=ranges, shape=shape, zero_bytes=zeros, note=_note(axis, ranges, stored.shape))


def _cut_axis(stored: Stored, share: Share, piece: Piece) -> int | None:
    """Return the stored axis that is cut or padded."""
    walked = [axis for axis, dim in enumerate(stored.dims) if dim.axis == share.axis != "none"]
    if not walked and piece.zero_bytes:
        walked = [axis for axis, size in enumerate(stored.shape) if piece.shape[axis] != size]
    return walked[0] if walked else None


def _indices(placed: Placed, stored: Stored, axis: int, ranges: Ranges) -> Ranges | Problem:
    """Return logical ranges in stored indices, adjacent ones joined; only the last index may be a partial one."""
    module, dim = placed.entry.module, stored.dims[axis]
    total = {"out": module.out_size, "in": module.in_size}.get(dim.axis, 0)
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if begin == end:
            continue
        last = dim.ragged and end == total
        if begin % dim.per or (end % dim.per and not last):
            what = f"cut inside a block of {dim.per} that shares one stored index"
            return _problem(placed, stored, what, f"multiples of {dim.per}", f"{begin} to {end}")
        first, behind = begin // dim.per, -(-end // dim.per)
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], behind)
        else:
            found.append((first, behind))
    return tuple(found)


def _conversion_problems(placed: Placed, codes: _Row) -> Iterator[Problem]:
    stored = placed.entry.stored[0]
    if placed.entry.module.rule.transposed or len(stored.shape) != 2:
        yield _problem(placed, stored, "cannot be converted", "a weight stored [out, in]", f"{list(stored.shape)}")
    for part in codes:
        if part is not None and part.zero_bytes:
            yield _problem(placed, stored, "converted and padded at once", "no padding", f"{list(part.shape)}")


def _experts(placed: Placed) -> tuple[range, ...] | None:
    if placed.how != "whole experts" or placed.entry.module.stack:
        return None
    return tuple(range(*share.ranges[0]) if share.ranges else range(0) for share in placed.shares)


def _note(axis: int, ranges: Ranges, shape: tuple[int, ...]) -> str:
    """Return the cut as JSON without names, so that it needs no escapes inside a header.

    >>> _note(1, ((0, 64), (128, 192)), (8, 256))
    '[1,[[0,64],[128,192]],[8,256]]'
    """
    text = [axis, [list(found) for found in ranges], list(shape)]
    return str(text).replace(" ", "")


def _problem(placed: Placed, stored: Stored, what: str, expected: str, found: str) -> Problem:
    tensor = placed.entry.module.rule.pattern + stored.suffix
    return Problem(where="prepare", tensor=tensor, what=what, expected=expected, found=found)
