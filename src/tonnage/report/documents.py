"""The JSON documents: versioned, byte counts as plain integers, keys in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tonnage.memory.supply import gpu_table, supply_bytes
from tonnage.plan import PLAN_SCHEMA
from tonnage.recipes.loader import families, load_recipe
from tonnage.serving import model_context
from tonnage.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.api import Checkpoint, PlanRequest
    from tonnage.fit import Fit
    from tonnage.flags.values import ServeCommand, ServePlan
    from tonnage.inspection import Inspection, Sum
    from tonnage.memory.supply import Gpu, Supply
    from tonnage.placed_weights import LedgerLine
    from tonnage.plan import Plan, RankLedger
    from tonnage.regions import Regions

FIT_SCHEMA = "tonnage.fit/1"
FLAGS_SCHEMA = "tonnage.flags/1"
GPUS_SCHEMA = "tonnage.gpus/1"
REGIONS_SCHEMA = "tonnage.regions/1"
MODELS_SCHEMA = "tonnage.models/1"
INSPECT_SCHEMA = "tonnage.inspect/1"


def plan_document(
    checkpoint: Checkpoint,
    request: PlanRequest,
    plan: Plan,
    suggestions: Sequence[str],
    *,
    options: Sequence[str] = (),
    growth: bool = False,
) -> dict[str, Any]:
    """Return ``plan --json``. Cache fields are empty where no profile is served.

    Args:
        checkpoint: What was planned.
        request: What was asked.
        plan: The answer.
        suggestions: What would fit instead.
        options: The options as they were typed, such as ``--tp 8``.
        growth: Say what the cache needs for other contexts and numbers of requests as well.
    """
    profile = request.profile
    return {
        "schema": PLAN_SCHEMA,
        "tonnage_version": __version__,
        "options": list(options),
        "checkpoint": _named(checkpoint),
        "engine": request.engine,
        "device": request.device,
        "estimator": request.estimator,
        "topology": _topology(request),
        "profile": {
            "name": profile.name,
            "concurrency": profile.concurrency,
            "prefill_chunk_tokens": profile.prefill_chunk_tokens,
            "context_tokens": profile.context_tokens,
            "kv_dtype": profile.kv_dtype,
        },
        "supply_bytes": None if plan.supply is None else plan.supply.nbytes,
        "supply": None if plan.supply is None else _supply(plan.supply, request.gpu),
        "ranks": [
            {
                "rank": ledger.rank,
                "lines": [_line(line) for line in ledger.lines],
                "weights_bytes": ledger.weights_bytes,
                "payload_bytes": _payload_bytes(plan, ledger.rank),
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
        "cache_growth": cache_growth(plan) if growth else [],
        "numerics": numerics(plan),
    }


def _supply(supply: Supply, gpu: Gpu | None) -> dict[str, Any]:
    return {"basis": supply.basis, "source": supply.source, "gpu": None if gpu is None else gpu.slug}


def _payload_bytes(plan: Plan, rank: int) -> int | None:
    """Return what `prepare` writes of a rank: what an engine converts as stored, and nothing it adds."""
    if plan.placement is None:
        return None
    return plan.placement.payload_bytes(*divmod(rank, plan.placement.topology.tp))


def cache_document(plan: Plan) -> dict[str, Any]:
    """Return what the cache takes and holds: of the rank that needs most of it, and over all ranks."""
    ledger = _most_cache(plan)
    service = ledger.service if ledger else None
    cache = service.cache if service else None
    basis, source = service.cache_basis if service else (None, None)
    return {
        "rank": ledger.rank if ledger else None,
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


def cache_growth(plan: Plan) -> list[dict[str, int]]:
    """Return what the cache needs on the rank that needs most, around what is served and within the model's context."""
    ledger = _most_cache(plan)
    service = ledger.service if ledger else None
    if service is None or service.cache is None:
        return []
    planned, requests = service.context_tokens, service.concurrency
    limit = max(model_context(plan.placement.assignment) if plan.placement else 0, planned)
    contexts = sorted({min(max(planned * times // 4, 1), limit) for times in range(1, 9)})
    concurrencies = sorted({1, max(requests // 2, 1), requests, 2 * requests, 4 * requests})
    return [
        {"concurrency": many, "context_tokens": tokens, "nbytes": service.cache.needed_bytes(many, tokens)}
        for many in concurrencies
        for tokens in contexts
    ]


def _most_cache(plan: Plan) -> RankLedger | None:
    served = [ledger for ledger in plan.ranks if ledger.service and ledger.service.cache]
    return max(served, key=lambda one: one.cache_bytes, default=None)


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


def fit_document(checkpoint: Checkpoint, request: PlanRequest, found: Sequence[Fit]) -> dict[str, Any]:
    """Return ``fit --json``."""
    rows = [_way(one) for one in found]
    return {
        "schema": FIT_SCHEMA,
        "checkpoint": _named(checkpoint),
        "engine": request.engine,
        "supply_bytes": request.supply.nbytes if request.supply else None,
        "ways": rows,
        "best": max(rows, key=lambda row: (row["longest_context"], -row["tp"]), default=None),
    }


def _way(found: Fit) -> dict[str, Any]:
    request, plan = found.request, found.plan
    return {
        "tp": request.tp,
        "ep": request.ep,
        "pp": request.pp,
        "dcp": request.dcp,
        "fits": plan.fits,
        "spare_bytes": plan.spare_bytes(plan.binding_rank),
        "fixed_bytes": plan.ranks[plan.binding_rank].fixed_bytes,
        "longest_context": found.longest_context,
        "most_concurrency": found.most_concurrency,
        "cache": cache_document(plan),
        "reasons": list(plan.reasons),
    }


def regions_document(checkpoint: Checkpoint, request: PlanRequest, plan: Plan, regions: Regions) -> dict[str, Any]:
    """Return what fits on a grid: of ``cells`` one row per concurrency, one cell per context.

    Args:
        checkpoint: What is planned.
        request: How it is shared and served.
        plan: Of the request itself; ``room_bytes`` is what its tightest rank has for cache.
        regions: The grid.
    """
    supply = None if plan.supply is None else plan.supply.nbytes
    fixed = plan.ranks[plan.binding_rank].fixed_bytes
    return {
        "schema": REGIONS_SCHEMA,
        "checkpoint": _named(checkpoint),
        "engine": request.engine,
        "topology": _topology(request),
        "supply_bytes": supply,
        "room_bytes": None if supply is None else supply - fixed,
        "contexts": list(regions.contexts),
        "concurrencies": list(regions.concurrencies),
        "cells": [
            [{"fits": cell.fits, "spare_bytes": cell.spare_bytes, "cache_bytes": cell.cache_bytes} for cell in row]
            for row in regions.cells
        ],
    }


def flags_document(serve: ServePlan, command: ServeCommand) -> dict[str, Any]:
    """Return ``flags --json``."""
    return {
        "schema": FLAGS_SCHEMA,
        "engine": serve.engine,
        "words": list(command.words),
        "shell": command.shell,
        "files": [{"name": file.name, "lines": list(file.lines)} for file in command.files],
        "notes": list(command.notes),
    }


def gpus_document() -> dict[str, Any]:
    """Return ``gpus --json``."""
    return {
        "schema": GPUS_SCHEMA,
        "gpus": [
            {
                "name": gpu.slug,
                "title": gpu.name,
                "aliases": list(gpu.aliases),
                "nominal_gb": gpu.nominal_gb,
                "supply_bytes": supply.nbytes,
                "basis": supply.basis,
                "source": supply.source,
            }
            for gpu, supply in ((gpu, supply_bytes(gpu)) for gpu in gpu_table().gpus)
        ],
    }


def models_document() -> dict[str, Any]:
    """Return ``models --json``."""
    return {
        "schema": MODELS_SCHEMA,
        "families": [
            {
                "family": name,
                "model_types": facts["model_types"],
                "title": facts.get("title", ""),
                "source": load_recipe(name).source,
            }
            for name, facts in families().items()
        ],
    }


def inspect_document(checkpoint: Checkpoint, inspection: Inspection) -> dict[str, Any]:
    """Return ``inspect --json``."""
    return {
        "schema": INSPECT_SCHEMA,
        "checkpoint": _named(checkpoint),
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


def _topology(request: PlanRequest) -> dict[str, int]:
    return {"tp": request.tp, "ep": request.ep, "pp": request.pp, "dcp": request.dcp}


def _named(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"name": checkpoint.name, "digest": checkpoint.digest, "family": checkpoint.family}


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
