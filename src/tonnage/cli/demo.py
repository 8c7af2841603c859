"""``tonnage demo``."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tonnage.cli.options import emit

DOES_NOT_FIT = 3


def demo() -> None:
    """Run the loop on a small Kimi-K3.1-like EXL3 checkpoint, offline: plan refused, plan fitting, prepare.

    Example: tonnage demo
    """
    from importlib import resources

    with TemporaryDirectory(prefix="tonnage-demo-") as scratch:
        config, checkpoint = Path(scratch) / "kimi-k3.1.json", Path(scratch) / "kimi-k3.1-small"
        config.write_bytes((resources.files("tonnage.synth") / "kimi_k31.json").read_bytes())
        synth = ["synth", str(config), "-o", str(checkpoint), "--experts", "exl3-v1", "--scale-down"]
        _step(1, "A rehearsal of the 2-bit checkpoint, small, random weights", synth, scratch)
        _step(2, "What it holds", ["inspect", str(checkpoint)], scratch)
        plan = ["plan", str(checkpoint), "--tp", "8", "--supply", f"{_tight_mib(checkpoint)}MiB"]
        _step(3, "BF16 projections as they are, on GPUs too small for them", plan, scratch, expected=DOES_NOT_FIT)
        _step(4, "The same GPUs, projections converted to MXFP8: it fits", [*plan, "--convert", "mxfp8"], scratch)
        prepare = ["prepare", str(checkpoint), "--tp", "8", "--convert", "mxfp8", "-o", str(Path(scratch) / "prepared")]
        _step(5, "Converted and cut, one directory per rank: planned == written", prepare, scratch)


def _tight_mib(checkpoint: Path) -> int:
    """Return a supply between what the ranks hold converted and unconverted."""
    from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
    from tonnage.units import MIB

    opened = open_checkpoint(checkpoint)
    plans = (plan_checkpoint(opened, PlanRequest(tp=8)), plan_checkpoint(opened, PlanRequest(tp=8, convert="mxfp8")))
    return sum(plan.ranks[plan.binding_rank].fixed_bytes for plan in plans) // (2 * MIB)


def _step(number: int, title: str, words: list[str], scratch: str, *, expected: int = 0) -> None:
    """Print a command, run it in this process, and stop the demo if it does not end as it should."""
    from tonnage.cli import app

    emit(f"\n{number}. {title}\n$ tonnage {shlex.join(words).replace(f'{scratch}/', '')}")
    status = app(words, standalone_mode=False) or 0
    emit(f"(exit code {status})")
    if status != expected:
        emit(f"demo: expected exit code {expected}")
        raise typer.Exit(1)
