"""The workers of a server: one question each at a time, cut off when it takes too long, replaced when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from tonnage.ui.messages import LENGTH_BYTES, READY, Answer, Question
from tonnage.ui.settings import Settings

_RETRY_SECONDS = 1
_ENDING_SECONDS = 1
"""Between the end of what a worker says and its own."""
_ENDED = (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError)


class UnansweredError(Exception):
    """There is no answer."""


class BusyError(UnansweredError):
    """More requests wait than may."""


class GoneError(UnansweredError):
    """Who asked does not wait any more."""


class TookTooLongError(UnansweredError):
    """A question was not answered in time."""


class WorkerEndedError(UnansweredError):
    """A worker ended while it was asked; it has said why on standard error."""


class WorkerKilledError(UnansweredError):
    """A worker was ended from outside while it was asked, such as by a system that has no memory left."""


class Pool:
    """Asks workers."""

    def __init__(self, settings: Settings) -> None:
        """Take how many there are and how long they may take."""
        self._settings = settings
        self._idle: asyncio.LifoQueue[Process] = asyncio.LifoQueue()
        self._waiting = 0
        self._replacing: set[asyncio.Task[None]] = set()
        self._all: set[Process] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pool]:
        """Run the workers; afterwards all have ended.

        Raises:
            WorkerEndedError: One of them ended before it could be asked.
        """
        try:
            try:
                await asyncio.gather(*(self._start() for _ in range(self._settings.workers)))
            except _ENDED as error:
                raise WorkerEndedError from error
            yield self
        finally:
            for task in self._replacing:
                task.cancel()
            await asyncio.gather(*self._replacing, return_exceptions=True)
            for process in tuple(self._all):
                await self._end(process)

    async def ask(self, question: Question, gone: Callable[[], Awaitable[bool]] | None = None) -> Answer:
        """Return the answer of a worker.

        Args:
            question: What is asked.
            gone: Says whether nobody waits for the answer any more; looked at before a worker is asked.

        Raises:
            BusyError: Too many wait already.
            GoneError: Nobody waits for the answer.
            TookTooLongError: No answer in time; the time spent waiting counts.
            WorkerEndedError: The worker ended without an answer.
            WorkerKilledError: The worker was ended from outside.
        """
        if self._waiting >= self._settings.waiting + self._settings.workers:
            raise BusyError
        self._waiting += 1
        try:
            async with asyncio.timeout(self._settings.seconds):
                process = await self._free()
                if gone is not None and await self._is_gone(gone, process):
                    raise GoneError
                return await self._ask(process, question)
        except TimeoutError as error:
            raise TookTooLongError from error
        finally:
            self._waiting -= 1

    async def _free(self) -> Process:
        """Return a worker that waits for a question; one that ended meanwhile is replaced."""
        while (process := await self._idle.get()).returncode is not None:
            self._replace(process)
        return process

    async def _is_gone(self, gone: Callable[[], Awaitable[bool]], process: Process) -> bool:
        """Whether nobody waits for an answer; then, and where that cannot be told, the worker is free again."""
        is_gone = True
        try:
            is_gone = await gone()
        finally:
            if is_gone:
                self._idle.put_nowait(process)
        return is_gone

    async def _ask(self, process: Process, question: Question) -> Answer:
        answered = False
        try:
            raw = await _exchange(process, msgspec.msgpack.encode(question))
            answered = True
        except _ENDED as error:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _ENDING_SECONDS)
            killed = process.returncode is not None and process.returncode < 0
            raise (WorkerKilledError if killed else WorkerEndedError) from error
        finally:
            if answered:
                self._idle.put_nowait(process)
            else:  # ended, cut off or no longer wanted: what it would say belongs to nobody
                self._replace(process)
        return msgspec.msgpack.decode(raw, type=Answer)

    def _replace(self, process: Process) -> None:
        task = asyncio.create_task(self._end_and_start(process))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _end_and_start(self, process: Process) -> None:
        await self._end(process)
        while True:
            try:
                return await self._start()
            except (OSError, *_ENDED):  # no process to spare; requests wait meanwhile, and are cut off
                await asyncio.sleep(_RETRY_SECONDS)

    async def _start(self) -> None:
        settings = msgspec.json.encode(self._settings).decode()
        command = (sys.executable, "-P", "-m", "tonnage.ui.worker", settings)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        self._all.add(process)
        assert process.stdout is not None
        await process.stdout.readexactly(len(READY))  # a request does not wait for what is imported
        self._idle.put_nowait(process)

    async def _end(self, process: Process) -> None:
        if process.returncode is None:  # it holds nothing that must be written; asyncio's own kill would reap it first
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        self._all.discard(process)


async def _exchange(process: Process, content: bytes) -> bytes:
    """Return what a worker says to something."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(content).to_bytes(LENGTH_BYTES) + content)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return await process.stdout.readexactly(int.from_bytes(head))
