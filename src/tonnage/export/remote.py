"""A package that is not on this machine: its files read over the network, hashed while they come, written nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end
from tonnage.errors import CheckpointError
from tonnage.export.contents import Checked, Scope, Standing, check_tree
from tonnage.export.hashing import WINDOW_BYTES, Account, Content, ReadRefusedError, Target, check_size, read_all
from tonnage.export.walk import Tree
from tonnage.prepare.ahead import reading
from tonnage.prepare.io import new_digest
from tonnage.sources.addresses import open_folder
from tonnage.sources.model import read_file
from tonnage.sources.parallel import in_order
from tonnage.sources.remote import gives_parts

if TYPE_CHECKING:
    from tonnage.prepare.ahead import Reader
    from tonnage.sources.model import Source, SourceFile

FILES_AT_ONCE = 4
"""Each with what is read ahead of it: 128 MiB together."""


@dataclass(slots=True, eq=False)
class RemotePackage:
    """A package at an address; each of its directories is opened when it is needed.

    Attributes:
        source: Of its top.
    """

    source: Source
    _folders: dict[str, Source] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def opened(self, path: str) -> Iterator[SourceFile]:
        """Open a file.

        Raises:
            ReadRefusedError: There is none.
            SourceError: A server cannot be reached, or answers wrong.
        """
        folder, _, name = path.rpartition("/")
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = open_folder(self.source, folder) if folder else self.source
        with self._folders[folder].opened(name, kind=ReadRefusedError, sequential=True) as file:
            yield file

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """Return a small file.

        Raises:
            ReadRefusedError: There is none, or it is too large.
            SourceError: A server cannot be reached, or answers wrong.
        """
        return read_file(self.source, path, limit_bytes=limit_bytes, kind=ReadRefusedError)

    def check(self, scope: Scope, on_progress: Callable[[Standing], None]) -> Checked:
        """Return what is wrong with the files of a package; what else is there is not seen.

        Raises:
            SourceError: A server cannot be reached, or answers wrong.
        """
        paths = [*scope.besides, *(file.path for file in scope.files)]
        sizes = in_order(self._nbytes, paths, threads=self.source.parallel)
        found = {path: nbytes for path, nbytes in zip(paths, sizes, strict=True) if nbytes is not None}
        return check_tree(Tree(files=found), self._read_targets, scope, on_progress)

    def _nbytes(self, path: str) -> int | None:
        """Return the size of a file, if it is there."""
        try:
            with self.opened(path) as file:
                return file.facts.nbytes
        except ReadRefusedError:
            return None

    def _read_targets(self, targets: Sequence[Target], on_progress: Callable[[int, int], None]) -> Iterator[Content]:
        account = Account(on_progress)
        ordered = sorted(targets, key=lambda target: -target.nbytes)
        yield from read_all(partial(self._content, account), ordered, account, at_once=FILES_AT_ONCE)

    def _content(self, account: Account, target: Target) -> Content:
        try:
            with self.opened(target.path) as file:
                check_size(target, file.facts.nbytes)
                if not target.hashes:
                    return Content(path=target.path, kept=_kept(file, target))
                kept, digests = self._hashed(file, target, account)
        except ReadRefusedError as error:
            return Content(path=target.path, problems=error.problems)
        account.add(0, files=1)
        return Content(path=target.path, kept=kept, digests=digests)

    def _hashed(self, file: SourceFile, target: Target, account: Account) -> tuple[bytes, tuple[str, ...]]:
        """Return what is to be kept of a file, and its digests."""
        digests = [new_digest(name) for name in target.hashes]
        with reading(file, [(0, target.nbytes)], remote=gives_parts(file)) as reader:
            kept = _kept(reader, target)
            for piece in _pieces(reader, kept, target.nbytes):
                if account.stopped:
                    break
                for digest in digests:
                    digest.update(piece)
                account.add(len(piece))
        return kept, tuple(digest.hexdigest() for digest in digests)


def _kept(reader: Reader, target: Target) -> bytes:
    """Return what is to be kept; of a header that cannot be one its length alone, for whoever parses it to refuse."""
    if target.keep != "header":
        return _first(reader, target.nbytes) if target.keep == "all" else b""
    start = _first(reader, min(PREFIX_BYTES, target.nbytes))
    try:
        end = header_end(start, file_bytes=target.nbytes, where=target.path)
    except CheckpointError:
        return start
    return start + _first(reader, end - len(start), len(start))


def _first(reader: Reader, nbytes: int, offset: int = 0) -> bytes:
    content = bytearray(nbytes)
    reader.read_into(memoryview(content), offset)
    return bytes(content)


def _pieces(reader: Reader, kept: bytes, nbytes: int) -> Iterator[memoryview]:
    """Yield a file of which the first bytes were read already; every piece is valid until the next."""
    yield memoryview(kept)
    window = memoryview(bytearray(min(WINDOW_BYTES, nbytes)))
    for begin in range(len(kept), nbytes, WINDOW_BYTES):
        piece = window[: nbytes - begin]
        reader.read_into(piece, begin)
        yield piece
