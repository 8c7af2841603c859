"""How the config of a checkpoint names some of its modules, in the two styles there are lists in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tonnage.assignment import Assigned, Assignment
from tonnage.recipes.modules import Module, masked

_LAYERS_PER_ENTRY = 64
"""Layers written into one pattern: patterns have a length limit."""
_EXPERT_PARTS = "(gate_proj|up_proj|down_proj)"
_INDEX = re.compile(r"\{[a-z_]+\}")


def is_plain(entry: Assigned) -> bool:
    """Whether this is a linear layer that is left as it was; a table of embeddings is none."""
    return entry.module.rule.is_linear and entry.fmt.is_plain and entry.module.rule.role != "embedding"


def tied_heads(assignment: Assignment) -> Iterator[str]:
    """Yield output heads that are the embedding and not stored: linear layers all the same to whoever builds the model.

    Source:
        transformers 5.19.0 with compressed-tensors 0.17.0: one that is not ignored gets scales, which are missing.
    """
    stored = {entry.module.rule.pattern for entry in assignment.entries}
    for module in assignment.blueprint.modules:
        if module.rule.role == "head" and module.rule.is_linear and module.rule.pattern not in stored:
            yield module.rule.pattern


def _chosen(
    assignment: Assignment, chosen: Callable[[Assigned], bool]
) -> Iterator[tuple[Module, tuple[int, ...] | None]]:
    """Yield modules of the chosen entries, and their layers where others of the same name are not chosen."""
    layers: dict[str, list[int]] = {}
    modules: dict[str, Module] = {}
    others: set[str] = set()
    for entry in assignment.entries:
        name = masked(entry.module.rule.pattern)
        if chosen(entry):
            modules.setdefault(name, entry.module)
            layers.setdefault(name, []).extend(entry.first)
        else:
            others.add(name)
    for name, module in modules.items():
        yield module, tuple(sorted(set(layers[name]))) if name in others else None


def regexes(assignment: Assignment, chosen: Callable[[Assigned], bool]) -> Iterator[str]:
    """Yield names as compressed-tensors matches them: literal, or ``re:`` with digits for every index."""
    for module, layers in _chosen(assignment, chosen):
        pattern = module.rule.pattern
        if not _INDEX.search(pattern):
            yield pattern
            continue
        for numbers in _groups(layers):
            yield f"re:{_as_regex(pattern, numbers)}$"
            around, found, _ = pattern.partition(".experts.")
            if found and module.rule.is_routed:
                # Engines ask for the experts of a fused layer under these names, whatever theirs are.
                yield rf"re:{_as_regex(around, numbers)}\.experts\.[0-9]+\.{_EXPERT_PARTS}$"


def _groups(layers: tuple[int, ...] | None) -> Iterator[str]:
    """Yield what stands for the first index: any number, or so many of those meant at once."""
    if layers is None:
        yield "[0-9]+"
        return
    for begin in range(0, len(layers), _LAYERS_PER_ENTRY):
        yield "(" + "|".join(map(str, layers[begin : begin + _LAYERS_PER_ENTRY])) + ")"


def _as_regex(pattern: str, first: str) -> str:
    head, *tail = map(re.escape, _INDEX.split(pattern))
    return head + "".join(("[0-9]+" if place else first) + part for place, part in enumerate(tail))


def wildcards(assignment: Assignment) -> Iterator[str]:
    """Yield names as modelopt excludes them: an entry without ``*`` also matches inside other names.

    Engines ask for routed experts by the name of what holds them.
    """
    taken = [entry.module.rule.pattern for entry in assignment.entries if not is_plain(entry)]
    for module, layers in _chosen(assignment, is_plain):
        around, found, _ = module.rule.pattern.partition(".experts.")
        pattern = f"{around}.experts*" if found and module.rule.is_routed else module.rule.pattern
        for layer in layers if layers is not None else ("*",):
            name = _INDEX.sub("*", _INDEX.sub(str(layer), pattern, count=1))
            inside = "*" not in name and (layer != "*" or any(name in other for other in taken))
            yield f"*{name}" if inside else name


def holders(entry: Assigned) -> Iterator[str]:
    """Yield the names of an entry's modules; of routed experts that of the module around them, once a layer."""
    module = entry.module
    around, found, _ = module.rule.pattern.partition(".experts.")
    for first in entry.first or (None,):
        index = () if first is None else (str(first),)
        numbers = iter((*index, *("0" for _ in module.rest)))
        yield _INDEX.sub(lambda _: next(numbers), f"{around}.experts" if found else module.rule.pattern)  # noqa: B023
