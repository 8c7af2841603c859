"""The smallest changes that would make a refused plan fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tonnage.api import Checkpoint, Convert, PlanRequest, place_checkpoint, plan_placement
from tonnage.assignment import Assigned, is_convertible
from tonnage.errors import PlacementError, UnknownFormatError
from tonnage.fit import Planner
from tonnage.placement import TP_SIZES_TRIED
from tonnage.profile import Profile

MOST_SUGGESTIONS = 3
_MORE_RANKS = 4
_LEAST_CHUNK_TOKENS = 512
_SMALLER_KV = {"vllm": "fp8", "split": "fp8", "sglang": "fp8", "exllamav3": "Q8"}


def suggest(checkpoint: Checkpoint, request: PlanRequest) -> tuple[str, ...]:
    """Return single changes that would make a refused plan fit, the smallest of each kind.

    Where a profile is served: a smaller KV dtype, a shorter context, fewer requests at once, a smaller prefill chunk,
    no draft. Then at most three of conversion, whole experts per rank, a second pipeline stage, the next larger
    tensor-parallel sizes, and each of those with conversion.
    """
    if request.estimator == "credit" or request.supply is None:
        return ()
    shared: list[str] = []
    for words, changed in _shared(checkpoint, request):
        if len(shared) == MOST_SUGGESTIONS:
            break
        smaller = any(all(word in words for word in known.split(" with ")) for known in shared)
        if not smaller and _fits(checkpoint, changed):
            shared.append(words)
    return (*(_served(checkpoint, request) if request.serves else ()), *shared)


def _served(checkpoint: Checkpoint, request: PlanRequest) -> Iterator[str]:
    """Yield what less to serve would fit."""
    placement, profile = place_checkpoint(checkpoint, request), request.profile
    planner = Planner(checkpoint=checkpoint, placement=placement, request=request)
    kv_dtype = _SMALLER_KV[request.engine]
    if (profile.kv_dtype or "auto").lower() in ("auto", "bf16", "fp16") and _serves(
        planner, replace(profile, kv_dtype=kv_dtype)
    ):
        yield f"--kv-dtype {kv_dtype}"
    context = planner.longest_context()
    if context:
        yield f"--context {context}"
    concurrency, chunk = profile.concurrency, profile.prefill_chunk_tokens
    if concurrency and chunk:
        fewer, smaller = planner.most_concurrency(), _smaller_chunk(planner, profile)
        if fewer:
            yield f"--profile c{fewer}-p{chunk}"
        if smaller:
            yield f"--profile c{concurrency}-p{smaller}"
    if request.draft is not None or request.draft_bytes or request.draft_method is not None:
        without = replace(request, draft=None, draft_bytes=0, draft_method=None, draft_tokens=None)
        if planner.plan_request(without).fits:
            yield "no draft"


def _serves(planner: Planner, profile: Profile) -> bool:
    try:
        return bool(planner.plan(profile).fits)
    except (PlacementError, UnknownFormatError):  # the KV dtype has no rule for a cache of the model
        return False


def _smaller_chunk(planner: Planner, profile: Profile) -> int:
    """Return the largest half, quarter and so on of the prefill chunk that fits; 0 for none."""
    chunk = (profile.prefill_chunk_tokens or 0) // 2
    while chunk >= _LEAST_CHUNK_TOKENS:
        if _serves(planner, replace(profile, prefill_chunk_tokens=chunk)):
            return chunk
        chunk //= 2
    return 0


def _shared(checkpoint: Checkpoint, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield requests that share otherwise or convert, the smallest change first."""
    entries = checkpoint.assignment.entries
    routed = any(entry.module.rule.is_routed for entry in entries)
    converts = tuple(_conversions(request, entries))
    changes = [("", request)]
    if routed and request.ep == 1 and request.tp > 1:
        changes.append((f"--ep {request.tp}", replace(request, ep=request.tp)))
    if request.pp == 1:
        changes.append(("--pp 2", replace(request, pp=2)))
    for tp in [tp for tp in TP_SIZES_TRIED if tp > request.tp][:_MORE_RANKS]:
        changes.append((f"--tp {tp}", replace(request, tp=tp, ep=tp if request.ep > 1 else 1, dcp=1)))
        if routed and request.ep == 1:
            changes.append((f"--tp {tp} --ep {tp}", replace(request, tp=tp, ep=tp, dcp=1)))
    for words, changed in changes:
        if words:
            yield words, changed
        for convert in converts:
            yield (f"{words} with " if words else "") + f"--convert {convert}", replace(changed, convert=convert)


def _conversions(request: PlanRequest, entries: Sequence[Assigned]) -> Iterator[Convert]:
    """Yield the conversions that turn more weights into MXFP8 than is asked for."""
    if request.convert == "none" and any(map(is_convertible, entries)):
        yield "mxfp8"
    experts = any(is_convertible(entry, experts=True) and not is_convertible(entry) for entry in entries)
    if experts and request.convert != "mxfp8-experts":
        yield "mxfp8-experts"


def _fits(checkpoint: Checkpoint, request: PlanRequest) -> bool:
    """Whether it fits when it is shared like that; weights alone may say that it does not."""
    try:
        placement = place_checkpoint(checkpoint, request, name_sizes=False)
        sizes = (
            placement.rank_bytes(pp_rank, tp_rank) for pp_rank in range(request.pp) for tp_rank in range(request.tp)
        )
        if request.supply is None or max(sizes) > request.supply.nbytes:
            return False
        return bool(plan_placement(checkpoint, placement, request).fits)
    except PlacementError:
        return False
