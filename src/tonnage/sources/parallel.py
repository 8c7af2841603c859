"""Many small waits at once, their results in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

from tonnage.errors import Problem, SourceError

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


class _Slot(Generic[Item, Result]):
    """One item, and what became of it."""

    __slots__ = ("done", "error", "item", "result")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.done = Event()
        self.result: list[Result] = []
        self.error: BaseException | None = None


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
        Thread(target=_serve, args=(work, queue, stopped), name="source", daemon=True).start()
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
            if not slot.done.wait(None if limit is None else limit.left()):
                assert limit is not None  # without one nothing ends the waiting
                raise limit.refusal()
            if slot.error is not None:
                raise slot.error
            held -= weight
            yield slot.result.pop()
    finally:
        stopped.set()
        for _ in range(count):
            queue.put(None)


def _serve(work: Callable[[Item], Result], queue: SimpleQueue[_Slot[Item, Result] | None], stopped: Event) -> None:
    while (slot := queue.get()) is not None and not stopped.is_set():
        try:
            slot.result.append(work(slot.item))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the result
            slot.error = error
        slot.done.set()
