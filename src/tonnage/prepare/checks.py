"""What is checked before the first byte (disk, memory, destination) and after the last (headers)."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end, parse_header
from tonnage.errors import CheckpointError, Problem
from tonnage.prepare.io import PrepareError
from tonnage.prepare.jobs import OutputFile, Work, jobs_of
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.output_dir import path_within
from tonnage.prepare.windows import converted_elements
from tonnage.sources.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tonnage.prepare.journal import JobRecord, WrittenFile
    from tonnage.prepare.survey import OutputSize, TaskSize

DISK_BLOCK_BYTES = 4096
_DIGEST = re.compile("[0-9a-f]{64}")
ASSUMED_BYTES_PER_SECOND = 500_000_000
"""Written, synced, of one preparation; what a dry run's time is computed from."""


# --- before ---------------------------------------------------------------------------------------------------------


def check_destination(source: Path | None, output: Path) -> None:
    """Refuse an output directory that is something else, or lies inside the checkpoint.

    Args:
        source: The checkpoint, if it is a directory of this machine.
        output: Where it is to go.

    Raises:
        PrepareError: As said.
    """
    problem = None
    try:
        inside = source is not None and output.resolve().is_relative_to(source.resolve())
        usable = not os.path.lexists(output) or output.is_dir()
        _check_names(output)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise PrepareError(Problem(where=str(output), what="output cannot be used", found=found)) from error
    if not usable:
        problem = Problem(where=str(output), what="output is not a directory", expected="a directory, or nothing yet")
    elif inside:
        problem = Problem(where=str(output), what="output lies inside the checkpoint", expected="a directory elsewhere")
    if problem is not None:
        raise PrepareError(problem)


def disk_free_bytes(output: Path) -> int:
    """Return what this user may still write where the output directory is, or will be.

    Raises:
        PrepareError: There can be none.
    """
    try:
        status = os.statvfs(_existing(output))
    except OSError as error:
        raise PrepareError(Problem(where=str(output), what="output cannot be used", found=error.strerror)) from error
    return status.f_bavail * status.f_frsize


def _existing(output: Path) -> Path:
    """Return the innermost directory on the way to the output that is there."""
    existing = output.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _check_names(output: Path) -> None:
    """Refuse names that no file system here can hold, also where their directory is not there yet."""
    existing = _existing(output)
    if existing != output.absolute() and not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    longest = os.statvfs(existing).f_namemax
    if any(len(os.fsencode(part)) > longest for part in output.parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def disk_needed_bytes(outputs: Iterable[OutputSize]) -> int:
    """Return the disk space of files, in whole disk blocks."""
    return sum(-(-output.file_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES for output in outputs)


def check_disk(output: Path, outputs: Iterable[OutputSize], *, freed: int = 0) -> None:
    """Refuse to begin what the disk has no room for.

    Args:
        output: The output directory.
        outputs: What is to be written.
        freed: Bytes that will be free besides, before the first is written.

    Raises:
        PrepareError: As said.
    """
    needed, free = disk_needed_bytes(outputs), disk_free_bytes(output) + freed
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


def is_as_planned(file: WrittenFile, planned: OutputSize) -> bool:
    """Whether the record of a file says what was planned, and has a digest, or two."""
    recorded = (file.path, file.rank, file.payload_bytes, file.file_bytes)
    wanted = (planned.path, planned.rank, planned.payload_bytes, planned.file_bytes)
    return recorded == wanted and is_digest(file.digest) and (file.sha256 is None or is_digest(file.sha256))


def is_digest(text: str | None) -> bool:
    """Whether a text is a digest as it is recorded."""
    return text is not None and _DIGEST.fullmatch(text) is not None


def is_recorded(record: JobRecord, planned: TaskSize, work: Work) -> bool:
    """Whether a record names files, converted tensors and source file of its task, all of them and no others."""
    digested = [] if planned.digested_bytes is None else [(planned.source, planned.digested_bytes)]
    taken = [(source.name, source.nbytes) for source in record.sources]
    return (
        len(record.files) == len(planned.outputs)
        and all(map(is_as_planned, record.files, planned.outputs))
        and [(tensor.tensor, tensor.elements) for tensor in record.converted] == converted_tensors(work)
        and (taken == digested or (not digested and [name for name, _ in taken] == [planned.source]))
        and all(is_digest(source.digest) for source in record.sources)
    )


def converted_tensors(work: Work) -> list[tuple[str, int]]:
    """Return the tensors a task converts, with their elements."""
    steps = (step for job in jobs_of(work) for step in job.steps)
    return [(step.source.name, converted_elements(step)) for step in steps if step.convert]


def is_written(output: Path, planned: TaskSize, work: Work) -> bool:
    """Whether the files of a task are there, of their size, with their headers."""
    try:
        check_sizes(output, planned.outputs)
        check_headers(output, work)
    except PrepareError:
        return False
    return True


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


def check_headers(output: Path, work: Work) -> None:
    """Read back the headers of the safetensors files a task wrote and compare them with the schedule.

    Raises:
        PrepareError: A file is missing, has another size, or its header says something else than was planned.
    """
    problems: list[Problem] = []
    for planned in (one for job in jobs_of(work) for one in job.outputs):
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
    with LocalSource(path.parent).opened(path.name, kind=PrepareError) as file:
        file_bytes = file.facts.nbytes
        start = file.read(min(PREFIX_BYTES, file_bytes), 0)
        return file.read(header_end(start, file_bytes=file_bytes, where=where), 0), file_bytes


def _size(output: Path, relative: str) -> int | None:
    try:
        return path_within(output, relative).stat().st_size
    except (OSError, PrepareError):
        return None
