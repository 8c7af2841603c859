"""Element types as safetensors spells them, with their width in bits.

Source:
    huggingface/safetensors, ``safetensors/src/tensor.rs``, enum ``Dtype`` (0.6 and later carry the sub-byte types).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tonnage.errors import Problem, UnknownFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

TORCH_NAMES: dict[str, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}


def payload_bytes(dtype: str, shape: Sequence[int], *, where: str = "tensor") -> int:
    """Return the bytes of one dense tensor: elements times width, whole bytes only.

    Raises:
        UnknownFormatError: The dtype is not in the table, or its elements do not fill whole bytes.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise UnknownFormatError(
            Problem(where=where, what="unknown dtype", expected="one of " + ", ".join(DTYPE_BITS), found=dtype)
        )
    total = prod(shape) * bits
    if total % 8:
        raise UnknownFormatError(
            Problem(where=where, what="elements do not fill whole bytes", found=f"{dtype} {list(shape)}")
        )
    return total // 8
