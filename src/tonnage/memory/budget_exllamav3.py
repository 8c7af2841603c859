"""exllamav3's budget: no fraction, but a cap on every GPU while layers are placed; the cache is what is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.memory.budget import Allowance, held
from tonnage.memory.runtime_exllamav3 import AUTOSPLIT_MARGIN_BYTES
from tonnage.units import GIB, MIB

if TYPE_CHECKING:
    from fractions import Fraction

FIRST_RESERVE_BYTES, OTHER_RESERVE_BYTES = 96 * MIB, 512 * MIB
"""TabbyAPI's default for the first GPU; exllamav3 gives half a GiB to every GPU beyond the list it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exllamav3Device:
    """exllamav3's cap on one GPU while layers are placed one by one.

    Attributes:
        total_bytes: Total the allocator sees.
        free_bytes: Free on it.
        own_bytes: What this process has reserved already.
        reserve_bytes: Kept free: ``model.autosplit_reserve``.
        split_bytes: Or what may be added to it: ``model.gpu_split``, then without a reserve.

    Source:
        exllamav3 1.6.5 ``model/model_ls.py``: a GPU is full when what is allocated and the largest measured transient
        pass the cap, or when less than that transient and 256 MiB is physically free.
    """

    total_bytes: int
    free_bytes: int
    own_bytes: int = 0
    reserve_bytes: int = FIRST_RESERVE_BYTES
    split_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no GPU is."""
        if min(self.free_bytes, self.own_bytes, self.reserve_bytes, self.split_bytes or 0) < 0:
            raise ValueError(f"negative memory: {self}")
        if self.free_bytes + self.own_bytes > self.total_bytes or not self.total_bytes:
            raise ValueError(f"{self.free_bytes} bytes free and {self.own_bytes} own of {self.total_bytes}")

    @property
    def allowance(self) -> Allowance:
        """What the process may hold, transient included."""
        reachable = self.free_bytes + self.own_bytes
        if self.split_bytes is not None:
            cap, why = self.own_bytes + self.split_bytes, "beyond model.gpu_split"
        else:
            cap, why = reachable - self.reserve_bytes, "model.autosplit_reserve"
        margin = reachable - AUTOSPLIT_MARGIN_BYTES
        if margin < cap:
            why = "256 MiB stay physically free (EXL3_AUTOSPLIT_MARGIN_MB)"
        pool = max(min(cap, margin), 0)
        kept = (
            held("budget.baseline", self.total_bytes - reachable, "total less free and own memory"),
            held("budget.reserve", reachable - pool, why),
        )
        return Allowance(pool_bytes=pool, held_back=kept)


def default_reserves(devices: int) -> tuple[int, ...]:
    """Return what TabbyAPI keeps free on every GPU where nobody states it."""
    return tuple(OTHER_RESERVE_BYTES if i else FIRST_RESERVE_BYTES for i in range(devices))


def split_bytes(gigabytes: Fraction) -> int:
    """Return the bytes of one number of ``model.gpu_split``, which means GiB."""
    return gigabytes.numerator * GIB // gigabytes.denominator
