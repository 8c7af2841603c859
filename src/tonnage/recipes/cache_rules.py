"""One ``[[cache]]`` table of a recipe to its rule, every key checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from tonnage.memory.cache import StateKind
from tonnage.recipes.expressions import Expression, compile_expression
from tonnage.recipes.schema import CACHE_KEYS, CacheRule, Extent
from tonnage.recipes.toml_checks import bad, expr, list_of, needs, only, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tonnage.recipes.schema import CacheKind, IndexRule

_FLAGS = ("draft", "borrowed")
_COMMON = ("keeps", "layers", "when", *_FLAGS)
_NO_SIZES = frozenset({*_COMMON, "conv", "conv_units", "replicas", "kind"})


def cache_rule(
    facts: object, names: Mapping[str, str], indices: Mapping[str, IndexRule], *, draft: bool, where: str
) -> CacheRule:
    """Return the rule of one ``[[cache]]``.

    Args:
        facts: The table.
        names: Text put in for ``{model}``-style names.
        indices: Indices of the section; the layers are the values of one.
        draft: Everything in the section belongs to a draft.
        where: File and place, for messages.

    Raises:
        RecipeError: A key is missing, unknown or wrong.
    """
    keys = table(facts, where)
    if keys.get("keeps") not in CACHE_KEYS:
        raise bad(where, "unknown kind of cache", ", ".join(CACHE_KEYS), keys.get("keeps"))
    kind: CacheKind = keys["keeps"]
    must, may = CACHE_KEYS[kind]
    only(keys, frozenset({*_COMMON, *must, *may}), where)
    needs(keys, must, where)
    texts = {key: _named(value, names) for key, value in keys.items()}
    index = str(texts.get("layers", "layer")).strip("{}")
    if index not in indices:
        raise bad(where, "unknown index", ", ".join(sorted(indices)), index)
    state_kind = str(texts.get("kind", ""))
    if kind == "state" and state_kind not in get_args(StateKind):
        raise bad(where, "unknown kind of state", ", ".join(get_args(StateKind)), state_kind)
    for flag in _FLAGS:
        if not isinstance(keys.get(flag, False), bool):
            raise bad(where, f"{flag} is no flag", "true or false", keys[flag])
    conv, replicas = _conv(texts, where)
    return CacheRule(
        keeps=kind,
        index=index,
        when=expr(texts.get("when"), where),
        sizes={key: _compiled(value, where) for key, value in texts.items() if key not in _NO_SIZES},
        conv=conv,
        replicas=replicas,
        kind=state_kind,
        draft=draft or bool(keys.get("draft")),
        borrowed=bool(keys.get("borrowed")),
    )


def _conv(texts: Mapping[str, Any], where: str) -> tuple[tuple[Extent, ...], tuple[bool, ...]]:
    """Return the parts of a convolution, with their units, and whether these may be held by several ranks."""
    parts = list_of(texts.get("conv", []), f"{where}: conv")
    units = list_of(texts.get("conv_units", parts), f"{where}: conv_units")
    replicas = list_of(texts.get("replicas", [False] * len(parts)), f"{where}: replicas")
    if not len(parts) == len(units) == len(replicas):
        raise bad(
            where, "conv, conv_units and replicas do not match", f"{len(parts)} entries", (len(units), len(replicas))
        )
    if bool(parts) != ("kernel" in texts):
        raise bad(where, "a convolution needs its parts and its kernel", "conv and kernel", sorted(texts))
    if any(not isinstance(flag, bool) for flag in replicas):
        raise bad(where, "replicas are no flags", "true or false", replicas)
    extents = (
        Extent(size=_compiled(part, where), units=_compiled(unit, where))
        for part, unit in zip(parts, units, strict=True)
    )
    return tuple(extents), tuple(replicas)


def _compiled(value: object, where: str) -> Expression:
    return compile_expression(repr(value) if isinstance(value, bool) else str(value), where=where)


def _named(value: object, names: Mapping[str, str]) -> object:
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if isinstance(value, str):
        for key, text in names.items():
            value = value.replace("{" + key + "}", text)
    return value
