"""SGLang's pools: how a budget is shared between tokens, sliding windows and recurrent states, and what then fits.

A launch that states no sizes gets them from fixed ratios (:meth:`SglangCache.pools`). What so many requests of a length
need (:meth:`SglangCache.needed_bytes`) takes the sizes as stated for them: ``--max-running-requests`` and
``--max-mamba-cache-size``. A pool has one page more than its tokens, into which padded steps write.

Source:
    SGLang 0.5.23 ``model_executor/pool_configurator.py``, ``mem_cache/kv_cache_configurator.py``
    (_handle_max_mamba_cache, resolve_max_num_reqs), ``mem_cache/memory_pool.py`` (allocations).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache import LayerCache, State, on_stage
from tonnage.memory.cache_sglang_cells import (
    SglangCells,
    conv_columns_bytes,
    page_tokens_of,
    sglang_cells,
    sliding_permille_of,
    state_part_bytes,
)
from tonnage.memory.cache_sglang_options import SglangCacheOptions
from tonnage.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_CONTEXT_TOKENS = 1 << 40
MOST_REQUESTS = 1 << 20
STATE_SLOTS_WITH_RADIX = 3
DEFAULT_RUNNING = 2048, 4096
"""Least and most requests SGLang runs where nobody says; 512 for every full context between."""
COMPRESSED_RUNNING = 256
"""The same for DeepSeek-V4, whose requests have states."""
_THOUSAND = 1000
_TABLE_ENTRY_BYTES = 4
_ROWS_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangPools:
    """Sizes of the pools of one rank.

    Attributes:
        tokens: Tokens of the pool that keeps all of them, on this rank (``max_total_num_tokens``).
        sliding_tokens: Tokens of the pool of layers with a window; 0 without one.
        state_slots: Slots of recurrent states (``max_mamba_cache_size``); 0 without any.
        max_running: Requests that run at once.
    """

    tokens: int
    sliding_tokens: int = 0
    state_slots: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCache:
    """The cache of one rank.

    Attributes:
        options: What the launch says.
        caches: What the layers of the rank keep, and those of its draft.
        cells: Bytes of one token.
        page_tokens: Tokens of a page on this rank; times the ranks of decode context parallelism, of a request.
        sliding_permille: Tokens of the sliding pool to those of the other.
        state_part_bytes: Recurrent part of one slot.
        conv_part_bytes: Convolution part of one slot.
        verify_conv_bytes: Convolution windows of one request while a draft is verified.
    """

    options: SglangCacheOptions
    caches: tuple[LayerCache, ...]
    cells: SglangCells
    page_tokens: int
    sliding_permille: int
    state_part_bytes: int
    conv_part_bytes: int
    verify_conv_bytes: int

    @property
    def cell_bytes(self) -> Fraction:
        """Bytes set aside on this rank for one of its tokens, in all pools together; a fraction where ratios are."""
        sliding = self.cells.sliding_bytes * (Fraction(self.sliding_permille, _THOUSAND) if self._has_full else 1)
        return self.cells.full_bytes + sliding + self.cells.compressed_bytes + self.cells.draft_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token of capacity takes on this rank, rounded up; ranks of dcp share tokens."""
        return -(-self.cell_bytes // self.options.dcp_size)

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of one slot of every recurrent state on this rank."""
        return self.state_part_bytes + self.conv_part_bytes

    @property
    def state_slots_per_request(self) -> int:
        """Slots SGLang takes for every running request; 0 without recurrent states."""
        if not self.state_bytes_per_slot:
            return 0
        return STATE_SLOTS_WITH_RADIX + self.options.extra_state_slots if self.options.radix_cache else 1

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of those slots, and of the states kept while a draft is verified."""
        return self.state_slots_per_request * self.state_bytes_per_slot + self._verify_bytes

    @property
    def _verify_bytes(self) -> int:
        return self.options.draft_tokens * self.state_part_bytes + self.verify_conv_bytes

    @property
    def _has_full(self) -> bool:
        return bool(self.cells.full_bytes or self.cells.compressed_bytes)

    # --- what a budget gives ------------------------------------------------------------------------------------------

    def pools(self, budget_bytes: int, context_tokens: int) -> SglangPools:
        """Return the sizes SGLang chooses within a budget.

        Args:
            budget_bytes: Memory for tokens and states on this rank; several ranks have the fewest of any.
            context_tokens: Longest context a request may have; it decides how many run where nobody says.
        """
        slots, left = self._state_split(budget_bytes)
        tokens = self.tokens_within(
            left - self._rows_bytes(self._running(self.tokens_within(left), slots, context_tokens))
        )
        return SglangPools(
            tokens=tokens,
            sliding_tokens=self._sliding(tokens),
            state_slots=slots,
            max_running=self._running(tokens, slots, context_tokens),
        )

    def tokens_within(self, token_bytes: int) -> int:
        """Return the tokens of one rank that so much memory for tokens alone gives, in whole pages."""
        cell = self.cell_bytes
        tokens = max(token_bytes, 0) // cell if cell else MOST_CONTEXT_TOKENS
        tokens = min(tokens, self.options.max_total_tokens or tokens)
        return tokens // self.page_tokens * self.page_tokens

    def allocated_bytes(self, pools: SglangPools) -> int:
        """Return the bytes of pools of these sizes on this rank, with the page and the slot nothing is kept in.

        A draft's pool counts with what its own layers take.
        """
        cells = self.cells
        every = cells.full_bytes + cells.compressed_bytes + cells.draft_own_bytes
        nbytes = floor((pools.tokens + self.page_tokens) * every)
        if cells.sliding_bytes:
            nbytes += (pools.sliding_tokens + self.page_tokens) * cells.sliding_bytes
        if self.state_bytes_per_slot:
            nbytes += (pools.state_slots + 1) * self.state_bytes_per_slot
            nbytes += (pools.max_running + 1) * self._verify_bytes
        return nbytes + self._rows_bytes(pools.max_running)

    def capacity_tokens(self, budget_bytes: int, context_tokens: int) -> int:
        """Return the tokens the ranks that share them keep: SGLang's ``max_total_num_tokens`` times those ranks."""
        return self.pools(budget_bytes, context_tokens).tokens * self.options.dcp_size

    # --- what requests need -------------------------------------------------------------------------------------------

    def needed_bytes(self, concurrency: int, context_tokens: int) -> int:
        """Return the budget that is enough for so many requests of this length, with sizes stated for them."""
        pools = self.pools_for(concurrency, context_tokens)
        set_aside = floor(pools.tokens * self.cell_bytes) + self._rows_bytes(pools.max_running)
        if self.state_bytes_per_slot:
            set_aside += (pools.state_slots + 1) * self.state_bytes_per_slot
            set_aside += (pools.max_running + 1) * self.options.draft_tokens * self.state_bytes_per_slot
        return max(self.allocated_bytes(pools), set_aside)

    def pools_for(self, concurrency: int, context_tokens: int) -> SglangPools:
        """Return the sizes to state for so many requests of this length.

        The sliding pool follows the other in its fixed ratio: short contexts may need more tokens of both.
        """
        tokens = concurrency * self._request_tokens(context_tokens)
        if self.cells.sliding_bytes:
            window = self.cells.window_tokens + self.page_tokens
            kept = max(concurrency * (min(context_tokens, window) + self.options.draft_tokens), window + 1)
            least = round_up(kept, self.page_tokens)
            if self._has_full:
                least = -(-least * _THOUSAND // self.sliding_permille)
            tokens = max(tokens, round_up(least, self.page_tokens))
        slots = self.options.max_state_slots or concurrency * self.state_slots_per_request
        return SglangPools(
            tokens=tokens,
            sliding_tokens=self._sliding(tokens),
            state_slots=slots if self.state_bytes_per_slot else 0,
            max_running=concurrency,
        )

    def request_bytes(self, context_tokens: int) -> int:
        """Return what one request more of this length takes."""
        return floor(self._request_tokens(context_tokens) * self.cell_bytes) + self.state_bytes_per_request

    def concurrency(self, budget_bytes: int, context_tokens: int) -> int:
        """Return how many requests of this length a budget holds, with sizes stated for them."""
        return _largest(lambda count: self._holds(budget_bytes, count, context_tokens), MOST_REQUESTS)

    def longest_context(
        self, budget_bytes: int, *, concurrency: int = 1, most_tokens: int = MOST_CONTEXT_TOKENS
    ) -> int:
        """Return the longest context at which so many requests fit; 0 where not one token fits."""
        return _largest(lambda tokens: self._holds(budget_bytes, concurrency, tokens), most_tokens)

    def _holds(self, budget_bytes: int, concurrency: int, context_tokens: int) -> bool:
        options = self.options
        if options.max_running is not None and concurrency > options.max_running:
            return False
        if options.max_state_slots is not None and concurrency * self.state_slots_per_request > options.max_state_slots:
            return False
        pools = self.pools_for(concurrency, context_tokens)
        if options.max_total_tokens is not None and pools.tokens > options.max_total_tokens:
            return False
        return self.needed_bytes(concurrency, context_tokens) <= budget_bytes

    # --- SGLang's own choices -----------------------------------------------------------------------------------------

    def _request_tokens(self, context_tokens: int) -> int:
        """Return the tokens of one request on this rank, in whole pages."""
        return round_up(context_tokens, self.page_tokens * self.options.dcp_size) // self.options.dcp_size

    def _sliding(self, tokens: int) -> int:
        if not self.cells.sliding_bytes:
            return 0
        kept = tokens * self.sliding_permille // _THOUSAND if self._has_full else tokens
        return kept // self.page_tokens * self.page_tokens

    def _state_split(self, budget_bytes: int) -> tuple[int, int]:
        """Return the slots of recurrent states, and what is left for tokens."""
        slot, per_request = self.state_bytes_per_slot, self.state_slots_per_request
        if not slot:
            return 0, budget_bytes
        drafts = self.options.draft_tokens
        slots = self.options.max_state_slots
        if slots is None and not self.options.radix_cache:
            slots = self.options.max_running
        if slots is None:
            share = Fraction(budget_bytes * self.options.state_permille, _THOUSAND + self.options.state_permille)
            slots = max(0, (share - slot * (1 + drafts)) // (slot * (1 + Fraction(drafts, per_request))))
        running = slots // per_request
        if self.options.max_running is not None:
            running = min(running, self.options.max_running)
        verified = slot * (running + 1) * drafts
        return slots, budget_bytes - verified - (slots + 1) * slot

    def _running(self, tokens: int, slots: int, context_tokens: int) -> int:
        running = self.options.max_running
        if running is None and self.cells.request_rows:
            running = COMPRESSED_RUNNING
        if running is None:
            least, most = DEFAULT_RUNNING
            running = max(min(tokens * 512 // context_tokens, most), least)
        running = min(running, tokens // 2)
        return min(running, slots // self.state_slots_per_request) if self.state_slots_per_request else running

    def _rows_bytes(self, running: int) -> int:
        """Return DeepSeek-V4's compressor states of requests: a ring for each, two more, and a row."""
        rows = self.cells.request_rows
        return round_up((running + 2) * rows + 1, _ROWS_ALIGNMENT) * self.cells.request_row_bytes if rows else 0


def sglang_cache(
    caches: Sequence[LayerCache], options: SglangCacheOptions | None = None, *, layers: range | None = None
) -> SglangCache:
    """Return SGLang's cache on one rank.

    Args:
        caches: What the layers of the whole model keep; those of a draft beside them (``draft=True``).
        options: What the launch says.
        layers: The layers of the rank's pipeline stage; ``None`` without pipeline parallelism.

    Raises:
        PlacementError: The sizes cannot work: heads do not divide, a ratio has no rule, or a draft keeps a state.
        UnknownFormatError: The KV dtype has no rule for a cache of the model.
    """
    options = options or SglangCacheOptions()
    kept = tuple(caches) if layers is None else on_stage(caches, layers)
    if any(cache.draft and isinstance(cache.kept, State) for cache in kept):
        raise PlacementError(Problem(where="cache", what="SGLang has no pool for the recurrent state of a draft"))
    conv = conv_columns_bytes(kept, options, columns=0)
    verified = conv_columns_bytes(kept, options, columns=options.draft_tokens - 1) if options.draft_tokens else 0
    return SglangCache(
        options=options,
        caches=kept,
        cells=sglang_cells(kept, options),
        page_tokens=page_tokens_of(kept, options),
        sliding_permille=sliding_permille_of(kept, options),
        state_part_bytes=state_part_bytes(kept, options),
        conv_part_bytes=conv,
        verify_conv_bytes=verified,
    )


def request_table_bytes(max_running: int, context_tokens: int) -> int:
    """Return the table that says where each token of each request is kept; it stands beside the pools."""
    return (max_running + 1) * context_tokens * _TABLE_ENTRY_BYTES


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number that fits; 0 where 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
