"""What torch's allocator adds to tensors: an engine logs bytes of blocks, and a block is often larger than its tensor.

Blocks of 1 MiB and less are rounded up to 512 bytes. A larger tensor gets a segment of 20 MiB (below 10 MiB) or of its
size rounded up to 2 MiB; what remains is split off, unless it is 1 MiB or less. vLLM forbids to split blocks of 20 MiB
and more while it loads, so those keep all that remains.

Source:
    PyTorch 2.10 ``c10/cuda/CUDACachingAllocator.cpp`` (``kSmallSize``, ``kLargeBuffer``, ``kMinLargeAlloc``,
    ``kRoundLarge``, ``should_split``); vLLM pull request 41268, merged 2026-04-29 (``max_split_size_mb``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.memory.term import Term
from tonnage.units import MIB

if TYPE_CHECKING:
    from tonnage.placement import Placed, Placement

COMPONENT = "engine.allocator"
SMALL_BLOCK = 512
SMALL_MOST = MIB
BUFFER = 20 * MIB
BUFFERED_BELOW = 10 * MIB
ROUNDING = 2 * MIB
SPLIT_ABOVE = MIB
UNSPLIT_SINCE = (0, 21)
REPACKED = ("nvfp4", "mxfp4", "mxfp8", "gptq", "awq", "int", "fp8_e4m3_block")
UNNAMED_BYTES = 24 * MIB
"""Buffers too small to have a line: scales of caches, workspaces of kernels, segments begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensors:
    """Tensors an engine allocates alike: parts that are loaded into one are one.

    Attributes:
        name: Pattern of its first part, with the suffix.
        nbytes: Bytes of one.
        count: How many a rank holds.
        rewritten: Whether kernels write it anew after loading: experts, and values that share scales in blocks.
    """

    name: str
    nbytes: int
    count: int
    rewritten: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one module, or an engine beyond it, puts into tensors that are alike: one for every index."""

    indices: tuple[int, ...]
    nbytes: int
    copies: int
    rewritten: bool


def held_tensors(placement: Placement, pp_rank: int, tp_rank: int) -> tuple[HeldTensors, ...]:
    """Return what a rank's weights are allocated as: fused parts together, the experts of a layer together.

    Rows an engine builds beyond the checkpoint are in their fused tensor; what stands alone beside it is not here.
    """
    parts: dict[tuple[str, str, str], list[_Part]] = defaultdict(list)
    for placed in placement.placed:
        indices, share = _indices(placement, placed, pp_rank), placed.shares[tp_rank]
        if not indices or not share.copies:
            continue
        routed = placed.entry.module.rule.is_routed
        for stored, piece in zip(placed.entry.stored, share.pieces, strict=False):
            parts[*placed.entry.module.held_in, stored.suffix].append(
                _Part(
                    indices=indices,
                    nbytes=piece.held_bytes * (share.copies if routed else 1),
                    copies=1 if routed else share.copies,
                    rewritten=routed or placed.entry.fmt.name.startswith(REPACKED),
                )
            )
    for extra in placement.extras:
        here = tuple(layer for layer in extra.first if layer in placement.stages[pp_rank])
        if extra.part_of is not None and here:
            parts[extra.part_of].append(_Part(indices=here, nbytes=extra.nbytes[tp_rank], copies=1, rewritten=False))
    return tuple(
        HeldTensors(name=f"{key[1]}{key[2]}", nbytes=nbytes, count=count, rewritten=rewritten)
        for key, fused in parts.items()
        for (nbytes, rewritten), count in _fused(fused).items()
        if nbytes
    )


def _indices(placement: Placement, placed: Placed, pp_rank: int) -> tuple[int, ...]:
    """Return the layers or blocks whose module a stage holds; a module without an index has one."""
    if not placement.multiplicity(placed, pp_rank):
        return ()
    first = placed.entry.first
    return tuple(i for i in first if i in placement.stages[pp_rank]) if placed.stage == "layer" else first or (0,)


def _fused(parts: list[_Part]) -> dict[tuple[int, bool], int]:
    """Return how many tensors there are of every size; a layer's is as large as the parts that it has."""
    counts: dict[tuple[int, bool], int] = defaultdict(int)
    same = len({part.indices for part in parts}) == 1
    for index in parts[0].indices[:1] if same else sorted({i for part in parts for i in part.indices}):
        here = [part for part in parts if index in part.indices]
        times = len(parts[0].indices) if same else 1
        size = sum(part.nbytes for part in here), any(part.rewritten for part in here)
        counts[size] += times * max(part.copies for part in here)
    return counts


def allocator_line(tensors: tuple[HeldTensors, ...], *, engine: str, version: tuple[int, ...] | None) -> Iterator[Term]:
    """Yield what blocks hold beyond tensors: by the rule of the release, at most by the rule that keeps more.

    SGLang logs what the driver reports, so whole segments count.
    """
    unsplit = engine == "vllm" and (version is None or version >= UNSPLIT_SINCE)
    nbytes = sum(tensor.count * block_surplus(tensor.nbytes, unsplit=unsplit) for tensor in tensors)
    most = sum(tensor.count * most_surplus(tensor.nbytes) for tensor in tensors)
    yield Term(
        component=COMPONENT,
        nbytes=nbytes,
        bound_nbytes=max(nbytes, most) + UNNAMED_BYTES,
        basis="modelled",
        source="torch CUDACachingAllocator: blocks rounded up to 512 bytes or 2 MiB"
        + (", not split from 20 MiB on while loading (vLLM pull request 41268)" if unsplit else ""),
    )


def block_surplus(nbytes: int, *, unsplit: bool) -> int:
    """Return what one tensor's block is expected to hold beyond it.

    A tensor of 1 to 10 MiB shares a segment of 20 MiB; the last of those that fit keeps a rest of up to 1 MiB, which is
    shared out over all of them here.
    """
    if nbytes <= SMALL_MOST:
        return -nbytes % SMALL_BLOCK
    if nbytes < BUFFERED_BELOW:
        rest = BUFFER % nbytes
        return rest // (BUFFER // nbytes) if rest <= SPLIT_ABOVE else 0
    rest = -nbytes % ROUNDING
    return rest if rest <= SPLIT_ABOVE or (unsplit and nbytes >= BUFFER) else 0


def most_surplus(nbytes: int) -> int:
    """Return what one tensor's block holds beyond it at most: a rest that was not split off."""
    if nbytes <= SMALL_MOST:
        return -nbytes % SMALL_BLOCK
    if nbytes < BUFFER:
        return SPLIT_ABOVE // (BUFFER // nbytes)
    return -nbytes % ROUNDING
