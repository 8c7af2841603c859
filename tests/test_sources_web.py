"""Checkpoints on web servers: what honest ones are asked for, and what the others are refused with."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samples import PATIENCE, header_bytes_in, write_shards
from servers import Seen, Server, reply, serving, unknown_hosts, web
from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.errors import CheckpointError, ConfigError, SourceError
from tonnage.sources.addresses import open_source
from tonnage.sources.limits import Limits
from tonnage.sources.transfer import Transfer

SHARD = "model-00002-of-00003.safetensors"
LIMITS = Limits(
    attempts=3, connect_seconds=PATIENCE, answer_seconds=PATIENCE, total_seconds=PATIENCE, pause_seconds=0.01,
    slowest=1 << 20,
)  # fmt: skip
HASTE = {"one byte at a time": {"answer_seconds": 0.6}, "silent": {"connect_seconds": 0.4}}
"""Limits of the tests whose servers reach them; no other is held to any, however busy the machine is."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "TONNAGE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("web") / "m")


@pytest.fixture
def server(checkpoint: Path) -> Iterator[Server]:
    with web(checkpoint.parent) as running:
        yield running


def opened(server: Server, **limits: Any):
    changed = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | limits)
    return open_checkpoint(f"{server.url}/m/", limits=changed)


def refusal(server: Server, **limits: Any) -> str:
    with pytest.raises(SourceError) as refused:
        opened(server, **limits)
    assert len(refused.value.problems) == 1
    return str(refused.value).removeprefix(server.url)


def test_a_plan_is_that_of_the_directory_and_only_headers_are_fetched(server: Server, checkpoint: Path) -> None:
    there, here = opened(server), open_checkpoint(checkpoint)
    assert (there.name, there.digest) == (here.name, here.digest)
    plans = [plan_checkpoint(one, PlanRequest(tp=2)) for one in (there, here)]
    assert [rank.lines for rank in plans[0].ranks] == [rank.lines for rank in plans[1].ranks]
    assert there.source.transfer.requests == len(server.seen)
    assert there.source.transfer.nbytes == server.nbytes
    whole = sum(path.stat().st_size for path in checkpoint.glob("*.json"))
    assert server.nbytes == header_bytes_in(checkpoint) + 8 * 3 + whole
    ends = {seen.path: seen.range[1] for seen in server.of("safetensors") if seen.range and "index" not in seen.path}
    for path, end in ends.items():
        with (checkpoint.parent / path.lstrip("/")).open("rb") as file:
            assert end == 8 + int.from_bytes(file.read(8), "little")
    assert len(ends) == 3
    assert {seen.headers["accept-encoding"] for seen in server.seen} == {"identity"}
    assert {"authorization", "cookie"}.isdisjoint(name for seen in server.seen for name in seen.headers)


def test_a_config_alone_is_planned_from_its_recipe(server: Server, checkpoint: Path) -> None:
    there = open_checkpoint(f"{server.url}/m/config.json", limits=LIMITS)
    assert there.headers is None
    assert (there.name, there.digest) == ("m", open_checkpoint(checkpoint / "config.json").digest)
    assert [seen.path for seen in server.seen] == ["/m/config.json", "/m/hf_quant_config.json"]
    again = open_checkpoint(f"{server.url}/m/config.json", limits=Limits(offline=True))
    assert again.digest == there.digest
    with pytest.raises(SourceError, match="offline, and not kept on this machine"):
        open_checkpoint(f"{server.url}/m", limits=Limits(offline=True))


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m", shards=1)
    (directory / "model-00001-of-00001.safetensors").rename(directory / "model.safetensors")
    (directory / "model.safetensors.index.json").unlink()
    with web(tmp_path) as server:
        assert opened(server).digest == open_checkpoint(directory).digest


def test_what_was_fetched_is_kept_by_version(server: Server, checkpoint: Path) -> None:
    first = opened(server)
    server.seen.clear()
    second = opened(server)
    assert second.digest == first.digest
    assert second.source.transfer.kept_bytes >= header_bytes_in(checkpoint)
    assert server.nbytes < 8 * 3 + (64 << 10)  # each file is looked at: has it changed?
    server.seen.clear()
    offline = opened(server, offline=True)
    assert (offline.digest, server.seen) == (first.digest, [])


def test_a_damaged_entry_is_fetched_again(server: Server, tmp_path: Path) -> None:
    digest = opened(server).digest
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(entries) >= 5
    for number, path in enumerate(entries):
        raw = path.read_bytes()
        path.write_bytes([raw[:-1], b"", raw[:30] + b"?" + raw[31:], b"junk"][number % 4])
    again = opened(server)
    assert (again.digest, again.source.transfer.kept_bytes) == (digest, 0)


def test_offline_says_what_is_not_kept(server: Server) -> None:
    assert "offline, and not kept on this machine; expected what an earlier run fetched" in refusal(
        server, offline=True
    )
    assert server.seen == []


def test_a_cache_that_cannot_be_written_changes_nothing(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    found = opened(server)
    assert found.digest == open_checkpoint(checkpoint).digest
    assert found.source.transfer.nbytes == server.nbytes <= header_bytes_in(checkpoint) + (64 << 10)


def test_a_changed_file_is_another_file(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    with web(tmp_path) as server:
        first = opened(server)
        path = directory / "model-00001-of-00003.safetensors"
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"BF16", b"F16 ".replace(b" ", b""), 0) or raw)
        os.utime(path, ns=(1, 1))
        again = opened(server)
    assert again.digest == first.digest
    assert again.source.list_files()[path.name].version != first.source.list_files()[path.name].version


def test_what_has_no_version_is_kept_for_this_process_only(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    with web(tmp_path, versions=False) as server:
        first = opened(server)
        assert first.digest == open_checkpoint(directory).digest
        assert {facts.version for facts in first.source.list_files().values()} == {"unversioned"}
        once = server.nbytes
        again = opened(server)
        assert (again.source.transfer.kept_bytes, server.nbytes) == (0, 2 * once)


def test_names_beyond_ascii_are_quoted(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "mod\u00e8le")
    with web(tmp_path) as server:
        found = open_checkpoint(f"{server.url}/mod\u00e8le", limits=LIMITS)
        assert (found.name, found.digest) == ("mod\u00e8le", open_checkpoint(directory).digest)


# ---- servers that lie, break off, or never end -----------------------------------------------------------------------


def on(
    word: str, answer: Callable[[Any, Seen], None], *, times: int = 10**9, begin: int = 0
) -> Callable[[Any, Seen], bool]:
    """Answer the requests for paths with a word in them, some of them, in another way."""
    left = [times]

    def trick(handler: Any, seen: Seen) -> bool:
        if word not in seen.path or left[0] == 0 or not wanted_begin(seen) >= begin:
            return False
        left[0] -= 1
        answer(handler, seen)
        return True

    return trick


def wanted_begin(seen: Seen) -> int:
    return int(seen.headers["range"].removeprefix("bytes=").partition("-")[0])


def raw(handler: Any, seen: Seen, text: str, body: bytes = b"", *, pause: float = 0.0, pieces: int = 1) -> None:
    """Send an answer as it is written, slowly if wanted, then close."""
    handler.close_connection = True
    handler.wfile.write(text.replace("\n", "\r\n").encode())
    for _ in range(pieces):
        try:
            handler.wfile.write(body)
        except OSError:
            return
        seen.nbytes += len(body)
        if pause:
            time.sleep(pause)


PART = 'HTTP/1.1 206 Partial Content\nContent-Range: bytes 0-7/{size}\nContent-Length: {length}\nETag: "1"\n{more}\n'
BODY = (200).to_bytes(8, "little")


def part(
    size: str = "300", length: str = "8", more: str = "", body: bytes = BODY, **slow: Any
) -> Callable[[Any, Seen], None]:
    return lambda handler, seen: raw(handler, seen, PART.format(size=size, length=length, more=more), body, **slow)


def ranges_ignored(handler: Any, seen: Seen) -> None:
    raw(handler, seen, "HTTP/1.1 200 OK\nContent-Length: 999999999\n\n", bytes(1 << 16), pieces=1000)


def a_byte(handler: Any, seen: Seen, **slow: Any) -> None:
    begin = wanted_begin(seen)
    head = f"HTTP/1.1 206 Part\nContent-Range: bytes {begin}-7/300\nContent-Length: {8 - begin}\n\n"
    raw(handler, seen, head, BODY[:1], **slow)


def without_end(handler: Any, seen: Seen) -> None:
    text = "HTTP/1.1 206 Partial Content\nContent-Range: bytes 0-7/300\nTransfer-Encoding: chunked\n\n"
    raw(handler, seen, text, b"1000\r\n" + bytes(4096) + b"\r\n", pieces=1000)


def head_without_end(handler: Any, seen: Seen) -> None:
    raw(handler, seen, "HTTP/1.1 206 Partial Content\n", b"X-More: yes\r\n" * 10, pieces=1000)


REFUSED = {
    "ranges ignored": (ranges_ignored, f"/m/{SHARD}: the server ignores ranges; expected 206 with bytes 0-7; found 200 with the whole file of 999999999 bytes"),
    "another range": (part(size="300".replace("300", "4")), f"/m/{SHARD}: wrong Content-Range; expected bytes 0-7; found bytes 0-7/4"),
    "no range said": (lambda h, s: raw(h, s, "HTTP/1.1 206 Partial\nContent-Length: 8\n\n", BODY), f"/m/{SHARD}: wrong Content-Range; expected bytes 0-7; found none"),
    "range of junk": (part(size="many"), f"/m/{SHARD}: wrong Content-Range; expected bytes 0-7; found 'bytes 0-7/many'"),
    "length too long": (part(length="9"), f"/m/{SHARD}: wrong Content-Length; expected 8; found 9"),
    "length of junk": (part(length="-1"), f"/m/{SHARD}: wrong Content-Length; expected 8; found -1"),
    "no length": (lambda h, s: raw(h, s, "HTTP/1.1 206 Partial\nContent-Range: bytes 0-7/300\n\n", BODY), f"/m/{SHARD}: wrong Content-Length; expected 8; found none"),
    "encoded": (part(more="Content-Encoding: gzip\n"), f"/m/{SHARD}: encoded, which nobody asked for; expected identity; found gzip"),
    "truncated": (a_byte, f"/m/{SHARD}: given up after 3 attempts; expected an answer; found the connection closed after 3 of 8 bytes"),
    "without end": (without_end, f"/m/{SHARD}: the answer does not end; expected 8 bytes; found more than 8 bytes"),
    "a chunk of less than nothing": (lambda h, s: raw(h, s, "HTTP/1.1 206 Part\nContent-Range: bytes 0-7/300\nTransfer-Encoding: chunked\n\n-5\n", bytes(5000)), f"/m/{SHARD}: the answer does not end; expected 8 bytes; found more than 8 bytes"),
    "one byte at a time": (lambda h, s: a_byte(h, s, pause=1.0, pieces=50), f"/m/{SHARD}: given up after "),
    "silent": (lambda *_: time.sleep(0.7), f"/m/{SHARD}: given up after 3 attempts; expected an answer; found no answer in time"),
    "closed": (lambda h, s: raw(h, s, ""), f"/m/{SHARD}: given up after 3 attempts; expected an answer; found the connection closed without an answer"),
    "no HTTP": (lambda h, s: raw(h, s, "SSH-2.0-OpenSSH\n\n"), f"/m/{SHARD}: given up after 3 attempts; expected an answer; found "),
    "head without end": (head_without_end, f"/m/{SHARD}: given up after 3 attempts; expected an answer; found got more than 100 headers"),
    "forbidden": (lambda h, s: reply(h, s, 403), f"/m/{SHARD}: not allowed; expected a token or key that may read it; found status 403"),
    "teapot": (lambda h, s: reply(h, s, 418), f"/m/{SHARD}: unexpected answer; expected the file; found status 418"),
    "down": (lambda h, s: reply(h, s, 503), f"/m/{SHARD}: given up after 3 attempts; expected an answer; found status 503"),
    "asked to wait": (lambda h, s: reply(h, s, 429, Retry_After="86400"), f"/m/{SHARD}: given up after 1 attempts; expected an answer; found status 429, to be asked again after 86400 s"),
    "sent away": (lambda h, s: reply(h, s, 302, Location="https://example.com/x"), f"/m/{SHARD}: redirected to another host; expected 127.0.0.1, or the address it is at now; found example.com:443"),
    "sent away in the clear": (lambda h, s: reply(h, s, 302, Location="http://example.com/x"), f"/m/{SHARD}: http without TLS, which anybody on the way can read and change"),
    "sent nowhere": (lambda h, s: reply(h, s, 302, Location="file:///etc/passwd"), f"/m/{SHARD}: not a URL"),
    "sent to no URL": (lambda h, s: reply(h, s, 302, Location="http://[::1/x"), f"/m/{SHARD}: redirected to what is no URL; found http://[::1/x"),
    "sent to no host": (lambda h, s: reply(h, s, 302, Location="http://exa mple/x"), f"/m/{SHARD}: not a URL"),
    "sent in circles": (lambda h, s: reply(h, s, 307, Location=s.path), f"/m/{SHARD}: redirected without end; expected at most 5 redirects"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_server_that_answers_wrong_is_refused_in_one_line(server: Server, wrong: str) -> None:
    answer, line = REFUSED[wrong]
    server.trick = on(SHARD, answer)
    assert refusal(server, **HASTE.get(wrong, {})).startswith(line)
    assert server.nbytes < 16 << 20  # what the kernels on both sides hold of an answer that nobody reads


def test_a_connection_that_was_hung_up_on_is_made_again_although_sigpipe_kills(server: Server) -> None:
    def hanging_up(handler: Any, _seen: Seen) -> bool:
        handler.close_connection = True  # the end of what is sent, and at once that nothing is taken either
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    killed: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: killed.append(number))
    server.trick = hanging_up
    try:
        assert opened(server).name == "m"
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not killed


def test_a_server_that_is_slow_a_thousand_times_costs_no_day(server: Server) -> None:
    def slow(_handler: Any, seen: Seen) -> bool:
        time.sleep(0.2 if "/m/model-" in seen.path else 0)
        return False

    server.trick = slow
    assert refusal(server, planning_seconds=0.1) == "/m/: too slow; expected everything within 0 s"


def test_what_was_received_of_a_broken_answer_is_kept(server: Server, checkpoint: Path) -> None:
    path = checkpoint / SHARD
    size = path.stat().st_size
    content = path.read_bytes()[:4096]
    version = f'"{path.stat().st_mtime_ns:x}-{size:x}"'

    def broken(handler: Any, seen: Seen) -> None:
        first, _, last = seen.headers["range"].removeprefix("bytes=").partition("-")
        begin, end = int(first), int(last) + 1
        text = f"HTTP/1.1 206 Part\nContent-Range: bytes {begin}-{end - 1}/{size}\nContent-Length: {end - begin}\nETag: {version}\n\n"
        raw(handler, seen, text, content[begin : begin + 300])

    server.trick = on(SHARD, broken, times=2)
    found = opened(server)
    assert found.digest == open_checkpoint(checkpoint).digest
    assert found.source.transfer.nbytes <= server.nbytes
    assert [seen.range[0] for seen in server.of(SHARD) if seen.range][-1] in (0, 300)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_is_busy_is_asked_again(server: Server, checkpoint: Path, status: int) -> None:
    server.trick = on("model-", lambda h, s: reply(h, s, status, Retry_After="0"), times=2)
    assert opened(server).digest == open_checkpoint(checkpoint).digest


def test_a_reset_connection_is_made_again(server: Server, checkpoint: Path) -> None:
    def reset(handler: Any, _seen: Seen) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        handler.connection.close()
        handler.close_connection = True

    server.trick = on("model-", reset, times=2)
    assert opened(server).digest == open_checkpoint(checkpoint).digest


def test_a_redirect_on_the_same_host_is_followed(server: Server, checkpoint: Path) -> None:
    def moved(handler: Any, seen: Seen) -> None:
        reply(handler, seen, 301, b"elsewhere", Location=seen.path.replace("/m/", "/m/../m/"))

    server.trick = on("/m/model-", moved, times=3)
    assert opened(server).digest == open_checkpoint(checkpoint).digest


def test_a_redirect_beyond_ascii_is_asked_for_quoted(server: Server) -> None:
    text = "HTTP/1.1 302 Found\nLocation: /\u00e9 x\nContent-Length: 0\n\n"
    server.trick = on(SHARD, lambda handler, seen: raw(handler, seen, text))
    with pytest.raises(CheckpointError, match=f"shard file is missing; expected {SHARD} beside the index"):
        opened(server)
    assert server.of("%20x")


def test_an_answer_whose_end_never_comes_is_whole_with_its_last_byte(server: Server, checkpoint: Path) -> None:
    size = (checkpoint / SHARD).stat().st_size
    start = (checkpoint / SHARD).read_bytes()[:8]

    def hanging(handler: Any, seen: Seen) -> None:
        head = f'HTTP/1.1 206 Part\nContent-Range: bytes 0-7/{size}\nETag: "{(checkpoint / SHARD).stat().st_mtime_ns:x}-{size:x}"\n'
        raw(handler, seen, head + "Transfer-Encoding: chunked\n\n8\n", start, pause=0.6)

    server.trick = on(SHARD, hanging, times=1)
    assert opened(server).digest == open_checkpoint(checkpoint).digest
    assert len(server.of(SHARD)) == 2


def test_a_file_that_changes_between_requests_is_refused(server: Server, checkpoint: Path) -> None:
    def looked(handler: Any, seen: Seen) -> None:
        size = (checkpoint / SHARD).stat().st_size
        body = (checkpoint / SHARD).read_bytes()[:8]
        reply(handler, seen, 206, body, Content_Range=f"bytes 0-7/{size}", ETag='"older"')

    server.trick = on(SHARD, looked, times=1)
    assert refusal(server).startswith(
        f'/m/{SHARD}: changed since it was first read; expected etag "older"; found etag "'
    )


def test_a_size_that_changes_between_requests_is_refused(server: Server, checkpoint: Path) -> None:
    version = f'"{(checkpoint / SHARD).stat().st_mtime_ns:x}-{(checkpoint / SHARD).stat().st_size:x}"'

    def looked(handler: Any, seen: Seen) -> None:
        body = (checkpoint / SHARD).read_bytes()[:8]
        reply(handler, seen, 206, body, Content_Range="bytes 0-7/99999", ETag=version)

    server.trick = on(SHARD, looked, times=1)
    assert refusal(server).startswith(f"/m/{SHARD}: another size than stated; expected 99999 bytes; found ")


HEADER_LIES = {
    "longest header": (
        (100_000_001).to_bytes(8, "little"),
        "header length out of range; expected 2 to 100000000 bytes",
    ),
    "beyond the file": ((10**7).to_bytes(8, "little"), "truncated inside the header"),
    "empty": (b"", "truncated; expected at least 8 bytes of header length; found 0 bytes"),
    "no JSON": ((4).to_bytes(8, "little") + b"????", "header"),
}


@pytest.mark.parametrize(("content", "line"), HEADER_LIES.values(), ids=HEADER_LIES)
def test_a_header_that_lies_is_refused_as_on_a_disk(tmp_path: Path, content: bytes, line: str) -> None:
    directory = write_shards(tmp_path / "m")
    (directory / SHARD).write_bytes(content)
    with pytest.raises(CheckpointError) as here:
        open_checkpoint(directory)
    with web(tmp_path) as server, pytest.raises(CheckpointError) as there:
        opened(server)
    assert str(there.value) == str(here.value)
    assert line in str(there.value)


NAMES = {
    "another directory": "../secret.safetensors",
    "a path": "sub/x.safetensors",
    "a URL": "https://example.com/x.safetensors",
    "a query": "x.safetensors?y=.safetensors",
    "dots": "...safetensors",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_in_an_index_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    directory = write_shards(tmp_path / "m")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= {"more": name}
    path.write_text(json.dumps(index))
    with web(tmp_path) as server, pytest.raises(CheckpointError, match="shard file"):
        opened(server)
    assert all(seen.path.startswith("/m/") and "/" not in seen.path[3:] for seen in server.seen)


def test_more_shard_files_than_anybody_has_are_not_asked_for(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    names = {f"t{number}": f"m{number}.safetensors" for number in range(60_000)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with web(tmp_path) as server:
        assert "shard files; expected at most 50000; found 60000" in refusal(server)
        assert len(server.seen) < 5


def test_an_index_too_large_is_not_fetched(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    with (directory / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    with web(tmp_path) as server:
        assert "file too large; expected at most 201326592 bytes; found 1099511627776 bytes" in refusal(server)
        assert server.nbytes < 1 << 20


def test_a_config_too_large_is_not_fetched(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    with (directory / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with web(tmp_path) as server:
        with pytest.raises(ConfigError, match=r"config.json: file too large; expected at most 8388608 bytes"):
            opened(server)
        assert server.nbytes < 1 << 20


def test_nothing_there_is_said(server: Server) -> None:
    with pytest.raises(CheckpointError, match=r"/nothing/: no config.json here"):
        open_checkpoint(f"{server.url}/nothing/", limits=LIMITS)


def test_a_server_that_is_not_there_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/m"
        with pytest.raises(
            SourceError, match=r"given up after 3 attempts; expected an answer; found Connection refused"
        ):
            open_checkpoint(address, limits=LIMITS)


@pytest.mark.parametrize(
    ("number", "asked", "line"),
    [
        (socket.EAI_NONAME, 1, "no such host, or no network; expected a network, or TONNAGE_OFFLINE=1 and "),
        (socket.EAI_AGAIN, 3, "given up after 3 attempts; expected an answer; found not known"),
    ],
)
def test_a_host_that_is_not_known_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, number: int, asked: int, line: str
) -> None:
    names = unknown_hosts(monkeypatch, number)
    with pytest.raises(SourceError) as refused:
        open_checkpoint("https://example.com/m", limits=LIMITS)
    assert line in str(refused.value)
    assert names == ["example.com"] * asked


def test_once_anything_has_come_a_host_that_is_not_known_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = unknown_hosts(monkeypatch, socket.EAI_NONAME)
    with pytest.raises(SourceError, match="given up after 3 attempts"):
        open_checkpoint("https://example.com/m", limits=LIMITS, transfer=Transfer(nbytes=1))
    assert names == ["example.com"] * 3


ADDRESSES = {
    "http://example.com/m": "http without TLS, which anybody on the way can read and change; expected https",
    "https://user:secret@example.com/m": "example.com/m: credentials in an address; expected none",
    "https://user:secret@example.com:port/m": "https://***@example.com:port/m: not a URL",
    "https://us:secret@er@[::1/m": "https://***@[::1/m: not a URL",
    "s3://key:secret@bucket/m": "s3://***@bucket/m: not an address of objects",
    "s3://bucket/m?X-Amz-Signature=secret": "s3://bucket/m?***: not an address of objects",
    "hf:user:secret@org/name": "hf:***@org/name: not an address on the hub",
    "https://example.com/m?token=secret": "https://example.com/m: more than a directory",
    "https:///m": "not a URL",
    "https://[::1/m": "not a URL",
    "https://example.com:port/m": "not a URL",
    "https://exa mple.com/m": "not a URL",
    "https://\u2603..com/m": "not a URL",
    "https://huggingface.co/org/name": "a page of the hub; expected hf:org/name",
    "https://huggingface.co/org/name/tree/main": "a page of the hub; expected hf:org/name",
}


@pytest.mark.parametrize(("address", "line"), ADDRESSES.items(), ids=ADDRESSES)
def test_addresses_that_cannot_be_are_refused_before_anybody_is_asked(address: str, line: str) -> None:
    with pytest.raises(SourceError) as refused:
        open_source(address)
    assert line in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:port", "http://[::1", "http://user:secret@127.0.0.1"])
def test_a_proxy_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(SourceError, match=r"^https_proxy: [a-zA-Z ]+; expected http://host:port, without credentials$"):
        open_checkpoint("https://example.com/m", limits=LIMITS)


def test_a_link_or_a_pipe_in_the_cache_is_no_entry(server: Server, tmp_path: Path) -> None:
    digest = opened(server).digest
    for number, path in enumerate(sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())):
        path.rename(path.with_suffix(".was"))
        if number % 2:
            os.mkfifo(path)
        else:
            path.symlink_to(path.with_suffix(".was"))
    again = opened(server)
    assert (again.digest, again.source.transfer.kept_bytes) == (digest, 0)


def test_reading_a_window_streams_exactly_its_bytes(server: Server, checkpoint: Path) -> None:
    source = open_source(f"{server.url}/m", limits=LIMITS)
    buffer = bytearray(1000)
    with source.opened(SHARD, sequential=True) as file:
        server.seen.clear()
        file.read_into(memoryview(buffer), 500)
        assert (server.nbytes, bytes(buffer)) == (1000, (checkpoint / SHARD).read_bytes()[500:1500])
        assert file.current_facts() == file.facts
        with pytest.raises(CheckpointError, match="truncated while it was read"):
            file.read_into(memoryview(buffer), file.facts.nbytes - 999)


def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(handler: Any, seen: Seen) -> None:
        reply(handler, seen, 407)

    with serving(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("TONNAGE_ALLOW_HTTP", "1")
        with pytest.raises(SourceError, match="the proxy wants to know who asks"):
            open_checkpoint("http://example.com/m", limits=LIMITS)
        assert proxy.seen[0].path == "http://example.com/m/model.safetensors.index.json"
