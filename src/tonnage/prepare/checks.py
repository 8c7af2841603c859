"""What is checked before the first byte (disk, memory, destination) and after the last (headers)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end, parse_header
from tonnage.errors import CheckpointError, Problem
from tonnage.prepare.io import PrepareError, opened_regular, read_into
from tonnage.prepare.jobs import Job, OutputFile, WholeFile
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.output_dir import path_within

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tonnage.prepare.journal import WrittenFile
    from tonnage.prepare.survey import OutputSize

DISK_BLOCK_BYTES = 4096
ASSUMED_BYTES_PER_SECOND = 500_000_000
"""Written, synced, of one preparation; what a dry run's time is computed from."""


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


def check_sizes(output: Path, outputs: Iterable[OutputSize]) -> None:
    """Look at every file once more when all are written.

    Raises:
        PrepareError: A file is missing or has another size; every such file is named.
    """
    problems = [
        Problem(
            where=planned.path, what="not as written", expected=f"{planned.file_bytes} bytes", found=f"{found} bytes"
        )
        for planned in outputs
        if (found := _size(output, planned.path)) != planned.file_bytes
    ]
    if problems:
        raise PrepareError(*problems)


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
