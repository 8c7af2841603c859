"""Recipes against the names and shapes that transformers' own classes would save."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tonnage.api import checkpoint_from_config
from tonnage.recipes.modules import Module, stored_tensors

DATA = Path(__file__).parent / "data"
STATE_DICTS = json.loads((DATA / "state_dicts.json").read_text())["tensors"]
_NUMBER = re.compile(r"\.(?:\{[a-z]+\}|\d+)(?=\.|$)")
Tensors = Counter[tuple[str, tuple[int, ...]]]


def modules(config: str) -> tuple[Module, ...]:
    """Return the modules of an unquantised checkpoint, drafts left out: transformers has no classes for them."""
    fields = json.loads((DATA / "configs" / f"{config}.json").read_text())
    fields.pop("quantization_config", None)
    blueprint = checkpoint_from_config(fields, name=config).assignment.blueprint
    return tuple(module for module in blueprint.modules if module.rule.role != "mtp")


def tensors(some: tuple[Module, ...]) -> Tensors:
    """Count tensors by name, ``#`` for its numbers, and shape."""
    found: Tensors = Counter()
    for module in some:
        for stored in stored_tensors(module, module.fmt, module.model_dtype):
            name = _NUMBER.sub(".#", module.rule.pattern) + stored.suffix
            found[name, stored.shape] += module.copies * max(1, len(module.first))
    return found


@pytest.mark.parametrize("config", STATE_DICTS)
def test_recipe_has_what_transformers_saves_and_beyond_it_only_what_is_optional(config: str) -> None:
    found = modules(config)
    saved: Tensors = Counter({(name, tuple(shape)): count for name, shape, count in STATE_DICTS[config]})

    assert not saved - tensors(found)
    assert not tensors(found) - saved - tensors(tuple(module for module in found if module.optional))
