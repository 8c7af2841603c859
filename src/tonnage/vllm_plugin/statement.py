"""What a rank's headers say of quantisation, in the words of a config: package configs are those of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.checkpoint.quant import QuantScheme, parse_quantization
from tonnage.errors import Problem, raise_if_any
from tonnage.formats.quantized import MX_BLOCK, mxfp8
from tonnage.prepare.hf import compressed_tensors_statement
from tonnage.prepare.reader import TensorView
from tonnage.vllm_plugin.opening import LoadError

_EXPERT = re.compile(r"(?P<holder>.*\.experts)\.[0-9]+\.(?P<part>[a-z_0-9]+)")
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
"""What vLLM asks for the experts of a fused layer as, whatever their names are."""


def missing_statement(tensors: Mapping[str, TensorView], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config a config lacks; ``None`` if what it says, or that it says nothing, is right.

    Args:
        tensors: Of one rank.
        fields: config.json.

    Raises:
        LoadError: It states another quantisation, in which weights that are MXFP8 would be something else.
        ConfigError: What it states is unknown here.
    """
    converted = {name.removesuffix(".weight") for name in tensors if _is_mxfp8(name, tensors)}
    if not converted:
        return None
    scheme = parse_quantization(fields)
    if scheme.method == "none":
        plain = {
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if name.endswith(".weight") and len(tensor.shape) == 2
        }
        return compressed_tensors_statement(["Linear"], sorted(_asked_for(plain - converted)))
    raise_if_any(LoadError, _misstated(converted, scheme))
    return None


def _is_mxfp8(name: str, tensors: Mapping[str, TensorView]) -> bool:
    """Whether a tensor is the codes of an MXFP8 weight."""
    codes, scales = tensors[name], tensors.get(f"{name}_scale")
    return (
        codes.dtype == "F8_E4M3"
        and scales is not None
        and scales.dtype == "U8"
        and (*scales.shape[:-1], scales.shape[-1] * MX_BLOCK) == codes.shape
    )


def _asked_for(names: set[str]) -> set[str]:
    """Return modules under the names vLLM looks for: the first expert stands for all of its layer."""
    found = set()
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found.add(name)
        else:
            found |= {f"{expert['holder']}.0.{part}" for part in (expert["part"], *_EXPERT_PARTS)}
    return found


def _misstated(converted: set[str], scheme: QuantScheme) -> Iterator[Problem]:
    for name in sorted(converted):
        stated = scheme.format_of(name, "expert" if _EXPERT.fullmatch(name) else "linear").name
        if stated != (stored := mxfp8().name):
            what = "stored as MXFP8 beside a quantization_config that says something else"
            yield Problem(where="config.json", tensor=name, what=what, expected=stated, found=stored)
