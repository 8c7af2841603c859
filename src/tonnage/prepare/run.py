"""A preparation from schedule to summary: checked, begun or resumed, done by the workers, checked again.

What is on the disk decides where a run goes on: no journal, it begins; a journal of the same identity, it resumes; a
summary, it is complete and nothing is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec

from tonnage.prepare.checks import check_headers, check_sizes
from tonnage.prepare.documents import SUMMARY
from tonnage.prepare.executors import Executor, Run
from tonnage.prepare.io import write_whole
from tonnage.prepare.journal import JobRecord, SourceDigest, WrittenFile
from tonnage.prepare.messages import Progress
from tonnage.prepare.output_dir import path_within, remove_partials
from tonnage.prepare.pool import local_processes
from tonnage.prepare.preparation import Preparation, make_tasks
from tonnage.prepare.resume import begin, check_held, completed, held
from tonnage.prepare.summary import RankSummary, Summary, check_bytes, summary_bytes
from tonnage.prepare.survey import in_order

_MODULES = ("blake3", "numba", "numpy")
"""What workers import when they need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a preparation is.

    Attributes:
        done_bytes: Written, or read for the digest of a source file, those of earlier runs included.
        total_bytes: To be written and digested in all.
        resumed_bytes: Of the bytes done, those of earlier runs.
        tasks_done: Jobs, whole files and digests.
        tasks: In all.
    """

    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    tasks_done: int
    tasks: int


def run_preparation(
    preparation: Preparation,
    on_progress: Callable[[Standing], None],
    *,
    force: bool = False,
    executor: Executor = local_processes,
) -> Summary:
    """Write everything, or what an earlier run left to do, and return the summary that stands in the output directory.

    Args:
        preparation: What to do.
        on_progress: Called often.
        force: Start over, whatever an earlier preparation left here.
        executor: Who does the work: processes of this machine, or a cluster.

    Raises:
        PrepareError: Another run is at work here, the directory holds something else, or a task is refused. What was
            done stays done.
        ModuleNotFoundError: The extra ``prepare`` is not installed.
    """
    output = preparation.setup.output
    start = time.monotonic()
    _check_installed()
    with held(preparation) as lock:
        earlier = None if force else completed(preparation)
        if earlier is not None:
            return earlier
        records = _write(preparation, on_progress, executor(preparation, lock), force=force)
        check_sizes(output, preparation.survey.outputs)
        summary = _summary(preparation, records, time.monotonic() - start)
        check_bytes(summary, preparation.survey.outputs, preparation.planned_bytes, where=str(output / SUMMARY))
        check_held(output, lock)
        write_whole(path_within(output, SUMMARY), summary_bytes(summary))
        return summary


def _check_installed() -> None:
    """Refuse here what no worker could import."""
    for name in _MODULES:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _write(
    preparation: Preparation,
    on_progress: Callable[[Standing], None],
    ready: AbstractContextManager[Run],
    *,
    force: bool,
) -> dict[int, JobRecord]:
    """Do what is left to do, put it on record, and return all records."""
    planned: set[str] = set()
    try:
        with ready as run:  # interpreters start while this one looks around
            journal, records = begin(preparation, force=force)
            planned = {one.path for one in preparation.survey.outputs}
            try:
                for record in _work(preparation, records, on_progress, run):
                    journal.append(record)
                    records[record.job] = record
            finally:
                journal.close()
    finally:  # the workers are gone; where nothing was begun nothing is removed
        remove_partials(preparation.setup.output, planned)
    return records


def _work(
    preparation: Preparation,
    records: dict[int, JobRecord],
    on_progress: Callable[[Standing], None],
    run: Run,
) -> Iterator[JobRecord]:
    """Do what is left and yield records of what was read back and found to be as planned."""
    sizes = preparation.survey.tasks
    left = in_order(size for size in sizes if size.number not in records)
    resumed = preparation.survey.progress_bytes - sum(size.progress_bytes for size in left)
    standing = Standing(
        done_bytes=resumed,
        total_bytes=preparation.survey.progress_bytes,
        resumed_bytes=resumed,
        tasks_done=len(records),
        tasks=len(sizes),
    )
    on_progress(standing)
    if not left:
        return
    for event in run(make_tasks(preparation, left)):
        if isinstance(event, Progress):
            standing = replace(standing, done_bytes=standing.done_bytes + event.nbytes)
        else:
            task, record = event
            check_headers(preparation.setup.output, task.work)
            yield record
            standing = replace(standing, tasks_done=standing.tasks_done + 1)
        on_progress(standing)


def _summary(preparation: Preparation, records: dict[int, JobRecord], seconds: float) -> Summary:
    """Return the summary of a finished preparation."""
    ordered = [records[number] for number in sorted(records)]
    by_rank: dict[int | None, list[WrittenFile]] = {}
    for record in ordered:
        for file in record.files:
            by_rank.setdefault(file.rank, []).append(file)
    return Summary(
        checkpoint=preparation.source,
        identity=preparation.identity,
        ranks=tuple(
            RankSummary(
                rank=rank,
                planned_bytes=preparation.planned_bytes[rank],
                payload_bytes=sum(file.payload_bytes for file in by_rank.get(rank, ())),
                file_bytes=sum(file.file_bytes for file in by_rank.get(rank, ())),
                files=tuple(by_rank.get(rank, ())),
            )
            for rank in preparation.schedule.ranks
        ),
        files=tuple(by_rank.get(None, ())),
        sources=_sources(preparation, ordered),
        plan=preparation.plan,
        converted=tuple(tensor for record in ordered for tensor in record.converted),
        seconds=seconds,
        worker_seconds=sum(record.seconds for record in ordered),
    )


def _sources(preparation: Preparation, records: Iterable[JobRecord]) -> tuple[SourceDigest, ...]:
    """Return every source file; the digest of one that came along whole is that of what was written."""
    digests: dict[str | None, str | None] = {}
    for record in records:
        task = preparation.survey.tasks[record.job]
        if task.outputs and task.outputs[0].rank is None:
            digests[task.source] = record.files[0].digest
        digests.update((source.name, source.digest) for source in record.sources)
    return tuple(
        SourceDigest(name=facts.name, nbytes=facts.nbytes, digest=digests.get(facts.name))
        for facts in preparation.identity.sources
    )
