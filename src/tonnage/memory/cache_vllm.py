"""vLLM's pool: what one block takes on a rank, the blocks a request holds, and what fits into a budget.

One pool of blocks serves all groups of layers (:mod:`tonnage.memory.cache_vllm_groups`): a block belongs to one group
at a time and is as large as the largest. One block is never given out.

Source:
    vLLM 0.32.0 and 0.33.0 ``v1/core/kv_cache_utils.py``: get_kv_cache_config_from_groups, get_kv_cache_capacity,
    _check_enough_kv_cache_memory, _estimate_max_model_len_from_groups; 0.19.0 _report_kv_cache_config for the tokens
    printed by releases up to 0.20.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache import Compressed, Indexer, LayerCache, State, on_stage, owned
from tonnage.memory.cache_vllm_groups import CacheGroup, cache_groups
from tonnage.memory.cache_vllm_options import TokenCount, VllmCacheOptions
from tonnage.memory.cache_vllm_pages import (
    block_tokens_of,
    joined_key_bytes,
    layer_pages,
    state_bytes_per_slot,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_CONTEXT_TOKENS = 1 << 40
MOST_BLOCKS = 1 << 40
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})[^+]*", re.ASCII)
_COUNTS_REQUESTS_FROM = (0, 21)
_PACKS_GROUPS_FROM = (0, 26)


@dataclass(frozen=True, kw_only=True)  # no slots: what is asked for at every plan of a grid is worked out once
class VllmCache:
    """The cache of one rank.

    Attributes:
        options: What the launch says.
        caches: What the layers of the whole model keep, and those of its draft.
        groups: Layers that share a block table, over all pipeline stages.
        block_tokens: Tokens of an attention block.
        layers: Layers of the rank's pipeline stage; ``None`` for all.
        holds_draft: Whether the stage runs the draft: the last one does.
    """

    options: VllmCacheOptions
    caches: tuple[LayerCache, ...]
    groups: tuple[CacheGroup, ...]
    block_tokens: int
    layers: range | None = None
    holds_draft: bool = True

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes one block takes on this rank: those of the largest group, or of tuples."""
        in_tuples = (self.options.tuple_packing and self._has_records) or self.packed_by_release
        return self._tuples_bytes if in_tuples else self._largest_group_bytes

    @cached_property
    def packed_by_release(self) -> bool:
        """Whether what a block takes depends on a release nobody stated; it then is what older ones take."""
        unsaid = self.options.tuple_packing is None and self._has_records
        return unsaid and self._tuples_bytes > self._largest_group_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token of a long request takes on this rank, rounded up.

        Blocks of groups that keep all tokens, shared among the ranks of decode context parallelism; windows, chunks and
        states have stopped growing.
        """
        growing = [group for group in self.groups if group.grows]
        span = lcm(*(self._span(group) for group in growing))
        blocks = sum(span // self._span(group) for group in growing)
        return -(-blocks * self.bytes_per_block // span)

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of one slot of every recurrent state on this rank, without the padding of its pages."""
        return state_bytes_per_slot(self._here, self.options)

    @property
    def state_slots_per_request(self) -> int:
        """Slots a request holds: one, one per draft token, and those of prefix caching; 0 without recurrent states."""
        return max((self.options.state_slots(c.kept.kind) for c in self.caches if isinstance(c.kept, State)), default=0)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of all slots of one request on this rank, without padding."""
        return self.state_bytes_per_slot * self.state_slots_per_request

    @property
    def joins_keys(self) -> bool:
        """Whether index keys stand in the pages of latents, which is calibrated and not read from a source."""
        return joined_key_bytes(self.caches, self.options) > 0

    def request_blocks(self, context_tokens: int) -> int:
        """Return the blocks a request of this length holds, over all groups."""
        return sum(group.blocks(context_tokens, self.options) for group in self.groups)

    def request_bytes(self, context_tokens: int) -> int:
        """Return the bytes of those blocks on this rank; vLLM calls it the KV cache needed."""
        return self.request_blocks(context_tokens) * self.bytes_per_block

    def needed_bytes(self, concurrency: int, context_tokens: int) -> int:
        """Return the pool that is enough for so many requests of this length, with the block never given out."""
        return (concurrency * self.request_blocks(context_tokens) + 1) * self.bytes_per_block if self.groups else 0

    def blocks(self, budget_bytes: int) -> int:
        """Return the blocks a budget gives; ranks together have the fewest of any, one that keeps nothing has most."""
        if not self.bytes_per_block:
            return MOST_BLOCKS if self.groups else 0
        return max(budget_bytes, 0) // self.bytes_per_block

    def allocated_bytes(self, blocks: int) -> int:
        """Return the bytes of a pool of this many blocks on this rank."""
        return blocks * self.bytes_per_block

    def capacity_tokens(self, budget_bytes: int, context_tokens: int) -> int:
        """Return the tokens vLLM prints as ``KV cache size``.

        Args:
            budget_bytes: Memory for the cache on this rank.
            context_tokens: Longest context a request may have.
        """
        return self.tokens_of_blocks(self.blocks(budget_bytes), context_tokens)

    def tokens_of_blocks(self, blocks: int, context_tokens: int) -> int:
        """Return the tokens vLLM prints for a pool of this many blocks."""
        if not self.groups:
            return 0
        if self.options.counts == "blocks":
            return blocks // len(self.groups) * min(self._old_span(group, context_tokens) for group in self.groups)
        return blocks * context_tokens // self.request_blocks(context_tokens)

    def shared_capacity_tokens(self, budget_bytes: int, concurrency: int, context_tokens: int) -> int:
        """Return the tokens all requests together may have beside the states (and windows) of so many of them.

        Whole blocks, the one never given out left aside. This is the capacity that does not grow by shorter contexts;
        vLLM's own figure counts each request's states with its tokens.

        Args:
            budget_bytes: Memory for the cache on this rank.
            concurrency: Requests whose states are set aside.
            context_tokens: Longest context a request may have: windows of shorter ones take less.
        """
        growing = [group for group in self.groups if group.grows]
        if not growing:
            return 0
        kept = sum(group.blocks(context_tokens, self.options) for group in self.groups if not group.grows)
        left = max(self.blocks(budget_bytes) - 1 - concurrency * kept, 0)
        span = lcm(*map(self._span, growing))
        return left // sum(span // self._span(group) for group in growing) * span

    def concurrency(self, budget_bytes: int, context_tokens: int) -> int:
        """Return how many requests of this length a budget holds, with the block never given out."""
        usable = self.blocks(budget_bytes) - 1
        return max(usable, 0) // self.request_blocks(context_tokens) if self.groups else 0

    def longest_context(
        self,
        budget_bytes: int,
        *,
        concurrency: int = 1,
        most_tokens: int = MOST_CONTEXT_TOKENS,
        null_block: bool = True,
    ) -> int:
        """Return the longest context at which so many requests fit; with one request vLLM's estimated maximum length.

        Args:
            budget_bytes: Memory for the cache on this rank.
            concurrency: Requests of that length at once.
            most_tokens: No longer than this.
            null_block: Keep the block that is never given out; releases before 0.30 forgot it in their estimate.

        Returns:
            0 where not one token fits.
        """
        if not self.groups:
            return most_tokens
        usable = self.blocks(budget_bytes) - null_block
        shortest, longest = 0, most_tokens
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if concurrency * self.request_blocks(middle) <= usable:
                shortest = middle
            else:
                longest = middle - 1
        return shortest

    @property
    def _tuples_bytes(self) -> int:
        """Bytes of a block of tuples: one page of every size of the group that keeps all tokens."""
        here = [(group.grows, group.on_stage(self.layers, draft=self.holds_draft)) for group in self.groups]
        sizes = {entry.page.nbytes for grows, pages in here if grows for entry in pages}
        counts = [Counter(entry.page.nbytes for entry in pages) for _, pages in here]
        return sum(sizes) * max((max(count.values()) for count in counts if count), default=0)

    @property
    def _largest_group_bytes(self) -> int:
        return max((group.nbytes(self.layers, draft=self.holds_draft) for group in self.groups), default=0)

    @property
    def _has_records(self) -> bool:
        return any(isinstance(cache.kept, Compressed) for cache in self.caches)

    @property
    def _here(self) -> tuple[LayerCache, ...]:
        return self.caches if self.layers is None else on_stage(self.caches, self.layers)

    def _span(self, group: CacheGroup) -> int:
        """Tokens of a request one block of a group covers, over the ranks that share them."""
        return group.block_tokens * (self.options.dcp_size if group.sharded else 1)

    def _old_span(self, group: CacheGroup, context_tokens: int) -> int:
        if group.pages[0].page.kind == "state" and not self.options.prefix_caching:
            return context_tokens
        return group.block_tokens * self.options.dcp_size


def vllm_cache(
    caches: Sequence[LayerCache],
    options: VllmCacheOptions | None = None,
    *,
    layers: range | None = None,
    holds_draft: bool = True,
) -> VllmCache:
    """Return vLLM's cache on one rank.

    Args:
        caches: What the layers of the whole model keep; those of a draft beside them (``draft=True``).
        options: What the launch says.
        layers: The layers of the rank's pipeline stage; ``None`` without pipeline parallelism.
        holds_draft: Whether the stage runs the draft: the last one does.

    Raises:
        PlacementError: The sizes cannot work: heads do not divide, pages cannot be made equal, or a window is to be
            shared by ranks of decode context parallelism.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    options = options or VllmCacheOptions()
    kept = owned(caches)
    groups = _groups(kept, options)
    return VllmCache(
        options=options,
        caches=kept,
        groups=groups,
        block_tokens=block_tokens_of(kept, options),
        layers=layers,
        holds_draft=holds_draft,
    )


def token_count(version: str) -> TokenCount:
    """Return what a vLLM release counts as tokens of the cache; a version that cannot be read counts as new.

    So does a build of somebody's own (``0.11.2.dev280+name``): its number says nothing of what it was built from.
    """
    return "blocks" if _before(version, _COUNTS_REQUESTS_FROM) else "requests"


def packs_tuples(version: str) -> bool | None:
    """Whether a vLLM release packs DeepSeek-V4's pages in tuples; ``None`` for a version that cannot be read."""
    return _before(version, _PACKS_GROUPS_FROM) if _RELEASE.fullmatch(version) else None


def _before(version: str, release: tuple[int, int]) -> bool:
    match = _RELEASE.fullmatch(version)
    return match is not None and (int(match[1]), int(match[2])) < release


@lru_cache(maxsize=256)
def _groups(caches: tuple[LayerCache, ...], options: VllmCacheOptions) -> tuple[CacheGroup, ...]:
    pages = layer_pages(caches, options)
    if options.dcp_size > 1 and any(entry.page.sharded and entry.page.window_tokens for entry in pages):
        raise PlacementError(
            Problem(
                where="--dcp",
                what="a sliding window is not shared by ranks of decode context parallelism",
                expected="1",
                found=str(options.dcp_size),
            )
        )
    packed = options.packed if options.packed is not None else _is_packed(caches)
    return cache_groups(pages, options, packed=packed)


def _is_packed(caches: Sequence[LayerCache]) -> bool:
    """Whether kernels of the model want pages of all layers side by side in a block."""
    kept = [cache.kept for cache in caches]
    return any(isinstance(k, Compressed) for k in kept) or (
        any(isinstance(k, Indexer) for k in kept) and any(isinstance(k, State) for k in kept)
    )
