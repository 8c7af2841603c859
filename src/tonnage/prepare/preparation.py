"""A preparation as one value: schedule, sizes, identity, and the tasks the workers are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.errors import Problem
from tonnage.prepare.checks import check_destination
from tonnage.prepare.io import FileFacts, PrepareError, source_facts
from tonnage.prepare.jobs import Job, Schedule, SourceFile, Work
from tonnage.prepare.journal import Identity
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.messages import Setup, Task
from tonnage.prepare.survey import Survey, TaskSize, survey_schedule, with_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Everything a preparation is of, checked as far as it can be without writing.

    Attributes:
        schedule: What is to be done.
        survey: Its sizes.
        identity: What the written bytes depend on.
        setup: What the workers need.
        planned_bytes: Weight bytes of every prepared rank, as planned.
        workers: How many processes.
        plan: The document of the plan it is of; goes into the summary.
    """

    schedule: Schedule
    survey: Survey
    identity: Identity
    setup: Setup
    planned_bytes: dict[int, int]
    workers: int
    plan: Mapping[str, Any] | None = None

    @property
    def memory_bytes(self) -> int:
        """Anonymous memory of all workers at most."""
        return self.workers * self.survey.worker_bytes(self.setup.window_bytes)


def make_preparation(  # noqa: PLR0913 - all that a preparation is of
    schedule: Schedule,
    setup: Setup,
    identity: Callable[[tuple[FileFacts, ...], str], Identity],
    *,
    planned_bytes: dict[int, int],
    side_files: Iterable[str] = (),
    source_digests: bool = True,
    workers: int | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Preparation:
    """Return a preparation: source files looked at, sizes counted, plan and schedule compared.

    Args:
        schedule: What is to be done.
        setup: From where to where, and how.
        identity: Makes the identity of the source files and the digest of the schedule.
        planned_bytes: Weight bytes of every rank, as planned.
        side_files: Small files of the checkpoint; one that is not copied whole counts as read all the same.
        source_digests: Whether digests of the source files are taken, besides those of files that are copied whole.
        workers: How many processes; by default as many as there are cores, and no more than tasks.
        plan: The document of the plan.

    Raises:
        PrepareError: A source file is missing or no regular file, the output directory cannot be one, or the schedule
            writes other bytes than planned.
    """
    check_destination(setup.source, setup.output)
    whole = [file.source for file in schedule.files if file.source is not None]
    copied = {one.name: one for one in source_facts(setup.source, whole)}
    survey = survey_schedule(schedule, {name: one.nbytes for name, one in copied.items()})
    read = {*side_files, *(task.source for task in survey.tasks if task.source)}
    facts = copied | {one.name: one for one in source_facts(setup.source, read - copied.keys())}
    _check_planned(planned_bytes, survey)
    if source_digests:
        survey = with_digests(survey, {name: one.nbytes for name, one in facts.items() if name not in copied})
    wanted = workers or len(os.sched_getaffinity(0))
    return Preparation(
        schedule=schedule,
        survey=survey,
        identity=identity(tuple(facts[name] for name in sorted(facts)), survey.digest),
        setup=setup,
        planned_bytes=planned_bytes,
        workers=max(1, min(wanted, len(survey.tasks))),
        plan=plan,
    )


def make_tasks(preparation: Preparation, sizes: Iterable[TaskSize]) -> Iterator[Task]:
    """Make tasks when they are asked for."""
    schedule = preparation.schedule
    facts = {one.name: one for one in preparation.identity.sources}
    for size in sizes:
        work = _work_of(schedule, size)
        headers = tuple(map(header_bytes, work.outputs)) if isinstance(work, Job) else ()
        source = None if size.source is None else facts[size.source]
        yield Task(number=size.number, work=work, source=source, headers=headers)


def _work_of(schedule: Schedule, size: TaskSize) -> Work:
    if size.digested_bytes is not None and size.source is not None:
        return SourceFile(name=size.source)
    behind = size.number - len(schedule.jobs)
    return schedule.jobs[size.number] if behind < 0 else schedule.files[behind]


def _check_planned(planned_bytes: dict[int, int], survey: Survey) -> None:
    """Refuse a schedule that is not the plan: the one number both are about."""
    problems = [
        Problem(
            where=f"rank {rank}",
            what="the schedule writes other bytes than planned",
            expected=f"{planned} bytes",
            found=f"{survey.payload_bytes(rank)} bytes",
        )
        for rank, planned in planned_bytes.items()
        if planned != survey.payload_bytes(rank)
    ]
    if problems:
        raise PrepareError(*problems)
