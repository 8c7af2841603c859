"""exllamav3's cache: pages of 256 tokens in the size that is asked for, and slots for what does not grow.

``cache_size`` tokens are shared by all requests and allocated whole. Windows are kept in rings and recurrences in
states, one for each of the requests that can run at once (TabbyAPI's ``max_batch_size``).

Source:
    turboderp-org/exllamav3 1.6.5 ``cache/fp16.py``, ``cache/quant.py``, ``cache/mla.py``, ``cache/dsa.py``,
    ``modules/sliding_attn.py``, ``modules/gated_delta_net.py``; theroyallab/tabbyAPI ``cache_mode``. Old releases keep
    windows like all tokens, and an F32 state for every draft token. Assumed: index keys are in FP16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import gcd
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem, UnknownFormatError
from tonnage.memory.cache import Attention, Compressed, Indexer, Latent, LayerCache, State, on_stage, owned
from tonnage.units import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_TOKENS = 256
RING_SPARE_TOKENS = 2 * PAGE_TOKENS
"""Tokens a ring has beyond its window, so that a rejected draft can be taken back."""
DEFAULT_SLOTS = 4
"""TabbyAPI's ``max_batch_size`` for models with states."""
MOST_CONTEXT_TOKENS = 1 << 40
CACHE_MODES = ("FP16", "Q8", "Q6", "Q4", "K,V with 2 to 8 bits each")

_GROUP = 32
_HALF = 2
_FLOAT = 4
_BITS = re.compile(r"([2-8])\s*,\s*([2-8])", re.ASCII)
_MODES = {
    "auto": (0, 0), "bf16": (0, 0), "fp16": (0, 0),
    "q8": (8, 8), "q6": (6, 6), "q4": (4, 4), "int8": (8, 8), "int4": (4, 4),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exllamav3CacheOptions:
    """What a launch says about the cache.

    Attributes:
        tp_size: GPUs that share every layer; the cache of the one with the largest share is planned.
        k_bits: Bits of a key element; 0 for FP16.
        v_bits: Bits of a value element; 0 for FP16.
        draft_k_bits: The same for the layers of a draft.
        draft_v_bits: The same for the layers of a draft.
        slots: Requests that can run at once.
        draft_tokens: Tokens proposed per step, which states must be able to take back.
    """

    tp_size: int = 1
    k_bits: int = 0
    v_bits: int = 0
    draft_k_bits: int = 0
    draft_v_bits: int = 0
    slots: int = DEFAULT_SLOTS
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be.

        Raises:
            PlacementError: A size is out of range.
        """
        problems = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            bits = entry.name.endswith("bits")
            expected = "0, or 2 to 8" if bits else "0 or more" if entry.name == "draft_tokens" else "1 or more"
            if value not in (0, *range(2, 9)) if bits else value < (entry.name != "draft_tokens"):
                problems.append(
                    Problem(where="cache", what=f"{entry.name} out of range", expected=expected, found=str(value))
                )
        if any((k == 0) != (v == 0) for k, v in ((self.k_bits, self.v_bits), (self.draft_k_bits, self.draft_v_bits))):
            problems.append(Problem(where="cache", what="keys and values are both quantised or neither"))
        if problems:
            raise PlacementError(*problems)

    def bits(self, cache: LayerCache) -> tuple[int, int]:
        """Return the bits of keys and values of a cache; 0 for FP16."""
        return (self.draft_k_bits, self.draft_v_bits) if cache.draft else (self.k_bits, self.v_bits)

    def gpus(self, cache: LayerCache) -> int:
        """Return how many GPUs share a layer: drafts are loaded whole on one."""
        return 1 if cache.draft else self.tp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Exllamav3Cache:
    """The cache of one GPU.

    Attributes:
        options: What the launch says.
        caches: What the layers of the GPU keep, and those of a draft.
        bytes_per_token: Bytes of one token of ``cache_size`` on this GPU.
        state_bytes_per_slot: Bytes of the rings and states of one request.
    """

    options: Exllamav3CacheOptions
    caches: tuple[LayerCache, ...]
    bytes_per_token: int
    state_bytes_per_slot: int

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return PAGE_TOKENS

    @property
    def state_slots_per_request(self) -> int:
        """Slots a request holds; 0 where no layer has any."""
        return int(self.state_bytes_per_slot > 0)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of the rings and states of one request."""
        return self.state_bytes_per_slot

    def allocated_bytes(self, cache_tokens: int, slots: int | None = None) -> int:
        """Return the bytes of a cache of this ``cache_size``, rounded up to pages, with its slots."""
        slots = self.options.slots if slots is None else slots
        return round_up(cache_tokens, PAGE_TOKENS) * self.bytes_per_token + slots * self.state_bytes_per_slot

    def capacity_tokens(self, budget_bytes: int, context_tokens: int = 0) -> int:  # noqa: ARG002 - same as other engines
        """Return the largest ``cache_size`` a budget holds beside the slots; it does not depend on the context."""
        left = budget_bytes - self.options.slots * self.state_bytes_per_slot
        if not self.bytes_per_token:
            return MOST_CONTEXT_TOKENS if left >= 0 else 0
        return max(left, 0) // (PAGE_TOKENS * self.bytes_per_token) * PAGE_TOKENS

    def cache_tokens(self, concurrency: int, context_tokens: int) -> int:
        """Return the ``cache_size`` for so many requests of this length."""
        return concurrency * round_up(context_tokens, PAGE_TOKENS)

    def request_bytes(self, context_tokens: int) -> int:
        """Return what one request more of this length takes."""
        return self.allocated_bytes(context_tokens, 1)

    def needed_bytes(self, concurrency: int, context_tokens: int) -> int:
        """Return the bytes of a cache for so many requests of this length; no fewer slots than are configured."""
        return self.allocated_bytes(
            self.cache_tokens(concurrency, context_tokens), max(concurrency, self.options.slots)
        )

    def concurrency(self, budget_bytes: int, context_tokens: int) -> int:
        """Return how many requests of this length a budget holds, with a slot for each."""
        request = self.request_bytes(context_tokens)
        if not request:
            return self.options.slots
        within = self.capacity_tokens(budget_bytes) // round_up(context_tokens, PAGE_TOKENS)
        return within if within <= self.options.slots else budget_bytes // request

    def longest_context(
        self, budget_bytes: int, *, concurrency: int = 1, most_tokens: int = MOST_CONTEXT_TOKENS
    ) -> int:
        """Return the longest context at which so many requests fit; 0 where not one page fits."""
        slots = max(concurrency, self.options.slots) * self.state_bytes_per_slot
        if not self.bytes_per_token:
            return most_tokens if slots <= budget_bytes else 0
        pages = max(budget_bytes - slots, 0) // (PAGE_TOKENS * self.bytes_per_token)
        return min(pages // concurrency * PAGE_TOKENS, most_tokens)


def exllamav3_cache(
    caches: Sequence[LayerCache], options: Exllamav3CacheOptions | None = None, *, layers: range | None = None
) -> Exllamav3Cache:
    """Return exllamav3's cache on one GPU.

    Args:
        caches: What the layers of the whole model keep; those of a draft beside them (``draft=True``).
        options: What the launch says.
        layers: The layers of the GPU where layers are spread over GPUs; ``None`` for all.

    Raises:
        PlacementError: Elements are no whole groups of 32, or a layer cannot be shared.
        UnknownFormatError: The engine has no such recurrence.
    """
    options = options or Exllamav3CacheOptions()
    kept = owned(caches) if layers is None else on_stage(owned(caches), layers)
    return Exllamav3Cache(
        options=options,
        caches=kept,
        bytes_per_token=-(-sum(_page_bytes(cache, options) * len(cache.layers) for cache in kept) // PAGE_TOKENS),
        state_bytes_per_slot=sum(_slot_bytes(cache, options) * len(cache.layers) for cache in kept),
    )


def cache_bits(mode: str) -> tuple[int, int]:
    """Return the bits of keys and values of a cache mode: TabbyAPI's, or a precision; 0 for FP16.

    >>> cache_bits("Q6"), cache_bits("8,4"), cache_bits("FP16")
    ((6, 6), (8, 4), (0, 0))

    Raises:
        UnknownFormatError: No such mode.
    """
    if match := _BITS.fullmatch(mode.strip()):
        return int(match[1]), int(match[2])
    bits = _MODES.get(mode.strip().lower())
    if bits is None:
        raise UnknownFormatError(
            Problem(
                where="--kv-dtype", what="exllamav3 has no such cache mode", found=mode,
                expected=", ".join((*CACHE_MODES, *(mode for mode in _MODES if mode.upper() not in CACHE_MODES))),
            )
        )  # fmt: skip
    return bits


# --- one layer -------------------------------------------------------------------------------------------------------


def _page_bytes(cache: LayerCache, options: Exllamav3CacheOptions) -> int:
    """Return the bytes of one page of one layer."""
    k_bits, v_bits = options.bits(cache)
    match cache.kept:
        case Attention(window_tokens=0) as kept:
            heads = _largest_share(kept.kv_heads, options.gpus(cache))
            token = _elements_bytes(heads * kept.head_size, k_bits) + _elements_bytes(heads * kept.value_size, v_bits)
        case Latent() as kept:
            token = _elements_bytes(kept.rank, k_bits) + _HALF * kept.rope_size
        case Indexer() as kept:
            token = _HALF * kept.head_size
        case Compressed(ratio=ratio) as kept if ratio:
            return PAGE_TOKENS // ratio * _HALF * (kept.head_size + kept.index_size)
        case _:
            return 0
    return PAGE_TOKENS * token


def _slot_bytes(cache: LayerCache, options: Exllamav3CacheOptions) -> int:
    """Return what one request holds of one layer whatever its length."""
    match cache.kept:
        case Attention(window_tokens=window) as kept if window:
            heads = _largest_share(kept.kv_heads, options.gpus(cache))
            return _ring_tokens(window) * heads * (kept.head_size + kept.value_size) * _HALF
        case State() as kept:
            return _state_bytes(kept, options)
        case Compressed() as kept:
            return _ring_tokens(kept.window_tokens) * kept.head_size * _HALF + _compressor_bytes(kept)
        case _:
            return 0


def _ring_tokens(window: int) -> int:
    return round_up(window + RING_SPARE_TOKENS, PAGE_TOKENS)


def _elements_bytes(elements: int, bits: int) -> int:
    """Return the bytes of elements in FP16, or in words of 32 elements by bits with an FP16 scale each."""
    if not bits:
        return elements * _HALF
    if elements % _GROUP:
        raise PlacementError(
            Problem(
                where="cache", what="a quantised cache keeps whole groups of elements",
                expected=f"a multiple of {_GROUP}", found=str(elements),
            )
        )  # fmt: skip
    return elements // _GROUP * (bits * 4 + _HALF)


def _state_bytes(kept: State, options: Exllamav3CacheOptions) -> int:
    """Return a slot of a recurrence: convolution, two states, and the inputs of every token that may be taken back.

    Staged are the convolution's channels and one number per head in half precision, and the decay in single: one per
    head, and with KDA one per channel of a key.
    """
    if kept.kind in ("mamba1", "linear"):
        raise UnknownFormatError(
            Problem(where="cache", what="exllamav3 has no such recurrence", expected="gdn, kda, mamba2, short_conv",
                    found=kept.kind)
        )  # fmt: skip
    units = gcd(*(run.units for run in kept.conv), kept.heads)
    share = _largest_share(units, options.tp_size)
    channels, heads = (whole // units * share for whole in (kept.conv_channels, kept.heads))
    conv = _HALF * channels * (kept.conv_kernel + options.draft_tokens)
    if not heads:
        return conv
    state = 2 * heads * kept.key_size * kept.value_size * (_FLOAT if kept.kind == "mamba2" else _HALF)
    decays = heads * (kept.key_size if kept.kind == "kda" else 1)
    return conv + state + (options.draft_tokens + 1) * (_HALF * channels + _HALF * heads + _FLOAT * decays)


def _compressor_bytes(kept: Compressed) -> int:
    """Return the rings of a DeepSeek-V4 compressor: projected inputs of a page, and snapshots where groups overlap."""
    if not kept.ratio:
        return 0
    if PAGE_TOKENS % kept.ratio:
        raise PlacementError(
            Problem(
                where="cache", what="a compression ratio must divide a page", expected=f"a divisor of {PAGE_TOKENS}",
                found=str(kept.ratio),
            )
        )  # fmt: skip
    width = kept.head_size + kept.index_size
    inputs = 2 * (PAGE_TOKENS + kept.ratio) * kept.overlap * width * _HALF
    snapshots = (PAGE_TOKENS // kept.ratio + 2) * 2 * kept.ratio * width * _FLOAT if kept.overlap > 1 else 0
    return inputs + snapshots


def _largest_share(units: int, ranks: int) -> int:
    return -(-units // ranks)
