"""What a preparation is of (identity) and what of it is done (journal), so that it can be interrupted anywhere.

The journal is a file of JSON lines: the identity, then one line for every job whose files are all on the disk under
their final names. Lines are appended and synced; a last line torn by a crash is as if it had not been written. A run
that finds a journal of another identity refuses: files of two preparations are never mixed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import msgspec

from tonnage.errors import Problem, raise_if_any
from tonnage.prepare.io import PrepareError, shown, sync_directory, write_whole, writing
from tonnage.prepare.output_dir import check_single
from tonnage.sources.model import FileFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

JOURNAL_SCHEMA = "tonnage.journal/1"

FORMAT_VERSION = 1
"""Of what prepare writes: raised whenever the same schedule would give other bytes."""

OUTPUTS_SCHEMA = "tonnage.outputs/1"

JOURNAL_LIMIT_BYTES = 2 << 30
_START_OVER = "--force starts over"
_CALLED = {"ranks": "choice of ranks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything the written bytes depend on. Two runs may share files only if all of it is equal.

    Attributes:
        schema: Of the journal.
        format_version: Of what is written.
        checkpoint: Digest of the source's headers.
        address: Of a source that is not on this machine, pinned where it can be; of a directory it counts for nothing.
        sources: Every source file with size and version.
        recipe: Digest of the family's recipe.
        topology: Parallel sizes.
        engine: Whose placement rules.
        convert: What became of convertible weights.
        scale_rule: Of converted weights.
        nonfinite: What became of values without a finite value.
        layout: Of the output.
        quant_style: In which form converted tensors are announced.
        hash: Which digests.
        ranks: Global ranks prepared.
        schedule: Digest of the jobs: every tensor, cut and header.
    """

    schema: str = JOURNAL_SCHEMA
    format_version: int = FORMAT_VERSION
    checkpoint: str
    address: str | None = None
    sources: tuple[FileFacts, ...]
    recipe: str
    topology: str
    engine: str
    convert: str
    scale_rule: str
    nonfinite: str
    layout: str
    quant_style: str
    hash: str
    ranks: tuple[int, ...]
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file under its final name.

    Attributes:
        path: Relative to the output directory.
        rank: Global rank; ``None`` for a file of all ranks.
        payload_bytes: Bytes of tensors.
        file_bytes: Size.
        digest: Of the whole file, by the identity's algorithm.
        sha256: SHA-256 of the whole file where that is another; ``None`` too if a version took none.
    """

    path: str
    rank: int | None
    payload_bytes: int
    file_bytes: int
    digest: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """What conversion cost one tensor.

    Attributes:
        tensor: Name in the checkpoint.
        elements: How many were converted.
        nonfinite_blocks: Blocks with NaN or infinity, kept on demand; in no figure.
        relative_error: Frobenius norm of the error over that of the tensor.
        sqnr_db: Signal to quantisation noise; ``None`` if there is no noise.
        largest_error: Largest absolute error of an element.
    """

    tensor: str
    elements: int
    nonfinite_blocks: int
    relative_error: float
    sqnr_db: float | None
    largest_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDigest:
    """A file of the checkpoint as it was when it was read.

    Attributes:
        name: Plain file name.
        nbytes: Size.
        digest: Of the whole file; ``None`` if it was not taken.
    """

    name: str
    nbytes: int
    digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A finished job.

    Attributes:
        job: Its number.
        files: Its outputs, in order.
        converted: Its converted tensors, in order of steps.
        seconds: How long it took.
        sources: The source file whose digest it took, if it took one.
    """

    job: int
    files: tuple[WrittenFile, ...]
    converted: tuple[ConvertedTensor, ...]
    seconds: float
    sources: tuple[SourceDigest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputList:
    """Every file a preparation may have written, on the disk before the first of them.

    Attributes:
        schema: Of the list.
        file_bytes: Size by path; a file of another size is somebody else's.
    """

    schema: str = OUTPUTS_SCHEMA
    file_bytes: dict[str, int]


def write_outputs(path: Path, file_bytes: Mapping[str, int]) -> None:
    """Write the list, whole or not at all.

    Raises:
        PrepareError: It cannot be written.
    """
    content = msgspec.json.encode(OutputList(file_bytes=dict(sorted(file_bytes.items()))))
    write_whole(path, content)
    sync_directory(path.parent.parent)


def read_outputs(raw: bytes) -> dict[str, int]:
    """Return what a list says; one that cannot be read names nothing."""
    try:
        found = msgspec.json.decode(raw, type=OutputList)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return found.file_bytes if found.schema == OUTPUTS_SCHEMA else {}


class Journal:
    """An open journal; the only writer is the run that holds the lock."""

    def __init__(self, path: Path, good_bytes: int) -> None:
        """Open an existing journal, cut to its whole lines."""
        self._path = path
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                check_single(path, self._descriptor)
                os.ftruncate(self._descriptor, good_bytes)
            except BaseException:
                os.close(self._descriptor)
                raise

    def append(self, record: JobRecord) -> None:
        """Add a finished job and wait until it is on the disk.

        Raises:
            PrepareError: It cannot be written.
        """
        line = memoryview(msgspec.json.encode(record) + b"\n")
        with writing(self._path):
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def create_journal(path: Path, identity: Identity) -> Journal:
    """Write a journal of nothing done, whole or not at all, and open it."""
    line = msgspec.json.encode(identity) + b"\n"
    write_whole(path, line)
    sync_directory(path.parent.parent)
    return Journal(path, len(line))


def read_journal(raw: bytes, *, where: str) -> tuple[Identity, tuple[JobRecord, ...], int]:
    """Return what a journal says, and the length of its whole lines.

    Raises:
        PrepareError: A line that is not the last cannot be read.
    """
    lines = raw.splitlines(keepends=True)
    if lines and not _is_whole(lines[-1]):
        lines.pop()
    try:
        identity = msgspec.json.decode(lines[0] if lines else b"", type=Identity)
        records = tuple(msgspec.json.decode(line, type=JobRecord) for line in lines[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PrepareError(Problem(where=where, what=f"damaged journal; {_START_OVER}", found=str(error))) from error
    return identity, records, sum(map(len, lines))


def _is_whole(line: bytes) -> bool:
    """Whether the last line was written to its end; a crash may leave zeros in it, or a part."""
    return line.endswith(b"\n") and b"\0" not in line


def check_identity(then: Identity, now: Identity, *, where: str) -> None:
    """Refuse to continue what was begun as something else.

    Raises:
        PrepareError: Naming every field that differs, as it was and as it is; the schedule, which follows from the
            others, if it alone does.
    """
    raise_if_any(PrepareError, _differences(then, now, where))
    raise_if_any(PrepareError, _field_difference(then, now, where, "schedule"))


def _differences(then: Identity, now: Identity, where: str) -> Iterator[Problem]:
    for field in fields(Identity):
        if field.name == "sources":
            yield from _source_differences(then, now, where)
        elif field.name != "schedule":
            yield from _field_difference(then, now, where, field.name)


def _field_difference(then: Identity, now: Identity, where: str, name: str) -> Iterator[Problem]:
    before, after = getattr(then, name), getattr(now, name)
    if before != after:
        yield _difference(where, _CALLED.get(name, name), str(before), str(after))


def _source_differences(then: Identity, now: Identity, where: str) -> Iterator[Problem]:
    before = {facts.name: shown(facts) for facts in then.sources}
    after = {facts.name: shown(facts) for facts in now.sources}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield _difference(where, f"source {name}", before.get(name, "absent"), after.get(name, "absent"))


def _difference(where: str, field: str, then: str, now: str) -> Problem:
    what = f"begun with another {field}; {_START_OVER}"
    return Problem(where=where, what=what, expected=f"as then: {then}", found=f"now: {now}")
