"""From the tensors stored for one linear weight back to its storage format.

The suffixes found pick the candidates, the shapes decide: a candidate is the format only if it would store exactly
these tensors with exactly these dtypes and shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tonnage.errors import TonnageError
from tonnage.formats import quantized as q
from tonnage.formats.storage import StorageFormat, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tonnage.checkpoint.tally import Kind

E8M0_DTYPES = ("U8", "F8_E8M0")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
SUFFIXES = (
    "", ".weight", ".bias", "_bias", "_blocks", "_scales", ".weight_scale", ".weight_scale_inv", ".scale",
    ".input_scale", ".weight_scale_2", ".weight_packed", ".weight_global_scale", ".input_global_scale",
    ".weight_zero_point", ".weight_shape", ".qweight", ".qzeros", ".scales", ".g_idx",
    ".trellis", ".suh", ".svh", ".su", ".sv", ".mcg", ".mul1",
)  # fmt: skip
"""Everything a storage format here puts behind a module's name."""

EXL3_SUFFIXES = frozenset({".trellis", ".suh", ".svh", ".su", ".sv", ".mcg", ".mul1"})
AUXILIARY = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale", ".k_bias", ".v_bias")
"""Scalars for quantised KV caches that may stand beside a projection; kept as they are."""


def candidates(stored: Mapping[str, Kind], out: int, in_: int) -> Iterator[StorageFormat]:
    """Yield the formats these suffixes and dtypes can mean, parameters read off the shapes.

    Args:
        stored: Suffix to dtype and shape, of one instance, biases left out; leading expert axis removed.
        out: Logical outputs.
        in_: Logical inputs.
    """
    names = frozenset(stored)
    if names in ({".weight"}, {""}):
        dtype = next(iter(stored.values())).dtype
        if dtype in PLAIN_DTYPES:
            yield plain(dtype)
    for scale in (".weight_scale_inv", ".weight_scale", ".scale"):
        if scale in names and ".weight" in names:
            yield from _scaled(stored, scale, out, in_)
    if {".weight_packed", ".weight_scale"} <= names:
        yield q.mxfp4()
        yield q.nvfp4("compressed-tensors", input_scale=".input_global_scale" in names)
        yield from _int_packed(stored, in_)
    if names == {"_blocks", "_scales"}:
        yield q.mxfp4_blocks()
    if ".qweight" in names:
        yield from _int_words(stored, out, in_)
    if ".trellis" in names:
        yield from _exl3(stored)


def _scaled(stored: Mapping[str, Kind], scale: str, out: int, in_: int) -> Iterator[StorageFormat]:
    kind = stored[scale]
    static = ".input_scale" in stored
    if kind.dtype in E8M0_DTYPES:
        yield q.mxfp8(scale_suffix=scale, scale_dtype=kind.dtype)
    yield q.nvfp4("modelopt", input_scale=static)
    if kind.dtype in E8M0_DTYPES and (codes := stored[".weight"].dtype) in ("U8", "I8"):
        yield q.mxfp4(codes_suffix=".weight", scale_suffix=scale, codes_dtype=codes, scale_dtype=kind.dtype)
    if kind.dtype not in SCALE_DTYPES:
        return
    yield q.fp8_tensor(input_scale=static)
    yield q.fp8_channel(scale_dtype=kind.dtype)
    yield q.int8_channel(scale_dtype=kind.dtype)
    if len(kind.shape) == 2 and kind.shape[0] and kind.shape[1]:
        for block_out, block_in in ((128, 128), (_step(out, kind.shape[0]), _step(in_, kind.shape[1]))):
            if block_out and block_in:
                yield q.fp8_block(block_out, block_in, scale_dtype=kind.dtype, suffix=scale)


def _step(size: int, blocks: int) -> int:
    """Return the power of two whose blocks cover an axis in this number, or 0."""
    step = 1
    while step < size and -(-size // step) > blocks:
        step *= 2
    return step if -(-size // step) == blocks else 0


def _int_packed(stored: Mapping[str, Kind], in_: int) -> Iterator[StorageFormat]:
    packed, scale = stored[".weight_packed"], stored[".weight_scale"]
    if packed.dtype == "I32" and packed.shape and scale.shape and packed.shape[-1] and scale.shape[-1]:
        words, groups = packed.shape[-1], scale.shape[-1]
        if in_ % words == 0 and in_ % groups == 0 and in_ // words in (4, 8, 16):
            yield q.int_packed(32 * words // in_, in_ // groups, symmetric=".weight_zero_point" not in stored)


def _int_words(stored: Mapping[str, Kind], out: int, in_: int) -> Iterator[StorageFormat]:
    shape, scales = stored[".qweight"].shape, stored.get(".scales")
    if len(shape) != 2 or scales is None or not scales.shape or not scales.shape[0] or in_ % scales.shape[0]:
        return
    group = in_ // scales.shape[0]
    for bits in (2, 4, 8):
        if shape == (in_ * bits // 32, out):
            yield q.gptq(bits, group)
        if shape == (in_, out * bits // 32):
            yield q.awq(bits, group)


def _exl3(stored: Mapping[str, Kind]) -> Iterator[StorageFormat]:
    shape = stored[".trellis"].shape
    if len(shape) == 3 and shape[2] % 8 == 0:
        codebook: Literal["3inst", "mcg", "mul1"] = (
            "mcg" if ".mcg" in stored else "mul1" if ".mul1" in stored else "3inst"
        )
        try:
            yield q.exl3(shape[2] // 8, codebook=codebook, legacy_signs=".su" in stored)
        except TonnageError:
            return
