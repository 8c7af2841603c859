"""Where a run goes on: at the beginning, after what a journal records, or nowhere because all is done.

Called with the lock held, but for the lock itself. Everything is looked at before anything is removed, and only what an
earlier preparation put on record is ever removed: in ``prepare.json``, in its journal, or in the list of outputs that
is on the disk before the first of them. That list stays until the last recorded file is gone, so that a run killed at
any point leaves a directory that is not taken for somebody else's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tonnage.checkpoint.io import read_bytes
from tonnage.errors import Problem
from tonnage.prepare.checks import (
    check_disk,
    check_memory,
    converted_tensors,
    is_recorded,
    is_written,
)
from tonnage.prepare.documents import PACKAGE_DOCUMENTS, SIGNATURE, STATE, SUMMARY
from tonnage.prepare.io import PrepareError, sync_directory
from tonnage.prepare.journal import (
    JOURNAL_LIMIT_BYTES,
    Identity,
    JobRecord,
    Journal,
    check_identity,
    create_journal,
    read_journal,
    read_outputs,
    write_outputs,
)
from tonnage.prepare.output_dir import (
    EPOCH_FILE,
    JOURNAL_FILE,
    LOCK_FILE,
    OUTPUTS_FILE,
    check_foreign,
    check_state,
    find_partials,
    is_package,
    is_still,
    locked,
    make_parents,
    path_within,
    remove_empty,
    remove_partials,
    remove_recorded,
    remove_state,
)
from tonnage.prepare.preparation import Preparation, make_tasks
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES, Summary, check_summary, read_summary
from tonnage.prepare.survey import TaskSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Standpoint:
    """Where a run goes on.

    Attributes:
        records: Finished tasks by number.
        journal_bytes: Whole lines of the journal it goes on with; ``None`` to begin.
        earlier: Files of an earlier preparation, to be removed first.
        named: All it may have been writing.
    """

    records: dict[int, JobRecord]
    journal_bytes: int | None = None
    earlier: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()


@contextmanager
def held(preparation: Preparation) -> Iterator[int]:
    """Hold the output directory; leave in it neither lock nor journal when it is complete, or nothing was begun."""
    output = preparation.setup.output
    _check_strangers(output)
    made = [folder for folder in (output, *output.parents) if not os.path.lexists(folder)]
    try:
        with locked(make_parents(output, LOCK_FILE)) as lock:
            try:
                yield lock
                if is_still(output / LOCK_FILE, lock) and os.path.lexists(output / SUMMARY):
                    remove_state(output, (JOURNAL_FILE, OUTPUTS_FILE, EPOCH_FILE))
            finally:
                # Another lock file means another run: what is here now is not ours to tidy up.
                if is_still(output / LOCK_FILE, lock) and not _is_begun(output):
                    remove_state(output, (LOCK_FILE,))
    finally:
        if made:
            remove_empty((output / STATE, *made))


def check_held(output: Path, lock: int) -> None:
    """Refuse to complete what somebody removed or replaced meanwhile: another run may be at work here.

    Raises:
        PrepareError: As said.
    """
    if not is_still(output / LOCK_FILE, lock):
        raise PrepareError(Problem(where=str(output), what="removed or replaced while it was written"))


def check_output(preparation: Preparation, *, force: bool) -> None:
    """Refuse what a run would refuse before its first byte, and write nothing: for a dry run.

    Raises:
        PrepareError: As :func:`completed` and :func:`begin`.
    """
    _check_strangers(preparation.setup.output)
    if force or completed(preparation) is None:
        find_standpoint(preparation, force=force)


def completed(preparation: Preparation) -> Summary | None:
    """Return the summary of a preparation that is complete.

    Raises:
        PrepareError: It is of something else, says something else than was planned, or its files are not there any
            more.
    """
    output, survey = preparation.setup.output, preparation.survey
    path = path_within(output, SUMMARY)
    if not path.exists():
        return None
    summary = read_summary(read_bytes(path, limit_bytes=SUMMARY_LIMIT_BYTES, kind=PrepareError), where=SUMMARY)
    check_identity(summary.identity, preparation.identity, where=str(output))
    converted: list[tuple[str, int]] = []
    unlike: list[str] = []
    for task in make_tasks(preparation, survey.tasks):
        converted += converted_tensors(task.work)
        if not is_written(output, survey.tasks[task.number], task.work):
            unlike.append(task.title)
    where = str(output / SUMMARY)
    check_summary(summary, survey.outputs, preparation.planned_bytes, converted, plan=preparation.plan, where=where)
    if unlike:
        what = f"complete, but the files of {unlike[0]} are not as written; --force starts over"
        raise PrepareError(Problem(where=str(output), what=what))
    return summary


def begin(preparation: Preparation, *, force: bool) -> tuple[Journal, dict[int, JobRecord]]:
    """Begin, or find out what an earlier run did; its word is taken for jobs whose files are there."""
    found = find_standpoint(preparation, force=force)
    output = preparation.setup.output
    remove_partials(output, _unfinished(preparation, found.named))
    path = path_within(output, JOURNAL_FILE)
    if found.journal_bytes is not None:
        return Journal(path, found.journal_bytes), found.records
    if force:
        _forget(output, found.earlier)
    planned = {one.path: one.file_bytes for one in preparation.survey.outputs}
    write_outputs(path_within(output, OUTPUTS_FILE), planned)
    return create_journal(path, preparation.identity), {}


def find_standpoint(preparation: Preparation, *, force: bool) -> Standpoint:
    """Find out where a run goes on, and refuse all that it would refuse; nothing is written or removed.

    Raises:
        PrepareError: The directory holds something else, or another preparation, or there is no room.
    """
    output, tasks = preparation.setup.output, preparation.survey.tasks
    for one in preparation.survey.outputs:
        path_within(output, one.path)
    earlier, named = _recorded(output)
    journal = None if force else _journal(output)
    if journal is None:
        check_foreign(output, earlier, named)
        if earlier and not force:
            what = "files of an earlier preparation are still here; --force starts over"
            raise PrepareError(Problem(where=str(output), what=what, found=min(earlier)))
        _check_room(preparation, tasks, earlier, named)
        return Standpoint(records={}, earlier=earlier, named=named)
    then, lines, good_bytes = journal
    check_identity(then, preparation.identity, where=str(output))
    recorded = {file.path for record in lines for file in record.files}
    planned = {
        one.path
        for one in preparation.survey.outputs
        if one.path in recorded or _fits(output, one.path, one.file_bytes)
    }
    check_foreign(output, planned, {one.path for one in preparation.survey.outputs})
    claimed = {record.job: record for record in lines}
    records = {
        task.number: claimed[task.number]
        for task in make_tasks(preparation, [task for task in tasks if task.number in claimed])
        if is_recorded(claimed[task.number], tasks[task.number], task.work)
        and is_written(output, tasks[task.number], task.work)
    }
    _check_room(preparation, [task for task in tasks if task.number not in records], (), ())
    return Standpoint(records=records, journal_bytes=good_bytes)


def _check_strangers(output: Path) -> None:
    """Refuse, before there is a lock, a directory that plainly is none of a preparation, or is one no more."""
    if is_package(output):
        expected, found = "a new or an empty directory", "manifest.json and model.sig"
        raise PrepareError(Problem(where=str(output), what="a finished package", expected=expected, found=found))
    check_state(output)
    if not os.path.lexists(output / STATE) and not os.path.lexists(output / SUMMARY):
        check_foreign(output, ())


def _is_begun(output: Path) -> bool:
    return any(os.path.lexists(output / relative) for relative in (JOURNAL_FILE, OUTPUTS_FILE))


def _unfinished(preparation: Preparation, named: Iterable[str]) -> set[str]:
    """Return the files that may be there in part: planned, recorded, or of the run itself."""
    planned = {one.path for one in preparation.survey.outputs}
    return planned | {*named, SUMMARY, SIGNATURE, JOURNAL_FILE, OUTPUTS_FILE}


def _check_room(
    preparation: Preparation, left: Sequence[TaskSize], earlier: Iterable[str], named: Iterable[str]
) -> None:
    """Refuse to go on without room on the disk and in memory; what is removed first makes room."""
    output = preparation.setup.output
    removed = [*find_partials(output, _unfinished(preparation, named)), *(output / one for one in earlier)]
    freed = sum(path.lstat().st_blocks * 512 for path in removed if os.path.lexists(path))
    check_disk(output, [one for task in left for one in task.outputs], freed=freed)
    if left:
        check_memory(preparation.memory_bytes, preparation.workers)


# --- what an earlier preparation left ---------------------------------------------------------------------------------


def _forget(output: Path, earlier: Iterable[str]) -> None:
    """Remove what an earlier preparation left, the summary first: without it nothing here is complete.

    Killed anywhere, the list of outputs names what is left: as it is on the disk, whatever its record says.
    """
    there = {relative: path.stat().st_size for relative in earlier if (path := path_within(output, relative)).exists()}
    there.pop(SUMMARY, None)
    if there:
        write_outputs(path_within(output, OUTPUTS_FILE), there)
    for relative in (SUMMARY, JOURNAL_FILE):
        path = path_within(output, relative)
        if path.exists():
            remove_recorded(output, {relative})
            sync_directory(path.parent)
    remove_recorded(output, there)


def _recorded(output: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the recorded files that are there, and all that were recorded or listed; what cannot be read names none.

    A file that is only listed counts if it is whole; another is somebody else's.

    Raises:
        PrepareError: A name leaves the directory, or is one of the state.
    """
    found: set[str] = set()
    summary = _read(output, SUMMARY)
    if summary is not None:
        with suppress(PrepareError):  # somebody else's
            found.update((SUMMARY, *(file.path for file in read_summary(summary, where=SUMMARY).written)))
            found.update(PACKAGE_DOCUMENTS)  # of an export that was interrupted
    with suppress(PrepareError):  # damaged: the list of outputs names what it did
        journal = _journal(output)
        found.update(file.path for record in (journal[1] if journal else ()) for file in record.files)
    listed = read_outputs(_read(output, OUTPUTS_FILE) or b"")
    named = frozenset(found | listed.keys())
    for relative in sorted(named):
        path_within(output, relative)
        if relative.split("/")[0] == STATE:
            raise PrepareError(Problem(where=relative, what="recorded as an output, and can be none"))
    found.update(relative for relative, file_bytes in listed.items() if _fits(output, relative, file_bytes))
    return frozenset(relative for relative in found if os.path.lexists(output / relative)), named


def _journal(output: Path) -> tuple[Identity, tuple[JobRecord, ...], int] | None:
    raw = _read(output, JOURNAL_FILE)
    return None if raw is None else read_journal(raw, where=JOURNAL_FILE)


def _read(output: Path, relative: str) -> bytes | None:
    path = path_within(output, relative)
    return read_bytes(path, limit_bytes=JOURNAL_LIMIT_BYTES, kind=PrepareError) if path.exists() else None


def _fits(output: Path, relative: str, file_bytes: int) -> bool:
    """Whether a file is there and whole, as every file with a final name is."""
    path = path_within(output, relative)
    return path.exists() and path.stat().st_size == file_bytes
