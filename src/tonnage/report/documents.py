"""The JSON documents: versioned, byte counts as plain integers, keys in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.api import Checkpoint, PlanRequest
    from tonnage.inspection import Inspection, Sum
    from tonnage.plan import LedgerLine, Plan

PLAN_SCHEMA = "tonnage.plan/1"
INSPECT_SCHEMA = "tonnage.inspect/1"


def plan_document(
    checkpoint: Checkpoint, request: PlanRequest, plan: Plan, suggestions: Sequence[str]
) -> dict[str, Any]:
    """Return ``plan --json``. Cache fields are empty where no profile is served."""
    profile = request.profile
    return {
        "schema": PLAN_SCHEMA,
        "checkpoint": {"name": checkpoint.name, "digest": checkpoint.digest, "family": checkpoint.family},
        "engine": request.engine,
        "estimator": request.estimator,
        "topology": {"tp": request.tp, "ep": request.ep, "pp": request.pp, "dcp": request.dcp},
        "profile": {
            "name": profile.name,
            "concurrency": profile.concurrency,
            "prefill_chunk_tokens": profile.prefill_chunk_tokens,
            "context_tokens": profile.context_tokens,
            "kv_dtype": profile.kv_dtype,
        },
        "supply_bytes": None if plan.supply is None else plan.supply.nbytes,
        "supply": None if plan.supply is None else {"basis": plan.supply.basis, "source": plan.supply.source},
        "ranks": [
            {
                "rank": ledger.rank,
                "lines": [_line(line) for line in ledger.lines],
                "weights_bytes": ledger.weights_bytes,
                "fixed_bytes": ledger.fixed_bytes,
                "expected_bytes": ledger.expected_bytes,
                "cache_bytes": ledger.cache_bytes,
                "loading_bytes": ledger.loading_bytes,
                "spare_bytes": plan.spare_bytes(ledger.rank),
            }
            for ledger in plan.ranks
        ],
        "binding_rank": plan.binding_rank,
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "suggestions": list(suggestions),
        "pessimism": list(plan.pessimism),
        "notes": list(plan.notes),
        "remarks": [
            {"kind": remark.kind, "role": remark.role, "nbytes": remark.nbytes, "why": remark.why}
            for remark in plan.remarks
        ],
        "cache": cache_document(plan),
        "numerics": numerics(plan),
    }


def cache_document(plan: Plan) -> dict[str, Any]:
    """Return what the cache takes and holds: of the rank that needs most of it, and over all ranks."""
    served = [ledger.service for ledger in plan.ranks if ledger.service and ledger.service.cache]
    service = max(served, key=lambda one: one.cache_bytes, default=None)
    cache = service.cache if service else None
    basis, source = service.cache_basis if service else (None, None)
    return {
        "bytes_per_token_per_rank": cache.bytes_per_token if cache else None,
        "state_bytes_per_request": cache.state_bytes_per_request if cache else None,
        "concurrency": service.concurrency if service else None,
        "context_tokens": service.context_tokens if service else None,
        "given_bytes": plan.kv_bytes,
        "capacity_tokens": plan.capacity_tokens(),
        "expected_capacity_tokens": plan.capacity_tokens(expected=True),
        "shared_capacity_tokens": plan.capacity_tokens(shared=True),
        "expected_shared_capacity_tokens": plan.capacity_tokens(expected=True, shared=True),
        "basis": basis if cache else None,
        "source": source if cache else None,
    }


def numerics(plan: Plan) -> dict[str, Any]:
    """Return what a conversion changes: the class, and every converted module with its format."""
    if plan.placement is None:
        return {"class": "unknown", "converted": []}
    converted = [
        {
            "module": entry.module.rule.pattern,
            "format": entry.fmt.name,
            "instances": entry.instances,
            "bytes_before": entry.instances * entry.converted_from,
            "bytes_after": entry.nbytes,
        }
        for entry in plan.placement.assignment.entries
        if entry.converted_from
    ]
    return {"class": "converted" if converted else "neutral", "converted": converted}


def inspect_document(checkpoint: Checkpoint, inspection: Inspection) -> dict[str, Any]:
    """Return ``inspect --json``."""
    return {
        "schema": INSPECT_SCHEMA,
        "checkpoint": {"name": checkpoint.name, "digest": checkpoint.digest, "family": checkpoint.family},
        "source": "headers" if checkpoint.headers is not None else "config",
        "tensors": inspection.total.tensors,
        "payload_bytes": inspection.total.nbytes,
        "by_role": _sums(inspection.by_role),
        "by_dtype": _sums(inspection.by_dtype),
        "by_format": _sums(inspection.by_format),
        "counted_projection_bytes": inspection.projection_bytes,
        "latent_pair_bytes": inspection.latent_bytes,
        "convertible_bytes": inspection.convertible_bytes,
        "notes": list(inspection.notes),
    }


def _line(line: LedgerLine) -> dict[str, Any]:
    return {
        "component": line.component,
        "nbytes": line.nbytes,
        "bound_nbytes": line.bound_nbytes,
        "transient": line.transient,
        "basis": line.basis,
        "source": line.source,
    }


def _sums(rows: Sequence[tuple[str, Sum]]) -> list[dict[str, Any]]:
    return [{"name": name, "tensors": total.tensors, "nbytes": total.nbytes} for name, total in rows]
