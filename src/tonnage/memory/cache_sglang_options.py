"""What a launch of SGLang says about its pools, and the names its KV dtypes have.

Source:
    SGLang 0.5.23 ``server_args.py``, ``configs/model_config.py`` (is_hybrid_swa_model).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from tonnage.errors import PlacementError, Problem, UnknownFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

FP4 = ("nvfp4", "fp4_mx_block16")
SGLANG_KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", *FP4)
"""What ``--kv-cache-dtype`` takes."""

_CHOSEN = {"fp8": "fp8_e4m3", "bf16": "bfloat16"}
_SPLITTING = frozenset({
    "Llama4ForConditionalGeneration", "GptOssForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2MTP", "Step3p5ForCausalLM",
    "Step3p5MTP", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCacheOptions:
    """What a launch says about the pools; the defaults are SGLang's own where a launch says nothing.

    Attributes:
        tp_size: Tensor-parallel size of attention.
        dcp_size: Decode-context-parallel size: ranks that share the tokens of a request.
        kv_dtype: One of :data:`SGLANG_KV_DTYPES`.
        draft_kv_dtype: The same for the layers of a draft; empty for ``kv_dtype``.
        model_dtype: Dtype of the weights, as safetensors spells it.
        page_tokens: ``--page-size``, or what the attention backend asks for; ``None`` where the model decides.
        raw_records: Kernels for sparse attention read FP8 latents without scales (TRT-LLM, TileLang on ROCm).
        hybrid_sliding: Layers with a window have a pool of their own; see :func:`splits_sliding`.
        sliding_permille: Tokens of that pool to those of the other (``--swa-full-tokens-ratio``); ``None`` for 800, and
            100 for DeepSeek-V4.
        index_every_layer: An index key is taken for every layer of a sparse model, not only for those with an indexer.
        index_pool_tokens: Tokens one index key stands for.
        draft_charge: A draft takes as much as so many layers of the target (EAGLE, MTP), or what its own layers take
            (DFLASH, DSPARK).
        draft_tokens: Tokens verified per step (``--speculative-num-draft-tokens``); 0 without a draft.
        max_running: ``--max-running-requests``; ``None`` where nobody says.
        max_total_tokens: ``--max-total-tokens``; likewise.
        radix_cache: Off with ``--disable-radix-cache``: a recurrent state then needs one slot per request.
        extra_state_slots: Slots more per request: 2 with the extra buffer and the overlap schedule, 1 where it is lazy
            or without the schedule, 0 without the buffer.
        max_state_slots: ``--max-mamba-cache-size``; ``None`` where nobody says.
        state_permille: Memory of states to that of tokens (``--mamba-full-memory-ratio``).
        conv_dtype: Dtype of convolution states.
        state_dtype: ``--mamba-ssm-dtype``; empty for the config's, or F32.
    """

    tp_size: int = 1
    dcp_size: int = 1
    kv_dtype: str = "auto"
    draft_kv_dtype: str = ""
    model_dtype: str = "BF16"
    page_tokens: int | None = None
    raw_records: bool = False
    hybrid_sliding: bool = True
    sliding_permille: int | None = None
    index_every_layer: bool = True
    index_pool_tokens: int = 1
    draft_charge: Literal["layers", "own"] = "layers"
    draft_tokens: int = 0
    max_running: int | None = None
    max_total_tokens: int | None = None
    radix_cache: bool = True
    extra_state_slots: int = 0
    max_state_slots: int | None = None
    state_permille: int = 900
    conv_dtype: str = "BF16"
    state_dtype: str = ""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be.

        Raises:
            PlacementError: A size is out of range.
            UnknownFormatError: SGLang has no such KV dtype.
        """
        may_be_none = {"draft_tokens": 0, "extra_state_slots": 0}
        wrong = [
            (entry.name, may_be_none.get(entry.name, 1))
            for entry in fields(self)
            if type(value := getattr(self, entry.name)) is int and value < may_be_none.get(entry.name, 1)
        ]
        if wrong:
            raise PlacementError(
                *(
                    Problem(
                        where="cache", what=f"{name} out of range", expected=f"{low} or more",
                        found=str(getattr(self, name)),
                    )
                    for name, low in wrong
                )
            )  # fmt: skip
        for name in (self.kv_dtype, self.draft_kv_dtype or "auto"):
            if name not in SGLANG_KV_DTYPES:
                raise _no_dtype(name)


def sglang_kv_dtype(choice: str, *, stated: str = "") -> str:
    """Return the name SGLang has for a precision.

    Args:
        choice: One of :data:`tonnage.memory.cache_dtypes.KV_CHOICES`, or already one of :data:`SGLANG_KV_DTYPES`.
        stated: What the checkpoint was quantised for; it stands for ``auto``.

    Raises:
        UnknownFormatError: SGLang has no such KV dtype.
    """
    name = stated if choice == "auto" and stated else choice
    name = _CHOSEN.get(name, name)
    if name not in SGLANG_KV_DTYPES:
        raise _no_dtype(name)
    return name


def splits_sliding(architectures: Iterable[str]) -> bool:
    """Whether SGLang keeps layers with a window in a pool of their own; for other models they keep every token."""
    return not _SPLITTING.isdisjoint(architectures)


def _no_dtype(name: str) -> UnknownFormatError:
    return UnknownFormatError(
        Problem(
            where="--kv-dtype", what="SGLang has no such KV dtype", expected=", ".join(SGLANG_KV_DTYPES), found=name
        )
    )
