"""Packages elsewhere: verified where they are, and brought here, whole or by rank, whatever happens on the way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from packages import make_package
from samples import COMMAND, LLAMA, PATIENCE, file_contents, flip_last, write_key
from servers import Seen, hub_here, reply, web
from tonnage.api import open_checkpoint
from tonnage.cli import VERIFICATION_FAILED, app
from tonnage.errors import SourceError, TonnageError
from tonnage.export.fetch import Fetched, fetch_package
from tonnage.export.manifest import PackageError
from tonnage.export.remote import RemotePackage
from tonnage.export.signature import PublicKey
from tonnage.export.verify import VerifyError, VerifyRequest, verify_package
from tonnage.prepare.io import PrepareError
from tonnage.sources.addresses import open_source
from tonnage.sources.model import Source

WEIGHTS = "weights/tp2/rank-{}/model-00001-of-00001.safetensors"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    return make_package(tmp_path_factory.mktemp("original") / "package", keys[0], LLAMA, "--tp", 2)


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "package"))


def fetch(url: str, out: Path, keys: tuple[Path, Path], *ranks: int) -> Fetched:
    request = VerifyRequest(ranks=ranks or None)
    return fetch_package(RemotePackage(package_source(url)), out, PublicKey(path=keys[1]), request)


def package_source(address: str) -> Source:
    """Open an address as the commands do."""
    return open_source(address, whole=False, in_one=True)


@contextmanager
def hub_address(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hub_here(directory, monkeypatch):
        yield "hf:org/name"


@contextmanager
def web_address(directory: Path, _monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with web(directory) as server:
        yield server.url


@contextmanager
def plain_address(directory: Path, _monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What ``python -m http.server`` serves: without ranges."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(directory))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


PLACES: dict[str, Callable[..., Any]] = {"web": web_address, "hub": hub_address, "plain": plain_address}


@pytest.mark.parametrize("place", PLACES)
def test_a_package_elsewhere_is_verified_where_it_is_and_comes_here_as_it_is(
    original: Path, tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with PLACES[place](original, monkeypatch) as address:
        found = verify_package(RemotePackage(package_source(address)), PublicKey(path=keys[1]))
        quick = verify_package(
            RemotePackage(package_source(address)), PublicKey(path=keys[1]), VerifyRequest(fast=True)
        )
        fetched = fetch(address, tmp_path / "here", keys)
    assert quick.problems == ()
    assert found.problems == ()
    assert found.unchecked == ("what else there is at this address",)
    local = verify_package(original, PublicKey(path=keys[1]))
    assert (found.files, found.nbytes, found.hashed_bytes) == (local.files, local.nbytes, local.hashed_bytes)
    assert file_contents(tmp_path / "here") == file_contents(original)
    assert (fetched.files, fetched.nbytes, fetched.ranks) == (local.files, local.nbytes, (0, 1))


def test_a_host_gets_its_ranks_and_the_files_of_all_and_verifies_them(
    original: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    here = tmp_path / "here"
    with web(original) as server:
        fetch(server.url, here, keys, 1)
        assert not [one.path for one in server.seen if "rank-0" in one.path]
        expected = {path: raw for path, raw in file_contents(original).items() if "rank-0" not in path}
        assert file_contents(here) == expected
        assert verify_package(here, PublicKey(path=keys[1]), VerifyRequest(ranks=(1,))).verified
        assert not verify_package(here, PublicKey(path=keys[1])).verified
        before = len(server.of("rank-1"))
        fetch(server.url, here, keys, 0)
        assert len(server.of("rank-1")) == before
    assert file_contents(here) == file_contents(original)


def test_one_bit_is_found_where_it_is_and_nothing_of_that_file_is_kept(
    package: Path, original: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    here = tmp_path / "here"
    flip_last(package / WEIGHTS.format(1))
    with web(package) as server:
        found = verify_package(RemotePackage(open_source(server.url)), PublicKey(path=keys[1]))
        assert [(one.where, "rank 1" in one.what) for one in found.problems] == [(WEIGHTS.format(1), True)]
        with pytest.raises(VerifyError, match="not the signed one; nothing of it was kept"):
            fetch(server.url, here, keys)
        got = file_contents(here)
        assert got.keys() == file_contents(original).keys() - {WEIGHTS.format(1), "manifest.json", "model.sig"}
        flip_last(package / WEIGHTS.format(1))
        before = sum(one.nbytes for one in server.of(WEIGHTS.format(0)) if one.range != (0, 8))
        fetch(server.url, here, keys)
        assert sum(one.nbytes for one in server.of(WEIGHTS.format(0)) if one.range != (0, 8)) == before
    assert file_contents(here) == file_contents(original)


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (lambda path: flip_last(path / "manifest.json"), "not the file that was signed"),
    "no signature": (lambda path: (path / "model.sig").unlink(), "cannot be read"),
    "signature": (lambda path: (path / "model.sig").write_bytes(b"{}"), "not a signature of a model"),
    "a file is missing": (lambda path: (path / "plan.json").unlink(), "cannot be read"),
    "a file is longer": (lambda path: os.truncate(path / WEIGHTS.format(0), 10**6), "size"),
}


@pytest.mark.parametrize(("lie", "message"), LIES.values(), ids=LIES)
def test_what_is_not_what_was_signed_is_no_package_here(
    package: Path, tmp_path: Path, keys: tuple[Path, Path], lie: Callable[[Path], object], message: str
) -> None:
    lie(package)
    with web(package) as server:
        assert not verify_package(RemotePackage(open_source(server.url)), PublicKey(path=keys[1])).verified
        with pytest.raises(VerifyError, match=message):
            fetch(server.url, tmp_path / "here", keys)
    assert not {"manifest.json", "model.sig"} & file_contents(tmp_path / "here").keys()


def test_who_signed_it_decides(original: Path, tmp_path: Path) -> None:
    with web(original) as server, pytest.raises(VerifyError, match="signed with another key"):
        fetch(server.url, tmp_path / "here", write_key(tmp_path, "other"))
    assert not (tmp_path / "here").exists()


def test_a_directory_with_anything_else_in_it_is_left_alone(
    original: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with web(original) as server:
        (here / "notes.txt").write_text("mine")
        with pytest.raises(TonnageError, match=r"output is in use.*notes\.txt"):
            fetch(server.url, here, keys)
        (here / "notes.txt").unlink()
        (here / "config.json").write_text("mine")
        with pytest.raises(PackageError, match=r"config\.json"):
            fetch(server.url, here, keys)
        assert file_contents(here) == {"config.json": b"mine"}
        (here / "config.json").unlink()
        (here / "manifest.json").write_text("{}")
        with pytest.raises(PackageError, match="another package is here"):
            fetch(server.url, here, keys)
    assert file_contents(here) == {"manifest.json": b"{}"}


def test_killed_in_the_middle_no_file_is_half_there_and_the_same_command_goes_on(
    original: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    here, process = tmp_path / "here", []

    def kill(handler: Any, seen: Seen) -> bool:
        if process and seen.path.endswith(WEIGHTS.format(1)) and seen.headers["range"] != "bytes=0-7" and not struck:
            struck.append(seen.path)
            handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n")
            process[0].kill()
            process[0].wait(PATIENCE)
            handler.close_connection = True
            return True
        return False

    struck: list[str] = []
    with web(original) as server:
        server.trick = kill
        words = ["fetch", server.url, "--key", str(keys[1]), "-o", str(here)]
        process.append(subprocess.Popen([*COMMAND, *words]))
        assert process[0].wait(PATIENCE) == -signal.SIGKILL
        assert struck
        whole = file_contents(original)
        there = {path: raw for path, raw in file_contents(here).items() if not path.endswith(".partial")}
        assert there.items() <= whole.items()
        assert WEIGHTS.format(1) not in there
        assert "model.sig" not in there
        fetch(server.url, here, keys)
    assert file_contents(here) == whole


def test_a_disk_without_room_is_refused_before_anything_is_written(
    original: Path, tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 100_000 // status.f_frsize, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with web(original) as server, pytest.raises(PrepareError, match="not enough disk space"):
        fetch(server.url, tmp_path / "here", keys)
    assert file_contents(tmp_path / "here") == {}


def test_a_disk_that_fills_up_leaves_only_whole_files(original: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    here = tmp_path / "here"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with web(original) as server:
        words = ["fetch", server.url, "--key", str(keys[1]), "-o", str(here)]
        done = subprocess.run([*COMMAND, *words], preexec_fn=limit, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "file too large for the limit of this process" in done.stderr
        assert "Traceback" not in done.stderr
        assert file_contents(here).items() <= file_contents(original).items()
        fetch(server.url, here, keys)
    assert file_contents(here) == file_contents(original)


def test_the_commands_say_what_they_did(original: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    with web(original) as server:
        words = ["fetch", server.url, "--key", str(keys[1]), "--rank", "0", "-o", str(tmp_path / "here")]
        document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert document["schema"] == "tonnage.fetch/1"
        assert (document["ranks"], document["files"]) == ([0], 7)
        text = CliRunner().invoke(app, words).stdout
        assert "; 0 bytes were here" not in text
        assert "each hashed on its way" in text
        verified = CliRunner().invoke(app, ["verify", server.url, "--key", str(keys[1]), "--json"])
        assert json.loads(verified.stdout)["verified"] is True
    flip_last(tmp_path / "here" / WEIGHTS.format(0))
    assert subprocess.run([*COMMAND, "verify", str(tmp_path / "here"), "--key", str(keys[1]), "--rank", "0"],
                          capture_output=True, check=False).returncode == VERIFICATION_FAILED  # fmt: skip


# --- a server without ranges --------------------------------------------------------------------------------------------

LARGE = WEIGHTS.format(0)


def whole_answers(
    directory: Path, nth: Callable[[Any, Seen, bytes], bool] = lambda *_: False
) -> Callable[[Any, Seen], bool]:
    """Answer everything with the whole file; of the second time that the weights of a rank are asked for, as told."""
    asked: list[str] = []

    def trick(handler: Any, seen: Seen) -> bool:
        path = directory / seen.path.lstrip("/")
        if not path.is_file():
            return False
        asked.append(seen.path)
        body = path.read_bytes()
        if seen.path.endswith(LARGE) and asked.count(seen.path) > 1 and nth(handler, seen, body):
            return True
        reply(handler, seen, 200, body, ETag='"1"')
        return True

    return trick


def shorter(handler: Any, _seen: Seen, body: bytes) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("ETag", '"1"')
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True
    return True


def in_chunks(handler: Any, _seen: Seen, _body: bytes) -> bool:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("ETag", '"1"')
    handler.end_headers()
    handler.close_connection = True
    return True


def answered(status: int = 200, tail: bytes = b"", **headers: str) -> Callable[[Any, Seen, bytes], bool]:
    def answer(handler: Any, seen: Seen, body: bytes) -> bool:
        reply(handler, seen, status, body + tail, **({"ETag": '"1"'} | headers))
        return True

    return answer


LIES = {
    "half of it": (shorter, "the answer broke off, and without ranges it cannot go on; expected a file; found the connection closed after"),
    "another length": (answered(tail=b"x"), "the server ignores ranges"),
    "another version": (answered(ETag='"2"'), 'changed since it was first read; expected etag "1"; found etag "2"'),
    "no length": (in_chunks, "no stated length; expected"),
    "encoded": (answered(Content_Encoding="gzip"), "encoded, which nobody asked for; expected identity; found gzip"),
    "gone": (answered(404), "no longer there; expected the file that was found; found no such file"),
    "moved": (answered(302, Location="/elsewhere"), "unexpected answer; expected the file; found status 302"),
    "a part": (answered(206), "unexpected answer; expected the file; found status 206"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_a_server_without_ranges_is_believed_no_more_than_others(
    original: Path, tmp_path: Path, keys: tuple[Path, Path], lie: Callable[[Any, Seen, bytes], bool], said: str
) -> None:
    with web(original) as server:
        server.trick = whole_answers(original, lie)
        with pytest.raises(SourceError) as refused:
            fetch(server.url, tmp_path / "here", keys)
    assert said in str(refused.value)
    assert not (tmp_path / "here" / LARGE).exists()
    assert not (tmp_path / "here" / "model.sig").exists()


def test_without_ranges_a_file_comes_once_and_a_flipped_bit_is_found(
    package: Path, original: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    with web(original) as server:
        server.trick = whole_answers(original)
        fetch(server.url, tmp_path / "here", keys)
        assert len(server.of(LARGE)) == 2  # looked at, and read
    assert file_contents(tmp_path / "here") == file_contents(original)
    flip_last(package / LARGE)
    with web(package) as server:
        server.trick = whole_answers(package)
        with pytest.raises(VerifyError, match="not the signed one; nothing of it was kept"):
            fetch(server.url, tmp_path / "other", keys)
    assert not (tmp_path / "other" / LARGE).exists()


def test_without_ranges_nothing_large_is_planned(original: Path) -> None:
    source = original.with_name(f"{original.name}-checkpoint")
    with plain_address(source, pytest.MonkeyPatch()) as address:
        with pytest.raises(SourceError, match="the server ignores ranges; expected 206 with bytes 0-7"):
            open_checkpoint(address)
        assert open_checkpoint(f"{address}/config.json").digest == open_checkpoint(source / "config.json").digest
