"""How many ranks, and what each of them is: pipeline stage, tensor-parallel rank, expert share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.errors import PlacementError, Problem

Engine = Literal["vllm", "sglang", "exllamav3", "split"]
Device = Literal["gpu", "cpu"]
MOST_RANKS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Parallel sizes. The global rank is ``pp_rank * tp + tp_rank``; experts spread over the ranks of one stage.

    Attributes:
        tp: Tensor-parallel size.
        ep: Expert-parallel size: 1, or ``tp``.
        pp: Pipeline-parallel size.
        dcp: Decode-context-parallel size; a divisor of ``tp``. It moves no weights.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be a topology.

        Raises:
            PlacementError: A size is out of range, ``ep`` is neither 1 nor ``tp``, or ``dcp`` does not divide ``tp``.
        """
        for name, size in (("tp", self.tp), ("ep", self.ep), ("pp", self.pp), ("dcp", self.dcp)):
            if not 1 <= size <= MOST_RANKS:
                raise _bad(f"--{name}", "out of range", f"1..{MOST_RANKS}", size)
        if self.ep not in (1, self.tp):
            raise _bad("--ep", "experts spread over all tensor-parallel ranks or none", f"1 or {self.tp}", self.ep)
        if self.tp % self.dcp:
            raise _bad("--dcp", "does not divide tp", f"a divisor of {self.tp}", self.dcp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert is cut over."""
        return 1 if self.ep > 1 else self.tp


def cut_words(tp: int, ep: int, pp: int) -> str:
    """Return the sizes that ranks are cut for, as preparations, packages and measurements say them.

    >>> cut_words(8, 1, 2)
    'tp8 ep1 pp2'
    """
    return f"tp{tp} ep{ep} pp{pp}"


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Return the layers of every pipeline stage, as vLLM cuts them: spare layers go to the stages before the last.

    Source:
        vLLM 0.32.0 ``distributed/utils.py`` ``get_pp_indices``.
    """
    base, spare = divmod(layers, pp)
    counts = [base] * pp
    for i in range(2, spare + 2):
        counts[-i] += 1
    starts = [sum(counts[:i]) for i in range(pp)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def expert_counts(experts: int, ep: int) -> tuple[int, ...]:
    """Return the experts each rank holds whole: the first ``experts mod ep`` ranks hold one more."""
    base, spare = divmod(experts, ep)
    return tuple(base + (rank < spare) for rank in range(ep))


def _bad(where: str, what: str, expected: str, found: int) -> PlacementError:
    return PlacementError(Problem(where=where, what=what, expected=expected, found=str(found)))
