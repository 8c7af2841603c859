"""The GPUs of this machine as values: which of them are used, and what is free on the fullest.

:mod:`tonnage.memory.driver` reads them; here nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.errors import DriverError, Problem
from tonnage.memory.supply import Supply
from tonnage.units import gib

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one GPU, or of one MIG slice of it, as the driver reports it.

    Attributes:
        index: The driver's number of the GPU, in PCI order.
        uuid: Its name for good; that of the slice for a slice.
        name: The model's name.
        total_bytes: The driver's total.
        free_bytes: Free.
        reserved_bytes: Kept by driver and firmware: the allocator's total is without it; ``None`` if not reported.
        slice_index: Number of the MIG slice; ``None`` for a whole GPU.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    slice_index: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no driver reports."""
        if not 0 <= self.free_bytes <= self.total_bytes or not 0 <= (self.reserved_bytes or 0) <= self.total_bytes:
            raise ValueError(f"GPU {self.index}: {self.free_bytes} bytes free of {self.total_bytes}")

    @property
    def label(self) -> str:
        """How a line names it: ``GPU 0``, ``GPU 0 slice 1``."""
        return f"GPU {self.index}" if self.slice_index is None else f"GPU {self.index} slice {self.slice_index}"

    @property
    def used_bytes(self) -> int:
        """Held by processes, and by the driver where it does not say how much."""
        return self.total_bytes - (self.reserved_bytes or 0) - self.free_bytes

    @property
    def engine_total_bytes(self) -> int | None:
        """The total the allocator sees, which engines take their fraction of; ``None`` if the driver does not say."""
        return None if self.reserved_bytes is None else self.total_bytes - self.reserved_bytes


def select_devices(devices: Sequence[DeviceMemory], text: str, *, where: str) -> tuple[DeviceMemory, ...]:
    """Return the GPUs a list such as ``0,1`` or ``GPU-5e3a,MIG-77`` names, in its order.

    Args:
        devices: All of them.
        text: Numbers, or UUIDs or the beginning of one.
        where: Option or variable the text is from.

    Raises:
        DriverError: A name fits none or several of them, or one GPU is named twice.
    """
    chosen = tuple(_named(devices, name.strip(), where) for name in text.split(","))
    if len({device.uuid for device in chosen}) < len(chosen):
        raise DriverError(Problem(where=where, what="names a GPU twice", found=repr(text)))
    return chosen


def free_supply(devices: Sequence[DeviceMemory], ranks: int) -> Supply:
    """Return what is free on the fullest of the first ``ranks`` GPUs: the rank that decides for all.

    Raises:
        DriverError: There are fewer GPUs than ranks, or nothing is free.
    """
    if len(devices) < ranks:
        raise DriverError(
            Problem(where="--free", what="fewer GPUs than ranks", expected=str(ranks), found=str(len(devices)))
        )
    fullest = min(devices[:ranks], key=lambda device: device.free_bytes)
    if not fullest.free_bytes:
        raise DriverError(Problem(where="--free", what="nothing is free", found=f"{fullest.label}, {fullest.name}"))
    which = fullest.label if ranks == 1 else f"least free of {ranks}: {fullest.label}"
    held = f"{gib(fullest.used_bytes, digits=2)} GiB held by processes"
    return Supply(nbytes=fullest.free_bytes, basis="exact", source=f"driver: {which}, {fullest.name}, {held}")


def _named(devices: Sequence[DeviceMemory], name: str, where: str) -> DeviceMemory:
    """Return the one GPU with a number, or whose UUID begins so."""
    if name.isascii() and name.isdigit():
        found = [d for d in devices if str(d.index) == name and d.slice_index is None]
    else:
        found = [d for d in devices if name and d.uuid.startswith(name)]
    if len(found) != 1:
        what = "names several GPUs" if found else "names no GPU of this machine"
        known = ", ".join(f"{d.label} {d.uuid}" for d in devices)
        raise DriverError(Problem(where=where, what=what, expected=known, found=repr(name)))
    return found[0]
