"""How vLLM puts the pages of all layers into groups that share one block table, and what one block then takes.

Groups are formed over all pipeline stages at once; a stage holds its own layers of each. Pages stand either in layers
(all of one size, made equal by larger blocks or padding) or packed side by side in a block (any sizes).

Source:
    vLLM 0.32.0 ``v1/core/kv_cache_utils.py``: get_kv_cache_groups, unify_kv_cache_spec_page_size,
    _get_kv_cache_groups_uniform_page_size, _get_packed_kv_cache_groups, _promote_local_kv_cache_specs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem
from tonnage.memory.cache_vllm_pages import GROWING, LayerPage, Page, full_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.cache_vllm_options import VllmCacheOptions


@dataclass(frozen=True, kw_only=True)  # no slots: distinct pages are found once
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        pages: One page per layer and cache.
    """

    pages: tuple[LayerPage, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of one block; all its pages agree, but for states."""
        return self.pages[0].page.block_tokens

    @property
    def grows(self) -> bool:
        """Whether a request holds more of its blocks the longer it gets, without end."""
        return self.pages[0].page.kind in GROWING

    @property
    def sharded(self) -> bool:
        """Whether ranks of decode context parallelism share its tokens."""
        return self.pages[0].page.sharded

    def blocks(self, context_tokens: int, options: VllmCacheOptions) -> int:
        """Return the blocks one request holds, at most."""
        return max(page.blocks(context_tokens, options) for page in self._distinct)

    @cached_property
    def _distinct(self) -> frozenset[Page]:
        return frozenset(entry.page for entry in self.pages)

    def nbytes(self, layers: range | None, *, draft: bool = True) -> int:
        """Return the bytes of one block for the layers of a stage, with the draft's or without."""
        return sum(entry.page.nbytes for entry in self.on_stage(layers, draft=draft))

    def on_stage(self, layers: range | None, *, draft: bool = True) -> tuple[LayerPage, ...]:
        """Return the pages of the layers of a stage, with the draft's or without."""
        return tuple(
            entry for entry in self.pages if (draft if entry.draft else layers is None or entry.layer in layers)
        )


def cache_groups(pages: Sequence[LayerPage], options: VllmCacheOptions, *, packed: bool) -> tuple[CacheGroup, ...]:
    """Return the groups of a whole model.

    Raises:
        PlacementError: Pages of different sizes cannot be made equal.
    """
    if not options.hybrid_manager:
        pages = _all_tokens(pages)
    if not pages:
        return ()
    if _uniform([entry.page for entry in pages]):
        return (CacheGroup(pages=tuple(pages)),)
    if packed and len({entry.page.nbytes for entry in pages}) > 1:
        return _packed_groups(pages)
    try:
        equal = _equal_pages(pages)
    except PlacementError:
        promoted = _latents_with_windows(pages)
        if promoted is None:
            raise
        return (CacheGroup(pages=promoted),)
    return _equal_groups(equal, options)


def _uniform(pages: Sequence[Page]) -> bool:
    """Whether pages always need the same blocks, so that one table serves all; their sizes may differ."""
    first = pages[0]
    if first.kind == "state":
        return all(p.kind == "state" and p.nbytes == first.nbytes for p in pages)
    if len({(p.block_tokens, p.sharded) for p in pages}) > 1:
        return False
    if first.kind in GROWING:
        return all(p.kind in GROWING for p in pages)
    kinds = {"sliding", "sliding_latent"} if first.kind == "sliding" else {first.kind}
    return all(
        p.kind in kinds and p.window_tokens == first.window_tokens and p.chunk_tokens == first.chunk_tokens
        for p in pages
    )


# --- pages of one size -----------------------------------------------------------------------------------------------


def _equal_pages(pages: Sequence[LayerPage]) -> tuple[LayerPage, ...]:
    """Return the pages in the size of the largest: with more tokens per block where that divides, else padded."""
    largest = max(entry.page.nbytes for entry in pages)
    return tuple(replace(entry, page=_enlarged(entry.page, largest)) for entry in pages)


def _enlarged(page: Page, nbytes: int) -> Page:
    if page.nbytes == nbytes:
        return page
    if page.kind == "state":
        return replace(page, padded_bytes=nbytes)
    if nbytes % page.nbytes == 0:
        return replace(page, block_tokens=page.block_tokens * (nbytes // page.nbytes))
    if page.kind in ("latent", "index"):
        raise PlacementError(
            Problem(
                where="cache",
                what=f"pages of a {page.kind} cache can be neither padded nor enlarged to those of the other layers",
                expected=f"a divisor of {nbytes} bytes",
                found=f"{page.nbytes} bytes",
            )
        )
    return replace(page, padded_bytes=nbytes)


def _equal_groups(pages: Sequence[LayerPage], options: VllmCacheOptions) -> tuple[CacheGroup, ...]:
    """Split every kind of page into groups of as many layers as the rarest kind has."""
    buckets: dict[Page, list[LayerPage]] = {}
    for entry in pages:
        buckets.setdefault(entry.page, []).append(entry)
    fewest, most = (choose(len(bucket) for bucket in buckets.values()) for choose in (min, max))
    size = most if most * 1000 < fewest * options.group_slack_permille else fewest
    groups = []
    for bucket in buckets.values():
        count = -(-len(bucket) // size)
        groups += [CacheGroup(pages=tuple(bucket[i::count])) for i in range(count)]
    return tuple(groups)


# --- windows kept like all tokens ------------------------------------------------------------------------------------


def _all_tokens(pages: Sequence[LayerPage]) -> tuple[LayerPage, ...]:
    """Return the pages without the hybrid manager: windows and chunks keep every token next to layers that do."""
    blocks = {entry.page.block_tokens for entry in pages if entry.page.kind in GROWING}
    local = {"sliding", "sliding_latent", "chunked"}
    if not blocks or _uniform([entry.page for entry in pages]):
        return tuple(pages)
    return tuple(
        replace(entry, page=full_page(entry.page, min(blocks) if len(blocks) == 1 else entry.page.block_tokens))
        if entry.page.kind in local
        else entry
        for entry in pages
    )


def _latents_with_windows(pages: Sequence[LayerPage]) -> tuple[LayerPage, ...] | None:
    """Return latents and plain windows as one group that keeps all tokens, the way out where sizes do not divide."""
    kinds = {entry.page.kind for entry in pages}
    if "latent" not in kinds or "sliding" not in kinds or kinds & {"sliding_latent", "chunked", "state"}:
        return None
    promoted = _all_tokens(pages)
    return promoted if _uniform([entry.page for entry in promoted]) else None


# --- pages of any size, packed into a block --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Pages that always need the same blocks."""

    pages: tuple[LayerPage, ...]

    @property
    def by_size(self) -> tuple[tuple[LayerPage, ...], ...]:
        sizes: dict[int, list[LayerPage]] = {}
        for entry in self.pages:
            sizes.setdefault(entry.page.nbytes, []).append(entry)
        return tuple(tuple(entries) for entries in sizes.values())

    @property
    def is_balanced(self) -> bool:
        """Every size occurs as often: a pattern of layers that repeats."""
        return len({len(entries) for entries in self.by_size}) == 1

    @property
    def repeats(self) -> int:
        return max(Counter(entry.page.nbytes for entry in self.pages).values())

    def widest(self, groups: int) -> int:
        """Bytes of the widest group when it is split."""
        return sum(-(-len(entries) // groups) * entries[0].page.nbytes for entries in self.by_size)


def _packed_groups(pages: Sequence[LayerPage]) -> tuple[CacheGroup, ...]:
    buckets = _buckets(pages)
    mixed = [b.repeats for b in buckets if b.is_balanced and len(b.by_size) > 1]
    repeats = _least_padding([b.repeats for b in buckets if b.is_balanced], least=max(mixed)) if mixed else 0

    def fixed_split(bucket: _Bucket) -> int:
        return -(-bucket.repeats // repeats) if bucket.is_balanced and repeats else 1

    def is_state(bucket: _Bucket) -> bool:
        kind = bucket.pages[0].page.kind
        return kind == "state" or (not repeats and kind in ("sliding", "sliding_latent"))

    anchor = max(b.widest(len(b.pages) if is_state(b) else fixed_split(b)) for b in buckets)
    groups = []
    for bucket in buckets:
        count = fixed_split(bucket)
        if is_state(bucket):
            per_block = max(anchor // bucket.pages[0].page.nbytes, 1)
            count = max(count, -(-len(bucket.pages) // per_block))
        if count == 1:
            groups.append(CacheGroup(pages=bucket.pages))
            continue
        pattern = tuple(zip(*bucket.by_size, strict=False))
        groups += [CacheGroup(pages=tuple(entry for row in pattern[i::count] for entry in row)) for i in range(count)]
    return tuple(groups)


def _buckets(pages: Sequence[LayerPage]) -> tuple[_Bucket, ...]:
    buckets: list[list[LayerPage]] = []
    kinds: list[dict[Page, None]] = []
    for entry in pages:
        for bucket, kind in zip(buckets, kinds, strict=True):
            if entry.page in kind or _uniform([*kind, entry.page]):
                bucket.append(entry)
                kind[entry.page] = None
                break
        else:
            buckets.append([entry])
            kinds.append({entry.page: None})
    return tuple(_Bucket(pages=tuple(bucket)) for bucket in buckets)


def _least_padding(counts: Sequence[int], *, least: int) -> int:
    """Return the group size from ``least`` up that pads the fewest layers; of equals the largest."""

    def padding(size: int) -> int:
        return sum(-count % size for count in counts)

    return min(range(least, max(counts) + 1), key=lambda size: (padding(size), -size))
