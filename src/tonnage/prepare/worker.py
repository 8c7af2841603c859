"""One task of a preparation, from open to rename; and the process that does one after the other.

A worker answers to the run that started it over one socket, and ends at once when that run is gone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from math import isfinite
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from tonnage.errors import Problem, TonnageError
from tonnage.prepare.io import (
    RESUME,
    NewFile,
    PrepareError,
    new_digest,
    new_digests,
    opened_source,
    read_into,
    sync_directory,
)
from tonnage.prepare.jobs import Job, OutputFile, SourceFile, Step, WholeFile
from tonnage.prepare.journal import ConvertedTensor, JobRecord, SourceDigest, WrittenFile
from tonnage.prepare.messages import BUG_STATUS, GONE_STATUS, Progress, Refused, Setup, Task
from tonnage.prepare.output_dir import make_parents
from tonnage.prepare.stream import Outputs, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from tonnage.prepare.io import FileFacts
    from tonnage.prepare.mxfp8 import SourceDtype

_REPORT_SECONDS = 0.1


def run_task(task: Task, setup: Setup, on_bytes: Callable[[int], None]) -> JobRecord:
    """Write the files of a task under temporary names, sync them, and give them their final names; or hash a source.

    Args:
        task: A job, a whole file, or a source file.
        setup: What holds for all tasks.
        on_bytes: Called with the number of payload bytes written, or read for a digest, many times.

    Returns:
        What was written, with digests.

    Raises:
        PrepareError: The source changed, the disk is full, or a value has no finite conversion. No file of the task has
            its final name unless all its bytes are on the disk.
    """
    begin = time.monotonic()
    files: tuple[_Written, ...]
    converted: tuple[ConvertedTensor, ...]
    if isinstance(task.work, SourceFile):
        source = _digest_source(task, setup, on_bytes)
        seconds = time.monotonic() - begin
        return JobRecord(job=task.number, files=(), converted=(), seconds=seconds, sources=(source,))
    with ExitStack() as stack:
        if isinstance(task.work, WholeFile):
            files, converted = _write_whole(task, task.work, setup, stack, on_bytes), ()
        else:
            files, converted = _write_job(task, task.work, setup, stack, on_bytes)
        for file, _ in files:
            file.sync()
        for file, _ in files:
            file.publish()
        for directory in sorted({file.path.parent for file, _ in files}):
            sync_directory(directory)
        written = tuple(record for _, record in files)
    return JobRecord(job=task.number, files=written, converted=converted, seconds=time.monotonic() - begin)


_Written = tuple[NewFile, WrittenFile]


def _write_job(
    task: Task, job: Job, setup: Setup, stack: ExitStack, on_bytes: Callable[[int], None]
) -> tuple[tuple[_Written, ...], tuple[ConvertedTensor, ...]]:
    """Stream the tensors of a job into its outputs."""
    assert task.source is not None
    files = {
        output.rank: _create(task, output, header, setup, stack)
        for output, header in zip(job.outputs, task.headers, strict=True)
    }
    converted = []
    with opened_source(setup.source, task.source) as descriptor:
        stream = Stream(descriptor, Outputs(files, on_bytes), window_bytes=setup.window_bytes)
        for step in job.steps:
            if step.convert:
                converted.append(_convert(stream, step, setup))
            else:
                stream.copy(step)
    return tuple(
        (
            files[output.rank][0],
            _written(files[output.rank][0], output.path, rank=output.rank, payload_bytes=output.payload_bytes),
        )
        for output in job.outputs
    ), tuple(converted)


def _convert(stream: Stream, step: Step, setup: Setup) -> ConvertedTensor:
    """Convert a tensor for all ranks and sum up its errors."""
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


def _create(task: Task, output: OutputFile, header: bytes, setup: Setup, stack: ExitStack) -> tuple[NewFile, int]:
    """Create an output file and write its header; return it with the length of the header."""
    path = make_parents(setup.output, output.path)
    file = NewFile(path, len(header) + output.payload_bytes, tag=f"job-{task.number}", digests=new_digests(setup.hash))
    stack.callback(file.close)
    file.write(memoryview(header))
    return file, len(header)


def _write_whole(
    task: Task, whole: WholeFile, setup: Setup, stack: ExitStack, on_bytes: Callable[[int], None]
) -> tuple[_Written]:
    """Write a file that comes along, from the source or from its content."""
    path = make_parents(setup.output, whole.path)
    nbytes = len(whole.content) if task.source is None else task.source.nbytes
    file = NewFile(path, nbytes, tag=f"job-{task.number}", digests=new_digests(setup.hash))
    stack.callback(file.close)
    if task.source is None:
        file.write(memoryview(whole.content))
        on_bytes(nbytes)
    else:
        for piece in _read_through(task.source, setup):
            file.write(piece)
            on_bytes(len(piece))
    return ((file, _written(file, whole.path, rank=None, payload_bytes=0)),)


def _written(file: NewFile, path: str, *, rank: int | None, payload_bytes: int) -> WrittenFile:
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


def _digest_source(task: Task, setup: Setup, on_bytes: Callable[[int], None]) -> SourceDigest:
    """Return the digest of a whole source file."""
    assert task.source is not None
    digest = new_digest(setup.hash)
    for piece in _read_through(task.source, setup):
        digest.update(piece)
        on_bytes(len(piece))
    return SourceDigest(name=task.source.name, nbytes=task.source.nbytes, digest=digest.hexdigest())


def _read_through(source: FileFacts, setup: Setup) -> Iterator[memoryview]:
    """Yield a source file from front to back; every piece is valid until the next."""
    window = memoryview(bytearray(min(source.nbytes, setup.window_bytes)))
    with opened_source(setup.source, source) as descriptor:
        for begin in range(0, source.nbytes, setup.window_bytes):
            piece = window[: source.nbytes - begin]
            read_into(descriptor, piece, begin, where=source.name)
            yield piece


# --- the process ----------------------------------------------------------------------------------------------------


class _Reporter:
    """Sends progress, not more often than it can be shown."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent = 0
        self._next = 0.0

    def __call__(self, nbytes: int) -> None:
        self._unsent += nbytes
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Send what was not sent yet."""
        if self._unsent:
            self._connection.send(Progress(self._unsent))
        self._unsent = 0
        self._next = time.monotonic() + _REPORT_SECONDS


def main(descriptor: int) -> None:
    """Do tasks until there are no more; the first message is the setup. The run at the other end is trusted.

    Raises:
        EOFError: The run is gone.
        OSError: The same, in the middle of a message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=descriptor).detach())
    inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    setup: Setup = connection.recv()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    report = _Reporter(connection)
    while (task := inbox.get()) is not None:
        try:
            answer: JobRecord | Refused = run_task(task, setup, report)
        except TonnageError as error:
            answer = Refused(error.problems)
        except (OSError, MemoryError, ImportError, RuntimeError) as error:  # the system gives no memory, no thread
            found = f"{type(error).__name__}: {error}"
            answer = Refused((Problem(where=task.title, what=f"its worker failed; {RESUME}", found=found),))
        report.flush()
        connection.send(answer)


def _receive(connection: Connection, inbox: queue.SimpleQueue[Task | None]) -> None:
    """Hand on what the run says; without a run there is nothing to finish, not even the file at hand.

    However this ends, the process never outlives it: it would hold the lock forever.
    """
    orderly = False
    try:
        while (task := connection.recv()) is not None:
            inbox.put(task)
        inbox.put(None)
        orderly = True
    finally:
        if not orderly:
            os._exit(GONE_STATUS)


def _end_with_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave the traceback to the run, and a status that tells a bug from a system that gives nothing."""
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    os._exit(GONE_STATUS if isinstance(error, MemoryError | ImportError | RuntimeError) else BUG_STATUS)


if __name__ == "__main__":
    sys.excepthook = _end_with_bug
    try:
        main(int(sys.argv[1]))
    except (EOFError, OSError):
        sys.exit(GONE_STATUS)  # the run is gone, and nobody is left to tell
