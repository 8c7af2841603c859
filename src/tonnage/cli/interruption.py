"""What ends a long command early: signals, and what the system refuses it."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from tonnage.cli.options import note

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

INTERRUPTED = 130
TERMINATED = 143


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a long command tidied up, nothing half-written under a final name; twice, at once."""
    kinds = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: _TerminatedError}

    def end(number: int, _frame: FrameType | None) -> None:
        for one in kinds:
            signal.signal(one, signal.SIG_DFL)
        raise kinds[signal.Signals(number)]

    before = {one: signal.signal(one, end) for one in kinds}
    try:
        yield
    except KeyboardInterrupt:
        note("tonnage: interrupted; run the same command again to resume")
        raise typer.Exit(INTERRUPTED) from None
    except _TerminatedError:
        note("tonnage: terminated; run the same command again to resume")
        raise typer.Exit(TERMINATED) from None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def system_errors(output: Path) -> Iterator[None]:
    """Turn what the system refuses this process into one line; a file that was named is named again."""
    from tonnage.errors import Problem
    from tonnage.prepare.io import PrepareError

    try:
        yield
    except OSError as error:
        if error.filename is None:  # the output of the command
            raise
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(output)
        raise PrepareError(Problem(where=where, what="cannot be used", found=error.strerror)) from error
