"""Against ml_dtypes, with the scale rules written down a second time: as mathematics on float64, not as bit patterns."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tonnage.prepare.mxfp8 import Errors, Figures, decode, quantize

RULES = ("rceil", "floor", "even", "compressed-tensors")
FLOATS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
SIGN = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}
Array = np.ndarray[Any, Any]


# --- the oracle -----------------------------------------------------------------------------------------------------


def values_of(bits: Array, dtype: str) -> Array:
    return bits.view(FLOATS[dtype]).astype(np.float64)


def scale_bytes(largest: Array, rule: str) -> Array:
    """127 + the exponent each rule gives to a positive maximum."""
    mantissa, exponent = np.frexp(largest)  # 0.5 <= mantissa < 1
    mantissa, exponent = mantissa * 2, exponent - 1
    if rule == "rceil":
        fraction, power = np.frexp(largest / 448)
        scale = power - (fraction == 0.5)
    elif rule == "floor":
        scale = exponent - 8
    elif rule == "even":
        rounded = np.floor(mantissa * 8 + 0.5) / 8
        scale = exponent - 8 + (rounded >= 2)
    else:
        scale = exponent - 8 + (mantissa >= 1.75)
    return np.where(largest == 0, 0, np.maximum(scale + 127, 0))


def expected(bits: Array, dtype: str, rule: str) -> tuple[Array, Array]:
    values = values_of(bits, dtype)
    blocks = values.reshape(len(values), -1, 32)
    scales = scale_bytes(np.abs(blocks).max(axis=2), rule)
    scaled = np.ldexp(blocks, 127 - scales[..., None]).clip(-448, 448).astype(np.float32)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(values.shape), scales.astype(np.uint8)


def decoded(codes: Array, scales: Array) -> Array:
    """Exact values, in float64."""
    elements = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return elements * np.repeat(powers, 32, axis=1)


def converted(bits: Array, dtype: Any, **how: Any) -> tuple[Array, Array, Figures]:
    codes = np.full(bits.shape, 0x55, np.uint8)
    scales = np.full((len(bits), bits.shape[1] // 32), 0x55, np.uint8)
    return codes, scales, quantize(bits, dtype, codes, scales, **how)


def check(bits: Array, dtype: str, rule: str) -> None:
    codes, scales, figures = converted(bits, dtype, rule=rule)
    expected_codes, expected_scales = expected(bits, dtype, rule)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert figures.first_nonfinite is None


# --- sources --------------------------------------------------------------------------------------------------------


def bits_of(values: Array, dtype: str) -> Array:
    return np.ascontiguousarray(values.astype(FLOATS[dtype])).view(np.uint32 if dtype == "F32" else np.uint16)


def any_finite(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> Array:
    """Every bit pattern but the non-finite ones is as likely as any other."""
    magnitude = rng.integers(0, INFINITY[dtype], shape)
    return (magnitude + SIGN[dtype] * rng.integers(0, 2, shape)).astype(np.uint32 if dtype == "F32" else np.uint16)


def adversarial(dtype: str) -> Array:
    """Rows of what goes wrong elsewhere, each under maxima from one end of the range to the other."""
    rng = np.random.default_rng(7)
    limits = {"BF16": (-133, 127), "F16": (-24, 15), "F32": (-149, 127)}[dtype]
    ties = np.array([1.0625, 1.1875, 1.3125, 1.4375, 1.5625, 1.6875, 1.8125, 1.9375])
    rows: list[Array] = [np.zeros(32), np.full(32, -0.0), np.where(np.arange(32) % 2, 0.0, -0.0)]
    for power in range(*limits):
        for mantissa in (1, 1.5, 1.74, 1.75, 1.7578125, 1.9296875, 1.9375, 1.9921875):
            top = math.ldexp(mantissa, power)
            rows.append(np.r_[top, np.full(31, math.ldexp(1, limits[0]))])  # one huge among the smallest subnormals
            rows.append(np.r_[-top, np.zeros(31)])
        top = math.ldexp(1.75, power)
        rows.append(np.r_[top, np.ldexp(np.tile(ties, 4)[:31], power - np.arange(31) // 2)])  # ties, going down
        rows.append(np.r_[top, np.ldexp(np.arange(31) + 0.5, power - 17)])  # ties between subnormal codes
        rows.append(top * rng.uniform(-1, 1, 32))
        near = np.nextafter(np.float32(top), np.float32([0, np.inf])).astype(np.float64)
        rows += [np.r_[near[0], np.ones(31) * near[0] / 3], np.r_[near[1], np.ones(31) * near[1] / 3]]
    with np.errstate(over="ignore"):
        bits = bits_of(np.array(rows), dtype)
    return bits[np.isfinite(values_of(bits, dtype)).all(axis=1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_bit_patterns_and_weights(dtype: str, rule: str) -> None:
    rng = np.random.default_rng(1)
    check(any_finite(rng, dtype, (257, 96)), dtype, rule)
    check(bits_of(rng.normal(0, 0.02, (256, 1024)), dtype), dtype, rule)
    check(bits_of(rng.standard_cauchy((256, 256)) * 2**-9, dtype), dtype, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_adversarial_blocks(dtype: str, rule: str) -> None:
    bits = adversarial(dtype)
    assert len(bits) > 400
    check(bits, dtype, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_finite_value_as_a_block_maximum(dtype: str, rule: str) -> None:
    magnitudes = np.arange(INFINITY[dtype], dtype=np.uint16)
    tops = np.r_[magnitudes, magnitudes | SIGN[dtype]].astype(np.uint16)
    below = np.random.default_rng(2).integers(0, 1 << 15, (len(tops), 32)) % (tops & 0x7FFF).clip(1)[:, None]
    rows = below.astype(np.uint16)
    rows[np.arange(len(tops)), np.arange(len(tops)) % 32] = tops
    check(rows, dtype, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_value_under_every_scale(dtype: str, rule: str) -> None:
    patterns = np.zeros(-(-(1 << 16) // 31) * 31, np.uint16)
    patterns[: 1 << 16] = np.arange(1 << 16)
    patterns = patterns.reshape(-1, 31)
    seen = set()
    exponents = range(1, 255) if dtype == "BF16" else range(1, 31)
    for exponent in exponents:
        top = (exponent << 7) + 0x60 if dtype == "BF16" else (exponent << 10) + 0x300
        kept = np.where((patterns & 0x7FFF) <= top, patterns, 0).astype(np.uint16)
        bits = np.c_[np.full(len(kept), top, np.uint16), kept]
        codes, scales, _ = converted(bits, dtype, rule=rule, errors=False)
        expected_codes, expected_scales = expected(bits, dtype, rule)
        assert np.array_equal(codes, expected_codes)
        assert np.array_equal(scales, expected_scales)
        seen |= set(np.unique(scales).tolist())
    more = rule == "compressed-tensors"
    assert seen == set(range(247 + more) if dtype == "BF16" else range(105 + more, 135 + more))


# facts of the rules, by hand: the maximum, then the bytes under floor, even, rceil and compressed-tensors
BYTES = {
    1.0: (119, 119, 119, 119), 1.74: (119, 119, 119, 119), 1.75: (119, 119, 119, 120), 1.76: (119, 119, 120, 120),
    1.9: (119, 119, 120, 120), 1.9375: (119, 120, 120, 120), 256.0: (127, 127, 127, 127), 440.0: (127, 127, 127, 127),
    447.0: (127, 127, 127, 127), 448.0: (127, 127, 127, 128), 449.0: (127, 127, 128, 128), 450.0: (127, 127, 128, 128),
    0.0: (0, 0, 0, 0), 2.0**-149: (0, 0, 0, 0), 2.0**-118: (1, 1, 1, 1), 2.0**127: (246, 246, 246, 246),
    1.9921875 * 2.0**127: (246, 247, 247, 247),
}  # fmt: skip


@pytest.mark.parametrize(("largest", "expected_bytes"), BYTES.items())
def test_scale_byte(largest: float, expected_bytes: tuple[int, ...]) -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, 5] = -largest
    found = [
        converted(block.view(np.uint32), "F32", rule=rule)[1].item()
        for rule in ("floor", "even", "rceil", "compressed-tensors")
    ]
    assert tuple(found) == expected_bytes


def test_447_is_448_in_bf16() -> None:
    bits = bits_of(np.full((1, 32), 447.0), "BF16")
    assert converted(bits, "BF16", rule="compressed-tensors")[1].item() == 128


def test_floor_clamps_and_counts_it() -> None:
    bits = bits_of(np.repeat([[460.0], [450.0]], 32, axis=1), "BF16")
    codes, scales, figures = converted(bits, "BF16", rule="floor")
    assert (scales == 127).all()
    assert (codes == 0x7E).all()
    assert figures.saturated_blocks == 2
    assert figures.errors is not None
    assert figures.errors.largest_error == 12.0
    assert converted(bits, "BF16", rule="rceil")[2].saturated_blocks == 0


# --- back -----------------------------------------------------------------------------------------------------------


def test_every_code_under_every_scale_decodes() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    wide, narrow = np.zeros(codes.shape, np.float32), np.zeros(codes.shape, np.uint16)
    decode(codes, scales, wide)
    decode(codes, scales, narrow)
    with np.errstate(over="ignore"):
        exact = decoded(codes, scales).astype(np.float32)
    np.testing.assert_array_equal(wide, exact)
    np.testing.assert_array_equal(np.signbit(wide), codes >= 0x80)
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(narrow.view(ml_dtypes.bfloat16).astype(np.float32), rounded)
    np.testing.assert_array_equal(narrow >= 0x8000, codes >= 0x80)


# --- what is not finite ---------------------------------------------------------------------------------------------

# inf, 3, -1e38, -inf, 0 in one block; the bytes are torchao 0.18.0's, but for compressed-tensors
INFINITE = {
    "rceil": (254, [0x7E, 0, 0xB1, 0xFE, 0]),
    "floor": (247, [0x7E, 0, 0xE9, 0xFE, 0]),
    "even": (247, [0x7E, 0, 0xE9, 0xFE, 0]),
    "compressed-tensors": (255, [0x7F] * 5),
}


@pytest.mark.parametrize(("rule", "scale", "starts"), [(rule, *found) for rule, found in INFINITE.items()])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_infinity_becomes_the_largest(dtype: str, rule: str, scale: int, starts: list[int]) -> None:
    block = np.zeros((1, 32))
    block[0, :4] = np.inf, 3, -1e38, -np.inf
    codes, scales, figures = converted(bits_of(block, dtype), dtype, rule=rule)
    assert (scales.item(), codes[0, :5].tolist()) == (scale, starts)
    assert (figures.nonfinite_blocks, figures.first_nonfinite, figures.largest) == (1, 0, 0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_takes_its_block_and_no_other(dtype: str, rule: str) -> None:
    values = np.ones((3, 96))
    values[1, 40], values[1, 41], values[2, 0] = np.nan, np.inf, -np.inf
    bits = bits_of(values, dtype)
    codes, scales, figures = converted(bits, dtype, rule=rule)
    assert (codes[1, 32:64] == 0x7F).all()
    assert scales[1].tolist() == [119, 255, 119]
    assert (codes[0] == 0x78).all()
    assert figures.first_nonfinite == 96 + 40
    assert figures.nonfinite_blocks == 2
    assert figures.errors is not None
    assert figures.errors.error_squares == 0
    assert figures.errors.squares == (9 - 2) * 32 << 290
    bits[1, 40] |= SIGN[dtype]
    assert converted(bits, dtype, rule=rule)[2] == figures


def test_every_pattern_of_bf16_that_is_not_finite_is_found() -> None:
    patterns = np.r_[0x7F80:0x8000, 0xFF80:0x10000].astype(np.uint16)
    bits = np.zeros((len(patterns), 32), np.uint16)
    bits[:, 9] = patterns
    figures = [converted(bits[row : row + 1], "BF16")[2] for row in range(len(bits))]
    assert {found.first_nonfinite for found in figures} == {9}
    assert converted(bits, "BF16")[2].nonfinite_blocks == 256


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_figures_are_those_of_exact_arithmetic(dtype: str, rule: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.02, (300, 512)) * np.exp2(rng.integers(-12, 12, (300, 1)))
    values[17] = 0
    bits = bits_of(values, dtype)
    codes, scales, figures = converted(bits, dtype, rule=rule)
    source = values_of(bits, dtype)
    error = source - decoded(codes, scales)
    assert figures.errors is not None
    assert figures.errors.relative == pytest.approx(np.linalg.norm(error) / np.linalg.norm(source), rel=1e-6)
    assert figures.errors.sqnr_db == pytest.approx(10 * np.log10((source**2).sum() / (error**2).sum()), rel=1e-6)
    assert math.ldexp(figures.errors.squares, -290) == pytest.approx((source**2).sum(), rel=1e-6)
    assert figures.errors.largest_error == np.abs(error).max()
    assert figures.largest == np.abs(source).max()
    assert figures.elements == source.size
    assert figures.zero_blocks == 16


def test_figures_at_the_ends_of_the_range() -> None:
    for value, tolerance in ((3.3e38, 1e-6), (1e-38, 1e-6), (1e-40, 1e-4)):
        source = np.full((4, 32), value, np.float32)
        codes, scales, figures = converted(source.view(np.uint32), "F32")
        exact = source.astype(np.float64)
        error = np.linalg.norm(exact - decoded(codes, scales)) / np.linalg.norm(exact)
        assert figures.errors is not None
        assert figures.errors.relative == pytest.approx(error, rel=tolerance)


def test_no_error_is_no_error() -> None:
    figures = converted(np.zeros((2, 32), np.uint16), "BF16")[2]
    assert figures.errors == Errors()
    assert (Errors().relative, Errors().sqnr_db) == (0.0, math.inf)
    assert figures.zero_blocks == 2


def test_errors_are_left_out_on_request() -> None:
    bits = bits_of(np.random.default_rng(4).normal(size=(8, 64)), "BF16")
    codes, scales, figures = converted(bits, "BF16", errors=False)
    again, scales_again, full = converted(bits, "BF16")
    assert figures.errors is None
    assert (figures.largest, figures.elements) == (full.largest, full.elements)
    assert np.array_equal(codes, again)
    assert np.array_equal(scales, scales_again)
    assert (figures + full).errors is None


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_nothing_is_written_beside_a_strided_result() -> None:
    bits = bits_of(np.random.default_rng(5).normal(size=(6, 128)), "BF16")
    bits.flags.writeable = False
    codes, scales, figures = converted(bits[:, 32:96], "BF16")
    wide, wide_scales = np.full((6, 200), 0x55, np.uint8), np.full((6, 9), 0x55, np.uint8)
    assert quantize(bits[:, 32:96], "BF16", wide[:, 3:67], wide_scales[:, 1:3]) == figures
    assert np.array_equal(wide[:, 3:67], codes)
    assert np.array_equal(wide_scales[:, 1:3], scales)
    assert (np.delete(wide, np.s_[3:67], axis=1) == 0x55).all()
    assert (np.delete(wide_scales, np.s_[1:3], axis=1) == 0x55).all()
    values = np.full((6, 80), 7, np.float32)
    decode(wide[:, 3:67], wide_scales[:, 1:3], values[:, 8:72])
    assert np.array_equal(values[:, 8:72], decoded(codes, scales))
    assert (np.delete(values, np.s_[8:72], axis=1) == 7).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)])
def test_nothing_becomes_nothing(shape: tuple[int, int]) -> None:
    assert converted(np.zeros(shape, np.uint16), "F16", threads=2)[2] == Figures()


WRONG = {
    "width": ("uint16", (2, 48), "BF16", (2, 48), (2, 1), "whole blocks of 32"),
    "one axis": ("uint16", (64,), "BF16", (64,), (2,), "expected rows"),
    "bits": ("uint16", (2, 64), "F32", (2, 64), (2, 2), "values are uint16"),
    "codes": ("uint16", (2, 64), "BF16", (2, 32), (2, 2), "codes are uint8"),
    "scales": ("uint16", (2, 64), "BF16", (2, 64), (2, 4), "scales are uint8"),
    "dtype": ("uint16", (2, 64), "F64", (2, 64), (2, 2), "no conversion of F64"),
}


@pytest.mark.parametrize(("bits", "shape", "dtype", "codes", "scales", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arrays_are_refused(bits: str, shape: Any, dtype: Any, codes: Any, scales: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(np.zeros(shape, bits), dtype, np.zeros(codes, np.uint8), np.zeros(scales, np.uint8))


def test_gaps_within_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="stride of 4 bytes"):
        converted(np.zeros((2, 128), np.uint16)[:, ::2], "BF16")


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        decode(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8), np.zeros((1, 32)))  # type: ignore[arg-type]
