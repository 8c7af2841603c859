"""Preparing from elsewhere: the bytes of a local run, each shard read once, whatever becomes of servers and connections."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from samples import COMMAND, LLAMA, PATIENCE, file_contents, prepare_small, rehearse
from servers import COMMIT, Seen, Server, hub_here, reply, web
from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.checkpoint.io import read_checkpoint_headers
from tonnage.errors import SourceError, TonnageError
from tonnage.prepare.preparation import Preparation
from tonnage.prepare.request import PrepareOptions, prepare_placement
from tonnage.prepare.run import Standing, run_preparation
from tonnage.prepare.worker import run_task, source_at

SHARDS = 4
WAYS: dict[str, dict[str, Any]] = {
    "cut": {"tp": 2, "convert": "none"},
    "converted": {"tp": 2, "convert": "mxfp8"},
    "unsharded": {"tp": 1, "convert": "mxfp8", "layout": "hf"},
    "several jobs of a file": {"tp": 2, "convert": "mxfp8", "job_bytes": 150_000},
    "one rank": {"tp": 2, "convert": "none", "ranks": (1,)},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source_at.cache_clear()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several files, with a tokenizer."""
    path = tmp_path_factory.mktemp("remote") / "source"
    fields = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": SHARDS - 1}
    rehearse(path, fields, scaled_down=False, sharded=True)
    random = np.random.default_rng(7)
    for shard in read_checkpoint_headers(path).shards:
        values = random.standard_normal(shard.payload_bytes // 2, np.float32).view(np.uint32) >> 16
        with (path / shard.shard_file).open("r+b") as file:
            file.seek(shard.data_begin)
            file.write(values.astype(np.uint16).tobytes())
    (path / "tokenizer.json").write_text(json.dumps({"a": "b" * 70_000}))
    return path


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """What a local run writes, one way or another; without prepare.json, which says where from."""
    made: dict[str, dict[str, bytes]] = {}

    def find(way: str) -> dict[str, bytes]:
        if way not in made:
            out = prepare_small(source, tmp_path_factory.mktemp("local") / "out", **WAYS[way])
            made[way] = written(out)
        return made[way]

    return find


def written(out: Path) -> dict[str, bytes]:
    found = file_contents(out)
    assert json.loads(found.pop("prepare.json"))["schema"] == "tonnage.prepare/1"
    return found


def preparation_of(address: str, out: Path, way: str = "converted", **more: Any) -> Preparation:
    options = {**WAYS[way], **more}
    request = PlanRequest(tp=options.pop("tp"), convert=options.pop("convert"))
    checkpoint = open_checkpoint(address)
    plan = plan_checkpoint(checkpoint, request)
    assert plan.placement is not None
    assert checkpoint.headers is not None
    assert checkpoint.source is not None
    return prepare_placement(
        plan.placement,
        checkpoint.source,
        out,
        PrepareOptions(workers=1, **options),
        headers=checkpoint.headers,
        digest=checkpoint.digest,
    )


def prepare(preparation: Preparation) -> list[Standing]:
    """Do everything in this process."""

    @contextmanager
    def here(_preparation: Preparation, _lock: int) -> Iterator[Any]:
        yield lambda tasks: ((task, run_task(task, preparation.setup, lambda _nbytes: None)) for task in tasks)

    seen: list[Standing] = []
    run_preparation(preparation, seen.append, executor=here)
    return seen


LOOK = (0, 8)
"""The range that is asked of a shard to see whether it is there."""


def read_of(server: Server, word: str = ".safetensors") -> int:
    """Bytes of files that were sent for more than a look; small ones come with the look."""
    return sum(one.nbytes for one in server.of(word) if one.range != LOOK and not one.path.endswith(".json"))


def weights_of(preparation: Preparation) -> int:
    """Bytes that are said to be read of the shards."""
    return sum(task.transfer_bytes for task in preparation.survey.tasks if task.jobs)


def nothing_final(out: Path) -> bool:
    """Whether no weights and no summary have their final name."""
    return not any(out.rglob("*.safetensors")) and not (out / "prepare.json").exists()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_what_a_local_run_writes(source: Path, tmp_path: Path, local: Any, way: str) -> None:
    with web(source) as server:
        preparation = preparation_of(server.url, tmp_path / "out", way)
        before = read_of(server)
        prepare(preparation)
        assert read_of(server) - before == weights_of(preparation)
    assert written(tmp_path / "out") == local(way)
    identity = json.loads((tmp_path / "out" / "prepare.json").read_bytes())["identity"]
    assert identity["address"] == f"{server.url}/"
    assert all(one["version"].startswith("etag ") for one in identity["sources"])


def test_every_shard_crosses_the_network_once_and_little_of_it_twice(source: Path, tmp_path: Path) -> None:
    shards = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    with web(source) as server:
        preparation = preparation_of(server.url, tmp_path / "out", "cut")
        before = {name: read_of(server, name) for name in shards}
        prepare(preparation)
        read = {name: read_of(server, name) - before[name] for name in shards}
    assert read == shards
    assert len(shards) == SHARDS
    assert {task.source for task in preparation.survey.tasks if task.digested_bytes} >= shards.keys()


def test_without_digests_only_what_the_ranks_take_is_read(source: Path, tmp_path: Path, local: Any) -> None:
    with web(source) as server:
        whole = weights_of(preparation_of(server.url, tmp_path / "whole", "one rank"))
        preparation = preparation_of(server.url, tmp_path / "out", "one rank", source_digests=False)
        before = read_of(server)
        prepare(preparation)
        assert read_of(server) - before == weights_of(preparation) < whole
    assert written(tmp_path / "out") == local("one rank")


def test_a_repository_of_the_hub_is_pinned_and_its_digests_are_compared(
    source: Path, tmp_path: Path, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_here(source, monkeypatch):
        prepare(preparation_of("hf:org/name", tmp_path / "out"))
    assert written(tmp_path / "out") == local("converted")
    document = json.loads((tmp_path / "out" / "prepare.json").read_bytes())
    assert document["identity"]["address"] == f"hf:org/name@{COMMIT}"
    stated = {one["name"]: one["sha256"] for one in document["identity"]["sources"]}
    assert all(stated[path.name] for path in source.glob("*.safetensors"))
    assert stated["config.json"] is None
    assert all(one["digest"] for one in document["sources"])


@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "tokenizer.json"])
def test_a_file_that_is_not_the_one_the_hub_states_is_refused_and_nothing_of_it_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def lie(handler: Any, seen: Seen) -> bool:
        if not seen.path.startswith("/api/"):
            return False
        found.api.trick = None
        files = [*siblings_of(source)]
        for one in files:
            if one["rfilename"] == name:
                one["lfs"]["sha256"] = "0" * 64
        body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode()
        reply(handler, seen, 200, body, Content_Type="application/json")
        return True

    out = tmp_path / "out"
    with hub_here(source, monkeypatch) as found:
        found.api.trick = lie
        with pytest.raises(TonnageError, match="not the file its origin states") as caught:
            prepare(preparation_of("hf:org/name", out))
    assert [(one.where, one.expected) for one in caught.value.problems] == [(name, f"SHA-256 {'0' * 64}")]
    assert not (out / "prepare.json").exists()
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob(name))


def siblings_of(source: Path) -> Iterator[dict[str, Any]]:
    from servers import siblings

    yield from siblings(source, 64 << 10, blobs=True)


def test_connections_that_break_are_taken_up_where_they_broke(source: Path, tmp_path: Path, local: Any) -> None:
    broken: list[str] = []

    def break_off(handler: Any, seen: Seen) -> bool:
        name = seen.path.rpartition("/")[2]
        if not name.endswith(".safetensors") or name in broken or seen.headers["range"].startswith("bytes=0-7"):
            return False
        broken.append(name)
        begin, end = map(int, seen.headers["range"].removeprefix("bytes=").split("-"))
        size = (source / name).stat().st_size
        handler.send_response(206)
        handler.send_header("ETag", etag(source / name))
        handler.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        handler.send_header("Content-Length", str(end + 1 - begin))
        handler.end_headers()
        sent = (source / name).read_bytes()[begin : begin + 1000]
        handler.wfile.write(sent)
        seen.nbytes += len(sent)
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True
        return True

    with web(source) as server:
        preparation = preparation_of(server.url, tmp_path / "out")
        before = read_of(server)
        server.trick = break_off
        prepare(preparation)
        assert read_of(server) - before == weights_of(preparation)
    assert sorted(broken) == sorted(path.name for path in source.glob("*.safetensors"))
    assert written(tmp_path / "out") == local("converted")


def etag(path: Path) -> str:
    return f'"{path.stat().st_mtime_ns:x}-{path.stat().st_size:x}"'


def change_last(source: Path) -> Path:
    return source / f"model-0000{SHARDS}-of-0000{SHARDS}.safetensors"


CHANGES: dict[str, Callable[[Path], None]] = {
    "other bytes": lambda path: os.utime(path, ns=(1, 1)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 100),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 100),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_it_was_planned_is_refused(source: Path, tmp_path: Path, change: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    name = change_last(copy).name
    with web(copy) as server:
        preparation = preparation_of(server.url, tmp_path / "out", "cut")
        CHANGES[change](copy / name)
        with pytest.raises(TonnageError) as caught:
            prepare(preparation)
    assert name in str(caught.value)
    assert not (tmp_path / "out" / "prepare.json").exists()
    assert not list((tmp_path / "out").rglob(f"model-0000{SHARDS}-*"))


def test_killed_in_the_middle_of_a_file_the_next_run_reads_again_only_what_was_not_done(
    source: Path, tmp_path: Path, local: Any
) -> None:
    out, process = tmp_path / "out", []
    half = SHARDS // 2

    def kill(_handler: Any, seen: Seen) -> bool:
        wanted = seen.path.endswith(".safetensors") and not seen.headers["range"].startswith("bytes=0-7")
        finished = len(list(out.rglob("model-*.safetensors"))) // 2
        if wanted and finished >= half and process and not killed:
            killed.append(finished)
            os.killpg(process[0].pid, signal.SIGKILL)
        return False

    killed: list[int] = []
    with web(source) as server:
        words = ["prepare", server.url, "--tp", "2", "--convert", "mxfp8", "--workers", "1", "-o", str(out)]
        server.trick = kill
        process.append(subprocess.Popen([*COMMAND, *words], start_new_session=True, stderr=subprocess.DEVNULL))
        assert process[0].wait(PATIENCE) == -signal.SIGKILL
        assert killed
        assert not (out / "prepare.json").exists()
        server.trick = None
        again = preparation_of(server.url, out)
        before = read_of(server)
        seen = prepare(again)
        fresh = read_of(server) - before
    assert seen[0].resumed_bytes > 0
    assert 0 < fresh < weights_of(again)
    assert written(out) == local("converted")


def test_a_run_is_not_continued_with_another_version_of_a_file(source: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "copy", tmp_path / "out"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with web(copy) as server:

        def stop(_handler: Any, seen: Seen) -> bool:
            if seen.path.endswith(change_last(copy).name):
                os.utime(change_last(copy), ns=(7, 7))
            return False

        preparation = preparation_of(server.url, out, "cut")
        server.trick = stop
        with pytest.raises(TonnageError, match="changed"):
            prepare(preparation)
        server.trick = None
        source_at.cache_clear()
        with pytest.raises(TonnageError, match=f"begun with another source {change_last(copy).name}"):
            prepare(preparation_of(server.url, out, "cut"))


def test_offline_nothing_is_asked_for_and_that_is_what_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web(source) as server:
        preparation_of(server.url, tmp_path / "first")
        monkeypatch.setenv("TONNAGE_OFFLINE", "1")
        asked = len(server.seen)
        preparation = preparation_of(server.url, tmp_path / "out")  # headers are kept on this machine
        with pytest.raises(SourceError, match="offline"):
            prepare(preparation)
        assert len(server.seen) == asked
    assert nothing_final(tmp_path / "out")


def test_the_dry_run_says_what_goes_over_the_network(source: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tonnage.cli import app

    with web(source) as server:
        words = ["prepare", server.url, "--tp", "2", "-o", str(tmp_path / "out"), "--dry-run"]
        document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert document["transfer_bytes"] == preparation_of(server.url, tmp_path / "o", "cut").survey.transfer_bytes
        text = CliRunner().invoke(app, words).stdout
        assert "network: " in text
        assert "every source file whole for its digest" in text
        text = CliRunner().invoke(app, [*words, "--no-source-digests"]).stdout
        assert "not compared with the digests of their origin" in text
    assert "network" not in CliRunner().invoke(app, ["prepare", str(source), *words[2:]]).stdout
