"""Names of vLLM's modules for what a rank holds: which tensors stand behind each other in one. Pure.

vLLM loads query, key and value into one module, gate and up into one, and the experts of a layer into two tensors. All
of them are concatenated along the first axis, so that the bytes of the fused tensor are those of its parts in order.
Known for the dense and mixture models of ``FAMILIES``, unquantised; anything else is refused by name.

Source:
    vLLM 0.32.0 ``model_loader/sharded_state_loader.py`` (every key must be there; of tensors that share memory the
    first name counts), ``models/llama.py``, ``qwen2.py``, ``qwen3.py``, ``qwen3_moe.py``; names as in the state dict of
    these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.checkpoint.recognise import PLAIN_DTYPES
from tonnage.errors import PlacementError, Problem, raise_if_any

if TYPE_CHECKING:
    from tonnage.prepare.reader import TensorView

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
CACHE_SCALES = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
"""Scalars every attention layer of vLLM holds in float32: 1 where the cache is not quantised."""

_LAYER = re.compile(r"(model\.layers\.\d{1,6}\.)(.+)")
_FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
_PARTS = {"self_attn.qkv_proj": 3, "mlp.gate_up_proj": 2}
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)}
_EXPERT_PARTS = {"w13_weight": 2, "w2_weight": 1}
_SAME = frozenset({
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.down_proj.weight", "mlp.down_proj.bias",
})  # fmt: skip
_OUTER = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One tensor of vLLM's model on one rank.

    Attributes:
        name: In its state dict.
        dtype: Of all parts.
        shape: Of all together.
        sources: What stands behind each other in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


def fused_tensors(held: Mapping[str, TensorView], *, model_type: str, where: str) -> tuple[Fused, ...]:
    """Return the tensors of vLLM's model on a rank, sorted by name; scales of the cache left out.

    Args:
        held: What the rank holds, cut by vLLM's rules.
        model_type: Of config.json.
        where: For refusals.

    Raises:
        PlacementError: The family is unknown here, a tensor has no known place, is quantised, or a part is missing.
    """
    if model_type not in FAMILIES:
        expected = "one of " + ", ".join(FAMILIES)
        raise PlacementError(
            Problem(where=where, what="fused names are not known", expected=expected, found=repr(model_type))
        )
    places = {name: _place(name, tied=_HEAD not in held) for name in sorted(held)}
    raise_if_any(PlacementError, _unknown(held, places, where))
    groups: dict[str, dict[_Key, str]] = {}
    for name, place in places.items():
        if place is not None:
            groups.setdefault(place[0], {})[place[1]] = name
    raise_if_any(PlacementError, _missing(groups, held, where))
    return tuple(_fused(name, parts, held) for name, parts in sorted(groups.items()))


def layers_of(tensors: tuple[Fused, ...]) -> tuple[str, ...]:
    """Return the prefixes of all attention layers."""
    found = {match[1] for one in tensors if (match := _LAYER.match(one.name)) is not None}
    return tuple(sorted(found))


def _place(name: str, *, tied: bool) -> tuple[str, _Key] | None:
    """Return the fused tensor a tensor is in and its position there; ``None`` if that is not known."""
    if name in _OUTER:
        return (_HEAD if tied and name == _EMBEDDING else name), (0, 0)
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    prefix, rest = match.groups()
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        tensor, position = _EXPERTS[expert[2]]
        return f"{prefix}mlp.experts.routed_experts.{tensor}", (int(expert[1]), position)
    module, _, part = rest.rpartition(".")
    if module in _FUSED and part in ("weight", "bias"):
        fused, position = _FUSED[module]
        return f"{prefix}{fused}.{part}", (0, position)
    if rest == "mlp.gate.weight":
        return f"{prefix}mlp.experts.gate.weight", (0, 0)
    return (name, (0, 0)) if rest in _SAME else None


def _unknown(
    held: Mapping[str, TensorView], places: Mapping[str, tuple[str, _Key] | None], where: str
) -> Iterator[Problem]:
    for name, place in places.items():
        if place is None:
            yield Problem(where=where, tensor=name, what="no place in the model is known for it")
        elif held[name].dtype not in PLAIN_DTYPES:
            found = held[name].dtype
            yield Problem(where=where, tensor=name, what="is quantised", expected="a plain dtype", found=found)


def _missing(groups: Mapping[str, Mapping[_Key, str]], held: Mapping[str, TensorView], where: str) -> Iterator[Problem]:
    """Yield fused tensors of which a part is missing or is of another kind than the rest."""
    for name, parts in groups.items():
        module, _, last = name.partition("layers.")[2].partition(".")[2].rpartition(".")
        count = _EXPERT_PARTS.get(last, _PARTS.get(module, 1))
        experts = sorted({expert for expert, _ in parts})
        run = experts == list(range(experts[0], experts[0] + len(experts)))
        if not run or len(parts) != len(experts) * count:
            yield Problem(where=where, tensor=name, what="parts are missing", found=", ".join(parts.values()))
        kinds = {(held[part].dtype, held[part].shape[1:]) for part in parts.values()}
        stacked = last in _EXPERT_PARTS
        if len(kinds) > 1 or (stacked and len({held[part].shape for part in parts.values()}) > 1):
            yield Problem(where=where, tensor=name, what="parts of several dtypes or shapes", found=str(sorted(kinds)))


def _fused(name: str, parts: Mapping[_Key, str], held: Mapping[str, TensorView]) -> Fused:
    sources = tuple(source for _, source in sorted(parts.items()))
    first = held[sources[0]]
    rows = sum(held[source].shape[0] for source in sources)
    shape = (rows, *first.shape[1:])
    if name.rpartition(".")[2] in _EXPERT_PARTS:
        experts = len({expert for expert, _ in parts})
        shape = (experts, rows // experts, *first.shape[1:])
    return Fused(name=name, dtype=first.dtype, shape=shape, sources=sources)
