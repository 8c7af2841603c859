"""What no config of any family can say: negative sizes, KV heads that do not divide, words for layers unheard of.

Recipes turn fields into numbers; these checks keep a wrong word, or a list too short, from becoming a module silently
left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tonnage.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_COUNT = re.compile(
    r"(num|n|first_k)_.*|moe_layer_freq|decoder_sparse_step|.*_(size|dim|rank|heads|layers|experts)", re.ASCII
)
MOST_CONTEXT_TOKENS = 1 << 40
_PER_LAYER = ("layer_types", "layers_block_type")
_LAYER_KINDS = frozenset(
    {
        "attention",
        "chunked_attention",
        "deepseek_sparse_attention",
        "full_attention",
        "linear_attention",
        "mamba",
        "mlp",
        "moe",
        "sliding_attention",
    }
)
_PATTERN = "hybrid_override_pattern"
_PATTERN_KINDS = frozenset("M*-E")
_LAYER_LISTS = ("mlp_only_layers",)


def field_problems(fields: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Yield what is impossible in one object of a config, whichever family it is of."""
    for name, value in fields.items():
        if isinstance(value, int) and value < 0 and _COUNT.fullmatch(name):
            yield Problem(where=where, what=f"negative {name}", expected="0 or more", found=str(value)[:40])
    context = fields.get("max_position_embeddings")
    if context is not None and (type(context) is not int or not 1 <= context <= MOST_CONTEXT_TOKENS):
        expected = f"an integer from 1 to {MOST_CONTEXT_TOKENS}"
        yield Problem(where=where, what="max_position_embeddings", expected=expected, found=repr(context)[:40])
    layers = fields.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        return
    if layers < 1:
        yield Problem(where=where, what="num_hidden_layers", expected="at least 1", found=str(layers)[:40])
        return
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        expected = f"a divisor of {heads} attention heads"
        yield Problem(where=where, what="num_key_value_heads", expected=expected, found=str(kv_heads)[:40])
    yield from _layer_problems(fields, layers, where)


def _layer_problems(fields: Mapping[str, object], layers: int, where: str) -> Iterator[Problem]:
    """Yield lists and patterns that do not say one known word for every layer."""
    known = {**dict.fromkeys(_PER_LAYER, _LAYER_KINDS), _PATTERN: _PATTERN_KINDS}
    for name, kinds in known.items():
        value = fields.get(name)
        if not isinstance(value, (list, str)) or (isinstance(value, str) and name != _PATTERN):
            continue
        if len(value) != layers:
            yield Problem(where=where, what=f"entries of {name}", expected=f"{layers} layers", found=str(len(value)))
        strange = [word for word in value[: layers + 1] if not isinstance(word, str) or word not in kinds]
        if strange:
            expected = ", ".join(sorted(kinds))
            yield Problem(
                where=where, what=f"unknown kind of layer in {name}", expected=expected, found=repr(strange[0])[:60]
            )
    for name in _LAYER_LISTS:
        value = fields.get(name)
        if isinstance(value, list) and any(
            not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < layers for n in value
        ):
            yield Problem(where=where, what=f"layers in {name}", expected=f"numbers below {layers}")
