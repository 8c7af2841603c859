"""Cache rules of a recipe with the numbers of one config: what every layer keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from tonnage.errors import ConfigError, Problem
from tonnage.formats.dtypes import TORCH_NAMES
from tonnage.memory.cache import (
    Attention,
    Compressed,
    ConvRun,
    Indexer,
    Kept,
    Latent,
    LayerCache,
    State,
    StateKind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tonnage.recipes.schema import CacheKind, CacheRule, Section

MOST_TOKENS = 1 << 40
"""No window, chunk, head count or size beyond this is believed."""


class Numbers(Protocol):
    """What evaluates a section's expressions."""

    def names(self, layer: int | None) -> dict[str, object]:
        """Return all names for one layer."""

    def extent(self, index: str) -> range:
        """Return the values of an index."""


def layer_caches(section: Section, numbers: Numbers) -> Iterator[LayerCache]:
    """Yield what the layers of a section keep, layers that keep the same together.

    Raises:
        RecipeError: A field is missing or of the wrong type.
        ConfigError: A number cannot be that of a cache.
    """
    for rule in section.caches:
        alike: dict[Kept, list[int]] = {}
        for layer in numbers.extent(rule.index):
            names = numbers.names(layer)
            if rule.when is None or rule.when.evaluate_bool(names):
                alike.setdefault(_kept(rule, names, section.name), []).append(layer)
        for kept, layers in alike.items():
            yield LayerCache(
                kept=kept, layers=tuple(layers), source=section.name, draft=rule.draft, borrowed=rule.borrowed
            )


def stated_kv_dtype(fields: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> str:
    """Return the KV dtype a checkpoint was quantised for: ``fp8``, ``nvfp4``, or empty where it says nothing.

    ``hf_quant_config.json`` counts only where config.json says nothing about quantisation at all.

    Source:
        vLLM 0.32.0 ``transformers_utils/config.py``, ``utils/torch_utils.py`` get_kv_cache_quant_algo_string;
        ``layers/attention/attention.py`` for the scheme of compressed-tensors.
    """
    quant = fields.get("quantization_config")
    method = "modelopt"
    if isinstance(quant, dict):
        method = str(quant.get("quant_method", ""))
    else:
        quant = hf_quant
    if not isinstance(quant, dict) or not method.startswith(("modelopt", "compressed-tensors")):
        return ""
    inner = quant.get("quantization", quant)
    keys = ("kv_cache_scheme", "kv_cache_quant_algo") if method.startswith("modelopt") else ("kv_cache_scheme",)
    stated = [t.get(key) for key in keys for t in (inner, quant) if isinstance(t, dict)]
    return next((_scheme(value) for value in stated if value), "")


def _scheme(stated: object) -> str:
    """Return the KV dtype of a scheme or the name of one; empty where there is no rule for it."""
    if isinstance(stated, dict):
        return {8: "fp8", 4: "nvfp4"}.get(stated.get("num_bits", 0), "") if stated.get("type") == "float" else ""
    name = str(stated).lower()
    return name if name in ("fp8", "nvfp4") else ""


def _kept(rule: CacheRule, names: dict[str, object], section: str) -> Kept:
    try:
        return _BUILD[rule.keeps](rule, names)
    except ValueError as error:
        raise ConfigError(
            Problem(where=f"config.json for {section}.toml", what="no layer can keep this", found=str(error))
        ) from error


def _size(rule: CacheRule, names: dict[str, object], key: str, default: int = 0) -> int:
    expression = rule.sizes.get(key)
    if expression is None:
        return default
    value = expression.evaluate(names)
    size = int(value) if isinstance(value, bool) else expression.evaluate_int(names)
    if not 0 <= size <= MOST_TOKENS:
        raise ConfigError(
            Problem(
                where=f"config.json: `{expression.text}`",
                what="beyond reason",
                expected=f"0..{MOST_TOKENS}",
                found=str(size),
            )
        )
    return size


def _attention(rule: CacheRule, names: dict[str, object]) -> Attention:
    key = _size(rule, names, "key")
    return Attention(
        kv_heads=_size(rule, names, "heads"),
        head_size=key,
        value_size=_size(rule, names, "value", key),
        window_tokens=_size(rule, names, "window"),
        chunk_tokens=_size(rule, names, "chunk"),
    )


def _latent(rule: CacheRule, names: dict[str, object]) -> Latent:
    return Latent(
        rank=_size(rule, names, "rank"),
        rope_size=_size(rule, names, "rope"),
        sparse=bool(_size(rule, names, "sparse")),
        window_tokens=_size(rule, names, "window"),
    )


def _indexer(rule: CacheRule, names: dict[str, object]) -> Indexer:
    return Indexer(head_size=_size(rule, names, "key"), scaled=bool(_size(rule, names, "scaled", 1)))


def _compressed(rule: CacheRule, names: dict[str, object]) -> Compressed:
    return Compressed(
        head_size=_size(rule, names, "key"),
        rope_size=_size(rule, names, "rope"),
        window_tokens=_size(rule, names, "window"),
        ratio=_size(rule, names, "ratio"),
        index_size=_size(rule, names, "index"),
    )


def _state(rule: CacheRule, names: dict[str, object]) -> State:
    runs = []
    for extent, replicas in zip(rule.conv, rule.replicas, strict=True):
        size = extent.size.evaluate_int(names)
        units = size if extent.units is None else extent.units.evaluate_int(names)
        if size < 1 or units < 1 or size % units:
            raise ValueError(f"{size} channels in {units} units")
        runs.append(ConvRun(units=units, unit_size=size // units, replicas=replicas))
    return State(
        kind=cast("StateKind", rule.kind),
        heads=_size(rule, names, "heads"),
        key_size=_size(rule, names, "key"),
        value_size=_size(rule, names, "value"),
        conv=tuple(runs),
        conv_kernel=_size(rule, names, "kernel"),
        dtype=_dtype(rule, names),
    )


def _dtype(rule: CacheRule, names: dict[str, object]) -> str:
    expression = rule.sizes.get("dtype")
    stated = "" if expression is None else expression.evaluate(names)
    if stated in ("", None):
        return ""
    dtype = TORCH_NAMES.get(str(stated))
    if dtype is None:
        raise ConfigError(
            Problem(
                where=f"config.json: `{expression.text if expression else ''}`",
                what="unknown dtype",
                expected=", ".join(TORCH_NAMES),
                found=str(stated),
            )
        )
    return dtype


_BUILD: dict[CacheKind, Callable[[CacheRule, dict[str, object]], Kept]] = {
    "attention": _attention,
    "latent": _latent,
    "indexer": _indexer,
    "compressed": _compressed,
    "state": _state,
}
