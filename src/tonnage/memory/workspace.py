"""The activation peak of one prefill step: what the forward pass, the head and the sampler hold at once.

The engine runs one full step before it sizes its cache. Of what a step allocates, the forward pass of the widest layer,
the sampler's copies of the logits, and the encoder's forward pass follow one another, so the largest counts; residual
stream, workspaces of the experts and of the latent cache, and the encoder's outputs are there all the time. Attention
kernels themselves run in place.

Source:
    vLLM 0.33.0 ``v1/worker/gpu``, profile run; bytes per logit and the constant are fitted:
    ``docs/runtime-agreement.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.memory.workspace_experts import expert_backend, expert_workspace, widest_workspace
from tonnage.units import GIB, MIB

if TYPE_CHECKING:
    from tonnage.memory.workspace_shape import GpuClass, ModelShape, Serving

SAMPLER_HALF_BYTES_PER_LOGIT = 25
"""Half bytes the sampler holds for a logit beside the head's own output: FP32 copy, sorted copy, indices, masks."""
SMALL_BYTES = 58 * MIB
"""Positions, ids, slot mappings, metadata, and what the allocator rounds up."""
LATENT_ROWS = 65536
"""Rows of context MLA's chunked prefill gathers at most."""
VERIFY_CHUNK_BYTES = GIB
"""FP32 logits of a verification step are made in chunks of at most this."""
INDEX_SCORES_BYTES = 512 * MIB
INDEX_GATHER = 8
LONG_CONTEXT = 1 << 18
CONTEXTS, LONG_CONTEXTS = 5, 2
"""Contexts sparse MLA gathers at once: up to and beyond a long context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One addend of the peak: its name, expected bytes and bytes at most."""

    name: str
    nbytes: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The activation peak.

    Attributes:
        held: Addends that are there during the whole step.
        passing: Of these the largest counts.
    """

    held: tuple[Part, ...]
    passing: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Expected bytes."""
        return sum(part.nbytes for part in self.held) + max(part.nbytes for part in self.passing)

    @property
    def most(self) -> int:
        """Bytes if every addend takes the most its rule allows."""
        return sum(part.most for part in self.held) + max(part.most for part in self.passing)

    @property
    def binding(self) -> str:
        """The passing addend that counts."""
        return max(self.passing, key=lambda part: part.nbytes).name


def activation_peak(shape: ModelShape, serving: Serving, *, pp: int = 1, gpu: GpuClass | None = None) -> Peak:
    """Return the peak of one step of ``batched_tokens`` tokens on one rank.

    Args:
        shape: The rank.
        serving: What is served.
        pp: Pipeline stages; between stages hidden state and residual are kept twice.
        gpu: What it runs on; it decides the kernels of the experts.
    """
    stream = serving.batched_tokens * shape.hidden_size * shape.dtype_bytes
    held = [
        _same("hidden state", stream * (3 if pp > 1 else 1)),
        _same("small tensors", SMALL_BYTES),
        *_scratch(shape, serving, gpu),
        *_gathered(shape, serving),
        *_vision_outputs(shape, serving),
    ]
    if serving.tapped_layers:
        held.append(_same("tapped hidden states", (serving.tapped_layers + 1) * stream))
    passing = [_forward(shape, serving), _logits(shape, serving), *_encoder(shape, serving), *_expanded(shape, serving)]
    return Peak(held=tuple(held), passing=tuple(passing))


def _same(name: str, nbytes: int) -> Part:
    return Part(name=name, nbytes=nbytes, most=nbytes)


def _forward(shape: ModelShape, serving: Serving) -> Part:
    """The widest layer: gate, up and their product, or the mixer's projections; and a normed and a residual stream."""
    width = max(shape.mlp_width, shape.mixer_width)
    elements = serving.batched_tokens * (width + 2 * shape.hidden_size)
    return _same("forward pass", elements * shape.dtype_bytes)


def _logits(shape: ModelShape, serving: Serving) -> Part:
    """Head and sampler: every rank holds the gathered logits of every sequence.

    A draft's proposals are verified in further rows; their FP32 copy is made in chunks.
    """
    if not shape.logits:
        return _same("logits", 0)
    rows = min(serving.max_seqs, serving.batched_tokens)
    logits = rows * shape.vocab_size
    nbytes = logits * (2 * shape.dtype_bytes + SAMPLER_HALF_BYTES_PER_LOGIT) // 2
    more_rows = min(serving.max_seqs * (1 + serving.draft_tokens), serving.batched_tokens) - rows
    more = more_rows * shape.vocab_size
    most = nbytes + more * shape.dtype_bytes + min(more * 4, VERIFY_CHUNK_BYTES) * 3
    return Part(name="logits", nbytes=nbytes, most=most)


def _scratch(shape: ModelShape, serving: Serving, gpu: GpuClass | None) -> list[Part]:
    """The scratch all layers share, kept after the profile: that of the routed experts, or of sparse MLA's context."""
    parts = [*_experts(shape, serving, gpu), *_sparse_context(shape, serving)]
    if len(parts) < 2:
        return parts
    largest = max(parts, key=lambda part: part.nbytes)
    return [Part(name=largest.name, nbytes=largest.nbytes, most=max(part.most for part in parts))]


def _experts(shape: ModelShape, serving: Serving, gpu: GpuClass | None) -> list[Part]:
    if shape.routed is None:
        return []
    backend = expert_backend(shape.routed.fmt, gpu)
    expected = expert_workspace(shape.routed, serving.batched_tokens, shape.dtype_bytes, backend)
    most = widest_workspace(shape.routed, serving.batched_tokens, shape.dtype_bytes)
    return [Part(name=f"expert workspace ({backend})", nbytes=expected, most=most)]


def _sparse_context(shape: ModelShape, serving: Serving) -> list[Part]:
    """The latents sparse MLA gathers: several contexts full."""
    if not shape.index_width:
        return []
    return [
        _same("sparse context", _contexts(serving) * serving.context_tokens * shape.latent_width * shape.dtype_bytes)
    ]


def _contexts(serving: Serving) -> int:
    return CONTEXTS if serving.context_tokens <= LONG_CONTEXT else LONG_CONTEXTS


def _gathered(shape: ModelShape, serving: Serving) -> list[Part]:
    """What MLA gathers of the context in a prefill step, or the keys its indexer gathers and its scores."""
    context = serving.context_tokens
    if shape.index_width:
        key = shape.index_width + 4 * -(-shape.index_width // 128)
        keys = _contexts(serving) * -(-context // shape.index_pool) * INDEX_GATHER * key
        return [_same("indexer keys and scores", keys + INDEX_SCORES_BYTES)]
    if not shape.latent_width:
        return []
    rows = _latent_rows(serving)
    return [_same("latent context", rows * shape.latent_width * shape.dtype_bytes)]


def _latent_rows(serving: Serving) -> int:
    return min(max(8 * serving.context_tokens, 4 * serving.max_seqs * serving.page_tokens), LATENT_ROWS)


def _expanded(shape: ModelShape, serving: Serving) -> list[Part]:
    """The gathered latents' keys and values: attention makes them, which the engine's own profile leaves out."""
    if not shape.latent_up_width or shape.index_width:
        return []
    most = _latent_rows(serving) * shape.latent_up_width * shape.dtype_bytes
    return [Part(name="latents' keys and values", nbytes=0, most=most)]


def _vision_tokens(shape: ModelShape, serving: Serving) -> int:
    if shape.encoder is None or not serving.vision:
        return 0
    return max(serving.batched_tokens, shape.encoder.item_tokens)


def _vision_outputs(shape: ModelShape, serving: Serving) -> list[Part]:
    """The encoder's outputs, and the embeddings they are merged into."""
    nbytes = 2 * _vision_tokens(shape, serving) * shape.hidden_size * shape.dtype_bytes
    return [_same("encoder outputs", nbytes)] if nbytes else []


def _encoder(shape: ModelShape, serving: Serving) -> list[Part]:
    """The encoder over the largest items: residual, normed, mixed and merged stream, and its widest output."""
    tokens = _vision_tokens(shape, serving)
    if not tokens or shape.encoder is None:
        return []
    patches = tokens * shape.encoder.patches_per_token
    width = shape.encoder.width + 4 * shape.encoder.hidden_size
    return [_same("encoder forward pass", patches * width * shape.dtype_bytes)]
