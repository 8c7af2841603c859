"""tonnage: to the byte, what every GPU will hold of a language model, before anything is downloaded or loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tonnage.version import __version__

if TYPE_CHECKING:
    from tonnage.api import open_checkpoint, plan_checkpoint
    from tonnage.errors import TonnageError
    from tonnage.memory.supply import Supply, find_gpu, parse_supply, supply_bytes
    from tonnage.placed_weights import LedgerLine
    from tonnage.plan import Plan, RankLedger
    from tonnage.prepare.reader import RankView, open_rank
    from tonnage.request import Checkpoint, PlanRequest
    from tonnage.suggestions import suggest

__all__ = [
    "Checkpoint",
    "LedgerLine",
    "Plan",
    "PlanRequest",
    "RankLedger",
    "RankView",
    "Supply",
    "TonnageError",
    "__version__",
    "find_gpu",
    "open_checkpoint",
    "open_rank",
    "parse_supply",
    "plan_checkpoint",
    "suggest",
    "supply_bytes",
]
_HOME = {
    "Checkpoint": "tonnage.request",
    "LedgerLine": "tonnage.placed_weights",
    "Plan": "tonnage.plan",
    "PlanRequest": "tonnage.request",
    "RankLedger": "tonnage.plan",
    "RankView": "tonnage.prepare.reader",
    "Supply": "tonnage.memory.supply",
    "TonnageError": "tonnage.errors",
    "find_gpu": "tonnage.memory.supply",
    "open_rank": "tonnage.prepare.reader",
    "parse_supply": "tonnage.memory.supply",
    "suggest": "tonnage.suggestions",
    "supply_bytes": "tonnage.memory.supply",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used, so that ``import tonnage`` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "tonnage.api")), name)
