"""``split``, the default of ``prepare``: everything that can be cut is cut, nothing is padded, nothing is added.

Heads of attention and recurrence are cut evenly, so that any engine can run a rank; KV heads may be held by several
ranks. Channels of MLPs and experts, and heads of vision towers, are shared out as equally as their storage formats
allow, the first ranks take one more; a rank may hold none. A vocabulary's rows are padded to a multiple of the ranks
unless its format is cut in blocks. What recipes replicate stays whole, for their reason, unless their ``[split]`` table
says how a rank can compute with a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.engines.model import EngineModel, Extra, Local

if TYPE_CHECKING:
    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.modules import Stored
    from tonnage.topology import Topology


def _vocab_rows(vocab: int, tp: int) -> int:
    """Rows are padded to a multiple of the ranks: the last rank's tail is zero-filled."""
    return -(-vocab // tp) * tp


def _held_shape(_entry: Assigned, _stored: Stored, _local: Local, _topology: Topology) -> None:
    return None


def _extras(_assignment: Assignment, _topology: Topology) -> tuple[Extra, ...]:
    return ()


SPLIT = EngineModel(name="split", uneven=True, vocab_rows=_vocab_rows, held_shape=_held_shape, extras=_extras)
