"""The tensors of one rank by what they are for: names held against a recipe, and nothing guessed.

A name that the recipe of the config does not have, or has on other layers or for fewer experts, is ``unknown``. Shapes
are not looked at: those of a rank depend on who cut it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.checkpoint.tally import Masker, matching_names, tally
from tonnage.formats.dtypes import payload_bytes
from tonnage.formats.exl3_v1_names import DIALECTS
from tonnage.matching import is_within, spelled_names, stored_names
from tonnage.measure.record import ClassSum
from tonnage.recipes.blueprint import Blueprint
from tonnage.recipes.modules import Module, masked
from tonnage.recipes.schema import ROLES

UNKNOWN = "unknown"
"""The class of tensors no recipe tells the use of."""

CLASSES = (*ROLES, UNKNOWN)
_CONTAINER_CLASS = "expert"
_Found = tuple[str, str, int, int]
"""Class, dtype, bytes, tensors."""


def class_sums(shards: Sequence[ShardHeader], blueprint: Blueprint | None) -> tuple[ClassSum, ...]:
    """Return the sums of one rank by class and dtype, in the order of the roles; together they are its payload.

    Args:
        shards: All its headers; layer files of an exl3-v1 container, which say so, hold routed experts.
        blueprint: What the family stores for the config; ``None`` if there is no config, or no recipe for it.
    """
    layers = [shard for shard in shards if _is_container_layer(shard)]
    others = [shard for shard in shards if not _is_container_layer(shard)]
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for tensor_class, dtype, nbytes, tensors in (*_of_layers(layers), *_of_names(others, blueprint)):
        total = sums[tensor_class, dtype]
        total[0] += nbytes
        total[1] += tensors
    order = sorted(sums, key=lambda key: (CLASSES.index(key[0]), key[1]))
    return tuple(
        ClassSum(tensor_class=key[0], dtype=key[1], nbytes=sums[key][0], tensors=sums[key][1]) for key in order
    )


def _is_container_layer(shard: ShardHeader) -> bool:
    schema = shard.skeleton.metadata.get("schema")
    return any(shard.shard_file.startswith(one.layer_prefix) and schema == one.schema for one in DIALECTS)


def _of_layers(shards: Sequence[ShardHeader]) -> Iterator[_Found]:
    for shard in shards:
        for entry in shard.skeleton.tensors:
            yield _CONTAINER_CLASS, entry.dtype, entry.nbytes, 1


def _of_names(shards: Sequence[ShardHeader], blueprint: Blueprint | None) -> Iterator[_Found]:
    """Yield counted names with their class; of groups with numbers beyond the config every name on its own."""
    masker = Masker(spelled_names(blueprint) if blueprint else ())
    bases = stored_names(blueprint) if blueprint else {}
    modules = _modules(blueprint)
    mixed: set[tuple[str, int | None]] = set()
    for (name, first), kinds in tally(shards, masker).items():
        module = modules.get((bases[name][0], first)) if name in bases else None
        if module is not None and not all(is_within(count.largest, module) for count in kinds.values()):
            mixed.add((name, first))
            continue
        tensor_class = UNKNOWN if module is None else module.rule.role
        for kind, count in kinds.items():
            yield tensor_class, kind.dtype, payload_bytes(*kind) * count.instances, count.instances
    for name, kind, numbers in matching_names(shards, mixed, masker) if mixed else ():
        module = modules[bases[name][0], numbers[0] if numbers else None]
        tensor_class = module.rule.role if is_within(numbers[1:], module) else UNKNOWN
        yield tensor_class, kind.dtype, payload_bytes(*kind), 1


def _modules(blueprint: Blueprint | None) -> dict[tuple[str, int | None], Module]:
    """Return the modules by masked name and first number."""
    return {
        (masked(module.rule.pattern), first): module
        for module in (blueprint.modules if blueprint else ())
        for first in module.first or (None,)
    }
