"""An engine's output on the disk, in bounded space: how it began stays whole, of the rest the latest is kept."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from tonnage.errors import Problem, UnitError
from tonnage.observe.scan import LONGEST_LINE
from tonnage.units import parse_size

LOG = "engine.log"
RECENT, EARLIER = "engine-recent.log", "engine-earlier.log"
MOST_TAIL_BYTES = 1 << 14
LEAST_BYTES = 4 * LONGEST_LINE
"""A smaller limit is none: the parts that take turns hold a line each."""


class BoundedLog:
    """Files in a directory: ``engine.log`` up to half of the limit, then two that take turns, a quarter each.

    The start of a log holds the figures; what was said last explains an end. Where nothing can be written any more,
    ``lost`` says why, and what is said is let go: whoever speaks must not have to wait.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """Begin ``engine.log``, which must not exist yet."""
        self._directory, self._limit = directory, limit_bytes
        self._file = _new(directory / LOG)
        self._left = limit_bytes // 2
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.begins_whole = True
        self.lost = ""

    @property
    def path(self) -> Path:
        """Where it begins."""
        return self._directory / LOG

    def write(self, block: bytes) -> None:
        """Append what was said; nothing is kept in memory but the end of it."""
        self._keep(block[-MOST_TAIL_BYTES:])
        try:
            while block and not self.lost:
                part, block = block[: self._left], block[self._left :]
                _write(self._file, part)
                self._left -= len(part)
                if not self._left:
                    self._turn()
        except OSError as error:
            self.lost = error.strerror or str(error)

    def tail(self, lines: int) -> list[str]:
        """Return the last lines that say something."""
        text = b"".join(self._tail)[-MOST_TAIL_BYTES:].decode("utf-8", "replace")
        said = [line.rstrip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
        return said[-lines:]

    def close(self) -> None:
        """Close the file; what is said from now on is let go."""
        self.lost = self.lost or "closed"
        os.close(self._file)

    def _keep(self, block: bytes) -> None:
        self._tail.append(block)
        self._tail_bytes += len(block)
        while self._tail_bytes - len(self._tail[0]) >= MOST_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def _turn(self) -> None:
        """Go on in a new file; of those before, all but the first and the latest are let go."""
        self.begins_whole = False
        recent = self._directory / RECENT
        if recent.exists():
            recent.replace(self._directory / EARLIER)
        before, self._file = self._file, _new(recent)
        os.close(before)
        self._left = max(self._limit // 4, LONGEST_LINE)


def limit_of(text: str) -> int:
    """Return the most a log may take: no less than the parts it is kept in.

    Raises:
        UnitError: It is less, or no size.
    """
    nbytes = parse_size(text, where="--log-limit")
    if nbytes < LEAST_BYTES:
        what, expected = "too little for a start-up log", f"{LEAST_BYTES} bytes or more"
        raise UnitError(Problem(where="--log-limit", what=what, expected=expected, found=text))
    return nbytes


def _new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write(descriptor: int, part: bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]
