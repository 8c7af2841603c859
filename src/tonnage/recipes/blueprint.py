"""Recipe and config to modules with numbers: what the checkpoint must hold, before one header is read.

What a module is stands in :mod:`tonnage.recipes.modules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tonnage.checkpoint.config_checks import field_problems
from tonnage.checkpoint.quant import PLAIN, QuantScheme, parse_quantization
from tonnage.errors import ConfigError, Problem, RecipeError, TonnageError, raise_if_any
from tonnage.formats.storage import StorageFormat
from tonnage.recipes.caches import layer_caches, stated_kv_dtype
from tonnage.recipes.drafts import draft_family
from tonnage.recipes.loader import families, family_of, load_recipe
from tonnage.recipes.modules import INDEX, Axis, Module, Run, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tonnage.checkpoint.config import ModelConfig
    from tonnage.memory.cache import LayerCache
    from tonnage.recipes.schema import Extent, Recipe, Rule, Section

MOST_LAYERS = 1 << 12
MOST_EXPERTS = 1 << 16
MOST_ELEMENTS = 1 << 48
"""No layer count, expert count or tensor beyond these is believed: a config is a stranger's."""
MOST_STEPS = 1 << 20
"""Steps of name matching per recipe line, layers times what one name costs (:attr:`QuantScheme.steps`)."""


Facts = tuple[Axis, Axis, tuple[Axis, ...], int, bool, bool]
"""Output axis, input axis, axes of a single tensor, stack, bias, optional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything a family stores for one config.

    Attributes:
        recipe: Where the modules come from.
        config: What their numbers come from.
        scheme: What the config says about storage formats.
        modules: In recipe order.
        caches: What every layer keeps between steps.
        draft_caches: What the layers of multi-token prediction keep, where they are run as a draft.
        kv_dtype: The KV dtype the checkpoint was quantised for, ``fp8`` or ``nvfp4``; empty where it says nothing.
        notes: What the reader of a report must know.
    """

    recipe: Recipe
    config: ModelConfig
    scheme: QuantScheme
    modules: tuple[Module, ...]
    caches: tuple[LayerCache, ...] = ()
    draft_caches: tuple[LayerCache, ...] = ()
    kv_dtype: str = ""
    notes: tuple[str, ...]


def blueprint_of(config: ModelConfig, *, draft_method: str = "") -> Blueprint:
    """Return every module of a config's family.

    Args:
        config: Of the checkpoint.
        draft_method: How the checkpoint is to draft for another, where it is one that does.

    Raises:
        UnknownFamilyError: No recipe answers to its model type, or to that kind of draft.
        RecipeError: The config lacks what its recipe needs.
        ConfigError: Its quantisation is unknown.
    """
    family = draft_family(config, draft_method) or family_of(config.model_type, config.architectures, where=config.name)
    return draw_blueprint(load_recipe(family), config, dialect=str(families()[family].get("dialect", "")))


def draw_blueprint(recipe: Recipe, config: ModelConfig, *, dialect: str = "") -> Blueprint:
    """Return every module of the family with the numbers of one config.

    Raises:
        RecipeError: Fields the recipe needs are missing from the config or of the wrong type; all are named.
        ConfigError: The quantisation is unknown, or an extent is beyond reason.
    """
    scheme = parse_quantization(config.fields, config.hf_quant, dialect=dialect)
    modules: list[Module] = []
    caches: list[LayerCache] = []
    problems: dict[str, Problem] = {}
    impossible = [
        problem
        for scope in dict.fromkeys(((), *(section.scope for section in recipe.sections)))
        for problem in field_problems(_object_at(config, scope), ".".join((config.name, *scope)))
    ]
    raise_if_any(ConfigError, dict.fromkeys(impossible))
    for section in recipe.sections:
        try:
            if all(
                test.evaluate_bool(config.scope(section.scope[:-1] if section.scope else ())) for test in section.when
            ):
                numbers = _numbers(section, config)
                modules.extend(_section_modules(section, numbers, scheme, problems))
                caches.extend(layer_caches(section, numbers))
        except TonnageError as error:
            problems.update((str(p), p) for p in error.problems)
    if problems:
        raise RecipeError(*problems.values())
    return Blueprint(
        recipe=recipe,
        config=config,
        scheme=scheme,
        modules=tuple(modules),
        caches=tuple(cache for cache in caches if not cache.draft),
        draft_caches=tuple(cache for cache in caches if cache.draft),
        kv_dtype=stated_kv_dtype(config.fields, config.hf_quant),
        notes=scheme.notes,
    )


def _object_at(config: ModelConfig, scope: tuple[str, ...]) -> Mapping[str, object]:
    """Return the config object at a path, or nothing where there is none."""
    here: object = config.fields
    for key in scope:
        here = here.get(key) if isinstance(here, dict) else None
    return here if isinstance(here, dict) else {}


# --- numbers -------------------------------------------------------------------------------------------------------


def _numbers(section: Section, config: ModelConfig) -> _Numbers:
    """Return what evaluates a section's expressions, unless it does not describe the config."""
    fields = config.scope(section.scope)
    for test, what in section.refusals:
        if test.evaluate_bool(fields):
            raise ConfigError(
                Problem(where=config.name, what=f"{what}: not described by {section.name}.toml", found=test.text)
            )
    return _Numbers(section, fields, config.dtype)


def _section_modules(
    section: Section, numbers: _Numbers, scheme: QuantScheme, problems: dict[str, Problem]
) -> Iterator[Module]:
    for rule in section.rules:
        try:
            yield from _rule_modules(rule, section, numbers, scheme)
        except TonnageError as error:
            problems.update((str(p), p) for p in error.problems)


def _rule_modules(rule: Rule, section: Section, numbers: _Numbers, scheme: QuantScheme) -> Iterator[Module]:
    """Yield one module for every run of layers with equal numbers and equal format."""
    index_names = INDEX.findall(rule.pattern)
    firsts = numbers.extent(index_names[0]) if index_names else (None,)
    rest = tuple(numbers.extent(name) for name in index_names[1:])
    if rule.is_linear and rule.quantizes and len(firsts) * scheme.steps > MOST_STEPS:
        raise ConfigError(
            Problem(
                where="quantization_config",
                what="too many or too costly names to match on every layer",
                expected=f"at most {MOST_STEPS} steps for {rule.pattern}",
                found=f"{scheme.steps} steps on each of {len(firsts)} layers",
            )
        )
    groups: dict[tuple[Facts, StorageFormat], list[int]] = {}
    varies = _uses(rule, numbers.layered | {"layer"})
    facts: Facts | None = None
    for first in firsts:
        if facts is None or varies:
            facts = numbers.facts(rule, first)
        if facts is None:
            if not varies:
                break
            continue
        fmt = _stated_format(rule, scheme, first, len(index_names))
        groups.setdefault((facts, fmt), []).append(-1 if first is None else first)
    for ((out, in_, shape, stack, bias, optional), fmt), layers in groups.items():
        _check_elements(rule, (out, in_, *shape), stack)
        yield Module(
            rule=rule,
            section=section,
            first=() if not index_names else tuple(layers),
            rest=rest,
            out=out,
            in_=in_,
            shape=shape,
            stack=stack,
            bias=bias,
            optional=optional,
            fmt=fmt,
            method=scheme.method,
            model_dtype=numbers.model_dtype,
            names=numbers.names(layers[0] if index_names else None),
        )


def _stated_format(rule: Rule, scheme: QuantScheme, first: int | None, n_indices: int) -> StorageFormat:
    """Return the stated format of one layer's instances; the first expert speaks for all."""
    if not rule.is_linear or not rule.quantizes:
        return PLAIN
    values = iter((first or 0, *([0] * n_indices)))
    name = INDEX.sub(lambda _: str(next(values)), rule.pattern)
    return scheme.format_of(name, kind_of(rule))


def _check_elements(rule: Rule, axes: tuple[tuple[Run, ...], ...], stack: int) -> None:
    elements = prod(sum(run.size for run in axis) for axis in axes if axis) * (stack or 1)
    if not 1 <= elements <= MOST_ELEMENTS:
        raise ConfigError(
            Problem(
                where="config.json",
                what=f"tensor {rule.pattern} beyond reason",
                expected=f"1..{MOST_ELEMENTS} elements",
                found=str(elements),
            )
        )


def _uses(rule: Rule, names: frozenset[str] | set[str]) -> bool:
    expressions = [rule.when, rule.bias, rule.stack, rule.optional]
    for extents in (rule.out, rule.in_, *rule.shape):
        for extent in extents:
            expressions += [extent.size, extent.units]
    return any(e is not None and e.names & names for e in expressions)


class _Numbers:
    """Evaluates a section's expressions: config fields, then lets, then ``layer``."""

    def __init__(self, section: Section, fields: dict[str, object], model_dtype: str) -> None:
        self._section = section
        self.model_dtype = model_dtype
        self._base = fields
        self._by_layer: dict[int | None, dict[str, object]] = {}
        layered: set[str] = set()
        for key, expression in section.lets:
            if expression.names & (layered | {"layer"}):
                layered.add(key)
            else:
                self._base[key] = expression.evaluate(self._base)
        self.layered = frozenset(layered)

    def names(self, layer: int | None) -> dict[str, object]:
        """Return all names for one layer."""
        known = self._by_layer.get(layer)
        if known is None:
            known = self._base
            if layer is not None:
                known = {**self._base, "layer": layer}
                for key, expression in self._section.lets:
                    if key in self.layered:
                        known[key] = expression.evaluate(known)
            self._by_layer[layer] = known
        return known

    def extent(self, index: str) -> range:
        """Return the values of an index."""
        rule = self._section.indices[index]
        start = 0 if rule.start is None else rule.start.evaluate_int(self._base)
        count = rule.count.evaluate_int(self._base)
        most = MOST_EXPERTS if index == "expert" else MOST_LAYERS
        if not (0 <= start <= most and 0 <= count <= most):
            raise ConfigError(
                Problem(
                    where="config.json",
                    what=f"extent of {index} beyond reason",
                    expected=f"0..{most}",
                    found=f"{count} from {start}",
                )
            )
        return range(start, start + count)

    def facts(self, rule: Rule, layer: int | None) -> Facts | None:
        """Return the numbers of a rule on one layer, or ``None`` where it does not exist."""
        names = self.names(layer)
        if rule.when is not None and not rule.when.evaluate_bool(names):
            return None
        return (
            self._runs(rule.out, names, rule),
            self._runs(rule.in_, names, rule),
            tuple(self._runs(axis, names, rule) for axis in rule.shape),
            0 if rule.stack is None else rule.stack.evaluate_int(names),
            rule.bias is not None and rule.bias.evaluate_bool(names),
            rule.optional is not None and rule.optional.evaluate_bool(names),
        )

    @staticmethod
    def _runs(extents: tuple[Extent, ...], names: dict[str, object], rule: Rule) -> tuple[Run, ...]:
        runs = []
        for extent in extents:
            size = extent.size.evaluate_int(names)
            units = size if extent.units is None else extent.units.evaluate_int(names)
            if size < 0 or units < 0 or (units and size % units) or (size and not units):
                raise RecipeError(
                    Problem(
                        where=f"config.json for {rule.pattern}",
                        what=f"`{extent.size.text}` is no whole number of units",
                        expected="non-negative, a multiple of its units",
                        found=f"{size} in {units} units",
                    )
                )
            runs.append(Run(size, units))
        return tuple(runs)
