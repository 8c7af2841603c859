"""Files of a package on their way into an object store: several at a time, hashed while they are read, counted."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonnage.errors import Problem, raise_if_any
from tonnage.export.contents import Standing
from tonnage.export.manifest import PackagedFile, PackageError
from tonnage.export.walk import opened
from tonnage.prepare.io import new_digest
from tonnage.sources.parallel import as_done
from tonnage.units import MIB

if TYPE_CHECKING:
    from tonnage.export.objects import Objects
    from tonnage.prepare.io import Hash

PART_BYTES = 16 * MIB
"""Of a part of a large object; larger where there would be too many."""
MOST_PARTS = 9_000
FILES_AT_ONCE = 4
_PIECE_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A finished package on this machine."""

    root: int
    hash: Hash
    files: tuple[PackagedFile, ...]
    documents: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file by path."""
        listed = {file.path: file.nbytes for file in self.files}
        return listed | {name: len(raw) for name, raw in self.documents.items()}


def stated(local: Local, file: PackagedFile) -> str:
    """Return what stands beside the object of a file: algorithm and digest."""
    return f"{local.hash}:{file.digest}"


class _Stopped(Exception):  # noqa: N818 - no error: nobody waits for the file any more
    """Sending was given up."""


class Sending:
    """Sends files, several at a time, and counts."""

    def __init__(
        self, local: Local, objects: Objects, found: frozenset[str], on_progress: Callable[[Standing], None]
    ) -> None:
        self.confirmed = self.sent = 0
        self._local = local
        self._objects = objects
        self._files = sorted(
            (f for f in local.files if f.path not in found), key=lambda file: (-file.nbytes, file.path)
        )
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stopped = False
        there = sum(file.nbytes for file in local.files if file.path in found)
        self._standing = Standing(
            done_bytes=there,
            total_bytes=sum(file.nbytes for file in local.files),
            resumed_bytes=there,
            tasks_done=len(local.files) - len(self._files),
            tasks=len(local.files),
        )

    def run(self) -> None:
        """Send everything.

        Raises:
            PackageError: A file is not as the manifest states it; every such file that was met is named.
            SourceError: The store cannot be reached, or refuses.
        """
        problems: list[Problem] = []
        sent = as_done(self._send, self._files, threads=FILES_AT_ONCE, on_poll=self._poll, stop=self._stop)
        with closing(sent):
            for found in sent:
                problems += found
        raise_if_any(PackageError, problems)

    def _poll(self) -> None:
        self._on_progress(self._standing)

    def _stop(self) -> None:
        self._stopped = True

    def _send(self, file: PackagedFile) -> Sequence[Problem]:
        try:
            with opened(self._local.root, file.path) as (descriptor, nbytes):
                if nbytes != file.nbytes:
                    expected, found = f"{file.nbytes} bytes", f"{nbytes} bytes"
                    return (Problem(where=file.path, what="size", expected=expected, found=found),)
                self._put(file, descriptor)
        except PackageError as error:
            return error.problems
        except OSError as error:
            return (Problem(where=file.path, what="cannot be read", found=error.strerror),)
        with self._lock:
            self.sent += 1
            self._standing = replace(self._standing, tasks_done=self._standing.tasks_done + 1)
        return ()

    def _put(self, file: PackagedFile, descriptor: int) -> None:
        part_bytes = max(PART_BYTES, -(-file.nbytes // MOST_PARTS // MIB) * MIB)
        reading = _Reading(file, self._local.hash, part_bytes, self._add)
        etag = self._objects.put(
            file.path, file.nbytes, reading.pieces(descriptor), part_bytes, digest=stated(self._local, file)
        )
        if etag == reading.etag:
            with self._lock:
                self.confirmed += 1

    def _add(self, nbytes: int) -> None:
        if self._stopped:
            raise _Stopped
        with self._lock:
            self._standing = replace(self._standing, done_bytes=self._standing.done_bytes + nbytes)


class _Reading:
    """Reads a file for sending, hashes it, and holds back its last bytes until it is known to be the right one."""

    def __init__(self, file: PackagedFile, name: Hash, part_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._digest = new_digest(name)
        self._part_bytes = part_bytes
        self._on_bytes = on_bytes
        self._part = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []

    @property
    def etag(self) -> str:
        """What stores that take MD5 for it call the object: of its bytes, or of the MD5 of its parts."""
        whole = bool(self._file.nbytes) and self._file.nbytes % self._part_bytes == 0
        parts = self._parts if whole else [*self._parts, self._part.digest()]
        if len(parts) == 1:
            return parts[0].hex()
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"

    def pieces(self, descriptor: int) -> Iterator[bytes]:
        """Yield the file.

        Raises:
            PackageError: It is not as the manifest states it.
        """
        place = 0
        while place < self._file.nbytes:
            piece = os.pread(descriptor, min(_PIECE_BYTES, self._file.nbytes - place), place)
            if not piece:
                what, found = "truncated while it was read", f"{place} bytes"
                expected = f"{self._file.nbytes} bytes"
                raise PackageError(Problem(where=self._file.path, what=what, expected=expected, found=found))
            place += len(piece)
            self._take(piece, place)
            if place == self._file.nbytes:
                self._check()
            self._on_bytes(len(piece))
            yield piece
        if not self._file.nbytes:
            self._check()

    def _take(self, piece: bytes, place: int) -> None:
        self._digest.update(memoryview(piece))
        before = self._part_bytes - (place - len(piece)) % self._part_bytes
        self._part.update(piece[:before])
        if place % self._part_bytes == 0 or len(piece) > before:
            self._parts.append(self._part.digest())
            self._part = hashlib.md5(piece[before:], usedforsecurity=False)

    def _check(self) -> None:
        found = self._digest.hexdigest()
        if found != self._file.digest:
            what = "not as its manifest states; nothing of it was put there"
            raise PackageError(Problem(where=self._file.path, what=what, expected=self._file.digest, found=found))
