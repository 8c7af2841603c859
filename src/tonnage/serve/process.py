"""An engine as a process of its own group: started, listened to, ended whole."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tonnage.errors import Problem, TonnageError
from tonnage.observe.io import whole_lines
from tonnage.serve.adoption import end_children, wait_for_ended
from tonnage.serve.words import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tonnage.serve.log import BoundedLog

_BLOCK_BYTES = 1 << 16
_STEP_SECONDS = 0.05
_LEFT_SECONDS, _LAST_WORDS_SECONDS = 5.0, 5.0


class EngineError(TonnageError):
    """The engine cannot be started, or did not serve."""


class EngineProcess:
    """One engine. Its output goes to a log and nowhere else unless somebody wants the lines.

    It is a session of its own: a Ctrl-C on the terminal reaches this program only, which then ends all of the engine.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: BoundedLog,
        on_line: Callable[[str], None] | None = None,
        inherited: Sequence[int] = (),
        others: frozenset[int] = frozenset(),
    ) -> None:
        """Start it.

        Args:
            words: Program and arguments.
            environment: All of it.
            log: Gets what it says.
            on_line: Told every line as well, from another thread.
            inherited: Descriptors it holds open while it lives.
            others: Children of this process that are none of its.

        Raises:
            EngineError: There is no such program, or it cannot be run.
        """
        self._log, self._on_line, self._others = log, on_line, others
        try:
            self._process = subprocess.Popen(  # noqa: S603 - words, no shell
                list(words),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(inherited),
            )
        except (OSError, ValueError) as error:
            found = error.strerror if isinstance(error, OSError) else str(error)
            raise EngineError(Problem(where=masked(words)[0], what="cannot be started", found=found)) from error
        self._heard = time.monotonic()
        self._listener = threading.Thread(target=self._listen, name="engine output", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of the first process, which leads the group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended, negative by a signal; ``None`` while it runs."""
        return self._process.poll()

    def wait_for_orphans(self) -> None:
        """Let processes go that the engine left behind and that ended."""
        wait_for_ended(self._others, self.pid)

    def wait_quiet(self, quiet_seconds: float, most_seconds: float) -> None:
        """Wait until everything is heard, and nothing more was said for a moment."""
        end = time.monotonic() + most_seconds
        while time.monotonic() < end and self._listener.is_alive():
            if not self._is_behind() and time.monotonic() - self._heard >= quiet_seconds:
                break
            time.sleep(_STEP_SECONDS)

    def _is_behind(self) -> bool:
        """Whether the engine said something that the listener has not come to: the machine may be busy."""
        assert self._process.stdout is not None
        try:
            return bool(select.select((self._process.stdout,), (), (), 0)[0])
        except (OSError, ValueError):  # closed: there is no more
            return False

    def end(self, grace_seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """End every process of the group, and those that left it: asked first, killed when the grace is over.

        Args:
            grace_seconds: How long it may take to finish by itself.
            hurried: Whether somebody no longer wants to wait.
        """
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            end = time.monotonic() + grace_seconds
            while self.exit_code() is None and time.monotonic() < end and not hurried():
                time.sleep(_STEP_SECONDS)
        self._end_group(hurried)
        self._process.wait()
        end_children(self._others)
        self._listener.join(_LAST_WORDS_SECONDS)

    def _end_group(self, hurried: Callable[[], bool]) -> None:
        """Kill what the leader left behind, after a moment to follow it: whatever lives can still say something."""
        end = time.monotonic() + (_LEFT_SECONDS if self.exit_code() is not None else 0)
        while self._listener.is_alive() and time.monotonic() < end and not hurried():
            time.sleep(_STEP_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _listen(self) -> None:
        blocks = self._blocks()
        if self._on_line is None:
            for _ in blocks:
                pass
            return
        for block in whole_lines(blocks):
            for line in block.replace(b"\r", b"\n").split(b"\n"):
                if line.strip():
                    self._on_line(line.decode("utf-8", "replace"))

    def _blocks(self) -> Iterator[bytes]:
        """Yield what the engine says, when it is in the log; until no process of it can say anything."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while block := os.read(pipe.fileno(), _BLOCK_BYTES):
                self._heard = time.monotonic()
                self._log.write(block)
                yield block
