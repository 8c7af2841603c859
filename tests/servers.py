"""Web servers on loopback for tests: a directory, a hub with its store of large files, and everything they can do wrong."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")


@dataclass
class Seen:
    """One request, and what was sent for it."""

    path: str
    headers: dict[str, str]
    nbytes: int = 0
    range: tuple[int, int] | None = None


@dataclass
class Server:
    """A running server.

    Attributes:
        url: Without a slash at its end.
        seen: All requests.
        trick: Called first with each request; if it says true it has answered.
    """

    url: str
    seen: list[Seen] = field(default_factory=list)
    trick: Callable[[Any, Seen], bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all bodies."""
        return sum(one.nbytes for one in self.seen)

    def of(self, word: str) -> list[Seen]:
        """Return the requests for paths with a word in them."""
        return [one for one in self.seen if word in one.path]


@contextmanager
def serving(answer: Callable[[Any, Seen], None]) -> Iterator[Server]:
    """Serve on a free port of loopback until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            seen = Seen(self.path, {name.lower(): value for name, value in self.headers.items()})
            server.seen.append(seen)
            if server.trick is None or not server.trick(self, seen):
                answer(self, seen)

        do_HEAD = do_GET  # noqa: N815 - what it is called as

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # a client that has had enough
                super().handle()

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def reply(handler: Any, seen: Seen, status: int, body: bytes = b"", **headers: str) -> None:
    """Answer with a body at hand."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command == "GET":
        seen.nbytes += len(body)
        handler.wfile.write(body)


def reply_file(handler: Any, seen: Seen, path: Path, **headers: str) -> None:
    """Answer with a range of a file, or all of it, as servers do."""
    if not path.is_file():
        reply(handler, seen, 404)
        return
    size = path.stat().st_size
    headers = {"ETag": f'"{path.stat().st_mtime_ns:x}-{size:x}"', "Accept-Ranges": "bytes", **headers}
    match = _RANGE.fullmatch(seen.headers.get("range", ""))
    begin, end = (int(match[1]), min(int(match[2] or size), size - 1) + 1) if match else (0, size)
    if match and begin >= size:
        reply(handler, seen, 416, Content_Range=f"bytes */{size}")
        return
    seen.range = (begin, end)
    handler.send_response(206 if match else 200)
    if match:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    for name, value in {**headers, "Content-Length": str(end - begin)}.items():
        if value:
            handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            piece = file.read(min(end - begin, 1 << 20))
            seen.nbytes += len(piece)
            handler.wfile.write(piece)
            begin += len(piece)


@contextmanager
def web(directory: Path, *, versions: bool = True) -> Iterator[Server]:
    """Serve the files of a directory, and say when they change if wanted."""

    def answer(handler: Any, seen: Seen) -> None:
        path = directory / unquote(urlsplit(seen.path).path).lstrip("/")
        reply_file(handler, seen, path, **({} if versions else {"ETag": ""}))

    with serving(answer) as server:
        yield server


@dataclass
class Hub:
    """A hub with one repository, ``org/name``, and the server its large files are on.

    Attributes:
        api: The hub.
        store: Where it sends whoever wants a large file.
        token: Whom it shows the repository; everybody if empty.
    """

    api: Server
    store: Server
    token: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all bodies of both."""
        return self.api.nbytes + self.store.nbytes


@contextmanager
def hub_here(directory: Path, monkeypatch: Any) -> Iterator[Hub]:
    """Serve a directory as ``hf:org/name``: the client of the hub asks nobody else, and keeps what it got beside it."""
    from huggingface_hub import constants

    with hub(directory) as found:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "ENDPOINT", found.api.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.api.url + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory.parent / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", found.api.url)
        yield found


@contextmanager
def hub(directory: Path, *, repository: str = "org/name", large: int = 64 << 10, commit: str = COMMIT) -> Iterator[Hub]:
    """Serve a directory as a repository; files from ``large`` bytes on are stored elsewhere."""

    def stored(handler: Any, seen: Seen) -> None:
        reply_file(handler, seen, directory / unquote(urlsplit(seen.path).path.removeprefix("/lfs/")))

    def answer(handler: Any, seen: Seen) -> None:
        url = urlsplit(seen.path)
        path = unquote(url.path)
        if here.token and seen.headers.get("authorization") != f"Bearer {here.token}":
            reply(handler, seen, 401, X_Error_Code="RepoNotFound", X_Error_Message="Invalid username or password.")
        elif match := re.fullmatch(rf"/api/models/{repository}(?:/revision/(.+))?", path):
            if match[1] not in (None, "main", commit):
                reply(handler, seen, 404, X_Error_Code="RevisionNotFound", X_Error_Message="no such revision")
            else:
                blobs = "blobs" in parse_qs(url.query)
                body = {"id": repository, "sha": commit, "siblings": list(siblings(directory, large, blobs=blobs))}
                reply(handler, seen, 200, json.dumps(body).encode(), Content_Type="application/json")
        elif path == f"/api/models/{repository}/tree/{commit}":
            reply(handler, seen, 200, json.dumps(list(tree(directory, large))).encode())
        elif match := re.fullmatch(rf"/{repository}/resolve/([^/]+)/(.+)", path):
            file = directory / match[2]
            if match[1] not in ("main", commit) or not file.is_file():
                reply(handler, seen, 404, X_Error_Code="EntryNotFound")
            elif file.stat().st_size >= large:
                linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": f'"{sha256_of(file)}"'}
                place = f"{store.url}/lfs/{match[2]}?signature=secret"
                reply(handler, seen, 302, b"moved", Location=place, X_Repo_Commit=commit, **linked)
            else:
                reply_file(handler, seen, file, **{"X-Repo-Commit": commit})
        else:
            reply(handler, seen, 404, X_Error_Code="RepoNotFound")

    with serving(stored) as store, serving(answer) as api:
        here = Hub(api, store)
        yield here


def siblings(directory: Path, large: int, *, blobs: bool) -> Iterator[dict[str, Any]]:
    """Yield what a hub says of the files of a repository, as its information."""
    for one in tree(directory, large):
        lfs = {"lfs": {"sha256": one["lfs"]["oid"], **one["lfs"]}} if "lfs" in one else {}
        yield {"rfilename": one["path"]} | ({"size": one["size"], "blobId": one["oid"]} | lfs if blobs else {})


def tree(directory: Path, large: int) -> Iterator[dict[str, Any]]:
    """Yield what a hub says of the files of a repository, as its tree."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name, size = path.relative_to(directory).as_posix(), path.stat().st_size
            lfs = {"lfs": {"oid": sha256_of(path), "size": size, "pointerSize": 134}} if size >= large else {}
            yield {
                "type": "file",
                "path": name,
                "size": size,
                "oid": hashlib.sha256(name.encode()).hexdigest()[:40],
                **lfs,
            }


def sha256_of(path: Path) -> str:
    """Return the digest of a file; of one too large for a test, that of its name."""
    return hashlib.sha256(path.name.encode() if path.stat().st_size > 16 << 20 else path.read_bytes()).hexdigest()


def unknown_hosts(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let no name of a host be known from now on; return the names that are asked for."""
    names: list[str] = []

    def ask(host: str, *_: object, **__: object) -> None:
        names.append(host)
        raise socket.gaierror(number, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    return names
