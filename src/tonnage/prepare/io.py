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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, Protocol

from tonnage.errors import Problem, TonnageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tonnage.sources.model import FileFacts, Source, SourceFile

Hash = Literal["blake3", "sha256"]

PARTIAL = ".partial"
WRITE_BACK_BYTES = 8 << 20
RESUME = "run the same command again to resume"
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


def source_facts(source: Source, names: Iterable[str]) -> tuple[FileFacts, ...]:
    """Return the facts of files, sorted by name.

    Raises:
        PrepareError: A file is missing or no regular file; every such file is named.
        SourceError: A server cannot be reached, or answers wrong.
    """
    listed = source.list_files()
    facts: list[FileFacts] = []
    problems: list[Problem] = []
    for name in sorted(set(names)):
        try:
            facts.append(listed[name] if name in listed else _opened_facts(source, name))
        except PrepareError as error:
            problems += error.problems
    if problems:
        raise PrepareError(*problems)
    return tuple(facts)


def _opened_facts(source: Source, name: str) -> FileFacts:
    with source.opened(name, kind=PrepareError) as file:
        return file.facts


def source_states(source: Source, names: Iterable[str]) -> dict[str, str]:
    """Return what tells files of this machine from others of the same size and time; nothing of what is elsewhere.

    Raises:
        PrepareError: A file is missing or no regular file.
    """
    states = {}
    for name in sorted(names) if source.transfer is None else ():
        with source.opened(name, kind=PrepareError) as file:
            states[name] = file.state
    return states


@contextmanager
def opened_source(source: Source, expected: FileFacts, state: str = "") -> Iterator[SourceFile]:
    """Open a source file that must be the one expected, when it is opened and when all was read.

    Args:
        source: Where.
        expected: Its facts.
        state: As :func:`source_states` says it, if that is to be compared.

    Raises:
        PrepareError: It is missing, no regular file (a pipe is never opened), or changed.
        SourceError: A server cannot be reached, or answers wrong.
    """
    with source.opened(expected.name, kind=PrepareError, sequential=True) as file:
        _check_same(expected, file.facts)
        _check_state(expected, state, file)
        yield file
        _check_same(expected, file.current_facts())
        _check_state(expected, state, file)


def source_digests(name: Hash, facts: FileFacts) -> tuple[Digest, ...]:
    """Return what hashes a source file: the algorithm asked for, then SHA-256 if its origin states that."""
    return new_digests(name) if facts.sha256 else (new_digest(name),)


def check_origin(facts: FileFacts, sha256: str) -> None:
    """Refuse a file that is not the one its origin states.

    Args:
        facts: As stated.
        sha256: Of what was read.

    Raises:
        PrepareError: As said.
    """
    if facts.sha256 not in (None, sha256):
        what = "not the file its origin states; nothing of it was kept"
        raise PrepareError(Problem(where=facts.name, what=what, expected=f"SHA-256 {facts.sha256}", found=sha256))


def _check_same(expected: FileFacts, found: FileFacts) -> None:
    if (expected.nbytes, expected.version) != (found.nbytes, found.version):
        what, then, now = "changed since it was planned", shown(expected), shown(found)
        raise PrepareError(Problem(where=expected.name, what=what, expected=then, found=now))


def _check_state(expected: FileFacts, state: str, file: SourceFile) -> None:
    if state and file.state != state:
        what, found = "changed since it was planned", "another file of this size and time, or one that was written to"
        raise PrepareError(Problem(where=expected.name, what=what, expected=shown(expected), found=found))


def shown(facts: FileFacts) -> str:
    """Return the facts of a file in a few words."""
    return f"{facts.nbytes} bytes, {facts.version}"


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
        """Wait until all bytes are on the disk; nothing can be added then."""
        if self.position != self.nbytes:
            raise ValueError(f"{self.path}: {self.position} bytes written, {self.nbytes} planned")
        with writing(self.path):
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def publish(self) -> None:
        """Give the file its final name; the directory is synced by the caller, once for all its files."""
        with writing(self.path):
            self._partial.rename(self.path)

    def close(self) -> None:
        """Let go of it; without its final name it is removed.

        Raises:
            PrepareError: The system refuses.
        """
        descriptor, self._descriptor = self._descriptor, -1
        with writing(self.path):
            try:
                if descriptor >= 0:
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
