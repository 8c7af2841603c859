"""From stored tensors back to the format: every format finds itself, look-alikes do not pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.checkpoint.recognise import SUFFIXES, candidates
from tonnage.checkpoint.tally import Kind
from tonnage.formats import quantized as q
from tonnage.formats.storage import MODEL_DTYPE, StorageFormat, plain, stored_shape

V4_MXFP4 = q.mxfp4(codes_suffix=".weight", scale_suffix=".scale", codes_dtype="I8", scale_dtype="F8_E8M0")

FORMATS: dict[str, StorageFormat] = {
    "plain bf16": plain("BF16"),
    "plain f16": plain("F16"),
    "plain f32": plain("F32"),
    "mxfp8": q.mxfp8(),
    "mxfp8 named _inv (MiniMax-M3)": q.mxfp8(scale_suffix=".weight_scale_inv"),
    "mxfp8 with F8_E8M0 scales": q.mxfp8(scale_dtype="F8_E8M0"),
    "mxfp4 packed": q.mxfp4(),
    "mxfp4 of DeepSeek-V4": V4_MXFP4,
    "mxfp4 blocks": q.mxfp4_blocks(),
    "nvfp4 modelopt": q.nvfp4("modelopt", input_scale=True),
    "nvfp4 modelopt, weights only": q.nvfp4("modelopt", input_scale=False),
    "nvfp4 compressed-tensors": q.nvfp4("compressed-tensors", input_scale=True),
    "nvfp4 compressed-tensors, weights only": q.nvfp4("compressed-tensors", input_scale=False),
    "fp8 tensor": q.fp8_tensor(input_scale=False),
    "fp8 tensor, static": q.fp8_tensor(input_scale=True),
    "fp8 channel": q.fp8_channel(scale_dtype="BF16"),
    "fp8 channel, F32": q.fp8_channel(scale_dtype="F32"),
    "int8 channel": q.int8_channel(scale_dtype="BF16"),
    "fp8 block": q.fp8_block(128, 128),
    "fp8 block of compressed-tensors": q.fp8_block(128, 128, suffix=".weight_scale"),
    "fp8 block of DeepSeek-V4": q.fp8_block(128, 128, scale_dtype="F8_E8M0", suffix=".scale"),
    "fp8 block 64": q.fp8_block(64, 64),
    "int4 group 32": q.int_packed(4, 32),
    "int8 group 128": q.int_packed(8, 128),
    "int4 with zero points": q.int_packed(4, 128, symmetric=False),
    "gptq int4": q.gptq(4, 128),
    "gptq int8": q.gptq(8, 64),
    "gptq int2": q.gptq(2, 128),
    "awq int4": q.awq(4, 128),
    **{f"exl3 at {rate}/2": q.exl3(rate, codebook="mul1") for rate in q.EXL3_RATES_TIMES_TWO},
    "exl3 mcg": q.exl3(8, codebook="mcg"),
    "exl3 without marker": q.exl3(8, codebook="3inst"),
    "exl3 with packed signs": q.exl3(8, codebook="3inst", legacy_signs=True),
}


def stored(fmt: StorageFormat, out: int, in_: int) -> dict[str, Kind]:
    pads = fmt.pads_to
    out, in_ = -(-out // pads) * pads, -(-in_ // pads) * pads
    return {
        part.suffix: Kind("BF16" if part.dtype == MODEL_DTYPE else part.dtype, stored_shape(part, out, in_, where=""))
        for part in fmt.parts
    }


def recognised(found: dict[str, Kind], out: int, in_: int) -> list[StorageFormat]:
    """The candidates that would store exactly these tensors."""
    return [fmt for fmt in candidates(found, out, in_) if stored(fmt, out, in_) == found]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("out", "in_"), [(512, 1024), (1536, 7168), (640, 256)])
def test_format_is_recognised_by_what_it_stores(fmt: StorageFormat, out: int, in_: int) -> None:
    assert recognised(stored(fmt, out, in_), out, in_)[0].name == fmt.name


@pytest.mark.parametrize("fmt", [q.fp8_block(128, 128), q.exl3(8, codebook="mul1"), q.exl3(5, codebook="mul1")])
def test_ragged_and_padded_shapes_are_recognised(fmt: StorageFormat) -> None:
    # The latent projection of MLA: 576 outputs are 4.5 blocks of 128; EXL3 stores 640.
    assert recognised(stored(fmt, 576, 7168), 576, 7168)[0].name == fmt.name


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_suffix_a_format_stores_is_known_to_the_matcher(fmt: StorageFormat) -> None:
    assert {part.suffix for part in fmt.parts} <= set(SUFFIXES)


F8, U8 = "F8_E4M3", "U8"
STRANGERS: dict[str, tuple[dict[str, Kind], int, int]] = {
    "nothing": ({}, 64, 64),
    "plain integers": ({".weight": Kind("I32", (64, 64))}, 64, 64),
    "plain transposed": ({".weight": Kind("BF16", (64, 32))}, 32, 64),
    "fp8 without a scale": ({".weight": Kind(F8, (64, 64))}, 64, 64),
    "a scale without codes": ({".weight_scale": Kind("F32", ())}, 64, 64),
    "mxfp8 scales of 16": ({".weight": Kind(F8, (64, 64)), ".weight_scale": Kind(U8, (64, 4))}, 64, 64),
    "mxfp8 codes in E5M2": ({".weight": Kind("F8_E5M2", (64, 64)), ".weight_scale": Kind(U8, (64, 2))}, 64, 64),
    "mxfp8 scales per row only": ({".weight": Kind(F8, (64, 128)), ".weight_scale": Kind(U8, (64, 1))}, 64, 128),
    "complex scales": ({".weight": Kind(F8, (64, 64)), ".weight_scale": Kind("C64", (1, 1))}, 64, 64),
    "nvfp4 without its second scale": ({".weight": Kind(U8, (64, 32)), ".weight_scale": Kind(F8, (64, 4))}, 64, 64),
    "packed without scales": ({".weight_packed": Kind(U8, (64, 32))}, 64, 64),
    "int4 of another width": ({".weight_packed": Kind("I32", (64, 9)), ".weight_scale": Kind("BF16", (64, 2)), ".weight_shape": Kind("I32", (2,))}, 64, 64),
    "int4 without shape": ({".weight_packed": Kind("I32", (64, 8)), ".weight_scale": Kind("BF16", (64, 2))}, 64, 64),
    "empty axes": ({".weight_packed": Kind("I32", (64, 0)), ".weight_scale": Kind("BF16", (64, 0))}, 64, 64),
    "gptq without zero points": ({".qweight": Kind("I32", (8, 64)), ".scales": Kind("F16", (2, 64)), ".g_idx": Kind("I32", (64,))}, 64, 64),
    "gptq without scales": ({".qweight": Kind("I32", (8, 64))}, 64, 64),
    "exl3 with both markers": (stored(q.exl3(8, codebook="mcg"), 128, 128) | {".mul1": Kind("I32", ())}, 128, 128),
    "exl3 half rate with mcg": ({".trellis": Kind("I16", (8, 8, 24 + 32)), ".suh": Kind("F16", (128,)), ".svh": Kind("F16", (128,)), ".mcg": Kind("I32", ())}, 128, 128),
    "exl3 of 4.5 bits": ({".trellis": Kind("I16", (8, 8, 72)), ".suh": Kind("F16", (128,)), ".svh": Kind("F16", (128,)), ".mul1": Kind("I32", ())}, 128, 128),
    "exl3 unpadded": ({".trellis": Kind("I16", (180, 180, 64)), ".suh": Kind("F16", (2880,)), ".svh": Kind("F16", (2880,)), ".mul1": Kind("I32", ())}, 2880, 2880),
    "exl3 table (two axes)": ({".trellis": Kind("I16", (128, 17)), ".suh": Kind("F16", (128,)), ".svh": Kind("F16", (128,))}, 128, 128),
    "exl3 with BF16 signs": ({**stored(q.exl3(8, codebook="mul1"), 128, 128), ".suh": Kind("BF16", (128,))}, 128, 128),
    "a stranger beside plain": ({".weight": Kind("BF16", (64, 64)), ".lora": Kind("BF16", (64, 8))}, 64, 64),
}  # fmt: skip


@pytest.mark.parametrize(("found", "out", "in_"), STRANGERS.values(), ids=STRANGERS)
def test_what_no_format_stores_is_not_recognised(found: dict[str, Kind], out: int, in_: int) -> None:
    assert recognised(found, out, in_) == []


def test_one_scale_per_32_inputs_is_mxfp8_only_if_it_is_an_exponent() -> None:
    """E8M0 bytes are U8 or F8_E8M0; the same grid in F32 is block FP8 of 1 x 32, four times the bytes."""
    names = {
        dtype: recognised({".weight": Kind(F8, (64, 256)), ".weight_scale": Kind(dtype, (64, 8))}, 64, 256)[0].name
        for dtype in ("U8", "F8_E8M0", "F32")
    }
    assert names == {"U8": "mxfp8_e4m3", "F8_E8M0": "mxfp8_e4m3", "F32": "fp8_e4m3_block1x32"}


def test_exponent_scales_on_a_coarse_grid_are_block_fp8_not_mxfp8() -> None:
    found = {".weight": Kind(F8, (256, 512)), ".scale": Kind("F8_E8M0", (2, 4))}
    assert recognised(found, 256, 512)[0].name == "fp8_e4m3_block128x128"


@given(
    fmt=st.sampled_from(sorted(FORMATS)),
    suffix=st.integers(0, 5),
    harm=st.sampled_from(["shape", "dtype", "drop"]),
)
def test_format_with_one_tensor_changed_is_not_the_same_format(fmt: str, suffix: int, harm: str) -> None:
    found = stored(FORMATS[fmt], 512, 1024)
    name = list(found)[suffix % len(found)]
    kind = found.pop(name)
    if harm == "shape":
        found[name] = Kind(kind.dtype, (*kind.shape, 7))
    elif harm == "dtype":
        found[name] = Kind("C64", kind.shape)
    for other in recognised(found, 512, 1024):
        # Legal in itself only where a marker or an input scale has gone: 3inst, or dynamic activations.
        assert harm == "drop"
        assert name in (".mul1", ".mcg", ".input_scale", ".input_global_scale", ".weight_zero_point")
        assert other != FORMATS[fmt]
