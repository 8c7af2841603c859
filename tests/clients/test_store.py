"""A real S3 server on loopback: plan, prepare from it, export to it, verify, fetch; killed at many moments and resumed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from packages import make_package
from samples import COMMAND, LLAMA, PATIENCE, ask, file_contents, prepare_small, until
from servers import hub
from tonnage.errors import SourceError
from tonnage.export.manifest import PackageError
from tonnage.export.objects import DIGEST, Objects
from tonnage.export.sending import PART_BYTES
from tonnage.export.upload import upload_package

moto = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

BUCKET = "models"
SECRET = "not-to-be-seen-anywhere"  # noqa: S105 - a loopback server takes any
LARGE: dict[str, Any] = {**LLAMA, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 24_000}
"""Two tensors of 25 MB: files of several parts."""


class Gate:
    """Stands before the server, and lets requests wait: who sends them is in the middle of something."""

    def __init__(self) -> None:
        self.app: Any = None
        self._shut: Callable[[dict[str, str]], bool] = lambda _: False
        self._reached, self._over = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, str], start_response: Any) -> Any:
        if not self._shut(environ):
            return self.app(environ, start_response)
        self._reached.set()
        self._over.wait(PATIENCE)
        start_response("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    def ended_at(self, shut: Callable[[dict[str, str]], bool], *words: object, number: int = signal.SIGKILL) -> bool:
        """Run the command until a request waits, and end it and its workers then; say whether one did."""
        self._reached.clear()
        self._over.clear()
        self._shut = shut
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)], start_new_session=True, stdout=-3, stderr=-1, text=True
        )
        until(lambda: self._reached.is_set() or process.poll() is not None)
        reached = self._reached.is_set()
        if reached:
            os.killpg(process.pid, number)
        _, said = process.communicate(timeout=PATIENCE)
        self._over.set()
        ask("GET", os.environ["AWS_ENDPOINT_URL"])  # whatever was sent before is being answered,
        until(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))  # and that is over
        self._shut = lambda _: False
        if reached:
            assert process.returncode == (-number if number == signal.SIGKILL else ENDED[number][0]), said
            assert number == signal.SIGKILL or said.splitlines()[-1] == ENDED[number][1]
        return reached


GATE = Gate()


def sends(environ: dict[str, str], prefix: str) -> bool:
    """Whether a request puts an object, or a part of one, below a prefix."""
    return environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].startswith(f"/{BUCKET}/{prefix}/")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of the server, which the environment points to."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    GATE.app, server._server.app = server._server.app, GATE
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client
    server.stop()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    return make_package(tmp_path_factory.mktemp("small") / "package", keys[0], LLAMA, "--tp", 2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    made = make_package(tmp_path_factory.mktemp("large") / "package", keys[0], LARGE, scaled_down=False)
    assert max(path.stat().st_size for path in made.rglob("*.safetensors")) > 2 * PART_BYTES
    return made


@pytest.fixture(scope="module")
def source(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint in the store, and the same on this machine."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    prepare_small(path, tmp_path_factory.mktemp("unused") / "out")
    for file in path.iterdir():
        s3.upload_file(str(file), BUCKET, f"checkpoint/{file.name}")
    return f"s3://{BUCKET}/checkpoint", path


def command(*words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done


def objects(s3: Any, prefix: str) -> dict[str, bytes]:
    """Every object below a prefix."""
    found = {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
        for one in page.get("Contents", ()):
            body = s3.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
            found[one["Key"].removeprefix(f"{prefix}/")] = body
    return found


def unfinished(s3: Any, prefix: str) -> list[str]:
    found = s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [one["Key"] for one in found if one["Key"].startswith(f"{prefix}/")]


ENDED = {
    signal.SIGINT: (130, "tonnage: interrupted; run the same command again to resume"),
    signal.SIGTERM: (143, "tonnage: terminated; run the same command again to resume"),
}


def test_a_plan_of_a_store_is_that_of_the_directory(source: tuple[str, Path]) -> None:
    there, here = (json.loads(command("plan", place, "--tp", 2, "--json").stdout) for place in source)
    assert there["ranks"] == here["ranks"]
    assert there["checkpoint"]["digest"] == here["checkpoint"]["digest"]


@pytest.mark.parametrize("convert", ["none", "mxfp8"])
def test_preparing_from_a_store_writes_what_a_local_run_writes(
    source: tuple[str, Path], tmp_path: Path, convert: str
) -> None:
    outs = []
    for name, place in zip(("there", "here"), source, strict=True):
        outs.append(tmp_path / name)
        command("prepare", place, "--tp", 2, "--convert", convert, "-o", outs[-1])
    there, here = map(file_contents, outs)
    summary = json.loads(there.pop("prepare.json"))
    assert summary["identity"]["address"] == source[0]
    assert here.pop("prepare.json")
    assert there == here


def test_a_preparation_that_was_killed_goes_on(source: tuple[str, Path], tmp_path: Path) -> None:
    out, expected = tmp_path / "out", tmp_path / "expected"
    words = ["prepare", source[0], "--tp", 2, "--workers", 1, "-o", out]
    first = "model-00001-of-00001.safetensors"
    for moment in (".prepare/journal.jsonl", f"weights/tp2/rank-0/{first}", "config.json"):

        def reads_on(environ: dict[str, str], there: Path = out / moment) -> bool:
            return environ["PATH_INFO"].startswith(f"/{BUCKET}/checkpoint/") and there.exists()

        assert not (out / moment).exists()
        assert GATE.ended_at(reads_on, *words)
        assert (out / moment).exists()
        assert not (out / "prepare.json").exists()
    command(*words)
    command("prepare", source[1], "--tp", 2, "-o", expected)
    there, here = file_contents(out), file_contents(expected)
    assert there.pop("prepare.json")
    assert here.pop("prepare.json")
    assert there == here


def test_a_package_goes_to_a_store_and_comes_back(
    s3: Any, package: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    address = f"s3://{BUCKET}/there"
    done = command("export", package, "--key", keys[0], "--to", address, "--check", "--json")
    uploaded = json.loads(done.stdout)["uploaded"]
    whole = file_contents(package)
    assert objects(s3, "there") == whole
    total = sum(map(len, whole.values()))
    assert (uploaded["files"], uploaded["sent_bytes"], uploaded["read_bytes"]) == (len(whole), total, total)
    assert uploaded["confirmed"] == uploaded["sent"] == len(whole) - 2
    assert "verified" in command("verify", address, "--key", keys[1]).stdout
    command("fetch", address, "--key", keys[1], "-o", tmp_path / "back")
    assert file_contents(tmp_path / "back") == whole
    command("fetch", address, "--key", keys[1], "--rank", 1, "-o", tmp_path / "one")
    assert file_contents(tmp_path / "one") == {path: raw for path, raw in whole.items() if "rank-0" not in path}
    again = json.loads(command("export", package, "--key", keys[0], "--to", address, "--json").stdout)["uploaded"]
    assert (again["sent_bytes"], again["found_bytes"]) == (0, total)


@pytest.mark.parametrize(
    ("there", "number"),
    [*((there, signal.SIGKILL) for there in (1, 3, 5, 8)), (1, signal.SIGINT), (3, signal.SIGTERM)],
)
def test_killed_while_it_sends_there_is_no_package_and_the_next_run_sends_the_rest(
    s3: Any, package: Path, keys: tuple[Path, Path], there: int, number: int
) -> None:
    prefix = f"killed-{there}-{number}"
    words = ["export", package, "--key", keys[0], "--to", f"s3://{BUCKET}/{prefix}", "--json"]

    before = count()
    assert GATE.ended_at(lambda one: sends(one, prefix) and next(before) >= there, *words, number=number) or there == 8
    whole = file_contents(package)
    left = objects(s3, prefix)
    assert left.items() <= whole.items()
    assert "model.sig" not in left or left == whole
    assert "manifest.json" not in left or len(left) >= len(whole) - 1
    uploaded = json.loads(command(*words).stdout)["uploaded"]
    assert uploaded["found_bytes"] == sum(map(len, left.values()))
    assert objects(s3, prefix) == whole


def test_an_upload_that_was_killed_between_its_parts_leaves_nothing_that_is_paid_for(
    s3: Any, large: Path, keys: tuple[Path, Path]
) -> None:
    words = ["export", large, "--key", keys[0], "--to", f"s3://{BUCKET}/parts", "--json"]
    before = count()
    assert GATE.ended_at(
        lambda one: sends(one, "parts") and "partNumber" in one["QUERY_STRING"] and next(before) >= 1, *words
    )
    assert unfinished(s3, "parts")
    uploaded = json.loads(command(*words).stdout)["uploaded"]
    assert uploaded["aborted"] >= 1
    assert unfinished(s3, "parts") == []
    assert objects(s3, "parts") == file_contents(large)
    assert uploaded["confirmed"] == uploaded["sent"]


def test_a_file_that_is_not_as_signed_is_never_an_object_and_there_is_no_manifest(
    s3: Any, large: Path, tmp_path: Path
) -> None:
    spoiled = Path(shutil.copytree(large, tmp_path / "spoiled"))
    file = max(spoiled.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    with pytest.raises(PackageError, match="not as its manifest states; nothing of it was put there"):
        upload_package(spoiled, Objects(f"s3://{BUCKET}/spoiled"))
    there = objects(s3, "spoiled")
    assert not {file.relative_to(spoiled).as_posix(), "manifest.json", "model.sig"} & there.keys()
    assert unfinished(s3, "spoiled") == []


def test_another_package_is_left_alone_unless_it_is_to_be_removed(
    s3: Any, package: Path, large: Path, keys: tuple[Path, Path]
) -> None:
    address = f"s3://{BUCKET}/taken"
    upload_package(large, Objects(address))
    refused = command("export", package, "--key", keys[0], "--to", address, status=2).stderr
    assert "another package is here; --force removes it" in refused
    assert objects(s3, "taken") == file_contents(large)
    command("export", package, "--key", keys[0], "--to", address, "--force")
    assert objects(s3, "taken") == file_contents(package)
    s3.put_object(Bucket=BUCKET, Key="taken/notes.txt", Body=b"mine")
    refused = command("export", package, "--key", keys[0], "--to", address, status=2).stderr
    assert "objects that are not of this package" in refused
    assert "notes.txt" in refused


def test_an_object_without_a_digest_beside_it_is_read(s3: Any, package: Path) -> None:
    store = Objects(f"s3://{BUCKET}/bare")
    raw = (package / "plan.json").read_bytes()
    s3.put_object(Bucket=BUCKET, Key="bare/plan.json", Body=raw)
    assert upload_package(package, store).found_bytes == len(raw)
    assert store.stated_digest("config.json") is not None
    s3.put_object(Bucket=BUCKET, Key="bare/plan.json", Body=raw[:-1] + b"!")
    with pytest.raises(PackageError, match=r"not of this package are here.*plan\.json"):
        upload_package(package, store)


def test_reading_back_finds_what_a_digest_beside_an_object_hides(
    s3: Any, package: Path, keys: tuple[Path, Path]
) -> None:
    store = Objects(f"s3://{BUCKET}/rotten")
    upload_package(package, store)
    path = "weights/tp2/rank-1/model-00001-of-00001.safetensors"
    raw = (package / path).read_bytes()
    stated = {DIGEST: str(store.stated_digest(path))}
    s3.put_object(Bucket=BUCKET, Key=f"rotten/{path}", Body=raw[:-1] + bytes([raw[-1] ^ 1]), Metadata=stated)
    assert upload_package(package, store).sent_bytes == 0
    with pytest.raises(PackageError, match=f"{path}: the object is not what was sent"):
        upload_package(package, store, check=True)
    refused = command("verify", store.address, "--key", keys[1], status=4).stderr
    assert f"{path}: blake3 digest (rank 1)" in refused or path in refused


def test_what_a_store_refuses_is_said_in_one_line_without_secrets(
    package: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    said = command("export", package, "--key", keys[0], "--to", "s3://no-such-bucket/a", status=2).stderr
    assert said.startswith("tonnage: s3://no-such-bucket/a")
    assert len(said.splitlines()) == 1
    for words in (["--to", "https://example.com/a"], ["--to", "s3://x"], ["--force"], ["--check"]):
        command("export", package, "--key", keys[0], *words, status=2)
    command("fetch", f"s3://{BUCKET}/nothing", "--key", keys[1], "-o", tmp_path / "out", status=2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SourceError, match="not an object store"):
        Objects("/a/directory")


def test_the_commands_of_the_page_run(
    s3: Any, keys: tuple[Path, Path], source: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "remote.md").read_text()
    lines = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 6
    for key, name in zip(keys, ("key.pem", "key.pub.pem"), strict=True):
        shutil.copy(key, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub(source[1], repository="example-org/small-llama") as there:
        monkeypatch.setenv("HF_ENDPOINT", there.api.url)
        for line in lines:
            program, *words = line.split()
            assert program == "tonnage"
            command(*words)
    assert objects(s3, "small-llama-tp2") == file_contents(tmp_path / "prepared")
    assert (tmp_path / "small-llama-tp2" / "model.sig").exists()
