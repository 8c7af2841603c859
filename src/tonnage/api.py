"""The public calls: open a checkpoint, plan it. They read files and hand values on; the arithmetic is elsewhere.

>>> from tonnage import open_checkpoint, plan_checkpoint, PlanRequest  # doctest: +SKIP
>>> plan = plan_checkpoint(open_checkpoint("config.json"), PlanRequest(tp=8, engine="vllm"))  # doctest: +SKIP
>>> plan.ranks[0].weights_bytes  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.assignment import Assignment, assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.checkpoint.io import JSON_LIMIT_BYTES, begin_digest, read_checkpoint_headers
from tonnage.checkpoint.strict_json import parse_object
from tonnage.container import check_against, check_container
from tonnage.engines import engine as find_engine
from tonnage.errors import (
    CheckpointError,
    ConfigError,
    PlacementError,
    Problem,
    UnknownGpuError,
    one_line,
)
from tonnage.formats.exl3_v1_manifest import parse_manifest
from tonnage.formats.exl3_v1_names import DIALECTS
from tonnage.matching import assign_headers
from tonnage.memory.supply import supply_bytes
from tonnage.placement import Placement, place
from tonnage.plan import Held, Plan, make_plan
from tonnage.plan_notes import notes_on
from tonnage.prepare.documents import MANIFEST, PROVENANCE, SIGNATURE, STATE, SUMMARY
from tonnage.recipes.blueprint import blueprint_of
from tonnage.request import Checkpoint, Convert, Estimator, PlanRequest
from tonnage.sources.addresses import is_remote, open_source, split_file
from tonnage.sources.model import INDEX_FILE, SUFFIX, Source, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tonnage.formats.exl3_v1_manifest import SlotManifest
    from tonnage.placed_weights import PlacedWeights
    from tonnage.serving import RankService, RankShape, Service
    from tonnage.sources.limits import Limits
    from tonnage.sources.transfer import Transfer

__all__ = [
    "Checkpoint",
    "Convert",
    "Estimator",
    "PlanRequest",
    "assignment_of",
    "checkpoint_from_config",
    "open_checkpoint",
    "place_checkpoint",
    "plan_checkpoint",
    "plan_placement",
    "read_config",
    "shapes_of",
]
_CONFIG = "config.json"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx"})
_GGUF = "GGUF files are not read"
_GGUF_INSTEAD = "the safetensors checkpoint they were made of, or its config.json"


def open_checkpoint(
    source: str | Path | Source,
    *,
    draft_method: str = "",
    limits: Limits | None = None,
    transfer: Transfer | None = None,
) -> Checkpoint:
    """Return a checkpoint, or a config.json, read and checked whole.

    A directory with shard files is taken at its headers' word; one with config.json alone, or a config file, is planned
    from its recipe. A config file may carry its neighbour ``hf_quant_config.json`` under ``_hf_quant_config``. From
    elsewhere nothing but headers and small files is fetched.

    Args:
        source: Directory, file, or an address as :func:`tonnage.sources.addresses.open_source` takes it.
        draft_method: How it is to draft for another, where it is a draft.
        limits: How long servers are waited for, and whether they are asked at all; by default as the environment says.
        transfer: Where it is counted what goes over the network.

    Raises:
        TonnageError: The source is missing or wrong; every problem is named.
    """
    place, file = _located(source, limits, transfer)
    if file is None:
        return _open_directory(place, draft_method)
    config, digest = _read_config(place, file)
    blueprint = blueprint_of(config, draft_method=draft_method)
    assignment = assign_blueprint(blueprint)
    return Checkpoint(name=config.name, digest=digest, assignment=assignment, headers=None, source=place)


def read_config(source: str | Path | Source) -> ModelConfig:
    """Return the config of a checkpoint, or a config.json; a neighbour ``hf_quant_config.json`` belongs to it.

    Raises:
        TonnageError: The file is missing or wrong.
    """
    place, file = _located(source)
    return _read_config(place, file or _CONFIG)[0]


def checkpoint_from_config(
    fields: Mapping[str, Any],
    *,
    name: str,
    hf_quant: Mapping[str, Any] | None = None,
    digest: str = "",
    draft_method: str = "",
) -> Checkpoint:
    """Return the checkpoint that a config promises; no file is read.

    Args:
        fields: config.json; may carry ``hf_quant_config.json`` under ``_hf_quant_config``.
        name: For reports.
        hf_quant: hf_quant_config.json, if it is at hand.
        digest: Of what the fields were read from.
        draft_method: How it is to draft for another, where it is a draft.

    Raises:
        TonnageError: The family or quantisation is unknown, or a field is missing or wrong.
    """
    config = _parsed(fields, name, hf_quant)
    return Checkpoint(
        name=name,
        digest=digest,
        assignment=assign_blueprint(blueprint_of(config, draft_method=draft_method)),
        headers=None,
    )


def plan_checkpoint(checkpoint: Checkpoint, request: PlanRequest) -> Plan:
    """Return the plan of a checkpoint.

    Raises:
        PlacementError: The topology cannot work for these tensors.
        CreditError: The credit estimator lacks its permille, or nothing in the checkpoint is counted.
    """
    if request.estimator == "credit":
        from tonnage.credit_plan import credit_plan  # noqa: PLC0415 - an exact plan starts without

        return credit_plan(checkpoint, request, _held(request))
    return plan_placement(checkpoint, place_checkpoint(checkpoint, request), request)


def place_checkpoint(checkpoint: Checkpoint, request: PlanRequest, *, name_sizes: bool = True) -> Placement:
    """Return the placement of a checkpoint, converted if wanted.

    Args:
        checkpoint: What is placed.
        request: How it is shared.
        name_sizes: Say which tensor-parallel sizes work, if this one does not.

    Raises:
        PlacementError: The topology cannot work for these tensors.
    """
    assignment = assignment_of(checkpoint, request)
    placement = place(assignment, request.topology, find_engine(request.engine), name_sizes=name_sizes)
    layers = sum(map(len, placement.stages))
    if request.pp > layers:
        expected = f"at most {layers}"
        raise PlacementError(
            Problem(where="--pp", what="more stages than layers", expected=expected, found=str(request.pp))
        )
    return placement


def assignment_of(checkpoint: Checkpoint, request: PlanRequest) -> Assignment:
    """Return every tensor as it will be stored: converted if wanted."""
    if request.convert == "none":
        return checkpoint.assignment
    return convert_to_mxfp8(checkpoint.assignment, experts=request.convert == "mxfp8-experts")


def plan_placement(
    checkpoint: Checkpoint,
    placement: Placement,
    request: PlanRequest,
    shapes: Sequence[RankShape] | None = None,
    weights: PlacedWeights | None = None,
) -> Plan:
    """Return the plan of a placement that was made for a request like this, other than in what is served.

    Args:
        checkpoint: What is planned.
        placement: Where its weights go.
        request: What is asked.
        shapes: Of the ranks, where they are at hand; :func:`shapes_of`.
        weights: Likewise; :func:`tonnage.placed_weights.placed_weights`.

    Raises:
        TonnageError: What is to be served has no rule.
    """
    services = _services(checkpoint, placement, request, shapes) if request.serves else ()
    plan = make_plan(
        placement,
        supply=request.supply,
        held=_held(request),
        services=services,
        kv_bytes=request.kv_bytes,
        weights=weights,
    )
    return replace(plan, notes=(*plan.notes, *notes_on(placement, request)))


def shapes_of(checkpoint: Checkpoint, placement: Placement, request: PlanRequest) -> tuple[RankShape, ...]:
    """Return what of every rank does not depend on what is served, to plan many profiles with."""
    from tonnage.serving import rank_shapes  # noqa: PLC0415 - a plan of weights starts without

    return rank_shapes(placement, _service(checkpoint, placement, request))


def _services(
    checkpoint: Checkpoint, placement: Placement, request: PlanRequest, shapes: Sequence[RankShape] | None
) -> tuple[RankService, ...]:
    """Return what every rank holds while it serves. Imported when it is asked for: a plan of weights starts without."""
    from tonnage.calibrations.term_records import shipped_terms  # noqa: PLC0415
    from tonnage.serving import rank_shapes, serve  # noqa: PLC0415

    service = _service(checkpoint, placement, request)
    return serve(placement, service, shipped_terms(request.engine), shapes or rank_shapes(placement, service))


def _service(checkpoint: Checkpoint, placement: Placement, request: PlanRequest) -> Service:
    """Return what is to be served, with the draft that is asked for."""
    from tonnage.draft import Draft, draft_of  # noqa: PLC0415
    from tonnage.serving import Service  # noqa: PLC0415

    draft = None
    if request.draft_bytes:  # of a draft that is not at hand, only the tokens are known
        draft = Draft(method=request.draft_method or "draft-model", tokens=request.draft_tokens or 1)
    elif request.draft is not None or request.draft_method is not None:
        draft = draft_of(
            request.draft_method,
            request.draft_tokens or 1,
            target=placement.assignment,
            checkpoint=assignment_of(request.draft, request) if request.draft else None,
            from_headers=checkpoint.headers is not None,
        )
    return Service(
        profile=request.profile,
        gpu=request.gpu,
        total_bytes=_total_bytes(request),
        version=request.version,
        draft=draft,
        context_held=request.context_held,
        budgeted=request.supply is not None and request.supply.whole_bytes is not None,
        eager=request.eager,
        device=request.device,
    )


def _total_bytes(request: PlanRequest) -> int | None:
    """Return the size of the GPU, which an engine's defaults depend on: all of it, whatever a process may use."""
    if request.supply is not None and request.supply.whole_bytes is not None:
        return request.supply.whole_bytes
    if request.gpu is not None:
        with suppress(UnknownGpuError):
            return supply_bytes(request.gpu).nbytes
    return request.supply.nbytes if request.supply else None


# --- reading -------------------------------------------------------------------------------------------------------


def _located(
    source: str | Path | Source, limits: Limits | None = None, transfer: Transfer | None = None
) -> tuple[Source, str | None]:
    """Return where files lie, and the name of the one that was meant if it is no directory.

    Raises:
        CheckpointError: There is nothing, or no checkpoint.
        SourceError: An address cannot be read, or its server cannot be reached or answers wrong.
    """
    if not isinstance(source, str | Path):
        return source, None
    if isinstance(source, str) and is_remote(source):
        parent, file = split_file(source)
        place = open_source(parent, limits=limits, transfer=transfer, whole=file is None)
        if file is None and not place.has(_CONFIG):
            raise CheckpointError(_no_config(place.address))
        return place, file
    path = Path(source)
    if not str(source) or not os.path.lexists(path):
        hint = "a directory or a config.json; a model of the hub is written hf:organisation/name"
        raise CheckpointError(Problem(where=str(source), what="no such file or directory", expected=hint))
    if path.is_dir():
        if not (path / _CONFIG).exists():
            raise CheckpointError(_no_config(str(source), gguf=any(map(_is_gguf, open_source(source).names()))))
        return open_source(source), None
    if _is_gguf(path):
        raise CheckpointError(Problem(where=str(source), what=_GGUF, expected=_GGUF_INSTEAD))
    if path.suffix.lower() in _WEIGHT_SUFFIXES:
        raise CheckpointError(
            Problem(where=str(source), what="a file of weights", expected="its directory, or a config.json")
        )
    return open_source(path.parent), path.name


def _is_gguf(name: str | Path) -> bool:
    return Path(name).suffix.lower() == ".gguf"


def _no_config(where: str, *, gguf: bool = False) -> Problem:
    if gguf:
        return Problem(where=where, what=_GGUF, expected=_GGUF_INSTEAD)
    return Problem(where=where, what="no config.json here", expected="a model directory")


def _weights_beside(names: Sequence[str]) -> str:
    """Name files of weights in a directory that are not read."""
    found = [name for name in names if Path(name).suffix.lower() in _WEIGHT_SUFFIXES]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"; not read: {', '.join(found[:5])}{more}" if found else ""


def _read_config(source: Source, file: str) -> tuple[ModelConfig, str]:
    """Return a config file as a value, with the digest of its bytes."""
    raw = read_file(source, file, limit_bytes=JSON_LIMIT_BYTES, kind=ConfigError)
    fields = parse_object(raw, where=file, kind=ConfigError, constants=True)
    plain_name = file == _CONFIG
    name = source.name if plain_name else Path(file).stem
    beside = _optional_json(source, "hf_quant_config.json") if plain_name else None
    return _parsed(fields, one_line(name), beside), hashlib.sha256(raw).hexdigest()


def _parsed(fields: Mapping[str, Any], name: str, hf_quant: Mapping[str, Any] | None) -> ModelConfig:
    carried = fields.get("_hf_quant_config")
    if hf_quant is None and isinstance(carried, dict):
        hf_quant = carried
    return parse_config(fields, name=name, hf_quant=hf_quant)


def cut_into_ranks(source: Source) -> str | None:
    """Return what a directory of ranks is, a package or a prepared directory; ``None`` for anything else."""
    if any(name.endswith(SUFFIX) for name in source.names()):
        return None
    made = _made(source)
    return made if made is not None and source.has("weights") else None


def _made(source: Source) -> str | None:
    """Return what a directory without weights at its top says it is, if ``prepare`` or ``export`` wrote it."""
    for what, names in (
        ("a package", (MANIFEST, SIGNATURE)),
        ("a prepared directory", (SUMMARY,)),
        ("an unfinished preparation", (STATE,)),
        ("a package without model.sig", (MANIFEST, PROVENANCE)),
    ):
        if all(source.has(name) for name in names):
            return what
    return None


def _check_source(source: Source) -> None:
    """Refuse what was cut into ranks: it is no checkpoint, and its config tells nothing of what was made of it."""
    if (what := cut_into_ranks(source)) is not None:
        there = "once `tonnage fetch` brought them" if is_remote(source.address) else "as they are"
        expected = f"its source; `tonnage plan`, fit, flags, inspect, serve and measure take ranks, {there}"
        raise CheckpointError(Problem(where=source.address, what=f"{what}, cut into ranks", expected=expected))


def _open_directory(source: Source, draft_method: str) -> Checkpoint:
    names = source.names()
    weights = any(name.endswith(SUFFIX) for name in names)
    _check_source(source)
    config, digest_of_config = _read_config(source, _CONFIG)
    manifest = _manifest(source)
    blueprint = blueprint_of(config, draft_method=draft_method)
    if not weights and not source.has(INDEX_FILE):
        if manifest is not None:
            raise CheckpointError(Problem(where=source.address, what="a manifest, but no safetensors files"))
        if (made := _made(source)) is not None:
            expected = f"its weights, prepared or fetched again; a plan of its source is that of {_CONFIG} alone"
            raise CheckpointError(Problem(where=source.address, what=f"{made} without its weights", expected=expected))
        note = f"no safetensors files in {source.address}: planned from config.json alone{_weights_beside(names)}"
        assignment = assign_blueprint(blueprint)
        noted = replace(assignment, notes=(note, *assignment.notes))
        return Checkpoint(name=config.name, digest=digest_of_config, assignment=noted, headers=None, source=source)
    layer_files = tuple(layer.file for layer in manifest.layers) if manifest else ()
    headers = read_checkpoint_headers(source, also=layer_files)
    digest = begin_digest(source, headers)
    beside = frozenset(layer_files)
    shards = [shard for shard in headers.shards if shard.shard_file not in beside]
    elsewhere = frozenset(layer.index for layer in manifest.layers) if manifest else frozenset()
    assignment = assign_headers(blueprint, shards, elsewhere=elsewhere)
    if manifest is not None:
        container = check_container(manifest, [s for s in headers.shards if s.shard_file in beside])
        check_against(blueprint, container)
        assignment = replace(assignment, container=container)
    notes = (*assignment.notes, *map(str, headers.notes))
    return Checkpoint(
        name=config.name,
        digest=digest(),
        assignment=replace(assignment, notes=notes),
        headers=headers,
        source=source,
    )


def _manifest(source: Source) -> SlotManifest | None:
    found = {dialect.manifest_name: _optional_json(source, dialect.manifest_name) for dialect in DIALECTS}
    documents = {name: document for name, document in found.items() if document is not None}
    if len(documents) > 1:
        where = " and ".join(documents)
        raise CheckpointError(Problem(where=where, what="two manifests of routed experts", expected="one of them"))
    return next((parse_manifest(document, where=name) for name, document in documents.items()), None)


def _optional_json(source: Source, name: str) -> dict[str, Any] | None:
    if not source.has(name):  # a dangling link is a file that is missing, not one that never was
        return None
    raw = read_file(source, name, limit_bytes=JSON_LIMIT_BYTES, kind=ConfigError)
    return parse_object(raw, where=name, kind=ConfigError)


# --- the rest of a rank --------------------------------------------------------------------------------------------


def _held(request: PlanRequest) -> tuple[Held, ...]:
    """Return what a rank holds beside the target's weights; under the credit estimator the draft is in its bytes."""
    held = []
    if request.draft is not None and request.estimator == "exact" and not request.serves:
        source = f"{request.draft.name}, largest rank"
        held.append(Held(component="draft.weights", nbytes=_draft_rank(request), basis="exact", source=source))
    if request.draft_bytes and request.estimator == "exact":
        share = -(-request.draft_bytes // request.tp)
        source = "--draft-bytes, taken to be cut evenly"
        held.append(Held(component="draft.weights", nbytes=share, basis="assumed", source=source))
    reserve = "--reserve, everything not planned"
    held.append(Held(component="reserve", nbytes=request.reserve_bytes, basis="assumed", source=reserve))
    return tuple(held)


def _draft_rank(request: PlanRequest) -> int:
    """Return what the largest rank holds of the draft, placed like the target.

    Raises:
        PlacementError: The draft cannot be placed so; the problems say that it is the draft.
    """
    assert request.draft is not None
    alike = PlanRequest(tp=request.tp, engine=request.engine, convert=request.convert)
    try:
        return max(ledger.weights_bytes for ledger in plan_checkpoint(request.draft, alike).ranks)
    except PlacementError as error:
        raise PlacementError(*(replace(p, where=f"draft {p.where}") for p in error.problems)) from error
