"""What an engine that was started holds, beside its plan: as a document, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tonnage.observe.io import Observed
from tonnage.report.observation import observation_table, observe_document

SERVE_SCHEMA = "tonnage.serve/1"


def served_table(observed: Observed, shortfalls: Sequence[str]) -> RenderableType:
    """Return figures, ledger and verdict, and in what the engine falls short of the profile."""
    return Group(observation_table(observed), *(Text(f"FALLS SHORT: {line}", style="bold red") for line in shortfalls))


def served_document(
    facts: dict[str, Any], observed: Observed | None, shortfalls: Sequence[str], *, gpu: str | None
) -> dict[str, Any]:
    """Return ``serve --json``, printed when the engine is ready.

    Args:
        facts: What is served, where, and where the run is kept.
        observed: What the log says; ``None`` if it says nothing.
        shortfalls: Lines of :func:`tonnage.serve.outcome.cache_shortfall`.
        gpu: Of the table.
    """
    return {
        "schema": SERVE_SCHEMA,
        **facts,
        "observation": None if observed is None else observe_document(observed, gpu=gpu),
        "shortfalls": list(shortfalls),
        "contradicts": bool(shortfalls) or (observed is not None and observed.exceeds),
    }
