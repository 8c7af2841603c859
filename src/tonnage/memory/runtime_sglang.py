"""What SGLang holds beside weights and cache. Nothing is measured at start: it must fit in what its fraction leaves.

Source:
    SGLang 0.5.23 ``model_executor/model_runner.py``, ``server_args.py``, ``mem_cache/memory_pool.py``,
    ``mem_cache/kv_cache_configurator.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.memory.cache_sglang import request_table_bytes
from tonnage.memory.runtime_rules import context_bytes, graph_bytes
from tonnage.memory.term import Term
from tonnage.memory.terms import calibrated, case_of
from tonnage.memory.workspace import activation_peak
from tonnage.units import GIB, MIB, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.terms import TermRecord
    from tonnage.memory.workspace_shape import Deployment, ModelShape, Serving

WORKSPACE_BYTES = 512 * MIB
"""Attention workspace of the larger backends; the engine's own default reserve starts with it."""
EMBEDDING_CACHE_BYTES, FEATURE_TRANSPORT_BYTES = 100 * MIB, GIB
"""Off the cache of every rank of a multimodal model: SGLANG_VLM_CACHE_SIZE_MB and, from 0.5.17 on, for features that
stay on the GPU SGLANG_MM_FEATURE_CACHE_MB (``--mm-feature-transport cpu`` does without)."""
LARGEST_PREFILL_CAPTURE = 8192
LINKED_TP = 4


def sglang_limits(total_bytes: int | None, tp: int) -> tuple[int, int]:
    """Return the tokens of a step and the largest decode batch SGLang takes where nobody states them.

    Source:
        SGLang 0.5.23 ``server_args.py``: bands of the smallest total of the driver.
    """
    bands = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (90, 8192, 256, 512), (160, 8192, 256, 512))
    for below, tokens, batch, linked_batch in bands:
        if total_bytes is not None and total_bytes < below * GIB:
            return tokens, linked_batch if tp >= LINKED_TP else batch
    return (8192, 256) if total_bytes is None else (16384, 512)


def decode_sizes(last: int) -> tuple[int, ...]:
    """Return the batch sizes of decode graphs up to ``last``."""
    every = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, 4097, 32))
    return tuple(size for size in every if size <= last) or (1,)


def prefill_sizes(last: int) -> tuple[int, ...]:
    """Return the step sizes of prefill graphs up to ``last``."""
    every = (
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, last + 1, 512),
    )  # fmt: skip
    return tuple(size for size in every if size <= last)


def sglang_terms(
    shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> tuple[Term, ...]:
    """Return SGLang's terms: context, request table and workspace, multimodal reserve, graphs, activations."""
    nbytes = context_bytes(deployment.topology, routed=shape.routed is not None)
    context = calibrated(
        "runtime.context", (nbytes, nbytes), case_of("context", deployment, shape.kind), records,
        rule="driver context" if deployment.topology.world_size == 1 else "driver context and communicators",
    )  # fmt: skip
    peak = activation_peak(shape, serving, pp=deployment.topology.pp, gpu=deployment.gpu_class)
    activation = calibrated(
        "workspace.activation", (peak.nbytes, peak.most), case_of("activation", deployment, shape.kind), records,
        transient=True, rule=f"vLLM's rules for {serving.batched_tokens} tokens: {peak.binding}",
    )  # fmt: skip
    graphs = _graphs(shape, serving, deployment, records)
    return context, _buffers(serving), *_multimodal(shape), graphs, activation


def _buffers(serving: Serving) -> Term:
    table = request_table_bytes(serving.max_seqs, serving.context_tokens)
    return Term(
        component="runtime.buffers", nbytes=table, bound_nbytes=table + WORKSPACE_BYTES, basis="modelled",
        source=f"request table of {serving.max_seqs} + 1 requests; the bound has an attention workspace",
    )  # fmt: skip


def _multimodal(shape: ModelShape) -> tuple[Term, ...]:
    """Return what SGLang takes off the cache for images and sound, on every rank of a model that reads them."""
    if not shape.multimodal:
        return ()
    nbytes = EMBEDDING_CACHE_BYTES + FEATURE_TRANSPORT_BYTES
    source = "SGLang 0.5.23: 100 MiB of embeddings, 1 GiB of features (--mm-feature-transport)"
    return (Term(component="runtime.multimodal", nbytes=nbytes, bound_nbytes=nbytes, basis="modelled", source=source),)


def _graphs(shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]) -> Term:
    if serving.eager:
        return Term(component="runtime.graphs", nbytes=0, bound_nbytes=0, basis="exact", source="no graphs: eager")
    case = case_of("graphs", deployment, shape.kind)
    rule = (
        f"decode graphs of up to {counted(serving.largest_capture or serving.max_seqs, 'sequence')}, and prefill graphs"
    )
    return calibrated("runtime.graphs", modelled_graphs(shape, serving), case, records, rule=rule)


def modelled_graphs(shape: ModelShape, serving: Serving) -> tuple[int, int]:
    """Return what graphs take, expected and at most.

    Decode graphs take what vLLM's do; prefill graphs 8 MiB a size by the engine's own reserve, for MLA up to 1.5 GiB.
    """
    decode = graph_bytes(shape, serving, decode_sizes(serving.largest_capture or serving.max_seqs))
    if serving.eager:
        return 0, 0
    if shape.latent_width:
        return decode, decode + 1536 * MIB
    prefill = len(prefill_sizes(min(serving.batched_tokens, LARGEST_PREFILL_CAPTURE))) * 8 * MIB
    return decode + prefill, decode + prefill
