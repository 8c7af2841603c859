"""How a command opens what it is given: from elsewhere with a line on stderr that says what it costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tonnage.cli.options import note
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.api import Checkpoint
    from tonnage.sources.transfer import Transfer

_LINE_SECONDS = 10.0
_TERMINAL_SECONDS = 0.5


class Opening:
    """What one command opens, a target and perhaps a draft, and what of it went over the network."""

    def __init__(self, *, offline: bool = False) -> None:
        """Open nothing yet.

        Args:
            offline: Ask no server, whatever the environment says.
        """
        from tonnage.sources.transfer import Transfer

        self.transfer = Transfer()
        self._offline = offline
        self._seconds = 0.0
        self._sources: list[str] = []

    def checkpoint(self, source: str, *, draft_method: str = "") -> Checkpoint:
        """Return a checkpoint; see :func:`tonnage.api.open_checkpoint`.

        Raises:
            TonnageError: It is missing or wrong, or its server cannot be reached.
        """
        from tonnage.api import open_checkpoint
        from tonnage.sources.addresses import is_remote

        if not is_remote(source):
            return open_checkpoint(source, draft_method=draft_method)
        from dataclasses import replace

        from tonnage.sources.limits import Limits

        limits = Limits.of_environment()
        before = self.transfer.nbytes, self.transfer.requests, self.transfer.kept_bytes
        begin = time.monotonic()
        with _watched(self.transfer):
            checkpoint = open_checkpoint(
                source,
                draft_method=draft_method,
                limits=replace(limits, offline=True) if self._offline else limits,
                transfer=self.transfer,
            )
        seconds = time.monotonic() - begin
        self._seconds += seconds
        nbytes, requests, kept = (
            now - then
            for now, then in zip(
                (self.transfer.nbytes, self.transfer.requests, self.transfer.kept_bytes), before, strict=True
            )
        )
        assert checkpoint.source is not None  # it was opened
        self._sources.append(checkpoint.source.address)
        line = f"{checkpoint.source.address}: {nbytes:,} bytes in {counted(requests, 'request')}, {seconds:.1f} s"
        note(f"{line}; {kept:,} bytes kept of an earlier time" if kept else line)
        return checkpoint

    def draft(self, source: str | None, method: str | None) -> Checkpoint | None:
        """Return the draft checkpoint that is asked for, if one is.

        Raises:
            TonnageError: It is missing or wrong, or does not draft so.
        """
        return None if source is None else self.checkpoint(source, draft_method=method or "")

    def document(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a document with what went over the network, if anything was elsewhere."""
        transfer = self.transfer
        if not self._sources:
            return document
        counts = {"bytes": transfer.nbytes, "requests": transfer.requests, "kept_bytes": transfer.kept_bytes}
        transferred = {**counts, "seconds": round(self._seconds, 3), "sources": self._sources}
        return {**document, "transfer": transferred}


@contextmanager
def _watched(transfer: Transfer) -> Iterator[None]:
    """Say how far it is while a server keeps us waiting: a line that is written over on a terminal, lines elsewhere."""
    from threading import Event, Thread

    done = Event()
    terminal = sys.stderr.isatty()

    def watch() -> None:
        begin = time.monotonic()
        while not done.wait(_TERMINAL_SECONDS if terminal else _LINE_SECONDS):
            line = progress_line(transfer, time.monotonic() - begin)
            if terminal:
                sys.stderr.write(f"\r{line}\x1b[K")
                sys.stderr.flush()
            else:
                note(line)
        if terminal:
            sys.stderr.write("\r\x1b[K")

    thread = Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def progress_line(transfer: Transfer, seconds: float) -> str:
    """Return how far it is as one line."""
    expected = f" of about {transfer.expected_bytes / 1e6:.1f}" if transfer.expected_bytes else ""
    requests = counted(transfer.requests, "request")
    return f"fetching headers: {transfer.nbytes / 1e6:.1f}{expected} MB, {requests}, {seconds:.0f} s"
