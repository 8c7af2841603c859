"""Everything a rank holds beside weights and cache, as terms: expected bytes, a bound, and how both are known.

:func:`runtime_terms` is what a plan asks. Persistent terms add up; of transient ones the largest counts. What loading
needs for a moment is apart (:func:`load_terms`), because it has a verdict of its own: a model may serve where it does
not load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tonnage.memory.runtime_exllamav3 import DEFAULT_LIMITS, exllamav3_terms
from tonnage.memory.runtime_rules import (
    EARLY_COMMUNICATION,
    FLASHINFER_WORKSPACE_BYTES,
    buffer_bytes,
    capture_sizes,
    context_bytes,
    graph_bytes,
    library_bytes,
    vllm_limits,
)
from tonnage.memory.runtime_sglang import sglang_limits, sglang_terms
from tonnage.memory.term import Term
from tonnage.memory.terms import calibrated, case_of, in_total
from tonnage.memory.workspace import activation_peak
from tonnage.memory.workspace_shape import Serving
from tonnage.units import MIB, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.terms import TermRecord
    from tonnage.memory.workspace import Peak
    from tonnage.memory.workspace_shape import Deployment, ModelShape
    from tonnage.profile import Profile

SLACK_BYTES = 150 * MIB
"""What vLLM itself leaves free where it suggests a size for the cache."""
UNSTATED = 2
"""Times the rule a peak may be under limits nobody stated."""


def runtime_terms(
    shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> tuple[Term, ...]:
    """Return the terms of one rank beside weights and cache, in report order.

    Components: ``runtime.context`` (before the engine's first snapshot; a supply measured as free memory of a running
    process is without it), ``runtime.libraries``, ``runtime.buffers``, ``runtime.multimodal``, ``runtime.graphs``,
    ``runtime.slack``, and ``workspace.activation``, which is transient. A topology without an engine (``split``) takes
    vLLM's rules, corrected by what published packages show of their sum.

    Args:
        shape: The rank.
        serving: What is served.
        deployment: On what.
        records: Calibrated records, :func:`tonnage.calibrations.term_records.shipped_terms`.
    """
    if deployment.engine == "sglang":
        return sglang_terms(shape, serving, deployment, records)
    if deployment.engine == "exllamav3":
        return exllamav3_terms(shape, serving, deployment, records)
    terms = (
        context_term(shape, deployment, records),
        _libraries(shape, deployment, records),
        _buffers(shape, serving, deployment),
        _graphs(shape, serving, deployment, records),
        _activation(shape, serving, deployment, records),
    )
    if deployment.engine == "split":
        context, *others = (replace(term, source=f"as vLLM: {term.source}") for term in terms)
        return (context, *in_total(others, case_of("total", deployment, shape.kind), records))
    return (*terms[:-1], _slack(), terms[-1])


def _slack() -> Term:
    return Term(
        component="runtime.slack", nbytes=0, bound_nbytes=SLACK_BYTES, basis="assumed",
        source="vLLM 0.33.0 gpu_worker.py leaves 150 MiB in its own suggestion",
    )  # fmt: skip


def serving_of(profile: Profile, deployment: Deployment, *, total_bytes: int | None, context_tokens: int) -> Serving:
    """Return what a profile asks the engine to serve; limits it does not state are the engine's defaults.

    Further facts (draft, pages, eager) are added with :func:`dataclasses.replace`.

    Args:
        profile: Concurrency and prefill chunk.
        deployment: On what.
        total_bytes: What the GPU supplies to an allocator, if known: defaults depend on it.
        context_tokens: Longest context, where the profile has none.
    """
    if deployment.engine == "exllamav3":
        tokens, seqs = DEFAULT_LIMITS
    elif deployment.engine == "sglang":
        tokens, seqs = sglang_limits(total_bytes, deployment.topology.tp)
    else:
        tokens, seqs = vllm_limits(total_bytes, deployment.gpu_class)
    stated = {"prefill chunk": profile.prefill_chunk_tokens, "concurrency": profile.concurrency}
    return Serving(
        max_seqs=profile.concurrency or seqs,
        batched_tokens=profile.prefill_chunk_tokens or tokens,
        context_tokens=profile.context_tokens or context_tokens,
        assumed=tuple(name for name, value in stated.items() if not value),
    )


def graph_estimate_term(
    shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> Term:
    """Return what vLLM expects its graphs to take and, from 0.21 on, takes off the cache; often more than they do."""
    sizes = capture_sizes(serving, deployment.gpu_class)
    nbytes = graph_bytes(shape, serving, sizes, deployment.gpu_class)
    case = case_of("graph-estimate", deployment, shape.kind)
    return calibrated("runtime.graph-estimate", (nbytes, nbytes), case, records, rule="as the graphs themselves")


def context_term(shape: ModelShape, deployment: Deployment, records: Sequence[TermRecord]) -> Term:
    """Return the baseline before any weight: driver context and communicators."""
    nbytes = context_bytes(deployment.topology, routed=shape.routed is not None)
    case = case_of("context", deployment, shape.kind)
    ranks = deployment.topology.world_size
    rule = "driver context" if ranks == 1 else f"driver context and communicators of {ranks} ranks"
    return calibrated("runtime.context", (nbytes, nbytes), case, records, rule=rule)


def _libraries(shape: ModelShape, deployment: Deployment, records: Sequence[TermRecord]) -> Term:
    case = case_of("libraries", deployment, shape.kind)
    rule = "kernels, library workspaces" + (" and late communication buffers" if deployment.topology.tp > 1 else "")
    return calibrated("runtime.libraries", library_bytes(deployment), case, records, rule=rule)


def _graphs(shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]) -> Term:
    if serving.eager:
        return Term(component="runtime.graphs", nbytes=0, bound_nbytes=0, basis="exact", source="no graphs: eager")
    sizes = capture_sizes(serving, deployment.gpu_class)
    nbytes = graph_bytes(shape, serving, sizes, deployment.gpu_class)
    case = case_of("graphs", deployment, shape.kind)
    rule = f"{counted(len(sizes), 'size')} up to {sizes[-1]}, {counted(shape.layers, 'layer')}"
    return calibrated("runtime.graphs", (nbytes, nbytes), case, records, rule=rule)


def _buffers(shape: ModelShape, serving: Serving, deployment: Deployment) -> Term:
    release = deployment.release
    nbytes = buffer_bytes(shape, serving, statistics=release is not None and release >= EARLY_COMMUNICATION)
    bound = buffer_bytes(shape, serving, statistics=release is None or release >= EARLY_COMMUNICATION)
    if deployment.gpu_class in (None, "blackwell-dc", "sm120", "gb10") and not shape.latent_width:
        bound += FLASHINFER_WORKSPACE_BYTES
    unsure = "; the bound has the statistics of releases from 0.27" if release is None else ""
    return Term(
        component="runtime.buffers", nbytes=nbytes, bound_nbytes=bound, basis="modelled",
        source=f"vLLM 0.33.0 v1/worker/gpu: {counted(serving.max_seqs, 'sequence')}, "
        f"{counted(serving.batched_tokens, 'token')}{unsure}",
    )  # fmt: skip


def _activation(shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]) -> Term:
    peak = activation_peak(shape, serving, pp=deployment.topology.pp, gpu=deployment.gpu_class)
    case = case_of("activation", deployment, shape.kind)
    rule = (
        f"step of {counted(serving.batched_tokens, 'token')}, {counted(serving.max_seqs, 'sequence')}: {peak.binding}"
    )
    if serving.assumed:
        rule += f" ({', '.join(serving.assumed)} by default)"
    return calibrated("workspace.activation", _peak(peak, serving), case, records, transient=True, rule=rule)


def _peak(peak: Peak, serving: Serving) -> tuple[int, int]:
    """Return a peak, expected and at most.

    Logs that do not state their limits show up to 1.94 times the rule under default limits: at most twice then.
    """
    return peak.nbytes, max(peak.most, UNSTATED * peak.nbytes if serving.assumed else 0)


def load_terms(shape: ModelShape, deployment: Deployment) -> tuple[Term, ...]:
    """Return what loading holds for a moment beyond the weights; all transient, for a verdict of its own.

    Weights whose kernels want another layout are repacked one at a time: one stack of experts, or one fused weight,
    exists twice. Nothing is repacked in plain formats. A loader that reads to the GPU holds one stored tensor.

    Source:
        vLLM 0.33.0 ``model_loader/utils.py`` ``process_weights_after_loading``.
    """
    stack = shape.routed.stack_bytes if shape.routed is not None else 0
    largest = max(stack, shape.module_bytes)
    repack = Term(
        component="load.repack", nbytes=largest if shape.repacked else 0,
        bound_nbytes=max(shape.layer_bytes, largest) if shape.repacked else 0, transient=True, basis="modelled",
        source="one stack or fused weight is held twice while it is repacked; at most a layer",
    )  # fmt: skip
    buffer = Term(
        component="load.buffer",
        nbytes=0,
        bound_nbytes=shape.tensor_bytes,
        transient=True,
        basis="modelled",
        source=f"{deployment.engine} copies one stored tensor at a time; a loader that reads to the GPU holds it there",
    )
    return repack, buffer
