"""tonnage: to the byte, what every GPU will hold of a language model, before anything is downloaded or loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.api import Checkpoint, PlanRequest, open_checkpoint, plan_checkpoint, suggest
    from tonnage.plan import LedgerLine, Plan, RankLedger

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "LedgerLine",
    "Plan",
    "PlanRequest",
    "RankLedger",
    "__version__",
    "open_checkpoint",
    "plan_checkpoint",
    "suggest",
]
_HOME = {"LedgerLine": "tonnage.plan", "Plan": "tonnage.plan", "RankLedger": "tonnage.plan"}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used, so that ``import tonnage`` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "tonnage.api")), name)
