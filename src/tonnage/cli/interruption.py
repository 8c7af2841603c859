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
    """Let SIGTERM end a long command as Ctrl-C does: tidied up, nothing half-written under a final name."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        note("tonnage: interrupted; run the same command again to resume")
        raise typer.Exit(INTERRUPTED) from None
    except _TerminatedError:
        note("tonnage: terminated; run the same command again to resume")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


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
    except MemoryError as error:
        raise PrepareError(Problem(where="memory", what="not enough for this process")) from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise PrepareError(Problem(where="threads", what="the system lets no more be started")) from error
