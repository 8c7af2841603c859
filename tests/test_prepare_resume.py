"""What a preparation may remove, believe and leave behind: nothing of a stranger's, and no lie in ``prepare.json``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from samples import rehearse
from tonnage.api import open_checkpoint
from tonnage.cli import app
from tonnage.engines import engine
from tonnage.errors import TonnageError
from tonnage.placement import place
from tonnage.prepare import resume, run
from tonnage.prepare.checks import check_destination, disk_free_bytes
from tonnage.prepare.output_dir import locked
from tonnage.prepare.preparation import Preparation
from tonnage.prepare.reader import open_rank
from tonnage.prepare.request import PrepareOptions, prepare_placement
from tonnage.prepare.resume import check_output
from tonnage.prepare.run import Standing, run_preparation
from tonnage.topology import Topology

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
Lie = Callable[[dict[str, Any]], Any]


class _KilledError(BaseException):
    """Stands for a kill: nothing after it is done but what the system does."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    path = tmp_path_factory.mktemp("resume") / "source"
    rehearse(path)
    return path


@pytest.fixture(scope="module")
def complete(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete preparation; not to be changed."""
    out = tmp_path_factory.mktemp("complete") / "out"
    prepare(source, out)
    return out


@pytest.fixture
def out(complete: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(complete, tmp_path / "out")


@pytest.fixture
def begun(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preparation stopped before its summary, everything else written."""
    out = tmp_path / "begun"
    with monkeypatch.context() as patch:
        patch.setattr(run, "check_held", kill)
        with pytest.raises(_KilledError):
            prepare(source, out)
    return out


def kill(*_: object) -> None:
    raise _KilledError


def preparation_of(source: Path, out: Path, tp: int = 2, *, source_digests: bool = True) -> Preparation:
    checkpoint = open_checkpoint(source)
    assert checkpoint.headers is not None
    placement = place(checkpoint.assignment, Topology(tp=tp), engine("split"))
    options = PrepareOptions(workers=1, source_digests=source_digests)
    ranks = [{"rank": rank, "weights_bytes": placement.module_bytes(0, rank)} for rank in range(tp)]
    return prepare_placement(
        placement,
        source,
        out,
        options,
        headers=checkpoint.headers,
        digest=checkpoint.digest,
        plan={"schema": "tonnage.plan/1", "ranks": ranks},
    )


def prepare(source: Path, out: Path, tp: int = 2, *, force: bool = False, source_digests: bool = True) -> list[int]:
    """Prepare; return the bytes of earlier runs, and all."""
    seen: list[Standing] = []
    run_preparation(preparation_of(source, out, tp, source_digests=source_digests), seen.append, force=force)
    return [seen[0].resumed_bytes, seen[-1].done_bytes] if seen else []


def refused(source: Path, out: Path, tp: int = 2, *, force: bool = False) -> str:
    """Prepare in vain, dry and in earnest; nothing changes, both say the same."""
    before = everything(out)
    preparation = preparation_of(source, out, tp)
    with pytest.raises(TonnageError) as dry:
        check_output(preparation, force=force)
    assert everything(out) == before
    with pytest.raises(TonnageError) as caught:
        run_preparation(preparation, lambda _: None, force=force)
    assert {name: raw for name, raw in everything(out).items() if name != ".prepare/lock"} == {
        name: raw for name, raw in before.items() if name != ".prepare/lock"
    }
    assert str(dry.value) == str(caught.value)
    return str(caught.value)


def summary(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "prepare.json").read_bytes())
    return document


def without_shards(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in sources if not one["name"].endswith(".safetensors")]


def everything(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


# --- nothing of a stranger's is removed -------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_file_with_a_planned_name_is_refused(
    source: Path, complete: Path, tmp_path: Path, force: bool
) -> None:
    name = next(name for name in everything(complete) if name.endswith(".safetensors"))
    (tmp_path / "new" / name).parent.mkdir(parents=True)
    (tmp_path / "new" / name).write_text("mine")
    assert name in refused(source, tmp_path / "new", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_with_a_planned_name_that_the_begun_run_did_not_write_is_refused(
    source: Path, begun: Path, force: bool
) -> None:
    name = next(name for name in everything(begun) if name.endswith(".safetensors"))
    journal = begun / ".prepare" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    (begun / name).write_text("mine")
    assert name in refused(source, begun, force=force)


def test_force_refuses_foreign_files_before_it_removes_anything(source: Path, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    assert refused(source, out, tp=4, force=True).endswith("found notes.txt")


@pytest.mark.parametrize("force", [False, True])
def test_the_run_of_a_directory_below_keeps_its_temporary_files(source: Path, begun: Path, force: bool) -> None:
    inner = begun.rename(begun.with_name("inner"))
    parent = inner.parent / "parent"
    parent.mkdir()
    inner.rename(parent / "inner")
    (parent / "inner" / ".model.safetensors.job-1.partial").write_text("half")
    assert "inner/" in refused(source, parent, force=force)


@pytest.mark.parametrize("force", [False, True])
def test_the_state_of_a_stranger_is_left_alone(source: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "new" / ".prepare").mkdir(parents=True)
    (tmp_path / "new" / ".prepare" / "mine").write_text("mine")
    assert ".prepare/mine" in refused(source, tmp_path / "new", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_the_summary_of_a_stranger_is_left_alone(source: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "prepare.json").write_text('{"mine": 1}')
    assert "prepare.json" in refused(source, tmp_path / "new", force=force)


def test_a_lock_with_another_name_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("1234567890 and more")
    os.link(tmp_path / "mine", tmp_path / "lock")
    with (
        pytest.raises(TonnageError, match="expected a regular file with one name; found 2 hard links"),
        locked(tmp_path / "lock"),
    ):
        pass
    (tmp_path / "lock").unlink()
    (tmp_path / "mine").rename(tmp_path / "lock")
    with pytest.raises(TonnageError, match="not the lock of a preparation"), locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "1234567890 and more"


# --- killed anywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["complete", "begun"])
@pytest.mark.parametrize("step", range(1, 12))
def test_force_killed_anywhere_is_gone_on_with(
    source: Path, out: Path, begun: Path, monkeypatch: pytest.MonkeyPatch, step: int, kind: str
) -> None:
    """Every removal and every list is a step; the run is killed before one of them."""
    output = out if kind == "complete" else begun
    left = [step]
    unlink = Path.unlink

    def count(path: Path, missing_ok: bool = False) -> None:
        if path.is_relative_to(output) and path.exists():
            left[0] -= 1
            if left[0] <= 0:
                raise _KilledError
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", count)
        patch.setattr(resume, "is_still", lambda *_: False)  # the killed do not tidy up
        patch.setattr(run, "check_held", kill)
        with suppress(_KilledError):
            prepare(source, output, tp=1, force=True)
    with suppress(TonnageError):
        prepare(source, output, tp=1)
    prepare(source, output, tp=1, force=True)
    assert not (output / ".prepare").exists()
    assert not any(name.endswith(".partial") or "tp2" in name for name in everything(output))


def test_a_run_that_is_refused_for_disk_space_leaves_no_directory(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.prepare.checks.disk_free_bytes", lambda _: -(1 << 40))
    assert "not enough disk space" in refused(source, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert "not enough disk space" in refused(source, out, tp=4, force=True)  # and removes nothing


# --- removed meanwhile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["", ".prepare"])
def test_what_is_removed_during_a_run_is_a_refusal(source: Path, tmp_path: Path, gone: str) -> None:
    new = tmp_path / "new"
    with pytest.raises(TonnageError):
        run_preparation(preparation_of(source, new), lambda _: shutil.rmtree(new / gone, ignore_errors=True))


def test_a_state_removed_after_completion_is_no_failure(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = resume.completed

    def remove_and_return(preparation: Preparation) -> object:
        shutil.rmtree(out / ".prepare")
        return completed(preparation)

    monkeypatch.setattr(run, "completed", remove_and_return)
    prepare(source, out)


def test_destinations_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for output in ("loop/x", "n" * 300 + "/x", "gone/" + "n" * 300, "file/x"):
        with pytest.raises(TonnageError, match="output cannot be used"):
            check_destination(Path("source"), Path(output))
    with pytest.raises(TonnageError, match="output cannot be used"):
        disk_free_bytes(Path("n" * 300) / "x")


# --- lies -------------------------------------------------------------------------------------------------------------


def _first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["ranks"][0]["files"][0]
    return found


LIES: dict[str, Lie] = {
    "rank of a file": lambda document: _first(document).update(rank=1),
    "payload of a file": lambda document: _first(document).update(payload_bytes=1),
    "size of a file": lambda document: _first(document).update(file_bytes=1),
    "digest": lambda document: _first(document).update(digest="0"),
    "SHA-256": lambda document: _first(document).update(sha256="0"),
    "a file outside": lambda document: document["files"].append({**_first(document), "path": "../../../etc/passwd"}),
    "a file twice": lambda document: document["ranks"][0]["files"].append(_first(document)),
    "a file less": lambda document: document["ranks"][1]["files"].pop(),
    "a rank less": lambda document: document["ranks"].pop(),
    "a rank twice": lambda document: document["ranks"].append(document["ranks"][0]),
    "name of a source": lambda document: document["sources"][0].update(name="other"),
    "size of a source": lambda document: document["sources"][0].update(nbytes=1),
    "digest of a source": lambda document: document["sources"][0].update(digest="0"),
    "a source less": lambda document: document["sources"].pop(),
    "a plan of nothing": lambda document: document.update(plan={}),
    "another plan": lambda document: document["plan"]["ranks"][1].update(weights_bytes=1),
    "planned bytes": lambda document: document["ranks"][0].update(planned_bytes=1),
    "payload of a rank": lambda document: document["ranks"][0].update(payload_bytes=1),
    "a converted tensor": lambda document: document["converted"].append(
        dict.fromkeys(("elements", "nonfinite_blocks", "relative_error", "sqnr_db", "largest_error"), 0)
        | {"tensor": "w"}
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_summary_is_believed_only_if_it_says_what_was_planned(source: Path, out: Path, lie: Lie) -> None:
    document = json.loads((out / "prepare.json").read_bytes())
    lie(document)
    (out / "prepare.json").write_text(json.dumps(document))
    assert "not as planned; --force starts over; expected " in refused(source, out)


@pytest.mark.parametrize(
    "change",
    [{"rank": 1}, {"rank": 7}, {"payload_bytes": 1}, {"digest": "no"}, {"digest": "A" * 64}, {"sha256": "A" * 64}],
)
def test_a_journal_that_lies_is_written_anew(source: Path, begun: Path, complete: Path, change: dict[str, Any]) -> None:
    path = begun / ".prepare" / "journal.jsonl"
    identity, *records = path.read_bytes().splitlines()
    lies = []
    for record in map(json.loads, records):
        if record["files"] and record["files"][0]["rank"] == 0:
            record["files"][0].update(change)
        lies.append(json.dumps(record).encode())
    path.write_bytes(b"\n".join([identity, *lies, b""]))
    prepare(source, begun)
    found, wanted = (json.loads((one / "prepare.json").read_bytes()) for one in (begun, complete))
    assert (found["ranks"], found["files"]) == (wanted["ranks"], wanted["files"])


@pytest.mark.parametrize("change", [{"name": "config.json"}, {"nbytes": 1}, {"digest": None}, {"digest": "A" * 64}])
def test_a_digest_that_cannot_be_is_taken_anew(
    source: Path, begun: Path, complete: Path, change: dict[str, Any]
) -> None:
    path = begun / ".prepare" / "journal.jsonl"
    identity, *records = path.read_bytes().splitlines()
    lies = [json.loads(record) for record in records]
    sources = [one for record in lies for one in record["sources"]]
    assert [one["name"] for one in sources] == ["model.safetensors"]
    sources[0].update(change)
    path.write_bytes(b"\n".join([identity, *(json.dumps(record).encode() for record in lies), b""]))
    prepare(source, begun)
    found, wanted = (json.loads((one / "prepare.json").read_bytes()) for one in (begun, complete))
    assert found["sources"] == wanted["sources"]


def test_force_removes_nothing_outside_whatever_is_recorded(source: Path, out: Path) -> None:
    document = json.loads((out / "prepare.json").read_bytes())
    document["files"].append({**_first(document), "path": "../mine"})
    (out / "prepare.json").write_text(json.dumps(document))
    (out.parent / "mine").write_text("mine")
    assert "not a path inside the output directory" in refused(source, out, force=True)
    assert (out.parent / "mine").read_text() == "mine"


def test_a_dry_run_refuses_another_identity(source: Path, begun: Path) -> None:
    assert "begun with another topology" in refused(source, begun, tp=1)


def test_a_summary_nested_beyond_reading_is_refused(source: Path, out: Path) -> None:
    (out / "prepare.json").write_bytes(b'{"plan":' + b'{"a":' * 100_000)
    assert "not the summary of a preparation" in refused(source, out)


# --- digests of the source --------------------------------------------------------------------------------------------


def test_digests_an_earlier_run_took_are_not_taken_again(source: Path, begun: Path) -> None:
    shard = source / "model.safetensors"
    times = shard.stat()
    shard.rename(shard.with_suffix(".kept"))
    try:
        shutil.copyfile(shard.with_suffix(".kept"), shard)
        with shard.open("r+b") as file:  # what was hashed is not what is there now: only a second reading could tell
            file.seek(-1, os.SEEK_END)
            file.write(bytes([shard.with_suffix(".kept").read_bytes()[-1] ^ 1]))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        resumed, done = prepare(source, begun)
    finally:
        shard.with_suffix(".kept").replace(shard)
    assert resumed == done > shard.stat().st_size
    (digest,) = [one["digest"] for one in summary(begun)["sources"] if one["name"] == shard.name]
    assert digest == blake3(shard.read_bytes()).hexdigest()


def test_a_run_begun_without_digests_takes_them_when_it_goes_on_with_them(
    source: Path, complete: Path, begun: Path
) -> None:
    journal = begun / ".prepare" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"sources":[{"name"' not in line or b'"schema"' in line))
    resumed, done = prepare(source, begun)
    assert done - resumed == (source / "model.safetensors").stat().st_size
    assert summary(begun)["sources"] == summary(complete)["sources"]


def test_a_run_begun_with_digests_may_go_on_without_them(source: Path, complete: Path, begun: Path) -> None:
    prepare(source, begun, source_digests=False)
    assert without_shards(summary(begun)["sources"]) == without_shards(summary(complete)["sources"])
    assert summary(begun)["ranks"] == summary(complete)["ranks"]


def test_a_complete_preparation_without_digests_is_left_as_it_is(source: Path, complete: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", source_digests=False)
    before = everything(tmp_path / "out")
    assert [one["digest"] for one in summary(tmp_path / "out")["sources"] if "safetensors" in one["name"]] == [None]
    assert prepare(source, tmp_path / "out") == []
    assert everything(tmp_path / "out") == before
    assert {**before, "prepare.json": b""} == {**everything(complete), "prepare.json": b""}


def test_a_summary_of_a_version_without_sources_and_plan_is_left_as_it_is(source: Path, out: Path) -> None:
    document = summary(out)
    del document["sources"], document["plan"]
    (out / "prepare.json").write_text(json.dumps(document))
    assert prepare(source, out) == []
    assert summary(out) == document


def test_a_summary_of_a_version_that_took_one_digest_is_left_as_it_is(source: Path, out: Path) -> None:
    document = summary(out)
    for file in (*document["files"], *(file for rank in document["ranks"] for file in rank["files"])):
        del file["sha256"]
    (out / "prepare.json").write_text(json.dumps(document))
    assert prepare(source, out) == []
    assert summary(out) == document


def test_two_preparations_differ_in_times_only(source: Path, complete: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "again")
    documents = [summary(one) for one in (complete, tmp_path / "again")]
    for document in documents:
        del document["seconds"], document["worker_seconds"]
    assert json.dumps(documents[0]) == json.dumps(documents[1])
    first, second = everything(complete), everything(tmp_path / "again")
    assert {**first, "prepare.json": b""} == {**second, "prepare.json": b""}


# --- a finished package -----------------------------------------------------------------------------------------------


@pytest.fixture
def package(out: Path) -> Path:
    """A directory as export leaves it."""
    (out / "prepare.json").unlink()
    for name in ("manifest.json", "plan.json", "provenance.json", "model.sig"):
        (out / name).write_text("{}")
    return out


@pytest.mark.parametrize("force", [False, True])
def test_a_finished_package_is_refused_in_one_line(source: Path, package: Path, force: bool) -> None:
    said = refused(source, package, force=force)
    assert said == (
        f"{package}: a finished package; expected a new or an empty directory; found manifest.json and model.sig"
    )
    assert not (package / ".prepare").exists()


def test_a_rank_of_a_finished_package_is_opened(complete: Path, package: Path) -> None:
    with open_rank(package, 1) as rank, open_rank(complete, 1) as before:
        assert rank.tensors == before.tensors


@pytest.mark.parametrize("missing", ["manifest.json", "model.sig"])
def test_without_manifest_and_signature_there_is_no_package_to_open(package: Path, missing: str) -> None:
    (package / missing).unlink()
    with pytest.raises(TonnageError, match=r"not complete; expected prepare\.json, or a signed package"):
        open_rank(package, 1)


def test_what_a_package_says_of_itself_does_not_come_along(source: Path, package: Path, tmp_path: Path) -> None:
    again = shutil.copytree(source, tmp_path / "source")
    for name in ("manifest.json", "plan.json", "provenance.json", "model.sig"):
        shutil.copyfile(package / name, again / name)
    prepare(again, tmp_path / "new")
    assert everything(tmp_path / "new").keys() == {*everything(package), "prepare.json"} - {
        "manifest.json",
        "plan.json",
        "provenance.json",
        "model.sig",
    }


# --- a dry run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_over_a_complete_preparation_needs_no_memory(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.prepare.checks.memory_available_bytes", lambda: 1)
    words = ["prepare", str(source), "--tp", "2", "--workers", "1", "--dry-run", "-o"]
    assert CliRunner().invoke(app, [*words, str(out)], catch_exceptions=False).exit_code == 0
    with pytest.raises(TonnageError, match=r"^memory: not enough"):
        CliRunner().invoke(app, [*words, str(tmp_path / "new")], catch_exceptions=False)
