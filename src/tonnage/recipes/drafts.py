"""Which recipe answers to a draft head, whose config mostly has the model type of the model it drafts for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tonnage.errors import Problem, UnknownFamilyError
from tonnage.recipes.loader import families

if TYPE_CHECKING:
    from tonnage.checkpoint.config import ModelConfig

_SOUNDS_LIKE_DRAFT = re.compile(r"eagle|dflash|dspark|medusa|speculator|draftmodel|lilicorr|mtp|nextn", re.IGNORECASE)
"""In the name of an architecture: something that drafts, and no model by itself."""
_SAME_METHOD = {"dflash": ("dflash", "dflash2"), "dflash2": ("dflash2",), "eagle": ("eagle",), "eagle3": ("eagle3",)}
"""Kinds of heads by the method that runs them; engines call both kinds of DFlash by one name."""
WHOLE_MODEL = "draft-model"
"""The method of a draft that is a model of its own."""


def draft_family(config: ModelConfig, method: str = "") -> str | None:
    """Return the family of a draft head; ``None`` for a whole model.

    Args:
        config: Of the checkpoint.
        method: How it is to draft, such as ``eagle3`` or ``draft-model``; empty if that is not said. EAGLE heads have
            the config of a whole model of one layer: they are known by the method alone.

    Raises:
        UnknownFamilyError: It is a draft head without a recipe, or one of another method.
    """
    allowed = _SAME_METHOD.get(method, ("",) if method == WHOLE_MODEL else ())
    if method and not allowed:
        raise _unknown(config, f"no recipe for a draft of {method}")
    named = any(_SOUNDS_LIKE_DRAFT.search(name) for name in config.architectures)
    reduced = config.fields.get("draft_vocab_size") is not None
    found = _by_architecture(config.architectures)
    if found is None and not named and (method in _SAME_METHOD or reduced):
        found = _by_model_type(config.model_type, method if method in _SAME_METHOD else "eagle3")
    if found is None and (method in _SAME_METHOD or named or reduced):
        raise _unknown(config, "no recipe for this kind of draft")
    kind = str(families()[found]["draft"]) if found else ""
    if method and kind not in allowed:
        raise _unknown(config, f"no draft for {method}, but a head of {kind}")
    return found


def _by_architecture(architectures: tuple[str, ...]) -> str | None:
    for name, facts in families().items():
        if "draft" in facts and set(architectures) & set(facts["architectures"]):
            return name
    return None


def _by_model_type(model_type: str, kind: str) -> str | None:
    """Return the family of a head under the plain name of an architecture."""
    for name, facts in families().items():
        if facts.get("draft") == kind and model_type in facts.get("plain", ()):
            return name
    return None


def _unknown(config: ModelConfig, what: str) -> UnknownFamilyError:
    kinds = ", ".join(str(facts["draft"]) for facts in families().values() if "draft" in facts)
    found = f"model_type {config.model_type!r}, architectures {list(config.architectures)}"
    return UnknownFamilyError(
        Problem(where=config.name, what=what, expected=f"{kinds}, as `tonnage models` lists them", found=found)
    )
