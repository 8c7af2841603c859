"""A config, and how its tensors shall be stored, to the config that says so and the tensors that follow from it.

``config`` keeps the formats the config states. Everything else restates ``quantization_config`` and draws the model
anew, because some families take stacked experts apart once a checkpoint is quantised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from tonnage.assignment import Assigned, assign_blueprint
from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.checkpoint.quant import UNQUANTIZED
from tonnage.errors import Problem, UnknownFormatError
from tonnage.formats.exl3_v1 import SlotGeometry
from tonnage.formats.exl3_v1_names import EXL3_V1
from tonnage.formats.quantized import exl3, mxfp8
from tonnage.formats.storage import plain
from tonnage.recipes.blueprint import Blueprint, blueprint_of
from tonnage.recipes.modules import Module, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tonnage.formats.storage import StorageFormat

Storage = Literal["config", "bf16", "mxfp8", "exl3"]
"""How everything is stored: as the config states, unquantised, in MXFP8, or as exllamav3 writes it."""

Experts = Literal["same", "exl3", "exl3-v1"]
"""How routed experts are stored: like the rest, as exllamav3 writes them, or in a container beside the shards."""

DEFAULT_BITS = Fraction(2)
EXL3_HEAD_BITS = 6
PRE_BLOCK, POST_BLOCK = 512, 128
ROW_ALIGNMENT, EXTENT_ALIGNMENT_SLOTS = 4096, 4

_QUANTIZATION = "quantization_config"
_ORIGINAL = "original_quantization_config"
_HF_QUANT = "_hf_quant_config"
"""Where a config file alone carries its neighbour, and that neighbour's source."""

_UNTOUCHED = frozenset({"vision", "projector", "audio"})
_EXL3_VERSION = "1.6.5"
_MXFP8_WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """What a checkpoint holds and says of itself.

    Attributes:
        fields: Its config.json.
        hf_quant: Its hf_quant_config.json, if it has one.
        entries: The tensors of its shard files.
        geometry: Its exl3-v1 container, if it has one.
    """

    fields: Mapping[str, Any]
    hf_quant: Mapping[str, Any] | None
    entries: tuple[Assigned, ...]
    geometry: SlotGeometry | None = None


def store_as(
    config: ModelConfig, *, storage: Storage = "config", experts: Experts = "same", bits: Fraction = DEFAULT_BITS
) -> StoredModel:
    """Return a model as it is stored in some formats.

    Args:
        config: The model; its own quantisation counts for ``storage="config"``.
        storage: How everything is stored.
        experts: How routed experts are stored.
        bits: Bits per weight of EXL3, on a grid of a half; of exl3-v1 whole.

    Raises:
        UnknownFormatError: The model cannot be stored so.
        TonnageError: As :func:`blueprint_of`.
    """
    fields = {key: value for key, value in config.fields.items() if not key.startswith(_HF_QUANT)}
    if storage == "config" and experts == "same":
        entries = assign_blueprint(blueprint_of(config)).entries
        return StoredModel(fields=fields, hf_quant=config.hf_quant, entries=entries)
    base, blueprint = config, blueprint_of(config)
    if storage != "config" or blueprint.scheme.method == UNQUANTIZED.method:
        base = parse_config(_restated(fields, _first_statement(storage, experts, bits)), name=config.name)
        blueprint = blueprint_of(base)
    entries = tuple(
        _assigned(module, _format_of(module, storage, experts, bits), base.dtype)
        for module in blueprint.modules
        if not module.optional
    )
    statement = _statement(storage, experts, bits, entries)
    restated = _restated(fields, statement, original=config.hf_quant)
    geometry = slot_geometry(entries, bits) if experts == "exl3-v1" else None
    kept = tuple(entry for entry in entries if geometry is None or entry.module.rule.role != "expert")
    _check_named_so(kept, blueprint_of(parse_config(restated, name=config.name)))
    return StoredModel(fields=restated, hf_quant=None, entries=kept, geometry=geometry)


def slot_geometry(entries: Iterable[Assigned], bits: Fraction) -> SlotGeometry:
    """Return the exl3-v1 container of a model's routed experts, as published for Kimi-K3.1.

    Codebook lut_e4m3, Hadamard on the intermediate axis, shared vectors, and one barrier at half the slots.

    Raises:
        UnknownFormatError: There are no routed experts, they differ by layer, have biases, or the rate is not whole.
        ConfigError: Their widths do not suit the container.
    """
    experts = [entry for entry in entries if entry.module.rule.role == "expert"]
    downs = [entry.module for entry in experts if entry.module.rule.split == "row"]
    shapes = {(module.stack or module.experts, module.out_size, module.in_size) for module in downs}
    if bits.denominator != 1:
        raise _refusal("rate is not whole", "2, 3 or 4 bits", str(bits))
    if len(shapes) != 1 or any(entry.module.bias for entry in experts):
        expected = "routed experts of one shape on all their layers, without biases"
        raise _refusal("experts do not suit an exl3-v1 container", expected, f"shapes {sorted(shapes)}")
    count, hidden_size, intermediate_size = shapes.pop()
    return SlotGeometry(
        num_experts=count,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        moe_layer_indices=tuple(sorted(layer for module in downs for layer in module.first)),
        codebook="lut_e4m3",
        bits=int(bits),
        pre_block=PRE_BLOCK,
        post_block=POST_BLOCK,
        row_alignment=ROW_ALIGNMENT,
        extent_alignment_slots=EXTENT_ALIGNMENT_SLOTS,
        extent_barriers=(intermediate_size // 64,),
    )


def _check_named_so(entries: Iterable[Assigned], readers: Blueprint) -> None:
    """Refuse tensors that whoever reads the new config would not look for.

    Raises:
        UnknownFormatError: The recipe names tensors otherwise under the new config.
    """
    known = {module.rule.pattern for module in readers.modules}
    strange = sorted({entry.module.rule.pattern for entry in entries} - known)
    if strange:
        raise _refusal("the family's recipe has no such tensors in this storage", "other names", ", ".join(strange[:4]))


# --- formats ----------------------------------------------------------------------------------------------------------


def _assigned(module: Module, fmt: StorageFormat, model_dtype: str) -> Assigned:
    stored = stored_tensors(module, fmt, model_dtype)
    return Assigned(module=module, fmt=fmt, stored=stored, first=module.first, copies=module.copies)


def _format_of(module: Module, storage: Storage, experts: Experts, bits: Fraction) -> StorageFormat:
    """Return the format of a module. Experts that go into a container are plain until they are taken out."""
    if module.rule.role == "expert" and experts != "same":
        return plain() if experts == "exl3-v1" else _exl3_format(module, bits)
    if storage == "exl3" and _is_quantizable(module):
        return _exl3_format(module, bits)
    if storage == "mxfp8" and _takes_mxfp8(module):
        return mxfp8()
    return module.fmt if storage == "config" else plain()


def _is_quantizable(module: Module) -> bool:
    """Whether a writer of EXL3 or MXFP8 takes it. Stacked experts of a draft part are left as they are."""
    rule = module.rule
    stacked_draft = module.stack and rule.role != "expert"
    return rule.is_linear and rule.quantizes and rule.role not in _UNTOUCHED and not stacked_draft


def _takes_mxfp8(module: Module) -> bool:
    fmt = mxfp8()
    whole = module.in_size % fmt.in_grain == 0 and not module.stack
    return _is_quantizable(module) and whole and module.kind != "head"


def _exl3_format(module: Module, bits: Fraction) -> StorageFormat:
    """Return the EXL3 format; the head has its own rate.

    Raises:
        UnknownFormatError: The rate is none of EXL3, or experts are stored in one tensor.
    """
    if module.stack:
        raise _refusal(
            f"{module.rule.pattern}: EXL3 stores every expert by itself", "a recipe that names them so", "a stack"
        )
    return exl3(_rate_times_two(Fraction(EXL3_HEAD_BITS) if module.kind == "head" else bits), codebook="mul1")


def _rate_times_two(bits: Fraction) -> int:
    doubled = bits * 2
    if doubled.denominator != 1:
        raise _refusal("unknown rate", "a multiple of half a bit", str(bits))
    return int(doubled)


# --- what the config says ---------------------------------------------------------------------------------------------


def _first_statement(storage: Storage, experts: Experts, bits: Fraction) -> dict[str, Any] | None:
    """Return what the config says while the model is drawn: the method, which decides how tensors are named."""
    if "exl3" in (storage, experts):
        return _exl3_statement(bits)
    return _mxfp8_statement(()) if storage == "mxfp8" else None


def _statement(
    storage: Storage, experts: Experts, bits: Fraction, entries: tuple[Assigned, ...]
) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the finished checkpoint."""
    plain_linear = [e.module for e in entries if e.module.rule.is_linear and e.fmt.is_plain]
    dense = [module for module in plain_linear if module.rule.role != "expert"]
    if experts == "exl3-v1":
        statement: dict[str, Any] = {"quant_method": "exl3", "bits": int(bits)}
        statement["exl3"] = {"manifest": EXL3_V1.manifest_name}
        if storage == "mxfp8":
            names = {module.rule.pattern.rpartition(".")[2] for module in dense}
            statement |= {"dense_format": "mxfp8", "ignored_layers": sorted(names)}
        return statement
    if "exl3" in (storage, experts):
        return _exl3_statement(bits)
    return _mxfp8_statement(plain_linear) if storage == "mxfp8" else None


def _exl3_statement(bits: Fraction) -> dict[str, Any]:
    rate = int(bits) if bits.denominator == 1 else float(bits)
    return {
        "quant_method": "exl3",
        "version": _EXL3_VERSION,
        "bits": rate,
        "head_bits": EXL3_HEAD_BITS,
        "codebook": "mul1",
    }


def _mxfp8_statement(ignored: Iterable[Module]) -> dict[str, Any]:
    acts = {**_MXFP8_WEIGHTS, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _MXFP8_WEIGHTS, "input_activations": acts}},
        "ignore": sorted({_as_regex(module.rule.pattern) for module in ignored}),
    }


def _as_regex(pattern: str) -> str:
    """Return a module pattern as compressed-tensors writes one: ``re:`` and digits for every index."""
    return "re:" + re.sub(r"\\\{[a-z_]+\\\}", "[0-9]+", re.escape(pattern)) + "$"


def _restated(
    fields: Mapping[str, Any], statement: dict[str, Any] | None, *, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json with another quantisation in the place of its own, which EXL3 writers keep inside theirs."""
    text = fields.get("text_config")
    inside = _QUANTIZATION not in fields and isinstance(text, dict) and _QUANTIZATION in text
    scope = dict(text) if inside and isinstance(text, dict) else dict(fields)
    replaced = scope.pop(_QUANTIZATION, None) or original
    if statement is not None:
        scope[_QUANTIZATION] = dict(statement)
        if replaced is not None and statement["quant_method"] == "exl3":
            scope[_QUANTIZATION][_ORIGINAL] = replaced
    return {**fields, "text_config": scope} if inside else scope


def _refusal(what: str, expected: str, found: str) -> UnknownFormatError:
    return UnknownFormatError(Problem(where="storage", what=what, expected=expected, found=found))
