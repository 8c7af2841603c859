"""One run of an engine: started, waited for, measured, kept or stopped; the caller is told as it goes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tonnage.serve.adoption import adopting
from tonnage.serve.io import is_healthy
from tonnage.serve.log import BoundedLog
from tonnage.serve.outcome import End
from tonnage.serve.process import EngineProcess
from tonnage.serve.words import Address

_POLL_SECONDS = 0.1
_QUIET_SECONDS, _MOST_QUIET_SECONDS = 0.3, 3.0
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started, and how long things may take.

    Attributes:
        words: Program and arguments.
        environment: All of it.
        address: Where it answers.
        directory: Of the run; gets the log.
        log_bytes: Most the log may take.
        ready_seconds: Until it must be ready.
        grace_seconds: For ending by itself.
        check: Only until it is measured.
        inherited: Descriptors it holds open while it lives.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    address: Address
    directory: Path
    log_bytes: int
    ready_seconds: float
    grace_seconds: float
    check: bool = False
    inherited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How it went.

    Attributes:
        end: How it ended.
        ready: Whether it served.
        signal: Which one the user sent; 0 for none.
        engine_code: The engine's own exit code, where it ended by itself; negative by a signal.
        last_lines: What it said last, raw.
    """

    end: End
    ready: bool
    signal: int = 0
    engine_code: int | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(slots=True)
class _Signals:
    """What the user sent: which signal, and how often."""

    number: int = 0
    count: int = field(default=0)

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.number, self.count = self.number or number, self.count + 1


def run_engine(
    launch: Launch, on_ready: Callable[[float, BoundedLog], None], on_line: Callable[[str], None] | None = None
) -> Ran:
    """Start an engine and return when it has ended, whole, whatever happens here.

    Args:
        launch: What is started.
        on_ready: Called once when it is ready, with the seconds that took and its log.
        on_line: Told every line of its output, from another thread.

    Raises:
        EngineError: It cannot be started.
    """
    begin = time.monotonic()
    log = BoundedLog(launch.directory, launch.log_bytes)
    with _signals() as sent, adopting() as others:
        try:
            engine = EngineProcess(launch.words, launch.environment, log, on_line, launch.inherited, others)
            try:
                end, ready = _follow(launch, engine, sent, lambda: on_ready(time.monotonic() - begin, log))
                code = engine.exit_code() if end == "died" else None
            finally:
                engine.end(launch.grace_seconds, hurried=lambda: sent.count > 1)
            lines = tuple(log.tail(_TAIL_LINES)) if end in ("died", "late") else ()
        finally:
            log.close()
    return Ran(end=end, ready=ready, signal=sent.number, engine_code=code, last_lines=lines)


def _follow(launch: Launch, engine: EngineProcess, sent: _Signals, on_ready: Callable[[], None]) -> tuple[End, bool]:
    """Return how it came to an end, and whether it was ready before."""
    latest = time.monotonic() + launch.ready_seconds
    while not is_healthy(launch.address):
        if sent.count:
            return "stopped", False
        if engine.exit_code() is not None:
            engine.wait_quiet(_QUIET_SECONDS, _MOST_QUIET_SECONDS)
            return "died", False
        if time.monotonic() > latest:
            return "late", False
        engine.wait_for_orphans()
        time.sleep(_POLL_SECONDS)
    engine.wait_quiet(_QUIET_SECONDS, _MOST_QUIET_SECONDS)
    if engine.exit_code() is not None:
        return "died", False
    on_ready()
    while not launch.check and not sent.count:
        if engine.exit_code() is not None:
            return "died", True
        engine.wait_for_orphans()
        time.sleep(_POLL_SECONDS)
    return ("stopped" if sent.count else "checked"), True


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Note Ctrl-C, SIGTERM and a closed terminal, and let nothing else come of them; a closed pipe is an error."""
    sent = _Signals()
    before = {number: signal.signal(number, sent) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
