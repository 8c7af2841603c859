"""A source elsewhere: what is common to the hub, web servers and object stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from tonnage.errors import CheckpointError, Problem, SourceError, TonnageError
from tonnage.sources.limits import Limits
from tonnage.sources.model import FileFacts, SourceFile, truncated
from tonnage.sources.shelf import Listing, Shelf
from tonnage.sources.transfer import Transfer

MOST_FILES = 50_000
"""Entries in one directory elsewhere."""

UNVERSIONED = "unversioned"
"""Version of a file whose server does not say when it changes; what is read of it is kept for this process only."""


class WholeOnly(Protocol):
    """A file that its server gives only whole: read in order."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the next bytes.

        Raises:
            SourceError: The server cannot be reached, or answers wrong.
        """

    def close(self) -> None:
        """Want no more of it."""


class Files(Protocol):
    """What one kind of server does; everything else about a source is the same for all."""

    def listed(self) -> Listing:
        """Ask what there is.

        Raises:
            SourceError: The server cannot be reached, or answers wrong.
        """

    def looked(self, name: str) -> FileFacts | None:
        """Ask for a file that the listing does not have; ``None`` if there is none.

        Raises:
            SourceError: As above.
        """

    def fetch(self, facts: FileFacts, view: memoryview, offset: int) -> None:
        """Fill a buffer with part of a file, of the version in its facts.

        Raises:
            SourceError: As above, or the file changed.
        """

    def whole_file(self, facts: FileFacts) -> WholeOnly | None:
        """Return a file of which the server gives no parts; ``None`` for all others."""


@dataclass(slots=True, eq=False)
class RemoteSource:
    """A directory elsewhere, with what is kept of it on this machine.

    Attributes:
        name: Its last part.
        address: What opens it again.
        files: Its server.
        shelf: What is kept.
        limits: What the server may cost.
        transfer: What it cost.
        pinned: Whether the address stands for the same files forever.
    """

    name: str
    address: str
    files: Files
    shelf: Shelf
    limits: Limits
    transfer: Transfer
    pinned: bool = False
    _listing: Listing | None = None
    _found: dict[str, FileFacts | None] = field(default_factory=dict)
    _seen: set[tuple[str, int, int]] = field(default_factory=set)
    _passing: Shelf = field(default_factory=lambda: Shelf("passing", None))
    _lock: Lock = field(default_factory=Lock)

    @property
    def planning_seconds(self) -> float:
        """How long all headers may take."""
        return self.limits.planning_seconds

    @property
    def parallel(self) -> int:
        """As many as the limits allow."""
        return self.limits.parallel

    def names(self) -> tuple[str, ...]:
        """Return the names that are listed, and those that were asked for and found."""
        return tuple(sorted({*self.list_files(), *self._list().folders}))

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        return name in self._list().folders or self._find(name) is not None

    def list_files(self) -> Mapping[str, FileFacts]:
        """Return the files that are listed, and those that were asked for and found."""
        found = {name: facts for name, facts in self._found.items() if facts is not None}
        return {**self._list().files, **found}

    @contextmanager
    def opened(
        self,
        name: str,
        *,
        kind: type[TonnageError] = CheckpointError,
        sequential: bool = False,  # noqa: ARG002 - advice for disks
    ) -> Iterator[RemoteFile]:
        """Open a file.

        Raises:
            TonnageError: As ``kind``: there is no such file.
            SourceError: The server cannot be reached, or answers wrong.
        """
        facts = self._find(name)
        if facts is None:
            expected, found = "a file", "a directory" if name in self._list().folders else "no such file"
            raise kind(Problem(where=name, what="cannot be read", expected=expected, found=found))
        whole = self.files.whole_file(facts)
        try:
            yield RemoteFile(self, facts, kind, whole)
        finally:
            if whole is not None:
                whole.close()

    def fetch(self, facts: FileFacts, view: memoryview, offset: int) -> None:
        """Fill a buffer over the network.

        Raises:
            SourceError: Offline, or the server cannot be reached or answers wrong.
        """
        if self.limits.offline:
            raise not_kept(self.address, facts.name)
        self.files.fetch(facts, view, offset)
        self._seen.add((facts.name, offset, len(view)))

    def kept(self, facts: FileFacts, nbytes: int, offset: int) -> bytes | None:
        """Return part of a file if it is on this machine."""
        content = self._shelf_of(facts).get(facts, offset, nbytes)
        if content is not None and (facts.name, offset, nbytes) not in self._seen:
            self._seen.add((facts.name, offset, nbytes))
            self.transfer.add(kept_bytes=nbytes)
        return content

    def keep(self, facts: FileFacts, content: bytes, offset: int) -> None:
        """Keep part of a file on this machine."""
        self._shelf_of(facts).put(facts, offset, content)

    def _shelf_of(self, facts: FileFacts) -> Shelf:
        return self._passing if facts.version == UNVERSIONED else self.shelf

    def _list(self) -> Listing:
        with self._lock:
            if self._listing is None:
                kept = self.shelf.listing() if self.limits.offline or self.pinned else None
                if kept is None and self.limits.offline:
                    raise not_kept(self.address)
                self._listing = kept or self.files.listed()
                if kept is None:
                    self.shelf.put_listing(self._listing)
            return self._listing

    def _find(self, name: str) -> FileFacts | None:
        listing = self._list()
        if name in listing.files:
            return listing.files[name]
        if name not in self._found:
            self._found[name] = None if self.limits.offline else self.files.looked(name)
            if self._found[name] is not None:
                files = self.list_files()
                self.shelf.put_listing(Listing(files=files, folders=listing.folders, revision=listing.revision))
        return self._found[name]


def not_kept(address: str, name: str = "") -> SourceError:
    """Return that something is not on this machine and must not be asked for."""
    expected = "what an earlier run fetched, or a run without --offline, TONNAGE_OFFLINE and HF_HUB_OFFLINE"
    what = f"{name} is not kept on this machine" if name else "not kept on this machine"
    return SourceError(Problem(where=address, what=f"offline, and {what}", expected=expected))


def gives_parts(file: SourceFile) -> bool:
    """Whether any part of a file can be read, in any order; not of one that its server gives only whole."""
    return not isinstance(file, RemoteFile) or file.in_parts


class RemoteFile:
    """An open file elsewhere."""

    __slots__ = ("_kind", "_source", "_whole", "facts")

    def __init__(
        self, source: RemoteSource, facts: FileFacts, kind: type[TonnageError], whole: WholeOnly | None = None
    ) -> None:
        """Nothing is asked for yet."""
        self._whole = whole
        self.facts = facts
        self._source = source
        self._kind = kind

    @property
    def in_parts(self) -> bool:
        """Whether any part can be read, in any order and by several threads."""
        return self._whole is None

    @property
    def state(self) -> str:
        """Nothing: its version says all."""
        return ""

    def at_hand(self, nbytes: int, offset: int) -> bool:
        """Whether these bytes need no server."""
        return self._source.kept(self.facts, nbytes, offset) is not None

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return exactly so many bytes, and keep them.

        Raises:
            TonnageError: The file ends before.
            SourceError: The server cannot be reached, or answers wrong.
        """
        self._check_within(nbytes, offset)
        kept = self._source.kept(self.facts, nbytes, offset)
        if kept is not None:
            return kept
        content = bytearray(nbytes)
        self.read_into(memoryview(content), offset)
        raw = bytes(content)
        if nbytes > _NOT_KEPT_BYTES or nbytes == self.facts.nbytes:
            self._source.keep(self.facts, raw, offset)
        return raw

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer; nothing is kept.

        Raises:
            TonnageError: The file ends before.
            SourceError: The server cannot be reached, or answers wrong.
        """
        self._check_within(len(view), offset)
        if view and self._whole is not None:
            self._whole.read_into(view, offset)
        elif view:
            self._source.fetch(self.facts, view, offset)

    def current_facts(self) -> FileFacts:
        """Return the facts: every answer was compared with them."""
        return self.facts

    def _check_within(self, nbytes: int, offset: int) -> None:
        if offset + nbytes > self.facts.nbytes:
            raise self._kind(truncated(self.facts.name, offset + nbytes, self.facts.nbytes))


_NOT_KEPT_BYTES = 8
"""The length of a header is kept with the header."""
