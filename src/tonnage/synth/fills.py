"""What values a tensor of a small rehearsal holds, so that whoever decodes it finds finite and plausible numbers.

Only says which; the bytes are made in :mod:`tonnage.synth.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.checkpoint.recognise import PLAIN_DTYPES
from tonnage.formats.exl3_v1_names import EXL3_V1

if TYPE_CHECKING:
    from tonnage.assignment import Assigned
    from tonnage.formats.exl3_v1 import LayerTensor
    from tonnage.recipes.modules import Stored

FillKind = Literal[
    "normal", "near_one", "positive", "signed", "bytes", "e4m3", "e4m3_positive", "e5m2", "e8m0", "below_8", "indices",
    "integers", "steps", "rows",
]  # fmt: skip
MARKERS = {".mcg": 0xCBAC1FED, ".mul1": 0x83DCD12D}
"""Codebook markers of EXL3, one 32-bit word each."""

_BYTE_KINDS: dict[str, FillKind] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "F8_E8M0": "e8m0", "BOOL": "indices"}
_INDEX_DTYPES = ("I64", "U64")


@dataclass(frozen=True, slots=True)
class Fill:
    """The values of one tensor.

    Attributes:
        kind: ``normal`` with standard deviation 0.02, ``near_one`` likewise around 1, ``positive`` scales, ``signed``
            rotation vectors; ``bytes`` for codes of which every pattern is legal; ``e4m3`` and ``e5m2`` without NaN and
            infinity; ``e8m0`` exponents 118..126; ``below_8`` bytes; ``indices`` 0..3; ``integers`` exactly those
            given; ``steps`` i // step; ``rows`` of used bytes, then zeros.
        numbers: The integers, the step, or used bytes and stride of a row.
    """

    kind: FillKind
    numbers: tuple[int, ...] = ()


def fill_of(entry: Assigned, stored: Stored) -> Fill:
    """Return the values of one stored tensor of a module."""
    fmt, suffix, dtype = entry.fmt, stored.suffix, stored.dtype
    exact = _exact_fill(entry, suffix)
    if exact is not None:
        return exact
    beside_codes = not fmt.is_plain and suffix in {part.suffix for part in fmt.parts[1:]}
    if dtype in PLAIN_DTYPES:
        return Fill("positive" if beside_codes or suffix.endswith("_scale") else _float_kind(entry, suffix))
    if beside_codes and dtype in ("U8", "F8_E4M3"):
        return Fill("e8m0" if dtype == "U8" else "e4m3_positive")
    return Fill("indices" if dtype in _INDEX_DTYPES else _BYTE_KINDS.get(dtype, "bytes"))


def _exact_fill(entry: Assigned, suffix: str) -> Fill | None:
    """Return the values of tensors that are what their name says, in whatever format."""
    module = entry.module
    if suffix in MARKERS:
        return Fill("integers", (MARKERS[suffix],))
    if suffix == ".weight_shape":
        return Fill("integers", (module.out_size, module.in_size))
    if suffix == ".g_idx":
        return Fill("steps", (entry.fmt.in_grain,))
    return Fill("signed") if suffix in (".suh", ".svh") else None


def layer_fill(tensor: LayerTensor, *, row_bytes: int) -> Fill:
    """Return the values of one tensor of an exl3-v1 layer file whose rows have so many used bytes."""
    if tensor.dtype == "F16":
        return Fill("signed")
    if tensor.name == EXL3_V1.codes:
        return Fill("rows", (row_bytes, tensor.shape[1]))
    return Fill("below_8")


def _float_kind(entry: Assigned, suffix: str) -> FillKind:
    """Norm weights lie near 1; weights and biases of everything else around 0."""
    name = entry.module.rule.pattern + suffix
    return "near_one" if "norm" in name.lower() and not name.endswith("bias") else "normal"
