"""Connections to web servers: whom they are to, through which proxy, and how long they may take.

Every read from a socket sets its time-out anew, so that an answer has to be whole at a certain time however slowly it
comes, its head included.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tonnage.errors import Problem, SourceError
from tonnage.sources.limits import Limits

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_AS_THEY_ARE = "!#$%&'()*+,/:;=?@[]~"
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,252})|[0-9a-f:.]{2,45}(%[a-z0-9]{1,15})?")
_PORTS = {"http": 80, "https": 443}
_UNKNOWN = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
NO_HOST = ("no such host, or no network", "a network, or TONNAGE_OFFLINE=1 and what an earlier run kept")
"""What is wrong and what would do, where :func:`is_no_host` before anything has come; later a network may come back."""


class Origin(NamedTuple):
    """Whom a connection is to."""

    scheme: str
    host: str
    port: int


def origin_of(url: str, *, where: str, plain: bool) -> Origin:
    """Return whom a URL leads to.

    Args:
        url: Absolute.
        where: For refusals.
        plain: Whether http is fine beyond this machine.

    Raises:
        SourceError: It is no URL, carries credentials, or would send everything in the clear.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SourceError(Problem(where=where, what="not a URL", found=str(error))) from error
    host = _plain_host(parts.hostname or "")
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host):
        raise SourceError(Problem(where=where, what="not a URL", expected="https://host/directory/"))
    if parts.username is not None or parts.password is not None:
        raise SourceError(Problem(where=where, what="credentials in an address", expected="none"))
    if parts.scheme == "http" and not plain and host not in _LOOPBACK:
        raise SourceError(
            Problem(
                where=where,
                what="http without TLS, which anybody on the way can read and change",
                expected="https, a server on this machine, or TONNAGE_ALLOW_HTTP=1",
            )
        )
    return Origin(parts.scheme, host, port or _PORTS[parts.scheme])


def _plain_host(host: str) -> str:
    """Return a host as the network writes it; empty if it is none."""
    try:
        return host.lower() if ":" in host else host.encode("idna").decode("ascii").lower()
    except UnicodeError:
        return ""


def is_no_host(error: BaseException | None) -> bool:
    """Whether a host is not known, as far as names are known here; a name server that is silent may answer yet."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno in _UNKNOWN
        error = error.__cause__ or error.__context__
    return False


def is_header_text(text: str) -> bool:
    """Whether a key or token can stand in a header; libraries that are given another show it."""
    return text.isascii() and text.isprintable()


@dataclass(slots=True)
class Clock:
    """When an answer has to be whole, and how long silence may last."""

    silence: float
    deadline: float = 0.0

    def seconds(self) -> float:
        """Return for how long the next bytes may be waited for.

        Raises:
            TimeoutError: Not at all.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer came too slowly")
        return min(left, self.silence)


class _Timed(io.RawIOBase):
    """The receiving end of a socket, its time-out set anew before every read."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, clock: Clock) -> None:
        super().__init__()
        self._raw = raw
        self._sock = sock
        self._clock = clock

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: memoryview, /) -> int | None:  # type: ignore[override]  # its type is private
        """Read what is there, once."""
        seconds = self._clock.seconds()
        with suppress(OSError):  # closed by the other side: the read below says it
            self._sock.settimeout(seconds)
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        """Close the socket's file too."""
        self._raw.close()
        super().close()


class Connection:
    """A connection to one origin, through the proxy of the environment if there is one."""

    def __init__(self, origin: Origin, limits: Limits) -> None:
        self.origin = origin
        self.used = False
        self.whole = False
        self.clock = Clock(limits.connect_seconds)
        self._answer: http.client.HTTPResponse | None = None
        proxy = _proxy(origin)
        host, port = proxy or (origin.host, origin.port)
        self._absolute = proxy is not None and origin.scheme == "http"
        self._http = (
            http.client.HTTPSConnection(host, port, timeout=limits.connect_seconds)
            if origin.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=limits.connect_seconds)
        )
        if proxy is not None and origin.scheme == "https":
            self._http.set_tunnel(origin.host, origin.port)

    def send(self, target: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Send a request and return the answer, its body not read."""
        if self._absolute:
            target = f"{self.origin.scheme}://{_netloc(self.origin)}{target}"
        self._http.response_class = self._response  # type: ignore[assignment]  # called like the class
        self._http.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": _netloc(self.origin), **headers}.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        self._answer = self._http.getresponse()
        return self._answer

    def _response(self, sock: socket.socket, *args: object, **named: object) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *args, **named)  # type: ignore[arg-type]  # handed through
        raw = response.fp.detach()
        response.fp = io.BufferedReader(_Timed(raw, sock, self.clock))
        return response

    def close(self) -> None:
        """Close it, whatever is under way."""
        with suppress(OSError):
            if self._answer is not None:
                self._answer.close()
            self._http.close()


def _proxy(origin: Origin) -> tuple[str, int] | None:
    """Return the proxy that the environment wants for an origin."""
    if urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    text = urllib.request.getproxies().get(origin.scheme)
    if not text:
        return None
    where, expected = f"{origin.scheme}_proxy", "http://host:port, without credentials"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise SourceError(Problem(where=where, what="not a URL", expected=expected)) from error
    host = _plain_host(parts.hostname or "")
    if parts.scheme != "http" or not _HOST.fullmatch(host) or parts.username is not None:
        raise SourceError(Problem(where=where, what="a proxy of another kind", expected=expected))
    return host, port or _PORTS[parts.scheme]


def _netloc(origin: Origin) -> str:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return host if origin.port == _PORTS[origin.scheme] else f"{host}:{origin.port}"


def target_of(url: str) -> str:
    """Return path and query; what a line of a request cannot hold is quoted."""
    parts = urlsplit(url)
    return quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_AS_THEY_ARE)
