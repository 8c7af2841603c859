"""The storage formats quantised checkpoints use, each as data.

Every function returns a :class:`~tonnage.formats.storage.StorageFormat`; arguments are the facts a config states (bits,
group size, block, rate). Suffixes are the ones found in files, so that real headers can be recognised by them.

Sources:
    mxfp8, nvfp4, fp8: compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0 export code; DeepSeek-V3 README_WEIGHTS.
    int4: AutoGPTQ / AutoAWQ tensor layouts as vLLM 0.33.0 reads them. exl3: exllamav3 1.6.5, see docs/formats.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tonnage.errors import Problem, UnknownFormatError
from tonnage.formats.storage import MODEL_DTYPE, Dim, Part, StorageFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OUT, _IN = Dim("out"), Dim("in")

CHANNEL_FORMATS = frozenset({"fp8_e4m3_channel", "int8_channel"})
"""Formats with one scale per output channel, which engines hold in F32."""

MX_BLOCK = 32
NVFP4_BLOCK = 16
EXL3_GRAIN = 128
EXL3_TILE = 16
EXL3_RATES_TIMES_TWO = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Legal bits per weight, doubled: 1..8 and the half rates 1.5, 2.5, 3.5 (half rates with codebook mul1 only)."""


def mxfp8(*, scale_suffix: str = ".weight_scale", scale_dtype: str = "U8") -> StorageFormat:
    """MXFP8: E4M3 codes, one E8M0 byte per 32 inputs, stored as U8 or as F8_E8M0."""
    return StorageFormat(
        name="mxfp8_e4m3",
        parts=(
            Part(".weight", "F8_E4M3", (_OUT, _IN)),
            Part(scale_suffix, scale_dtype, (_OUT, Dim("in", MX_BLOCK))),
        ),
        in_grain=MX_BLOCK,
    )


def is_read_by_value(name: str, dtype: str) -> bool:
    """Whether a tensor is a scale of MXFP8 that engines turn into other numbers, without an error.

    They allocate bytes and copy; from F8_E8M0 that converts the value 2^-7 to the byte 0, not to 120.

    Source:
        vLLM 0.32.0 ``layers/quantization/utils/mxfp8_utils.py`` (``MXFP8_SCALE_DTYPE``), and PyTorch's ``copy_``.

    >>> is_read_by_value("q_proj.weight_scale", "F8_E8M0"), is_read_by_value("q_proj.weight_scale", "U8")
    (True, False)
    """
    return dtype == "F8_E8M0" and name.endswith(".weight_scale")


def value_scales(where: str, tensors: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Yield a problem for every tensor, given as name and dtype, that is such a scale."""
    for name, dtype in tensors:
        if is_read_by_value(name, dtype):
            what = "scale of MXFP8 that engines convert by value, without an error"
            yield Problem(where=where, tensor=name, what=what, expected="U8, of the same bytes", found=dtype)


def mxfp4(
    *,
    codes_suffix: str = ".weight_packed",
    scale_suffix: str = ".weight_scale",
    codes_dtype: str = "U8",
    scale_dtype: str = "U8",
) -> StorageFormat:
    """MXFP4: two E2M1 codes per byte, one E8M0 byte per 32 inputs."""
    return StorageFormat(
        name="mxfp4_e2m1",
        parts=(
            Part(codes_suffix, codes_dtype, (_OUT, Dim("in", 2))),
            Part(scale_suffix, scale_dtype, (_OUT, Dim("in", MX_BLOCK))),
        ),
        in_grain=MX_BLOCK,
    )


def mxfp4_blocks() -> StorageFormat:
    """MXFP4 as gpt-oss stores it: the codes of a block of 32 inputs are an axis of their own."""
    return StorageFormat(
        name="mxfp4_e2m1",
        parts=(
            Part("_blocks", "U8", (_OUT, Dim("in", MX_BLOCK), Dim("none", MX_BLOCK // 2))),
            Part("_scales", "U8", (_OUT, Dim("in", MX_BLOCK))),
        ),
        in_grain=MX_BLOCK,
    )


def nvfp4(style: Literal["modelopt", "compressed-tensors"], *, input_scale: bool) -> StorageFormat:
    """NVFP4: two E2M1 codes per byte, one E4M3 scale per 16 inputs, one F32 scale per tensor."""
    if style == "modelopt":
        codes, scalars = ".weight", [".weight_scale_2"] + [".input_scale"] * input_scale
        shape: tuple[Dim, ...] = ()
    else:
        codes, scalars = ".weight_packed", [".weight_global_scale"] + [".input_global_scale"] * input_scale
        shape = (Dim("none", 1),)
    return StorageFormat(
        name="nvfp4_e2m1",
        parts=(
            Part(codes, "U8", (_OUT, Dim("in", 2))),
            Part(".weight_scale", "F8_E4M3", (_OUT, Dim("in", NVFP4_BLOCK))),
            *(Part(suffix, "F32", shape) for suffix in scalars),
        ),
        in_grain=NVFP4_BLOCK,
    )


def fp8_block(
    block_out: int, block_in: int, *, scale_dtype: str = "F32", suffix: str = ".weight_scale_inv"
) -> StorageFormat:
    """FP8 with one scale per block of outputs x inputs; the last block of an axis may be partial."""
    return StorageFormat(
        name=f"fp8_e4m3_block{block_out}x{block_in}",
        parts=(
            Part(".weight", "F8_E4M3", (_OUT, _IN)),
            Part(suffix, scale_dtype, (Dim("out", block_out, ragged=True), Dim("in", block_in, ragged=True))),
        ),
        out_grain=block_out,
        in_grain=block_in,
    )


def fp8_tensor(*, input_scale: bool) -> StorageFormat:
    """FP8 with one F32 scale per tensor, and one for its input when activations are static."""
    scalars = [".weight_scale"] + [".input_scale"] * input_scale
    return StorageFormat(
        name="fp8_e4m3_tensor",
        parts=(Part(".weight", "F8_E4M3", (_OUT, _IN)), *(Part(suffix, "F32", ()) for suffix in scalars)),
    )


def fp8_channel(*, scale_dtype: str = MODEL_DTYPE) -> StorageFormat:
    """FP8 with one scale per output channel, stored ``[out, 1]`` (compressed-tensors)."""
    return StorageFormat(
        name="fp8_e4m3_channel",
        parts=(
            Part(".weight", "F8_E4M3", (_OUT, _IN)),
            Part(".weight_scale", scale_dtype, (_OUT, Dim("none", 1))),
        ),
    )


def int8_channel(*, scale_dtype: str = MODEL_DTYPE) -> StorageFormat:
    """INT8 with one scale per output channel, stored ``[out, 1]`` (compressed-tensors ``int-quantized``, symmetric)."""
    return StorageFormat(
        name="int8_channel",
        parts=(
            Part(".weight", "I8", (_OUT, _IN)),
            Part(".weight_scale", scale_dtype, (_OUT, Dim("none", 1))),
        ),
    )


def int_packed(bits: int, group: int, *, symmetric: bool = True) -> StorageFormat:
    """compressed-tensors ``pack-quantized``: codes packed into I32 along the inputs, BF16 scales, logical shape."""
    per_word = _whole_words(bits, group)
    zero = () if symmetric else (Part(".weight_zero_point", "I32", (Dim("out", per_word), Dim("in", group))),)
    return StorageFormat(
        name=f"int{bits}_pack_g{group}",
        parts=(
            Part(".weight_packed", "I32", (_OUT, Dim("in", per_word))),
            Part(".weight_scale", MODEL_DTYPE, (_OUT, Dim("in", group))),
            *zero,
            Part(".weight_shape", "I32", (Dim("none", 2),)),
        ),
        out_grain=1 if symmetric else per_word,
        in_grain=group,
    )


def gptq(bits: int, group: int) -> StorageFormat:
    """GPTQ: codes packed along the inputs, stored ``[in, out]``, zero points packed along the outputs."""
    per_word = _whole_words(bits, group)
    return StorageFormat(
        name=f"gptq_int{bits}_g{group}",
        parts=(
            Part(".qweight", "I32", (Dim("in", per_word), _OUT)),
            Part(".qzeros", "I32", (Dim("in", group), Dim("out", per_word))),
            Part(".scales", "F16", (Dim("in", group), _OUT)),
            Part(".g_idx", "I32", (_IN,)),
        ),
        out_grain=per_word,
        in_grain=group,
    )


def awq(bits: int, group: int) -> StorageFormat:
    """AWQ (gemm): codes packed along the outputs, stored ``[in, out]``."""
    per_word = _whole_words(bits, group)
    return StorageFormat(
        name=f"awq_int{bits}_g{group}",
        parts=(
            Part(".qweight", "I32", (_IN, Dim("out", per_word))),
            Part(".qzeros", "I32", (Dim("in", group), Dim("out", per_word))),
            Part(".scales", "F16", (Dim("in", group), _OUT)),
        ),
        out_grain=per_word,
        in_grain=group,
    )


def exl3(
    rate_times_two: int, *, codebook: Literal["3inst", "mcg", "mul1"], legacy_signs: bool = False
) -> StorageFormat:
    """EXL3 (exllamav3): trellis tiles of 16 x 16, rotation vectors per input and output channel, a codebook marker.

    Raises:
        UnknownFormatError: The rate is not one exllamav3 reads, or a half rate without codebook ``mul1``.
    """
    legal = rate_times_two in EXL3_RATES_TIMES_TWO and (rate_times_two % 2 == 0 or codebook == "mul1")
    if not legal:
        raise UnknownFormatError(
            Problem(
                where="exl3",
                what="unknown rate",
                expected="1..8 bits, or 1.5, 2.5, 3.5 with codebook mul1",
                found=f"{rate_times_two // 2}{'.5' * (rate_times_two % 2)} bits, codebook {codebook}",
            )
        )
    signs = (
        (Part(".su", "I16", (Dim("in", EXL3_TILE),)), Part(".sv", "I16", (Dim("out", EXL3_TILE),)))
        if legacy_signs
        else (Part(".suh", "F16", (_IN,)), Part(".svh", "F16", (_OUT,)))
    )
    words = rate_times_two * EXL3_TILE // 2
    trellis = Part(".trellis", "I16", (Dim("in", EXL3_TILE), Dim("out", EXL3_TILE), Dim("none", words)))
    return StorageFormat(
        name=f"exl3_{rate_times_two // 2}{'.5' * (rate_times_two % 2)}bit",
        parts=(trellis, *signs, *(() if codebook == "3inst" else (Part(f".{codebook}", "I32", ()),))),
        out_grain=EXL3_GRAIN,
        in_grain=EXL3_GRAIN,
        pads_to=EXL3_GRAIN,
        bias_dtype="F16",
    )


def _whole_words(bits: int, group: int) -> int:
    """Return how many codes one 32-bit word holds, for a group of whole words.

    Raises:
        UnknownFormatError: The width is unknown, or a group ends inside a word.
    """
    per_word = _codes_per_word(bits)
    if group <= 0 or group % per_word:
        expected = f"a multiple of {per_word} codes, one word"
        raise UnknownFormatError(Problem(where="int format", what="group size", expected=expected, found=str(group)))
    return per_word


def _codes_per_word(bits: int) -> int:
    """Return how many codes one 32-bit word holds."""
    if bits not in (2, 4, 8):
        raise UnknownFormatError(
            Problem(where="int format", what="unknown width", expected="2, 4 or 8 bits", found=str(bits))
        )
    return 32 // bits
