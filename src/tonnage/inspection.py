"""What a checkpoint holds, summed by role, dtype and storage format, and what a conversion credit would count."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tonnage.assignment import Assignment, is_convertible
from tonnage.formats.exl3_v1 import layer_tensors
from tonnage.recipes.schema import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterable

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Sum:
    """Tensors and payload bytes of one kind."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint in sums; every breakdown adds up to the total.

    Attributes:
        total: Tensors and payload bytes.
        by_role: In the order of :data:`~tonnage.recipes.schema.ROLES`.
        by_dtype: Largest first.
        by_format: Largest first.
        projection_bytes: BF16 bytes of the projections a credit counts.
        latent_bytes: BF16 bytes of the latent pair.
        convertible_bytes: Bytes of everything ``--convert mxfp8`` converts.
        notes: Remarks of the assignment.
    """

    total: Sum
    by_role: tuple[tuple[str, Sum], ...]
    by_dtype: tuple[tuple[str, Sum], ...]
    by_format: tuple[tuple[str, Sum], ...]
    projection_bytes: int
    latent_bytes: int
    convertible_bytes: int
    notes: tuple[str, ...]


def inspect_assignment(assignment: Assignment) -> Inspection:
    """Return the sums of an assignment."""
    role: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    dtype: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    fmt: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for role_name, dtype_name, fmt_name, tensors, nbytes in _rows(assignment):
        for table, key in ((role, role_name), (dtype, dtype_name), (fmt, fmt_name)):
            table[key][0] += tensors
            table[key][1] += nbytes
    projections, latent = counted_bytes(assignment)
    return Inspection(
        total=Sum(assignment.tensors, assignment.payload_bytes),
        by_role=tuple((name, Sum(*role[name])) for name in ROLES if name in role),
        by_dtype=_largest_first(dtype),
        by_format=_largest_first(fmt),
        projection_bytes=projections,
        latent_bytes=latent,
        convertible_bytes=sum(entry.nbytes for entry in assignment.entries if is_convertible(entry)),
        notes=assignment.notes,
    )


def counted_bytes(assignment: Assignment) -> tuple[int, int]:
    """Return the BF16 bytes of counted projections and of the latent pair, as far as they are stored plain.

    Two bytes per element, whatever float they are stored in: that is what a credit is a fraction of.
    """
    counted = {"projection": 0, "latent": 0}
    for entry in assignment.entries:
        credit = entry.module.rule.credit
        if credit is not None and entry.fmt.is_plain:
            counted[credit] += entry.instances * BF16_BYTES * prod(entry.stored[0].shape)
    return counted["projection"], counted["latent"]


def _rows(assignment: Assignment) -> Iterable[tuple[str, str, str, int, int]]:
    for entry in assignment.entries:
        for tensor in entry.stored:
            yield (
                entry.module.rule.role,
                tensor.dtype,
                entry.fmt.name,
                entry.instances,
                entry.instances * tensor.nbytes,
            )
    container = assignment.container
    if container is not None:
        name = container.manifest.dialect.schema
        for stride in container.row_strides:
            for layer_tensor in layer_tensors(container.manifest.geometry, row_stride_bytes=stride):
                yield "expert", layer_tensor.dtype, name, 1, layer_tensor.nbytes


def _largest_first(table: dict[str, list[int]]) -> tuple[tuple[str, Sum], ...]:
    return tuple((name, Sum(*row)) for name, row in sorted(table.items(), key=lambda item: -item[1][1]))
