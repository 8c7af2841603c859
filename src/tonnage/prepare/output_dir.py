"""The output directory: paths that stay inside it, one run at a time, nothing in it that is not ours."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import Problem
from tonnage.prepare.io import PARTIAL, PrepareError, sync_directory, writing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

STATE = ".prepare"
"""Directory of the lock and the journal, gone when the preparation is complete."""

SUMMARY = "prepare.json"
"""Written last: where it is, the preparation is complete."""

LOCK_WAIT_SECONDS = 30
_MOST_NAMED = 10
_PARTIAL_NAME = re.compile(rf"\..*\.(job-\d+|whole){re.escape(PARTIAL)}", re.DOTALL)


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
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    patience = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
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
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)  # removed by the run that just ended


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _is_alive(holder: str) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{holder}/stat").read_bytes()
    except OSError:
        return False
    return holder.isdigit() and not status.rpartition(b")")[2].lstrip().startswith((b"Z", b"X"))


def remove_partials(directory: Path) -> None:
    """Remove what an interrupted run left unfinished. Only under the lock."""
    for path in _files(directory):
        if _PARTIAL_NAME.fullmatch(path.name):
            _remove(path)


def check_foreign(directory: Path, ours: Collection[str]) -> None:
    """Refuse files in the output directory that no preparation recorded or plans.

    Raises:
        PrepareError: Naming the first of them.
    """
    foreign = sorted(
        relative
        for path in _files(directory)
        if (relative := path.relative_to(directory).as_posix()) not in ours and not relative.startswith(f"{STATE}/")
    )
    if foreign:
        more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
        raise PrepareError(
            Problem(
                where=str(directory),
                what="output is in use",
                expected="a new or an empty directory, or one this preparation began",
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


def _files(directory: Path) -> Iterator[Path]:
    """Yield everything below a directory that is no directory; links are not followed."""
    for folder, folders, names in os.walk(directory):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                yield Path(folder) / name
        for name in names:
            yield Path(folder) / name
