"""The worker against numpy: hand-made jobs, every file read back by the safetensors library."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from blake3 import blake3

from samples import PATIENCE
from tonnage.errors import TonnageError
from tonnage.formats.dtypes import payload_bytes
from tonnage.prepare.io import NewFile, PrepareError, source_facts, source_states
from tonnage.prepare.jobs import Job, OutputFile, OutputTensor, SourceFile, SourceTensor, Step, Take, WholeFile
from tonnage.prepare.journal import SourceDigest
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.messages import BUG_STATUS, Setup, Task
from tonnage.prepare.pool import Worker, run_tasks, started
from tonnage.prepare.windows import cut_tensor, merged, pieces
from tonnage.prepare.worker import answer_task, run_task
from tonnage.sources.addresses import open_source
from tonnage.sources.local import LocalSource
from tonnage.sources.model import FileFacts

SHARD = "model.safetensors"
RANGES = tuple[tuple[int, int], ...]


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def write_source(directory: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> dict[str, SourceTensor]:
    """Write a shard file by hand and return where its tensors are."""
    directory.mkdir(exist_ok=True)
    document: dict[str, Any] = {}
    payload = b""
    for name, (dtype, shape, data) in tensors.items():
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
        payload += data
    header = json.dumps(document).encode()
    (directory / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + payload)
    return {
        name: SourceTensor(
            file=SHARD, name=name, dtype=dtype, shape=shape, begin=8 + len(header) + document[name]["data_offsets"][0]
        )
        for name, (dtype, shape, _) in tensors.items()
    }


def one_tensor_job(
    source: SourceTensor, takes: dict[int, tuple[int | None, RANGES, int]], shapes: dict[int, tuple[int, ...]]
) -> Job:
    """A job that copies one tensor: rank to axis, ranges and zero bytes."""
    return Job(
        number=0,
        source_file=SHARD,
        steps=(
            Step(
                source=source,
                convert=False,
                takes=tuple(
                    Take(rank=rank, axis=axis, ranges=ranges, begin=0, zero_bytes=zeros)
                    for rank, (axis, ranges, zeros) in takes.items()
                ),
            ),
        ),
        outputs=tuple(
            OutputFile(
                rank=rank,
                path=f"weights/rank-{rank}/model.safetensors",
                tensors=(OutputTensor(name=source.name, dtype=source.dtype, shape=shapes[rank], begin=0),),
                metadata=(("format", "pt"),),
            )
            for rank in takes
        ),
    )


def task_of(job: Job, setup: Setup) -> Task:
    source = open_source(setup.address)
    (facts,), states = source_facts(source, [SHARD]), source_states(source, [SHARD])
    headers = tuple(map(header_bytes, job.outputs))
    return Task(number=3, work=job, source=facts, headers=headers, state=states[SHARD])


def digest_task(setup: Setup) -> Task:
    source = open_source(setup.address)
    (facts,), states = source_facts(source, [SHARD]), source_states(source, [SHARD])
    return Task(number=7, work=SourceFile(name=SHARD), source=facts, state=states[SHARD])


def nothing(_nbytes: int) -> None:
    """Progress nobody asked for."""


def read_back(path: Path, name: str) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor, as the library reads them."""
    found = dict(safetensors.deserialize(path.read_bytes()))[name]
    return found["dtype"], tuple(found["shape"]), bytes(found["data"])


# --- copying ----------------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (24, 40), "stack": (3, 8, 20), "vector": (64,), "long rows": (2, 600)}
CUTS: dict[str, tuple[str, int | None, tuple[RANGES, ...]]] = {
    "rows in two": ("matrix", 0, (((0, 12),), ((12, 24),))),
    "rows, uneven, several ranges": ("matrix", 0, (((0, 5), (20, 24)), ((5, 20),))),
    "rows held twice": ("matrix", 0, (((0, 8),), ((0, 8),), ((8, 24),))),
    "columns in two": ("matrix", 1, (((0, 20),), ((20, 40),))),
    "columns, several ranges": ("matrix", 1, (((0, 3), (9, 10), (30, 40)), ((3, 9),))),
    "experts": ("stack", 0, (((0, 1),), ((1, 3),))),
    "rows of every expert": ("stack", 1, (((0, 4),), ((4, 8),))),
    "columns of every expert": ("stack", 2, (((0, 10),), ((10, 20),))),
    "a vector": ("vector", 0, (((0, 33),), ((33, 64),))),
    "columns of rows beyond the window": ("long rows", 1, (((0, 100), (500, 600)), ((100, 500),))),
    "whole, for both": ("matrix", None, ((), ())),
}


@pytest.mark.parametrize("window_bytes", [16, 100, 1000, 8 << 20])
@pytest.mark.parametrize(("kind", "axis", "ranges"), CUTS.values(), ids=CUTS)
def test_every_rank_gets_its_slice_in_any_window(
    tmp_path: Path, kind: str, axis: int | None, ranges: tuple[RANGES, ...], window_bytes: int
) -> None:
    shape = SHAPES[kind]
    whole = np.frombuffer(random_bytes(2 * prod(shape)), "<u2").reshape(shape)
    source = write_source(tmp_path / "source", {"a.weight": ("BF16", shape, whole.tobytes())})["a.weight"]
    expected = [
        whole if axis is None else np.concatenate([whole.take(range(*one), axis) for one in mine], axis)
        for mine in ranges
    ]
    job = one_tensor_job(
        source,
        {rank: (axis, mine, 0) for rank, mine in enumerate(ranges)},
        {rank: part.shape for rank, part in enumerate(expected)},
    )
    setup = Setup(address=str(tmp_path / "source"), output=tmp_path / "out", window_bytes=window_bytes)
    seen: list[int] = []
    record = run_task(task_of(job, setup), setup, seen.append)
    for part, output, written in zip(expected, job.outputs, record.files, strict=True):
        path = tmp_path / "out" / output.path
        assert read_back(path, "a.weight") == ("BF16", part.shape, part.tobytes())
        assert written.digest == blake3(path.read_bytes()).hexdigest()
        assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (written.file_bytes, written.payload_bytes) == (path.stat().st_size, part.nbytes)
    assert sum(seen) == job.written_bytes


PADDED = {
    "rows": (0, ((20, 24),), 3 * 40 * 2, ((0, 3), (0, 0))),
    "columns of every row": (1, ((30, 40),), 6 * 2, ((0, 0), (0, 6))),
    "nothing but padding": (0, (), 2 * 40 * 2, ((0, 2), (0, 0))),
}


@pytest.mark.parametrize("window_bytes", [16, 8 << 20])
@pytest.mark.parametrize(("axis", "ranges", "zero_bytes", "padding"), PADDED.values(), ids=PADDED)
def test_padding_is_zeros_behind_what_is_taken(
    tmp_path: Path, axis: int, ranges: RANGES, zero_bytes: int, padding: Any, window_bytes: int
) -> None:
    whole = np.frombuffer(random_bytes(2 * 24 * 40), "<u2").reshape(24, 40)
    source = write_source(tmp_path / "source", {"embed": ("BF16", (24, 40), whole.tobytes())})["embed"]
    taken = whole.take(range(*ranges[0]), axis) if ranges else whole[:0]
    expected = np.pad(taken, padding)
    job = one_tensor_job(source, {0: (axis, ranges, zero_bytes)}, {0: expected.shape})
    setup = Setup(address=str(tmp_path / "source"), output=tmp_path / "out", window_bytes=window_bytes)
    run_task(task_of(job, setup), setup, nothing)
    assert read_back(tmp_path / "out" / job.outputs[0].path, "embed")[2] == expected.tobytes()


def test_four_bit_tensors_are_cut_between_bytes() -> None:
    takes = (Take(rank=0, axis=1, ranges=((0, 6),), begin=0), Take(rank=1, axis=1, ranges=((6, 8),), begin=0))
    grid, cuts = cut_tensor(takes, (4, 8), 4, where="w")
    assert (grid.rows, grid.row_bytes) == (4, 4)
    assert [cut.spans for cut in cuts] == [((0, 3),), ((3, 4),)]
    with pytest.raises(ValueError, match="cut inside a byte"):
        cut_tensor((replace(takes[0], ranges=((0, 5),)),), (4, 8), 4, where="w")


WRONG = {
    "not ascending": (((4, 8), (0, 4)), "do not ascend"),
    "overlapping": (((0, 5), (4, 8)), "do not ascend"),
    "beyond the tensor": (((4, 9),), "outside the tensor"),
}


@pytest.mark.parametrize(("ranges", "message"), WRONG.values(), ids=WRONG)
def test_ranges_that_cannot_be_are_a_bug(ranges: RANGES, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_tensor((Take(rank=0, axis=0, ranges=ranges, begin=0),), (8, 2), 16, where="w")


def test_spans_are_merged_and_cut_into_pieces() -> None:
    assert merged([(10, 20), (0, 5), (5, 7), (15, 25)]) == [(0, 7), (10, 25)]
    assert list(pieces([(0, 7), (10, 12)], 4)) == [(0, 4), (4, 7), (10, 12)]


def test_scalars_and_empty_tensors_are_written(tmp_path: Path) -> None:
    tensors = write_source(
        tmp_path / "source", {"scalar": ("F32", (), b"\x01\x02\x03\x04"), "empty": ("BF16", (0, 4), b"")}
    )
    job = Job(
        number=0,
        source_file=SHARD,
        steps=tuple(
            Step(source=tensors[name], convert=False, takes=(Take(rank=0, axis=None, ranges=(), begin=begin),))
            for name, begin in (("scalar", 0), ("empty", 4))
        ),
        outputs=(
            OutputFile(
                rank=0,
                path="a.safetensors",
                tensors=(
                    OutputTensor(name="scalar", dtype="F32", shape=(), begin=0),
                    OutputTensor(name="empty", dtype="BF16", shape=(0, 4), begin=4),
                ),
            ),
        ),
    )
    setup = Setup(address=str(tmp_path / "source"), output=tmp_path / "out")
    run_task(task_of(job, setup), setup, nothing)
    assert read_back(tmp_path / "out" / "a.safetensors", "scalar") == ("F32", (), b"\x01\x02\x03\x04")
    assert read_back(tmp_path / "out" / "a.safetensors", "empty") == ("BF16", (0, 4), b"")


def test_sha256_alone_is_the_one_of_hashlib(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out", hash="sha256", window_bytes=64)
    (written,) = run_task(task_of(job, setup), setup, nothing).files
    digest = hashlib.sha256((tmp_path / "out" / written.path).read_bytes()).hexdigest()
    assert (written.digest, written.sha256) == (digest, None)


@pytest.mark.parametrize("window_bytes", [1, 100, 8 << 20])
def test_files_that_come_along_are_copied(tmp_path: Path, window_bytes: int) -> None:
    (tmp_path / "tokenizer.json").write_bytes(random_bytes(1000))
    setup = Setup(address=str(tmp_path), output=tmp_path / "out", window_bytes=window_bytes)
    facts = source_facts(LocalSource(tmp_path), ["tokenizer.json"])[0]
    task = Task(number=0, work=WholeFile(path="sub/tokenizer.json", source="tokenizer.json"), source=facts)
    (written,) = run_task(task, setup, nothing).files
    assert (tmp_path / "out" / "sub" / "tokenizer.json").read_bytes() == random_bytes(1000)
    digests = tuple(function(random_bytes(1000)).hexdigest() for function in (blake3, hashlib.sha256))
    assert (written.rank, written.file_bytes, written.digest, written.sha256) == (None, 1000, *digests)


@pytest.mark.parametrize(("name", "function"), [("blake3", blake3), ("sha256", hashlib.sha256)])
@pytest.mark.parametrize("window_bytes", [7, 1000, 8 << 20])
def test_the_digest_of_a_source_file_is_that_of_all_its_bytes(
    tmp_path: Path, name: Any, function: Any, window_bytes: int
) -> None:
    for nbytes in (0, 1000):
        (tmp_path / SHARD).write_bytes(random_bytes(nbytes))
        read: list[int] = []
        setup = Setup(address=str(tmp_path), output=tmp_path / "out", hash=name, window_bytes=window_bytes)
        record = run_task(digest_task(setup), setup, read.append)
        digest = function(random_bytes(nbytes)).hexdigest()
        assert (record.job, record.files, record.converted) == (7, (), ())
        assert record.sources == (SourceDigest(name=SHARD, nbytes=nbytes, digest=digest),)
        assert sum(read) == nbytes
    assert not (tmp_path / "out").exists()


# --- converting -------------------------------------------------------------------------------------------------------


def reference(values: np.ndarray[Any, Any]) -> tuple[bytes, bytes]:
    """Codes and scales of a matrix by the rceil rule, element by element in float64 and ml_dtypes."""
    rows, columns = values.shape
    blocks = values.astype(np.float64).reshape(rows, columns // 32, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 448)).astype(int)
    codes = np.ldexp(blocks, -exponents[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.tobytes(), (exponents + 127).astype(np.uint8).tobytes()


def converting_job(source: SourceTensor, axis: int | None, ranges: tuple[RANGES, ...]) -> Job:
    rows, columns = source.shape
    takes, outputs = [], []
    for rank, mine in enumerate(ranges):
        taken = sum(end - begin for begin, end in mine)
        shape = {None: (rows, columns), 0: (taken, columns), 1: (rows, taken)}[axis]
        takes.append(Take(rank=rank, axis=axis, ranges=mine, begin=0, scale_begin=prod(shape)))
        tensors = (
            OutputTensor(name="w", dtype="F8_E4M3", shape=shape, begin=0),
            OutputTensor(name="w_scale", dtype="U8", shape=(shape[0], shape[1] // 32), begin=prod(shape)),
        )
        outputs.append(OutputFile(rank=rank, path=f"rank-{rank}.safetensors", tensors=tensors))
    step = Step(source=source, convert=True, takes=tuple(takes))
    return Job(number=0, source_file=SHARD, steps=(step,), outputs=tuple(outputs))


CONVERTED: dict[str, tuple[int | None, tuple[RANGES, ...]]] = {
    "whole": (None, ((), ())),
    "rows": (0, (((0, 7),), ((7, 12),))),
    "rows, several ranges, not all taken": (0, (((0, 2), (9, 12)), ((4, 5),))),
    "columns": (1, (((0, 64),), ((64, 96),))),
    "columns, several ranges": (1, (((0, 32), (64, 96)), ((32, 64),))),
}


@pytest.mark.parametrize("window_bytes", [16, 400, 8 << 20])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("axis", "ranges"), CONVERTED.values(), ids=CONVERTED)
def test_slices_of_the_conversion_equal_the_conversion_of_the_whole(
    tmp_path: Path, axis: int | None, ranges: tuple[RANGES, ...], dtype: str, window_bytes: int
) -> None:
    kind = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}[dtype]
    values = np.random.default_rng(1).normal(size=(12, 96)).astype(kind)
    source = write_source(tmp_path / "source", {"w": (dtype, (12, 96), values.tobytes())})["w"]
    codes, scales = (
        np.frombuffer(raw, np.uint8).reshape(12, width) for raw, width in zip(reference(values), (96, 3), strict=True)
    )
    job = converting_job(source, axis, ranges)
    setup = Setup(address=str(tmp_path / "source"), output=tmp_path / "out", window_bytes=window_bytes)
    record = run_task(task_of(job, setup), setup, nothing)
    for mine, output in zip(ranges, job.outputs, strict=True):
        parts = []
        for whole, per in ((codes, 1), (scales, 32 if axis == 1 else 1)):
            spans = [range(begin // per, end // per) for begin, end in mine]
            parts.append(whole if axis is None else np.concatenate([whole.take(one, axis) for one in spans], axis))
        path = tmp_path / "out" / output.path
        assert read_back(path, "w")[2] == parts[0].tobytes()
        assert read_back(path, "w_scale")[2] == parts[1].tobytes()
    (figures,) = record.converted
    assert figures.tensor == "w"
    if axis == 1 or axis is None:
        decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(12, 3, 32)
        decoded *= np.ldexp(1.0, scales.astype(int) - 127)[..., None]
        error = decoded.reshape(12, 96) - values.astype(np.float64)
        assert figures.relative_error == pytest.approx(
            np.linalg.norm(error) / np.linalg.norm(values.astype(np.float64)), rel=1e-4
        )
        assert figures.largest_error == pytest.approx(np.abs(error).max(), rel=1e-4)
        assert figures.sqnr_db == pytest.approx(-20 * np.log10(figures.relative_error), rel=1e-6)
        assert figures.elements == 12 * 96


def test_a_value_that_is_not_finite_is_refused_by_name_and_position(tmp_path: Path) -> None:
    values = np.ones((12, 64), np.float32)
    values[9, 33] = np.nan
    source = write_source(tmp_path / "source", {"w": ("F32", (12, 64), values.tobytes())})["w"]
    job = converting_job(source, 1, (((0, 32),), ((32, 64),)))
    setup = Setup(address=str(tmp_path / "source"), output=tmp_path / "out", window_bytes=1024)
    with pytest.raises(TonnageError, match=r"model.safetensors: w: a value that is not finite.*found at \[9, 33\]"):
        run_task(task_of(job, setup), setup, nothing)
    assert list((tmp_path / "out").iterdir()) == []
    record = run_task(task_of(job, setup), replace(setup, keep_nonfinite=True), nothing)
    assert record.converted[0].nonfinite_blocks == 1


# --- what goes wrong --------------------------------------------------------------------------------------------------


def plain_job(tmp_path: Path) -> tuple[Path, Job]:
    whole = random_bytes(payload_bytes("BF16", (64, 32)))
    source = write_source(tmp_path / "source", {"w": ("BF16", (64, 32), whole)})["w"]
    return tmp_path / "source", one_tensor_job(source, {0: (None, (), 0)}, {0: (64, 32)})


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_another(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    raw, times = path.read_bytes(), path.stat()
    path.rename(path.with_suffix(".before"))
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def write_over(path: Path) -> None:
    """Change a byte of it, and give it the time it had."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shorter": (shorten, "changed since it was planned; expected .* bytes"),
    "touched": (touch, "changed since it was planned; expected .*mtime"),
    "another of its size and time": (
        put_another,
        "changed since it was planned; .* another file of this size and time",
    ),
    "written over, its time put back": (write_over, "changed since it was planned; .* or one that was written to"),
    "gone": (Path.unlink, "cannot be read"),
    "a pipe": (make_pipe, "not a regular file"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_source_that_changed_is_refused(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out")
    task = task_of(job, setup)
    change(source / SHARD)
    with pytest.raises(TonnageError, match=message):
        run_task(task, setup, nothing)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_source_that_changed_has_no_digest(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    setup = Setup(address=str(plain_job(tmp_path)[0]), output=tmp_path / "out")
    task = digest_task(setup)
    change(Path(setup.address) / SHARD)
    with pytest.raises(TonnageError, match=message):
        run_task(task, setup, nothing)


def test_a_source_that_changes_while_its_digest_is_taken_has_none(tmp_path: Path) -> None:
    setup = Setup(address=str(plain_job(tmp_path)[0]), output=tmp_path / "out", window_bytes=1024)
    with pytest.raises(TonnageError, match="changed since it was planned"):
        run_task(digest_task(setup), setup, lambda _nbytes: touch(Path(setup.address) / SHARD))


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out", window_bytes=1024)
    with pytest.raises(TonnageError, match="changed since it was planned"):
        run_task(task_of(job, setup), setup, lambda _nbytes: touch(source / SHARD))
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_a_source_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out", window_bytes=1024)
    with pytest.raises(TonnageError, match="truncated while it was read"):
        run_task(task_of(job, setup), setup, lambda _nbytes: os.truncate(source / SHARD, 1500))


def test_until_a_file_is_whole_it_has_no_final_name(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out", window_bytes=256)
    names: list[set[str]] = []
    folder = (tmp_path / "out" / job.outputs[0].path).parent
    run_task(task_of(job, setup), setup, lambda _nbytes: names.append({path.name for path in folder.iterdir()}))
    assert len(names) == 16
    assert all(name == {".model.safetensors.job-3.partial"} for name in names)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors"}


def test_a_schedule_with_holes_is_a_bug_and_writes_nothing(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    step = job.steps[0]
    job = replace(job, steps=(replace(step, takes=(replace(step.takes[0], begin=2),)),))
    setup = Setup(address=str(source), output=tmp_path / "out")
    with pytest.raises(ValueError, match="rank 0 is at byte 0, the schedule at 2"):
        run_task(task_of(job, setup), setup, nothing)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_too_few_bytes_are_a_bug_and_get_no_final_name(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    job = replace(job, steps=())
    setup = Setup(address=str(source), output=tmp_path / "out")
    with pytest.raises(ValueError, match="planned"):
        run_task(task_of(job, setup), setup, nothing)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "weights").mkdir(parents=True)
    (tmp_path / "out" / "weights" / "rank-0").symlink_to(tmp_path / "elsewhere")
    setup = Setup(address=str(source), output=tmp_path / "out")
    with pytest.raises(TonnageError, match="rank-0: in the way of the output; expected a directory; found a link"):
        run_task(task_of(job, setup), setup, nothing)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_facts_name_every_missing_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    assert source_facts(LocalSource(tmp_path), ["a"]) == (
        FileFacts(name="a", nbytes=3, version=f"mtime {(tmp_path / 'a').stat().st_mtime_ns} ns"),
    )
    with pytest.raises(TonnageError) as caught:
        source_facts(LocalSource(tmp_path), ["b", "a", "c"])
    assert [problem.where for problem in caught.value.problems] == ["b", "c"]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_without_room_nothing_is_left_open_or_behind(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(PrepareError, match=r"no space left|file too large for the limit"):
        NewFile(tmp_path / "big", (1 << 63) - 1, tag="job-0")
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


# --- the process, and the run that watches it -------------------------------------------------------------------------


@contextmanager
def lone_worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket, Setup]]:
    """A worker process whose run is this test: what it says is read, what it is told is any bytes."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tonnage.prepare.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            yield process, ours, Setup(address=str(tmp_path / "source"), output=tmp_path / "out")
        finally:
            process.kill()
            process.communicate()


def framed(message: object) -> bytes:
    raw = pickle.dumps(message)
    return len(raw).to_bytes(4, "big") + raw


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said


@pytest.mark.parametrize("told", [0, 2, 4, 30])
@pytest.mark.parametrize("after_setup", [False, True])
def test_a_worker_ends_in_silence_wherever_its_run_is_cut_off(tmp_path: Path, told: int, after_setup: bool) -> None:
    with lone_worker(tmp_path) as (process, run, setup):
        run.sendall((framed(setup) if after_setup else b"") + framed(setup)[:told])
        run.close()
        assert ends(process) == (1, "")


def test_a_worker_that_is_told_nonsense_ends(tmp_path: Path) -> None:
    with lone_worker(tmp_path) as (process, run, setup):
        run.sendall(framed(setup) + (8).to_bytes(4, "big") + b"nonsense")
        assert ends(process)[0] == 1


def test_a_worker_ends_in_order_when_told_so(tmp_path: Path) -> None:
    with lone_worker(tmp_path) as (process, run, setup):
        run.sendall(framed(setup) + framed(None))
        assert ends(process) == (0, "")


def test_a_bug_in_a_worker_has_a_status_of_its_own(tmp_path: Path) -> None:
    with lone_worker(tmp_path) as (process, run, setup):
        run.sendall(framed(setup) + framed("no task"))
        status, said = ends(process)
        assert status == BUG_STATUS
        assert "AttributeError" in said.splitlines()[-1]


@pytest.mark.parametrize("kind", [OSError, MemoryError, ImportError, RuntimeError, SystemError])
def test_a_system_that_gives_nothing_is_an_answer_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise kind("error return without exception set")

    monkeypatch.setattr("tonnage.prepare.worker.run_task", fails)
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out")
    said: list[object] = []
    answer_task(task_of(job, setup), setup, said.append)
    problem = "job 3 (model.safetensors): its worker failed; run the same command again to resume; found "
    assert [str(one) for one in said[-1].problems] == [f"{problem}{kind.__name__}: error return without exception set"]


def pretender(code: str) -> Worker:
    """A worker of the pool that is another program: it has the socket as ``s``."""
    ours, theirs = socket.socketpair()
    said = os.memfd_create("said")
    with theirs:
        script = f"import os, signal, socket, sys, time; s = socket.socket(fileno={theirs.fileno()})\n{code}"
        process = subprocess.Popen([sys.executable, "-c", script], pass_fds=(theirs.fileno(),), stderr=said)
    return Worker(process=process, connection=Connection(ours.detach()), said=said)


DEATHS = {
    "before a message": (
        "os.kill(os.getpid(), 9)",
        r"killed; run the same.* resume; found SIGKILL \(out of memory\?\)",
    ),
    "in a length": ("s.recv(9); s.send(b'\\0'); os.kill(os.getpid(), 9)", "killed.*found SIGKILL"),
    "in a record": ("s.recv(9); s.send(b'\\0\\0\\0\\x09abc'); os.kill(os.getpid(), 9)", "killed.*found SIGKILL"),
    "nonsense": ("s.recv(9); s.send(b'\\0\\0\\0\\x03abc'); os._exit(3)", "failed.*found status 3"),
    "by signal 36": ("os.kill(os.getpid(), 36)", "killed.*found signal 36, process"),
    "with last words": (
        "sys.exit('first\\nno memory\\n')",
        r"job 3 \(model.safetensors\): its worker failed.*status 1.*: no memory$",
    ),
    "in order": ("s.recv(9)", "failed; run the same command again to resume; found status 0"),
}


@pytest.mark.parametrize(("code", "message"), DEATHS.values(), ids=DEATHS)
def test_a_worker_that_is_gone_is_refused_in_one_line(tmp_path: Path, code: str, message: str) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out")
    worker = pretender(code)
    try:
        with pytest.raises(PrepareError, match=message) as caught:
            list(run_tasks([task_of(job, setup)], setup, [worker]))
        assert len(str(caught.value).splitlines()) == 1
    finally:
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()
        os.close(worker.said)


def test_a_bug_in_a_worker_is_shown_with_its_traceback(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out")
    job = replace(job, steps=())
    with (
        (tmp_path / "lock").open("w") as lock,
        started(1, lock.fileno()) as workers,
        pytest.raises(RuntimeError, match=r"(?s)a bug in a worker, at job 3.*Traceback.*ValueError: .*planned"),
    ):
        list(run_tasks([task_of(job, setup)], setup, workers))


def test_telling_a_dead_worker_something_is_refused_although_sigpipe_kills(tmp_path: Path) -> None:
    source, job = plain_job(tmp_path)
    setup = Setup(address=str(source), output=tmp_path / "out")
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with (tmp_path / "lock").open("w") as lock, started(1, lock.fileno()) as workers:
            workers[0].process.kill()
            workers[0].process.wait()
            with pytest.raises(PrepareError, match=r"its worker was killed.*SIGKILL"):
                list(run_tasks([task_of(job, setup)], setup, workers))
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_more_workers_than_the_system_lets_start_are_refused(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = open_files()
    with (tmp_path / "lock").open("w") as lock:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, before[1]))
        try:
            with (
                pytest.raises(PrepareError, match=r"--workers: a process cannot be started.*Too many open files"),
                started(40, lock.fileno()),
            ):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert open_files() == files
