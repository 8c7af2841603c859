"""``tonnage synth``."""

from __future__ import annotations

from tonnage.cli.options import Output, Source


def synth(source: Source, output: Output) -> None:
    """Write a rehearsal checkpoint."""
    raise NotImplementedError
