"""The engines whose placement is known, by the name the command line uses."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.engines.exllamav3 import EXLLAMAV3
from tonnage.engines.model import EngineModel
from tonnage.engines.sglang import SGLANG
from tonnage.engines.split import SPLIT
from tonnage.engines.vllm import VLLM
from tonnage.errors import PlacementError, Problem

ENGINES: Mapping[str, EngineModel] = {model.name: model for model in (VLLM, SGLANG, EXLLAMAV3, SPLIT)}


def engine(name: str) -> EngineModel:
    """Return the engine of a name.

    Raises:
        PlacementError: No engine here has that name; the message lists those that are known.
    """
    known = ENGINES.get(name)
    if known is None:
        raise PlacementError(Problem(where="--engine", what="unknown engine", expected=", ".join(ENGINES), found=name))
    return known
