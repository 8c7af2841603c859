"""The jobs of one source file: its tensors streamed into the files of all ranks, its digest taken on the way."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from tonnage.errors import Problem
from tonnage.prepare.ahead import HashedReader, reading
from tonnage.prepare.compiler_room import check_compiler_room
from tonnage.prepare.io import NewFile, PrepareError, check_origin, new_digests, opened_source, source_digests
from tonnage.prepare.jobs import Job, OutputFile, ShardPass, Step, jobs_of
from tonnage.prepare.journal import ConvertedTensor, SourceDigest, WrittenFile
from tonnage.prepare.output_dir import make_parents
from tonnage.prepare.runs import Run, runs_of
from tonnage.prepare.stream import Outputs, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from tonnage.prepare.ahead import Reader
    from tonnage.prepare.messages import Setup, Task
    from tonnage.prepare.mxfp8 import SourceDtype
    from tonnage.sources.model import FileFacts, Source, SourceFile

    _Rank = tuple[NewFile, int]

Written = tuple[NewFile, WrittenFile]
"""A file that is on the disk and has no final name yet, and its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a task did.

    Attributes:
        files: Written.
        converted: Converted tensors, in order of steps.
        sources: The source file, if its digest was taken.
    """

    files: tuple[Written, ...] = ()
    converted: tuple[ConvertedTensor, ...] = ()
    sources: tuple[SourceDigest, ...] = ()


def write_jobs(task: Task, setup: Setup, source: Source, stack: ExitStack, on_bytes: Callable[[int], None]) -> Done:
    """Stream the tensors of jobs into their outputs, one job after the other.

    Args:
        task: With a job or several of one file.
        setup: What holds for all tasks.
        source: The checkpoint.
        stack: Lets go of the files.
        on_bytes: Called with the number of bytes written, and of those hashed of the source.

    Raises:
        TonnageError: The source cannot be read, changed, or is not the file its origin states, the disk is full, or a
            value has no finite conversion.
    """
    assert task.source is not None
    work, remote = task.work, source.transfer is not None
    jobs, digest = jobs_of(work), isinstance(work, ShardPass) and work.digest
    runs = runs_of(jobs, digest=digest)
    headers = iter(task.headers)
    written: list[Written] = []
    converted: list[ConvertedTensor] = []
    sources: tuple[SourceDigest, ...] = ()
    with ExitStack() as held:
        file = held.enter_context(opened_source(source, task.source, task.state))
        carrier = held.enter_context(_hashed(file, task.source, setup, on_bytes, remote=remote)) if digest else None
        for position, job in enumerate(jobs):
            files = _create(task, job, headers, setup, stack)
            outputs = Outputs(files, on_bytes)
            for run in runs:
                if run.job == position:
                    converted += _run(run, file, carrier, outputs, setup, remote=remote)
            written += ((files[one.rank][0], _finished(files[one.rank][0], one)) for one in job.outputs)
        if carrier is not None:
            sources = (source_digest(task.source, carrier.finish()),)
    return Done(files=tuple(written), converted=tuple(converted), sources=sources)


def written_file(file: NewFile, path: str, *, rank: int | None, payload_bytes: int) -> WrittenFile:
    """Return the record of a file that was written to its end."""
    digest, *others = file.hexdigests()
    return WrittenFile(
        path=path,
        rank=rank,
        payload_bytes=payload_bytes,
        file_bytes=file.nbytes,
        digest=digest,
        sha256=others[0] if others else None,
    )


@contextmanager
def _hashed(
    file: SourceFile, facts: FileFacts, setup: Setup, on_bytes: Callable[[int], None], *, remote: bool
) -> Iterator[HashedReader]:
    """Yield what reads and hashes a source file from its first byte to its last."""
    with reading(file, [(0, facts.nbytes)], remote=remote) as reader:
        digests = source_digests(setup.hash, facts)
        yield HashedReader(reader, facts.nbytes, digests, on_bytes, setup.window_bytes)


def source_digest(facts: FileFacts, digests: tuple[str, ...]) -> SourceDigest:
    """Return the record of a hashed source file.

    Args:
        facts: As they were planned.
        digests: As :func:`tonnage.prepare.io.source_digests` takes them: SHA-256 is the last if it is to be compared.

    Raises:
        PrepareError: It is not the file its origin states.
    """
    check_origin(facts, digests[-1])
    return SourceDigest(name=facts.name, nbytes=facts.nbytes, digest=digests[0])


def _run(
    run: Run, file: SourceFile, carrier: Reader | None, outputs: Outputs, setup: Setup, *, remote: bool
) -> list[ConvertedTensor]:
    """Do the steps of a run."""
    if run.carried:
        assert carrier is not None
        return _steps(run, carrier, outputs, setup)
    with reading(file, run.spans(setup.window_bytes), remote=remote) as reader:
        return _steps(run, reader, outputs, setup)


def _steps(run: Run, reader: Reader, outputs: Outputs, setup: Setup) -> list[ConvertedTensor]:
    stream = Stream(reader, outputs, window_bytes=setup.window_bytes)
    converted = []
    for step in run.steps:
        if step.convert:
            converted.append(_convert(stream, step, setup))
        else:
            stream.copy(step)
    return converted


def _convert(stream: Stream, step: Step, setup: Setup) -> ConvertedTensor:
    """Convert a tensor for all ranks and sum up its errors."""
    check_compiler_room()
    from tonnage.prepare.mxfp8 import Figures, quantize  # noqa: PLC0415 - loads a compiler; many jobs need none

    source = step.source
    parts: list[Figures] = []

    def quantize_rows(bits: NDArray[Any], codes: NDArray[np.uint8], scales: NDArray[np.uint8], first: int) -> None:
        figures = quantize(bits, cast("SourceDtype", source.dtype), codes, scales, rule=setup.scale_rule)
        if figures.first_nonfinite is not None and not setup.keep_nonfinite:
            row, column = divmod(figures.first_nonfinite, bits.shape[1])
            what = "a value that is not finite; --nonfinite keep --force starts over and converts it"
            found = f"at [{first + row}, {column}]"
            raise PrepareError(Problem(where=source.file, tensor=source.name, what=what, found=found))
        parts.append(figures)

    stream.convert(step, quantize_rows)
    total = sum(parts, start=Figures())
    errors = total.errors
    assert errors is not None
    return ConvertedTensor(
        tensor=source.name,
        elements=total.elements,
        nonfinite_blocks=total.nonfinite_blocks,
        relative_error=errors.relative,
        sqnr_db=errors.sqnr_db if isfinite(errors.sqnr_db) else None,
        largest_error=errors.largest_error,
    )


def _create(task: Task, job: Job, headers: Iterator[bytes], setup: Setup, stack: ExitStack) -> dict[int, _Rank]:
    """Create the outputs of a job and write their headers; return them by rank, with the lengths of their headers."""
    files = {}
    for output in job.outputs:
        header = next(headers)
        path = make_parents(setup.output, output.path)
        digests = new_digests(setup.hash)
        file = NewFile(path, len(header) + output.payload_bytes, tag=task.tag, digests=digests)
        stack.callback(file.close)
        file.write(memoryview(header))
        files[output.rank] = file, len(header)
    return files


def _finished(file: NewFile, output: OutputFile) -> WrittenFile:
    """Return the record of an output, all of which is on the disk."""
    file.sync()
    return written_file(file, output.path, rank=output.rank, payload_bytes=output.payload_bytes)
