"""What is checked before the first byte (disk, memory, destination) and after the last (headers)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end, parse_header
from tonnage.errors import CheckpointError, Problem
from tonnage.prepare.io import PrepareError, opened_regular, read_into
from tonnage.prepare.jobs import Job, OutputFile, Schedule, WholeFile
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.output_dir import path_within
from tonnage.prepare.windows import BLOCK_ELEMENTS
from tonnage.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tonnage.prepare.journal import WrittenFile

DISK_BLOCK_BYTES = 4096
PLAIN_WORKER_BYTES = 48 * MIB
"""Anonymous memory of a worker besides its windows: interpreter, numpy, one job."""
CONVERTING_WORKER_BYTES = 120 * MIB
"""The same with numba and the compiled kernels."""
ASSUMED_BYTES_PER_SECOND = 500_000_000
"""Written, synced, of one preparation; what a dry run's time is computed from."""


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
    """What a task writes.

    Attributes:
        number: Position among jobs, then whole files; names it in the journal.
        source: Plain name of the file it reads; ``None`` if it reads none.
        outputs: Its files.
        largest_scales: Bytes of the scales of its largest converted tensor; zero if it converts nothing.
    """

    number: int
    source: str | None
    outputs: tuple[OutputSize, ...]
    largest_scales: int = 0

    @property
    def written_bytes(self) -> int:
        """Bytes of progress: payload of tensors, the whole of other files."""
        return sum(output.file_bytes if output.rank is None else output.payload_bytes for output in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A schedule's sizes.

    Attributes:
        tasks: Jobs, then whole files, by number.
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
        """Bytes of progress of all tasks."""
        return sum(task.written_bytes for task in self.tasks)

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


# --- before ---------------------------------------------------------------------------------------------------------


def check_destination(source: Path, output: Path) -> None:
    """Refuse an output directory that is something else, or lies inside the checkpoint.

    Raises:
        PrepareError: As said.
    """
    problem = None
    if os.path.lexists(output) and not output.is_dir():
        problem = Problem(where=str(output), what="output is not a directory", expected="a directory, or nothing yet")
    elif output.resolve().is_relative_to(source.resolve()):
        problem = Problem(where=str(output), what="output lies inside the checkpoint", expected="a directory elsewhere")
    if problem is not None:
        raise PrepareError(problem)


def disk_free_bytes(output: Path) -> int:
    """Return what this user may still write where the output directory is, or will be."""
    existing = output.absolute()
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def disk_needed_bytes(outputs: Iterable[OutputSize]) -> int:
    """Return the disk space of files, in whole disk blocks."""
    return sum(-(-output.file_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES for output in outputs)


def check_disk(output: Path, outputs: Iterable[OutputSize]) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        PrepareError: As said.
    """
    needed, free = disk_needed_bytes(outputs), disk_free_bytes(output)
    if needed > free:
        raise PrepareError(
            Problem(
                where=str(output), what="not enough disk space", expected=f"{needed} bytes", found=f"{free} bytes free"
            )
        )


def memory_available_bytes() -> int | None:
    """Return what the system says can be used without swapping; ``None`` if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def check_memory(needed: int, workers: int) -> None:
    """Refuse to begin with more workers than there is memory for.

    Raises:
        PrepareError: As said.
    """
    available = memory_available_bytes()
    if available is not None and needed > available:
        expected = f"{needed} bytes for {workers} workers, or fewer --workers"
        raise PrepareError(
            Problem(where="memory", what="not enough", expected=expected, found=f"{available} bytes available")
        )


# --- after ----------------------------------------------------------------------------------------------------------


def is_done(output: Path, files: Iterable[WrittenFile], work: Job | WholeFile) -> bool:
    """Whether the recorded files of a task are what the schedule wants: there, of their size, with their headers."""
    recorded = {file.path: file for file in files}
    if isinstance(work, WholeFile):
        return recorded.keys() == {work.path} and _size(output, work.path) == recorded[work.path].file_bytes
    if recorded.keys() != {planned.path for planned in work.outputs}:
        return False
    try:
        check_headers(output, work)
    except PrepareError:
        return False
    return all(_size(output, path) == file.file_bytes for path, file in recorded.items())


def check_headers(output: Path, job: Job) -> None:
    """Read back the headers of a job's files and compare them with the schedule.

    Raises:
        PrepareError: A file is missing, has another size, or its header says something else than was planned.
    """
    problems: list[Problem] = []
    for planned in job.outputs:
        try:
            _check_header(output, planned)
        except (PrepareError, CheckpointError) as error:
            problems += error.problems
    if problems:
        raise PrepareError(*problems)


def _check_header(output: Path, planned: OutputFile) -> None:
    prefix, file_bytes = _read_prefix(path_within(output, planned.path), planned.path)
    header = parse_header(prefix, file_bytes=file_bytes, where=planned.path)
    found = [(tensor.name, tensor.dtype, tensor.shape, tensor.begin) for tensor in header.tensors]
    # The parser orders by bytes; tensors without any may stand elsewhere than in the plan.
    expected = [(tensor.name, tensor.dtype, tensor.shape, tensor.begin) for tensor in planned.tensors]
    if sorted(found) != sorted(expected) or prefix != header_bytes(planned):
        raise PrepareError(Problem(where=planned.path, what="the written header is not the planned one"))


def _read_prefix(path: Path, where: str) -> tuple[bytes, int]:
    """Return a file from its first byte to the end of its header, and its size."""
    with opened_regular(path, where) as (descriptor, status):
        start = bytearray(min(PREFIX_BYTES, status.st_size))
        read_into(descriptor, memoryview(start), 0, where=where)
        prefix = bytearray(header_end(bytes(start), file_bytes=status.st_size, where=where))
        read_into(descriptor, memoryview(prefix), 0, where=where)
    return bytes(prefix), status.st_size


def _size(output: Path, relative: str) -> int | None:
    try:
        return path_within(output, relative).stat().st_size
    except (OSError, PrepareError):
        return None
