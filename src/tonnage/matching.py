"""Headers against a blueprint: every stored tensor gets its module, every module its real storage format.

Names every missing, unexpected and misshapen tensor at once. What the headers say is the truth about bytes; where the
config promised another format, a note says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.assignment import Assigned, Assignment
from tonnage.checkpoint.recognise import AUXILIARY, PLAIN_DTYPES, SUFFIXES, candidates
from tonnage.checkpoint.tally import Kind, Kinds, Masker, matching_names, tally
from tonnage.errors import CheckpointError, Problem, TonnageError
from tonnage.formats.dtypes import TORCH_NAMES
from tonnage.recipes.blueprint import Blueprint, Module, Stored, masked, spells_number, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tonnage.checkpoint.skeletons import ShardHeader
    from tonnage.formats.storage import StorageFormat

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


class _Matcher:
    """One run of matching; owns the tally and the problems."""

    def __init__(self, blueprint: Blueprint, shards: Sequence[ShardHeader], elsewhere: frozenset[int]) -> None:
        self._blueprint, self._shards, self._elsewhere = blueprint, shards, elsewhere
        self._masker = Masker(_spelled_names(blueprint))
        self._tally = tally(shards, self._masker)
        self._missing: list[tuple[str, str]] = []
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._formats: dict[tuple[int, Kept], tuple[StorageFormat, tuple[Stored, ...]] | None] = {}

    def run(self) -> Assignment:
        """Match everything."""
        by_module = self._suffixes_by_module()
        mixed = self._mixed(by_module)
        entries: list[Assigned] = []
        for module in self._blueprint.modules:
            entries.extend(self._entries(module, by_module.get(masked(module.rule.pattern), {}), mixed))
        self._problems.extend(self._unexpected(by_module))
        self._report_missing()
        if self._problems:
            raise CheckpointError(*self._problems)
        notes = (*self._blueprint.notes, *dict.fromkeys(self._notes))
        return Assignment(blueprint=self._blueprint, entries=tuple(entries), notes=notes)

    # --- names to modules ----------------------------------------------------------------------------------------------

    def _suffixes_by_module(self) -> dict[str, dict[int | None, dict[str, Kinds]]]:
        """Return masked module name -> first number -> suffix -> kinds, for names a module answers to."""
        bases: dict[str, list[str]] = {}
        for module in self._blueprint.modules:
            base = masked(module.rule.pattern)
            suffixes = (*SUFFIXES, *AUXILIARY) if module.rule.is_linear else ("",)
            for suffix in suffixes:
                bases.setdefault(base + suffix, [base, suffix])
        for module in self._blueprint.modules:
            if not module.rule.is_linear:
                bases[masked(module.rule.pattern)] = [masked(module.rule.pattern), ""]
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
        """Return per-instance kinds where the instances of one layer are not stored alike (mixed rates, or incomplete)."""
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

    # --- modules to formats --------------------------------------------------------------------------------------------

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
                    self._note_missing(module, first, module.fmt, None)
                continue
            for instance in self._instances(module, first, suffixes, mixed.get((base, first))):
                groups.setdefault((instance.kept, instance.members, instance.copies), []).append(-1 if first is None else first)
        for (kept, members, copies), numbers in groups.items():
            known = self._format(module, kept)
            if known is None:
                self._misshapen(module, kept, numbers[0], members)
                continue
            fmt, stored = known
            if module.rule.is_linear and fmt.name != module.fmt.name and not self._blueprint.scheme.rates_unknown:
                self._notes.append(f"{module.rule.pattern}: config states {module.fmt.name}, stored as {fmt.name}")
            yield Assigned(
                module=module,
                fmt=fmt,
                stored=stored,
                first=tuple(numbers) if module.first else (),
                copies=copies,
                members=members,
            )

    def _instances(
        self,
        module: Module,
        first: int | None,
        suffixes: Mapping[str, Kinds],
        mixed: dict[tuple[int, ...], dict[str, Kind]] | None,
    ) -> Iterator[_Instance]:
        """Yield the instances of one layer, grouped by what is stored for them."""
        limits = tuple(len(extent) for extent in module.rest)
        if mixed is None:
            kept = tuple(sorted((suffix, next(iter(kinds))) for suffix, kinds in suffixes.items()))
            count = next(iter(next(iter(suffixes.values())).values()))
            if count.instances != module.copies or any(n >= limit for n, limit in zip(count.largest, limits, strict=True)):
                self._count_is_off(module, first, suffixes)
            yield _Instance(kept, (), module.copies)
            return
        groups: dict[Kept, list[int]] = defaultdict(list)
        for numbers, parts in mixed.items():
            if any(n >= limit for n, limit in zip(numbers, limits, strict=True)):
                self._strangers.append((masked(module.rule.pattern) + next(iter(parts)), first))
                continue
            kept = tuple(sorted(parts.items()))
            if self._format(module, kept) is None and self._is_partial(module, kept):
                self._note_missing(module, first, module.fmt, numbers, frozenset(parts))
                continue
            groups[kept].append(numbers[0] if numbers else 0)
        absent = module.copies - len(mixed)
        if absent > 0 and len(limits) == 1:
            for number in sorted(set(range(limits[0])) - {n[0] for n in mixed}):
                self._note_missing(module, first, module.fmt, (number,))
        for kept, members in groups.items():
            whole = len(members) == module.copies
            yield _Instance(kept, () if whole else tuple(sorted(members)), len(members))

    def _format(self, module: Module, kept: Kept) -> tuple[StorageFormat, tuple[Stored, ...]] | None:
        key = (id(module), kept)
        if key not in self._formats:
            self._formats[key] = _recognise(module, dict(kept), self._blueprint.config.dtype)
        return self._formats[key]

    def _is_partial(self, module: Module, kept: Kept) -> bool:
        """Whether the tensors are part of what the config's format stores, so that others are missing."""
        expected = {tensor.suffix for tensor in stored_tensors(module, module.fmt, self._blueprint.config.dtype)}
        return {suffix for suffix, _ in kept} < expected

    def _is_elsewhere(self, module: Module, first: int | None) -> bool:
        return module.rule.role == "expert" and first in self._elsewhere

    # --- problems ------------------------------------------------------------------------------------------------------

    def _note_missing(
        self,
        module: Module,
        first: int | None,
        fmt: StorageFormat,
        numbers: tuple[int, ...] | None,
        present: frozenset[str] = frozenset(),
    ) -> None:
        """Remember the tensors of an instance, or of a whole layer, that are not there."""
        try:
            expected = stored_tensors(module, fmt, self._blueprint.config.dtype)
        except TonnageError as error:
            self._problems.extend(error.problems)
            return
        instances = [numbers] if numbers is not None else [tuple(r[0] for r in module.rest)] if module.copies else []
        for rest in instances:
            indices = rest if first is None else (first, *rest)
            for tensor in expected:
                if tensor.suffix not in present:
                    found = f"{module.copies} such tensors on this layer" if numbers is None and module.copies > 1 else ""
                    self._missing.append((module.name(*indices) + tensor.suffix, found))

    def _count_is_off(self, module: Module, first: int | None, suffixes: Mapping[str, Kinds]) -> None:
        """Name the instances that are missing or beyond the range, by looking at every name once more."""
        base = masked(module.rule.pattern)
        seen: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for name, _, numbers in matching_names(self._shards, {(base + suffix, first) for suffix in suffixes}, self._masker):
            seen[name[len(base) :]].add(numbers[1:])
        expected = {indices[1:] if module.first else indices for indices in replace(module, first=module.first[:1]).instances()}
        for suffix, present in seen.items():
            for rest in sorted(expected - present):
                self._missing.append((module.name(*(() if first is None else (first,)), *rest) + suffix, ""))
            for rest in sorted(present - expected)[:MOST_NAMED]:
                name = module.name(*(() if first is None else (first,)), *rest) + suffix
                self._problems.append(
                    Problem(where="checkpoint", tensor=name, what="unexpected tensor: number beyond the config's range")
                )

    def _report_missing(self) -> None:
        for name, remark in self._missing[:MOST_NAMED]:
            self._problems.append(
                Problem(where="checkpoint", tensor=name, what="missing tensor" + (f" (and {remark})" if remark else ""))
            )
        if len(self._missing) > MOST_NAMED:
            self._problems.append(
                Problem(where="checkpoint", what=f"and {len(self._missing) - MOST_NAMED} more missing tensors")
            )

    def _misshapen(self, module: Module, kept: Kept, first: int, members: tuple[int, ...]) -> None:
        indices = ((first,) if module.first else ()) + (
            (members[:1] or (0,)) if len(module.rest) == 1 else tuple(r[0] for r in module.rest)
        )
        name = module.name(*indices)
        try:
            expected = stored_tensors(module, module.fmt, self._blueprint.config.dtype)
        except TonnageError as error:
            self._problems.extend(error.problems)
            expected = ()
        known = {tensor.suffix: tensor for tensor in expected}
        found = dict(kept)
        wrong = [s for s in found if s in known and found[s].shape != known[s].shape]
        strange = [s for s in found if s not in known]
        for suffix in wrong or strange or list(found):
            tensor = known.get(suffix)
            self._problems.append(
                Problem(
                    where="checkpoint",
                    tensor=name + suffix,
                    what="misshapen tensor" if tensor else "unexpected tensor, no storage format has these together",
                    expected=f"{tensor.dtype} {list(tensor.shape)}" if tensor else "/".join(sorted(known)) or None,
                    found=f"{found[suffix].dtype} {list(found[suffix].shape)}",
                )
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
                tensor=name.replace("#", str(first), 1).replace("#", "*"),
                what="unexpected tensor: the recipe has no such module" if first is None or name not in allowed else "unexpected tensor on this layer",
                found=f"{kind.dtype} {list(kind.shape)}" if kind else None,
            )
        if len(strangers) > MOST_NAMED:
            yield Problem(where="checkpoint", what=f"and {len(strangers) - MOST_NAMED} more kinds of unexpected tensors")


def _recognise(
    module: Module, found: dict[str, Kind], model_dtype: str
) -> tuple[StorageFormat, tuple[Stored, ...]] | None:
    """Return the format whose tensors are exactly those found, dtypes of plain tensors as found."""
    if not module.rule.is_linear:
        return _recognise_single(module, found, model_dtype)
    extra = tuple(
        Stored(suffix=suffix, dtype=found[suffix].dtype, shape=found[suffix].shape, dims=())
        for suffix in AUXILIARY
        if suffix in found and found[suffix].shape in ((), (1,))
    )
    bias_suffix = "_bias" if module.rule.bare else ".bias"
    weights = {s: k for s, k in found.items() if s != bias_suffix and s not in AUXILIARY}
    logical = {
        s: Kind(k.dtype, k.shape[1:]) if module.stack and k.shape[:1] == (module.stack,) else k for s, k in weights.items()
    }
    for fmt in candidates(logical, module.out_size, module.in_size):
        try:
            stored = stored_tensors(module, fmt, model_dtype)
        except TonnageError:
            continue
        stored = tuple(_as_found(tensor, found, fmt) for tensor in stored)
        if {t.suffix: Kind(t.dtype, t.shape) for t in stored} == {**weights, **_only(found, bias_suffix)}:
            return fmt, (*stored, *extra)
    return None


def _only(found: Mapping[str, Kind], suffix: str) -> dict[str, Kind]:
    return {suffix: found[suffix]} if suffix in found else {}


def _as_found(tensor: Stored, found: Mapping[str, Kind], fmt: StorageFormat) -> Stored:
    """Take over what formats leave open: the float dtype of plain weights, biases and scales, and ``[1]`` for a scalar."""
    kind = found.get(tensor.suffix)
    if kind is None:
        return tensor
    if tensor.shape == () and kind.shape == (1,):
        tensor = replace(tensor, shape=(1,))
    floats = frozenset(PLAIN_DTYPES)
    if tensor.dtype in floats and kind.dtype in floats and (fmt.is_plain or tensor.suffix not in (".suh", ".svh")):
        return replace(tensor, dtype=kind.dtype)
    return tensor


def _recognise_single(
    module: Module, found: dict[str, Kind], model_dtype: str
) -> tuple[StorageFormat, tuple[Stored, ...]] | None:
    (tensor,) = stored_tensors(module, module.fmt, model_dtype)
    kind = found[""]
    floats = frozenset(TORCH_NAMES.values()) & frozenset(PLAIN_DTYPES)
    same_kind = kind.dtype == tensor.dtype or (kind.dtype in floats and tensor.dtype in floats)
    if kind.shape != tensor.shape or not same_kind:
        return None
    return module.fmt, (replace(tensor, dtype=kind.dtype),)



def _spelled_names(blueprint: Blueprint) -> Iterator[str]:
    """Yield the full patterns, every suffix, of modules whose names hold a number that is no index."""
    for module in blueprint.modules:
        pattern = module.rule.pattern
        if spells_number(pattern):
            yield from (pattern + suffix for suffix in ((*SUFFIXES, *AUXILIARY) if module.rule.is_linear else ("",)))
