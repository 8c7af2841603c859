"""How a long command shows how far it is: a bar on a terminal, plain lines elsewhere, both on stderr."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tonnage.cli.options import note
from tonnage.units import unit_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tonnage.prepare.run import Standing

_PLAIN_LINE_SECONDS = 10
_SILENT_SECONDS = 2


@contextmanager
def progress() -> Iterator[Callable[[Standing], None]]:
    """Yield what shows progress: a bar on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("prepare", total=None, start=False)

        def show(standing: Standing) -> None:
            if not bars.tasks[0].started:
                # Begun at what earlier runs wrote, so that speed is that of this run.
                bars.update(bar, total=standing.total_bytes, completed=standing.done_bytes)
                bars.start_task(bar)
            bars.update(bar, completed=standing.done_bytes)

        yield show


def later(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """Show progress only of what takes a while."""
    begin = time.monotonic()

    def show_later(standing: Any) -> None:
        if time.monotonic() - begin > _SILENT_SECONDS:
            show(standing)

    return show_later


class _Lines:
    """Progress as plain lines, one every few seconds and one at the end."""

    def __init__(self) -> None:
        self._begin = self._next = time.monotonic()

    def __call__(self, standing: Standing) -> None:
        now = time.monotonic()
        if now < self._next and standing.tasks_done < standing.tasks:
            return
        self._next = now + _PLAIN_LINE_SECONDS
        note(progress_line(standing, now - self._begin))


def progress_line(standing: Standing, seconds: float) -> str:
    """Return how far a preparation is as one line: bytes, speed of this run, time left."""
    unit, text = unit_for(standing.total_bytes)
    jobs = f"{standing.tasks_done} of {standing.tasks} jobs"
    line = f"{text(standing.done_bytes)} of {text(standing.total_bytes)} {unit}, {jobs}"
    fresh = standing.done_bytes - standing.resumed_bytes
    if not fresh or seconds <= 0:
        return line + (f", {text(standing.resumed_bytes)} {unit} of an earlier run" if standing.resumed_bytes else "")
    rate = fresh / seconds
    left = (standing.total_bytes - standing.done_bytes) / rate
    return f"{line}, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
