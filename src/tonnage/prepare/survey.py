"""The sizes of a schedule: every output file before it is written, what the workers need, and a digest of it all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from tonnage.prepare.jobs import Job, Schedule, WholeFile
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.windows import BLOCK_ELEMENTS
from tonnage.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PLAIN_WORKER_BYTES = 40 * MIB
"""Anonymous memory of a worker besides its windows: interpreter, numpy, one job."""
CONVERTING_WORKER_BYTES = 80 * MIB
"""The same with numba and the compiled kernels."""


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
        number: Position among jobs, then whole files, then source files; names it in the journal.
        source: Plain name of the file it reads; ``None`` if it reads none.
        outputs: Its files.
        largest_scales: Bytes of the scales of its largest converted tensor; zero if it converts nothing.
        digested_bytes: Size of the source file whose digest it takes; ``None`` if it takes none.
    """

    number: int
    source: str | None
    outputs: tuple[OutputSize, ...]
    largest_scales: int = 0
    digested_bytes: int | None = None

    @property
    def written_bytes(self) -> int:
        """Bytes written: payload of tensors, the whole of other files."""
        return sum(output.file_bytes if output.rank is None else output.payload_bytes for output in self.outputs)

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
    """

    tasks: tuple[TaskSize, ...]
    digest: str

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

    def worker_bytes(self, window_bytes: int) -> int:
        """Anonymous memory a worker needs at most: read and gathered windows, codes, scales."""
        scales = max((task.largest_scales for task in self.tasks), default=0)
        if scales:
            return CONVERTING_WORKER_BYTES + 3 * window_bytes + 2 * scales
        return PLAIN_WORKER_BYTES + 2 * window_bytes


def survey_schedule(schedule: Schedule, whole_bytes: Mapping[str, int]) -> Survey:
    """Return the sizes of a schedule, each of its jobs made once.

    Args:
        schedule: What is to be done.
        whole_bytes: Sizes of the source files that come along whole.
    """
    digest = hashlib.sha256()
    tasks = []
    for number, job in enumerate(schedule.jobs):
        _add(digest, msgspec.json.encode(job))
        tasks.append(_job_size(number, job))
    for number, file in enumerate(schedule.files, start=len(tasks)):
        _add(digest, msgspec.json.encode((file.path, file.source)))
        _add(digest, file.content)
        tasks.append(_whole_size(number, file, whole_bytes))
    _add(digest, msgspec.json.encode((schedule.ranks, schedule.scale_rule)))
    _check_paths(tasks)
    return Survey(tasks=tuple(tasks), digest=digest.hexdigest())


def with_digests(survey: Survey, source_bytes: Mapping[str, int]) -> Survey:
    """Return a survey with a task more for the digest of every one of these source files.

    The digest of the schedule stays: what is written does not depend on what is hashed besides.
    """
    tasks = tuple(
        TaskSize(number=number, source=name, outputs=(), digested_bytes=nbytes)
        for number, (name, nbytes) in enumerate(sorted(source_bytes.items()), start=len(survey.tasks))
    )
    return replace(survey, tasks=survey.tasks + tasks)


def in_order(tasks: Iterable[TaskSize]) -> list[TaskSize]:
    """Return tasks in the order they are begun: the larger first, so that the workers end together.

    Sizes count by powers of two only, so that jobs of one file stay together while its pages are in memory; the digest
    of a file is taken right before the first of them.
    """
    tasks = list(tasks)
    first: dict[str | None, tuple[int, int]] = {}
    for task in tasks:
        if task.digested_bytes is None:
            first[task.source] = min(_place(task), first.get(task.source, _place(task)))

    def place(task: TaskSize) -> tuple[tuple[int, int], bool]:
        jobs = None if task.digested_bytes is None else first.get(task.source)
        return jobs or _place(task), task.digested_bytes is None

    return sorted(tasks, key=place)


def _place(task: TaskSize) -> tuple[int, int]:
    return -task.progress_bytes.bit_length(), task.number


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _job_size(number: int, job: Job) -> TaskSize:
    outputs = []
    for output in job.outputs:
        payload = output.payload_bytes
        nbytes = len(header_bytes(output)) + payload
        outputs.append(OutputSize(path=output.path, rank=output.rank, payload_bytes=payload, file_bytes=nbytes))
    elements = (step.source.shape[0] * step.source.shape[1] for step in job.steps if step.convert)
    scales = max(elements, default=0) // BLOCK_ELEMENTS
    return TaskSize(number=number, source=job.source_file, outputs=tuple(outputs), largest_scales=scales)


def _whole_size(number: int, file: WholeFile, whole_bytes: Mapping[str, int]) -> TaskSize:
    nbytes = len(file.content) if file.source is None else whole_bytes[file.source]
    output = OutputSize(path=file.path, rank=None, payload_bytes=0, file_bytes=nbytes)
    return TaskSize(number=number, source=file.source, outputs=(output,))


def _check_paths(tasks: Iterable[TaskSize]) -> None:
    seen: set[str] = set()
    for task in tasks:
        for output in task.outputs:
            if output.path in seen:
                raise ValueError(f"{output.path}: two tasks write this file")
            seen.add(output.path)
