"""What one process can use on one GPU: the GPU table, and the rule for cards whose torch total nobody reported.

The supply of the table is the total the allocator sees, before anything is loaded. What other processes hold, and what
the engine reserves, belongs to the profile and the runtime terms. The marketing figure is never used. The supply of
this machine is in :mod:`tonnage.memory.devices`.

Source:
    ``gpus.json`` beside this module: values from public user reports, each with its confidence and note.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from tonnage.errors import Problem, UnitError, UnknownGpuError
from tonnage.units import GIB, MIB, parse_size

Basis = Literal["exact", "modelled", "calibrated", "assumed"]

# A total printed as GiB with two decimals may have been rounded up by half a hundredth.
PRINTED_GIB_ERROR_BYTES = -(-GIB // 200)


class FreeSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free memory an engine reported at its first snapshot, with the topology it ran.

    Attributes:
        free_gib: Free memory, GiB, as printed.
        of_gib: Total it printed beside it, if it did.
        tp: Tensor-parallel size.
        ep: Whether expert parallelism was on.
        engine: Engine and version.
    """

    free_gib: str
    of_gib: str | None
    tp: int
    ep: bool
    engine: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU as the table knows it.

    Attributes:
        slug: Short name for the command line, such as ``rtx-pro-6000``.
        name: Full name.
        aliases: Names drivers report.
        arch: Architecture name.
        compute_capability: CUDA compute capability, or the gfx name.
        memory_type: Memory technology.
        unified_memory: Whether the memory is the host's as well.
        nominal_gb: Marketing figure; never used as a supply.
        smi_total_mib: Total by nvidia-smi or amd-smi, MiB.
        torch_total_mib: Total the allocator sees, MiB, floored.
        torch_total_gib: The same as printed, GiB with two decimals.
        torch_total_gib_seen: Smallest and largest of those printed totals.
        driver_reserved_mib: Difference of the two totals, MiB.
        free_at_snapshot_seen: Free memory engines reported on it.
        confidence: How the figures are known.
        note: What a reader must know about them.
        smi_total_source: Where the driver total comes from.
    """

    slug: str
    name: str
    aliases: tuple[str, ...]
    arch: str
    compute_capability: str
    memory_type: str
    unified_memory: bool
    nominal_gb: int
    smi_total_mib: int | None
    torch_total_mib: int | None
    torch_total_gib: str | None
    torch_total_gib_seen: tuple[str, str] | None
    driver_reserved_mib: int | None
    free_at_snapshot_seen: tuple[FreeSeen, ...]
    confidence: Literal["confirmed-from-source", "reported-by-users", "inferred"]
    note: str
    smi_total_source: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Slug, name and aliases."""
        return (self.slug, self.name, *self.aliases)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule about totals in words, with its confidence."""

    rule: str
    text: str
    confidence: str


class ReserveStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most a driver was seen to keep from the allocator, for cards up to a nominal size."""

    up_to_nominal_gb: int
    reserve_mib: int


class GpuTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shipped table: GPUs, rules, and what the units mean."""

    schema: Literal["tonnage.gpus/1"]
    as_of: str
    units: dict[str, str]
    rules: tuple[Rule, ...]
    reserve_rule: tuple[ReserveStep, ...]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Bytes one process can use on one GPU.

    Attributes:
        nbytes: The supply, rounded down.
        basis: How it is known.
        source: Option or table entry, with the reason if it is assumed.
        whole_bytes: All of the GPU, where the supply is the share of it that an engine asks for.
    """

    nbytes: int
    basis: Basis
    source: str
    whole_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse a supply that is no memory."""
        if self.nbytes <= 0:
            raise ValueError(f"{self.source}: supply of {self.nbytes} bytes")


@cache
def gpu_table() -> GpuTable:
    """Return the table shipped with the package, checked against its types."""
    text = resources.files("tonnage.memory").joinpath("gpus.json").read_bytes()
    return msgspec.json.decode(text, type=GpuTable)


def find_gpu(name: str) -> Gpu:
    """Return the one GPU with this slug, name or alias; case, blanks and dashes do not matter (``rtx4090``).

    What the entry itself says may stand beside the name: ``H100 80GB HBM3``.

    Raises:
        UnknownGpuError: No entry has the name (the nearest names are given), or several have.
    """
    wanted = _key(name)
    gpus = gpu_table().gpus
    found = [gpu for gpu in gpus if wanted in map(_key, gpu.names)]
    found = found or [gpu for gpu in gpus if _bare(name, gpu) in {_bare(known, gpu) for known in gpu.names}]
    found = found or [gpu for gpu in gpus if _run_together(name) in map(_run_together, gpu.names)]
    if len(found) == 1:
        return found[0]
    if found:
        slugs = " or ".join(gpu.slug for gpu in found)
        raise UnknownGpuError(Problem(where="--gpu", what="name fits several GPUs", expected=slugs, found=name))
    slug_of = {_key(known): gpu.slug for gpu in gpus for known in gpu.names}
    nearest = get_close_matches(wanted[:80], slug_of, n=5)
    expected = ", ".join(dict.fromkeys(slug_of[key] for key in nearest)) or "a name out of `tonnage gpus`"
    raise UnknownGpuError(Problem(where="--gpu", what="GPU is not in the table", expected=expected, found=name))


def supply_bytes(gpu: Gpu) -> Supply:
    """Return what a process can use on this GPU, never rounded up.

    In this order: the torch total in MiB; the smallest printed torch total, less its rounding; the driver total less
    the most a driver was seen to reserve on cards of that size.

    Raises:
        UnknownGpuError: The table has none of the three.
    """
    source = f"gpus.json: {gpu.slug}"
    if gpu.torch_total_mib is not None:
        nbytes = gpu.torch_total_mib * MIB
        return Supply(nbytes=nbytes, basis="calibrated", source=f"{source}, torch total {gpu.torch_total_mib} MiB")
    if gpu.torch_total_gib_seen is not None:
        printed = gpu.torch_total_gib_seen[0]
        nbytes = parse_size(f"{printed}GiB", where=source) - PRINTED_GIB_ERROR_BYTES
        reason = f"smallest torch total reported, {printed} GiB, less its rounding"
        return Supply(nbytes=nbytes, basis="assumed", source=f"{source}, {reason}")
    if gpu.smi_total_mib is not None:
        reserve_mib = _reserve_mib(gpu)
        nbytes = (gpu.smi_total_mib - reserve_mib) * MIB
        reason = f"torch total not reported: driver total {gpu.smi_total_mib} MiB less {reserve_mib} MiB"
        return Supply(nbytes=nbytes, basis="assumed", source=f"{source}, {reason}")
    raise UnknownGpuError(
        Problem(where=source, what="no usable total is known", expected="--supply with the memory free on it")
    )


def parse_supply(text: str) -> Supply:
    """Return the supply a user states, such as ``94.010GiB``.

    Raises:
        UnitError: It is no size, or no memory at all.
    """
    nbytes = parse_size(text, where="--supply")
    if nbytes <= 0:
        raise UnitError(Problem(where="--supply", what="no memory", expected="more than 0 bytes", found=repr(text)))
    return Supply(nbytes=nbytes, basis="exact", source="--supply")


def gpu_of_driver(name: str, total_bytes: int) -> Gpu | None:
    """Return the entry of a GPU by the name and total its driver reports; ``None`` if the table does not have it.

    Cards that share a name differ in their total; the nearest is taken.
    """
    wanted = _key(name)
    found = [gpu for gpu in gpu_table().gpus if wanted in map(_key, gpu.names)]
    return min(found, key=lambda gpu: abs((gpu.smi_total_mib or 0) * MIB - total_bytes), default=None)


def _reserve_mib(gpu: Gpu) -> int:
    """Return the larger end of the reserve seen on cards of this size, MiB."""
    for step in gpu_table().reserve_rule:
        if gpu.nominal_gb <= step.up_to_nominal_gb:
            return step.reserve_mib
    raise UnknownGpuError(
        Problem(where=gpu.slug, what="no reserve rule for a card of this size", found=f"{gpu.nominal_gb} GB")
    )


def _bare(name: str, gpu: Gpu) -> str:
    """Return a name without maker, size, architecture and memory, where they are those of the GPU."""
    said = {"nvidia", "amd", f"{gpu.nominal_gb}gb", *_key(f"{gpu.arch} {gpu.memory_type}").split("-")}
    return "-".join(word for word in _key(name).split("-") if word not in said)


def _run_together(name: str) -> str:
    return _key(name).replace("-", "")


def _key(name: str) -> str:
    return "-".join(name.casefold().replace("_", " ").replace("-", " ").split())
