"""Which rank owns which slots of an exl3-v1 container: the container's own rule and the one of the vLLM fork.

Every run is contiguous, begins and ends on the extent alignment, and crosses no barrier. Nothing needs equal shares and
nothing is padded in storage.
"""

from __future__ import annotations

from itertools import pairwise

from tonnage.errors import PlacementError, Problem
from tonnage.formats.exl3_v1 import SlotGeometry

FORK_TP_SIZES = range(2, 25)
_FORK_TP_WITH_DOUBLE_STEP = 10


def partition_extents(geometry: SlotGeometry, world_size: int) -> tuple[range, ...]:
    """Return the slots of every rank by the container's own rule; the same for all layers.

    Barriers cut the slots into segments. Each segment starts with one rank; every further rank goes to the segment
    whose ranks hold most blocks, then to the one with more blocks, then to the first.

    Raises:
        PlacementError: A barrier is not aligned, or the ranks are fewer than segments or more than blocks.

    Source:
        local-inference-lab/b12x, ``partition_extents``.
    """
    alignment = geometry.extent_alignment_slots
    edges = (0, *geometry.extent_barriers, geometry.num_slots)
    unaligned = [edge for edge in edges if edge % alignment]
    if unaligned:
        raise _refusal("barriers", f"multiples of {alignment} slots", str(unaligned[:20]))
    segments = [range(start, stop) for start, stop in pairwise(edges)]
    blocks = [len(segment) // alignment for segment in segments]
    if not len(segments) <= world_size <= sum(blocks):
        expected = f"{len(segments)} to {sum(blocks)} ranks"
        raise _refusal("ranks for the segments and blocks of this container", expected, str(world_size))
    ranks = [1] * len(segments)
    for _ in range(world_size - len(segments)):
        neediest = max(range(len(segments)), key=lambda i: (-(-blocks[i] // ranks[i]), blocks[i], -i))
        ranks[neediest] += 1
    return tuple(
        _share(segment, owners, owner, alignment)
        for segment, owners in zip(segments, ranks, strict=True)
        for owner in range(owners)
    )


def fork_extents(geometry: SlotGeometry, tp_size: int, layer_position: int) -> tuple[range, ...]:
    """Return the slots of every rank of one layer by the rule of the vLLM fork.

    Owners of the first half of the slots and of the second are rotated from layer to layer, which evens out the totals.

    Args:
        geometry: One barrier, at half the slots.
        tp_size: 2 to 24.
        layer_position: Position of the layer among the container's layers, ascending, from 0.

    Raises:
        PlacementError: The fork refuses this container or TP size, or a rank would own nothing.

    Source:
        local-inference-lab fork of vLLM, slot ownership of exl3-v1 expert layers.
    """
    half, alignment = geometry.num_slots // 2, geometry.extent_alignment_slots
    if tp_size not in FORK_TP_SIZES:
        raise _refusal("TP size for the vLLM fork", "2 to 24", str(tp_size))
    if geometry.num_slots % 2 or half % alignment or geometry.extent_barriers != (half,):
        expected = f"one barrier at half of {geometry.num_slots} slots, a multiple of {alignment}"
        raise _refusal("barriers for the vLLM fork", expected, str(list(geometry.extent_barriers[:20])))
    first_owners = -(-tp_size // 2)
    if first_owners * alignment > half:
        expected = f"at most {2 * (half // alignment)}, a block of {alignment} slots each"
        raise _refusal("TP size for this container", expected, str(tp_size))
    step = 2 if tp_size == _FORK_TP_WITH_DOUBLE_STEP else 1
    first, second = range(half), range(half, geometry.num_slots)
    extents = []
    for rank in range(tp_size):
        owner = (rank - layer_position * step) % tp_size
        if owner < first_owners:
            extents.append(_share(first, first_owners, owner, alignment))
        else:
            extents.append(_share(second, tp_size - first_owners, owner - first_owners, alignment))
    return tuple(extents)


def _share(segment: range, owners: int, owner: int, alignment: int) -> range:
    """Return one owner's part of a segment: equal blocks, the first owners one more each if they do not divide."""
    each, more = divmod(len(segment) // alignment, owners)
    first = owner * each + min(owner, more)
    return segment[first * alignment : (first + each + (owner < more)) * alignment]


def _refusal(what: str, expected: str, found: str) -> PlacementError:
    return PlacementError(Problem(where="exl3-v1", what=f"unusable {what}", expected=expected, found=found))
