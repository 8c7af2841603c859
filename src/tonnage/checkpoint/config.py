"""config.json as a value: fields for the recipes' expressions, the model's dtype, its family and its quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from tonnage.errors import ConfigError, Problem
from tonnage.formats.dtypes import TORCH_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping


MODEL_DTYPES = ("BF16", "F16", "F32")
"""What unquantised tensors can be stored in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What config.json and its neighbours say.

    Attributes:
        name: For reports; directory or file name.
        fields: config.json whole.
        hf_quant: hf_quant_config.json, if there is one.
        container: exl3-manifest.json, if there is one.
        model_type: Outer ``model_type``.
        architectures: Outer ``architectures``.
        dtype: Dtype of unquantised tensors as safetensors spells it.
    """

    name: str
    fields: Mapping[str, Any]
    hf_quant: Mapping[str, Any] | None = None
    container: Mapping[str, Any] | None = None
    model_type: str
    architectures: tuple[str, ...]
    dtype: str

    def scope(self, path: tuple[str, ...]) -> dict[str, object]:
        """Return the fields an expression sees: those at the path first, then those around it.

        Raises:
            ConfigError: The path leads to no object.
        """
        names: dict[str, object] = dict(self.fields)
        here: object = self.fields
        for key in path:
            here = here.get(key) if isinstance(here, dict) else None
            if not isinstance(here, dict):
                raise ConfigError(
                    Problem(
                        where="config.json",
                        what=f"no {'.'.join(path)}",
                        expected="an object",
                        found=type(here).__name__,
                    )
                )
            names.update(here)
        return names


def parse_config(
    fields: Mapping[str, Any],
    *,
    name: str,
    hf_quant: Mapping[str, Any] | None = None,
    container: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Return the config as a value.

    Raises:
        ConfigError: ``model_type`` or ``architectures`` have the wrong type or are both missing; the dtype is unknown.
    """
    model_type = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if model_type is not None and not isinstance(model_type, str):
        raise _bad("model_type is no text", "a string", model_type)
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise _bad("architectures is no list of names", "a list of strings", architectures)
    if model_type is None and not architectures:
        raise _bad("neither model_type nor architectures", "the model's family", sorted(fields)[:8])
    return ModelConfig(
        name=name,
        fields=fields,
        hf_quant=hf_quant,
        container=container,
        model_type=model_type or "",
        architectures=tuple(architectures),
        dtype=_dtype(fields),
    )


def _dtype(fields: Mapping[str, Any]) -> str:
    """Return the checkpoint's dtype: ``dtype`` or ``torch_dtype``, outer or of the text part; else BF16."""
    text = fields.get("text_config")
    for scope in (fields, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            stated = scope.get(key)
            if stated is None:
                continue
            known = TORCH_NAMES.get(stated.removeprefix("torch.")) if isinstance(stated, str) else None
            if known not in MODEL_DTYPES:
                raise _bad(f"unknown {key}", "bfloat16, float16 or float32", stated)
            return known
    return "BF16"


def _bad(what: str, expected: str, found: object) -> ConfigError:
    return ConfigError(Problem(where="config.json", what=what, expected=expected, found=shown(found)))
