"""What one rank keeps of a layer where heads and channels are cut over the ranks of tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem

if TYPE_CHECKING:
    from tonnage.memory.cache import Attention, ConvRun, State


def local_kv_heads(kept: Attention, tp_size: int) -> int:
    """Return the key and value heads of one rank: every rank has at least one."""
    return max(1, kept.kv_heads // tp_size)


def local_state_elements(kept: State, tp_size: int) -> int:
    """Return the elements of the recurrent part on one rank.

    Raises:
        PlacementError: Heads do not divide by the ranks.
    """
    heads = _divided(kept.heads, tp_size, "state heads") if kept.heads else 0
    return heads * kept.key_size * kept.value_size


def local_conv_channels(kept: State, tp_size: int) -> int:
    """Return the channels of the convolution on one rank; groups that do not divide are held by several ranks.

    Raises:
        PlacementError: Channels do not divide by the ranks.
    """
    return sum(_run_channels(run, tp_size) for run in kept.conv)


def _run_channels(run: ConvRun, tp_size: int) -> int:
    if run.replicas and run.units % tp_size:
        return run.unit_size
    return _divided(run.channels, tp_size, "convolution channels")


def _divided(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise PlacementError(
            Problem(
                where="cache", what=f"{what} do not divide by tp", expected=f"a multiple of {ranks}", found=str(count)
            )
        )
    return count // ranks
