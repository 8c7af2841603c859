"""One reason memory is in use on a rank, before it becomes a line of a plan's ledger."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.memory.supply import Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What one thing takes on one rank.

    Attributes:
        component: What holds the memory, such as ``cache.attention`` or ``runtime.context``.
        nbytes: Expected bytes.
        bound_nbytes: Bytes at or above all evidence; the verdict uses these. Equal to ``nbytes`` where it is exact.
        transient: Released before another transient term begins; of those only the largest counts.
        basis: How the number is known.
        source: Where to check it.
    """

    component: str
    nbytes: int
    bound_nbytes: int
    transient: bool = False
    basis: Basis
    source: str

    def __post_init__(self) -> None:
        """Refuse what cannot describe memory."""
        if not 0 <= self.nbytes <= self.bound_nbytes:
            raise ValueError(f"{self.component}: {self.nbytes} bytes, bound {self.bound_nbytes}")
