"""One attempt: an input is answered with a value or a refusal, in bounded time and memory, or something is wrong."""

from __future__ import annotations

import resource
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

from fuzz.target import Target
from tonnage.errors import TonnageError

CPU_SECONDS = 5
"""An input of a few kilobytes takes; with coverage, on a slow machine. What hangs takes for ever."""
GROWTH_KIB = 512 << 10
"""Of memory, by one input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an input did that none may do.

    Attributes:
        kind: Class of the exception, ``slow`` or ``memory``.
        place: Function and line in tonnage, so that one fault is reported once.
        text: For a reader.
    """

    kind: str
    place: str
    text: str


def attempt(target: Target, raw: bytes) -> Finding | None:
    """Feed a target one input; return what is wrong, or nothing."""
    before, began = _peak_kib(), time.process_time()
    try:
        target.run(raw)
    except TonnageError as error:
        wrong = _badly_said(error)
        if wrong is not None:
            return wrong
    except Exception as error:  # noqa: BLE001 - all of them are findings
        return Finding(kind=type(error).__name__, place=_place(error.__traceback__), text=_shown(error))
    seconds, growth = time.process_time() - began, _peak_kib() - before
    if seconds > CPU_SECONDS:
        return Finding(kind="slow", place="", text=f"{seconds:.1f} CPU seconds for {len(raw)} bytes")
    if growth > GROWTH_KIB:
        return Finding(kind="memory", place="", text=f"{growth >> 10} MiB for {len(raw)} bytes")
    return None


def _badly_said(error: TonnageError) -> Finding | None:
    """Return what is wrong with a refusal: none of it may reach a terminal raw, or fill it."""
    lines = str(error).split("\n")
    if not error.problems:
        return Finding(kind="refusal without a problem", place=_place(error.__traceback__), text="")
    if len(lines) > 41 or not all(line.isprintable() and len(line) <= 400 for line in lines):
        return Finding(kind="refusal not on its line", place=_place(error.__traceback__), text=ascii(lines)[:400])
    return None


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of tonnage, or of the target where none is."""
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if "/tonnage/" in frame.filename] or frames
    return f"{ours[-1].filename.rpartition('/tonnage/')[2]}:{ours[-1].lineno} {ours[-1].name}" if ours else ""


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3000:]
