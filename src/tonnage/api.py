"""The public calls: open a checkpoint, plan it. They read files and hand values on; the arithmetic is elsewhere.

>>> from tonnage import open_checkpoint, plan_checkpoint, PlanRequest  # doctest: +SKIP
>>> plan = plan_checkpoint(open_checkpoint("config.json"), PlanRequest(tp=8, engine="vllm"))  # doctest: +SKIP
>>> plan.ranks[0].weights_bytes  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tonnage.assignment import CONVERTIBLE, Assignment, assign_blueprint, convert_to_mxfp8, is_convertible
from tonnage.calibrations.credit_records import Chosen, CreditRecord, Subject, choose_record, use_record
from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.checkpoint.io import JSON_LIMIT_BYTES, CheckpointHeaders, begin_digest, read_checkpoint_headers
from tonnage.checkpoint.strict_json import parse_object
from tonnage.container import check_against, check_container
from tonnage.credit import CreditInputs
from tonnage.engines import engine as find_engine
from tonnage.errors import (
    CheckpointError,
    ConfigError,
    CreditError,
    PlacementError,
    Problem,
    UnitError,
    UnknownGpuError,
    one_line,
)
from tonnage.formats.exl3_v1_manifest import parse_manifest
from tonnage.formats.exl3_v1_names import DIALECTS
from tonnage.inspection import counted_bytes
from tonnage.matching import assign_headers
from tonnage.memory.supply import Basis, Gpu, Supply, supply_bytes
from tonnage.placement import Placement, place
from tonnage.plan import Held, Plan, make_credit_plan, make_plan
from tonnage.prepare.documents import MANIFEST, SIGNATURE, STATE, SUMMARY
from tonnage.profile import Profile
from tonnage.recipes.blueprint import blueprint_of
from tonnage.sources.addresses import is_remote, open_source, split_file
from tonnage.sources.model import INDEX_FILE, SUFFIX, Source, read_file
from tonnage.topology import Device, Engine, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tonnage.draft import DraftMethod
    from tonnage.formats.exl3_v1_manifest import SlotManifest
    from tonnage.placed_weights import PlacedWeights
    from tonnage.serving import RankService, RankShape, Service
    from tonnage.sources.limits import Limits
    from tonnage.sources.transfer import Transfer

Convert = Literal["none", "mxfp8", "mxfp8-experts"]
"""Of plain projections: none, those of attention and MLPs, or routed experts as well."""
Estimator = Literal["exact", "credit"]
_CONFIG = "config.json"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, or the config of one, as read.

    Attributes:
        name: Directory or file name.
        digest: SHA-256 over shard names, sizes and headers; over config.json where there are no headers.
        assignment: Every tensor with role and storage format.
        headers: Validated headers; ``None`` if only a config was given.
        source: Where its files lie; ``None`` if it was made of a config in memory.
    """

    name: str
    digest: str
    assignment: Assignment
    headers: CheckpointHeaders | None
    source: Source | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.assignment.blueprint.config

    @property
    def family(self) -> str:
        """The recipe that answered."""
        return self.assignment.blueprint.recipe.family


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a plan.

    Attributes:
        tp: Tensor-parallel size; likewise ``ep``, ``pp``, ``dcp``.
        engine: Whose placement rules.
        supply: What one GPU supplies: ``supply_bytes(find_gpu("h100"))`` or ``parse_supply("80GiB")``; ``None`` asks
            only how much.
        reserve_bytes: Held per rank for everything outside the plan.
        convert: What preparation does to convertible weights.
        estimator: ``exact``, or ``credit`` for packages made elsewhere.
        credit_permille: The credit, assumed; without it a calibration is looked for.
        credit_record: The calibration to use, whatever it was fitted to.
        credit_records: Or those to choose from, see :func:`tonnage.calibrations.io.known_records`.
        device_bytes: Bytes of all ranks before the credit, draft included; by default stored payload + draft.
        draft: A draft checkpoint, placed like the target.
        draft_bytes: Or the bytes of one, taken to be cut evenly.
        draft_method: How tokens are drafted; that of the draft checkpoint if not given.
        draft_tokens: Tokens drafted per step; 1 if a draft is asked for and nothing is said.
        profile: What is served; with a context, a KV dtype or a name in it, an engine's cache and everything else a
            rank holds is planned too.
        gpu: The GPU, if it is one of the table.
        version: Of the engine.
        kv_bytes: What the cache is given per rank; by default what the profile needs.
        context_held: Whether the supply is that of a bare GPU, on which a process first makes its context.
        eager: No CUDA graphs.
        device: What the engine runs on; of what it holds on a CPU, weights and cache are planned.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dcp: int = 1
    engine: Engine = "split"
    supply: Supply | None = None
    reserve_bytes: int = 0
    convert: Convert = "none"
    estimator: Estimator = "exact"
    credit_permille: int | None = None
    credit_record: CreditRecord | None = None
    credit_records: tuple[CreditRecord, ...] = ()
    device_bytes: int | None = None
    draft: Checkpoint | None = None
    draft_bytes: int = 0
    draft_method: DraftMethod | None = None
    draft_tokens: int | None = None
    profile: Profile = field(default_factory=Profile)
    gpu: Gpu | None = None
    version: str | None = None
    kv_bytes: int | None = None
    context_held: bool = True
    eager: bool = False
    device: Device = "gpu"

    def __post_init__(self) -> None:
        """Refuse what contradicts itself or would be ignored.

        Raises:
            UnitError: Bytes are negative, a draft is given twice, or a credit without the credit estimator.
        """
        for name, nbytes in (("reserve", self.reserve_bytes), ("draft-bytes", self.draft_bytes)):
            if nbytes < 0:
                raise UnitError(Problem(where=f"--{name}", what="negative", expected="0 or more", found=str(nbytes)))
        if self.draft is not None and self.draft_bytes:
            raise UnitError(Problem(where="--draft, --draft-bytes", what="both given", expected="one of them"))
        if self.credit_permille is not None and self.credit_record is not None:
            raise UnitError(
                Problem(where="--credit-permille, --calibration", what="both given", expected="one of them")
            )
        if self.estimator == "exact" and (self.credit_permille, self.credit_record, self.device_bytes) != (None,) * 3:
            raise UnitError(
                Problem(
                    where="--credit-permille, --calibration, --device-bytes",
                    what="not used by the exact estimator",
                    expected="--estimator credit",
                )
            )

    @property
    def serves(self) -> bool:
        """Whether cache and buffers are planned: a profile is asked for, of an engine or else in full."""
        profile = self.profile
        asked = (profile.concurrency, profile.context_tokens, profile.kv_dtype)
        return self.estimator == "exact" and (
            all(asked[:2]) if self.engine == "split" else any(asked) or self.kv_bytes is not None
        )

    @property
    def topology(self) -> Topology:
        """The parallel sizes as a value."""
        return Topology(tp=self.tp, ep=self.ep, pp=self.pp, dcp=self.dcp)


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
        return _credit_plan(checkpoint, request, _held(request))
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
    notes = (
        *plan.notes,
        *_without_effect(placement.assignment, request),
        *_beyond_context(placement, request),
        *_requests_assumed(placement, request),
    )
    if request.device == "cpu":
        notes = (*notes, CPU_NOTE)
    return replace(plan, notes=notes)


def _requests_assumed(placement: Placement, request: PlanRequest) -> Iterator[str]:
    """Yield that nobody said how many requests there are to be."""
    if request.serves and request.profile.concurrency is None and placement.engine.name != "split":
        yield "no --profile: cache of one request, which an engine needs to start; --profile c4-p4096 says more"


def _beyond_context(placement: Placement, request: PlanRequest) -> Iterator[str]:
    """Yield that the context asked for is longer than the model's own."""
    asked = request.profile.context_tokens
    if not request.serves or not asked:
        return
    from tonnage.serving import model_context  # noqa: PLC0415 - a plan of weights starts without

    own = model_context(placement)
    if own and asked > own:
        yield f"the context is beyond the {own:,} tokens of the config: engines refuse it by default"


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
        "--kv-bytes": request.kv_bytes,
    }
    unused = [name for name, value in asked.items() if value]
    if unused:
        missing = "--profile and --context" if request.engine == "split" else "--profile, --context or --kv-dtype"
        yield f"{', '.join(unused)} change nothing: nothing is said of what is served ({missing})"


CPU_NOTE = (
    "on a CPU only weights and cache are planned: not the processes themselves, activations, compiled code, or what "
    "kernels repack; --reserve holds memory for them"
)
"""What a plan for a CPU leaves out."""

CONVERT_NOTE = "--convert mxfp8"
"""What a note on the conversion begins with."""

_NO_PROJECTIONS = frozenset({"embedding", "head", "router"})
"""Weights with rows and columns that nobody expects to be converted."""


def _left_plain(assignment: Assignment) -> dict[str, int]:
    """Return the bytes of plain projections that no conversion changes, by role; of roles over 1 % of all bytes."""
    left: dict[str, int] = {}
    for entry in assignment.entries:
        module = entry.module
        linear = bool(module.out and module.in_) and module.rule.role not in _NO_PROJECTIONS
        if linear and entry.fmt.is_plain and entry.stored[0].dtype in CONVERTIBLE:
            left[module.rule.role] = left.get(module.rule.role, 0) + entry.nbytes
    return {role: nbytes for role, nbytes in left.items() if nbytes * 100 > assignment.payload_bytes}


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
            raise CheckpointError(_no_config(str(source)))
        return open_source(source), None
    if path.suffix.lower() in _WEIGHT_SUFFIXES:
        raise CheckpointError(
            Problem(where=str(source), what="a file of weights", expected="its directory, or a config.json")
        )
    return open_source(path.parent), path.name


def _no_config(where: str) -> Problem:
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
    finished = all(source.has(name) for name in (MANIFEST, SIGNATURE))
    begun = finished or any(source.has(name) for name in (SUMMARY, STATE))
    if not begun or not source.has("weights"):
        return None
    return "a package" if finished else "a prepared directory"


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


def _credit_plan(checkpoint: Checkpoint, request: PlanRequest, held: tuple[Held, ...]) -> Plan:
    if request.pp > 1 or request.ep > 1:
        raise CreditError(
            Problem(where="--estimator credit", what="covers tensor parallelism only", expected="--pp 1 --ep 1")
        )
    inputs = credit_inputs(checkpoint, request)
    if request.credit_permille is not None:
        permille, basis, source = request.credit_permille, ASSUMED, f"--credit-permille {request.credit_permille}"
        return make_credit_plan(inputs, permille, basis=basis, source=source, supply=request.supply, held=held)
    chosen = _chosen_record(checkpoint, request)
    record = chosen.record
    if chosen.basis == "calibrated" and request.device_bytes is None and record.inputs.draft_bytes == _draft(request):
        inputs = record.credit_inputs  # the report counted whole files, headers included
    return make_credit_plan(
        inputs, record.permille, basis=chosen.basis, source=chosen.why, supply=request.supply, held=held
    )


ASSUMED: Basis = "assumed"


def credit_inputs(checkpoint: Checkpoint, request: PlanRequest) -> CreditInputs:
    """Return what the credit estimator is told of a checkpoint.

    Raises:
        CreditError: No projection of it is counted.
    """
    projections, latent = counted_bytes(checkpoint.assignment)
    if not projections:
        raise CreditError(
            Problem(where=checkpoint.name, what="no plain BF16 projection is counted, a credit has nothing to apply to")
        )
    device = request.device_bytes or checkpoint.assignment.payload_bytes + _draft(request)
    return CreditInputs(
        device_bytes=device, tp_size=request.tp, counted_bf16_bytes=projections, latent_pair_bytes=latent
    )


def _draft(request: PlanRequest) -> int:
    """Return all bytes of the draft."""
    return request.draft.assignment.payload_bytes if request.draft else request.draft_bytes


def subject_of(checkpoint: Checkpoint, request: PlanRequest) -> Subject:
    """Return what a credit is wanted for.

    Raises:
        CreditError: No projection of the checkpoint is counted.
    """
    inputs = credit_inputs(checkpoint, request)
    return Subject(
        digest=checkpoint.digest,
        family=checkpoint.family,
        stored_bytes=checkpoint.assignment.payload_bytes,
        device_bytes=inputs.device_bytes,
        counted_bf16_bytes=inputs.counted_bf16_bytes,
        latent_pair_bytes=inputs.latent_pair_bytes,
        tp=request.tp,
    )


def _chosen_record(checkpoint: Checkpoint, request: PlanRequest) -> Chosen:
    subject = subject_of(checkpoint, request)
    if request.credit_record is not None:
        return use_record(request.credit_record, subject)
    chosen = choose_record(request.credit_records, subject)
    if chosen is None:
        raise CreditError(
            Problem(
                where="--estimator credit",
                what=f"no calibrated credit for any {checkpoint.family} checkpoint",
                expected="--credit-permille N, or a record: tonnage calibrate",
            )
        )
    return chosen
