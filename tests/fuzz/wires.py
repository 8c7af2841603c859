"""What stands in for servers: answers an input holds, given as they are to whoever asks next."""

from __future__ import annotations

import io
import os
import shutil
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from unittest.mock import patch

from fuzz.mutate import NUMBERS, TEXTS, Mutator, some_bytes, text_lines
from tonnage.sources.connections import Connection, Origin
from tonnage.sources.http import WebClient
from tonnage.sources.limits import Limits

LIMITS = Limits(
    attempts=2,
    connect_seconds=2,
    answer_seconds=1,
    total_seconds=0.2,
    pause_seconds=0.001,
    planning_seconds=60,
    parallel=1,
)
_HEAD_END = b"\r\n\r\n"
_WAIT_SECONDS = 5
_NAMES = (
    "Content-Length", "Content-Range", "Transfer-Encoding", "Content-Encoding", "ETag", "Last-Modified", "Location", "Retry-After",
    "Connection", "X-Error-Message", "Content-Type", "Link", "X-Repo-Commit", "X-Linked-Size",
)  # fmt: skip
_VALUES = (
    "bytes 0-7/100", "bytes 0-7/*", "bytes */0", "bytes 5-3/9", "chunked", "identity", "gzip", "close", '"a"', "W/",
    "Mon, 01 Jan 2001 00:00:00 GMT", "Mon, 99 Jan 99999 00:00:00 +9999", "http://127.0.0.1/b", "//[::1", "http://\u00e9/", "..",
    "https://user:word@example.com/", "file:///etc/passwd", "http://127.0.0.1:99999/", "/b?c#d", "\x00", "\u0661", "application/json",
)  # fmt: skip
_STATUSES = ("100", "200", "204", "206", "301", "302", "303", "304", "307", "308", "401", "403", "404", "407", "410", "416", "418", "429", "500",
             "503", "999", "-1", "")  # fmt: skip


def answer(status: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return an answer as it stands on a wire."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + _HEAD_END + body


def content(body: bytes, **headers: str) -> bytes:
    """Return an answer of a whole body."""
    return answer("200 OK", {"Content-Length": str(len(body)), **headers}, body)


def http_answer(body: Mutator) -> Mutator:
    """Return what changes an answer: its head line by line, or its body, whose new length is mostly stated."""

    def mutate(raw: bytes, rng: Random) -> bytes:
        head, end, rest = raw.partition(_HEAD_END)
        kind = rng.randrange(8)
        if not end or kind == 0:
            return some_bytes(raw, rng)
        if kind < 4:
            return _changed_head(head, rng) + end + rest
        rest = body(rest, rng)
        if rng.randrange(8):
            lines = head.split(b"\r\n")
            stated = f"Content-Length: {len(rest)}".encode()
            head = b"\r\n".join(stated if line.lower().startswith(b"content-length:") else line for line in lines)
        return head + end + rest

    return mutate


def _changed_head(head: bytes, rng: Random) -> bytes:
    first, *lines = head.split(b"\r\n")
    kind = rng.randrange(5)
    if kind == 0:
        first = f"HTTP/1.1 {rng.choice(_STATUSES)} OK".encode()
    elif kind == 1 and lines:
        lines[:] = text_lines(b"\n".join(lines), rng).split(b"\n")
    else:
        name = rng.choice(_NAMES)
        value = rng.choice((rng.choice(_VALUES), rng.choice(NUMBERS)[:300], rng.choice(TEXTS)[:300]))
        line = f"{name}: {value}".encode("utf-8", "surrogatepass")
        if kind == 2 or not lines:
            lines.insert(rng.randint(0, len(lines)), line)
        else:
            lines[rng.randrange(len(lines))] = line
    return b"\r\n".join((first, *lines))


def markup(raw: bytes, rng: Random) -> bytes:
    """Change XML element by element: drop, repeat, swap, cut, and put other numbers in place of those in it."""
    return text_lines(raw.replace(b"<", b"\n<"), rng).replace(b"\n<", b"<")


@contextmanager
def at_home(**settings: str) -> Iterator[Path]:
    """Yield an empty directory for caches, with nothing else in the environment that says whom to ask and how."""
    home = _home()
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HF_", "TONNAGE_"))
    }
    settings = {"XDG_CACHE_HOME": str(home), "HF_HOME": str(home / "hf"), "NO_PROXY": "*", "no_proxy": "*", **settings}
    with patch.dict(os.environ, {**kept, **settings}, clear=True):
        yield home
    shutil.rmtree(home / "tonnage", ignore_errors=True)


@cache
def _home() -> Path:
    return Path(mkdtemp(prefix="tonnage-fuzz-home-"))


class Wire:
    """The receiving end of a connection on which one answer comes."""

    def __init__(self, raw: bytes) -> None:
        """Hold it."""
        self._raw = raw

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """Return it as a file."""
        return io.BufferedReader(io.BytesIO(self._raw))

    def sendall(self, _: bytes) -> None:
        """Take a request."""

    def settimeout(self, _: float) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Hold nothing."""


class Scripted(WebClient):
    """Asks nobody: every connection brings the next answer."""

    __slots__ = ("answers",)

    def take(self, origin: Origin) -> Connection:
        """Return a connection that was never made."""
        connection = Connection(origin, self.limits)
        connection._http.sock = Wire(self.answers.pop(0) if self.answers else b"")  # type: ignore[assignment]
        return connection


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(_WAIT_SECONDS)
        with suppress(OSError):
            head = b""
            while _HEAD_END not in head and (block := self.request.recv(1 << 16)):
                head += block
            line = head.partition(b"\r\n")[0].decode("latin-1")
            self.request.sendall(_ANSWERING[0](line))


_ANSWERING: list[Callable[[str], bytes]] = [lambda _: b""]
"""Says what comes upon the first line of a request."""


@cache
def _server() -> str:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@contextmanager
def answering(say: Callable[[str], bytes]) -> Iterator[str]:
    """Yield the address of a server of this process that answers so; every connection is closed after one answer."""
    _ANSWERING[0] = say
    yield _server()
