"""A connection to a Ray cluster that leaves to this process what is its own: its signals and its output."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Self

from tonnage.errors import Problem, one_line
from tonnage.prepare.io import PrepareError

WHERE = "--executor ray"
_KNOCK_SECONDS = 10
_LAST_PORT, _PORT_DIGITS = (1 << 16) - 1, 5


@contextmanager
def connected(address: str | None) -> Iterator[tuple[Any, Signals]]:
    """Connect this process to a cluster and yield Ray; a process that is connected already stays so."""
    if find_spec("ray") is None:
        raise PrepareError(Problem(where=WHERE, what="ray is not installed", expected="pip install 'tonnage[ray]'"))
    if address is not None and address.startswith("ray://"):
        what, expected = "a client is no part of its cluster", "HOST:PORT, on a machine that is one of the nodes"
        raise PrepareError(Problem(where="--address", what=what, expected=expected, found=address))
    with Signals() as signals:
        import ray  # noqa: PLC0415 - an extra, and slow

        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address or "auto")
        signals.hold()  # Ray put its own handlers there
        try:
            signals.heed()
            yield ray, signals
        finally:
            if ours:
                ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        # What Ray and its workers say is in the logs of the cluster: nothing of it is a result.
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        what, expected = "no Ray cluster to be part of", "`ray start --head` first, or --address HOST:PORT"
        found = one_line(str(error).strip().partition("\n")[0])
        raise PrepareError(Problem(where=f"--address {address}", what=what, expected=expected, found=found)) from error


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return what an address says whom to connect to; ``None`` where Ray knows by other means.

    Raises:
        PrepareError: There is no such port.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        return None
    if len(port) > _PORT_DIGITS or int(port) > _LAST_PORT:
        raise PrepareError(Problem(where="--address", what="no port", expected=f"at most {_LAST_PORT}", found=address))
    return host.strip("[]"), int(port)


def _knock(address: str) -> None:
    """Find out in seconds that nobody is there: Ray tries for minutes, and ends the process then.

    Raises:
        OSError: As said.
        PrepareError: There is no such port.
    """
    if place := host_and_port(address):
        socket.create_connection(place, timeout=_KNOCK_SECONDS).close()


class Signals:
    """Ctrl-C and SIGTERM, held back until they can be heeded: raised in a call of Ray's they are a bug in it.

    SIGPIPE is left aside: the command has it end it, which is meant for its output, not for a connection of Ray's.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._come: deque[int] = deque()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
            self._before = {number: signal.getsignal(number) for number in numbers}
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.heed()

    def hold(self) -> None:
        """Note from here on that a signal came, and do nothing else."""
        for number in self._before:
            ignored = number == signal.SIGPIPE
            signal.signal(number, signal.SIG_IGN if ignored else lambda number, _: self._come.append(number))

    def heed(self) -> None:
        """Do what was to be done of the first signal that came, if any did."""
        if not self._come:
            return
        number = self._come.popleft()
        self._come.clear()
        handler = self._before[number]
        if callable(handler):
            handler(number, None)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
