"""``tonnage demo``."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tonnage.cli.options import emit


def demo() -> None:
    """Run the loop on a small Kimi-K3.1-like EXL3 checkpoint, offline: synthesise, inspect, plan refused, plan fitting.

    Example: tonnage demo
    """
    from importlib import resources

    with TemporaryDirectory(prefix="tonnage-demo-") as scratch:
        here = Path(scratch)
        config, checkpoint = here / "kimi-k3.1.json", str(here / "kimi-k3.1-small")
        config.write_bytes((resources.files("tonnage.synth") / "kimi_k31.json").read_bytes())
        plan = ["plan", checkpoint, "--tp", "8", "--supply", "56MiB"]
        steps = (
            ("A rehearsal of the 2-bit checkpoint, small, random weights", 0,
             ["synth", str(config), "-o", checkpoint, "--experts", "exl3-v1", "--scale-down"]),
            ("What it holds", 0, ["inspect", checkpoint]),
            ("BF16 projections as they are: too much for GPUs of 56 MiB", 3, plan),
            ("The same, projections converted to MXFP8: it fits", 0, [*plan, "--convert", "mxfp8"]),
        )  # fmt: skip
        for number, (title, expected, words) in enumerate(steps, start=1):
            shown = shlex.join(words).replace(f"{scratch}/", "")
            emit(f"\n{number}. {title}\n$ tonnage {shown}")
            status = _run(words)
            emit(f"(exit code {status})")
            if status != expected:
                emit(f"demo: expected exit code {expected}")
                raise typer.Exit(1)


def _run(words: list[str]) -> int:
    """Run one command in this process and return its exit code."""
    from tonnage.cli import app

    return app(words, standalone_mode=False) or 0
