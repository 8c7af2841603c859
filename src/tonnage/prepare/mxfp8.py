"""MXFP8 conversion of weights: BF16, F16 or F32 to E4M3 codes with one E8M0 scale byte per 32 elements, and back.

What a conversion did to a tensor is a value too: :class:`Figures`, which adds up over windows of rows. Whether a tensor
with a NaN or an infinity is refused is the caller's decision, who knows its name; here the result is defined and the
position reported. The compiled loops are in ``prepare/mxfp8_kernels.py``.

Source:
    OCP Microscaling Formats v1.0, sections 5.3.1 (E4M3), 5.4.1 (E8M0) and 6.3 (conversion).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log10, sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tonnage.prepare import mxfp8_kernels as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tonnage.prepare.jobs import ScaleRule

BLOCK_ELEMENTS = kernels.LANES
SourceDtype = Literal["BF16", "F16", "F32"]


class _Kind(NamedTuple):
    """How a dtype is held in memory and named to the compiled loops."""

    bits: type[np.unsignedinteger[Any]]
    stand_in: np.generic
    infinity: int


_KINDS: dict[str, _Kind] = {
    "BF16": _Kind(np.uint16, np.uint16(0), 0x7F80),
    "F16": _Kind(np.uint16, np.int16(0), 0x7C00),
    "F32": _Kind(np.uint32, np.float32(0), 0x7F800000),
}

# Let a be the largest magnitude of a block, E and 1.M its exponent field and mantissa as float32. The scale byte is
# E - 8, at least 0, plus one where 1.M is beyond the rule's limit: the first number carries into the exponent there.
# The second is the byte of a block with an infinity.
_RULES: dict[str, kernels.Rule] = {
    # ceil(log2(a / 448)), NVIDIA cuBLAS "1D block scaling": one more if 1.M > 1.75.
    # pytorch/ao torchao/prototype/mx_formats/mx_tensor.py, _to_mx_rceil (0.18.0), infinity as there.
    "rceil": kernels.Rule(0x1FFFFF, 254),
    # floor(log2 a) - 8, OCP MX v1.0 section 6.3; values beyond 448 are clamped. to_mx in the same file.
    "floor": kernels.Rule(0, 247),
    # The same after rounding a to E4M3's mantissa, half of it upwards: one more if 1.M >= 1.9375. Same place.
    "even": kernels.Rule(0x080000, 247),
    # One more if 1.M >= 1.75. vllm-project/compressed-tensors quantization/utils/mxfp_utils.py (0.17.0),
    # round_to_power_2 and generate_mx_scales. There a finite a of 1.75 * 2**127 or more becomes 255 like an infinity,
    # here 247; and a subnormal F16 maximum, which has no exponent in float16, becomes 0, here what the rule says.
    "compressed-tensors": kernels.Rule(0x200000, 255),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What rounding did, summed over finite blocks.

    Squares are integers, in units of ``2**-290``. Within a block they are summed in float32, divided by the scale
    squared and in a fixed order, and cut to a multiple of 2**-36; everything beyond is integer addition. So the
    figures of a tensor do not depend on how its rows, or its columns by whole blocks, are divided over calls and
    threads, nor on the processor. They are within one part in 10**6 of exact sums, and of 2**-36 times the scale
    squared per block.

    Attributes:
        squares: Sum of squares of the source.
        error_squares: Sum of squares of source minus decoded.
        largest_error: Largest magnitude of source minus decoded.
    """

    squares: int = 0
    error_squares: int = 0
    largest_error: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        """Return the figures of both together."""
        return Errors(
            squares=self.squares + other.squares,
            error_squares=self.error_squares + other.error_squares,
            largest_error=max(self.largest_error, other.largest_error),
        )

    @property
    def relative(self) -> float:
        """Frobenius norm of the error over that of the source; 0 without an error."""
        return sqrt(self.error_squares / self.squares) if self.error_squares else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, in dB; infinite without an error."""
        return 10 * log10(self.squares / self.error_squares) if self.error_squares else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was converted.

    Attributes:
        elements: All of them.
        zero_blocks: Blocks of zeros: scale byte 0.
        saturated_blocks: Blocks whose largest magnitude was clamped to 448 times the scale; none under ``rceil`` and
            ``compressed-tensors``.
        nonfinite_blocks: Blocks with a NaN or an infinity; they are in no figure but this and ``elements``.
        first_nonfinite: Flat position of the first NaN or infinity, in row-major order of the source.
        largest: Largest magnitude.
        errors: ``None`` if they were not asked for.
    """

    elements: int = 0
    zero_blocks: int = 0
    saturated_blocks: int = 0
    nonfinite_blocks: int = 0
    first_nonfinite: int | None = None
    largest: float = 0.0
    errors: Errors | None = Errors()

    def __add__(self, later: Figures) -> Figures:
        """Return the figures of these rows followed by later ones of the same width."""
        first = self.first_nonfinite
        if first is None and later.first_nonfinite is not None:
            first = self.elements + later.first_nonfinite
        return Figures(
            elements=self.elements + later.elements,
            zero_blocks=self.zero_blocks + later.zero_blocks,
            saturated_blocks=self.saturated_blocks + later.saturated_blocks,
            nonfinite_blocks=self.nonfinite_blocks + later.nonfinite_blocks,
            first_nonfinite=first,
            largest=max(self.largest, later.largest),
            errors=None if self.errors is None or later.errors is None else self.errors + later.errors,
        )


def quantize(  # noqa: PLR0913 - an input, two outputs, and three decisions nobody may make for the caller
    source: NDArray[np.unsignedinteger[Any]],
    dtype: SourceDtype,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    *,
    rule: ScaleRule = "rceil",
    threads: int = 1,
    errors: bool = True,
) -> Figures:
    """Write the codes and scale bytes of some rows, and return what was done to them.

    Elements are divided by the scale, clamped to 448 and rounded to nearest even; zeros keep their sign. A block of
    zeros has scale byte 0. A block with a NaN becomes scale byte 255 and NaN codes (0x7F) throughout. A block with an
    infinity gets the rule's largest scale, and its infinities become 448: byte 254 under ``rceil``, 247 under ``floor``
    and ``even``; under ``compressed-tensors`` it is 255, and the block becomes one with a NaN.

    The interpreter's lock is released. The first call compiles, once per dtype and installation (see numba's
    ``NUMBA_CACHE_DIR``), which takes seconds.

    Args:
        source: Raw bits, shape [rows, columns], columns a multiple of 32: uint16 for BF16 and F16, uint32 for F32.
            Contiguous within rows; column slices and read-only memory are fine.
        dtype: As safetensors spells it.
        codes: Written: E4M3, [rows, columns]; contiguous within rows.
        scales: Written: biased exponents, [rows, columns // 32]; contiguous within rows.
        rule: How the largest magnitude of a block becomes its scale.
        threads: Rows are shared among so many; neither bytes nor figures depend on it.
        errors: Sum squares and errors too, in the same pass; it then takes about three times as long.

    Returns:
        The figures of these rows; those of windows add up.

    Raises:
        ValueError: An array's dtype, shape or layout is not as above, or the rule or dtype is unknown.

    Source:
        OCP Microscaling Formats v1.0, section 6.3; the rules at ``_RULES``.
    """
    if rule not in _RULES or dtype not in _KINDS:
        raise ValueError(f"no conversion of {dtype} by rule {rule}")
    kind = _KINDS[dtype]
    _check(source, codes, scales, np.dtype(kind.bits))
    rows = len(source)
    cuts = [rows * part // threads for part in range(threads + 1)]
    parts = [slice(begin, end) for begin, end in pairwise(cuts) if begin < end]

    def work(part: slice) -> Figures:
        return _quantize_part(source[part], kind, codes[part], scales[part], _RULES[rule], errors=errors)

    total = Figures(errors=Errors() if errors else None)
    if len(parts) <= 1:
        return sum(map(work, parts), start=total)
    with ThreadPoolExecutor(len(parts) - 1) as pool:
        others = [pool.submit(work, part) for part in parts[1:]]
        return sum((other.result() for other in others), start=total + work(parts[0]))


def decode(codes: NDArray[np.uint8], scales: NDArray[np.uint8], out: NDArray[np.float32] | NDArray[np.uint16]) -> None:
    """Write the values of codes: code times ``2**(scale - 127)``.

    float32 holds them exactly but for those beyond its range, which become infinite: 448 times a scale byte above 246,
    and what was 1.9375 * 2**127 or more. So does BF16, but for its subnormals, which are rounded to nearest even. The
    code 0x7F, of either sign, and all of a block with scale byte 255 are NaN.

    Args:
        codes: E4M3, shape [rows, columns], columns a multiple of 32; contiguous within rows.
        scales: Biased exponents, [rows, columns // 32]; contiguous within rows.
        out: Written: float32, or BF16 bits as uint16, [rows, columns]; contiguous within rows.

    Raises:
        ValueError: An array's dtype, shape or layout is not as above.

    Source:
        OCP Microscaling Formats v1.0, section 5.2: ``v = X * P``.
    """
    if out.dtype not in (np.float32, np.uint16):
        raise ValueError(f"values are {out.dtype}, expected float32 or uint16")
    _check(out, codes, scales, out.dtype)
    stand_in = np.float32(0) if out.dtype == np.float32 else np.uint16(0)
    kernels.decode_rows(stand_in, _place(out, codes, scales))


def _quantize_part(
    source: NDArray[Any],
    kind: _Kind,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    rule: kernels.Rule,
    *,
    errors: bool,
) -> Figures:
    """Convert rows in this thread."""
    tally = np.zeros(kernels.SLOTS, np.int64)
    tally[kernels.FIRST] = -1
    kernels.quantize_rows(kind.stand_in, _place(source, codes, scales), rule, errors, tally)
    zero, saturated, nonfinite, first, top = tally[: kernels.TOP + 1].tolist()
    return Figures(
        elements=source.size,
        zero_blocks=zero,
        saturated_blocks=saturated,
        nonfinite_blocks=nonfinite,
        first_nonfinite=_position(source, first, kind.infinity) if nonfinite else None,
        largest=float(np.uint32(top).view(np.float32)),
        errors=_errors(tally) if errors else None,
    )


def _position(source: NDArray[Any], block: int, infinity: int) -> int:
    """Return the flat position of the first element of a block that is not finite."""
    row, number = divmod(block, source.shape[1] // BLOCK_ELEMENTS)
    elements = source[row, number * BLOCK_ELEMENTS :][:BLOCK_ELEMENTS]
    magnitudes = elements & (np.iinfo(source.dtype).max >> 1)
    return block * BLOCK_ELEMENTS + int(np.argmax(magnitudes >= infinity))


def _errors(tally: NDArray[np.int64]) -> Errors:
    """Return the sums of a tally in units of ``2**-290``: 36 bits after the point, times the least scale squared."""
    return Errors(
        squares=_sum(tally[kernels.SQUARES : kernels.ERRORS]),
        error_squares=_sum(tally[kernels.ERRORS : kernels.PEAKS]),
        largest_error=float(tally[kernels.PEAKS :].view(np.float32).max()),
    )


def _sum(slots: NDArray[np.int64]) -> int:
    """Return sums per scale byte, low and high 64 bits each, as one sum in units of the least scale squared."""
    pairs = slots.view(np.uint64).reshape(256, 2)
    used = np.flatnonzero(pairs.any(axis=1))
    return sum(
        (low | high << 64) << 2 * scale for scale, (low, high) in zip(used.tolist(), pairs[used].tolist(), strict=True)
    )


def _check(values: NDArray[Any], codes: NDArray[Any], scales: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Refuse arrays that the loops would read or write wrongly."""
    shape = values.shape
    if len(shape) != 2 or shape[1] % BLOCK_ELEMENTS:
        raise ValueError(
            f"values have shape {list(shape)}, expected rows and columns in whole blocks of {BLOCK_ELEMENTS}"
        )
    for name, array, kind, columns in (
        ("values", values, dtype, shape[1]),
        ("codes", codes, np.dtype(np.uint8), shape[1]),
        ("scales", scales, np.dtype(np.uint8), shape[1] // BLOCK_ELEMENTS),
    ):
        if array.dtype != kind or array.shape != (shape[0], columns):
            raise ValueError(f"{name} are {array.dtype} {list(array.shape)}, expected {kind} {[shape[0], columns]}")
        if array.size and columns > 1 and array.strides[1] != array.itemsize:
            raise ValueError(f"{name} have a stride of {array.strides[1]} bytes within rows, expected {array.itemsize}")


def _place(values: NDArray[Any], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> kernels.Rows:
    """Return where arrays are."""
    return kernels.Rows(
        values=values.ctypes.data,
        codes=codes.ctypes.data,
        scales=scales.ctypes.data,
        values_stride=values.strides[0],
        codes_stride=codes.strides[0],
        scales_stride=scales.strides[0],
        rows=values.shape[0],
        blocks=values.shape[1] // BLOCK_ELEMENTS,
        element_bytes=values.itemsize,
    )
