"""Many small waits at once, their results in order."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

from tonnage.errors import Problem, SourceError

_POLL_SECONDS = 0.25
_DYING_SECONDS = 5.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class TimeLimit:
    """When many waits have to be over, so that a server that is slow a thousand times costs no day."""

    def __init__(self, where: str, seconds: float) -> None:
        """Begin now.

        Args:
            where: Who is waited for, for the refusal.
            seconds: How long.
        """
        self._where = where
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return how many seconds are left."""
        return max(self._end - time.monotonic(), 0.0)

    def refusal(self) -> SourceError:
        """Return that the time is up."""
        expected = f"everything within {self._seconds:.0f} s"
        return SourceError(Problem(where=self._where, what="too slow", expected=expected))

    def is_over(self) -> bool:
        """Whether to wait no longer."""
        return not self.left()


class GrowthLimit(TimeLimit):
    """The same, and how much memory may be taken meanwhile by a library that reads an answer whole."""

    def __init__(self, where: str, seconds: float, nbytes: int) -> None:
        """Begin now, with the most this process has ever taken.

        Args:
            where: Who is waited for.
            seconds: How long.
            nbytes: Beyond what was taken before.
        """
        super().__init__(where, seconds)
        self._nbytes = nbytes
        self._before = _peak_bytes()

    def is_over(self) -> bool:
        """Whether to wait no longer."""
        return self._is_large() or super().is_over()

    def refusal(self) -> SourceError:
        """Return that the answer is too large, or that the time is up."""
        if not self._is_large():
            return super().refusal()
        expected = f"at most {self._nbytes} bytes"
        return SourceError(Problem(where=self._where, what="an answer without end", expected=expected))

    def _is_large(self) -> bool:
        return _peak_bytes() - self._before > self._nbytes


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


class _Slot(Generic[Item, Result]):
    """One item, and what became of it."""

    __slots__ = ("done", "error", "item", "result")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.done = Event()
        self.result: list[Result] = []
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Let whoever waits for it go on."""
        self.done.set()


def in_order(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    threads: int,
    weights: Sequence[int] | None = None,
    room: int | None = None,
    limit: TimeLimit | None = None,
) -> Generator[Result, None, None]:
    """Yield the results of many items in their order, worked at by threads of their own.

    The threads do not hold up the end of the process: after a failure nobody waits for what else is under way.

    Args:
        work: Waits rather than computes.
        items: What is worked at.
        threads: How many at once.
        weights: Of the results, in bytes.
        room: How heavy results not taken yet may be together; a single one may always be.
        limit: For all of them together.

    Raises:
        BaseException: What ``work`` raised of the first item that failed.
        SourceError: The time is up.
    """
    queue: SimpleQueue[_Slot[Item, Result] | None] = SimpleQueue()
    stopped = Event()
    count = min(threads, len(items))
    for _ in range(count):
        Thread(target=_serve, args=(work, queue, stopped, _Slot.finish), name="source", daemon=True).start()
    waiting: deque[tuple[_Slot[Item, Result], int]] = deque()
    held = begun = 0
    try:
        while begun < len(items) or waiting:
            while begun < len(items):
                weight = weights[begun] if weights else 0
                if waiting and (len(waiting) >= 2 * count or (room is not None and held + weight > room)):
                    break
                slot: _Slot[Item, Result] = _Slot(items[begun])
                waiting.append((slot, weight))
                queue.put(slot)
                held, begun = held + weight, begun + 1
            slot, weight = waiting.popleft()
            _wait(slot, limit)
            if slot.error is not None:
                raise slot.error
            held -= weight
            yield slot.result.pop()
    finally:
        stopped.set()
        for _ in range(count):
            queue.put(None)


def _wait(slot: _Slot[Item, Result], limit: TimeLimit | None) -> None:
    """Wait until an item is done.

    Raises:
        SourceError: The limit is reached before.
    """
    if limit is None:
        slot.done.wait()
        return
    while not slot.done.wait(min(limit.left(), _POLL_SECONDS)):
        if limit.is_over():
            raise limit.refusal()


def waited(ask: Callable[[], Result], limit: TimeLimit | None = None) -> Result:
    """Return what a library answers that lets no signal in while it waits: a thread waits in our place.

    Raises:
        BaseException: What ``ask`` raised.
        SourceError: The time is up.
    """
    return next(in_order(lambda _: ask(), (None,), threads=1, limit=limit))


def as_done(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    threads: int,
    on_poll: Callable[[], None],
    stop: Callable[[], None],
) -> Generator[Result, None, None]:
    """Yield the results of many items as they come, worked at by threads of their own.

    Args:
        work: Should look now and then whether it was stopped.
        items: What is worked at, begun in their order.
        threads: How many at once.
        on_poll: Called a few times a second.
        stop: Called first when this is left, however it is left; what is under way then is waited for, but not longer
            than a few seconds, and does not hold up the end of the process.

    Raises:
        BaseException: What ``work`` raised first.
    """
    queue: SimpleQueue[_Slot[Item, Result] | None] = SimpleQueue()
    finished: SimpleQueue[_Slot[Item, Result]] = SimpleQueue()
    stopped = Event()
    for item in items:
        queue.put(_Slot(item))
    args = (work, queue, stopped, finished.put)
    crew = [Thread(target=_serve, args=args, daemon=True) for _ in range(min(threads, len(items)))]
    begun: list[Thread] = []
    left = len(items)
    try:
        for thread in crew:
            thread.start()
            begun.append(thread)
        while left:
            try:
                slot = finished.get(timeout=_POLL_SECONDS)
            except Empty:
                on_poll()
                continue
            left -= 1
            on_poll()
            if slot.error is not None:
                raise slot.error
            yield slot.result.pop()
    finally:
        stop()
        stopped.set()
        end = time.monotonic() + _DYING_SECONDS
        for _ in begun:
            queue.put(None)
        for thread in begun:
            thread.join(max(end - time.monotonic(), 0.0))


def _serve(
    work: Callable[[Item], Result],
    queue: SimpleQueue[_Slot[Item, Result] | None],
    stopped: Event,
    finish: Callable[[_Slot[Item, Result]], object],
) -> None:
    while (slot := queue.get()) is not None and not stopped.is_set():
        try:
            slot.result.append(work(slot.item))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the result
            slot.error = error
        finish(slot)
