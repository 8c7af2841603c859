"""A config to that of a small model with the same kinds of tensors.

Known sizes are capped by a table, head counts divided so that their ratios stay, vision widths halved together, and
layers cut to the fewest that still have every module of the full model. Fields that are not known here stay as they
are. Names in a quantisation config keep their layer numbers, so a draft layer, which follows the last one, may come to
be stored otherwise than in the full model.
"""

from __future__ import annotations

import re
from math import gcd
from typing import TYPE_CHECKING, Any

from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.errors import ConfigError, Problem, TonnageError
from tonnage.recipes.blueprint import blueprint_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Fields = dict[str, Any]

LARGEST: Mapping[str, int] = {
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"), 4),
    **dict.fromkeys(("index_n_heads",), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 128),
    **dict.fromkeys(
        (
            "hidden_size", "routed_expert_hidden_size", "moe_latent_size", "text_hidden_size", "out_hidden_size",
            "word_embed_proj_dim",
        ),
        512,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "moe_intermediate_size",
            "shared_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
            "vocab_size", "vocab_size_per_layer_input", "ffn_dim",
        ),
        1024,
    ),
}  # fmt: skip
"""Field to the largest value it keeps. The widths are multiples of every block of every storage format."""

MOST_HEADS = 16
HEAD_GROUPS = (
    ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "o_groups"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_num_heads", "n_groups"),
    ("num_heads",),
)
"""Counts divided by one number, so that the first is at most 16. A single key-value head stays single."""

VISION_WIDTHS = (
    "hidden_size", "vt_hidden_size", "mm_hidden_size", "intermediate_size", "vt_intermediate_size", "qkv_hidden_size",
    "vision_output_dim", "projector_input_dim", "projector_output_dim",
)  # fmt: skip
"""Halved together, heads kept, until the first or second is at most :data:`WIDEST_VISION`."""

VISION_HEADS = ("num_attention_heads", "num_heads", "vt_num_attention_heads")
JOINED_WIDTHS = ("text_hidden_size", "out_hidden_size")
WIDEST_VISION = 640
LAYER_COUNTS = ("num_hidden_layers", "depth", "vt_num_hidden_layers")
LAYER_KINDS = "layers_block_type"
"""A list of layer kinds that stands for the count where there is none."""

DRAFT_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Multi-token-prediction layers, which per-layer lists may count at their end."""

LAYER_LISTS = {
    "full_attn_layers": 1, "kda_layers": 1, "dsa_layers": 1, "mlp_only_layers": 0, "moe_layers": 0,
    "deepstack_visual_indexes": 0,
}  # fmt: skip
"""Lists of layer numbers, to the number of the first layer."""

_VISION = ("vision_config", "audio_config")
_OWN_HEAD_SIZE = "gemma"
"""Families whose heads have a width of their own where the config gives none."""

_LEFT_ALONE = ("quantization_config", "_hf_quant_config")
_PATTERN = re.compile(r"[-*A-Z|]+")
_TOKEN = re.compile(r".*_token_(id|index)")

Kinds = frozenset[tuple[str, str]]


def scale_down(config: ModelConfig) -> ModelConfig:
    """Return a small model's config whose blueprint has the same module patterns and roles.

    Raises:
        ConfigError: Sizes of the config do not suit each other once they are small.
        TonnageError: The config has no recipe, or lacks what its recipe needs.
    """
    wanted = _kinds(config)
    fields = _shrunk(dict(config.fields))
    fields = _with_tokens_below(_with_vocabulary(fields), LARGEST["vocab_size"])
    for path, key in _counts(fields, ()):
        fields = _with_fewest(fields, path, key, config, wanted)
    small = _parsed(config, fields)
    missing = wanted ^ _kinds(small)
    if missing:
        names = ", ".join(sorted(pattern for pattern, _ in missing)[:8])
        raise ConfigError(Problem(where="scale-down", what="the small model has other tensor kinds", found=names))
    return small


def _kinds(config: ModelConfig) -> Kinds:
    return frozenset((module.rule.pattern, module.rule.role) for module in blueprint_of(config).modules)


def _parsed(config: ModelConfig, fields: Fields) -> ModelConfig:
    return parse_config(fields, name=config.name, hf_quant=config.hf_quant)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _shrunk(scope: Fields) -> Fields:
    """Return a text part, or the whole config, with small sizes; what is nested in it likewise."""
    small: Fields = {}
    for key, value in scope.items():
        if key in _LEFT_ALONE:
            small[key] = value
        elif isinstance(value, dict):
            small[key] = _shrunk_vision(value) if key in _VISION else _shrunk(value)
        else:
            small[key] = min(value, LARGEST[key]) if key in LARGEST and _size(value) else value
    for group in HEAD_GROUPS:
        small |= _fewer_heads(scope, group)
    width, heads = _size(scope.get("hidden_size")), _size(scope.get("num_attention_heads"))
    own = "kv_lora_rank" in scope or str(scope.get("model_type", "")).startswith(_OWN_HEAD_SIZE)
    if not own and not scope.get("head_dim") and width and heads and width % heads == 0:
        small["head_dim"] = width // heads  # else the width of a head would follow from the small ones
    return small


def _fewer_heads(scope: Fields, group: tuple[str, ...]) -> Fields:
    """Return the counts of a group divided by the smallest number that makes the first small."""
    counts = {key: scope[key] for key in group if _size(scope.get(key))}
    if group[0] not in counts:
        return {}
    shared = {key: count for key, count in counts.items() if count > 1}
    step = gcd(*shared.values())
    for divisor in range(1, step + 1):
        if step % divisor == 0 and counts[group[0]] // divisor <= MOST_HEADS:
            step = divisor
            break
    return {key: count // step for key, count in shared.items()}


def _shrunk_vision(scope: Fields) -> Fields:
    """Return a vision or audio part with its widths halved; those of the text part it joins are capped like them."""
    widths = {key: scope[key] for key in VISION_WIDTHS if _size(scope.get(key))}
    width = widths.get("hidden_size") or widths.get("vt_hidden_size") or 0
    heads = max(_size(scope.get(key)) for key in VISION_HEADS) or 1
    if scope.get("head_dim"):
        heads = 1  # whose width is its own
    divisor = 1
    while width // divisor > WIDEST_VISION and widths.get("qkv_hidden_size", width) % (2 * divisor * heads) == 0:
        divisor *= 2
    if any(size % divisor for size in widths.values()):
        divisor = 1
    joined = {key: min(scope[key], LARGEST[key]) for key in JOINED_WIDTHS if _size(scope.get(key))}
    return {**scope, **{key: size // divisor for key, size in widths.items()}, **joined}


def _size(value: object) -> int:
    """Return a positive integer of a config, 0 for everything else."""
    return value if type(value) is int and value > 0 else 0


def _with_vocabulary(fields: Fields) -> Fields:
    """Return the config with the small vocabulary written out where it leaves that to its family."""
    text = fields.get("text_config")
    if "vocab_size" in fields or (isinstance(text, dict) and "vocab_size" in text):
        return fields
    stated = {"vocab_size": LARGEST["vocab_size"]}
    return {**fields, "text_config": {**text, **stated}} if isinstance(text, dict) else {**fields, **stated}


def _with_tokens_below(scope: Fields, vocabulary: int) -> Fields:
    """Return the config with every token id within the small vocabulary."""
    small: Fields = {}
    for key, value in scope.items():
        if isinstance(value, dict):
            small[key] = value if key in _LEFT_ALONE else _with_tokens_below(value, vocabulary)
        elif _TOKEN.fullmatch(key) and isinstance(value, list):
            small[key] = [_size(token) % vocabulary if _size(token) else token for token in value]
        elif _TOKEN.fullmatch(key) and _size(value):
            small[key] = value % vocabulary
        else:
            small[key] = value
    return small


# --- layers -----------------------------------------------------------------------------------------------------------


def _counts(scope: Fields, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    """Return where the config counts layers, outer ones first."""
    found = [(path, key) for key in (*DRAFT_COUNTS, *LAYER_COUNTS, LAYER_KINDS) if _count(scope, key)]
    if path and path[-1] in _VISION and not found:
        found = [(path, LAYER_COUNTS[0])]  # a config may leave its vision part to the family
    for key, value in scope.items():
        if isinstance(value, dict) and key not in _LEFT_ALONE:
            found += _counts(value, (*path, key))
    return found


def _count(scope: Mapping[str, Any], key: str) -> int:
    """Return how many layers a field counts, 0 if it counts none."""
    value = scope.get(key)
    if key == LAYER_KINDS:
        return len(value) if isinstance(value, list) and not _size(scope.get(LAYER_COUNTS[0])) else 0
    return _size(value)


def _with_fewest(fields: Fields, path: tuple[str, ...], key: str, config: ModelConfig, wanted: Kinds) -> Fields:
    """Return the config with the smallest count under which no kind of tensor is lost."""
    scope: Mapping[str, Any] = fields
    for step in path:
        scope = scope[step]
    is_draft = key in DRAFT_COUNTS
    drafts = 0 if is_draft else sum(_count(scope, draft) for draft in DRAFT_COUNTS)
    layers = max(_count(scope, other) for other in (*LAYER_COUNTS, LAYER_KINDS)) if is_draft else 0
    old = _count(scope, key)
    for count in range(1, old or 2):
        cut = _Cut(old=layers + old, new=layers + count, tail=drafts)
        small = _at(fields, path, cut, {} if key == LAYER_KINDS else {key: count})
        try:
            if _kinds(_parsed(config, small)) == wanted:
                return small
        except TonnageError:
            continue  # lists of the config say otherwise for so few layers
    return fields


def _at(fields: Fields, path: tuple[str, ...], cut: _Cut, stated: Fields) -> Fields:
    """Return the config with the part at ``path`` cut, and what it now states."""
    if not path:
        return {**_cut_lists(fields, cut), **stated}
    return {**fields, path[0]: _at(fields[path[0]], path[1:], cut, stated)}


class _Cut:
    """From ``old`` layers to ``new``; lists may count ``tail`` more entries behind them, which stay."""

    def __init__(self, *, old: int, new: int, tail: int) -> None:
        self.old, self.new, self.tail = old, new, tail

    def apply(self, key: str, value: Any) -> Any:
        """Return a list or string with one entry per layer, or of layer numbers, without the layers cut off."""
        if isinstance(value, list) and key in LAYER_LISTS:
            return [layer for layer in value if layer < self.new + LAYER_LISTS[key]]
        per_layer = isinstance(value, list) or (isinstance(value, str) and _PATTERN.fullmatch(value))
        if per_layer and len(value) in (self.old, self.old + self.tail) and self.old > 1:
            return value[: self.new] + value[self.old :]
        return value


def _cut_lists(scope: Fields, cut: _Cut) -> Fields:
    cut_off: Fields = {}
    for key, value in scope.items():
        if isinstance(value, dict) and key not in (*_LEFT_ALONE, *_VISION):
            cut_off[key] = _cut_lists(value, cut)
        else:
            cut_off[key] = cut.apply(key, value)
    return cut_off
