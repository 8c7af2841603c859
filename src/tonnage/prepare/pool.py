"""Worker processes: started, given tasks, watched, and gone when the run is left, however it is left.

A worker is a fresh interpreter that shares one socket with the run, and the lock. It is not started by
``multiprocessing``, which would run the caller's main module again. What it says on stderr is kept in memory; the last
line of it is part of what is said when it is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from tonnage.errors import Problem
from tonnage.prepare.io import RESUME, PrepareError
from tonnage.prepare.journal import JobRecord
from tonnage.prepare.messages import BUG_STATUS, Progress, Refused, Setup, Task
from tonnage.prepare.output_dir import end_epoch
from tonnage.sources.hanging_up import sigpipe_held_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tonnage.prepare.executors import Event, Run
    from tonnage.prepare.preparation import Preparation

_DYING_SECONDS = 10
_SAID_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class Worker:
    """One process, the file of what it said on stderr, and what it is at."""

    process: subprocess.Popen[bytes]
    connection: Connection
    said: int
    task: Task | None = None


@contextmanager
def started(workers: int, lock: int) -> Iterator[list[Worker]]:
    """Start so many workers; on leaving they are ended, in the middle of a task if they are at one.

    Args:
        workers: How many processes.
        lock: Descriptor of the lock, which the workers hold as well.

    Raises:
        PrepareError: The system does not let so many be started.
    """
    with ExitStack() as stack:
        idle = []
        for _ in range(workers):
            worker = _start(lock)
            stack.callback(_end, worker)
            idle.append(worker)
        yield idle


@contextmanager
def local_processes(preparation: Preparation, lock: int) -> Iterator[Run]:
    """Have the tasks of a preparation done on this machine; an :data:`~tonnage.prepare.executors.Executor`."""
    end_epoch(preparation.setup.output)
    with started(preparation.workers, lock) as workers:
        yield lambda tasks: run_tasks(tasks, preparation.setup, workers)


def run_tasks(tasks: Iterable[Task], setup: Setup, workers: Iterable[Worker]) -> Iterator[Event]:
    """Yield progress and finished tasks as the workers report them, until every task is done.

    Args:
        tasks: In the order they are begun; the next is asked for when a worker is free.
        setup: What holds for all of them.
        workers: New ones.

    Raises:
        PrepareError: A task is refused, or a worker was killed, or failed for want of memory.
        RuntimeError: A bug in a worker; its traceback is in the message.
    """
    waiting, idle = iter(tasks), deque(workers)
    for worker in idle:
        _send(worker, setup)
    busy: dict[Connection, Worker] = {}
    _hand_out(waiting, idle, busy)
    while busy:
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            worker = busy[ready]
            message = _receive(worker)
            if isinstance(message, Progress):
                yield message
            elif isinstance(message, JobRecord):
                idle.append(busy.pop(ready))
                assert worker.task is not None
                yield worker.task, message
            else:
                raise PrepareError(*message.problems)
        _hand_out(waiting, idle, busy)


def _hand_out(waiting: Iterator[Task], idle: deque[Worker], busy: dict[Connection, Worker]) -> None:
    """Give the next tasks to workers that have none."""
    while idle:
        task = next(waiting, None)
        if task is None:
            return
        worker = idle.popleft()
        worker.task = task
        busy[worker.connection] = worker
        _send(worker, task)


def _send(worker: Worker, message: Setup | Task) -> None:
    try:
        with sigpipe_held_back():
            worker.connection.send(message)
    except OSError:
        raise _gone(worker) from None


def _receive(worker: Worker) -> Progress | JobRecord | Refused:
    try:
        message = worker.connection.recv()
    except (EOFError, OSError, pickle.UnpicklingError):  # in the middle of a message it is a plain OSError
        raise _gone(worker) from None
    assert isinstance(message, Progress | JobRecord | Refused)
    return message


def _gone(worker: Worker) -> Exception:
    """Return what to say of a worker that ended by itself."""
    try:
        status = worker.process.wait(_DYING_SECONDS)
    except subprocess.TimeoutExpired:  # its socket is closed, so it is of no use any more
        worker.process.kill()
        status = worker.process.wait()
    title = worker.task.title if worker.task else "a worker"
    said = _said(worker)
    if status == BUG_STATUS:
        return RuntimeError(f"a bug in a worker, at {title}; it said:\n{said}")
    last = said.rstrip().rpartition("\n")[2]
    if status >= 0:
        what, found = "its worker failed", f"status {status}"
    else:
        what, found = "its worker was killed", _signal_name(-status)
    found += f", process {worker.process.pid}" + (f": {last}" if last else "")
    return PrepareError(Problem(where=title, what=f"{what}; {RESUME}", found=found))


def _signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return name + (" (out of memory?)" if name == "SIGKILL" else "")


def _said(worker: Worker) -> str:
    """Return the end of what a worker said on stderr."""
    end = os.fstat(worker.said).st_size
    return os.pread(worker.said, _SAID_BYTES, max(0, end - _SAID_BYTES)).decode(errors="backslashreplace")


def _start(lock: int) -> Worker:
    with ExitStack() as undo:
        try:
            said = os.memfd_create("worker-stderr")
            undo.callback(os.close, said)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - this very program
                    # -P: what lies in the current directory is not imported.
                    [sys.executable, "-P", "-m", "tonnage.prepare.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    pass_fds=(theirs.fileno(), lock),
                    process_group=0,  # Ctrl-C is for the run, which ends its workers
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's, never used: 40 MiB of address space each
                )
        except OSError as error:
            what = "a process cannot be started; use fewer of them"
            raise PrepareError(Problem(where="--workers", what=what, found=error.strerror)) from error
        undo.pop_all()
    return Worker(process=process, connection=Connection(ours.detach()), said=said)


def _end(worker: Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.wait()
    os.close(worker.said)
