"""Laws of MXFP8 conversion: what a conversion may lose, and that how the work is divided changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tonnage.prepare.mxfp8 import Figures, decode, quantize

RULES = ("rceil", "floor", "even", "compressed-tensors")
DTYPES = ("BF16", "F16", "F32")
INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
Array = np.ndarray[Any, Any]

rules = st.sampled_from(RULES)
# The first call of a dtype compiles, which takes longer than an example may.
lenient = settings(deadline=None)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, *, finite: bool = True) -> tuple[Array, Any]:
    """Bits of a tensor: any patterns, of which some blocks are zero and some rows within a few powers of two."""
    dtype = draw(st.sampled_from(dtypes))
    rows, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind, sign = (np.uint32, 1 << 31) if dtype == "F32" else (np.uint16, 1 << 15)
    top = draw(st.integers(1, INFINITY[dtype] if finite else sign))
    bottom = draw(st.integers(0, top - 1))
    bits = rng.integers(bottom, top, (rows, blocks * 32)) * rng.integers(0, 2, (rows, blocks)).repeat(32, axis=1)
    return (bits + sign * rng.integers(0, 2, bits.shape)).astype(kind), dtype


def converted(bits: Array, dtype: Any, **how: Any) -> tuple[Array, Array, Figures]:
    codes, scales = np.empty(bits.shape, np.uint8), np.empty((len(bits), bits.shape[1] // 32), np.uint8)
    return codes, scales, quantize(bits, dtype, codes, scales, **how)


def values(codes: Array, scales: Array) -> Array:
    out = np.empty(codes.shape, np.float32)
    decode(codes, scales, out)
    return out


@lenient
@given(tensor=tensors(finite=False), rule=rules, data=st.data())
def test_windows_of_rows_write_the_same_bytes_and_add_up_to_the_same_figures(
    tensor: tuple[Array, Any], rule: str, data: st.DataObject
) -> None:
    bits, dtype = tensor
    codes, scales, figures = converted(bits, dtype, rule=rule)
    cuts = [*sorted(data.draw(st.sets(st.integers(0, len(bits))))), len(bits)]
    total, begin = Figures(), 0
    for end in cuts:
        window = converted(bits[begin:end], dtype, rule=rule)
        assert np.array_equal(window[0], codes[begin:end])
        assert np.array_equal(window[1], scales[begin:end])
        total, begin = total + window[2], end
    assert total == figures


@lenient
@given(tensor=tensors(), rule=rules, data=st.data())
def test_columns_cut_between_blocks_convert_alike(tensor: tuple[Array, Any], rule: str, data: st.DataObject) -> None:
    bits, dtype = tensor
    codes, scales, figures = converted(bits, dtype, rule=rule)
    cut = data.draw(st.integers(0, scales.shape[1]))
    left, right = converted(bits[:, : cut * 32], dtype, rule=rule), converted(bits[:, cut * 32 :], dtype, rule=rule)
    assert np.array_equal(np.hstack([left[0], right[0]]), codes)
    assert np.array_equal(np.hstack([left[1], right[1]]), scales)
    assert left[2] + right[2] == figures


@lenient
@given(tensor=tensors(finite=False), rule=rules, threads=st.integers(2, 4))
def test_threads_change_nothing(tensor: tuple[Array, Any], rule: str, threads: int) -> None:
    bits, dtype = tensor
    alone, together = converted(bits, dtype, rule=rule), converted(bits, dtype, rule=rule, threads=threads)
    assert np.array_equal(alone[0], together[0])
    assert np.array_equal(alone[1], together[1])
    assert alone[2] == together[2]


@lenient
@given(tensor=tensors(), rule=rules)
def test_an_element_loses_half_a_step_at_most(tensor: tuple[Array, Any], rule: str) -> None:
    bits, dtype = tensor
    codes, scales, figures = converted(bits, dtype, rule=rule)
    source = _floats(bits, dtype)
    scale = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=1)
    kept = np.minimum(np.abs(source), 448 * scale)
    elements = values(codes, np.full_like(scales, 127)).astype(np.float64)
    error = np.abs(kept - np.abs(elements * scale))  # not by float32, where 1.94 * 2**127 becomes 2**128
    assert (error <= np.maximum(kept / 16, scale * 2.0**-10)).all()
    assert np.array_equal(np.signbit(source), codes >= 0x80)
    if rule in {"rceil", "compressed-tensors"}:
        assert (np.abs(source) == kept).all()
        assert figures.saturated_blocks == 0


@lenient
@given(tensor=tensors(("F32",)), rule=st.sampled_from(["rceil", "floor", "even"]))
def test_what_was_decoded_converts_without_loss(tensor: tuple[Array, Any], rule: str) -> None:
    bits, _ = tensor
    once = values(*converted(bits, "F32", rule=rule)[:2])
    assume(np.isfinite(once).all())
    codes, scales, figures = converted(once.view(np.uint32), "F32", rule=rule)
    assert np.array_equal(values(codes, scales).view(np.uint32), once.view(np.uint32))
    assert figures.errors is not None
    assert (figures.errors.error_squares, figures.errors.largest_error) == (0, 0.0)


@lenient
@given(tensor=tensors(("BF16", "F16")), rule=rules)
def test_a_wider_source_of_the_same_values_converts_alike(tensor: tuple[Array, Any], rule: str) -> None:
    bits, dtype = tensor
    wide = _floats(bits, dtype).astype(np.float32).view(np.uint32)
    narrow, widened = converted(bits, dtype, rule=rule), converted(wide, "F32", rule=rule)
    assert np.array_equal(narrow[0], widened[0])
    assert np.array_equal(narrow[1], widened[1])
    assert narrow[2] == widened[2]


def _floats(bits: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16 if dtype == "F16" else np.float32).astype(np.float64)
