"""Headers against a blueprint: every stored tensor gets its module, every module its real storage format.

Names every missing, unexpected and misshapen tensor at once. What the headers say is the truth about bytes; where the
config promised another format, a note says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING

from tonnage.assignment import Assigned, Assignment
from tonnage.checkpoint.recognise import AUXILIARY, SUFFIXES
from tonnage.checkpoint.tally import Kind, Kinds, Masker, matching_names, tally, unmasked
from tonnage.errors import CheckpointError, Problem
from tonnage.formats.quantized import is_read_by_value
from tonnage.recipes.blueprint import Blueprint
from tonnage.recipes.modules import Module, masked, spells_number, stored_tensors
from tonnage.recognition import Recognised, explain, recognise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tonnage.checkpoint.skeletons import ShardHeader
    from tonnage.formats.storage import StorageFormat
    from tonnage.recipes.modules import Stored

MOST_NAMED = 20
"""Tensors of one kind of problem that are written out."""

Kept = tuple[tuple[str, Kind], ...]
"""Suffixes and kinds of one instance, sorted."""


def assign_headers(
    blueprint: Blueprint, shards: Sequence[ShardHeader], *, elsewhere: frozenset[int] = frozenset()
) -> Assignment:
    """Return the assignment of a checkpoint's tensors.

    Args:
        blueprint: What the family stores for the config.
        shards: Validated headers, names distinct.
        elsewhere: Layers whose routed experts are stored in a container beside the shards.

    Raises:
        CheckpointError: Tensors are missing, unexpected or misshapen; all are counted, the first of each kind named.
    """
    matcher = _Matcher(blueprint, shards, elsewhere)
    return matcher.run()


@dataclass(frozen=True, slots=True)
class _Instance:
    """What is stored for some instances of a module on one layer."""

    kept: Kept
    members: tuple[int, ...]
    copies: int


@dataclass(slots=True)
class _Named:
    """Problems of one kind: the first are kept, the rest are counted."""

    kind: str
    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, count: int, problems: Iterable[Problem]) -> None:
        """Add so many problems; no more of them are made than will be shown."""
        self.problems.extend(islice(problems, max(MOST_NAMED - len(self.problems), 0)))
        self.count += count

    def shown(self) -> Iterator[Problem]:
        """Yield the first ones, and how many more there are."""
        yield from self.problems
        if self.count > len(self.problems):
            yield Problem(where="checkpoint", what=f"and {self.count - len(self.problems)} more {self.kind} tensors")


class _Matcher:
    """One run of matching; owns the tally and the problems."""

    def __init__(self, blueprint: Blueprint, shards: Sequence[ShardHeader], elsewhere: frozenset[int]) -> None:
        self._blueprint, self._shards, self._elsewhere = blueprint, shards, elsewhere
        self._masker = Masker(spelled_names(blueprint))
        self._tally = tally(shards, self._masker)
        self._missing, self._odd, self._beyond = _Named("missing"), _Named("misshapen"), _Named("unexpected")
        self._incomplete: list[tuple[Module, int | None, tuple[str, ...]]] = []
        self._notes: list[str] = []
        self._formats: dict[tuple[int, Kept], Recognised | None] = {}

    def run(self) -> Assignment:
        """Match everything."""
        by_module = self._suffixes_by_module()
        mixed = self._mixed(by_module)
        entries: list[Assigned] = []
        for module in self._blueprint.modules:
            entries.extend(self._entries(module, by_module.get(masked(module.rule.pattern), {}), mixed))
        self._look_again()
        unexpected = tuple(self._unexpected(by_module))
        problems = (*self._missing.shown(), *self._odd.shown(), *self._beyond.shown(), *unexpected)
        if problems:
            raise CheckpointError(*problems)
        notes = (*self._blueprint.notes, *dict.fromkeys(self._notes))
        return Assignment(blueprint=self._blueprint, entries=tuple(entries), notes=notes)

    # --- names to modules ------------------------------------------------------------------------------------------

    def _suffixes_by_module(self) -> dict[str, dict[int | None, dict[str, Kinds]]]:
        """Return masked module name -> first number -> suffix -> kinds, for names a module answers to."""
        bases = stored_names(self._blueprint)
        found: dict[str, dict[int | None, dict[str, Kinds]]] = defaultdict(lambda: defaultdict(dict))
        self._strangers: list[tuple[str, int | None]] = []
        for (name, first), kinds in self._tally.items():
            known = bases.get(name)
            if known is None:
                self._strangers.append((name, first))
            else:
                found[known[0]][first][known[1]] = kinds
        return found

    def _mixed(
        self, by_module: Mapping[str, Mapping[int | None, Mapping[str, Kinds]]]
    ) -> dict[tuple[str, int | None], dict[tuple[int, ...], dict[str, Kind]]]:
        """Return per-instance kinds where the instances of one layer are not stored alike (mixed, or incomplete)."""
        wanted: dict[str, str] = {}
        keys: set[tuple[str, int | None]] = set()
        for base, layers in by_module.items():
            for first, suffixes in layers.items():
                counts = {tuple(count.instances for count in kinds.values()) for kinds in suffixes.values()}
                if len(counts) > 1 or any(len(count) > 1 for count in counts):
                    for suffix in suffixes:
                        wanted[base + suffix] = base
                        keys.add((base + suffix, first))
        result: dict[tuple[str, int | None], dict[tuple[int, ...], dict[str, Kind]]] = {}
        if keys:
            for name, kind, numbers in matching_names(self._shards, keys, self._masker):
                base = wanted[name]
                instance = result.setdefault((base, numbers[0] if numbers else None), {}).setdefault(numbers[1:], {})
                instance[name[len(base) :]] = kind
        return result

    # --- modules to formats ----------------------------------------------------------------------------------------

    def _entries(
        self,
        module: Module,
        layers: Mapping[int | None, Mapping[str, Kinds]],
        mixed: Mapping[tuple[str, int | None], dict[tuple[int, ...], dict[str, Kind]]],
    ) -> Iterator[Assigned]:
        base = masked(module.rule.pattern)
        groups: dict[tuple[Kept, tuple[int, ...], int], list[int]] = {}
        firsts: Iterable[int | None] = module.first or (None,)
        for first in firsts:
            suffixes = layers.get(first, {})
            if not suffixes:
                if not (module.optional or self._is_elsewhere(module, first)):
                    self._whole_layer_is_missing(module, first)
                continue
            if self._is_elsewhere(module, first):
                what = f"stored in the container for layer {first}, and in the shards as well"
                self._beyond.add(1, [Problem(where="checkpoint", tensor=module.rule.pattern, what=what)])
                continue
            for instance in self._instances(module, first, suffixes, mixed.get((base, first))):
                groups.setdefault((instance.kept, instance.members, instance.copies), []).append(
                    -1 if first is None else first
                )
        for (kept, members, copies), numbers in groups.items():
            known = self._format(module, kept)
            if known is None:
                self._not_a_format(module, kept, numbers, members)
                continue
            fmt, stored = known
            stated = self._stated(module, numbers[0], members)
            if module.rule.is_linear and fmt.name != stated and not self._blueprint.scheme.rates_unknown:
                self._notes.append(f"{module.rule.pattern}: config states {stated}, stored as {fmt.name}")
            self._notes.extend(f"{module.rule.pattern}: {what}" for what in self._oddities(fmt, kept, stored))
            yield Assigned(
                module=module,
                fmt=fmt,
                stored=stored,
                first=tuple(numbers) if module.first else (),
                copies=copies,
                members=members,
            )

    def _oddities(self, fmt: StorageFormat, kept: Kept, stored: tuple[Stored, ...]) -> Iterator[str]:
        """Yield what is legal in a stored module and yet will surprise."""
        if any(is_read_by_value(tensor.suffix, tensor.dtype) for tensor in stored):
            yield "scales stored as F8_E8M0, which engines convert by value without an error; U8 is read as it is"
        marker = f".{self._blueprint.scheme.codebook}"
        if fmt.name.startswith("exl3_") and marker in (".mcg", ".mul1") and marker not in dict(kept):
            yield f"config states codebook {marker[1:]}, stored without its marker"

    def _instances(
        self,
        module: Module,
        first: int | None,
        suffixes: Mapping[str, Kinds],
        mixed: dict[tuple[int, ...], dict[str, Kind]] | None,
    ) -> Iterator[_Instance]:
        """Yield the instances of one layer, grouped by what is stored for them."""
        if mixed is None:
            kept = tuple(sorted((suffix, next(iter(kinds))) for suffix, kinds in suffixes.items()))
            counts = [count for kinds in suffixes.values() for count in kinds.values()]
            if any(count.instances != module.copies or not is_within(count.largest, module) for count in counts):
                self._incomplete.append((module, first, tuple(suffixes)))
            yield _Instance(kept, (), module.copies)
            return
        groups: dict[Kept, list[int]] = defaultdict(list)
        for numbers, parts in mixed.items():
            if is_within(numbers, module):
                groups[tuple(sorted(parts.items()))].append(numbers[0] if numbers else 0)
            else:
                self._are_beyond(module, first, ((numbers, suffix) for suffix in parts), len(parts))
        there = {number for members in groups.values() for number in members}
        if module.rest and len(there) < module.copies:
            absent = (number for number in module.rest[0] if number not in there)
            self._instances_are_missing(module, first, module.copies - len(there), absent)
        for kept, members in groups.items():
            whole = len(members) == module.copies
            yield _Instance(kept, () if whole else tuple(sorted(members)), len(members))

    def _format(self, module: Module, kept: Kept) -> Recognised | None:
        key = (id(module), kept)
        if key not in self._formats:
            self._formats[key] = recognise(module, dict(kept), self._blueprint.config.dtype)
        return self._formats[key]

    def _stated(self, module: Module, first: int, members: tuple[int, ...]) -> str:
        """Return the format the config states, of modules that engines do not expect to be quantised as well."""
        if module.rule.quantizes or not module.rule.is_linear:
            return module.fmt.name
        rest = members[:1] or tuple(extent[0] for extent in module.rest)
        name = module.name(*((first,) if module.first else ()), *rest)
        return self._blueprint.scheme.format_of(name, module.kind).name if module.rule.convert else module.fmt.name

    def _is_elsewhere(self, module: Module, first: int | None) -> bool:
        return module.rule.role == "expert" and first in self._elsewhere

    # --- problems --------------------------------------------------------------------------------------------------

    def _suffixes(self, module: Module) -> tuple[str, ...]:
        """Return what the config's format puts behind the name."""
        return tuple(t.suffix for t in stored_tensors(module, module.fmt, self._blueprint.config.dtype))

    def _is_missing(self, module: Module) -> str:
        """Return the words for it: an EXL3 config does not tell which modules are plain."""
        either = module.rule.is_linear and module.rule.quantizes and self._blueprint.scheme.rates_unknown
        return "missing tensor, or .trellis in its place" if either else "missing tensor"

    def _whole_layer_is_missing(self, module: Module, first: int | None) -> None:
        """Name the tensors of a layer's first instance, and say how many there are."""
        if not module.copies:
            return
        what = self._is_missing(module) + (
            f" (and {module.copies - 1} more such tensors on this layer)" if module.copies > 1 else ""
        )
        names = [_name(module, first, tuple(r[0] for r in module.rest)) + suffix for suffix in self._suffixes(module)]
        self._missing.add(len(names), (_problem(name, what) for name in names))

    def _instances_are_missing(self, module: Module, first: int | None, count: int, absent: Iterable[int]) -> None:
        suffixes = self._suffixes(module)
        names = (_name(module, first, (number,)) + suffix for number in absent for suffix in suffixes)
        self._missing.add(count * len(suffixes), (_problem(name, self._is_missing(module)) for name in names))

    def _are_beyond(
        self, module: Module, first: int | None, found: Iterable[tuple[tuple[int, ...], str]], count: int
    ) -> None:
        names = (_name(module, first, numbers) + suffix for numbers, suffix in found)
        what = "unexpected tensor: number beyond the config's range"
        self._beyond.add(count, (_problem(name, what) for name in names))

    def _look_again(self) -> None:
        """Name the instances missing from layers, or beyond their range, in one pass over all names."""
        keys = {
            (masked(module.rule.pattern) + suffix, first)
            for module, first, suffixes in self._incomplete
            for suffix in suffixes
        }
        seen: dict[tuple[str, int | None], set[tuple[int, ...]]] = {key: set() for key in keys}
        if keys:
            for name, _, numbers in matching_names(self._shards, keys, self._masker):
                seen[name, numbers[0] if numbers else None].add(numbers[1:])
        for module, first, suffixes in self._incomplete:
            for suffix in suffixes:
                self._compare(module, first, suffix, seen[masked(module.rule.pattern) + suffix, first])

    def _compare(self, module: Module, first: int | None, suffix: str, present: set[tuple[int, ...]]) -> None:
        beyond = [(rest, suffix) for rest in sorted(present) if not is_within(rest, module)]
        self._are_beyond(module, first, beyond, len(beyond))
        missing = module.copies - (len(present) - len(beyond))
        absent = (rest for rest in product(*module.rest) if rest not in present)
        names = (_name(module, first, rest) + suffix for rest in absent)
        self._missing.add(missing, (_problem(name, "missing tensor") for name in names))

    def _not_a_format(self, module: Module, kept: Kept, firsts: Sequence[int], members: tuple[int, ...]) -> None:
        """Say what keeps the tensors from being a storage format, on every layer and for every expert."""
        layers: Sequence[int | None] = firsts if module.first else (None,)
        rests = [(member,) for member in members] if members else product(*module.rest)
        for odd in explain(module, dict(kept), self._blueprint.config.dtype):
            names = (_name(module, *instance) + odd.suffix for instance in product(layers, rests))
            kind = self._missing if odd.found is None else self._odd
            kind.add(
                len(layers) * (len(members) or module.copies),
                (_problem(name, odd.what, odd.expected, odd.found) for name in names),
            )

    def _unexpected(self, by_module: Mapping[str, Mapping[int | None, Mapping[str, Kinds]]]) -> Iterator[Problem]:
        """Yield tensors no module answers to, and layers beyond those of their module."""
        strangers = list(self._strangers)
        allowed: dict[str, set[int | None]] = defaultdict(set)
        for module in self._blueprint.modules:
            allowed[masked(module.rule.pattern)].update(module.first or (None,))
        for base, layers in by_module.items():
            for first, suffixes in layers.items():
                if first not in allowed[base]:
                    strangers.extend((base + suffix, first) for suffix in suffixes)
        for name, first in strangers[:MOST_NAMED]:
            kinds = self._tally.get((name, first), {})
            kind = next(iter(kinds), None)
            yield Problem(
                where="checkpoint",
                tensor=unmasked(name, first),
                what="unexpected tensor: the recipe has no such module"
                if first is None or name not in allowed
                else "unexpected tensor on this layer",
                found=f"{kind.dtype} {list(kind.shape)}" if kind else None,
            )
        if len(strangers) > MOST_NAMED:
            yield Problem(
                where="checkpoint", what=f"and {len(strangers) - MOST_NAMED} more kinds of unexpected tensors"
            )


def stored_names(blueprint: Blueprint) -> dict[str, tuple[str, str]]:
    """Return every masked tensor name some module answers to, as the masked name of the module and the suffix."""
    names: dict[str, tuple[str, str]] = {}
    for module in blueprint.modules:
        if module.rule.is_linear:
            base = masked(module.rule.pattern)
            for suffix in (*SUFFIXES, *AUXILIARY):
                names.setdefault(base + suffix, (base, suffix))
    singles = (masked(module.rule.pattern) for module in blueprint.modules if not module.rule.is_linear)
    return names | {base: (base, "") for base in singles}


def is_within(numbers: tuple[int, ...], module: Module) -> bool:
    """Whether the numbers behind the layer are within the config's range."""
    return all(number in extent for number, extent in zip(numbers, module.rest, strict=True))


def _name(module: Module, first: int | None, rest: tuple[int, ...]) -> str:
    return module.name(*(() if first is None else (first,)), *rest)


def _problem(name: str, what: str, expected: str | None = None, found: Kind | None = None) -> Problem:
    shown = None if found is None else f"{found.dtype} {list(found.shape)}"
    return Problem(where="checkpoint", tensor=name, what=what, expected=expected, found=shown)


def spelled_names(blueprint: Blueprint) -> Iterator[str]:
    """Yield the full patterns, every suffix, of modules whose names hold a number that is no index."""
    for module in blueprint.modules:
        pattern = module.rule.pattern
        if spells_number(pattern):
            yield from (pattern + suffix for suffix in ((*SUFFIXES, *AUXILIARY) if module.rule.is_linear else ("",)))
