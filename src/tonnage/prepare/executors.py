"""The seam between a run, which keeps lock and journal, and who does its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from tonnage.prepare.journal import JobRecord
from tonnage.prepare.messages import Progress, Task
from tonnage.prepare.preparation import Preparation

Event = Progress | tuple[Task, JobRecord]
"""What is told of tasks: so many bytes more, or one is finished."""

Run = Callable[[Iterable[Task]], Iterator[Event]]
"""Does tasks, begun in this order; asks for the next when there is somebody to do it.

Raises:
    PrepareError: A task is refused, or who was at it is gone too often.
    RuntimeError: A bug in a task; its traceback is in the message.
"""

Executor = Callable[[Preparation, int], AbstractContextManager[Run]]
"""Gets ready to do the tasks of a preparation under the lock of this descriptor.

It is entered before the output directory is looked at, and ends there the epoch of every earlier run; when it is left,
nobody works on a task any more.
"""
