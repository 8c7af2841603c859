"""Blueprint and headers to an assignment: every stored tensor has a role, a storage format and a place in its module.

From a config alone the blueprint's stated formats are taken. With headers (:func:`assign_headers` in
:mod:`tonnage.matching`) the formats are those found, and missing, unexpected and misshapen tensors are named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.errors import Problem, UnknownFormatError
from tonnage.formats.quantized import mxfp8
from tonnage.recipes.blueprint import Blueprint
from tonnage.recipes.modules import Module, Stored, stored_tensors

if TYPE_CHECKING:
    from tonnage.container import Container
    from tonnage.formats.storage import StorageFormat

CONVERTIBLE = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A module on some layers, in one storage format.

    Attributes:
        module: What it is.
        fmt: How it is stored (or will be, after conversion).
        stored: The tensors of one instance.
        first: Values of the first index this holds for; empty without an index.
        copies: Instances per value of the first index.
        members: Which experts, where not all of them are stored this way; empty for all.
        converted_from: Bytes of one instance before conversion, if it is converted.
    """

    module: Module
    fmt: StorageFormat
    stored: tuple[Stored, ...]
    first: tuple[int, ...]
    copies: int
    members: tuple[int, ...] = ()
    converted_from: int = 0

    @property
    def instances(self) -> int:
        """How many instances there are in all."""
        return (len(self.first) or 1) * self.copies

    @property
    def tensors(self) -> int:
        """How many stored tensors there are in all."""
        return self.instances * len(self.stored)

    @property
    def instance_bytes(self) -> int:
        """Payload bytes of one instance."""
        return sum(tensor.nbytes for tensor in self.stored)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all instances."""
        return self.instances * self.instance_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All stored tensors of a checkpoint with their roles.

    Attributes:
        blueprint: Family, config and modules.
        entries: In recipe order.
        container: Geometry of the routed experts, where an exl3-v1 container stores them.
        notes: What the reader of a report must know.
    """

    blueprint: Blueprint
    entries: tuple[Assigned, ...]
    container: Container | None = None
    notes: tuple[str, ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries) + (self.container.payload_bytes if self.container else 0)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(entry.tensors for entry in self.entries) + (self.container.tensors if self.container else 0)


def assign_blueprint(blueprint: Blueprint) -> Assignment:
    """Return the assignment a config alone promises.

    Raises:
        UnknownFormatError: The config does not say how tensors are stored, or an extent does not suit its format.
    """
    if blueprint.scheme.rates_unknown:
        raise UnknownFormatError(
            Problem(
                where="config.json",
                what=f"{blueprint.scheme.method} keeps a rate per tensor, which a config does not tell",
                expected="the checkpoint directory with its headers",
            )
        )
    dtype = blueprint.config.dtype
    entries = tuple(
        Assigned(
            module=module,
            fmt=module.fmt,
            stored=stored_tensors(module, module.fmt, dtype),
            first=module.first,
            copies=module.copies,
        )
        for module in blueprint.modules
        if not module.optional
    )
    return Assignment(blueprint=blueprint, entries=entries, notes=blueprint.notes)


def convert_to_mxfp8(assignment: Assignment, *, experts: bool = False) -> Assignment:
    """Return the assignment with every convertible plain weight in MXFP8.

    A weight is converted where its recipe line allows it, it is stored plain in BF16, F16 or F32, and its inputs are
    whole blocks of 32. Everything else keeps its bytes.

    Args:
        assignment: As stored.
        experts: Convert routed experts too, where each is stored by itself.
    """
    fmt = mxfp8()
    entries = (_converted(e, fmt) if is_convertible(e, experts=experts) else e for e in assignment.entries)
    return replace(assignment, entries=tuple(entries))


def is_convertible(entry: Assigned, *, experts: bool = False) -> bool:
    """Whether :func:`convert_to_mxfp8` converts it."""
    module = entry.module
    return (
        (module.rule.convert or (experts and module.rule.role == "expert" and module.rule.is_linear))
        and entry.fmt.is_plain
        and not module.stack
        and entry.stored[0].dtype in CONVERTIBLE
        and module.in_size % fmt_grain() == 0
    )


def fmt_grain() -> int:
    """Return the block of 32 inputs that share a scale."""
    return mxfp8().in_grain


def _converted(entry: Assigned, fmt: StorageFormat) -> Assigned:
    made = stored_tensors(entry.module, fmt, entry.stored[0].dtype)[: len(fmt.parts)]
    return replace(entry, fmt=fmt, stored=(*made, *entry.stored[1:]), converted_from=entry.instance_bytes)
