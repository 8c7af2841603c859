"""KV dtypes by the names vLLM gives them: which cache they suit, and the bytes of one token.

A user asks for a precision (:data:`KV_CHOICES`); which record format that is depends on the cache, and on the engine.

Source:
    vLLM 0.32.0 ``v1/kv_cache_interface.py`` (AttentionSpec), ``v1/attention/backends/{triton_attn,flashinfer}.py``
    (customize_spec), ``model_executor/layers/attention/mla_attention.py`` (get_kv_cache_spec).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tonnage.errors import Problem, UnknownFormatError
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.memory.cache import Attention, Compressed, Indexer, Latent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tonnage.memory.cache import LayerCache

KvChoice = Literal["auto", "bf16", "fp8", "nvfp4", "int8", "int4"]
KV_CHOICES: tuple[KvChoice, ...] = ("auto", "bf16", "fp8", "nvfp4", "int8", "int4")
"""What ``--kv-dtype`` takes."""

PLAIN_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one element where elements stand one by one; scales per tensor are a few numbers per layer."""

PER_TOKEN_HEAD_BITS = {"int8_per_token_head": 8, "fp8_per_token_head": 8, "int4_per_token_head": 4}
"""Bits of one element where every token and head has two F32 scales."""

NVFP4 = ("nvfp4", "nvfp4_4over6")
DS_MLA = ("fp8_ds_mla", "nvfp4_ds_mla")
KV_DTYPES = ("auto", *PLAIN_BYTES, *PER_TOKEN_HEAD_BITS, *NVFP4, *DS_MLA)

_SCALES_PER_TOKEN_HEAD = 8
_SCALED_BLOCK = 128
_NVFP4_BLOCK = 16
_RECORD_BLOCK = 64
_F32 = 4
_BF16 = 2
_CHOSEN = {"bf16": "bfloat16", "nvfp4": "nvfp4", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}


def engine_kv_dtype(choice: str, caches: Iterable[LayerCache], *, stated: str = "") -> str:
    """Return the name vLLM has for a precision, for what a model keeps.

    Args:
        choice: One of :data:`KV_CHOICES`, or already one of :data:`KV_DTYPES`.
        caches: What the model keeps; sparse latents and DeepSeek-V4 have record formats of their own.
        stated: What the checkpoint was quantised for; it stands for ``auto``.

    Raises:
        UnknownFormatError: Neither a precision nor a KV dtype.
    """
    if choice == "auto" and stated:
        choice = stated
    records = any(isinstance(c.kept, Compressed) or (isinstance(c.kept, Latent) and c.kept.sparse) for c in caches)
    if records and choice in ("fp8", "nvfp4"):
        return f"{choice}_ds_mla"
    name = _CHOSEN.get(choice, choice)
    if name not in KV_DTYPES:
        raise UnknownFormatError(
            Problem(
                where="--kv-dtype",
                what="no KV dtype",
                expected=", ".join(dict.fromkeys((*KV_CHOICES, *KV_DTYPES))),
                found=choice,
            )
        )
    return name


def attention_bytes(kept: Attention, kv_dtype: str, model_dtype: str) -> int:
    """Return the bytes of one token's key and value of one head.

    Raises:
        UnknownFormatError: The dtype has no rule for keys and values.
    """
    elements = kept.head_size + kept.value_size
    if kv_dtype in PER_TOKEN_HEAD_BITS:
        return _bytes(elements * PER_TOKEN_HEAD_BITS[kv_dtype]) + _SCALES_PER_TOKEN_HEAD
    if kv_dtype in NVFP4:
        return sum(size * 4 // 8 + size // _NVFP4_BLOCK for size in (kept.head_size, kept.value_size))
    return elements * _plain_bytes(kv_dtype, model_dtype, "keys and values")


def latent_bytes(kept: Latent, kv_dtype: str, model_dtype: str) -> int:
    """Return the bytes of one token's latent.

    ``fp8_ds_mla`` keeps the latent in FP8 with an F32 scale per 128 elements and the positions in BF16;
    ``nvfp4_ds_mla`` keeps the latent in FP4 with a scale per 16 and the positions in FP8.

    Raises:
        UnknownFormatError: The dtype has no rule for latents, or only for those an indexer reads.
    """
    elements = kept.rank + kept.rope_size
    if kv_dtype in DS_MLA:
        if not kept.sparse:
            raise _no_rule(kv_dtype, "latents that are read whole")
        if kv_dtype == "fp8_ds_mla":
            return kept.rank + kept.rank // _SCALED_BLOCK * _F32 + kept.rope_size * _BF16
        return kept.rank // 2 + kept.rope_size + kept.rank // _NVFP4_BLOCK
    if kv_dtype in PER_TOKEN_HEAD_BITS:
        return _bytes(elements * PER_TOKEN_HEAD_BITS[kv_dtype]) + _SCALES_PER_TOKEN_HEAD
    return elements * _plain_bytes(kv_dtype, model_dtype, "latents")


def latent_elements_bytes(kept: Latent, kv_dtype: str, model_dtype: str) -> int:
    """Return what vLLM takes for one token's latent when it sizes a hybrid's block: its elements, without scales."""
    elements = kept.rank + kept.rope_size
    packed = kv_dtype in DS_MLA or kv_dtype in PER_TOKEN_HEAD_BITS
    return elements if packed else elements * _plain_bytes(kv_dtype, model_dtype, "latents")


def index_key_bytes(kept: Indexer, model_dtype: str) -> int:
    """Return the bytes of one token's index key; it does not follow the KV dtype."""
    if kept.scaled:
        return scaled_fp8_bytes(kept.head_size)
    return kept.head_size * dtype_bytes(model_dtype)


def scaled_fp8_bytes(elements: int) -> int:
    """Return the bytes of FP8 elements with one F32 scale per 128."""
    return elements + elements // _SCALED_BLOCK * _F32


def record_bytes(kept: Compressed, kv_dtype: str, model_dtype: str) -> int:
    """Return the bytes of one record of DeepSeek-V4: FP8 with a scale per 64 elements and positions in BF16, or plain.

    The scales of one record are rounded up to whole groups of eight bytes.

    Raises:
        UnknownFormatError: The dtype has no rule for these records.
    """
    if kv_dtype in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
        plain = kept.head_size - kept.rope_size
        scales = -(-plain // _RECORD_BLOCK)
        return plain + kept.rope_size * _BF16 + -(-scales // 8) * 8
    if kv_dtype in DS_MLA or kv_dtype in PER_TOKEN_HEAD_BITS or kv_dtype in NVFP4:
        raise _no_rule(kv_dtype, "the records of DeepSeek-V4")
    return kept.head_size * _plain_bytes(kv_dtype, model_dtype, "the records of DeepSeek-V4")


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a safetensors dtype.

    Raises:
        UnknownFormatError: No such dtype.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise UnknownFormatError(
            Problem(where="cache dtype", what="unknown dtype", expected=", ".join(DTYPE_BITS), found=dtype)
        )
    return bits // 8


def _plain_bytes(kv_dtype: str, model_dtype: str, what: str) -> int:
    if kv_dtype == "auto":
        return dtype_bytes(model_dtype)
    if kv_dtype not in PLAIN_BYTES:
        raise _no_rule(kv_dtype, what)
    return PLAIN_BYTES[kv_dtype]


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _no_rule(kv_dtype: str, what: str) -> UnknownFormatError:
    return UnknownFormatError(
        Problem(where="KV dtype", what=f"no rule for {what}", expected=", ".join(KV_DTYPES), found=kv_dtype)
    )
