"""A directory on this machine.

Only regular files directly inside it are opened (links to files are followed, as in a Hugging Face cache), without
blocking on pipes and devices.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import CheckpointError, Problem, TonnageError
from tonnage.sources.model import FileFacts, truncated

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A directory on this machine.

    Attributes:
        directory: Where.
        alias: The address it was found by, if that is not its path: a snapshot in the cache of the hub.
        title: The name it has there.
    """

    directory: Path
    alias: str | None = None
    title: str | None = None

    @property
    def name(self) -> str:
        """Name of the directory; of a snapshot in the cache of the hub, that of its repository."""
        if self.title:
            return self.title
        path = self.directory.resolve()
        repository = path.parent.parent.name
        if path.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.rpartition("--")[2]
        return path.name

    @property
    def address(self) -> str:
        """Path of the directory as it was given, or the address it was found by."""
        return self.alias or str(self.directory)

    @property
    def parallel(self) -> int:
        """One: the disk is not what takes time."""
        return 1

    @property
    def planning_seconds(self) -> float:
        """As long as it takes."""
        return math.inf

    @property
    def transfer(self) -> None:
        """Nothing goes over the network."""
        return

    def names(self) -> tuple[str, ...]:
        """Return the names of all entries, sorted.

        Raises:
            CheckpointError: The directory cannot be listed.
        """
        try:
            return tuple(sorted(os.listdir(self.directory)))  # noqa: PTH208 - names are all that is wanted
        except OSError as error:
            what = "cannot list the checkpoint directory"
            raise CheckpointError(Problem(where=str(self.directory), what=what, found=error.strerror)) from error

    def has(self, name: str) -> bool:
        """Whether there is an entry; a link that leads nowhere is one."""
        return os.path.lexists(self.directory / name)

    def list_files(self) -> Mapping[str, FileFacts]:
        """Return the regular files, and the links to some.

        Raises:
            CheckpointError: The directory cannot be listed.
        """
        found = {}
        for name in self.names():
            with suppress(OSError):
                status = (self.directory / name).stat()
                if stat.S_ISREG(status.st_mode):
                    found[name] = _facts(status, name)
        return found

    @contextmanager
    def opened(
        self, name: str, *, kind: type[TonnageError] = CheckpointError, sequential: bool = False
    ) -> Iterator[LocalFile]:
        """Open a regular file. Looked at before opening: a pipe is never opened.

        Raises:
            TonnageError: As ``kind``.
        """
        path = self.directory / name
        try:
            _check_regular(path.stat().st_mode, name, kind)
            descriptor = os.open(path, _OPEN_FLAGS)
        except (OSError, ValueError) as error:
            raise kind(_unreadable(name, error)) from error
        try:
            status = os.fstat(descriptor)
            _check_regular(status.st_mode, name, kind)
            if sequential:
                with suppress(OSError):  # advice
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield LocalFile(descriptor, _facts(status, name), kind)
        finally:
            os.close(descriptor)


class LocalFile:
    """An open file; whoever opened it closes it."""

    __slots__ = ("descriptor", "facts", "kind")

    def __init__(self, descriptor: int, facts: FileFacts, kind: type[TonnageError]) -> None:
        """Keep what was opened.

        Args:
            descriptor: Of the file.
            facts: When it was opened.
            kind: What is raised when it cannot be read.
        """
        self.descriptor = descriptor
        self.facts = facts
        self.kind = kind

    @property
    def state(self) -> str:
        """Which file it is, and when that was last changed in any way: what is put in its place has another.

        Raises:
            TonnageError: It cannot be looked at.
        """
        try:
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise self.kind(_unreadable(self.facts.name, error)) from error
        return f"{status.st_dev}:{status.st_ino} {status.st_ctime_ns}"

    def at_hand(self, nbytes: int, offset: int) -> bool:  # noqa: ARG002 - whichever
        """Yes."""
        return True

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return exactly so many bytes.

        Raises:
            TonnageError: The file ends before, or cannot be read.
        """
        try:
            piece = os.pread(self.descriptor, nbytes, offset)
            while len(piece) < nbytes:
                more = os.pread(self.descriptor, nbytes - len(piece), offset + len(piece))
                if not more:
                    raise self.kind(truncated(self.facts.name, offset + nbytes, offset + len(piece)))
                piece += more
        except OSError as error:
            raise self.kind(_unreadable(self.facts.name, error)) from error
        return piece

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from a place in the file.

        Raises:
            TonnageError: The file ends before, or cannot be read.
        """
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
                if not count:
                    raise self.kind(truncated(self.facts.name, offset + len(view), offset + done))
                done += count
        except OSError as error:
            raise self.kind(_unreadable(self.facts.name, error)) from error

    def current_facts(self) -> FileFacts:
        """Look at the file again.

        Raises:
            TonnageError: It cannot be looked at.
        """
        try:
            return _facts(os.fstat(self.descriptor), self.facts.name)
        except OSError as error:
            raise self.kind(_unreadable(self.facts.name, error)) from error


def _facts(status: os.stat_result, name: str) -> FileFacts:
    return FileFacts(name=name, nbytes=status.st_size, version=f"mtime {status.st_mtime_ns} ns")


def _check_regular(mode: int, name: str, kind: type[TonnageError]) -> None:
    if not stat.S_ISREG(mode):
        found = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise kind(Problem(where=name, what="not a regular file", expected="a regular file", found=found))


def _unreadable(name: str, error: OSError | ValueError) -> Problem:
    found = error.strerror if isinstance(error, OSError) else str(error)
    return Problem(where=name, what="cannot be read", expected="a readable regular file", found=found)
