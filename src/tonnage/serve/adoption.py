"""Processes that left the group of an engine: this process becomes their parent when theirs ends, and ends them.

A worker may begin a session of its own, in which no signal to the group of the engine reaches it. Linux lets a process
ask to become the parent of whatever below it loses its own; elsewhere such a worker outlives the engine.

Source:
    Linux manual pages, prctl(2): PR_SET_CHILD_SUBREAPER; proc(5): /proc/PID/stat.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_STEP_SECONDS = 0.01
_MOST_SECONDS = 5.0
_PROC = Path("/proc")


@contextmanager
def adopting() -> Iterator[frozenset[int]]:
    """Adopt orphans for as long as the block lasts, and yield the processes below this one of before.

    None of these is the engine's; those below a child become children of this process when the child ends.
    """
    before = _is_subreaper()
    _set_subreaper(on=True)
    try:
        yield _descendants()
    finally:
        _set_subreaper(on=before)


def wait_for_ended(others: frozenset[int], leader: int) -> None:
    """Let adopted processes that ended go, as whoever adopts has to; an engine may run for weeks and leave many.

    Args:
        others: Children who are waited for elsewhere.
        leader: Another one.
    """
    if sys.platform != "linux":  # nothing is adopted
        return
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == leader or ended.si_pid in others:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_children(others: frozenset[int]) -> None:
    """Kill the children of this process but for some, and what these leave behind, until there are none."""
    end = time.monotonic() + _MOST_SECONDS
    while (left := children() - others) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_STEP_SECONDS)


def children() -> frozenset[int]:
    """Return the processes whose parent is this one; none where the system does not say."""
    own = os.getpid()
    return frozenset(pid for pid in _processes() if _parent_of(pid) == own)


def _descendants() -> frozenset[int]:
    below: dict[int | None, list[int]] = {}
    for pid in _processes():
        below.setdefault(_parent_of(pid), []).append(pid)
    found, begun = [], [os.getpid()]
    while begun:
        begun = [pid for parent in begun for pid in below.pop(parent, ())]
        found += begun
    return frozenset(found)


def _processes() -> Iterator[int]:
    with suppress(OSError), os.scandir(_PROC) as found:
        yield from (int(entry.name) for entry in found if entry.name.isdecimal())


def _parent_of(pid: int) -> int | None:
    """Return the parent of a process; its name, which may hold anything, stands before the last bracket."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]) if len(fields) > 1 else None


def _is_subreaper() -> bool:
    found = ctypes.c_int()
    return _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found)) and bool(found.value)


def _set_subreaper(*, on: bool) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))


def _prctl(option: int, value: object) -> bool:
    """Ask the kernel; nothing where there is no such call."""
    if sys.platform != "linux":
        return False
    try:
        call = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return False
    return bool(call(option, value, 0, 0, 0) == 0)
