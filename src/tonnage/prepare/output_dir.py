"""The output directory: paths that stay inside it, one run at a time, nothing in it that is not ours."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import Problem
from tonnage.prepare.documents import MANIFEST, SIGNATURE, STATE, SUMMARY
from tonnage.prepare.io import PARTIAL, PrepareError, sync_directory, write_whole, writing
from tonnage.sources.local import LocalSource
from tonnage.sources.model import read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

LOCK_FILE = f"{STATE}/lock"
JOURNAL_FILE = f"{STATE}/journal.jsonl"
OUTPUTS_FILE = f"{STATE}/outputs.json"
"""What a preparation may have written here: on the disk before the first of it, and until the last is removed."""

EPOCH_FILE = f"{STATE}/epoch"
"""Which run is at work here, where its tasks may outlive it: those of a cluster."""

STATE_FILES = frozenset({LOCK_FILE, JOURNAL_FILE, OUTPUTS_FILE, EPOCH_FILE})

LOCK_WAIT_SECONDS = 30
_EPOCH_BYTES = 32
_MOST_NAMED = 10
_PARTIAL_NAME = re.compile(rf"\.(.+)\.(?:job-\d+|whole)(?:-[0-9a-f]{{16}})?{re.escape(PARTIAL)}", re.DOTALL)
_LOCK_CONTENT = re.compile(rb"[\d\0]*\n?\0*")


def path_within(root: Path, relative: str) -> Path:
    """Return the place of a relative path; what exists of it are real directories and a regular file.

    Raises:
        PrepareError: The path leaves the directory, or a link or something else is in its way.
    """
    parts = relative.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise PrepareError(Problem(where=relative, what="not a path inside the output directory"))
    path = root
    for number, part in enumerate(parts, start=1):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return root.joinpath(*parts)
        except OSError as error:
            raise PrepareError(Problem(where=str(path), what="cannot be used", found=error.strerror)) from error
        right = stat.S_ISREG(mode) if number == len(parts) else stat.S_ISDIR(mode)
        if not right:
            expected = "a regular file" if number == len(parts) else "a directory"
            found = "a link" if stat.S_ISLNK(mode) else "something else"
            raise PrepareError(
                Problem(where=str(path), what="in the way of the output", expected=expected, found=found)
            )
    return path


def make_parents(root: Path, relative: str) -> Path:
    """Create the directories of a relative path, on the disk, and return its place.

    Raises:
        PrepareError: As :func:`path_within`, or a directory cannot be created.
    """
    path = path_within(root, relative)
    missing = []
    for parent in path.parents:
        if parent.exists():
            break
        missing.append(parent)
    for parent in reversed(missing):
        with writing(parent):
            parent.mkdir(exist_ok=True)
        sync_directory(parent.parent)
    return path


def is_package(directory: Path) -> bool:
    """Whether a directory is a finished package, as export makes one of a complete preparation."""
    has_all = all(os.path.lexists(directory / name) for name in (MANIFEST, SIGNATURE))
    return has_all and not os.path.lexists(directory / SUMMARY)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock file and yield its descriptor; whoever inherits it holds the lock too.

    The kernel releases the lock when the last holder is gone. Workers hold it as well, so that what is left of a killed
    run can never write beside the next one; for such left-overs it is waited.

    Raises:
        PrepareError: Another run is at work.
    """
    descriptor = _lock(path)
    try:
        try:
            with writing(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        except PrepareError:
            with suppress(OSError):  # nobody else holds it: what cannot be locked is left as it was
                path.unlink()
            raise
        yield descriptor
    finally:
        os.close(descriptor)


def begin_epoch(directory: Path) -> str:
    """Begin an epoch, which ends every other, and return its name. Only under the lock.

    A task on another machine holds no lock. So it asks, before any of its files gets its final name, whether the epoch
    it was begun in still is; and a new run, of whatever executor, first ends that epoch and then removes all unfinished
    files: a task that asked in time finds nothing left to rename.
    """
    epoch = secrets.token_hex(16)
    write_whole(make_parents(directory, EPOCH_FILE), epoch.encode())
    return epoch


def end_epoch(directory: Path) -> None:
    """End whatever epoch there is. Only under the lock."""
    _remove(path_within(directory, EPOCH_FILE))


def check_epoch(directory: Path, epoch: str) -> None:
    """Refuse to go on with a task whose run is over.

    Raises:
        PrepareError: As said, or the directory is not to be seen from here.
    """
    found = read_epoch(directory)
    if found != epoch:
        what = "the run that began this task is over, or its directory is not this one"
        raise PrepareError(Problem(where=str(directory), what=what, expected=epoch, found=found or "none"))


def read_epoch(directory: Path) -> str | None:
    """Return the epoch of an output directory; ``None`` where there is none."""
    try:
        path = path_within(directory, EPOCH_FILE)
        raw = read_file(LocalSource(path.parent), path.name, limit_bytes=_EPOCH_BYTES, kind=PrepareError)
    except PrepareError:
        return None
    return raw.decode("ascii", "replace")


def _lock(path: Path) -> int:
    patience = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            _check_lock_file(path, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if _is_alive(holder) or time.monotonic() > patience:
                found = f"process {holder}" if holder else "another process"
                raise PrepareError(
                    Problem(where=str(path.parent), what="another preparation is writing here", found=found)
                ) from None
            time.sleep(0.05)
            continue
        except PrepareError:
            os.close(descriptor)
            raise
        if is_still(path, descriptor):
            return descriptor
        os.close(descriptor)  # removed by the run that just ended


def _check_lock_file(path: Path, descriptor: int) -> None:
    """Refuse to lock what no preparation wrote: it would be overwritten."""
    check_single(path, descriptor)
    if not _LOCK_CONTENT.fullmatch(os.pread(descriptor, 64, 0)):
        raise PrepareError(Problem(where=str(path), what="not the lock of a preparation", expected="a process number"))


def check_single(path: Path, descriptor: int) -> None:
    """Refuse to write into an open file that is no regular file, or has another name besides this one.

    Raises:
        PrepareError: As said.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        found = f"{status.st_nlink} hard links" if stat.S_ISREG(status.st_mode) else "something else"
        expected = "a regular file with one name"
        raise PrepareError(Problem(where=str(path), what="in the way of the output", expected=expected, found=found))


def is_still(path: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _is_alive(holder: str) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{holder}/stat").read_bytes()
    except OSError:
        return False
    return holder.isdigit() and not status.rpartition(b")")[2].lstrip().startswith((b"Z", b"X"))


def find_partials(directory: Path, relatives: Collection[str]) -> tuple[Path, ...]:
    """Return what an interrupted run left unfinished of these files; nothing else is looked at."""
    names: dict[str, set[str]] = {}
    for relative in relatives:
        folder, _, name = relative.rpartition("/")
        names.setdefault(folder, set()).add(name)
    found = []
    for folder in sorted(names):
        try:
            path_within(directory, f"{folder}/{PARTIAL}".lstrip("/"))  # no link on the way
            entries = sorted(os.listdir(directory / folder))  # noqa: PTH208 - names only
        except (OSError, PrepareError):
            continue
        found += [directory / folder / entry for entry in entries if _partial_of(entry) in names[folder]]
    return tuple(found)


def remove_partials(directory: Path, relatives: Collection[str]) -> None:
    """Remove what an interrupted run left unfinished of these files. Only under the lock."""
    for path in find_partials(directory, relatives):
        _remove(path)


def _partial_of(name: str) -> str | None:
    """Return the final name of a file with a temporary one."""
    match = _PARTIAL_NAME.fullmatch(name)
    return None if match is None else match[1]


def check_foreign(directory: Path, ours: Collection[str], unfinished: Collection[str] = ()) -> None:
    """Refuse files in the output directory that no preparation recorded or plans.

    Args:
        directory: The output directory, or where none is yet.
        ours: Files that may be there; those of the state may always be.
        unfinished: Files that may be there under a temporary name; those of the state, the summary and the
            signature may always be.

    Raises:
        PrepareError: Naming the first of them.
    """
    _refuse_foreign(directory, (one for one in _relatives(directory) if not _is_ours(one, ours, unfinished)))


def check_state(directory: Path) -> None:
    """Refuse a directory of the state that holds anything but a lock, a journal and a list of outputs.

    Raises:
        PrepareError: As said.
    """
    path_within(directory, LOCK_FILE)
    _refuse_foreign(directory, (f"{STATE}/{one}" for one in _relatives(directory / STATE) if not _is_state(one)))


def _is_state(name: str) -> bool:
    return f"{STATE}/{_partial_of(name) or name}" in STATE_FILES


def _is_ours(relative: str, ours: Collection[str], unfinished: Collection[str]) -> bool:
    folder, slash, name = relative.rpartition("/")
    if relative.startswith(f"{STATE}/"):
        return _is_state(relative.removeprefix(f"{STATE}/"))
    final = _partial_of(name)
    finished = None if final is None else f"{folder}{slash}{final}"
    return relative in ours or (finished is not None and (finished in (*unfinished, SUMMARY, SIGNATURE)))


def _refuse_foreign(directory: Path, relatives: Iterable[str]) -> None:
    foreign = sorted(relatives)
    if foreign:
        more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
        raise PrepareError(
            Problem(
                where=str(directory),
                what="output is in use",
                expected="a new or an empty directory, or one the same command began",
                found=", ".join(foreign[:_MOST_NAMED]) + more,
            )
        )


def remove_recorded(directory: Path, relatives: Collection[str]) -> None:
    """Remove the files an earlier preparation recorded, and directories that are empty then.

    Raises:
        PrepareError: A recorded path leaves the directory, or cannot be removed.
    """
    with ThreadPoolExecutor() as pool:  # freeing the pages and blocks of a file takes as long as hashing it
        list(pool.map(_remove, [path_within(directory, relative) for relative in sorted(relatives)]))
    for relative in sorted(relatives):
        for parent in (directory / relative).parents:
            if parent == directory:
                break
            try:
                parent.rmdir()
            except OSError:
                break


def _remove(path: Path) -> None:
    with writing(path):
        path.unlink(missing_ok=True)


def remove_state(directory: Path, relatives: Collection[str]) -> None:
    """Remove files of the state by name, and its directory if it is empty then; what is gone already is no loss.

    Raises:
        PrepareError: One of them cannot be removed.
    """
    for relative in relatives:
        path = directory / relative
        with writing(path), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
    remove_empty([directory / STATE])


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove directories, innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            with suppress(FileNotFoundError):
                folder.rmdir()


def _relatives(directory: Path) -> Iterator[str]:
    """Yield everything below a directory that is no directory, by relative path; links are not followed."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise PrepareError(Problem(where=str(error.filename), what="cannot be read", found=error.strerror))

    for folder, folders, names in os.walk(directory, onerror=refuse):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                yield (Path(folder) / name).relative_to(directory).as_posix()
        for name in names:
            yield (Path(folder) / name).relative_to(directory).as_posix()
