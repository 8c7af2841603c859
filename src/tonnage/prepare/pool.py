"""Worker processes: started, given tasks, watched, and gone when the run is left, however it is left.

A worker is a fresh interpreter that shares one socket with the run, and the lock. It is not started by
``multiprocessing``, which would run the caller's main module again.
"""

from __future__ import annotations

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
from tonnage.prepare.messages import Progress, Refused, Setup, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(slots=True, eq=False)
class Worker:
    """One process and what it is at."""

    process: subprocess.Popen[bytes]
    connection: Connection
    task: Task | None = None


@contextmanager
def started(workers: int, lock: int) -> Iterator[list[Worker]]:
    """Start so many workers; on leaving they are ended, in the middle of a task if they are at one.

    Args:
        workers: How many processes.
        lock: Descriptor of the lock, which the workers hold as well.
    """
    with ExitStack() as stack:
        idle = []
        for _ in range(workers):
            worker = _start(lock)
            stack.callback(_end, worker)
            idle.append(worker)
        yield idle


def run_tasks(
    tasks: Iterable[Task], setup: Setup, workers: Iterable[Worker]
) -> Iterator[Progress | tuple[Task, JobRecord]]:
    """Yield progress and finished tasks as the workers report them, until every task is done.

    Args:
        tasks: In the order they are begun; the next is asked for when a worker is free.
        setup: What holds for all of them.
        workers: New ones.

    Raises:
        PrepareError: A task is refused, or a worker was killed.
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
        worker.connection.send(message)
    except ConnectionError:
        raise _gone(worker) from None


def _receive(worker: Worker) -> Progress | JobRecord | Refused:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionError):
        raise _gone(worker) from None
    assert isinstance(message, Progress | JobRecord | Refused)
    return message


def _gone(worker: Worker) -> Exception:
    """Return what to say of a worker that ended by itself."""
    status = worker.process.wait()
    what = worker.task.title if worker.task else "a worker"
    if status >= 0:
        return RuntimeError(f"a worker failed with status {status} at {what}; its traceback is above")
    name = signal.Signals(-status).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return PrepareError(
        Problem(
            where=what, what=f"its worker was killed; {RESUME}", found=f"{name}{hint}, process {worker.process.pid}"
        )
    )


def _start(lock: int) -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - this very program
            # -P: what lies in the current directory is not imported.
            [sys.executable, "-P", "-m", "tonnage.prepare.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), lock),
            process_group=0,  # Ctrl-C is for the run, which ends its workers
        )
    return Worker(process=process, connection=Connection(ours.detach()))


def _end(worker: Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.wait()
