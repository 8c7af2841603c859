"""The files of a preparation: sources read exactly, outputs that get their name when they are whole.

A new file lives beside its final place under a temporary name, ``.NAME.TAG.partial``, until every byte of it is on the
disk; then it is renamed. So a file under its final name is always whole. Tags of jobs are the same in every run, which
holds the lock; those of files written at once are of one writer alone, for two of them may write one file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tonnage.errors import Problem, TonnageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Hash = Literal["blake3", "sha256"]

PARTIAL = ".partial"
WRITE_BACK_BYTES = 8 << 20
RESUME = "run the same command again to resume"
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_REASONS = {
    errno.ENOSPC: "no space left for it; free some and run the same command again",
    errno.EDQUOT: "no space left for it; free some and run the same command again",
    errno.EFBIG: "file too large for the limit of this process (ulimit -f), or of the file system",
}
_ZEROS = memoryview(bytes(1 << 20))


class PrepareError(TonnageError):
    """A preparation cannot begin, or cannot go on."""


class Digest(Protocol):
    """What hashes a file while it is written."""

    def update(self, data: memoryview, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes taken."""


def new_digest(name: Hash) -> Digest:
    """Return a digest that has taken nothing yet."""
    if name == "sha256":
        return hashlib.sha256()
    from blake3 import blake3  # noqa: PLC0415 - not needed for SHA-256

    return blake3()


def new_digests(name: Hash) -> tuple[Digest, ...]:
    """Return what hashes a written file: the algorithm asked for, then SHA-256 if that is another.

    A signature states SHA-256, the one that every verifier takes.
    """
    return (new_digest(name),) if name == "sha256" else (new_digest(name), new_digest("sha256"))


# --- sources --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What tells whether a source file is still the one that was planned.

    Attributes:
        name: Plain file name.
        nbytes: Size.
        mtime_ns: Time of the last change.
    """

    name: str
    nbytes: int
    mtime_ns: int


def source_facts(directory: Path, names: Iterable[str]) -> tuple[FileFacts, ...]:
    """Return the facts of files, sorted by name.

    Raises:
        PrepareError: A file is missing or no regular file; every such file is named.
    """
    facts: list[FileFacts] = []
    problems: list[Problem] = []
    for name in sorted(set(names)):
        try:
            facts.append(_facts((directory / name).stat(), name))
        except PrepareError as error:
            problems += error.problems
        except OSError as error:
            problems.append(Problem(where=name, what="cannot be read", found=error.strerror))
    if problems:
        raise PrepareError(*problems)
    return tuple(facts)


@contextmanager
def opened_source(directory: Path, expected: FileFacts) -> Iterator[int]:
    """Open a source file that must be the one expected, when it is opened and when all was read.

    Raises:
        PrepareError: It is missing, no regular file (a pipe is never opened), or changed.
    """
    with opened_regular(directory / expected.name, expected.name) as (descriptor, status):
        _check_same(expected, _facts(status, expected.name))
        with suppress(OSError):  # advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield descriptor
        with _reading(expected.name):
            after = os.fstat(descriptor)
        _check_same(expected, _facts(after, expected.name))


@contextmanager
def opened_regular(path: Path, where: str) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file; looked at before opening, so that a pipe is never opened.

    Raises:
        PrepareError: It is missing, no regular file, or cannot be read.
    """
    with _reading(where):
        _facts(path.stat(), where)
        descriptor = os.open(path, _OPEN_FLAGS)
    try:
        with _reading(where):
            status = os.fstat(descriptor)
        _facts(status, where)
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, offset: int, *, where: str) -> None:
    """Fill a buffer from a place in a file.

    Raises:
        PrepareError: The file ends before, or cannot be read.
    """
    done = 0
    with _reading(where):
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                expected, found = f"{offset + len(view)} bytes", f"{offset + done} bytes"
                raise PrepareError(
                    Problem(where=where, what="truncated while it was read", expected=expected, found=found)
                )
            done += count


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn a failure of the system into a refusal that names the file."""
    try:
        yield
    except OSError as error:
        raise PrepareError(Problem(where=where, what="cannot be read", found=error.strerror)) from error


def _facts(status: os.stat_result, name: str) -> FileFacts:
    if not stat.S_ISREG(status.st_mode):
        raise PrepareError(Problem(where=name, what="not a regular file", expected="a regular file"))
    return FileFacts(name=name, nbytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _check_same(expected: FileFacts, found: FileFacts) -> None:
    if expected != found:
        raise PrepareError(
            Problem(
                where=expected.name, what="changed since it was planned", expected=shown(expected), found=shown(found)
            )
        )


def shown(facts: FileFacts) -> str:
    """Return the facts of a file in a few words."""
    return f"{facts.nbytes} bytes, mtime {facts.mtime_ns} ns"


# --- outputs --------------------------------------------------------------------------------------------------------


class NewFile:
    """A file being written from front to back; it has a temporary name until :meth:`publish`."""

    def __init__(
        self, path: Path, nbytes: int, *, tag: str, digests: Sequence[Digest] = (), folder: Path | None = None
    ) -> None:
        """Create it, with room for all its bytes.

        Args:
            path: Its final place; the directory exists.
            nbytes: Its final size.
            tag: Goes into the temporary name.
            digests: Of the whole file; they have taken nothing yet.
            folder: Where it lives until it has its final name, on the same file system; beside its place by default.

        Raises:
            PrepareError: It cannot be created, or there is no room for it.
        """
        self.path = path
        self.nbytes = nbytes
        self.position = 0
        self._begun = 0
        self._digests = digests
        self._partial = (folder or path.parent) / f".{path.name}.{tag}{PARTIAL}"
        with writing(path):
            self._partial.unlink(missing_ok=True)
            self._descriptor = os.open(self._partial, _NEW_FLAGS, 0o644)
            try:
                if nbytes:
                    os.posix_fallocate(self._descriptor, 0, nbytes)
            except OSError:
                self.close()
                raise

    def write(self, piece: memoryview) -> None:
        """Add bytes at the end.

        Raises:
            PrepareError: They cannot be written.
        """
        for digest in self._digests:
            digest.update(piece)
        done = 0
        with writing(self.path):
            while done < len(piece):
                done += os.write(self._descriptor, piece[done:])
        self.position += done
        if self.position - self._begun >= WRITE_BACK_BYTES:
            # Dirty pages are not dropped by this; Linux begins to write them, so that the sync at the end is short.
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, self._begun, self.position - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self.position

    def zeros(self, nbytes: int) -> None:
        """Add zero bytes at the end."""
        while nbytes:
            count = min(nbytes, len(_ZEROS))
            self.write(_ZEROS[:count])
            nbytes -= count

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        if self.position != self.nbytes:
            raise ValueError(f"{self.path}: {self.position} bytes written, {self.nbytes} planned")
        with writing(self.path):
            os.fsync(self._descriptor)

    def publish(self) -> None:
        """Give the file its final name; the directory is synced by the caller, once for all its files."""
        with writing(self.path):
            self._partial.rename(self.path)

    def close(self) -> None:
        """Let go of it; without its final name it is removed.

        Raises:
            PrepareError: The system refuses.
        """
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with writing(self.path):
                try:
                    os.close(descriptor)
                finally:
                    self._partial.unlink(missing_ok=True)

    def hexdigests(self) -> tuple[str, ...]:
        """Return the digests of what was written."""
        return tuple(digest.hexdigest() for digest in self._digests)


def own_tag() -> str:
    """Return a tag for a temporary name that no other writer has."""
    return f"whole-{secrets.token_hex(8)}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file at once, under its final name when it is on the disk; of several writers the last one wins.

    Raises:
        PrepareError: It cannot be written.
    """
    file = NewFile(path, len(content), tag=own_tag())
    try:
        file.write(memoryview(content))
        file.sync()
        file.publish()
    finally:
        file.close()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the system into a refusal that names the file.

    Raises:
        PrepareError: The disk is full, or anything else the system refuses.
    """
    try:
        yield
    except OSError as error:
        what = _REASONS.get(error.errno or 0, "cannot be written")
        raise PrepareError(Problem(where=str(path), what=what, found=error.strerror)) from error
