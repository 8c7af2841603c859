"""What a reader of a plan must know of what was asked: what was assumed, and what changed nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.assignment import CONVERTIBLE, Assignment, is_convertible
from tonnage.placement import Placement
from tonnage.request import PlanRequest

CPU_NOTE = (
    "on a CPU only weights and cache are planned: not the processes themselves, activations, compiled code, or what "
    "kernels repack; --reserve holds memory for them"
)
"""What a plan for a CPU leaves out."""

CONVERT_NOTE = "--convert mxfp8"
"""What a note on the conversion begins with."""

_NO_PROJECTIONS = frozenset({"embedding", "head", "router"})
"""Weights with rows and columns that nobody expects to be converted."""


def notes_on(placement: Placement, request: PlanRequest) -> tuple[str, ...]:
    """Return what is to be known of a request and what was placed for it."""
    on_cpu = (CPU_NOTE,) if request.device == "cpu" else ()
    return (
        *_runtime_of_split(placement, request),
        *_supply_of_gpu(request),
        *_share_of_release(placement, request),
        *_without_effect(placement.assignment, request),
        *beyond_context(placement.assignment, request),
        *_requests_assumed(placement, request),
        *on_cpu,
    )


def _runtime_of_split(placement: Placement, request: PlanRequest) -> Iterator[str]:
    """Yield whose rules tell what ranks hold beside weights where no engine is named."""
    if request.serves and placement.engine.name == "split":
        assumed = "; without --gpu, buffers are those measured on SM 12.0 (docs/k31-ranks.md)"
        yield "served by vLLM's rules" + ("" if request.gpu else assumed)


def _supply_of_gpu(request: PlanRequest) -> Iterator[str]:
    """Yield that the size of a GPU is not that of the table."""
    if request.gpu is not None and request.supply is not None and request.supply.source.startswith("--supply"):
        yield "the size is that of --supply; --gpu says which kind of GPU it is"


def _share_of_release(placement: Placement, request: PlanRequest) -> Iterator[str]:
    """Yield which releases a share of the GPU is counted for, where nobody says the release."""
    by_share = request.supply is not None and request.supply.whole_bytes
    captures = request.serves and request.device == "gpu" and not request.eager
    if placement.engine.name == "vllm" and by_share and captures and not request.version:
        yield "without --engine-version graphs are inside of --utilization, as from vLLM 0.21 on"


def _without_effect(assignment: Assignment, request: PlanRequest) -> Iterator[str]:
    """Yield what was asked for and changed nothing."""
    asked = f"--convert {request.convert}"
    if request.convert != "none" and not any(entry.converted_from for entry in assignment.entries):
        yield f"{asked} changes nothing: no convertible weight is stored plain"
    if request.convert != "none" and (left := _left_plain(assignment)):
        roles = ", ".join(f"{role} {nbytes:,} bytes" for role, nbytes in left.items())
        more = any(is_convertible(entry, experts=True) for entry in assignment.entries)
        why = "; --convert mxfp8-experts converts routed experts as well" if more else ""
        yield f"{asked} leaves projections as they are stored: {roles}{why}"
    if request.ep > 1 and not any(entry.module.rule.is_routed for entry in assignment.entries):
        yield "--ep changes nothing: the model has no routed experts"
    if not request.serves and request.estimator == "exact":
        yield from _served_only(request)


def _served_only(request: PlanRequest) -> Iterator[str]:
    """Yield what only a plan of what is served depends on."""
    if request.dcp > 1:
        yield "--dcp changes nothing: it moves no weights"
    profile = request.profile
    asked = {
        "--draft-method": request.draft_method if request.draft is None else None,
        "--draft-tokens": request.draft_tokens,
        "--engine-version": request.version,
        "--eager": request.eager,
        "--context": profile.context_tokens,
        "--kv-dtype": profile.kv_dtype,
        "--kv-bytes": request.kv_bytes if request.supply is None else None,
    }
    unused = [name for name, value in asked.items() if value]
    missing = "--profile and --context" if request.engine == "split" else "--profile, --context or --kv-dtype"
    unsaid = f"nothing is said of what is served ({missing})"
    if unused:
        yield f"{', '.join(unused)} {'changes' if len(unused) == 1 else 'change'} nothing: {unsaid}"
    if request.kv_bytes and request.supply is not None:
        yield f"--kv-bytes is held as given, whatever it is enough for: {unsaid}"


def _left_plain(assignment: Assignment) -> dict[str, int]:
    """Return the bytes of plain projections that no conversion changes, by role; of roles over 1 % of all bytes."""
    left: dict[str, int] = {}
    for entry in assignment.entries:
        module = entry.module
        linear = bool(module.out and module.in_) and module.rule.role not in _NO_PROJECTIONS
        if linear and entry.fmt.is_plain and entry.stored[0].dtype in CONVERTIBLE:
            left[module.rule.role] = left.get(module.rule.role, 0) + entry.nbytes
    return {role: nbytes for role, nbytes in left.items() if nbytes * 100 > assignment.payload_bytes}


def _requests_assumed(placement: Placement, request: PlanRequest) -> Iterator[str]:
    """Yield that nobody said how many requests there are to be."""
    if request.serves and request.profile.concurrency is None and placement.engine.name != "split":
        yield "no --profile: cache of one request, which an engine needs to start; --profile c4-p4096 says more"


def beyond_context(assignment: Assignment, request: PlanRequest) -> Iterator[str]:
    """Yield that the context asked for is longer than the model's own."""
    asked = request.profile.context_tokens
    if not request.serves or not asked:
        return
    from tonnage.serving import model_context  # noqa: PLC0415 - a plan of weights starts without

    own = model_context(assignment)
    if own and asked > own:
        yield f"the context is beyond the {own:,} tokens of the config: engines refuse it by default"
