"""Which tensors of two models are the same, what their values are stored in, and whether it is one model at all. Pure.

Values are those of plain floating-point tensors and of MXFP8 codes with their scales. What is stored in another way has
no values here: its bytes are compared, and where the other side stores it in another way still, nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as shown

from tonnage.checkpoint.recognise import E8M0_DTYPES, PLAIN_DTYPES
from tonnage.compare.wholes import CompareError, Whole
from tonnage.errors import Problem, raise_if_any
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.formats.quantized import MX_BLOCK

MXFP8 = "mxfp8_e4m3"
_CODES = "F8_E4M3"
_SCALES = ("_scale", "_scale_inv")
_NOT_OF_THE_MODEL = ("_token_id", "_token_index")
"""Ends of fields with a number that says nothing of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor as somebody would name it: codes and scales are one.

    Attributes:
        stored: The tensor, or the codes.
        scales: E8M0 bytes, one per 32 codes along the last axis.
    """

    stored: Whole
    scales: Whole | None = None

    @property
    def name(self) -> str:
        """Name without that of the scales."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return self.stored.shape

    @property
    def form(self) -> str:
        """How it is stored: a dtype, or ``mxfp8_e4m3``."""
        return MXFP8 if self.scales else self.stored.dtype

    @property
    def has_values(self) -> bool:
        """Whether its numbers are known without any other tensor."""
        return self.scales is not None or self.stored.dtype in PLAIN_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The tensors of two models.

    Attributes:
        values: Pairs whose values can be subtracted.
        octets: Pairs of one dtype and shape without values here.
        incomparable: Pairs that are stored in two ways without values, or in elements that share a byte.
        only_a: Tensors the second has no counterpart of; likewise ``only_b``.
    """

    values: tuple[tuple[Tensor, Tensor], ...]
    octets: tuple[tuple[Tensor, Tensor], ...]
    incomparable: tuple[tuple[Tensor, Tensor], ...]
    only_a: tuple[Tensor, ...]
    only_b: tuple[Tensor, ...]


def tensors_of(wholes: Mapping[str, Whole]) -> dict[str, Tensor]:
    """Return the tensors of a model by name; scales belong to the codes they are named after."""
    scales = {found.name: name for name, codes in wholes.items() if (found := _scales_of(codes, wholes)) is not None}
    owners = {codes: wholes[scale] for scale, codes in scales.items()}
    return {name: Tensor(stored=whole, scales=owners.get(name)) for name, whole in wholes.items() if name not in scales}


def _scales_of(codes: Whole, wholes: Mapping[str, Whole]) -> Whole | None:
    """Return the MX scales of codes; ``None`` if no tensor is named, typed and shaped as they would be."""
    if codes.dtype != _CODES or not codes.shape or codes.shape[-1] % MX_BLOCK:
        return None
    names = [codes.name + suffix for suffix in _SCALES] + [codes.name.removesuffix(".weight") + ".scale"]
    shape = (*codes.shape[:-1], codes.shape[-1] // MX_BLOCK)
    found = (wholes[name] for name in names if name in wholes)
    return next((one for one in found if one.dtype in E8M0_DTYPES and one.shape == shape), None)


def pair(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, where: tuple[str, str]) -> Pairing:
    """Return the tensors of two models side by side, sorted by name.

    Raises:
        CompareError: They have no tensor in common, or a tensor has other dimensions in the other.
    """
    both = [(a[name], b[name]) for name in sorted(a.keys() & b.keys())]
    raise_if_any(CompareError, _shape_problems(both, where))
    if not both:
        found = f"{len(a)} and {len(b)} tensors of other names"
        raise CompareError(Problem(where=" and ".join(where), what="two models: no tensor in common", found=found))
    values = tuple(one for one in both if one[0].has_values and one[1].has_values)
    rest = [one for one in both if not (one[0].has_values and one[1].has_values)]
    alike = [
        (one[0].form, one[0].shape) == (one[1].form, one[1].shape) and DTYPE_BITS[one[0].stored.dtype] % 8 == 0
        for one in rest
    ]
    return Pairing(
        values=values,
        octets=tuple(one for one, same in zip(rest, alike, strict=True) if same),
        incomparable=tuple(one for one, same in zip(rest, alike, strict=True) if not same),
        only_a=tuple(a[name] for name in sorted(a.keys() - b.keys())),
        only_b=tuple(b[name] for name in sorted(b.keys() - a.keys())),
    )


def _shape_problems(both: list[tuple[Tensor, Tensor]], where: tuple[str, str]) -> Iterator[Problem]:
    for one, other in both:
        same_way = (one.has_values and other.has_values) or one.form == other.form
        if same_way and one.shape != other.shape:
            yield Problem(
                where=where[1],
                tensor=one.name,
                what="two models: a tensor has other dimensions",
                expected=f"{list(one.shape)} as in {where[0]}",
                found=str(list(other.shape)),
            )


def model_problems(
    a: Mapping[str, object], b: Mapping[str, object], *, where: tuple[str, str], path: str = ""
) -> Iterator[Problem]:
    """Yield where two configs describe two models: types and dimensions that both state and that differ.

    What says how weights are stored or text is treated may differ, and so may what only one of them states.
    """
    for key in sorted(a.keys() & b.keys()):
        one, other, name = a[key], b[key], f"{path}{key}"
        if key.endswith("quantization_config") or key.endswith(_NOT_OF_THE_MODEL):
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            yield from model_problems(one, other, where=where, path=f"{name}.")
        elif one != other and (key == "model_type" or (_is_number(one) and _is_number(other))):
            what, expected = f"two models: {name} of config.json differs", f"{shown(one)} as in {where[0]}"
            yield Problem(where=where[1], what=what, expected=expected, found=shown(other))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
