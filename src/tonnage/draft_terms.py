"""What a draft adds to a rank beside its cache: weights, buffers, graphs, activations. One term for each reason.

Its layers' caches go into the cache of the engine (:meth:`tonnage.draft.Draft.with_caches`,
:meth:`~tonnage.draft.Draft.cache_options`), the rows it makes the target verify and the hidden states the target hands
on into what is served (:meth:`~tonnage.draft.Draft.serving`).

Source:
    vLLM 0.32.0 ``v1/worker/gpu/spec_decode``: ``speculator.py``, ``target_dependent_ar/speculator.py``,
    ``standalone_ar/speculator.py``, ``dflash/speculator.py``, ``dflash2/speculator.py`` for what is kept.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tonnage.draft import BLOCK_METHODS, WITHOUT_MODEL, PlacedDraft, embedding_of
from tonnage.draft_weights import draft_weights, exact_term
from tonnage.logged.lines import logged_lines
from tonnage.logged.rotary import COMPONENT as ROTARY
from tonnage.logged.step_buffers import step_buffers
from tonnage.memory.runtime_rules import (
    GRAPH_PER_LAYER_BYTES,
    POOL_PER_TOKEN_BYTES,
    ROUTED_POOL_PER_TOKEN_BYTES,
    capture_sizes,
)
from tonnage.memory.term import Term
from tonnage.memory.workspace import activation_peak
from tonnage.model_shape import model_shape
from tonnage.recipes.drafts import WHOLE_MODEL
from tonnage.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.memory.workspace_shape import Deployment, Serving
    from tonnage.placement import Placement

SPEC_DECODE = "vLLM 0.32.0 v1/worker/gpu/spec_decode"
SERVED_BYTES = 2
"""Bytes of an element of an activation, a hidden state or a logit of the head."""
SELECTED_BYTES = 4
"""DFlash2 keeps its probabilities in F32."""


def draft_terms(
    placed: PlacedDraft,
    *,
    pp_rank: int,
    tp_rank: int,
    serving: Serving,
    deployment: Deployment,
    gpu_arch: str | None = None,
) -> tuple[Term, ...]:
    """Return what a draft adds to one rank of its target, in report order; nothing to ranks that hold none of it.

    Components: ``draft.weights``, ``draft.embedding``, ``draft.head``, ``draft.context_kv``, ``draft.engine`` (what the
    engine keeps beside the weights), ``draft.probabilities``, ``draft.buffers``, ``draft.graphs``, and
    ``workspace.draft``, which is transient.

    Args:
        placed: The draft beside its target.
        pp_rank: Pipeline stage of the target.
        tp_rank: Tensor-parallel rank.
        serving: What is served.
        deployment: On what.
        gpu_arch: Compute capability as the GPU table has it, if known.
    """
    rank = placed.tp_rank(pp_rank, tp_rank)
    placement = placed.placement
    if rank is None or placement is None:
        return tuple(_without_model(placed, pp_rank, serving))
    return (
        *draft_weights(placed, tp_rank=rank),
        *_engine(placed, placement, rank, deployment, gpu_arch, serving.batched_tokens),
        *_probabilities(placed, placement, serving),
        _buffers(placed, placement, serving),
        *_graphs(placement, serving, deployment),
        *_workspace(placed, placement, rank, serving, deployment),
    )


def _engine(
    placed: PlacedDraft,
    placement: Placement,
    rank: int,
    deployment: Deployment,
    gpu_arch: str | None,
    step_tokens: int,
) -> Iterator[Term]:
    """Yield what the engine logs as weights beside them: tables, padding, copies, rounding, buffers of a step."""
    release = deployment.release
    version = ".".join(map(str, release)) if release else None
    lines = (
        *logged_lines(placement, pp_rank=0, tp_rank=rank, gpu_arch=gpu_arch, engine_version=version),
        *step_buffers(placement, pp_rank=0, step_tokens=step_tokens),
    )
    kept = [line for line in lines if placed.draft.method != "mtp" or line.component != ROTARY]
    if kept:
        yield Term(
            component="draft.engine",
            nbytes=sum(line.nbytes for line in kept),
            bound_nbytes=sum(line.bound_nbytes for line in kept),
            basis="modelled",
            source=", ".join(line.component for line in kept),
        )


def _probabilities(placed: PlacedDraft, placement: Placement, serving: Serving) -> Iterator[Term]:
    draft = placed.draft
    if not draft.sampled:
        return
    module = embedding_of(placement.assignment) or embedding_of(placed.target.assignment)
    vocab = module.out_size if module is not None else 0
    width = SELECTED_BYTES if draft.method == "dflash2" else SERVED_BYTES
    nbytes = serving.max_seqs * draft.tokens * vocab * width
    rule = f"{counted(serving.max_seqs, 'sequence')} x {counted(draft.tokens, 'token')} x {vocab} x {width} bytes"
    yield exact_term("draft.probabilities", nbytes, f"{rule} ({SPEC_DECODE}/speculator.py)", basis="modelled")


def _buffers(placed: PlacedDraft, placement: Placement, serving: Serving) -> Term:
    """The draft's inputs, the hidden states it goes on from, and what it samples into.

    Embeddings are kept beside the hidden states where target and draft both take images: in the bound.
    """
    draft, seqs, tokens, groups = placed.draft, serving.max_seqs, serving.batched_tokens, serving.cache_groups
    sampled = seqs * draft.tokens
    inputs = 12 * tokens + 48 * seqs + 12 * sampled
    hidden = tokens * _hidden_size(placed, placement) * SERVED_BYTES
    most = 0
    if draft.method == WHOLE_MODEL:
        hidden = 0
        inputs += (tokens + seqs) * (12 + 8 * groups)
    elif draft.method in BLOCK_METHODS:
        inputs += tokens * (8 + 8 * groups) + 28 * sampled + _hidden_size(placed, placement) * SERVED_BYTES
        inputs += 12 * sampled * _count(placement, "dflash_config", "selector_top_k")
    else:
        most = hidden
    nbytes = inputs + hidden
    rule = f"{counted(tokens, 'token')}, {counted(seqs, 'sequence')}, {draft.tokens} drafted ({SPEC_DECODE})"
    return Term(component="draft.buffers", nbytes=nbytes, bound_nbytes=nbytes + most, basis="modelled", source=rule)


def _graphs(placement: Placement, serving: Serving, deployment: Deployment) -> Iterator[Term]:
    """Yield what the draft's graphs hold: they share the target's pool; at most a pool of their own, captured twice."""
    if serving.eager:
        return
    sizes = capture_sizes(serving, deployment.gpu_class)
    layers = _layers(placement)
    routed = any(entry.entry.module.rule.is_routed for entry in placement.placed)
    pool = POOL_PER_TOKEN_BYTES + (ROUTED_POOL_PER_TOKEN_BYTES if routed else 0)
    each = len(sizes) * layers * GRAPH_PER_LAYER_BYTES * (2 if deployment.gpu_class == "amd" else 1)
    most = 2 * each + (sizes[-1] * pool if sizes else 0)
    yield Term(
        component="draft.graphs", nbytes=each, bound_nbytes=most, basis="modelled",
        source=f"{counted(len(sizes), 'size')}, {counted(layers, 'layer')}, in the target's pool; at most twice and in "
        "one of their own",
    )  # fmt: skip


def _workspace(
    placed: PlacedDraft, placement: Placement, rank: int, serving: Serving, deployment: Deployment
) -> Iterator[Term]:
    """Yield the peak of the draft's own step; MTP layers are of the target's kind, whose peak is no smaller.

    A head reads the tapped states, their concatenation and what ``fc`` makes of them; its layer's outputs all count.
    """
    draft = placed.draft
    if draft.method == "mtp":
        return
    if draft.method == WHOLE_MODEL:
        peak = activation_peak(model_shape(placement, tp_rank=rank), serving, gpu=deployment.gpu_class)
        nbytes, most, rule = peak.nbytes, peak.most, f"its own step: {peak.binding}"
    else:
        target = embedding_of(placed.target.assignment)
        tapped = 2 * draft.tapped_layers * (target.in_size if target is not None else 0)
        width = tapped + 4 * _hidden_size(placed, placement) + _widest_layer(placement, rank)
        nbytes = most = serving.batched_tokens * width * SERVED_BYTES
        rule = f"{draft.tapped_layers} tapped states twice, hidden states, outputs of one layer"
    yield Term(
        component="workspace.draft", nbytes=nbytes, bound_nbytes=max(nbytes, most), transient=True, basis="modelled",
        source=f"step of {counted(serving.batched_tokens, 'token')}, {rule}",
    )  # fmt: skip


def _without_model(placed: PlacedDraft, pp_rank: int, serving: Serving) -> Iterator[Term]:
    """Yield the token history of n-gram drafting, which one variant keeps on the GPU."""
    if placed.draft.method in WITHOUT_MODEL and pp_rank == placed.target.topology.pp - 1:
        most = serving.max_seqs * serving.context_tokens * 4 if placed.draft.method == "ngram" else 0
        yield Term(
            component="draft.buffers", nbytes=0, bound_nbytes=most, basis="modelled",
            source="token history, on the GPU for the n-gram variant that runs there",
        )  # fmt: skip


def _hidden_size(placed: PlacedDraft, placement: Placement) -> int:
    """Return the width of the hidden states a draft goes on from; MTP of DeepSeek-V4 takes all the target's streams."""
    module = embedding_of(placement.assignment) or embedding_of(placed.target.assignment)
    width = module.in_size if module is not None else 0
    return width * (_count(placed.target, "hc_mult") or 1) if placed.draft.method == "mtp" else width


def _count(placement: Placement, *path: str) -> int:
    """Return a positive number the config states under a key, or under one in an object; 0 without one."""
    here: object = placement.assignment.blueprint.config.fields
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here if isinstance(here, int) and not isinstance(here, bool) and here > 0 else 0


def _layers(placement: Placement) -> int:
    """Return the layers of a draft: its indices, or the one that has none."""
    return len({index for entry in placement.placed for index in entry.entry.first}) or 1


def _widest_layer(placement: Placement, rank: int) -> int:
    """Return the outputs of one layer's linear weights on this rank, embedding, head and routed experts aside."""
    widths: dict[int, int] = defaultdict(int)
    for placed in placement.placed:
        module, share = placed.entry.module, placed.shares[rank]
        if not module.rule.is_linear or module.rule.split == "vocab" or module.rule.is_routed:
            continue
        cut = share.axis == "out" and share.ranges
        out = sum(end - begin for begin, end in share.ranges) if cut else module.out_size
        for index in placed.entry.first or (0,):
            widths[index] += out
    return max(widths.values(), default=0)
