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
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tonnage.errors import Problem, TonnageError
from tonnage.prepare.ahead import reading
from tonnage.prepare.io import (
    RESUME,
    NewFile,
    check_origin,
    new_digests,
    opened_source,
    source_digests,
    sync_directory,
)
from tonnage.prepare.jobs import SourceFile, WholeFile
from tonnage.prepare.journal import JobRecord
from tonnage.prepare.messages import BUG_STATUS, GONE_STATUS, Progress, Refused, Setup, Task
from tonnage.prepare.output_dir import check_epoch, make_parents
from tonnage.prepare.shard_pass import Done, source_digest, write_jobs, written_file
from tonnage.sources.addresses import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tonnage.sources.model import Source

_REPORT_SECONDS = 0.1
_SYSTEM = (MemoryError, ImportError, RuntimeError, SystemError)
"""What is raised where the system gives no memory or no thread; the last by code in C that says no more."""


def run_task(task: Task, setup: Setup, on_bytes: Callable[[int], None]) -> JobRecord:
    """Write the files of a task under temporary names, sync them, and give them their final names; or hash a source.

    Args:
        task: Jobs of one file, a whole file, or a source file.
        setup: What holds for all tasks.
        on_bytes: Called with the number of payload bytes written, or read for a digest, many times.

    Returns:
        What was written, with digests.

    Raises:
        PrepareError: The source changed or is not the file its origin states, the disk is full, or a value has no
            finite conversion. No file of the task has its final name unless all bytes of all of them are on the disk.
        SourceError: A server cannot be reached, or answers wrong.
    """
    begin = time.monotonic()
    if setup.epoch is not None:
        check_epoch(setup.output, setup.epoch)
    source = source_at(setup.address)
    with ExitStack() as stack:
        if isinstance(task.work, SourceFile):
            done = _digest_source(task, setup, source, on_bytes)
        elif isinstance(task.work, WholeFile):
            done = _write_whole(task, task.work, setup, source, stack, on_bytes)
        else:
            done = write_jobs(task, setup, source, stack, on_bytes)
        if setup.epoch is not None:
            check_epoch(setup.output, setup.epoch)
        for file, _ in done.files:
            file.publish()
        for directory in sorted({file.path.parent for file, _ in done.files}):
            sync_directory(directory)
    return JobRecord(
        job=task.number,
        files=tuple(record for _, record in done.files),
        converted=done.converted,
        seconds=time.monotonic() - begin,
        sources=done.sources,
    )


@cache
def source_at(address: str) -> Source:
    """Return the source at an address, opened once for all tasks of a process."""
    return open_source(address)


def _write_whole(
    task: Task, whole: WholeFile, setup: Setup, source: Source, stack: ExitStack, on_bytes: Callable[[int], None]
) -> Done:
    """Write a file that comes along, from the source or from its content."""
    path = make_parents(setup.output, whole.path)
    nbytes = len(whole.content) if task.source is None else task.source.nbytes
    file = NewFile(path, nbytes, tag=task.tag, digests=new_digests(setup.hash))
    stack.callback(file.close)
    if task.source is None:
        file.write(memoryview(whole.content))
        on_bytes(nbytes)
    else:
        for piece in _read_through(task, setup, source):
            file.write(piece)
            on_bytes(len(piece))
        check_origin(task.source, file.hexdigests()[-1])
    file.sync()
    return Done(files=((file, written_file(file, whole.path, rank=None, payload_bytes=0)),))


def _digest_source(task: Task, setup: Setup, source: Source, on_bytes: Callable[[int], None]) -> Done:
    """Take the digest of a whole source file."""
    assert task.source is not None
    digests = source_digests(setup.hash, task.source)
    for piece in _read_through(task, setup, source):
        for digest in digests:
            digest.update(piece)
        on_bytes(len(piece))
    return Done(sources=(source_digest(task.source, tuple(digest.hexdigest() for digest in digests)),))


def _read_through(task: Task, setup: Setup, source: Source) -> Iterator[memoryview]:
    """Yield the source file of a task from front to back; every piece is valid until the next."""
    facts = task.source
    assert facts is not None
    window = memoryview(bytearray(min(facts.nbytes, setup.window_bytes)))
    with (
        opened_source(source, facts, task.state) as file,
        reading(file, [(0, facts.nbytes)], remote=source.transfer is not None) as reader,
    ):
        for begin in range(0, facts.nbytes, setup.window_bytes):
            piece = window[: facts.nbytes - begin]
            reader.read_into(piece, begin)
            yield piece


# --- the process ----------------------------------------------------------------------------------------------------


class _Reporter:
    """Sends progress, not more often than it can be shown."""

    def __init__(self, send: Callable[[Progress], object]) -> None:
        self._send = send
        self._unsent = 0
        self._next = 0.0

    def __call__(self, nbytes: int) -> None:
        self._unsent += nbytes
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Send what was not sent yet."""
        if self._unsent:
            self._send(Progress(self._unsent))
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
    while (task := inbox.get()) is not None:
        answer_task(task, setup, connection.send)


def answer_task(task: Task, setup: Setup, send: Callable[[Progress | JobRecord | Refused], object]) -> None:
    """Do a task and tell how far it is, and last what was written, or why it is refused."""
    report = _Reporter(send)
    try:
        answer: JobRecord | Refused = run_task(task, setup, report)
    except TonnageError as error:
        answer = Refused(error.problems)
    except (OSError, *_SYSTEM) as error:
        found = f"{type(error).__name__}: {error}"
        answer = Refused((Problem(where=task.title, what=f"its worker failed; {RESUME}", found=found),))
    report.flush()
    send(answer)


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
    os._exit(GONE_STATUS if isinstance(error, _SYSTEM) else BUG_STATUS)


if __name__ == "__main__":
    sys.excepthook = _end_with_bug
    try:
        main(int(sys.argv[1]))
    except (EOFError, OSError):
        sys.exit(GONE_STATUS)  # the run is gone, and nobody is left to tell
