"""TOML to :class:`~tonnage.recipes.schema.Recipe`, every key checked; and which recipe answers to which model type.

Recipes ship with the package. A wrong key, role or expression is refused with file and key, never skipped.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, get_args

from tonnage.errors import Problem, RecipeError, UnknownFamilyError
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.formats.storage import MODEL_DTYPE
from tonnage.recipes.cache_rules import cache_rule
from tonnage.recipes.expressions import Expression, compile_expression
from tonnage.recipes.schema import (
    ROLES,
    Credit,
    EngineRule,
    EngineRules,
    Extent,
    FusedRule,
    IndexRule,
    Recipe,
    Rule,
    Section,
    Split,
    Stage,
)
from tonnage.recipes.toml_checks import bad, expr, list_of, needs, only, table, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENGINES = ("vllm", "sglang", "exllamav3", "split")
FAMILIES_FILE = "families.toml"

_TABLES = ("names", "refuse", "let", "index", "module", *ENGINES)
_TOP_KEYS = frozenset(
    {"source", "scope", "names", "refuse", "let", "index", "module", "cache", "include", "notes", *ENGINES}
)
_RULE_KEYS = frozenset({
    "role", "out", "in", "shape", "units", "split", "why", "replicas", "when", "bias", "stack", "transposed", "bare",
    "dtype", "quantizes", "convert", "credit", "fused", "stage", "last_if", "optional",
})  # fmt: skip
_INCLUDE_KEYS = frozenset({"recipe", "names", "scope", "when", "role", *ENGINES})
_ENGINE_KEYS = frozenset({
    "split", "replicas", "whole_if", "absent_if", "dtype", "dtype_if", "held", "copies", "slice_size", "stage",
    "why",
})  # fmt: skip
_FLAGS = frozenset({"replicas", "transposed", "bare", "quantizes", "convert"})
_TEXTS = frozenset({"role", "why", "dtype", "fused", "split", "stage", "credit"})
_RECIPE_NAME = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_DEEPEST_INCLUDE = 8
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@lru_cache(maxsize=1)
def families() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of families: name to its model types, architectures, recipe and remarks."""
    return _toml("families", _read(FAMILIES_FILE))


def family_of(model_type: str, architectures: tuple[str, ...] = (), *, where: str = "config.json") -> str:
    """Return the family that answers to a config's ``model_type``, or to its architecture where the type is unknown.

    Raises:
        UnknownFamilyError: No recipe answers; the message says what to add.
    """
    for name, facts in families().items():
        if model_type in facts["model_types"]:
            return name
    for name, facts in families().items():
        if set(architectures) & set(facts.get("architectures", ())):
            return name
    raise UnknownFamilyError(
        Problem(
            where=where,
            what="no recipe for this model family (CONTRIBUTING.md says how to add one)",
            expected="a model_type out of `tonnage models`",
            found=f"model_type {model_type!r}, architectures {list(architectures)}",
        )
    )


@lru_cache(maxsize=32)
def load_recipe(family: str) -> Recipe:
    """Return the recipe of a family out of :func:`families`.

    Raises:
        RecipeError: A key, role, pattern or expression in it is wrong.
    """
    recipe_name = str(families()[family].get("recipe", family))
    return replace(parse_recipe(recipe_name, _read(f"{recipe_name}.toml")), family=family)


def parse_recipe(name: str, text: str) -> Recipe:
    """Return a recipe from TOML text.

    Raises:
        RecipeError: It is no TOML, or a key, role, pattern or expression in it is wrong.
    """
    data = _toml(name, text)
    return Recipe(family=name, source=str(data.get("source", "")), sections=tuple(_sections(name, data, _Part())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the includes on the way to a file say about it."""

    names: Mapping[str, str] = field(default_factory=dict)
    scope: tuple[str, ...] = ()
    when: tuple[Expression, ...] = ()
    role: str = ""
    engines: Mapping[str, EngineRule] = field(default_factory=dict)
    depth: int = 0


def _read(file_name: str) -> str:
    return (resources.files("tonnage.recipes") / file_name).read_text(encoding="utf-8")


def _toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(Problem(where=f"recipe {name}", what="not TOML", found=str(error))) from error


def _sections(name: str, data: dict[str, Any], part: _Part) -> Iterator[Section]:
    """Yield the section of one file, then those of the files it includes, names and scope resolved."""
    only(data, _TOP_KEYS, name)
    if not data.get("source"):
        raise bad(name, "no source", "where the facts come from", sorted(data))
    tables = {key: table(data.get(key, {}), f"{name}: {key}") for key in _TABLES}
    names = {**texts(tables["names"], f"{name}: names"), **part.names}
    scope = part.scope or _path(str(data.get("scope", "")))
    indices = {key: _index(value, f"{name}: index.{key}") for key, value in tables["index"].items()}
    engines = {
        engine: _engine_rules(tables[engine], names, part.engines.get(engine), f"{name}: {engine}")
        for engine in ENGINES
        if engine in data or engine in part.engines
    }
    if "module" in data:
        rules = tuple(
            _rule(_named(pattern, names), facts, f"{name}: {pattern}") for pattern, facts in tables["module"].items()
        )
        if part.role:
            rules = tuple(replace(rule, role=part.role, credit=None) for rule in rules)
        known = set(indices)
        for rule in rules:
            for index in _PLACEHOLDER.findall(rule.pattern):
                if index not in known:
                    raise bad(name, f"{rule.pattern}: unknown index", ", ".join(sorted(known)), index)
        yield Section(
            name=name,
            scope=scope,
            when=part.when,
            refusals=tuple(
                (compile_expression(text, where=f"{name}: refuse"), str(what))
                for text, what in tables["refuse"].items()
            ),
            lets=tuple(
                (key, compile_expression(_named(str(text), names), where=f"{name}: let.{key}"))
                for key, text in tables["let"].items()
            ),
            indices=indices,
            rules=rules,
            caches=tuple(
                cache_rule(facts, names, indices, draft=part.role == "mtp", where=f"{name}: cache {number}")
                for number, facts in enumerate(list_of(data.get("cache", []), f"{name}: cache"))
            ),
            engines=engines,
        )
    for include in list_of(data.get("include", []), f"{name}: include"):
        inner = _included(table(include, f"{name}: include"), name, part.depth)
        inside = _inside(part, include, names, scope, f"{name}: include {inner}")
        yield from _sections(inner, _toml(inner, _read(f"{inner}.toml")), inside)


def _included(include: dict[str, Any], name: str, depth: int) -> str:
    """Return the recipe an include names: one beside this module, not itself by way of others."""
    inner = include.get("recipe")
    if not isinstance(inner, str):
        raise bad(f"{name}: include", "missing key", "recipe = a name", inner)
    shipped = _RECIPE_NAME.fullmatch(inner) and (resources.files("tonnage.recipes") / f"{inner}.toml").is_file()
    if not shipped:
        raise bad(f"{name}: include {inner}", "no such recipe", "the name of a file in tonnage.recipes", inner)
    if depth >= _DEEPEST_INCLUDE:
        raise bad(f"{name}: include {inner}", "includes nest too deeply", f"at most {_DEEPEST_INCLUDE}", depth + 1)
    return inner


def _inside(
    part: _Part, include: dict[str, Any], names: Mapping[str, str], scope: tuple[str, ...], where: str
) -> _Part:
    """Return what one include says, on top of what was said on the way to it."""
    only(include, _INCLUDE_KEYS, where)
    condition = expr(include.get("when"), where)
    role = include.get("role", part.role)
    if role and role not in ROLES:
        raise bad(where, "unknown role", ", ".join(ROLES), role)
    return _Part(
        names={
            key: _named(value, names)
            for key, value in texts(table(include.get("names", {}), f"{where}: names"), f"{where}: names").items()
        },
        scope=_path(str(include["scope"])) if "scope" in include else scope,
        when=(*part.when, condition) if condition else part.when,
        role=role,
        engines={**part.engines, **{e: _engine_rule(include[e], where) for e in ENGINES if e in include}},
        depth=part.depth + 1,
    )


def _rule(pattern: str, facts: dict[str, Any], where: str) -> Rule:
    only(table(facts, where), _RULE_KEYS, where)
    _check_types(facts, where)
    if facts.get("role") not in ROLES:
        raise bad(where, "unknown role", ", ".join(ROLES), facts.get("role"))
    _check_choices(facts, where)
    split = facts.get("split", "replicated")
    if ("shape" in facts) == ("out" in facts and "in" in facts):
        raise bad(where, "wrong facts", "either shape, or out and in", sorted(facts))
    units = facts.get("units")
    if "shape" in facts:
        list_of(facts["shape"], f"{where}: shape")
        axis = 0 if split in ("column", "vocab") else len(facts["shape"]) - 1
        shape = tuple(
            _extents(text, units if i == axis and split != "replicated" else None, where)
            for i, text in enumerate(facts["shape"])
        )
        sizes: dict[str, Any] = {"shape": shape}
    else:
        on_in = split == "row"
        sizes = {
            "out": _extents(facts["out"], None if on_in else units, where),
            "in_": _extents(facts["in"], units if on_in else None, where),
        }
    plain = {k: facts[k] for k in _RULE_KEYS & set(facts) if k not in _PARSED}
    if split == "replicated" and not facts.get("why"):
        raise bad(where, "not cut, and no reason given", "a split, or why every rank holds it whole", facts)
    return Rule(
        pattern=pattern,
        split=split,
        when=expr(facts.get("when"), where),
        bias=expr(facts.get("bias"), where),
        stack=expr(facts.get("stack"), where),
        optional=expr(facts.get("optional"), where),
        stage=facts.get("stage", "layer" if "{layer}" in pattern else "all"),
        last_if=expr(facts.get("last_if"), where),
        **sizes,
        **plain,
    )


_PARSED = frozenset({"out", "in", "shape", "units", "when", "bias", "stack", "split", "stage", "last_if", "optional"})


def _check_choices(facts: dict[str, Any], where: str) -> None:
    for key, allowed in (("split", get_args(Split)), ("stage", get_args(Stage)), ("credit", get_args(Credit))):
        if key in facts and facts[key] not in allowed:
            raise bad(where, f"unknown {key}", ", ".join(allowed), facts[key])


def _check_types(facts: dict[str, Any], where: str) -> None:
    for key, value in facts.items():
        if key in _FLAGS and not isinstance(value, bool):
            raise bad(where, f"{key} is no flag", "true or false", value)
        if key in _TEXTS and not isinstance(value, str):
            raise bad(where, f"{key} is no text", "a text", value)
    dtype = facts.get("dtype", MODEL_DTYPE)
    if dtype != MODEL_DTYPE and dtype not in DTYPE_BITS:
        raise bad(where, "unknown dtype", ", ".join((MODEL_DTYPE, *DTYPE_BITS)), dtype)


def _extents(value: object, units: object, where: str) -> tuple[Extent, ...]:
    texts = value if isinstance(value, list) else [value]
    unit_texts = units if isinstance(units, list) else [units] * len(texts)
    if len(unit_texts) != len(texts):
        raise bad(where, "units do not match parts", f"{len(texts)} entries", len(unit_texts))
    return tuple(
        Extent(size=compile_expression(str(text), where=where), units=expr(unit, where))
        for text, unit in zip(texts, unit_texts, strict=True)
    )


def _engine_rules(data: dict[str, Any], names: Mapping[str, str], every: EngineRule | None, where: str) -> EngineRules:
    modules, fused = {}, {}
    for key, facts in data.items():
        if key == "fused":
            for fused_name, fused_facts in table(facts, f"{where}.fused").items():
                at = f"{where}.fused.{fused_name}"
                only(table(fused_facts, at), frozenset({"rows_multiple", "why"}), at)
                needs(fused_facts, ("rows_multiple", "why"), at)
                fused[fused_name] = FusedRule(
                    rows_multiple=compile_expression(str(fused_facts["rows_multiple"]), where=where),
                    why=fused_facts["why"],
                )
            continue
        modules[_named(key, names)] = _engine_rule(facts, f"{where}: {key}")
    return EngineRules(modules=modules, fused=fused, every=every)


def _engine_rule(facts: dict[str, Any], where: str) -> EngineRule:
    only(table(facts, where), _ENGINE_KEYS, where)
    _check_types({key: value for key, value in facts.items() if key in _TEXTS}, where)
    _check_choices(facts, where)
    return EngineRule(
        replicas=expr(facts.get("replicas"), where),
        whole_if=expr(facts.get("whole_if"), where),
        absent_if=expr(facts.get("absent_if"), where),
        dtype_if=expr(facts.get("dtype_if"), where),
        held=expr(facts.get("held"), where),
        copies=expr(facts.get("copies"), where),
        slice_size=expr(facts.get("slice_size"), where),
        **{k: facts[k] for k in ("split", "dtype", "stage", "why") if k in facts},
    )


def _index(value: object, where: str) -> IndexRule:
    if isinstance(value, dict):
        only(value, frozenset({"start", "count"}), where)
        needs(value, ("count",), where)
        return IndexRule(
            start=expr(value.get("start"), where), count=compile_expression(str(value["count"]), where=where)
        )
    return IndexRule(count=compile_expression(str(value), where=where))


def _named(text: str, names: Mapping[str, str]) -> str:
    """Put the names in; what is left in braces is an index."""
    for key, value in names.items():
        text = text.replace("{" + key + "}", value)
    return text


def _path(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()
