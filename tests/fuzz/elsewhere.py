"""Parsers of what comes from elsewhere: addresses, answers of web servers, the hub and stores, and what is kept of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch
from urllib.parse import unquote

from fuzz.mutate import PART, in_parts, json_document, some_bytes, words
from fuzz.target import Target, each, parts
from fuzz.wires import LIMITS, Scripted, answer, answering, at_home, content, http_answer, markup
from tonnage.errors import SourceError
from tonnage.prepare.ray_connection import host_and_port
from tonnage.sources.addresses import is_remote, open_source, split_file
from tonnage.sources.answers import Asked
from tonnage.sources.connections import origin_of
from tonnage.sources.limits import Limits
from tonnage.sources.model import Source, is_plain_file_name, read_file
from tonnage.sources.shelf import Listing, Shelf
from tonnage.sources.store import plain_address
from tonnage.sources.transfer import Transfer
from tonnage.ui.serve import served_hosts

_ENDLESS = re.compile(rb"content-length:\s*\+?0*[1-9][0-9]{7,}", re.IGNORECASE)
"""Lengths that obstore reserves memory for as they are told, which ends the process: see SECURITY.md."""
_OFFLINE = Limits(offline=True)
_HASTY = replace(LIMITS, total_seconds=0.03)
"""Where a pause is all that takes time."""
_NAME = "config.json"
_BODY = b'{"model_type": "llama"}'
_COMMIT = "c0ffee" * 6 + "c0de"
_STORE = "s3://models/small/m"
_MOST_BYTES = 1 << 20
_KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}


def addresses(raw: bytes) -> None:
    """Read one text as the address of everything: a source, a file of one, a proxy, a cluster, a host to serve as."""
    text = raw.decode("utf-8", "surrogateescape")
    with at_home(http_proxy=text.replace("\0", ""), NO_PROXY="", no_proxy=""):
        each(lambda read: read(text), (_source, _proxied, plain_address, _served_as, host_and_port))


def web_file(raw: bytes) -> None:
    """Ask web servers for a file, whatever they answer: looked at first, then read as the one that was found."""
    answers = raw.split(PART)
    url = "http://127.0.0.1/m/model.safetensors"
    with at_home():
        client = Scripted(
            limits=_HASTY, transfer=Transfer(), home=origin_of(url, where=url, plain=True), plain=True, elsewhere=True,
            credentials={"Authorization": "Bearer a"},
        )  # fmt: skip
        client.answers = answers
        found = client.look(url, Asked(where=url, begin=0, nbytes=8))
        if found is None:
            return
        head = found.head
        assert len(found.start) == head.nbytes <= min(8, head.total_bytes)
        view = memoryview(bytearray(min(16, head.total_bytes)))
        client.read_into(
            url, Asked(where=url, begin=0, nbytes=len(view), total_bytes=head.total_bytes, version=head.version), view
        )


def hub_answers(raw: bytes) -> None:
    """Open a repository, whatever the hub says is in it; every file of it has a plain name, a size and a version."""
    waiting = raw.split(PART)
    with at_home(), _hub(waiting):
        _look_through(open_source("hf:org/name", limits=_HASTY), files=0)


def store_answers(raw: bytes) -> None:
    """List a prefix of a store and read an object of it; look for uploads nobody ended, and end no others."""
    listing, uploads, thing, *_ = (*raw.split(PART), b"", b"", b"")
    ended: list[str] = []

    def say(line: str) -> bytes:
        if line.startswith("DELETE "):
            ended.append(line.split()[1])
            return answer("204 No Content", {})
        said = uploads if "uploads" in line else listing if "list-type" in line else thing
        return _ENDLESS.sub(b"Content-Length: 16777216", said)

    from tonnage.export.objects import Objects
    from tonnage.export.unfinished import abort_unfinished

    def aborted() -> None:
        abort_unfinished(_STORE, frozenset({"a.safetensors"}), LIMITS)
        assert all(unquote(one.partition("?")[0]) == "/models/small/m/a.safetensors" for one in ended)

    with answering(say) as url, at_home(AWS_ENDPOINT_URL=url, **_KEYS):
        each(
            lambda read: read(),
            (
                lambda: _look_through(open_source(_STORE, limits=LIMITS)),
                lambda: Objects(_STORE, LIMITS).listed(),
                lambda: Objects(_STORE, LIMITS).read_small(_NAME, _MOST_BYTES),
                lambda: Objects(_STORE, LIMITS).stated_digest(_NAME),
                aborted,
            ),
        )


def kept(raw: bytes) -> None:
    """Open a source of which only what was kept is asked: a listing, and the beginning of a file."""
    listing, _, entry = raw.partition(PART)
    with at_home():
        shelf = Shelf("https://example.com/m/")
        shelf._write("listing", listing)
        for facts in (shelf.listing() or Listing(files={})).files.values():
            shelf.put(facts, 0, entry)
        _look_through(open_source("https://example.com/m", limits=_OFFLINE))


def _source(text: str) -> None:
    directory, file = split_file(text)
    assert file is None or (is_remote(text) or directory + "/" + file == text)
    if not is_remote(text):
        return
    source = open_source(text, limits=_OFFLINE)
    assert open_source(source.address, limits=_OFFLINE).address == source.address


def _proxied(_: str) -> None:
    from tonnage.sources.connections import Connection, Origin

    Connection(Origin("http", "example.com", 80), _OFFLINE).close()


def _served_as(text: str) -> None:
    assert all(host.isprintable() and "/" not in host for host in served_hosts("127.0.0.1", (text,)))


def _look_through(source: Source, *, files: int = 3) -> None:
    """Use a source as everything here does: names, facts, the first files."""
    assert all(map(is_plain_file_name, source.names()))
    listed = source.list_files()
    assert all(facts.name == name and facts.nbytes >= 0 for name, facts in listed.items())
    for name, facts in [*listed.items()][:files]:
        assert len(read_file(source, name, limit_bytes=_MOST_BYTES, kind=SourceError)) == facts.nbytes


@contextmanager
def _hub(waiting: list[bytes]) -> Iterator[None]:
    """Put the answers of an input before the hub's client."""
    import httpx2
    from huggingface_hub import constants, set_client_factory

    def handle(request: httpx2.Request) -> httpx2.Response:
        head, _, body = (waiting.pop(0) if waiting else b"").partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.search(r" ([2-9][0-9]{2})(?: |$)", first)
        if status is None:
            raise httpx2.RemoteProtocolError("no answer", request=request)
        headers = [match.groups() for line in lines if (match := _HEADER.fullmatch(line))]
        return httpx2.Response(int(status[1]), headers=headers, content=iter([body]), request=request)

    transport = httpx2.MockTransport(handle)
    set_client_factory(lambda: httpx2.Client(transport=transport, follow_redirects=True))
    try:
        with patch.object(constants, "ENDPOINT", "http://127.0.0.1:9"):
            yield
    finally:
        set_client_factory(httpx2.Client)


_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")


def _repository() -> bytes:
    lfs = {"size": 40, "sha256": "0a" * 32, "pointerSize": 130}
    files = [
        {"rfilename": _NAME, "size": len(_BODY), "blobId": "0b" * 20},
        {"rfilename": "model.safetensors", "size": 40, "blobId": "0c" * 20, "lfs": lfs},
        {"rfilename": "original/a.bin", "size": 1, "blobId": "0d" * 20},
    ]
    return json.dumps(
        {"_id": "1", "id": "org/name", "sha": _COMMIT, "siblings": files, "tags": [], "private": False}
    ).encode()


def _listing() -> bytes:
    objects = "".join(
        f"<Contents><Key>small/m/{name}</Key><LastModified>2026-01-31T00:00:00.000Z</LastModified><ETag>&quot;0a0b&quot;</ETag>"
        f"<Size>{len(_BODY)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for name in (_NAME, "model.safetensors")
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name>'
        f"<Prefix>small/m/</Prefix><MaxKeys>1000</MaxKeys><KeyCount>3</KeyCount><IsTruncated>false</IsTruncated>{objects}"
        "<CommonPrefixes><Prefix>small/m/weights/</Prefix></CommonPrefixes></ListBucketResult>"
    ).encode()


def _uploads() -> bytes:
    found = "".join(
        f"<Upload><Key>small/m/{name}</Key><UploadId>VX&amp;{name}</UploadId></Upload>"
        for name in ("a.safetensors", "b")
    )
    return f"<ListMultipartUploadsResult><Bucket>models</Bucket>{found}</ListMultipartUploadsResult>".encode()


def _stores() -> list[bytes]:
    said = {
        "ETag": '"0a0b"',
        "Last-Modified": "Sat, 31 Jan 2026 00:00:00 GMT",
        "x-amz-meta-tonnage-digest": "blake3:0a",
    }
    ranged = {**said, "Content-Length": f"{len(_BODY)}", "Content-Range": f"bytes 0-{len(_BODY) - 1}/{len(_BODY)}"}
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    lists = content(_listing()), content(_uploads())
    return [
        parts(*lists, answer("206 Partial Content", ranged, _BODY)),
        parts(*lists, content(_BODY, **said)),
        parts(answer("403 Forbidden", {"Content-Length": f"{len(denied)}"}, denied)),
    ]


def _files() -> list[bytes]:
    first = {"Content-Range": "bytes 0-7/40", "Content-Length": "8", "ETag": '"a"'}
    rest = {"Content-Range": "bytes 0-15/40", "Content-Length": "16", "ETag": '"a"'}
    chunked = {"Content-Range": "bytes 0-7/40", "Transfer-Encoding": "chunked", "ETag": '"a"'}
    looked, read = answer("206 Partial Content", first, b"a" * 8), answer("206 Partial Content", rest, b"a" * 16)
    moved = answer("302 Found", {"Location": "http://localhost:8080/elsewhere?a=b", "Content-Length": "0"})
    busy = answer("503 Slow Down", {"Retry-After": "0", "Content-Length": "4"}, b"busy")
    return [
        parts(looked, read),
        parts(moved, looked, read),
        parts(busy, looked, busy, read),
        parts(answer("206 Partial Content", chunked, b"5\r\naaaaa\r\n3\r\naaa\r\n0\r\n\r\n"), read),
        parts(
            answer("206 Partial Content", first, b"a" * 5),
            answer("206 Partial Content", {**first, "Content-Range": "bytes 5-7/40", "Content-Length": "3"}, b"aaa"),
            read,
        ),
        parts(content(b"aaaa", Last_Modified="Mon, 01 Jan 2001 00:00:00 GMT")),
        parts(answer("416 Range Not Satisfiable", {"Content-Range": "bytes */0", "Content-Length": "0"})),
        parts(answer("404 Not Found", {"Content-Length": "0"})),
    ]


def _repositories() -> list[bytes]:
    said = {"Content-Type": "application/json", "Content-Length": f"{len(_repository())}"}
    gated = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted", "Content-Length": "0"}
    return [
        answer("200 OK", said, _repository()),
        parts(
            answer("307 Temporary Redirect", {"Location": "/api/models/org/other", "Content-Length": "0"}),
            answer("200 OK", said, _repository()),
        ),
        parts(answer("429 Too Many Requests", {"Retry-After": "0"}, b"{}"), answer("200 OK", said, _repository())),
        answer("403 Forbidden", gated),
        answer("404 Not Found", {"X-Error-Code": "RepoNotFound", "Content-Length": "0"}),
    ]


_LISTED = {
    "files": [{"name": _NAME, "nbytes": len(_BODY), "version": 'etag "a"', "sha256": None}, {"name": "b", "nbytes": 0, "version": "unversioned", "sha256": "0a" * 32}],
    "folders": ["weights"],
    "revision": "",
}  # fmt: skip
_ADDRESSES = (
    "hf:org/name", "hf:org/name@main", f"hf:org/name@{_COMMIT}", "hf://org/name", "https://example.com/m/", "http://127.0.0.1:8080/a%20b/config.json",
    "https://huggingface.co/org/name", "https://[::1]/m?x#y", "s3://bucket/a/b", "gs://bucket", "S3://bucket/../a", "models/a", "./s3:a",
    "10.0.0.1:6379", "ray://head:10001", "planner.example", "::1", "https://user:word@example.com/", "https://ex\u00e4mple.com/\u00fc",
)  # fmt: skip

TARGETS = (
    Target(run=addresses, mutate=words(*_ADDRESSES, "@", ":", "//", "?", "#", "%2e%2e", "%", ":99999", "xn--", "\u3002"), seeds=lambda: [one.encode() for one in _ADDRESSES], longest=512),
    Target(run=web_file, mutate=in_parts(http_answer(some_bytes)), seeds=_files, longest=4096),
    Target(run=hub_answers, mutate=in_parts(http_answer(json_document)), seeds=_repositories),
    Target(run=store_answers, mutate=in_parts(http_answer(markup)), seeds=_stores),
    Target(run=kept, mutate=in_parts(json_document, some_bytes), seeds=lambda: [parts(json.dumps(_LISTED).encode(), _BODY)]),
)  # fmt: skip
