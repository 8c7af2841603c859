"""Running the server: its address, its signals, and a browser that is sent there."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from threading import Thread

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from tonnage.errors import Problem, UnitError, raise_if_any
from tonnage.ui.app import BUSY, RETRY_SECONDS, make_app
from tonnage.ui.guard import HEADERS, problem_response
from tonnage.ui.settings import LOOPBACK, Settings

MOST_CONNECTIONS = 256
HEAD_SECONDS = 10.0
"""In which a connection has to ask something, counted from its beginning and from the last answer."""
REQUEST_SECONDS = 90.0
"""In which a request is sent, answered and read to its end."""
_BACKLOG = 256
BUG = 1
"""Exit code where workers cannot start; they have said why."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]", re.ASCII)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHUTDOWN_SECONDS = 3


def served_hosts(host: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a server answers to: those of this machine, and those that are allowed.

    Raises:
        UnitError: Others can reach it, and nobody says by which name; or a name is none.
    """
    if not is_loopback(host) and not allowed:
        expected = "--allow-host NAME for every name it is reached by"
        raise UnitError(Problem(where="--host", what="others can reach it there", expected=expected, found=host))
    expected = "a name or an address, without scheme, port and wildcard"
    wrong = [name for name in allowed if not _NAME.fullmatch(_written(name))]
    raise_if_any(
        UnitError, (Problem(where="--allow-host", what="no name", expected=expected, found=name) for name in wrong)
    )
    return tuple(dict.fromkeys((*LOOPBACK, *((_written(host),) if is_loopback(host) else ()), *map(_written, allowed))))


def _written(host: str) -> str:
    """Return a host as addresses have it: IPv6 in brackets.

    >>> _written("::1"), _written("planner.example")
    ('[::1]', 'planner.example')
    """
    return f"[{host}]" if ":" in host and _is_address(host) else host


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that waits for connections; port 0 is any that is free.

    Raises:
        UnitError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UnitError(Problem(where="--host", what="no address", found=host)) from error
    listening = _Listening(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # at once: of two servers that start together, the later one must be told
    except OSError as error:
        listening.close()
        expected = "another one, or 0 for any that is free"
        found = f"{port}: {os.strerror(error.errno or 0)}"
        raise UnitError(Problem(where="--port", what="cannot be used", expected=expected, found=found)) from error
    return listening


class _Listening(socket.socket):
    """Hangs up on whom there is no descriptor for; asyncio would let nobody in and fill the terminal with it."""

    def accept(self) -> tuple[socket.socket, object]:
        """Return the next connection. Half of all descriptors are kept for files that are sent, and for workers.

        Raises:
            BlockingIOError: There is none, or it was one too many.
        """
        connection, address = super().accept()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and connection.fileno() >= soft // 2:  # the lowest that was free
            connection.close()
            raise BlockingIOError
        return connection, address


def address_of(listening: socket.socket, hosts: Sequence[str]) -> str:
    """Return the address of the page on a socket: by the last of its names where that of the socket is none of them."""
    host, port = listening.getsockname()[:2]
    written = _written(host)
    return f"http://{written if written in hosts else hosts[-1]}:{port}/"


def run(settings: Settings, listening: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; every worker has ended when this returns.

    Args:
        settings: What is served.
        listening: Where.
        started: Called once the server answers.

    Raises:
        UnitError: No workers can be started.
    """
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        access_log=False,
        http=Connection,
        lifespan="on",
        log_config=None,
        log_level="error",  # what strangers send is not worth a line each
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ws="none",
    )
    server = _Server(config, app, started)
    with suppress(SystemExit):  # by a status of its own, which means something else here
        asyncio.run(server.serve(sockets=[listening]))
    if app.state.refused is not None:
        raise app.state.refused
    if not server.started:
        raise SystemExit(BUG)


class Connection(H11Protocol):
    """A connection that is cut off when it keeps a place and asks nothing, or does not take its answer."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._within(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take what arrived; the head of a request, when it is whole, has more time for the rest."""
        self.app = _crowded() if len(self.connections) > MOST_CONNECTIONS else self.config.loaded_app
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._within(REQUEST_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request, or go on with one that is here already."""
        before = self.cycle
        super().on_response_complete()
        self._within(HEAD_SECONDS if self.cycle is before else REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _within(self, seconds: float) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        """Close: at once if a request is not done; otherwise after what is left of the last answer, if it is taken."""
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.close()
        self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)


def _crowded() -> Response:
    """Return what is answered where there are more connections than may be."""
    problem = Problem(where="server", what="too many connections", expected="another try later")
    return problem_response(BUSY, problem, headers={**HEADERS, "Retry-After": RETRY_SECONDS, "Connection": "close"})


class _Server(uvicorn.Server):
    """A server that ends as any command does: its status does not tell of the signal that ended it."""

    def __init__(self, config: uvicorn.Config, app: Starlette, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._application = app
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._application.state.refused is not None:
            self.should_exit = True
        elif self.started:
            self._when_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        # The command ends with its output; a server does not end with a client that hangs up, or with a worker.
        before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGPIPE, before)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def open_browser(address: str) -> None:
    """Send a browser to an address, if there is a screen to show one on; nobody waits for it."""
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
