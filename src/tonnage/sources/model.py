"""What a source of files is, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tonnage.errors import CheckpointError, Problem, TonnageError

if TYPE_CHECKING:
    from tonnage.sources.transfer import Transfer

INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_LONGEST_FILE_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What tells whether a file is still the one that was planned.

    Attributes:
        name: Plain file name.
        nbytes: Size.
        version: What changes when the file does: ``mtime 17 ns``, ``etag "6f"``, ``oid 3ab...``.
        sha256: Of the whole file, where its origin states one; nobody has checked it yet.
    """

    name: str
    nbytes: int
    version: str
    sha256: str | None = None


class SourceFile(Protocol):
    """An open file. What is read of it is of one version, or refused."""

    @property
    def facts(self) -> FileFacts:
        """The file as it was when it was opened."""

    @property
    def state(self) -> str:
        """What tells it from another of the same size and time on this machine; empty where its version says all."""

    def at_hand(self, nbytes: int, offset: int) -> bool:
        """Whether reading these bytes costs nothing: a file of this machine, or kept of an earlier time."""

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return exactly so many bytes: headers, indexes and other small things, which a remote source may keep.

        Raises:
            TonnageError: Of the kind the file was opened with: it ends before, or cannot be read.
            SourceError: A server cannot be reached, or answers wrong.
        """

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from a place in the file; nothing is kept.

        Raises:
            TonnageError: As :meth:`read`.
        """

    def current_facts(self) -> FileFacts:
        """Look at the file again, after reading; what a server answered was compared while it was read."""


class Source(Protocol):
    """A directory of files. Opening one reads nothing; a file of a plain name is all that can be asked for."""

    @property
    def name(self) -> str:
        """Its last part, for reports."""

    @property
    def address(self) -> str:
        """What :func:`tonnage.sources.addresses.open_source` takes again to get the same bytes, in any process."""

    @property
    def parallel(self) -> int:
        """How many files are worth reading at once."""

    @property
    def planning_seconds(self) -> float:
        """How long reading all headers may take."""

    @property
    def transfer(self) -> Transfer | None:
        """What went over the network so far; ``None`` of what is on this machine."""

    def names(self) -> tuple[str, ...]:
        """Return the names in it, sorted; of any kind, and not all of them where nothing lists them.

        Raises:
            TonnageError: It cannot be listed.
        """

    def has(self, name: str) -> bool:
        """Whether there is anything of that name, readable or not.

        Raises:
            SourceError: It cannot be asked.
        """

    def list_files(self) -> Mapping[str, FileFacts]:
        """Return the files in it that can be opened, by name.

        Raises:
            TonnageError: It cannot be listed.
        """

    def opened(
        self, name: str, *, kind: type[TonnageError] = CheckpointError, sequential: bool = False
    ) -> AbstractContextManager[SourceFile]:
        """Open a file.

        Args:
            name: Plain file name.
            kind: What is raised of a file that is missing, no regular file, or unreadable.
            sequential: Whether it will be read from front to back.

        Raises:
            TonnageError: As ``kind``.
            SourceError: A server cannot be reached, or answers wrong.
        """


def is_plain_file_name(name: str) -> bool:
    """Say whether a name is one path component that prints on one line, so that it cannot leave its directory."""
    if name in {"", ".", ".."} or len(name) > _LONGEST_FILE_NAME:
        return False
    return name.isprintable() and "/" not in name and "\\" not in name


def truncated(name: str, expected_bytes: int, found_bytes: int) -> Problem:
    """Return that a file ended before its size."""
    expected, found = f"{expected_bytes} bytes", f"{found_bytes} bytes"
    return Problem(where=name, what="truncated while it was read", expected=expected, found=found)


def read_file(source: Source, name: str, *, limit_bytes: int, kind: type[TonnageError]) -> bytes:
    """Return a small file whole.

    Raises:
        TonnageError: As ``kind``: no such file, not a regular file, larger than the limit, or unreadable.
        SourceError: A server cannot be reached, or answers wrong.
    """
    with source.opened(name, kind=kind) as file:
        nbytes = file.facts.nbytes
        if nbytes > limit_bytes:
            expected, found = f"at most {limit_bytes} bytes", f"{nbytes} bytes"
            raise kind(Problem(where=name, what="file too large", expected=expected, found=found))
        return file.read(nbytes, 0)
