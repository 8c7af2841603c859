"""The engines whose placement rules are known, by name."""

from __future__ import annotations

from tonnage.engines.model import EngineModel
from tonnage.engines.split import SPLIT
from tonnage.engines.vllm import VLLM
from tonnage.errors import PlacementError, Problem

ENGINES = {model.name: model for model in (VLLM, SPLIT)}


def engine(name: str) -> EngineModel:
    """Return an engine.

    Raises:
        PlacementError: No rules are known for it.
    """
    if name not in ENGINES:
        raise PlacementError(Problem(where="--engine", what="unknown engine", expected=", ".join(ENGINES), found=name))
    return ENGINES[name]
