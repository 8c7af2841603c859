"""Where a run goes on: at the beginning, after what a journal records, or nowhere because all is done.

Called with the lock held, but for the lock itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tonnage.checkpoint.io import read_bytes
from tonnage.errors import Problem
from tonnage.prepare.checks import check_disk, check_memory, is_done
from tonnage.prepare.io import PrepareError, sync_directory
from tonnage.prepare.journal import (
    JOURNAL_LIMIT_BYTES,
    JobRecord,
    Journal,
    check_identity,
    create_journal,
    read_journal,
)
from tonnage.prepare.output_dir import (
    STATE,
    SUMMARY,
    check_foreign,
    locked,
    make_parents,
    path_within,
    remove_partials,
    remove_recorded,
)
from tonnage.prepare.preparation import Preparation, make_tasks
from tonnage.prepare.summary import Summary, read_summary
from tonnage.prepare.survey import TaskSize

JOURNAL_FILE = f"{STATE}/journal.jsonl"
LOCK_FILE = f"{STATE}/lock"


@contextmanager
def held(preparation: Preparation, *, force: bool) -> Iterator[int]:
    """Hold the output directory; leave in it neither lock nor journal when it is complete, or nothing was begun."""
    output = preparation.setup.output
    if not force and not os.path.lexists(output / STATE) and not os.path.lexists(output / SUMMARY):
        check_foreign(output, ())
    with locked(make_parents(output, LOCK_FILE)) as lock:
        remove_partials(output)
        try:
            yield lock
        finally:
            if os.path.lexists(output / SUMMARY) or not os.path.lexists(output / JOURNAL_FILE):
                shutil.rmtree(output / STATE)


def completed(preparation: Preparation) -> Summary | None:
    """Return the summary of a preparation that is complete.

    Raises:
        PrepareError: It is of something else, or its files are not there any more.
    """
    output = preparation.setup.output
    path = path_within(output, SUMMARY)
    if not path.exists():
        return None
    summary = read_summary(read_bytes(path, limit_bytes=JOURNAL_LIMIT_BYTES, kind=PrepareError), where=SUMMARY)
    check_identity(summary.identity, preparation.identity, where=str(output))
    written = {file.path: file for file in summary.written}
    for task in make_tasks(preparation, preparation.survey.tasks):
        outputs = preparation.survey.tasks[task.number].outputs
        if not is_done(output, [written[one.path] for one in outputs if one.path in written], task.work):
            what = f"complete, but the files of {task.title} are not as written; --force starts over"
            raise PrepareError(Problem(where=str(output), what=what))
    return summary


def begin(preparation: Preparation, *, force: bool) -> tuple[Journal, dict[int, JobRecord]]:
    """Begin, or find out what an earlier run did; its word is taken for jobs whose files are there."""
    if force:
        _forget(preparation)
    output, identity = preparation.setup.output, preparation.identity
    path = path_within(output, JOURNAL_FILE)
    if not path.exists():
        check_foreign(output, ())
        _check_room(preparation, preparation.survey.tasks)
        return create_journal(path, identity), {}
    raw = read_bytes(path, limit_bytes=JOURNAL_LIMIT_BYTES, kind=PrepareError)
    then, lines, good_bytes = read_journal(raw, where=JOURNAL_FILE)
    check_identity(then, identity, where=str(output))
    check_foreign(output, {one.path for one in preparation.survey.outputs})
    claimed = {record.job: record for record in lines}
    sizes = [task for task in preparation.survey.tasks if task.number in claimed]
    records = {
        task.number: claimed[task.number]
        for task in make_tasks(preparation, sizes)
        if is_done(output, claimed[task.number].files, task.work)
    }
    _check_room(preparation, [task for task in preparation.survey.tasks if task.number not in records])
    return Journal(path, good_bytes), records


def _check_room(preparation: Preparation, left: Sequence[TaskSize]) -> None:
    """Refuse to go on without room on the disk and in memory."""
    check_disk(preparation.setup.output, [one for task in left for one in task.outputs])
    if left:
        check_memory(preparation.memory_bytes, preparation.workers)


def _forget(preparation: Preparation) -> None:
    """Remove what an earlier preparation left, the summary first: without it nothing here is complete."""
    output = preparation.setup.output
    recorded = {one.path for one in preparation.survey.outputs} | _recorded(output)
    for relative in (SUMMARY, JOURNAL_FILE):
        path = path_within(output, relative)
        if path.exists():
            path.unlink()
            sync_directory(path.parent)
    remove_recorded(output, recorded)


def _recorded(output: Path) -> set[str]:
    """Return the files that a summary or a journal names; what cannot be read names none."""
    found: set[str] = set()
    for relative in (SUMMARY, JOURNAL_FILE):
        path = path_within(output, relative)
        if not path.exists():
            continue
        raw = read_bytes(path, limit_bytes=JOURNAL_LIMIT_BYTES, kind=PrepareError)
        try:
            if relative == SUMMARY:
                found.update(file.path for file in read_summary(raw, where=relative).written)
            else:
                found.update(file.path for record in read_journal(raw, where=relative)[1] for file in record.files)
        except PrepareError:
            continue
    return found
