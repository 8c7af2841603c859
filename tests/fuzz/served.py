"""Parsers of what reaches the server of `ui`, and of what an engine started by `serve` says and is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from unittest.mock import patch
from urllib.parse import urlencode

from fuzz.mutate import PART, TEXTS, in_parts, json_document, some_bytes, text_lines, words
from fuzz.target import DATA, SEEDS, Target, directory, each, files, parts
from tonnage.observe.io import whole_lines
from tonnage.observe.scan import LONGEST_LINE
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, SIGNATURE, SUMMARY
from tonnage.serve.log import LEAST_BYTES, MOST_TAIL_BYTES, BoundedLog
from tonnage.serve.source import open_served
from tonnage.topology import Topology
from tonnage.ui.answers import answer_by
from tonnage.ui.app import make_app
from tonnage.ui.examples import EXAMPLES
from tonnage.ui.guard import HEADERS
from tonnage.ui.messages import ERROR_SCHEMA, HTML, JSON, Answer, Question
from tonnage.ui.pool import Pool
from tonnage.ui.routes import API, PAGES
from tonnage.ui.settings import Settings
from tonnage.ui.shelf import Shelf
from tonnage.ui.worker import HANDLERS
from tonnage.vllm_plugin.opening import open_rank_files

_SETTINGS = Settings(directories=(str(DATA / "drafts"),), body_bytes=1 << 16)
_REFUSALS = {400, 403, 404, 405, 413, 415, 422}
_LOG = "INFO 01-02 03:04:05 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 4.2 seconds\n"


def http_request(raw: bytes) -> None:
    """Send a request to the server whose workers are left out: host, origin, type and length of what is posted, paths."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, _, target = first.decode("latin-1").partition(" ")
    path, _, query = target.partition("?")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    asked: list[Question] = []

    async def ask(_: Pool, question: Question, __: object = None) -> Answer:
        asked.append(question)
        return Answer(200, HTML, b"")

    with patch.object(Pool, "ask", ask):
        status, said, content = asyncio.run(_sent(method, path, query.encode("latin-1"), headers, body))
    assert status in _REFUSALS | {200, 307}, status
    assert {name.lower().encode() for name in HEADERS} <= {name for name, _ in said}
    if asked:
        hosts = [value for name, value in headers if name == b"host"]
        assert len(hosts) == 1
        assert any(hosts[0].lower().startswith(host.encode()) for host in _SETTINGS.hosts)
        assert asked[0].name in HANDLERS
    elif status == 307:  # from a path with a slash at its end to the one without
        [place] = (value for name, value in said if name == b"location")
        assert place.lower().startswith(tuple(f"http://{host}".encode() for host in _SETTINGS.hosts))
    elif status != 200 and method != "HEAD":
        _check_refusal(json.loads(content))


def http_body(raw: bytes) -> None:
    """Answer a body or a query as a worker does; what is a page has the elements it always has, whatever texts are in it."""
    name, _, body = raw.partition(PART)
    handler = HANDLERS[_NAMES[sum(name) % len(_NAMES)] if name.decode("latin-1") not in HANDLERS else name.decode()]
    answer = answer_by(handler, Shelf(_SETTINGS), body)
    assert answer.status in _REFUSALS | {200}, answer.status
    if answer.media == JSON:
        document = json.loads(answer.content)
        if answer.status != 200:
            _check_refusal(document)
    else:
        shape = _Elements()
        shape.feed(answer.content.decode())
        assert not shape.found & {"iframe", "object", "embed", "base", "xss"}


def engine_output(raw: bytes) -> None:
    """Keep what an engine says in bounded files, cut into blocks of any size, and take it line by line."""
    place = directory({})
    log = BoundedLog(place, LEAST_BYTES)
    try:
        blocks = [one * (1 + one[0]) for one in raw.split(b"|") if one]
        for block in blocks:
            log.write(block)
        assert sum(path.stat().st_size for path in place.iterdir()) <= LEAST_BYTES + 2 * LONGEST_LINE
        whole = b"".join(blocks)
        assert log.path.read_bytes() == whole[: LEAST_BYTES // 2]
        assert log.begins_whole == (len(whole) < LEAST_BYTES // 2)
        assert sum(map(len, log.tail(20))) <= MOST_TAIL_BYTES
        if max(map(len, whole.splitlines()), default=0) < LONGEST_LINE:
            assert b"".join(whole_lines(iter(blocks))) == whole
    finally:
        log.close()


def rank_directory(raw: bytes) -> None:
    """Open what is served and what an engine is given of it: documents, config, index, and the header of one rank."""
    contents = raw.split(PART)[:8]
    place = directory(dict(zip((*_DOCUMENTS, *_WEIGHTS), contents, strict=False)))
    for path in place.glob(_WEIGHTS[0]):
        with path.open("r+b") as file:
            file.truncate(_FILE_BYTES)

    def given() -> None:
        found = open_rank_files(place, Topology(tp=1), 0)
        assert found.view.payload_bytes == found.planned_bytes

    each(lambda read: read(), (lambda: open_served(place), given))


async def _sent(
    method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Send a request to the application; return status, headers and body of its only answer."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode("latin-1"), "query_string": query, "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    half, said, pieces = len(body) // 2, [], []
    waiting = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]

    async def receive() -> dict[str, object]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            said.append(message)
        else:
            pieces.append(message.get("body", b""))

    await _app()(scope, receive, send)
    [start] = said
    return start["status"], [(name.lower(), value) for name, value in start["headers"]], b"".join(pieces)


@cache
def _app() -> object:
    return make_app(_SETTINGS)


def _check_refusal(document: dict[str, object]) -> None:
    """See that a refusal says what is wrong, in texts of one line."""
    assert document["schema"] == ERROR_SCHEMA
    assert document["problems"]
    for problem in document["problems"]:
        assert all(text is None or text.isprintable() for text in problem.values()), problem


class _Elements(HTMLParser):
    """The names of the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs), (tag, attrs)


_NAMES = sorted(HANDLERS)
_DOCUMENTS = (MANIFEST, SIGNATURE, PROVENANCE, PLAN, SUMMARY, "config.json")
_WEIGHTS = ("weights/tp1/rank-0/model-00001-of-00001.safetensors", "weights/tp1/rank-0/model.safetensors.index.json")
_FILE_BYTES = 919_184
"""Of the one file of weights of the small package; what follows its header is nothing."""


def _requests() -> list[bytes]:
    found = []
    for route in (*API, *PAGES):
        body = json.dumps(EXAMPLES.get(route.name, {})).encode() if route.method == "POST" else b""
        lines = [
            f"{route.method} {route.path} ",
            "Host: localhost:8765",
            "Origin: http://localhost:8765",
            "Sec-Fetch-Site: same-origin",
        ]
        if body:
            lines += ["Content-Type: application/json; charset=utf-8", f"Content-Length: {len(body)}"]
        found.append("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    return [
        *found,
        b"GET /static/page.js \r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /api/openapi.json \r\nHost: [::1]:80\r\n\r\n",
    ]


def _bodies() -> list[bytes]:
    query = urlencode(
        {"source": "config", "tp": "2", "gpu": "h100", "a": "tp=4", "draft_hub": "org/draft", "eager": "on"}
    )
    config = json.dumps(EXAMPLES["plan"]["checkpoint"]["config"])
    view = {"query": query, "config": config}
    posted = {**EXAMPLES, "view": view, "view-suggestions": view, "view-log": {**view, "log": _LOG}}
    asked = {"page": query, "page-report": "tp=2&source=hub&hub=org%2Fname"}
    return [
        *(parts(name.encode(), json.dumps(body).encode()) for name, body in posted.items()),
        *(parts(name.encode(), text.encode()) for name, text in asked.items()),
    ]


def _body(raw: bytes, rng: Random) -> bytes:
    return json_document(raw, rng) if raw[:1] == b"{" else _query(raw, rng)


def _http(raw: bytes, rng: Random) -> bytes:
    head, end, body = raw.partition(b"\r\n\r\n")
    kind = rng.randrange(6)
    if kind == 0:
        return head + end + some_bytes(body, rng)
    if kind < 3:
        name, text = rng.choice(_FIELDS), rng.choice((rng.choice(_SAID), rng.choice(TEXTS)))
        lines = head.split(b"\r\n")
        lines.insert(rng.randint(1, len(lines)), f"{name}: {text}".encode("utf-8", "surrogatepass"))
        return b"\r\n".join(lines) + end + body
    return b"\r\n".join(text_lines(head.replace(b"\r\n", b"\n"), rng).split(b"\n")) + end + body


_FIELDS = (
    "Host",
    "Origin",
    "Sec-Fetch-Site",
    "Sec-Fetch-Mode",
    "Content-Type",
    "Content-Length",
    "Content-Encoding",
    "Cookie",
    "X-Forwarded-Host",
)
_SAID = ("localhost", "127.0.0.1:1", "[::1]:\u0661", "localhost.evil.example", "localhost@evil.example", "null", "http://localhost:8765",
         "cross-site", "navigate", "application/json", 'application/json; charset="utf-8"', "text/plain", "0", "-1", "99999999999999999999999", "gzip")  # fmt: skip
_SETTING = (
    "tp=2",
    "&ep=",
    "&a=",
    "source=config",
    "%00",
    "%",
    "+",
    "=",
    ";",
    "&tp=1",
    "context=0",
    "%3Cxss%3E",
    "draft_method=ngram",
    "checkpoint=..%2F",
)
_query = words(*_SETTING)


def _outputs() -> list[bytes]:
    logs: Iterator[Path] = iter(sorted((DATA / "logs").glob("*.log")))
    return [next(logs).read_bytes()[:4096].replace(b"\n", b"\n|"), b"\xff" * 200 + b"|" + b"\r\n|a\x1b[2J"]


def _directories() -> list[bytes]:
    contents = files(SEEDS / "rank_directory")
    return [parts(*contents), parts(b"", b"", b"", b"", *contents[4:])]


TARGETS = (
    Target(run=http_request, mutate=_http, seeds=_requests),
    Target(run=http_body, mutate=in_parts(some_bytes, _body), seeds=_bodies),
    Target(run=engine_output, mutate=text_lines, seeds=_outputs, longest=8192),
    Target(run=rank_directory, mutate=in_parts(*[json_document] * 6, some_bytes, json_document), seeds=_directories, longest=1 << 16),
)  # fmt: skip
