"""Which storage format a quantised checkpoint's config states for which module.

``quantization_config`` (config.json, outer or inside ``text_config``) and ``hf_quant_config.json`` become one
:class:`QuantScheme`: an ordered list of name patterns with a format each. Where real headers exist they are the truth
(:mod:`tonnage.checkpoint.recognise`); the scheme is what a config alone promises.

Sources:
    compressed-tensors 0.20.0 (config groups, targets, ignore), nvidia-modelopt 0.47.0 (quant_algo, exclude_modules,
    quantized_layers), vLLM 0.32.0 ``model_executor/layers/quantization`` for how names are matched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from tonnage.checkpoint.name_tests import (
    EVERYTHING,
    EXPERTS,
    HEAD,
    MOST_PATTERNS,
    NOT_HEAD,
    TOWERS,
    WHERE,
    Kind,
    NameTest,
    excluded,
    listed,
    matched,
    named_inside,
    names_in,
    nowhere_in,
    spelled_in,
)
from tonnage.errors import ConfigError, Problem
from tonnage.formats import quantized as q
from tonnage.formats.storage import StorageFormat, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Rules = tuple[tuple[NameTest, StorageFormat], ...]
"""The first test that a module passes says its format."""
PLAIN = plain()
_PLAIN_TO_MODELOPT = ("vision_tower", "vision_model", "vit_large_projector")
"""In the names of modules that engines take for plain where a config of modelopt does not list its layers."""


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Formats by module name, first match wins.

    Attributes:
        method: ``quant_method`` as written, lower case; ``none`` without quantisation; ``modelopt_mixed`` where
            modelopt lists formats layer by layer.
        rules: Pairs of a name test and a format.
        kv_scales: The config declares a quantised KV cache, so attention layers carry scale scalars.
        notes: What was ignored, and why.
        rates_unknown: Formats differ by tensor in a way only headers or ``quantization_config.json`` tell (EXL3).
        codebook: Codebook an EXL3 config names; empty if it names none.
        act_order: GPTQ quantised in an order of activations, so that groups follow ``g_idx``.
    """

    method: str = "none"
    rules: Rules = ()
    kv_scales: bool = False
    notes: tuple[str, ...] = ()
    rates_unknown: bool = False
    codebook: str = ""
    act_order: bool = False

    def format_of(self, name: str, kind: Kind) -> StorageFormat:
        """Return the format the config states for a module, ``plain`` where it states none."""
        for test, fmt in self.rules:
            if test.matches(name, kind):
                return fmt
        return PLAIN

    @property
    def steps(self) -> int:
        """About how many steps of work one name takes."""
        return sum(test.steps for test, _ in self.rules)


UNQUANTIZED = QuantScheme()


def parse_quantization(
    config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None, *, dialect: str = ""
) -> QuantScheme:
    """Return the scheme of a checkpoint.

    Args:
        config: config.json.
        hf_quant: hf_quant_config.json, if the directory has one.
        dialect: Family-specific spelling: ``deepseek_v4`` stores ``.scale``, and FP4 experts unless it says FP8.

    Raises:
        ConfigError: The method, algorithm or a parameter is unknown here.
    """
    text = config.get("text_config")
    stated = config.get("quantization_config")
    if stated is None and isinstance(text, dict):
        stated = text.get("quantization_config")
    if stated is None:
        return _from_hf_quant(hf_quant) if hf_quant else UNQUANTIZED
    if not isinstance(stated, dict):
        raise _refusal("not an object", "an object", type(stated).__name__)
    if "quant_method" not in stated:
        return QuantScheme(
            notes=("quantization_config names no quant_method: engines ignore it, and so does this plan",)
        )
    method = _text(stated, "quant_method").lower()
    if dialect == "deepseek_v4" and method == "fp8":
        default = "fp8" if config.get("model_type") == "deepseek_ref" else "fp4"
        return _deepseek_v4(stated, _text(config, "expert_dtype") or default)
    parser = _METHODS.get(method)
    if parser is None:
        raise _refusal("unknown quant_method", ", ".join(sorted(_METHODS)), method)
    return parser(stated)


def _from_hf_quant(hf_quant: Mapping[str, Any]) -> QuantScheme:
    producer = hf_quant.get("producer")
    if not isinstance(producer, dict) or producer.get("name") != "modelopt":
        return QuantScheme(
            notes=("hf_quant_config.json names no producer modelopt: engines ignore it, and so does this plan",)
        )
    inner = hf_quant.get("quantization")
    if not isinstance(inner, dict):
        raise ConfigError(Problem(where="hf_quant_config.json", what="no quantization object"))
    return _modelopt({**inner, "quant_method": "modelopt"})


# --- methods -------------------------------------------------------------------------------------------------------


def _fp8(stated: Mapping[str, Any]) -> QuantScheme:
    static = _activation(stated) == "static"
    block = stated.get("weight_block_size")
    fmt = q.fp8_tensor(input_scale=static) if block is None else q.fp8_block(*_pair(block))
    ignored = names_in(stated, "ignored_layers") or names_in(stated, "modules_to_not_convert")
    return QuantScheme(
        method="fp8", rules=((named_inside(ignored), PLAIN), (NOT_HEAD, fmt)), kv_scales=_has_kv_scheme(stated)
    )


def _mxfp8_native(stated: Mapping[str, Any]) -> QuantScheme:
    ignored = names_in(stated, "ignored_layers") or names_in(stated, "modules_to_not_convert")
    fmt = q.mxfp8(scale_suffix=".weight_scale_inv")
    return QuantScheme(method="mxfp8", rules=((named_inside(ignored), PLAIN), (NOT_HEAD, fmt)))


def _mxfp4_experts(_stated: Mapping[str, Any]) -> QuantScheme:
    fmt = q.mxfp4_blocks()
    return QuantScheme(method="mxfp4", rules=((EXPERTS, fmt),))


def _compressed_tensors(stated: Mapping[str, Any]) -> QuantScheme:
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refusal("no config_groups", "at least one group", type(groups).__name__)
    rules: list[tuple[NameTest, StorageFormat]] = [(matched(names_in(stated, "ignore")), PLAIN)]
    for key, group in groups.items():
        if not isinstance(group, dict):
            raise _refusal(f"{key}: not an object", "an object", type(group).__name__)
        fmt = _ct_format(group, _text(group, "format") or _text(stated, "format"), key)
        targets = names_in(group, "targets")
        exact = tuple(t for t in targets if t != "Linear")
        if "Linear" in targets:
            rules.append((NOT_HEAD, fmt))
        if exact:
            rules.append((matched(exact), fmt))
    return QuantScheme(method="compressed-tensors", rules=tuple(rules), kv_scales=_has_kv_scheme(stated))


def _ct_format(group: Mapping[str, Any], fmt: str, key: str) -> StorageFormat:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _refusal(f"{key}: no weights", "an object", type(weights).__name__)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size = weights.get("group_size")
    acts = group.get("input_activations")
    found: StorageFormat | None = None
    if (bits, kind) == (8, "float"):
        found = _ct_fp8(weights, static=isinstance(acts, dict) and acts.get("dynamic") is False)
    elif (bits, kind) == (4, "float") and size == q.NVFP4_BLOCK:
        found = q.nvfp4("compressed-tensors", input_scale=isinstance(acts, dict))
    elif (bits, kind) == (4, "float") and size == q.MX_BLOCK and "mxfp4" in fmt:
        found = q.mxfp4()
    elif (bits, kind, fmt, strategy) == (8, "int", "int-quantized", "channel") and weights.get(
        "symmetric", True
    ) is True:
        found = q.int8_channel()
    elif kind == "int" and isinstance(bits, int) and fmt == "pack-quantized" and strategy == "group":
        found = q.int_packed(bits, _positive(size), symmetric=bool(weights.get("symmetric", True)))
    if found is None:
        facts = (("num_bits", bits), ("type", kind), ("strategy", strategy), ("group_size", size), ("format", fmt))
        raise _refusal(
            f"{key}: unknown weights",
            "fp8 tensor, channel or block; mxfp8; mxfp4; nvfp4; int8 channel; int pack-quantized by group",
            ", ".join(f"{name} {shown(value)}" for name, value in facts),
        )
    return found


def _ct_fp8(weights: Mapping[str, Any], *, static: bool) -> StorageFormat | None:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return q.fp8_tensor(input_scale=static)
    if strategy == "channel":
        return q.fp8_channel()
    if strategy == "block":
        return q.fp8_block(*_pair(weights.get("block_structure")), suffix=".weight_scale")
    return q.mxfp8() if strategy == "group" and weights.get("group_size") == q.MX_BLOCK else None


def _modelopt(stated: Mapping[str, Any]) -> QuantScheme:
    algo = _text(stated, "quant_algo").upper()
    skipped = excluded(names_in(stated, "exclude_modules") or names_in(stated, "ignore"))
    kv_scales = bool(stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme"))
    if algo == "MIXED_PRECISION":
        layers = stated.get("quantized_layers")
        if not isinstance(layers, dict):
            raise _refusal("MIXED_PRECISION without quantized_layers", "an object", type(layers).__name__)
        by_format: dict[StorageFormat, list[str]] = {}
        for name, facts in layers.items():
            by_format.setdefault(_modelopt_format(_facts(name, facts)), []).append(name)
        rules = [(skipped, PLAIN), *((listed(names), fmt) for fmt, names in by_format.items())]
        return QuantScheme(method="modelopt_mixed", rules=tuple(rules), kv_scales=kv_scales)
    rules = [(skipped, PLAIN), (spelled_in(_PLAIN_TO_MODELOPT), PLAIN), (EVERYTHING, _modelopt_format(stated))]
    return QuantScheme(method="modelopt", rules=tuple(rules), kv_scales=kv_scales)


def _modelopt_format(facts: Mapping[str, Any]) -> StorageFormat:
    algo = _text(facts, "quant_algo").upper()
    if algo == "FP8":
        return q.fp8_tensor(input_scale=True)
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return q.fp8_channel(scale_dtype="F32")
    if algo in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return q.fp8_block(128, 128, suffix=".weight_scale")
    if algo in ("NVFP4", "W4A16_NVFP4"):
        return q.nvfp4("modelopt", input_scale=algo == "NVFP4")
    if algo == "MXFP8":
        return q.mxfp8()
    raise _refusal(
        "unknown quant_algo",
        "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8, MIXED_PRECISION",
        algo,
    )


def _gptq(stated: Mapping[str, Any]) -> QuantScheme:
    fmt = _gptq_format(stated, stated)
    some = (*_outside_blocks(stated), *_dynamic(stated))
    return replace(_auto(stated, "gptq", fmt, some), act_order=stated.get("desc_act") is True)


def _gptq_format(facts: Mapping[str, Any], stated: Mapping[str, Any]) -> StorageFormat:
    bits, group = (facts.get(key, stated.get(key)) for key in ("bits", "group_size"))
    return q.gptq(_positive(bits), _positive(group))


def _dynamic(stated: Mapping[str, Any]) -> Iterator[tuple[NameTest, StorageFormat]]:
    """Yield what GPTQModel's patterns say of some modules: ``-:`` leaves them plain, others have sizes of their own."""
    patterns = stated.get("dynamic") or {}
    if not isinstance(patterns, dict):
        raise _refusal("dynamic is no object", "an object", shown(patterns))
    if len(patterns) > MOST_PATTERNS:
        raise _refusal("dynamic is too long", f"at most {MOST_PATTERNS} patterns", str(len(patterns)))
    for pattern, facts in patterns.items():
        test = matched((f"re:{pattern.removeprefix('-:').removeprefix('+:')}",))
        yield test, PLAIN if pattern.startswith("-:") else _gptq_format(_facts(pattern, facts, of="dynamic"), stated)


def _outside_blocks(stated: Mapping[str, Any]) -> Iterator[tuple[NameTest, StorageFormat]]:
    """Yield that modules which a list of those to quantise leaves out are plain."""
    key = "modules_in_block_to_quantize"
    blocks = stated.get(key) or []
    if not isinstance(blocks, list):
        raise _refusal(f"{key} is no list", "a list of names", shown(blocks))
    nested = [names if isinstance(names, list) else [names] for names in blocks]
    inside = names_in({key: [name for names in nested for name in names]}, key)
    if inside:
        yield nowhere_in(inside), PLAIN


def _awq(stated: Mapping[str, Any]) -> QuantScheme:
    fmt = q.awq(
        _positive(stated.get("bits", stated.get("w_bit"))),
        _positive(stated.get("group_size", stated.get("q_group_size"))),
    )
    return _auto(stated, "awq", fmt)


def _auto(stated: Mapping[str, Any], method: str, fmt: StorageFormat, some: Rules = ()) -> QuantScheme:
    """Return the scheme of a method that packs the layers of the language model; towers are left as they are.

    No config says so: engines look into the files. What is said of some modules cannot make towers or the head packed.
    """
    ignored = spelled_in(names_in(stated, "modules_to_not_convert"))
    head: Rules = () if stated.get("lm_head") is True else ((HEAD, PLAIN),)
    return QuantScheme(method=method, rules=((ignored, PLAIN), (TOWERS, PLAIN), *head, *some, (EVERYTHING, fmt)))


def _exl3(stated: Mapping[str, Any]) -> QuantScheme:
    """EXL3 keeps one rate per tensor; a config only says the average, so the formats come from headers."""
    return QuantScheme(method="exl3", rates_unknown=True, codebook=_text(stated, "codebook").lower())


def _deepseek_v4(stated: Mapping[str, Any], expert_dtype: str) -> QuantScheme:
    scale_dtype = "F8_E8M0" if expert_dtype == "fp4" else "F32"
    block = q.fp8_block(*_pair(stated.get("weight_block_size")), scale_dtype=scale_dtype, suffix=".scale")
    if expert_dtype == "fp4":
        experts = q.mxfp4(codes_suffix=".weight", scale_suffix=".scale", codes_dtype="I8", scale_dtype="F8_E8M0")
    elif expert_dtype == "fp8":
        experts = block
    else:
        raise _refusal("unknown expert_dtype", "fp4 or fp8", expert_dtype)
    rules: list[tuple[NameTest, StorageFormat]] = [(EXPERTS, experts), (NOT_HEAD, block)]
    if _text(stated, "moe_quant_algo").upper() == "NVFP4":
        layers = stated.get("quantized_layers")
        requantized = listed(layers) if isinstance(layers, dict) else EXPERTS
        rules.insert(0, (requantized, q.nvfp4("modelopt", input_scale=True)))
    return QuantScheme(method="fp8", rules=tuple(rules))


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantScheme]] = {
    "fp8": _fp8,
    "mxfp8": _mxfp8_native,
    "mxfp4": _mxfp4_experts,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "exl3": _exl3,
}


# --- fields --------------------------------------------------------------------------------------------------------


def _text(stated: Mapping[str, Any], key: str) -> str:
    """Return a text out of a config, empty where there is none."""
    value = stated.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _refusal(f"{key} is no text", "a string", type(value).__name__)
    return value


def _facts(name: str, value: object, *, of: str = "quantized_layers") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(f"{of}: {name}: not an object", "an object", type(value).__name__)
    return value


def _activation(stated: Mapping[str, Any]) -> str:
    scheme = _text(stated, "activation_scheme") or "dynamic"
    if scheme not in ("static", "dynamic"):
        raise _refusal("unknown activation_scheme", "static or dynamic", scheme)
    return scheme


def _pair(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _refusal("weight block is no pair", "two positive integers", shown(value))
    return _positive(value[0]), _positive(value[1])


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 20:
        raise _refusal("not a size", "a positive integer", shown(value))
    return value


def _has_kv_scheme(stated: Mapping[str, Any]) -> bool:
    return bool(stated.get("kv_cache_scheme"))


def _refusal(what: str, expected: str, found: str) -> ConfigError:
    return ConfigError(Problem(where=WHERE, what=what, expected=expected, found=found))
