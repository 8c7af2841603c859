"""Running the server: its address, its signals, and a browser that is sent there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from threading import Thread

import uvicorn

from tonnage.errors import Problem, UnitError
from tonnage.ui.app import make_app
from tonnage.ui.settings import LOOPBACK, Settings

MOST_CONNECTIONS = 256
BUG = 1
"""Exit code where workers cannot start; they have said why."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHUTDOWN_SECONDS = 3


def served_hosts(host: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a server answers to: those of this machine, and those that are allowed.

    Raises:
        UnitError: Others can reach it, and nobody says by which name.
    """
    if not is_loopback(host) and not allowed:
        expected = "--allow-host NAME for every name it is reached by"
        raise UnitError(Problem(where="--host", what="others can reach it there", expected=expected, found=host))
    return (*LOOPBACK, *allowed)


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
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        expected = "another one, or 0 for any that is free"
        found = f"{port}: {os.strerror(error.errno or 0)}"
        raise UnitError(Problem(where="--port", what="cannot be used", expected=expected, found=found)) from error
    return listening


def address_of(listening: socket.socket) -> str:
    """Return the address of the page on a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def run(settings: Settings, listening: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; every worker has ended when this returns.

    Args:
        settings: What is served.
        listening: Where.
        started: Called once the server answers.
    """
    config = uvicorn.Config(
        make_app(settings),
        access_log=False,
        http="h11",
        lifespan="on",
        limit_concurrency=MOST_CONNECTIONS,
        log_config=None,
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ws="none",
    )
    server = _Server(config, started)
    with suppress(SystemExit):  # by a status of its own, which means something else here
        asyncio.run(server.serve(sockets=[listening]))
    if not server.started:
        raise SystemExit(BUG)


class _Server(uvicorn.Server):
    """A server that ends as any command does: its status does not tell of the signal that ended it."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._when_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


def open_browser(address: str) -> None:
    """Send a browser to an address, if there is a screen to show one on; nobody waits for it."""
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
