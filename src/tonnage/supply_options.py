"""The supply that options ask for: a GPU of the table, a size, or what the driver says is free."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.errors import Problem, UnitError
from tonnage.memory.budget import requested_bytes
from tonnage.memory.devices import free_supply, select_devices
from tonnage.memory.driver import read_devices
from tonnage.memory.supply import Gpu, Supply, find_gpu, gpu_of_driver, parse_supply, supply_bytes
from tonnage.units import parse_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.devices import DeviceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSupply:
    """What one process may use on one GPU.

    Attributes:
        supply: The bytes; ``None`` if nobody asked.
        gpu: The GPU, if it is one of the table.
        context_held: Whether the context of a process comes out of it.
    """

    supply: Supply | None = None
    gpu: Gpu | None = None
    context_held: bool = True


def ask_supply(
    *, gpu: str | None, supply: str | None, free: str | None, utilization: str | None, ranks: int
) -> AskedSupply:
    """Return the supply that options ask for.

    A GPU of the table, and what the driver says is free, is memory on which a process first makes its context. A size
    that is given, and the share of a GPU that vLLM asks for, is what it can use beside that. With both, ``gpu`` says
    which kind it is, and ``supply`` how much of it there is.

    Raises:
        TonnageError: Two sizes are given, a GPU is unknown, a size cannot be read, or no driver answers.
    """
    if supply is not None and free is not None:
        raise UnitError(Problem(where="--supply, --free", what="both given", expected="one of them"))
    known = find_gpu(gpu) if gpu is not None else None
    asked = AskedSupply()
    if supply is not None:
        asked = AskedSupply(supply=parse_supply(supply), gpu=known, context_held=False)
    elif free is not None:
        asked = free_memory(free_gpus(free), ranks)
    elif known is not None:
        asked = AskedSupply(supply=supply_bytes(known), gpu=known)
    share = read_share(utilization)
    return asked if share is None else _shared(asked, share)


def read_share(utilization: str | None) -> Fraction | None:
    """Return ``--utilization`` as a number, if it is given.

    Raises:
        UnitError: It is none, or no share.
    """
    if utilization is None:
        return None
    share = parse_number(utilization, where="--utilization")
    if not 0 < share <= 1:
        found = str(share)
        raise UnitError(Problem(where="--utilization", what="out of range", expected="above 0, at most 1", found=found))
    return share


def free_gpus(text: str, *, where: str = "--free") -> tuple[DeviceMemory, ...]:
    """Return the GPUs of this machine that ``all``, or a list such as ``0,2``, names.

    Raises:
        DriverError: No driver answers, or a name fits none of them.
    """
    devices = read_devices()
    return devices if text == "all" else select_devices(devices, text, where=where)


def free_memory(devices: Sequence[DeviceMemory], ranks: int) -> AskedSupply:
    """Return what is free on the fullest of the first so many GPUs, and which GPU of the table they are.

    Raises:
        DriverError: There are fewer, or nothing is free.
    """
    known = {gpu_of_driver(device.name, device.total_bytes) for device in devices}
    return AskedSupply(supply=free_supply(devices, ranks), gpu=known.pop() if len(known) == 1 else None)


def _shared(asked: AskedSupply, share: Fraction) -> AskedSupply:
    """Return the share of a GPU that vLLM asks for, beside the context."""
    if asked.supply is None:
        raise UnitError(
            Problem(where="--utilization", what="a share of what is not said", expected="--gpu or --supply")
        )
    total = asked.supply
    nbytes, source = requested_bytes(total.nbytes, share), f"{total.source} x {float(share):g}"
    shared = Supply(nbytes=nbytes, basis=total.basis, source=source, whole_bytes=total.nbytes)
    return AskedSupply(supply=shared, gpu=asked.gpu, context_held=False)
