"""The public calls: open a checkpoint, plan it. They read files and hand values on; the arithmetic is elsewhere.

>>> from tonnage import open_checkpoint, plan_checkpoint, PlanRequest  # doctest: +SKIP
>>> plan = plan_checkpoint(open_checkpoint("config.json"), PlanRequest(tp=8, engine="vllm"))  # doctest: +SKIP
>>> plan.ranks[0].weights_bytes  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tonnage.assignment import Assignment, assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.checkpoint.io import CheckpointHeaders, begin_digest, read_bytes, read_checkpoint_headers
from tonnage.checkpoint.strict_json import parse_object
from tonnage.container import check_container
from tonnage.credit import CreditInputs
from tonnage.engines import engine as find_engine
from tonnage.errors import CheckpointError, ConfigError, CreditError, Problem
from tonnage.formats.exl3_v1_manifest import parse_manifest
from tonnage.formats.exl3_v1_names import DIALECTS
from tonnage.inspection import counted_bytes
from tonnage.matching import assign_headers
from tonnage.memory.supply import Supply
from tonnage.placement import TP_SIZES_TRIED, can_place, place
from tonnage.plan import Held, Plan, make_credit_plan, make_plan
from tonnage.recipes.blueprint import blueprint_of
from tonnage.topology import Engine, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tonnage.formats.exl3_v1_manifest import SlotManifest

Convert = Literal["none", "mxfp8"]
Estimator = Literal["exact", "credit"]
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, or the config of one, as read.

    Attributes:
        name: Directory or file name.
        digest: SHA-256 over shard names, sizes and headers; over config.json where there are no headers.
        assignment: Every tensor with role and storage format.
        headers: Validated headers; ``None`` if only a config was given.
    """

    name: str
    digest: str
    assignment: Assignment
    headers: CheckpointHeaders | None

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
    """What is asked of a plan; everything a command line can say.

    Attributes:
        tp: Tensor-parallel size; likewise ``ep``, ``pp``, ``dcp``.
        engine: Whose placement rules.
        supply: Usable bytes of one GPU; ``None`` asks only how much.
        reserve_bytes: Held per rank for everything outside the plan.
        convert: What preparation does to convertible weights.
        estimator: ``exact``, or ``credit`` for packages made elsewhere.
        credit_permille: The credit; required by ``credit``.
        device_bytes: Bytes of all ranks before the credit, draft included; by default stored payload + draft.
        draft: A draft checkpoint, placed like the target.
        draft_bytes: Or the bytes of one, taken to be cut evenly.
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
    device_bytes: int | None = None
    draft: Checkpoint | None = None
    draft_bytes: int = 0

    @property
    def topology(self) -> Topology:
        """The parallel sizes as a value."""
        return Topology(tp=self.tp, ep=self.ep, pp=self.pp, dcp=self.dcp)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Return a checkpoint directory, or a config.json, read and checked whole.

    A directory with shard files is taken at its headers' word; one with config.json alone, or a config file, is planned
    from its recipe. A config file may carry its neighbour ``hf_quant_config.json`` under ``_hf_quant_config``.

    Raises:
        TonnageError: The source is missing or wrong; every problem is named.
    """
    path = _local(source)
    if path.is_dir():
        return _open_directory(path)
    config, digest = _read_config(path)
    return Checkpoint(name=config.name, digest=digest, assignment=assign_blueprint(blueprint_of(config)), headers=None)


def read_config(source: str | Path) -> ModelConfig:
    """Return the config of a directory, or a config.json; a neighbour ``hf_quant_config.json`` belongs to it.

    Raises:
        TonnageError: The file is missing or wrong.
    """
    path = _local(source)
    return _read_config(path / "config.json" if path.is_dir() else path)[0]


def checkpoint_from_config(
    fields: Mapping[str, Any], *, name: str, hf_quant: Mapping[str, Any] | None = None, digest: str = ""
) -> Checkpoint:
    """Return the checkpoint that a config promises; no file is read.

    Args:
        fields: config.json; may carry ``hf_quant_config.json`` under ``_hf_quant_config``.
        name: For reports.
        hf_quant: hf_quant_config.json, if it is at hand.
        digest: Of what the fields were read from.

    Raises:
        TonnageError: The family or quantisation is unknown, or a field is missing or wrong.
    """
    config = _parsed(fields, name, hf_quant)
    return Checkpoint(name=name, digest=digest, assignment=assign_blueprint(blueprint_of(config)), headers=None)


def plan_checkpoint(checkpoint: Checkpoint, request: PlanRequest) -> Plan:
    """Return the plan of a checkpoint.

    Raises:
        PlacementError: The topology cannot work for these tensors.
        CreditError: The credit estimator lacks its permille, or nothing in the checkpoint is counted.
    """
    held = _held(request)
    if request.estimator == "credit":
        return _credit_plan(checkpoint, request, held)
    assignment = checkpoint.assignment
    if request.convert == "mxfp8":
        assignment = convert_to_mxfp8(assignment)
    placement = place(assignment, request.topology, find_engine(request.engine))
    return make_plan(placement, supply=request.supply, held=held)


def suggest(checkpoint: Checkpoint, request: PlanRequest) -> tuple[str, ...]:
    """Return the smallest changes that would make a refused plan fit: conversion, then more ranks."""
    if request.estimator == "credit" or request.supply is None:
        return ()
    found = []
    if request.convert == "none" and _fits(checkpoint, replace(request, convert="mxfp8")):
        found.append("--convert mxfp8")
    for tp in TP_SIZES_TRIED:
        if tp > request.tp and _fits(checkpoint, replace(request, tp=tp, ep=tp if request.ep > 1 else 1, dcp=1)):
            found.append(f"--tp {tp}")
            break
    return tuple(found)


def _fits(checkpoint: Checkpoint, request: PlanRequest) -> bool:
    can = can_place(checkpoint.assignment, request.topology, find_engine(request.engine))
    return can and bool(plan_checkpoint(checkpoint, request).fits)


# --- reading -------------------------------------------------------------------------------------------------------


def _local(source: str | Path) -> Path:
    if str(source).startswith(("hf:", "http://", "https://", "s3://")):
        raise CheckpointError(
            Problem(
                where=str(source), what="remote sources cannot be read yet", expected="a directory or a config.json"
            )
        )
    return Path(source)


def _read_config(path: Path) -> tuple[ModelConfig, str]:
    """Return a config file as a value, with the digest of its bytes."""
    raw = read_bytes(path)
    fields = parse_object(raw, where=path.name, kind=ConfigError, constants=True)
    plain_name = path.name == "config.json"
    name = path.resolve().parent.name if plain_name else path.stem
    beside = _optional_json(path.with_name("hf_quant_config.json")) if plain_name else None
    return _parsed(fields, name, beside), hashlib.sha256(raw).hexdigest()


def _parsed(fields: Mapping[str, Any], name: str, hf_quant: Mapping[str, Any] | None) -> ModelConfig:
    carried = fields.get("_hf_quant_config")
    if hf_quant is None and isinstance(carried, dict):
        hf_quant = carried
    return parse_config(fields, name=name, hf_quant=hf_quant)


def _open_directory(path: Path) -> Checkpoint:
    config, digest_of_config = _read_config(path / "config.json")
    manifest = _manifest(path)
    blueprint = blueprint_of(config)
    if not any(path.glob("*.safetensors")) and not (path / _INDEX).exists():
        if manifest is not None:
            raise CheckpointError(Problem(where=str(path), what="a manifest, but no safetensors files"))
        return Checkpoint(
            name=config.name,
            digest=digest_of_config,
            assignment=assign_blueprint(blueprint),
            headers=None,
        )
    layer_files = tuple(layer.file for layer in manifest.layers) if manifest else ()
    headers = read_checkpoint_headers(path, also=layer_files)
    digest = begin_digest(path, headers)
    beside = frozenset(layer_files)
    shards = [shard for shard in headers.shards if shard.shard_file not in beside]
    elsewhere = frozenset(layer.index for layer in manifest.layers) if manifest else frozenset()
    assignment = assign_headers(blueprint, shards, elsewhere=elsewhere)
    if manifest is not None:
        container = check_container(manifest, [s for s in headers.shards if s.shard_file in beside])
        assignment = replace(assignment, container=container)
    notes = (*assignment.notes, *map(str, headers.notes))
    return Checkpoint(
        name=config.name,
        digest=digest(),
        assignment=replace(assignment, notes=notes),
        headers=headers,
    )


def _manifest(path: Path) -> SlotManifest | None:
    for dialect in DIALECTS:
        document = _optional_json(path / dialect.manifest_name)
        if document is not None:
            return parse_manifest(document, where=dialect.manifest_name)
    return None


def _optional_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return parse_object(read_bytes(path), where=path.name, kind=ConfigError)


# --- the rest of a rank --------------------------------------------------------------------------------------------


def _held(request: PlanRequest) -> tuple[Held, ...]:
    """Return what a rank holds beside the target's weights."""
    held = []
    if request.draft is not None:
        draft = plan_checkpoint(
            request.draft, PlanRequest(tp=request.tp, pp=1, engine=request.engine, convert=request.convert)
        )
        largest = max(ledger.weights_bytes for ledger in draft.ranks)
        held.append(
            Held(component="draft.weights", nbytes=largest, basis="exact", source=f"{request.draft.name}, largest rank")
        )
    if request.draft_bytes and request.estimator == "exact":
        share = -(-request.draft_bytes // request.tp)
        held.append(
            Held(
                component="draft.weights", nbytes=share, basis="assumed", source="--draft-bytes, taken to be cut evenly"
            )
        )
    held.append(
        Held(
            component="reserve",
            nbytes=request.reserve_bytes,
            basis="assumed",
            source="--reserve, everything not planned",
        )
    )
    return tuple(held)


def _credit_plan(checkpoint: Checkpoint, request: PlanRequest, held: tuple[Held, ...]) -> Plan:
    if request.credit_permille is None:
        raise CreditError(
            Problem(
                where="--estimator credit",
                what="no calibrated credit for this checkpoint and TP size",
                expected="--credit-permille N",
            )
        )
    if request.pp > 1 or request.ep > 1:
        raise CreditError(
            Problem(where="--estimator credit", what="covers tensor parallelism only", expected="--pp 1 --ep 1")
        )
    projections, latent = counted_bytes(checkpoint.assignment)
    if not projections:
        raise CreditError(
            Problem(where=checkpoint.name, what="no plain BF16 projection is counted, a credit has nothing to apply to")
        )
    device = request.device_bytes
    if device is None:
        device = checkpoint.assignment.payload_bytes + request.draft_bytes
    inputs = CreditInputs(
        device_bytes=device, tp_size=request.tp, counted_bf16_bytes=projections, latent_pair_bytes=latent
    )
    return make_credit_plan(
        inputs,
        request.credit_permille,
        basis="assumed",
        source=f"--credit-permille {request.credit_permille}",
        supply=request.supply,
        held=held,
    )
