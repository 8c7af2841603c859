"""What a launch of vLLM says about its cache, and how many slots of a state that makes for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.errors import PlacementError, Problem

if TYPE_CHECKING:
    from tonnage.memory.cache import StateKind

KERNEL_BLOCK_TOKENS = 16
TokenCount = Literal["requests", "blocks"]
"""What ``KV cache size: N tokens`` counts: requests of the longest context, or the blocks of one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCacheOptions:
    """What a launch says about the cache; the defaults are vLLM's own where a launch says nothing.

    Attributes:
        tp_size: Tensor-parallel size.
        dcp_size: Decode-context-parallel size: ranks that share the tokens of a request.
        kv_dtype: One of :data:`tonnage.memory.cache_dtypes.KV_DTYPES`.
        draft_kv_dtype: The same for the layers of a draft; empty for ``kv_dtype``.
        model_dtype: Dtype of the weights, as safetensors spells it.
        block_tokens: ``--block-size``; ``None`` for the backend's default.
        kernel_block_tokens: Smallest block the attention kernels take; blocks of a hybrid and of windows are multiples.
        conv_dtype: Dtype of convolution states; empty for the model's.
        state_dtype: Dtype of recurrent states; empty for the config's, or the engine's default.
        draft_tokens: Tokens proposed per step.
        prefix_caching: Whether finished requests stay to be matched; a recurrent state then takes one slot more.
        max_batched_tokens: Tokens of one step, over all requests.
        concurrent_batches: Steps in flight: the pipeline stages, and one more with asynchronous scheduling.
        retained_tokens: Tokens below a sliding window that are kept for drafts of several modules.
        checkpoint_slots: Slots for checkpoints inside a prefill that prefix caching takes beside its own; ``None`` for
            one where the kernel can export them (Mamba 2).
        draft_replicated: A draft runs without decode context parallelism: every rank keeps all its tokens.
        hybrid_manager: Off (``--disable-hybrid-kv-cache-manager``), windows and chunks are kept like all tokens.
        packed: Pages of different sizes stand side by side in one block; ``None`` where the model decides.
        tuple_packing: Packed as releases before 0.26 did: every block as many tuples of one page of each size,
            whichever of them a group has. ``None`` where nobody says the release: what takes more.
        counts: What the release counts as tokens of the cache: whole requests, or, before 0.21, blocks of one group.
        group_slack_permille: Largest bucket of layers, relative to the smallest, at which both make one group each.
    """

    tp_size: int = 1
    dcp_size: int = 1
    kv_dtype: str = "auto"
    draft_kv_dtype: str = ""
    model_dtype: str = "BF16"
    block_tokens: int | None = None
    kernel_block_tokens: int = KERNEL_BLOCK_TOKENS
    conv_dtype: str = ""
    state_dtype: str = ""
    draft_tokens: int = 0
    prefix_caching: bool = True
    max_batched_tokens: int = 8192
    concurrent_batches: int = 2
    retained_tokens: int = 0
    checkpoint_slots: int | None = None
    draft_replicated: bool = False
    hybrid_manager: bool = True
    packed: bool | None = None
    tuple_packing: bool | None = False
    counts: TokenCount = "requests"
    group_slack_permille: int = 1500

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be.

        Raises:
            PlacementError: A size is out of range.
        """
        least = {
            "tp_size": 1, "dcp_size": 1, "kernel_block_tokens": 1, "draft_tokens": 0, "max_batched_tokens": 1,
            "concurrent_batches": 1, "retained_tokens": 0, "group_slack_permille": 1000,
        }  # fmt: skip
        wrong = [(name, low) for name, low in least.items() if getattr(self, name) < low]
        if self.block_tokens is not None and self.block_tokens < 1:
            wrong.append(("block_tokens", 1))
        if wrong:
            raise PlacementError(
                *(
                    Problem(
                        where="cache",
                        what=f"{name} out of range",
                        expected=f"{low} or more",
                        found=str(getattr(self, name)),
                    )
                    for name, low in wrong
                )
            )

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not yet settled, whose blocks are still held."""
        return self.max_batched_tokens * self.concurrent_batches

    def state_slots(self, kind: StateKind) -> int:
        """Return the slots of a state of this kind one request holds."""
        slots = 1 + self.draft_tokens
        if not self.prefix_caching:
            return slots
        exports = int(kind == "mamba2") if self.checkpoint_slots is None else self.checkpoint_slots
        return slots + 1 + exports
