"""The sizes of a schedule: every output file before it is written, what the workers need, and a digest of it all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from tonnage.prepare.ahead import READ_AHEAD_BYTES
from tonnage.prepare.jobs import Job, Schedule, WholeFile
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.runs import requested_bytes, runs_of
from tonnage.prepare.windows import BLOCK_ELEMENTS
from tonnage.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PLAIN_WORKER_BYTES = 40 * MIB
"""Anonymous memory of a worker besides its windows: interpreter, numpy, one job."""
CONVERTING_WORKER_BYTES = 80 * MIB
"""The same with numba and the compiled kernels."""
REMOTE_WORKER_BYTES = 48 * MIB + 2 * READ_AHEAD_BYTES
"""What a worker needs besides for a source that is not on this machine: client library, and two readings of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSize:
    """One output file, known before it is written.

    Attributes:
        path: Relative to the output directory.
        rank: Global rank; ``None`` for a file of all ranks.
        payload_bytes: Bytes of tensors.
        file_bytes: Header included.
    """

    path: str
    rank: int | None
    payload_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSize:
    """What a task writes, or reads for a digest.

    Attributes:
        number: Position among the tasks; names it in the journal.
        source: Plain name of the file it reads; ``None`` if it reads none.
        outputs: Its files.
        jobs: Numbers of the jobs it does.
        file: Position of the whole file it writes among those of the schedule; ``None`` if it writes none.
        largest_scales: Bytes of the scales of its largest converted tensor; zero if it converts nothing.
        digested_bytes: Size of the source file whose digest it takes; ``None`` if it takes none.
        transfer_bytes: Bytes it reads over a network.
    """

    number: int
    source: str | None
    outputs: tuple[OutputSize, ...]
    jobs: tuple[int, ...] = ()
    file: int | None = None
    largest_scales: int = 0
    digested_bytes: int | None = None
    transfer_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        """Bytes written: payload of tensors, the whole of other files."""
        return sum(output.file_bytes if output.rank is None else output.payload_bytes for output in self.outputs)

    @property
    def digests_only(self) -> bool:
        """Whether it writes nothing."""
        return not self.outputs and self.digested_bytes is not None

    @property
    def progress_bytes(self) -> int:
        """Bytes of progress: written, or read for a digest."""
        return self.written_bytes + (self.digested_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A schedule's sizes.

    Attributes:
        tasks: Jobs, then whole files, then source files whose digest is taken, by number.
        digest: SHA-256 of the schedule: equal only if every byte has the same place.
        remote: Whether the source is read over a network.
    """

    tasks: tuple[TaskSize, ...]
    digest: str
    remote: bool = False

    @property
    def outputs(self) -> tuple[OutputSize, ...]:
        """All files."""
        return tuple(output for task in self.tasks for output in task.outputs)

    @property
    def written_bytes(self) -> int:
        """Bytes written by all tasks."""
        return sum(task.written_bytes for task in self.tasks)

    @property
    def progress_bytes(self) -> int:
        """Bytes of progress of all tasks."""
        return sum(task.progress_bytes for task in self.tasks)

    def payload_bytes(self, rank: int) -> int:
        """Bytes of tensors a rank gets."""
        return sum(output.payload_bytes for output in self.outputs if output.rank == rank)

    @property
    def transfer_bytes(self) -> int:
        """Bytes read over a network by all tasks."""
        return sum(task.transfer_bytes for task in self.tasks)

    def worker_bytes(self, window_bytes: int) -> int:
        """Anonymous memory a worker needs at most: windows read, gathered and hashed, codes, scales, what is ahead."""
        scales = max((task.largest_scales for task in self.tasks), default=0)
        ahead = REMOTE_WORKER_BYTES if self.remote else 0
        if scales:
            return CONVERTING_WORKER_BYTES + 4 * window_bytes + 2 * scales + ahead
        return PLAIN_WORKER_BYTES + 3 * window_bytes + ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """How files are read over a network: all jobs of one file are a task, so that it is read once.

    Attributes:
        window_bytes: Of the workers.
        digests: Whether whole files are read for their digest.
    """

    window_bytes: int
    digests: bool


def survey_schedule(schedule: Schedule, whole_bytes: Mapping[str, int], remote: Remote | None = None) -> Survey:
    """Return the sizes of a schedule, each of its jobs made once.

    Args:
        schedule: What is to be done.
        whole_bytes: Sizes of the source files that come along whole.
        remote: How the source is read; ``None`` if it is on this machine.
    """
    digest = hashlib.sha256()
    tasks: list[TaskSize] = []
    for numbers, jobs in _together(schedule.jobs, remote):
        for job in jobs:
            _add_job(digest, job)
        tasks.append(_pass_size(len(tasks), numbers, jobs, remote))
    for place, file in enumerate(schedule.files):
        _add_file(digest, file)
        tasks.append(_whole_size(len(tasks), place, file, whole_bytes, remote))
    _add_end(digest, schedule)
    _check_paths(tasks)
    return Survey(tasks=tuple(tasks), digest=digest.hexdigest(), remote=remote is not None)


def digest_schedule(schedule: Schedule) -> str:
    """Return the digest of a schedule, as :attr:`Survey.digest` is of the one that was surveyed."""
    digest = hashlib.sha256()
    for job in schedule.jobs:
        _add_job(digest, job)
    for file in schedule.files:
        _add_file(digest, file)
    _add_end(digest, schedule)
    return digest.hexdigest()


def with_digests(survey: Survey, source_bytes: Mapping[str, int]) -> Survey:
    """Return a survey in which the digest of every one of these source files is taken.

    What comes over a network is hashed by the task that does its jobs; of other files a task more does it, so that a
    run may go on with digests that was begun without. The digest of the schedule stays: what is written does not depend
    on what is hashed besides.
    """
    carried = {task.source for task in survey.tasks if task.jobs} if survey.remote else set()
    tasks = [_with_digest(task, source_bytes) if task.jobs and survey.remote else task for task in survey.tasks]
    for name, nbytes in sorted(source_bytes.items()):
        if name not in carried:
            over = nbytes if survey.remote else 0
            digest = TaskSize(number=len(tasks), source=name, outputs=(), digested_bytes=nbytes, transfer_bytes=over)
            tasks.append(digest)
    return replace(survey, tasks=tuple(tasks))


def _with_digest(task: TaskSize, source_bytes: Mapping[str, int]) -> TaskSize:
    """Return a task that also reads its source file once from its first byte to its last."""
    nbytes = source_bytes[task.source or ""]
    return replace(task, digested_bytes=nbytes, transfer_bytes=task.transfer_bytes + nbytes)


def in_order(tasks: Iterable[TaskSize]) -> list[TaskSize]:
    """Return tasks in the order they are begun: the larger first, so that the workers end together.

    Sizes count by powers of two only, so that jobs of one file stay together while its pages are in memory; the digest
    of a file is taken right before the first of them.
    """
    tasks = list(tasks)
    first: dict[str | None, tuple[int, int]] = {}
    for task in tasks:
        if not task.digests_only:
            first[task.source] = min(_place(task), first.get(task.source, _place(task)))

    def place(task: TaskSize) -> tuple[tuple[int, int], bool]:
        jobs = first.get(task.source) if task.digests_only else None
        return jobs or _place(task), not task.digests_only

    return sorted(tasks, key=place)


def _place(task: TaskSize) -> tuple[int, int]:
    return -task.progress_bytes.bit_length(), task.number


def _add_job(digest: hashlib._Hash, job: Job) -> None:
    _add(digest, msgspec.json.encode(job))


def _add_file(digest: hashlib._Hash, file: WholeFile) -> None:
    _add(digest, msgspec.json.encode((file.path, file.source)))
    _add(digest, file.content)


def _add_end(digest: hashlib._Hash, schedule: Schedule) -> None:
    _add(digest, msgspec.json.encode((schedule.ranks, schedule.scale_rule)))


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _together(jobs: Iterable[Job], remote: Remote | None) -> Iterator[tuple[tuple[int, ...], tuple[Job, ...]]]:
    """Yield jobs that are one task, with their numbers: neighbours of one file if it comes over a network."""
    by_file = groupby(enumerate(jobs), key=lambda numbered: numbered[1].source_file if remote else numbered[0])
    for _, numbered in by_file:
        numbers, together = zip(*numbered, strict=True)
        yield numbers, together


def _pass_size(number: int, numbers: tuple[int, ...], jobs: tuple[Job, ...], remote: Remote | None) -> TaskSize:
    outputs = []
    for output in (one for job in jobs for one in job.outputs):
        payload = output.payload_bytes
        nbytes = len(header_bytes(output)) + payload
        outputs.append(OutputSize(path=output.path, rank=output.rank, payload_bytes=payload, file_bytes=nbytes))
    steps = (step for job in jobs for step in job.steps if step.convert)
    elements = (step.source.shape[0] * step.source.shape[1] for step in steps)
    runs = runs_of(jobs, digest=remote.digests) if remote else ()
    beside = [run.spans(remote.window_bytes) for run in runs if not run.carried] if remote else []
    return TaskSize(
        number=number,
        source=jobs[0].source_file,
        outputs=tuple(outputs),
        jobs=numbers,
        largest_scales=max(elements, default=0) // BLOCK_ELEMENTS,
        transfer_bytes=sum(map(requested_bytes, beside)),
    )


def _whole_size(
    number: int, place: int, file: WholeFile, whole_bytes: Mapping[str, int], remote: Remote | None
) -> TaskSize:
    nbytes = len(file.content) if file.source is None else whole_bytes[file.source]
    output = OutputSize(path=file.path, rank=None, payload_bytes=0, file_bytes=nbytes)
    over = nbytes if remote and file.source is not None else 0
    return TaskSize(number=number, source=file.source, outputs=(output,), file=place, transfer_bytes=over)


def _check_paths(tasks: Iterable[TaskSize]) -> None:
    seen: set[str] = set()
    for task in tasks:
        for output in task.outputs:
            if output.path in seen:
                raise ValueError(f"{output.path}: two tasks write this file")
            seen.add(output.path)
