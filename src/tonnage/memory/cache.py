"""What a layer keeps between steps: keys and values, a latent, index keys, or a state that does not grow.

These are facts of the model, stated by its recipe. What an engine makes of them (dtypes, pages, pools) is in
``cache_ENGINE.py``; bytes of one token or one slot in a given dtype are in :mod:`tonnage.memory.cache_dtypes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

StateKind = Literal["gdn", "kda", "mamba2", "mamba1", "linear", "short_conv"]
"""Gated delta net, Kimi delta attention, state space models, linear attention, a short convolution alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Keys and values of every token, or of the last ones only.

    Attributes:
        kv_heads: Key and value heads of the whole layer.
        head_size: Elements of one key.
        value_size: Elements of one value.
        window_tokens: Only this many last tokens are attended to; 0 for all.
        chunk_tokens: Only tokens of the same chunk of this size are attended to; 0 for all.
    """

    kv_heads: int
    head_size: int
    value_size: int
    window_tokens: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        _refuse_below(self, 1, self.kv_heads, self.head_size)
        _refuse_below(self, 0, self.value_size, self.window_tokens, self.chunk_tokens)
        if self.window_tokens and self.chunk_tokens:
            raise ValueError(f"both a window and chunks: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """One compressed vector per token for all heads (MLA): ``rank`` elements and ``rope_size`` with positions.

    Attributes:
        rank: Elements of the latent.
        rope_size: Elements that carry the position.
        sparse: An indexer chooses the tokens that are read, which takes kernels with a record format of their own.
        window_tokens: As in :class:`Attention`.
    """

    rank: int
    rope_size: int
    sparse: bool = False
    window_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        _refuse_below(self, 1, self.rank)
        _refuse_below(self, 0, self.rope_size, self.window_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """One key per token by which an indexer chooses what attention reads.

    Attributes:
        head_size: Elements of the key.
        scaled: Kept in FP8 with one F32 scale per 128 elements, whatever the KV dtype; otherwise in the model dtype.
    """

    head_size: int
    scaled: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        _refuse_below(self, 1, self.head_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """DeepSeek-V4: a sliding window of plain records, and one record for every ``ratio`` tokens behind it.

    A layer with a ratio also keeps the F32 state of its compressor: the values and scores of the open group, and of
    the group before it where groups overlap (ratio 4).

    Attributes:
        head_size: Elements of one record, one for all heads.
        rope_size: Of these, elements that carry the position and stay in BF16.
        window_tokens: Tokens of the sliding part.
        ratio: Tokens of one compressed record; 0 where there is no compressed part.
        index_size: Elements of the compressed index key; 0 without an indexer.
    """

    head_size: int
    rope_size: int
    window_tokens: int
    ratio: int = 0
    index_size: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        _refuse_below(self, 1, self.head_size, self.window_tokens)
        _refuse_below(self, 0, self.rope_size, self.ratio, self.index_size, self.head_size - self.rope_size)

    @property
    def overlap(self) -> int:
        """Groups of tokens the compressor keeps open at once."""
        return 2 if self.ratio == _OVERLAPPING_RATIO else 1


_OVERLAPPING_RATIO = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvRun:
    """Channels of a convolution that are cut over ranks together.

    Attributes:
        units: Heads or groups that cannot be cut.
        unit_size: Channels of one.
        replicas: Units are held by several ranks where they do not divide by the ranks.
    """

    units: int
    unit_size: int
    replicas: bool = False

    @property
    def channels(self) -> int:
        """Channels of the whole layer."""
        return self.units * self.unit_size


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state per request that does not grow: a recurrent matrix per head and the last inputs of a convolution.

    Attributes:
        kind: Which recurrence it is; an engine's default dtype depends on it.
        heads: Heads of the recurrent part, cut over ranks; 0 without one.
        key_size: Elements of a head's key (of the state, for state space models).
        value_size: Elements of a head's value.
        conv: Channels of the convolution; empty without one.
        conv_kernel: Its width in tokens; the state holds one less, and one more for every draft token.
        dtype: Dtype of the recurrent part as the config states it (safetensors spelling); empty where it does not.
    """

    kind: StateKind
    heads: int = 0
    key_size: int = 0
    value_size: int = 0
    conv: tuple[ConvRun, ...] = ()
    conv_kernel: int = 0
    dtype: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        _refuse_below(self, 0, self.heads, self.key_size, self.value_size)
        if bool(self.conv) != (self.conv_kernel > 0):
            raise ValueError(f"a convolution needs channels and a kernel: {self}")

    @property
    def elements(self) -> int:
        """Elements of the recurrent part of one request, over all ranks."""
        return self.heads * self.key_size * self.value_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, over all ranks."""
        return sum(run.channels for run in self.conv)


Kept = Attention | Latent | Indexer | Compressed | State


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What some layers keep, all of them alike.

    Attributes:
        kept: What one of them keeps.
        layers: The decoder layers, in order; each of them is on one pipeline stage.
        source: Recipe file, without suffix, it is stated in.
        draft: They belong to a draft model, which keeps them beside the target's.
        borrowed: They read what earlier layers keep; some engines set memory aside for them all the same.
    """

    kept: Kept
    layers: tuple[int, ...]
    source: str = field(default="", compare=False)
    draft: bool = False
    borrowed: bool = False

    def __post_init__(self) -> None:
        """Refuse a cache no layer keeps."""
        if not self.layers:
            raise ValueError(f"no layer keeps {self.kept}")


def on_stage(caches: Iterable[LayerCache], layers: range) -> tuple[LayerCache, ...]:
    """Return what the layers of one pipeline stage keep; a draft's layers are all on the stage that is asked for."""
    kept = []
    for cache in caches:
        here = cache.layers if cache.draft else tuple(layer for layer in cache.layers if layer in layers)
        if here:
            kept.append(replace(cache, layers=here))
    return tuple(kept)


def owned(caches: Iterable[LayerCache]) -> tuple[LayerCache, ...]:
    """Return what layers keep for themselves, without those that read what earlier ones keep."""
    return tuple(cache for cache in caches if not cache.borrowed)


def _refuse_below(kept: object, least: int, *values: int) -> None:
    if any(value < least for value in values):
        raise ValueError(f"out of range: {kept}")
