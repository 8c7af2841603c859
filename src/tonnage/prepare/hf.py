"""The config of an unsharded checkpoint some weights of which were converted: it must say so to whoever loads it.

A config that cannot is refused. What it says is read back with the same parser that reads everybody's configs, and held
against every module: a list of names that catches one module too many is no config.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tonnage.assignment import Assigned, Assignment
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.quant import QuantScheme, parse_quantization
from tonnage.errors import Problem, TonnageError, UnknownFormatError, raise_if_any
from tonnage.formats.quantized import MX_BLOCK
from tonnage.prepare.hf_names import holders, is_plain, regexes, tied_heads, wildcards
from tonnage.recipes.blueprint import blueprint_of
from tonnage.recipes.modules import Module

QuantStyle = Literal["compressed-tensors", "modelopt", "mxfp8"]
"""Whose words a config states MXFP8 in; ``mxfp8`` is what SGLang calls it by itself."""
CONFIG_FILE = "config.json"
HF_QUANT_FILE = "hf_quant_config.json"
"""Stays behind where the config states a conversion: it would contradict."""

_KEY, _TEXT = "quantization_config", "text_config"
_CARRIED = "_hf_quant_config"
"""Where a config file alone carries its neighbour."""
_GROUP = "mxfp8"
_FORMAT = "mxfp8-quantized"
_MIXED = "mixed-precision"
_UNTOUCHED = frozenset({"vision", "projector", "audio", "head"})
"""Roles the reader of an exl3-v1 checkpoint leaves in BF16 whatever its lists say."""
_WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": MX_BLOCK, "dynamic": False,
    "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
}  # fmt: skip

_FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
"""What config.json calls the ``kv_cache_quant_algo`` FP8 of hf_quant_config.json."""

_Fields = dict[str, Any]


def config_bytes(assignment: Assignment, style: QuantStyle) -> bytes | None:
    """Return config.json of the converted checkpoint; ``None`` where nothing is converted and the old one is right.

    Raises:
        UnknownFormatError: In this style no config says how all tensors are stored.
    """
    if not any(entry.converted_from for entry in assignment.entries):
        return None
    fields = assignment.blueprint.config.fields
    stated = _stated(fields)
    statement = _statement(assignment, stated, style)
    restated = _restated(fields, statement)
    raise_if_any(UnknownFormatError, _unsaid(assignment, restated, style))
    raise_if_any(UnknownFormatError, _misread(assignment, restated))
    return (json.dumps(restated, indent=2, ensure_ascii=False) + "\n").encode()


def _stated(fields: Mapping[str, Any]) -> _Fields | None:
    """Return what the source config says, wherever it says it."""
    stated, text = fields.get(_KEY), fields.get(_TEXT)
    if stated is None and isinstance(text, dict):
        stated = text.get(_KEY)
    return stated if isinstance(stated, dict) else None


def _restated(fields: Mapping[str, Any], statement: _Fields) -> _Fields:
    """Return the config with another statement in the place of its own."""
    restated = {key: value for key, value in fields.items() if not key.startswith(_CARRIED)}
    text = fields.get(_TEXT)
    if fields.get(_KEY) is None and isinstance(text, dict) and text.get(_KEY) is not None:
        return {**restated, _TEXT: {**text, _KEY: statement}}
    return {**restated, _KEY: statement}


def _statement(assignment: Assignment, stated: _Fields | None, style: QuantStyle) -> _Fields:
    scheme, config = assignment.blueprint.scheme, assignment.blueprint.config
    if assignment.container is not None and scheme.method == "exl3" and stated is not None:
        return _beside_container(assignment, stated)
    if style == "modelopt" and scheme.method == "none":
        return _modelopt(assignment)
    if style == "modelopt" and scheme.method in ("modelopt", "modelopt_mixed"):
        beside = config.hf_quant.get("quantization") if config.hf_quant else None
        return _modelopt_mixed(assignment, stated or beside or {})
    if style == "mxfp8" and scheme.method == "none":
        return _mxfp8(assignment)
    if style == "compressed-tensors" and scheme.method == "none":
        return _compressed_tensors(assignment, {"config_groups": {}})
    if style == scheme.method == "compressed-tensors" and stated is not None:
        return _compressed_tensors(assignment, stated)
    raise UnknownFormatError(
        Problem(
            where=CONFIG_FILE,
            what=f"no config in the style of {style} states MXFP8 beside what is stored; layout tp needs none",
            expected=f"a checkpoint that is not quantised, or by {style}",
            found=scheme.method,
        )
    )


# --- styles -----------------------------------------------------------------------------------------------------------


def _compressed_tensors(assignment: Assignment, stated: _Fields) -> _Fields:
    """MXFP8 is a group of its own, before those there were. Alone it takes all linear layers, else those converted.

    Source:
        compressed-tensors 0.20.0 ``quant_scheme.py`` (preset ``MXFP8``), ``config/base.py`` (``mixed-precision``).
    """
    before = {
        key: {**group, "format": group.get("format") or stated.get("format")}
        for key, group in stated["config_groups"].items()
    }
    targets = ["Linear"] if not before else sorted(regexes(assignment, lambda entry: bool(entry.converted_from)))
    return {
        **stated,
        **compressed_tensors_statement(
            targets, sorted({*regexes(assignment, is_plain), *tied_heads(assignment)}), before
        ),
    }


def compressed_tensors_statement(
    targets: Sequence[str], ignore: Sequence[str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what states MXFP8 of the modules that are targets and not ignored, before the groups there were."""
    group = {
        "targets": list(targets),
        "weights": _WEIGHTS,
        "input_activations": {**_WEIGHTS, "dynamic": True},
        "output_activations": None,
        "format": _FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _MIXED if before else _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {_GROUP: group, **(before or {})},
        "ignore": list(ignore),
    }


def _modelopt(assignment: Assignment) -> _Fields:
    """Everything but what is ignored: the ``exclude_modules`` of hf_quant_config.json have this name in config.json.

    Source:
        nvidia-modelopt 0.47.0 export; vLLM 0.32.0 ``quantization/modelopt.py`` (``from_config``).
    """
    return {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "group_size": MX_BLOCK,
        "ignore": sorted({*wildcards(assignment), *tied_heads(assignment)}),
    }


def _mxfp8(assignment: Assignment) -> _Fields:
    """Everything but what is ignored by its full name: of fused layers their parts, of routed experts what holds them.

    Source:
        SGLang 0.5.23 ``layers/quantization/fp8.py`` (``Fp8Config.from_config``), ``quantization/utils.py``
        (``is_layer_skipped``).
    """
    plain = {name for entry in assignment.entries if is_plain(entry) for name in holders(entry)}
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, MX_BLOCK],
        "ignored_layers": sorted({*plain, *tied_heads(assignment)}),
    }


def scale_suffix(style: QuantStyle) -> str:
    """Return what the scales of a converted weight are called in a checkpoint of this style; they are no inverses."""
    return ".weight_scale_inv" if style == "mxfp8" else ".weight_scale"


def _modelopt_mixed(assignment: Assignment, source: Mapping[str, Any]) -> _Fields:
    """Every module that is not plain is listed with its algorithm; of routed experts, what holds them.

    A list there was is kept and added to.

    Source:
        nvidia-modelopt 0.47.0 export, ``MIXED_PRECISION`` with ``quantized_layers``.
    """
    own = {key: source[key] for key in ("quant_algo", "group_size") if key in source}
    before: Mapping[str, Any] = source.get("quantized_layers") or {}
    layers: dict[str, Any] = dict(before)
    for entry in assignment.entries:
        if entry.module.rule.is_linear and not entry.fmt.is_plain:
            for name in holders(entry):
                if entry.converted_from:
                    layers[name] = {"quant_algo": "MXFP8", "group_size": MX_BLOCK}
                elif not before:
                    layers[name] = own
    kept = {key: source.get(key) for key in ("kv_cache_scheme", "producer") if key in source}
    if source.get("kv_cache_quant_algo") == "FP8":
        kept.setdefault("kv_cache_scheme", dict(_FP8_CACHE))
    return {
        **kept,
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": sorted({*wildcards(assignment), *tied_heads(assignment)}),
        "quantized_layers": dict(sorted(layers.items())),
    }


def _beside_container(assignment: Assignment, stated: _Fields) -> _Fields:
    """The experts stay in their container; dense weights are MXFP8 but for the last components that are listed.

    Raises:
        UnknownFormatError: A component names converted modules and others.
    """
    converted = {_last(entry.module) for entry in assignment.entries if entry.converted_from}
    kept = {
        _last(entry.module)
        for entry in assignment.entries
        if is_plain(entry) and entry.module.rule.role not in _UNTOUCHED
    }
    raise_if_any(
        UnknownFormatError,
        (
            Problem(where=CONFIG_FILE, tensor=name, what="names weights that are converted and weights that are not")
            for name in sorted(converted & kept)
        ),
    )
    return {**stated, "dense_format": "mxfp8", "ignored_layers": sorted(kept)}


def _last(module: Module) -> str:
    return module.rule.pattern.rpartition(".")[2]


# --- read back --------------------------------------------------------------------------------------------------------


def _unsaid(assignment: Assignment, restated: _Fields, style: QuantStyle) -> Iterator[Problem]:
    """Yield a problem for every module the config says something else of than is true."""
    if assignment.container is not None:
        return
    try:
        scheme = parse_quantization(restated)
    except TonnageError as error:
        yield from error.problems
        return
    for entry in assignment.entries:
        if entry.module.rule.is_linear and entry.module.rule.role != "embedding":
            wrong = next(_wrongly_named(entry, scheme), None)
            if wrong is not None:
                what = f"a config in the style of {style} cannot single this module out"
                yield Problem(where=CONFIG_FILE, tensor=wrong, what=what, expected=entry.fmt.name)


def _misread(assignment: Assignment, restated: _Fields) -> Iterator[Problem]:
    """Yield modules that a reader of the new config looks for and that are not written, or the other way round."""
    config = assignment.blueprint.config
    again = blueprint_of(parse_config(restated, name=config.name))
    looked_for = {module.rule.pattern for module in again.modules if not module.optional}
    written = {entry.module.rule.pattern for entry in assignment.entries}
    optional = {module.rule.pattern for module in again.modules if module.optional}
    if assignment.container is not None:
        optional |= {module.rule.pattern for module in again.modules if module.rule.role == "expert"}
    for pattern in sorted((looked_for - written - optional) | (written - looked_for - optional)):
        what = "with this conversion stated in the config, the family's tensors are looked for under other names"
        yield Problem(where=CONFIG_FILE, tensor=pattern, what=what)


def _wrongly_named(entry: Assigned, scheme: QuantScheme) -> Iterator[str]:
    """Yield the modules of an entry, one expert for all, of which the scheme says another format."""
    module = entry.module
    experts = entry.members[:1] or tuple(extent[0] for extent in module.rest if extent)
    firsts: Iterable[tuple[int, ...]] = ((first,) for first in entry.first) if entry.first else ((),)
    for first in firsts:
        name = module.name(*first, *experts)
        if scheme.format_of(name, module.kind).name != entry.fmt.name:
            yield name
