"""Planning from object stores: a real S3 server on loopback, reached as any other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from samples import COMMAND, PATIENCE, header_bytes_in, write_shards
from servers import Seen, reply, serving
from tonnage.api import open_checkpoint
from tonnage.errors import CheckpointError, SourceError
from tonnage.sources.addresses import open_source
from tonnage.sources.limits import Limits

SHARD = "model-00002-of-00003.safetensors"
LIMITS = Limits(attempts=3, connect_seconds=PATIENCE, total_seconds=PATIENCE, pause_seconds=0.01)
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",  # noqa: S106
    )
    client.create_bucket(Bucket="models")
    yield client
    server.stop()


@pytest.fixture(autouse=True)
def _environment(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KEYS | {"AWS_ENDPOINT_URL": s3.meta.endpoint_url, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "HTTP_PROXY", "TONNAGE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, s3: Any) -> Path:
    directory = write_shards(tmp_path_factory.mktemp("store") / "m")
    upload(s3, directory, "small/m")
    s3.put_object(Bucket="models", Key="small/m/weights/x", Body=b"below")
    return directory


def upload(s3: Any, directory: Path, prefix: str) -> None:
    for path in directory.iterdir():
        s3.put_object(Bucket="models", Key=f"{prefix}/{path.name}", Body=path.read_bytes())


def test_a_plan_is_that_of_the_directory_and_only_headers_are_fetched(checkpoint: Path) -> None:
    there, here = open_checkpoint("s3://models/small/m/", limits=LIMITS), open_checkpoint(checkpoint)
    assert (there.name, there.digest, there.source.address) == ("m", here.digest, "s3://models/small/m")
    small = sum(path.stat().st_size for path in checkpoint.glob("*.json"))
    assert there.source.transfer.nbytes == header_bytes_in(checkpoint) + small + 3 * 8
    assert there.source.has("weights")
    assert set(there.source.list_files()) == {path.name for path in checkpoint.iterdir()}


def test_a_window_of_an_object_is_exactly_that(checkpoint: Path) -> None:
    source = open_source("s3://models/small/m", limits=LIMITS)
    buffer = bytearray(100_000)
    with source.opened(SHARD, sequential=True) as file:
        file.read_into(memoryview(buffer), 500)
    assert bytes(buffer) == (checkpoint / SHARD).read_bytes()[500:100_500]
    assert source.transfer.nbytes == 100_000


def test_what_was_fetched_is_kept_by_version(checkpoint: Path) -> None:
    first = open_checkpoint("s3://models/small/m", limits=LIMITS)
    again = open_checkpoint("s3://models/small/m", limits=LIMITS)
    assert again.source.transfer.nbytes == 0
    offline = open_checkpoint("s3://models/small/m", limits=Limits(offline=True))
    assert first.digest == again.digest == offline.digest == open_checkpoint(checkpoint).digest


def test_an_object_that_changed_is_fetched_again_and_refused_while_it_is_read(s3: Any, tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "m")
    upload(s3, directory, "changing")
    first = open_checkpoint("s3://models/changing", limits=LIMITS)
    raw = bytearray((directory / SHARD).read_bytes())
    raw[-1] = 1
    s3.put_object(Bucket="models", Key=f"changing/{SHARD}", Body=bytes(raw))
    with first.source.opened(SHARD) as file, pytest.raises(SourceError, match="changed since it was listed"):
        file.read_into(memoryview(bytearray(10)), 0)
    again = open_checkpoint("s3://models/changing", limits=LIMITS)
    assert again.source.list_files()[SHARD].version != first.source.list_files()[SHARD].version
    assert 0 < again.source.transfer.nbytes < first.source.transfer.nbytes


def refusal(address: str, limits: Limits = LIMITS) -> str:
    with pytest.raises((SourceError, CheckpointError)) as refused:
        open_checkpoint(address, limits=limits)
    assert len(refused.value.problems) == 1
    assert str(refused.value).isprintable()
    return str(refused.value)


@pytest.mark.usefixtures("checkpoint")
def test_nothing_there_is_said() -> None:
    assert refusal("s3://models/small/n") == "s3://models/small/n: nothing there; expected objects below it"
    assert "s3://models/small: no config.json here" in refusal("s3://models/small")
    assert "s3://absent: no such object or bucket" in refusal("s3://absent")


def test_an_endpoint_in_the_clear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://example.com")
    assert refusal("s3://models/small/m").startswith("http://example.com: http without TLS")


def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert refusal("s3://models/small/m").startswith(
        "s3://models/small/m: no answer that helps; expected the object; found "
    )


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_what_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A panic of obstore otherwise."""
    monkeypatch.setenv(name, "hidden\n")
    assert refusal("s3://models/small/m") == f"{name}: cannot be sent; expected printable ASCII"


@pytest.mark.parametrize("objects", [0, 1000])
def test_a_listing_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, objects: int) -> None:
    limits = Limits(attempts=1, connect_seconds=PATIENCE, total_seconds=1)
    pages = iter(range(10**9))

    def answer(handler: Any, seen: Seen) -> None:
        page = next(pages)
        keys = "".join(
            f"<Contents><Key>m/{page}-{n}</Key><Size>1</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for n in range(objects)
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{page}</NextContinuationToken>"
        reply(handler, seen, 200, f"<ListBucketResult><Name>models</Name>{more}{keys}</ListBucketResult>".encode())

    with serving(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert refusal("s3://models/m", limits) == "s3://models/m: too slow; expected everything within 1 s"


def test_a_page_of_a_listing_without_end_takes_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.sources.store.LISTING_BYTES", 64 << 20)
    over = threading.Event()

    def answer(handler: Any, seen: Seen) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not over.is_set() and seen.nbytes < 4 << 30:
            seen.nbytes += handler.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")

    with serving(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        try:
            said = refusal("s3://models/m", LIMITS)
        finally:
            over.set()
    assert said == "s3://models/m: an answer without end; expected at most 67108864 bytes"


@contextmanager
def lying(answer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answer for objects in the place of the server; what is listed comes from it."""
    listed = (
        b'<?xml version="1.0"?><ListBucketResult><Name>models</Name><IsTruncated>false</IsTruncated>'
        b"<Contents><Key>m/config.json</Key><Size>300</Size><ETag>&quot;1&quot;</ETag>"
        b"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
    )

    def both(handler: Any, seen: Seen) -> None:
        if "list-type" in seen.path:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(listed) + listed)
        else:
            handler.close_connection = True
            answer(handler, seen)

    with serving(both) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield
        assert server.nbytes < 16 << 20


HEAD = "HTTP/1.1 206 Part\r\nETag: {etag}\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Range: {range}\r\nContent-Length: {length}\r\n\r\n"


def part(
    body: bytes = bytes(300), etag: str = '"1"', extent: str = "bytes 0-299/300", length: int = 300, times: int = 1
) -> Any:
    def answer(handler: Any, seen: Seen) -> None:
        handler.wfile.write(HEAD.format(etag=etag, range=extent, length=length).encode())
        for _ in range(times):
            seen.nbytes += len(body)
            handler.wfile.write(body)

    return answer


LIES = {
    "ranges ignored": lambda h, _: h.wfile.write(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + bytes(1 << 16)
    ),
    "another range": part(extent="bytes 1-299/300", length=299, body=bytes(299)),
    "another size": part(extent="bytes 0-299/400"),
    "another version": part(etag='"2"'),
    "truncated": part(body=bytes(100)),
    "more than said": part(body=bytes(1 << 20), length=50 << 20, times=50),
    "down": lambda h, _: h.wfile.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"),
    "forbidden": lambda h, _: h.wfile.write(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"),
    "no HTTP": lambda h, _: h.wfile.write(b"SSH-2.0\r\n\r\n"),
    "closed": lambda *_: None,
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_a_store_that_answers_wrong_is_refused_in_one_line(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with lying(answer, monkeypatch):
        assert refusal("s3://models/m").startswith("s3://models/m/config.json: ")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))


@pytest.mark.parametrize("status", ["429 Too Many Requests", "500 Internal", "503 Slow Down"])
def test_a_store_that_is_busy_is_asked_again(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count()

    def answer(handler: Any, seen: Seen) -> None:
        if next(asked) < 2:
            handler.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            part()(handler, seen)

    with lying(answer, monkeypatch):
        source = open_source("s3://models/m", limits=LIMITS)
        with source.opened("config.json") as file:
            assert file.read(300, 0) == bytes(300)


def test_what_came_before_a_connection_broke_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(handler: Any, seen: Seen) -> None:
        asked.append(seen.headers["range"])
        begin = int(seen.headers["range"].removeprefix("bytes=").partition("-")[0])
        head = HEAD.format(etag='"1"', range=f"bytes {begin}-299/300", length=300 - begin)
        handler.wfile.write(head.encode() + bytes(150))

    with lying(answer, monkeypatch):
        source = open_source("s3://models/m", limits=LIMITS)
        with source.opened("config.json") as file:
            assert file.read(300, 0) == bytes(300)
    assert asked[0] == "bytes=0-299"
    assert len(asked) <= 3


def test_commands_take_the_address(checkpoint: Path) -> None:
    done = run("plan", "s3://models/small/m", "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert done.stderr.startswith("s3://models/small/m: ")
    assert document["transfer"]["bytes"] < 2 * header_bytes_in(checkpoint) + (1 << 16)
    assert document["checkpoint"]["digest"] == open_checkpoint(checkpoint).digest


def test_commands_of_the_page_on_sources_run(s3: Any, checkpoint: Path) -> None:
    upload(s3, checkpoint, "small-llama")
    page = (Path(__file__).resolve().parents[2] / "docs" / "sources.md").read_text()
    lines = re.findall(r"^tonnage (\w+ s3://.*)$", page, re.MULTILINE)
    assert lines
    for line in lines:
        done = run(*line.split())
        assert done.returncode == 0, (line, done.stderr)
