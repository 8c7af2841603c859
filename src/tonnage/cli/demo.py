"""``tonnage demo``."""

from __future__ import annotations


def demo() -> None:
    """Run the loop."""
    raise NotImplementedError
