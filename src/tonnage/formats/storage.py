"""What a storage format is: the tensors that stand for one logical linear weight, and where it may be cut.

A format is data. Each of its parts names a stored tensor by suffix, its dtype, and for every stored axis which logical
axis it walks (``out`` or ``in`` of a ``[out, in]`` weight) and how many logical elements one stored index covers. From
that alone follow stored shapes, exact bytes, and what a cut of the logical weight means for every stored tensor. The
formats themselves are in the sibling modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.errors import Problem, UnknownFormatError

Axis = Literal["out", "in", "stack", "none"]
MODEL_DTYPE = "model"
"""Stands for the dtype of the checkpoint's unquantised tensors until a config names it."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One stored axis.

    Attributes:
        axis: The logical axis it walks; ``stack`` for experts stored in one tensor, ``none`` for a constant extent.
        per: Logical elements covered by one stored index; for ``none`` the extent itself.
        ragged: The last index may cover fewer elements (ceiling instead of exact division).
    """

    axis: Axis
    per: int = 1
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a linear weight: suffix, dtype and stored axes in file order."""

    suffix: str
    dtype: str
    dims: tuple[Dim, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How a logical ``[out, in]`` weight is stored.

    Attributes:
        name: Lower-case name as printed and as written in plans, e.g. ``mxfp8_e4m3``.
        parts: Stored tensors.
        out_grain: Cuts along ``out`` fall on multiples of this many elements.
        in_grain: Cuts along ``in`` fall on multiples of this many elements.
        pads_to: Both logical extents are stored rounded up to a multiple of this (EXL3: 128).
        bias_dtype: Dtype of a bias stored next to it; ``model`` unless the format fixes one.
    """

    name: str
    parts: tuple[Part, ...]
    out_grain: int = 1
    in_grain: int = 1
    pads_to: int = 1
    bias_dtype: str = MODEL_DTYPE

    def __post_init__(self) -> None:
        """Refuse a grain finer than what a stored index covers."""
        for part in self.parts:
            for dim in part.dims:
                grain = {"out": self.out_grain, "in": self.in_grain}.get(dim.axis, dim.per)
                if dim.per <= 0 or (grain % dim.per and not dim.ragged):
                    raise ValueError(f"{self.name}{part.suffix}: cuts every {grain}, one index covers {dim.per}")

    @property
    def is_plain(self) -> bool:
        """Whether this is one dense tensor of a plain dtype."""
        return self.name == "plain"


def plain(dtype: str = MODEL_DTYPE) -> StorageFormat:
    """Return the format of an unquantised weight: one tensor, cut anywhere."""
    return StorageFormat(name="plain", parts=(Part(".weight", dtype, (Dim("out"), Dim("in"))),))


def stored_shape(part: Part, out: int, in_: int, *, where: str) -> tuple[int, ...]:
    """Return the shape of one stored tensor for a logical ``[out, in]`` weight.

    Raises:
        UnknownFormatError: An extent is not a whole number of stored indices.
    """
    shape = []
    for dim in part.dims:
        if dim.axis == "none":
            shape.append(dim.per)
            continue
        extent = out if dim.axis == "out" else in_
        if extent % dim.per and not dim.ragged:
            raise UnknownFormatError(
                Problem(
                    where=where,
                    what=f"{dim.axis} extent is not whole in {part.suffix}",
                    expected=f"a multiple of {dim.per}",
                    found=str(extent),
                )
            )
        shape.append(-(-extent // dim.per))
    return tuple(shape)
