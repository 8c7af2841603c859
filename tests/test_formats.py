"""Storage formats: bytes worked out by hand, cut grains, refusals, and the laws of cutting."""

from __future__ import annotations

from math import lcm, prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import UnknownFormatError
from tonnage.formats import quantized as q
from tonnage.formats.dtypes import DTYPE_BITS, payload_bytes
from tonnage.formats.storage import (
    MODEL_DTYPE,
    Dim,
    Part,
    StorageFormat,
    plain,
    stored_shape,
)

V4_MXFP4 = q.mxfp4(codes_suffix=".weight", scale_suffix=".scale", codes_dtype="I8", scale_dtype="F8_E8M0")

# [out, in] -> bytes, as a sum of the stored tensors in file order.
CASES: dict[str, tuple[StorageFormat, int, int, list[int]]] = {
    "plain bf16": (plain(), 4096, 7168, [4096 * 7168 * 2]),
    "plain f32": (plain("F32"), 8, 3, [96]),
    "mxfp8": (q.mxfp8(), 4096, 7168, [29_360_128, 917_504]),
    "mxfp8, one block": (q.mxfp8(), 1, 32, [32, 1]),
    "mxfp4 packed": (q.mxfp4(), 3072, 3584, [5_505_024, 344_064]),
    "mxfp4 blocks (gpt-oss)": (q.mxfp4_blocks(), 5760, 2880, [8_294_400, 518_400]),
    "mxfp4 with I8 codes (DeepSeek-V4)": (V4_MXFP4, 2048, 4096, [4_194_304, 262_144]),
    "nvfp4 modelopt": (q.nvfp4("modelopt", input_scale=True), 2048, 7168, [7_340_032, 917_504, 4, 4]),
    "nvfp4 modelopt, weights only": (q.nvfp4("modelopt", input_scale=False), 2048, 7168, [7_340_032, 917_504, 4]),
    "nvfp4 compressed-tensors": (q.nvfp4("compressed-tensors", input_scale=True), 2048, 7168, [7_340_032, 917_504, 4, 4]),
    "fp8 tensor": (q.fp8_tensor(input_scale=False), 512, 256, [131_072, 4]),
    "fp8 tensor, static": (q.fp8_tensor(input_scale=True), 512, 256, [131_072, 4, 4]),
    "fp8 channel, BF16 scales": (q.fp8_channel(), 512, 256, [131_072, 1024]),
    "int8 channel, BF16 scales": (q.int8_channel(), 512, 256, [131_072, 1024]),
    "fp8 channel, F32 scales": (q.fp8_channel(scale_dtype="F32"), 512, 256, [131_072, 2048]),
    "fp8 block": (q.fp8_block(128, 128), 1536, 7168, [11_010_048, 12 * 56 * 4]),
    "fp8 block, ragged last rows: 576 are 4 blocks and a half": (q.fp8_block(128, 128), 576, 7168, [4_128_768, 5 * 56 * 4]),
    "fp8 block, ragged both ways": (q.fp8_block(128, 128), 129, 130, [16_770, 2 * 2 * 4]),
    "fp8 block, E8M0 scales": (q.fp8_block(128, 128, scale_dtype="F8_E8M0", suffix=".scale"), 576, 7168, [4_128_768, 280]),
    "int4 packed, group 32": (q.int_packed(4, 32), 2048, 7168, [2048 * 896 * 4, 2048 * 224 * 2, 8]),
    "int8 packed, group 128": (q.int_packed(8, 128), 64, 256, [64 * 64 * 4, 64 * 2 * 2, 8]),
    "int4 packed, zero points": (q.int_packed(4, 128, symmetric=False), 64, 256, [64 * 32 * 4, 64 * 2 * 2, 8 * 2 * 4, 8]),
    "gptq int4": (q.gptq(4, 128), 4096, 4096, [512 * 4096 * 4, 32 * 512 * 4, 32 * 4096 * 2, 4096 * 4]),
    "awq int4": (q.awq(4, 128), 4096, 14_336, [14_336 * 512 * 4, 112 * 512 * 4, 112 * 4096 * 2]),
    # A published 3.5 bpw drafter (mcg), fc: 5 taps x 2048 = 10240 inputs, 2048 outputs; trellis [640, 128, 64] is 4 bits.
    "exl3 drafter fc": (q.exl3(8, codebook="mcg"), 2048, 10_240, [10_485_760, 20_480, 4096, 4]),
    "exl3 default codebook": (q.exl3(8, codebook="3inst"), 128, 128, [8192, 256, 256]),
    "exl3 legacy signs": (q.exl3(4, codebook="3inst", legacy_signs=True), 256, 128, [8192, 16, 32]),
    "exl3 padded to 128: 576 outputs are stored as 640": (q.exl3(8, codebook="mul1"), 576, 7168, [640 * 7168 // 2, 14_336, 1280, 4]),
    "exl3 padded both ways: 2880 is stored as 2944": (q.exl3(4, codebook="mul1"), 2880, 2880, [2944 * 2944 // 4, 5888, 5888, 4]),
}  # fmt: skip


def stored_bytes(fmt: StorageFormat, out: int, in_: int, where: str = "weight") -> int:
    out, in_ = (-(-size // fmt.pads_to) * fmt.pads_to for size in (out, in_))
    return sum(
        payload_bytes("BF16" if part.dtype == MODEL_DTYPE else part.dtype, stored_shape(part, out, in_, where=where))
        for part in fmt.parts
    )


@pytest.mark.parametrize(("fmt", "out", "in_", "parts"), CASES.values(), ids=CASES)
def test_stored_bytes(fmt: StorageFormat, out: int, in_: int, parts: list[int]) -> None:
    assert stored_bytes(fmt, out, in_) == sum(parts)
    padded = [-(-size // fmt.pads_to) * fmt.pads_to for size in (out, in_)]
    each = [
        payload_bytes("BF16" if part.dtype == MODEL_DTYPE else part.dtype, stored_shape(part, *padded, where="weight"))
        for part in fmt.parts
    ]
    assert each == parts


def test_shapes_of_the_published_drafter() -> None:
    shapes = [stored_shape(part, 2048, 10_240, where="fc") for part in q.exl3(8, codebook="mcg").parts]
    assert shapes == [(640, 128, 64), (10_240,), (2048,), ()]
    assert [part.suffix for part in q.exl3(8, codebook="mcg").parts] == [".trellis", ".suh", ".svh", ".mcg"]


def test_scalars_of_nvfp4_are_scalars_for_modelopt_and_vectors_of_one_for_compressed_tensors() -> None:
    modelopt, ct = (q.nvfp4(style, input_scale=True) for style in ("modelopt", "compressed-tensors"))
    assert [(p.suffix, stored_shape(p, 64, 64, where="")) for p in modelopt.parts] == [
        (".weight", (64, 32)), (".weight_scale", (64, 4)), (".weight_scale_2", ()), (".input_scale", ()),
    ]  # fmt: skip
    assert [(p.suffix, stored_shape(p, 64, 64, where="")) for p in ct.parts] == [
        (".weight_packed", (64, 32)), (".weight_scale", (64, 4)), (".weight_global_scale", (1,)), (".input_global_scale", (1,)),
    ]  # fmt: skip


def test_gptq_and_awq_store_inputs_first() -> None:
    # 4 bits: 8 codes per word. GPTQ packs inputs, AWQ outputs.
    assert [stored_shape(p, 64, 256, where="") for p in q.gptq(4, 128).parts] == [(32, 64), (2, 8), (2, 64), (256,)]
    assert [stored_shape(p, 64, 256, where="") for p in q.awq(4, 128).parts] == [(256, 8), (2, 8), (2, 64)]


def test_bits_per_element_of_the_microscaling_formats() -> None:
    elements = 1024 * 1024
    assert stored_bytes(q.mxfp8(), 1024, 1024) * 8 * 100 == elements * 825  # 8.25 bits
    assert stored_bytes(q.mxfp4(), 1024, 1024) * 8 * 100 == elements * 425  # 4.25 bits


# Rate -> third axis of the trellis (exllamav3: 16 x bits, and 24, 40, 56 for the half rates) and bytes of 256 x 384.
RATES = {
    2: (16, 12_288), 3: (24, 18_432), 4: (32, 24_576), 5: (40, 30_720), 6: (48, 36_864), 7: (56, 43_008),
    8: (64, 49_152), 10: (80, 61_440), 12: (96, 73_728), 14: (112, 86_016), 16: (128, 98_304),
}  # fmt: skip


@pytest.mark.parametrize(("twice", "words", "trellis"), [(rate, *facts) for rate, facts in RATES.items()])
def test_exl3_rates(twice: int, words: int, trellis: int) -> None:
    fmt = q.exl3(twice, codebook="mul1")
    assert stored_shape(fmt.parts[0], 384, 256, where="") == (16, 24, words)
    assert stored_bytes(fmt, 384, 256) == trellis + 2 * 256 + 2 * 384 + 4
    assert fmt.name == f"exl3_{twice // 2}{'.5' if twice % 2 else ''}bit"


# Published metadata of a drafter (fc, attention query), a padded and a half-rate tensor: in, out, rate x 2, then bytes of
# trellis, suh, svh, marker and in all. Carried over from a set of EXL3 vectors checked against exllamav3 1.6.5.
PUBLISHED = {
    "drafter fc": (10_240, 2048, 8, [10_485_760, 20_480, 4096, 4], 10_510_340),
    "drafter query": (2048, 4096, 8, [4_194_304, 4096, 8192, 4], 4_206_596),
    "2880 padded to 2944": (2880, 2880, 6, [3_250_176, 5888, 5888, 4], 3_261_956),
    "half rate": (4096, 1024, 5, [1_310_720, 8192, 2048, 4], 1_320_964),
}


@pytest.mark.parametrize(("in_", "out", "twice", "parts", "total"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_exl3_tensors(in_: int, out: int, twice: int, parts: list[int], total: int) -> None:
    assert sum(parts) == total
    assert stored_bytes(q.exl3(twice, codebook="mul1"), out, in_) == total


NO_RATES = {(t, c) for t in (0, 1, 9, 11, 13, 15, 17, 18, -2) for c in ("3inst", "mcg", "mul1")}
NO_RATES |= {(t, c) for t in (3, 5, 7) for c in ("3inst", "mcg")}


@pytest.mark.parametrize(("twice", "codebook"), sorted(NO_RATES))
def test_rate_exllamav3_does_not_read_is_refused(twice: int, codebook: Any) -> None:
    with pytest.raises(UnknownFormatError, match=r"exl3: unknown rate; expected 1\.\.8 bits"):
        q.exl3(twice, codebook=codebook)


# (outputs, inputs) a cut must be a multiple of.
GRAINS = {
    "plain": (plain(), 1, 1),
    "mxfp8": (q.mxfp8(), 1, 32),
    "mxfp4": (q.mxfp4(), 1, 32),
    "mxfp4 blocks": (q.mxfp4_blocks(), 1, 32),
    "nvfp4": (q.nvfp4("modelopt", input_scale=True), 1, 16),
    "fp8 tensor": (q.fp8_tensor(input_scale=True), 1, 1),
    "fp8 channel": (q.fp8_channel(), 1, 1),
    "int8 channel": (q.int8_channel(), 1, 1),
    "fp8 block": (q.fp8_block(128, 64), 128, 64),
    "int4": (q.int_packed(4, 32), 1, 32),
    "int4 with zero points": (q.int_packed(4, 32, symmetric=False), 8, 32),
    "gptq": (q.gptq(4, 128), 8, 128),
    "gptq 8 bits": (q.gptq(8, 64), 4, 64),
    "awq": (q.awq(4, 128), 8, 128),
    "exl3": (q.exl3(4, codebook="mul1"), 128, 128),
}


@pytest.mark.parametrize(("fmt", "out", "in_"), GRAINS.values(), ids=GRAINS)
def test_cut_grains(fmt: StorageFormat, out: int, in_: int) -> None:
    assert (fmt.out_grain, fmt.in_grain) == (out, in_)


UNEVEN = {
    "mxfp8 inputs": (q.mxfp8(), 64, 48, "in extent is not whole in .weight_scale; expected a multiple of 32; found 48"),
    "mxfp4 inputs": (q.mxfp4(), 64, 40, "in extent is not whole in .weight_scale; expected a multiple of 32; found 40"),
    "nvfp4 inputs": (q.nvfp4("modelopt", input_scale=False), 64, 24, "expected a multiple of 16; found 24"),
    "int4 group": (q.int_packed(4, 32), 64, 48, "in extent is not whole in .weight_scale; expected a multiple of 32; found 48"),
    "gptq zero points": (q.gptq(4, 32), 12, 64, "out extent is not whole in .qzeros; expected a multiple of 8; found 12"),
    "awq codes": (q.awq(4, 32), 12, 64, "out extent is not whole in .qweight; expected a multiple of 8; found 12"),
}  # fmt: skip


@pytest.mark.parametrize(("fmt", "out", "in_", "text"), UNEVEN.values(), ids=UNEVEN)
def test_extent_that_is_not_whole_is_refused(fmt: StorageFormat, out: int, in_: int, text: str) -> None:
    with pytest.raises(UnknownFormatError) as caught:
        stored_bytes(fmt, out, in_, where="layers.0.up")
    assert str(caught.value).startswith("layers.0.up: ")
    assert text in str(caught.value)


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 6, 7, 16, 32, -4])
def test_int_width_that_does_not_pack_is_refused(bits: int) -> None:
    for make in (lambda: q.int_packed(bits, 32), lambda: q.gptq(bits, 32), lambda: q.awq(bits, 32)):
        with pytest.raises(UnknownFormatError, match=r"int format: unknown width; expected 2, 4 or 8 bits"):
            make()


def test_grain_finer_than_a_stored_index_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="cuts every 16, one index covers 32"):
        StorageFormat(name="wrong", parts=(Part(".weight", "U8", (Dim("out"), Dim("in", 32))),), in_grain=16)


DTYPES = {
    "scalar": ("F32", (), 4),
    "empty": ("BF16", (0, 64), 0),
    "two halves of a byte": ("F4", (2,), 1),
    "six bits": ("F6_E2M3", (4,), 3),
    "complex": ("C64", (3,), 24),
}


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), DTYPES.values(), ids=DTYPES)
def test_payload_bytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert payload_bytes(dtype, shape) == nbytes


def test_part_of_a_byte_and_unknown_dtype_are_refused() -> None:
    with pytest.raises(UnknownFormatError, match=r"x: elements do not fill whole bytes; found F4 \[3\]"):
        payload_bytes("F4", (3,), where="x")
    with pytest.raises(UnknownFormatError, match=r"unknown dtype; expected one of .*; found bfloat16"):
        payload_bytes("bfloat16", (3,))


ALL = [fmt for fmt, *_ in CASES.values()] + [q.exl3(rate, codebook="mul1") for rate in RATES]


@given(st.sampled_from(ALL), st.integers(1, 12), st.integers(1, 12))
def test_stored_bytes_is_the_sum_over_the_parts(fmt: StorageFormat, out: int, in_: int) -> None:
    out, in_ = out * lcm(fmt.out_grain, 8), in_ * lcm(fmt.in_grain, 8)
    by_hand = 0
    for part in fmt.parts:
        extents = {"out": out, "in": in_}
        sizes = [dim.per if dim.axis == "none" else -(-extents[dim.axis] // dim.per) for dim in part.dims]
        by_hand += prod(sizes) * DTYPE_BITS["BF16" if part.dtype == MODEL_DTYPE else part.dtype] // 8
    assert stored_bytes(fmt, out, in_) == by_hand


@given(st.sampled_from(ALL), st.sampled_from(["out", "in"]), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_slicing_on_grains_conserves_bytes(fmt: StorageFormat, axis: Any, shares: list[int]) -> None:
    """What carries the axis is cut without loss; what does not is whole in every slice."""
    grain = fmt.out_grain if axis == "out" else fmt.in_grain
    other = lcm(fmt.out_grain, fmt.in_grain, 8)
    grain = lcm(grain, fmt.pads_to)

    def parts(extent: int) -> list[int]:
        out, in_ = (extent, other) if axis == "out" else (other, extent)
        return [
            payload_bytes("BF16" if p.dtype == MODEL_DTYPE else p.dtype, stored_shape(p, out, in_, where=""))
            for p in fmt.parts
        ]

    whole = parts(sum(shares) * grain)
    slices = [parts(share * grain) for share in shares]
    for number, part in enumerate(fmt.parts):
        cut = [piece[number] for piece in slices]
        assert sum(cut) == whole[number] if any(dim.axis == axis for dim in part.dims) else set(cut) == {whole[number]}
