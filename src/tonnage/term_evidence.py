"""Logged figures beside the rules' predictions: what one public log, or the GPU table, is evidence of.

A log's row is taken apart into figures of single terms; each stands beside what the rule of that term says for the
model, the limits and the hardware of the log. :mod:`tonnage.fit_terms` makes records of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tonnage.errors import Problem
from tonnage.memory import runtime_sglang
from tonnage.memory.runtime import serving_of
from tonnage.memory.runtime_rules import (
    EARLY_COMMUNICATION,
    buffer_bytes,
    capture_sizes,
    context_bytes,
    graph_bytes,
    library_bytes,
)
from tonnage.memory.supply import PRINTED_GIB_ERROR_BYTES, Gpu
from tonnage.memory.terms import Case, LogEvidence, TermName, case_of
from tonnage.memory.workspace import activation_peak
from tonnage.memory.workspace_shape import (
    Deployment,
    GpuClass,
    ModelShape,
    Release,
    Serving,
    gpu_class,
    parse_release,
)
from tonnage.profile import Profile
from tonnage.topology import Topology
from tonnage.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tonnage.topology import Engine

LIMITS: dict[TermName, frozenset[str]] = {
    "activation": frozenset({"prefill chunk", "concurrency"}),
    "context": frozenset(),
    "libraries": frozenset(),
    "graphs": frozenset({"concurrency"}),
    "graph-estimate": frozenset({"concurrency"}),
}
"""Limits of what is served that a term depends on."""
GPU_NAMES: tuple[tuple[str, GpuClass], ...] = (
    (r"GB10|DGX Spark|Thor", "gb10"),
    (r"RTX PRO|RTX 50|SM120", "sm120"),
    (r"\bG?B[23]00", "blackwell-dc"),
    (r"\bG?H[12]\d0|\bH20", "hopper"),
    (r"A100|A800", "a100"),
    (r"\bMI\d|AMD", "amd"),
    (r"RTX 30|RTX 40|RTX A|\bA[14]0\b|\bL4|Ada|Ampere", "ampere-ada"),
)
_GIB = r"(\d{0,7}\.\d{1,9})(?!\d)"
_FREE = re.compile(rf"free at start {_GIB}", re.ASCII)
_ESTIMATE = re.compile(rf"graph estimate {_GIB}", re.ASCII)
_CONSUMED = re.compile(rf"consumed(?: after load)? {_GIB}", re.ASCII)
_CAPTURE = re.compile(r"(?:graph capture|cudagraph sizes,) max (\d{1,9})|max graph capture (\d{1,9})", re.ASCII)
_DRAFTED = re.compile(r"(?<!\d)(\d{1,9}) tokens", re.ASCII)
_MOST_GIB = 1 << 20
_FINEST = -18
"""Decimal places of a figure: what is finer was not printed, and takes for ever to compute with."""
_Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
ESTIMATE_TAKEN_OFF: Release = (0, 21)
UNKNOWN_CONTEXT = 32768


_SIZES = ("tp", "pp", "ep", "dp")
_MOST_SIZE = 1 << 32


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One public log, as collected; figures in GiB per GPU, ``None`` where the log does not show them.

    Besides the figures it may carry the model: ``config`` (config.json) or ``shape`` (one rank of it).
    """

    id: str
    source: str
    engine: str
    engine_version: str | None = None
    model_id: str | None = None
    dtype_or_quant: str | None = None
    tp: int = 1
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    gpu: str | None = None
    gpu_mem_gib: Decimal | None = None
    gpu_memory_utilization: Decimal | None = None
    max_model_len: _Limit | None = None
    max_num_seqs: _Limit | None = None
    max_num_batched_tokens: _Limit | None = None
    draft: str | None = None
    weights_gib_per_gpu: Decimal | None = None
    kv_available_gib: Decimal | None = None
    graph_gib: Decimal | None = None
    activation_gib: Decimal | None = None
    non_torch_gib: Decimal | None = None
    notes: str | None = None
    config: dict[str, Any] | None = None
    shape: ModelShape | None = None


_FIGURES = tuple(field.name for field in msgspec.structs.fields(LogRow) if field.type == Decimal | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A log with what its terms depend on."""

    row: LogRow
    shape: ModelShape
    serving: Serving
    deployment: Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One figure of one log: what it is evidence of.

    Attributes:
        case: Term, engine and ranges.
        evidence: The figure beside the rule's.
        model: Figures of one model that are equal count once.
        stated: Whether the log states the limits the figure depends on.
    """

    case: Case
    evidence: LogEvidence
    model: str
    stated: bool = True


def logged(row: LogRow, shape: ModelShape) -> Logged:
    """Return a log with its model: limits nobody stated are the engine's defaults."""
    deployment = deployment_of(row)
    total = None if row.gpu_mem_gib is None else _bytes(row.gpu_mem_gib)
    profile = Profile(
        concurrency=row.max_num_seqs,
        prefill_chunk_tokens=row.max_num_batched_tokens,
        context_tokens=row.max_model_len,
    )
    drafted, capture = _DRAFTED.search(row.draft or ""), _CAPTURE.search(row.notes or "")
    serving = replace(
        serving_of(profile, deployment, total_bytes=total, context_tokens=UNKNOWN_CONTEXT),
        draft_tokens=int(drafted[1]) if drafted else 0,
        largest_capture=int(capture[1] or capture[2]) if capture else None,
        eager="eager" in (row.notes or ""),
    )
    return Logged(row=row, shape=shape, serving=serving, deployment=deployment)


ENGINES: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "exllamav3": "exllamav3"}


def refused(row: LogRow) -> Problem | None:
    """Return why a log is no evidence here, whatever its model, or ``None``."""
    if row.engine not in ENGINES:
        return Problem(where=row.id, what="no rules for this engine", expected=", ".join(ENGINES), found=row.engine)
    if (row.engine_version or "").startswith("V0"):
        return Problem(where=row.id, what="vLLM's first engine counts its context among other memory")
    for name in _FIGURES:
        figure: Decimal | None = getattr(row, name)
        if figure is not None and not _is_printed(figure):
            expected = f"a decimal from 0 to {_MOST_GIB}"
            return Problem(where=row.id, what=f"{name} is no figure", expected=expected, found=str(figure)[:80])
    if (row.ep or 1) not in (1, row.tp):
        return Problem(where=row.id, what="experts spread over data-parallel ranks have no rule")
    return next(_impossible(row), None)


def _impossible(row: LogRow) -> Iterator[Problem]:
    """Yield sizes that no engine has, whatever a log says."""
    for name in _SIZES:
        size = getattr(row, name)
        if size is not None and not 0 <= size <= _MOST_SIZE:
            yield Problem(where=row.id, what=name, expected=f"0 to {_MOST_SIZE}", found=str(size))


def _is_printed(figure: Decimal) -> bool:
    """Whether a log can have printed a figure: not negative, not huge, not finer than any print."""
    exponent = figure.as_tuple().exponent
    return isinstance(exponent, int) and _FINEST <= exponent <= len(str(_MOST_GIB)) and 0 <= figure <= _MOST_GIB


def deployment_of(row: LogRow) -> Deployment:
    """Return on what a log's model was served; for logs that are not :func:`refused`."""
    return Deployment(
        engine=ENGINES[row.engine],
        release=parse_release(row.engine_version),
        gpu_class=class_of_name(row.gpu),
        topology=Topology(tp=row.tp, ep=row.ep or 1, pp=row.pp or 1),
    )


def class_of_name(name: str | None) -> GpuClass | None:
    """Return the class of a GPU by the name a log gives it, or ``None``."""
    for pattern, found in GPU_NAMES:
        if name and re.search(pattern, name):
            return found
    return None


def seen_in(log: Logged) -> Iterable[Seen]:
    """Yield every figure of a log that is evidence of a term."""
    for term, measured, predicted in _figures(log):
        if measured < 0 or predicted <= 0:
            continue
        yield Seen(
            case=case_of(term, log.deployment, log.shape.kind),
            evidence=LogEvidence(
                term=term,
                id=log.row.id,
                source=log.row.source,
                measured_bytes=measured + PRINTED_GIB_ERROR_BYTES,
                predicted_bytes=predicted,
            ),
            model=log.row.model_id or log.row.id,
            stated=not LIMITS[term] & set(log.serving.assumed),
        )


def seen_in_table(gpus: Iterable[Gpu]) -> Iterable[Seen]:
    """Yield the baselines of the GPU table: free memory engines reported at their first snapshot."""
    for gpu in gpus:
        for number, free in enumerate(gpu.free_at_snapshot_seen):
            of = free.of_gib or gpu.torch_total_gib
            if of is None or not free.engine.startswith("vLLM"):
                continue
            topology = Topology(tp=free.tp, ep=free.tp if free.ep else 1)
            release = parse_release(free.engine.removeprefix("vLLM ").lstrip("<=>"))
            deployment = Deployment(engine="vllm", release=release, gpu_class=gpu_class(gpu), topology=topology)
            held = _bytes(Decimal(of)) - _bytes(Decimal(free.free_gib))
            yield Seen(
                case=case_of("context", deployment, "dense"),
                evidence=LogEvidence(
                    term="context",
                    id=f"{gpu.slug}-{number}",
                    source=f"memory/gpus.json, {free.engine}",
                    measured_bytes=held + PRINTED_GIB_ERROR_BYTES,
                    predicted_bytes=context_bytes(topology, routed=free.ep),
                ),
                model=gpu.slug,
            )


def _figures(log: Logged) -> Iterable[tuple[TermName, int, int]]:
    """Yield term, logged bytes and the rule's bytes."""
    row, shape, serving, deployment = log.row, log.shape, log.serving, log.deployment
    captured = modelled_graphs(shape, serving, deployment)
    graphs, estimate, free = row.graph_gib, noted(row, _ESTIMATE), noted(row, _FREE)
    peak = _peak(log) if deployment.engine == "vllm" else None
    if peak is not None:
        rule = activation_peak(shape, serving, pp=deployment.topology.pp, gpu=deployment.gpu_class)
        yield "activation", peak, rule.nbytes
    if row.non_torch_gib is not None:
        yield "libraries", _bytes(row.non_torch_gib), library_bytes(deployment)[0]
    if free is not None and row.gpu_mem_gib is not None:
        routed = shape.routed is not None
        yield "context", _bytes(row.gpu_mem_gib) - _bytes(free), context_bytes(deployment.topology, routed=routed)
    if graphs and not serving.eager:
        yield "graphs", _bytes(graphs), captured
    if estimate and not serving.eager:
        yield "graph-estimate", _bytes(estimate), captured


def _peak(log: Logged) -> int | None:
    """Return the logged activation peak, or ``None``.

    The newer summary counts scratch that stays with the weights, and the graph estimate with the peak.
    """
    row, deployment = log.row, log.deployment
    consumed, estimate = consumed_gib(row), noted(row, _ESTIMATE)
    if row.activation_gib is None:
        return _peak_by_budget(log)
    if consumed is None:
        return _bytes(row.activation_gib)
    if row.weights_gib_per_gpu is None:
        return None
    statistics = deployment.release is None or deployment.release >= EARLY_COMMUNICATION
    kept = library_bytes(deployment)[0] + buffer_bytes(log.shape, log.serving, statistics=statistics)
    captured = _bytes(estimate or row.graph_gib or Decimal(0))
    return max(_bytes(consumed - row.weights_gib_per_gpu + row.activation_gib) - kept - captured, 0)


def _peak_by_budget(log: Logged) -> int | None:
    """Return what the budget leaves for the peak, where a log prints none; from 0.21 the estimate is in it too."""
    row, release = log.row, log.deployment.release
    total, share, weights, cache = (
        row.gpu_mem_gib, row.gpu_memory_utilization, row.weights_gib_per_gpu, row.kv_available_gib,
    )  # fmt: skip
    if release is None or release >= ESTIMATE_TAKEN_OFF or total is None or share is None:
        return None
    if weights is None or cache is None:
        return None
    return _bytes(total * share - weights - cache) - library_bytes(log.deployment)[0]


def modelled_graphs(shape: ModelShape, serving: Serving, deployment: Deployment) -> int:
    """Return what the rule of an engine says of its graphs."""
    if deployment.engine == "sglang":
        return runtime_sglang.modelled_graphs(shape, serving)[0]
    return graph_bytes(shape, serving, capture_sizes(serving, deployment.gpu_class), deployment.gpu_class)


def consumed_gib(row: LogRow) -> Decimal | None:
    """Return what a newer log prints for weights and everything that stays with them, GiB."""
    return noted(row, _CONSUMED)


def noted(row: LogRow, pattern: re.Pattern[str]) -> Decimal | None:
    """Return a figure out of a log's notes, GiB."""
    match = pattern.search(row.notes or "")
    return Decimal(match[1]) if match else None


def _bytes(gib: Decimal) -> int:
    return int(Fraction(gib) * GIB)
