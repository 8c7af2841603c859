"""A preparation as one value: schedule, sizes, identity, and the tasks the workers are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.errors import Problem
from tonnage.prepare.checks import check_destination
from tonnage.prepare.io import PrepareError, source_facts, source_states
from tonnage.prepare.jobs import Schedule, ShardPass, SourceFile, Work, jobs_of
from tonnage.prepare.journal import Identity
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.messages import Setup, Task
from tonnage.prepare.survey import Remote, Survey, TaskSize, digest_schedule, survey_schedule, with_digests
from tonnage.sources.local import LocalSource
from tonnage.sources.model import FileFacts, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Everything a preparation is of, checked as far as it can be without writing.

    Attributes:
        schedule: What is to be done.
        survey: Its sizes.
        identity: What the written bytes depend on.
        source: Name of the checkpoint.
        setup: What the workers need.
        planned_bytes: Weight bytes of every prepared rank, as planned.
        workers: How many processes of this machine; none where a cluster does the work.
        plan: The document of the plan it is of; goes into the summary.
        states: Of the source files on this machine, by name; not recorded.
    """

    schedule: Schedule
    survey: Survey
    identity: Identity
    source: str
    setup: Setup
    planned_bytes: dict[int, int]
    workers: int
    plan: Mapping[str, Any] | None = None
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Anonymous memory of all workers at most."""
        return self.workers * self.task_memory_bytes

    @property
    def task_memory_bytes(self) -> int:
        """Anonymous memory of whoever does one task, at most."""
        return self.survey.worker_bytes(self.setup.window_bytes)


def make_preparation(  # noqa: PLR0913 - all that a preparation is of
    schedule: Schedule,
    source: Source,
    setup: Setup,
    identity: Callable[[tuple[FileFacts, ...], str], Identity],
    *,
    planned_bytes: dict[int, int],
    side_files: Iterable[str] = (),
    source_digests: bool = True,
    workers: int | None = None,
    plan: Mapping[str, Any] | None = None,
    whole: Schedule | None = None,
) -> Preparation:
    """Return a preparation: source files looked at, sizes counted, plan and schedule compared.

    Args:
        schedule: What is to be done.
        source: The checkpoint.
        setup: From where to where, and how.
        identity: Makes the identity of the source files and the digest of the schedule.
        planned_bytes: Weight bytes of every rank, as planned.
        side_files: Small files of the checkpoint; one that is not copied whole counts as read all the same.
        source_digests: Whether digests of the source files are taken, besides those of files that are copied whole.
        workers: How many processes; by default as many as there are cores, and no more than tasks.
        plan: The document of the plan.
        whole: The schedule of all ranks, if this is of some: the identity is of it, so that parts are known as one.

    Raises:
        PrepareError: A source file is missing or no regular file, the output directory cannot be one, or the schedule
            writes other bytes than planned.
    """
    check_destination(source.directory if isinstance(source, LocalSource) else None, setup.output)
    along = [file.source for file in schedule.files if file.source is not None]
    copied = {one.name: one for one in source_facts(source, along)}
    remote = Remote(window_bytes=setup.window_bytes, digests=source_digests) if source.transfer is not None else None
    survey = survey_schedule(schedule, {name: one.nbytes for name, one in copied.items()}, remote)
    read = {*side_files, *(task.source for task in survey.tasks if task.source)}
    facts = copied | {one.name: one for one in source_facts(source, read - copied.keys())}
    _check_planned(planned_bytes, survey)
    if source_digests:
        survey = with_digests(survey, {name: one.nbytes for name, one in facts.items() if name not in copied})
    wanted = workers or len(os.sched_getaffinity(0))
    return Preparation(
        schedule=schedule,
        survey=survey,
        identity=identity(
            tuple(facts[name] for name in sorted(facts)), survey.digest if whole is None else digest_schedule(whole)
        ),
        source=source.name,
        setup=setup,
        planned_bytes=planned_bytes,
        workers=max(1, min(wanted, len(survey.tasks))),
        plan=plan,
        states=source_states(source, facts),
    )


def make_tasks(preparation: Preparation, sizes: Iterable[TaskSize]) -> Iterator[Task]:
    """Make tasks when they are asked for."""
    schedule = preparation.schedule
    facts = {one.name: one for one in preparation.identity.sources}
    for size in sizes:
        work = _work_of(schedule, size)
        headers = tuple(header_bytes(output) for job in jobs_of(work) for output in job.outputs)
        source = None if size.source is None else facts[size.source]
        state = preparation.states.get(size.source or "", "")
        yield Task(number=size.number, work=work, source=source, headers=headers, state=state)


def _work_of(schedule: Schedule, size: TaskSize) -> Work:
    if size.file is not None:
        return schedule.files[size.file]
    if size.digests_only and size.source is not None:
        return SourceFile(name=size.source)
    jobs = tuple(schedule.jobs[number] for number in size.jobs)
    digest = size.digested_bytes is not None
    return ShardPass(jobs=jobs, digest=digest) if digest or len(jobs) > 1 else jobs[0]


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
