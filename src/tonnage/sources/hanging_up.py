"""Whoever is written to may have hung up; that is an error to be handled, not the end of the command."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def sigpipe_held_back() -> Iterator[None]:
    """Let this thread's writing to a connection fail; the command has SIGPIPE end it, which is meant for its output."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        signal.sigtimedwait({signal.SIGPIPE}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
