"""In which order files are read, and the reading ahead, against a file of known bytes."""

from __future__ import annotations

import hashlib
import threading
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import CheckpointError, Problem
from tonnage.prepare import ahead
from tonnage.prepare.ahead import PIECES_AHEAD, HashedReader, ReadAhead
from tonnage.prepare.jobs import Job, SourceTensor, Step, Take
from tonnage.prepare.runs import GAP_BYTES, PIECE_BYTES, requested_bytes, requests, runs_of
from tonnage.sources.model import FileFacts

CONTENT = hashlib.shake_128(b"file").digest(300_000)
FACTS = FileFacts(name="a", nbytes=len(CONTENT), version="1")
edges = st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=12, unique=True).map(sorted)
spans = edges.map(lambda found: list(zip(found[::2], found[1::2], strict=False)))


class Bytes:
    """A file in memory that counts how many read it at once."""

    facts = FACTS
    state = ""

    def __init__(self, content: bytes = CONTENT, fails_at: int | None = None) -> None:
        self.content, self.fails_at = content, fails_at
        self.asked: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def read_into(self, view: memoryview, offset: int) -> None:
        with self.lock:
            self.asked.append((offset, offset + len(view)))
        if self.fails_at is not None and offset <= self.fails_at < offset + len(view):
            raise CheckpointError(Problem(where="a", what="broken"))
        view[:] = self.content[offset : offset + len(view)]

    def read(self, nbytes: int, offset: int) -> bytes:
        return self.content[offset : offset + nbytes]

    def current_facts(self) -> FileFacts:
        return FACTS


@given(spans)
def test_requests_cover_what_is_wanted_in_order_and_bridge_small_gaps_only(wanted: list[tuple[int, int]]) -> None:
    asked = list(requests(wanted))
    assert all(0 < end - begin <= PIECE_BYTES for begin, end in asked)
    assert all(first[1] <= second[0] for first, second in pairwise(asked))
    for begin, end in wanted:
        covered = sum(min(end, last) - max(begin, first) for first, last in asked if first < end and begin < last)
        assert covered == end - begin
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(wanted)]
    bridged = sum(gap for gap in gaps if gap <= GAP_BYTES)
    assert requested_bytes(wanted) == sum(end - begin for begin, end in wanted) + bridged


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_read_ahead_is_the_file(data: Any) -> None:
    found = sorted(data.draw(st.lists(st.integers(0, len(CONTENT)), max_size=12, unique=True)))
    wanted = list(zip(found[::2], found[1::2], strict=False))
    window = data.draw(st.integers(1, 100_000))
    with closing(ReadAhead(Bytes(), wanted)) as reader:
        for begin, end in wanted:
            for place in range(begin, end, window):
                view = bytearray(min(window, end - place))
                reader.read_into(memoryview(view), place)
                assert view == CONTENT[place : place + len(view)]


def test_no_more_is_read_ahead_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE_BYTES", 1000)
    monkeypatch.setattr(ahead, "requests", lambda _spans: [(n, n + 1000) for n in range(0, 100_000, 1000)])
    file = Bytes()
    with closing(ReadAhead(file, [])) as reader:
        for number in range(100):
            view = bytearray(1000)
            reader.read_into(memoryview(view), number * 1000)
            assert view == CONTENT[number * 1000 : number * 1000 + 1000]
            assert len(file.asked) <= number + 1 + PIECES_AHEAD
    assert sorted(file.asked) == [(n, n + 1000) for n in range(0, 100_000, 1000)]


def test_only_what_was_announced_can_be_read_and_only_forwards() -> None:
    with closing(ReadAhead(Bytes(), [(100, 200)])) as reader:
        reader.read_into(memoryview(bytearray(10)), 150)
        reader.read_into(memoryview(bytearray(10)), 190)
        with pytest.raises(ValueError, match="byte 200 was not announced"):
            reader.read_into(memoryview(bytearray(1)), 200)
    with closing(ReadAhead(Bytes(), [(100, 200)])) as reader, pytest.raises(ValueError, match="byte 50 is behind"):
        reader.read_into(memoryview(bytearray(10)), 100) or reader.read_into(memoryview(bytearray(1)), 50)


def test_what_fails_ahead_fails_where_it_is_asked_for() -> None:
    with closing(ReadAhead(Bytes(fails_at=150_000), [(0, 300_000)])) as reader, pytest.raises(CheckpointError):
        reader.read_into(memoryview(bytearray(300_000)), 0)


@pytest.mark.parametrize("window", [1, 7, 100_000, 1 << 20])
def test_a_file_is_hashed_whole_whatever_is_read_of_it(window: int) -> None:
    content = CONTENT[: 3000 if window < 100 else None]
    counted: list[int] = []
    reader = HashedReader(Bytes(content), len(content), [hashlib.sha256()], counted.append, window)
    for begin, end in ((10, 30), (30, 31), (2000, 2900)):
        view = bytearray(end - begin)
        reader.read_into(memoryview(view), begin)
        assert view == content[begin:end]
    with pytest.raises(ValueError, match="byte 2899 was read already"):
        reader.read_into(memoryview(bytearray(1)), 2899)
    assert reader.finish() == (hashlib.sha256(content).hexdigest(),)
    assert sum(counted) == len(content)


def step(begin: int, rows: int, *, convert: bool = False) -> Step:
    source = SourceTensor(file="a", name=f"t{begin}", dtype="BF16", shape=(rows, 32), begin=begin)
    take = Take(rank=0, axis=None, ranges=((0, rows),), begin=0, scale_begin=0 if convert else None)
    return Step(source=source, convert=convert, takes=(take,))


def job(*steps: Step, number: int = 0) -> Job:
    return Job(number=number, source_file="a", steps=steps, outputs=())


CASES = {
    "in order": ([job(step(0, 1), step(64, 2))], [(0, [0, 64], True)]),
    "the larger run is carried": (
        [job(step(64, 1), step(0, 1), step(128, 9))],
        [(0, [64], False), (0, [0, 128], True)],
    ),
    "two jobs": (
        [job(step(0, 1), step(128, 1)), job(step(256, 1), step(192, 1), number=1)],
        [(0, [0, 128], True), (1, [256], True), (1, [192], False)],
    ),
    "what the first job passed is read beside": (
        [job(step(256, 4)), job(step(0, 1), number=1)],
        [(0, [256], True), (1, [0], False)],
    ),
    "a job without steps": ([job()], []),
}


@pytest.mark.parametrize(("jobs", "expected"), CASES.values(), ids=CASES)
def test_the_steps_of_jobs_are_runs_of_the_file(jobs: list[Job], expected: list[Any]) -> None:
    runs = runs_of(jobs, digest=True)
    assert [(run.job, [one.source.begin for one in run.steps], run.carried) for run in runs] == expected
    without = runs_of(jobs, digest=False)
    assert [run.steps for run in without] == [run.steps for run in runs]
    assert not any(run.carried for run in without)
