"""The journal, the identity and the lock: what a run may believe of an earlier one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import TonnageError
from tonnage.prepare.io import NewFile, own_tag, write_whole
from tonnage.prepare.journal import (
    ConvertedTensor,
    Identity,
    JobRecord,
    Journal,
    SourceDigest,
    WrittenFile,
    check_identity,
    create_journal,
    read_journal,
)
from tonnage.prepare.output_dir import (
    check_foreign,
    find_partials,
    locked,
    path_within,
    remove_partials,
    remove_recorded,
)
from tonnage.sources.model import FileFacts

IDENTITY = Identity(
    checkpoint="c0ffee",
    sources=(
        FileFacts(name="a", nbytes=10, version="mtime 1 ns"),
        FileFacts(name="b", nbytes=20, version="mtime 2 ns"),
    ),
    recipe="llama 1",
    topology="tp2 ep1 pp1",
    engine="split",
    convert="mxfp8",
    scale_rule="rceil",
    nonfinite="refuse",
    layout="tp",
    quant_style="compressed-tensors",
    hash="blake3",
    ranks=(0, 1),
    schedule="5ced",
)
RECORDS = (
    *(
        JobRecord(
            job=number,
            files=(
                WrittenFile(
                    path=f"rank-{number}/é.safetensors",
                    rank=number,
                    payload_bytes=1,
                    file_bytes=2,
                    digest="d",
                    sha256="s" if number else None,
                ),
            ),
            converted=(
                ConvertedTensor(
                    tensor="w", elements=32, nonfinite_blocks=0, relative_error=0.1, sqnr_db=None, largest_error=1e-3
                ),
            ),
            seconds=0.5,
        )
        for number in (4, 0)
    ),
    JobRecord(
        job=2,
        files=(),
        converted=(),
        seconds=0.1,
        sources=(SourceDigest(name="a", nbytes=10, digest="d" * 64),),
    ),
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal of three jobs."""
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "journal.jsonl"
    open_journal = create_journal(path, IDENTITY)
    for record in RECORDS:
        open_journal.append(record)
    open_journal.close()
    return path


def test_a_journal_reads_back(journal: Path) -> None:
    raw = journal.read_bytes()
    assert read_journal(raw, where="journal") == (IDENTITY, RECORDS, len(raw))


def test_a_line_of_a_version_that_took_no_digests_of_sources_reads(journal: Path) -> None:
    raw = journal.read_bytes().replace(b',"sources":[]}', b"}")
    assert read_journal(raw, where="journal") == (IDENTITY, RECORDS, len(raw))


def test_a_line_torn_anywhere_is_as_if_it_had_not_been_written(journal: Path) -> None:
    raw = journal.read_bytes()
    last = raw.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(raw)):
        assert read_journal(raw[:end], where="journal") == (IDENTITY, RECORDS[:2], last)


TAILS = {
    "zeros": b"\0" * 40,
    "zeros with an end": b"\0" * 40 + b"\n",
    "half a line": b'{"job":7,"fi',
    "no UTF-8": b'{"job":"\xff',
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_what_a_crash_leaves_is_cut_off_before_the_next_line(journal: Path, tail: bytes) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    identity, records, good_bytes = read_journal(journal.read_bytes(), where="journal")
    assert (identity, records, good_bytes) == (IDENTITY, RECORDS, len(whole))
    again = Journal(journal, good_bytes)
    again.append(RECORDS[0])
    again.close()
    assert read_journal(journal.read_bytes(), where="journal")[1] == (*RECORDS, RECORDS[0])


DAMAGE = {
    "empty": lambda _raw: b"",
    "no identity": lambda raw: raw[:20],
    "another file": lambda _raw: b"hello\nworld\n",
    "a line in the middle": lambda raw: raw.replace(b'"job":0', b'"job":x'),
    "a field is missing": lambda raw: raw.replace(b'"engine"', b'"motor"'),
    "deeper than anything": lambda raw: raw + b'{"job":' + b"[" * 100_000 + b"\n",
    "a wrong type": lambda raw: raw.replace(b'"file_bytes":2', b'"file_bytes":"2"', 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_journal_is_refused(journal: Path, damage: Any) -> None:
    with pytest.raises(TonnageError, match=r"^journal: damaged journal; --force starts over; found "):
        read_journal(damage(journal.read_bytes()), where="journal")


OTHER: dict[str, Any] = {"format_version": 2, "ranks": (0,)}


@pytest.mark.parametrize("name", [field.name for field in fields(Identity) if field.name != "sources"])
def test_every_field_of_the_identity_counts_and_is_named(name: str) -> None:
    now = replace(IDENTITY, **{name: OTHER.get(name, "other")})
    with pytest.raises(TonnageError) as caught:
        check_identity(IDENTITY, now, where="out")
    then, called = getattr(IDENTITY, name), "choice of ranks" if name == "ranks" else name
    assert str(caught.value) == (
        f"out: begun with another {called}; --force starts over; expected as then: {then}; found now: {OTHER.get(name, 'other')}"
    )


def test_a_schedule_that_follows_from_what_is_named_is_not_named_as_well() -> None:
    with pytest.raises(TonnageError) as caught:
        check_identity(IDENTITY, replace(IDENTITY, topology="tp4", schedule="other"), where="out")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("out: begun with another topology; ")


def test_changed_sources_are_named_with_what_changed() -> None:
    changed = (
        FileFacts(name="a", nbytes=10, version="mtime 9 ns"),
        FileFacts(name="c", nbytes=1, version="mtime 1 ns"),
    )
    with pytest.raises(TonnageError) as caught:
        check_identity(IDENTITY, replace(IDENTITY, sources=changed, hash="sha256"), where="out")
    start = "--force starts over; expected as then:"
    assert str(caught.value).splitlines() == [
        f"out: begun with another source a; {start} 10 bytes, mtime 1 ns; found now: 10 bytes, mtime 9 ns",
        f"out: begun with another source b; {start} 20 bytes, mtime 2 ns; found now: absent",
        f"out: begun with another source c; {start} absent; found now: 1 bytes, mtime 1 ns",
        f"out: begun with another hash; {start} blake3; found now: sha256",
    ]


def test_an_equal_identity_passes() -> None:
    check_identity(IDENTITY, replace(IDENTITY), where="out")


# --- the lock ---------------------------------------------------------------------------------------------------------

HOLDER = """
import pathlib, sys
from tonnage.prepare.output_dir import locked
with locked(pathlib.Path(sys.argv[1])) as descriptor:
    print("held", flush=True)
    sys.stdin.read()
"""
HEIR = """
import pathlib, subprocess, sys
from tonnage.prepare.output_dir import locked
with locked(pathlib.Path(sys.argv[1])) as descriptor:
    heir = subprocess.Popen(["cat"], stdin=sys.stdin, stdout=subprocess.DEVNULL, pass_fds=[descriptor])
    print("held", flush=True)
    heir.wait()
"""


def hold(script: str, path: Path) -> subprocess.Popen[bytes]:
    """Hold a lock in another process until its standard input ends."""
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_a_second_run_is_refused_and_told_who_is_at_work(tmp_path: Path) -> None:
    process = hold(HOLDER, tmp_path / "lock")
    with (
        pytest.raises(TonnageError, match=f"another preparation is writing here; found process {process.pid}"),
        locked(tmp_path / "lock"),
    ):
        pass
    release(process)
    with locked(tmp_path / "lock"):
        pass


def test_the_kernel_releases_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    process = hold(HOLDER, tmp_path / "lock")
    process.kill()
    release(process)
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_what_is_left_of_a_killed_run_still_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = hold(HEIR, tmp_path / "lock")
    assert process.stdin is not None
    process.kill()
    process.wait()
    monkeypatch.setattr("tonnage.prepare.output_dir.LOCK_WAIT_SECONDS", 0.2)
    with pytest.raises(TonnageError, match="another preparation is writing here"), locked(tmp_path / "lock"):
        pass
    monkeypatch.undo()
    release(process)  # ends the heir
    with locked(tmp_path / "lock"):
        pass


def test_a_removed_lock_file_is_no_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        (tmp_path / "lock").unlink()
        with locked(tmp_path / "lock"):
            pass


# --- the output directory ---------------------------------------------------------------------------------------------

OUTSIDE = ["../a", "/a", "a/../../b", "a//b", "", ".", "a/.", "a/\0"]


@pytest.mark.parametrize("relative", OUTSIDE)
def test_paths_that_leave_the_directory_are_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(TonnageError, match="not a path inside the output directory"):
        path_within(tmp_path, relative)


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    with pytest.raises(TonnageError, match="expected a regular file; found a link"):
        path_within(tmp_path, "a")


def test_only_unfinished_files_of_ours_are_removed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    kept = [".c.job-1.partial", "a", "sub/.a.job-1.partial", "sub/.b.partial", "sub/b.job-1.partial"]
    for name in (*kept, ".a.job-1.partial", "sub/.b.whole.partial", ".a.whole-0123456789abcdef.partial"):
        (tmp_path / name).touch()
    remove_partials(tmp_path, {"a", "sub/b", "gone/c"})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == kept


def test_two_writers_of_one_file_each_publish_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync = tmp_path / "record.json", os.fsync
    seen = []

    def between(descriptor: int) -> None:
        """While the first writer is at its bytes, a second one comes and goes."""
        monkeypatch.setattr(os, "fsync", sync)
        write_whole(path, b"second")
        seen.append(path.read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", between)
    write_whole(path, b"the first")
    assert (seen, path.read_bytes(), list(tmp_path.iterdir())) == ([b"second"], b"the first", [path])


def test_what_a_killed_writer_left_is_known_as_ours(tmp_path: Path) -> None:
    file = NewFile(tmp_path / "plan.json", 4, tag=own_tag())
    (left,) = tmp_path.iterdir()
    assert find_partials(tmp_path, {"plan.json"}) == (left,)
    file.close()


def test_foreign_files_are_named(tmp_path: Path) -> None:
    (tmp_path / ".prepare").mkdir()
    for name in (".prepare/lock", "ours", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(TonnageError, match=r"output is in use; expected a new or an empty.*; found link, notes.txt$"):
        check_foreign(tmp_path, {"ours"})


def test_recorded_files_are_removed_with_their_directories(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/1", "a/b/2", "a/kept"):
        (tmp_path / name).touch()
    remove_recorded(tmp_path, {"a/b/1", "a/b/2", "gone/3"})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/kept"]
    with pytest.raises(TonnageError, match="not a path inside"):
        remove_recorded(tmp_path, {"../x"})
