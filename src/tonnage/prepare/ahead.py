"""How a worker reads a source file: ahead of what is asked for where that takes time, hashed where that is wanted."""

from __future__ import annotations

from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from tonnage.prepare.runs import PIECE_BYTES, requests
from tonnage.sources.parallel import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tonnage.prepare.io import Digest
    from tonnage.prepare.windows import Span
    from tonnage.sources.model import SourceFile

PIECES_AHEAD = 3
"""Pieces on their way, or come and not asked for yet."""
READ_AHEAD_BYTES = (PIECES_AHEAD + 1) * PIECE_BYTES
"""Of one reading: those, and the one that is being used."""


class Reader(Protocol):
    """What a stream reads from."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from a place in the file."""


class ReadAhead:
    """Ascending spans of a file, asked for by several threads before they are needed; its buffers are used again."""

    def __init__(self, file: SourceFile, spans: Iterable[Span]) -> None:
        """Begin; nothing is asked for yet.

        Args:
            file: Open, and for as long as this is used.
            spans: All that will be read, in order.
        """
        self._file = file
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        asked = list(requests(spans))
        sizes = [end - begin for begin, end in asked]
        room = PIECES_AHEAD * PIECE_BYTES
        self._pieces = in_order(self._fetch, asked, threads=PIECES_AHEAD, weights=sizes, room=room)
        self._begin = self._end = 0
        self._buffer = memoryview(b"")

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from the next place that was announced.

        Raises:
            TonnageError: The file cannot be read, or changed.
            ValueError: Another place.
        """
        done = 0
        while done < len(view):
            place = offset + done
            while place >= self._end:
                self._advance(place)
            if place < self._begin:
                raise ValueError(f"{self._file.facts.name}: byte {place} is behind, or was not announced")
            count = min(len(view) - done, self._end - place)
            at = place - self._begin
            view[done : done + count] = self._buffer[at : at + count]
            done += count

    def close(self) -> None:
        """Ask for nothing more."""
        self._pieces.close()

    def _advance(self, place: int) -> None:
        if self._buffer:
            self._free.put(self._buffer)
            self._buffer = memoryview(b"")
        try:
            (self._begin, self._end), self._buffer = next(self._pieces)
        except StopIteration:
            raise ValueError(f"{self._file.facts.name}: byte {place} was not announced") from None

    def _fetch(self, span: Span) -> tuple[Span, memoryview]:
        begin, end = span
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = memoryview(bytearray(PIECE_BYTES))  # pages that are never touched cost nothing
        self._file.read_into(buffer[: end - begin], begin)
        return span, buffer


class HashedReader:
    """A file that is hashed from its first byte to its last, while parts of it are read in order."""

    def __init__(
        self, reader: Reader, nbytes: int, digests: Sequence[Digest], on_bytes: Callable[[int], None], window_bytes: int
    ) -> None:
        """Begin before the first byte.

        Args:
            reader: Gives any byte of the file, in order.
            nbytes: Size of the file.
            digests: That have taken nothing yet.
            on_bytes: Called with the number of bytes hashed, many times.
            window_bytes: Most that is read at once of what nobody asks for.
        """
        self._reader = reader
        self._nbytes = nbytes
        self._digests = digests
        self._on_bytes = on_bytes
        self._position = 0
        self._scratch = memoryview(bytearray(min(window_bytes, nbytes)))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from a place that was not passed yet; what is before it is hashed too.

        Raises:
            TonnageError: The file cannot be read, or changed.
        """
        if offset < self._position:
            raise ValueError(f"byte {offset} was read already")
        self._reach(offset)
        self._take(view)

    def finish(self) -> tuple[str, ...]:
        """Read what is left and return the digests of the whole file.

        Raises:
            TonnageError: The file cannot be read, or changed.
        """
        self._reach(self._nbytes)
        return tuple(digest.hexdigest() for digest in self._digests)

    def _reach(self, place: int) -> None:
        while self._position < place:
            self._take(self._scratch[: place - self._position])

    def _take(self, view: memoryview) -> None:
        self._reader.read_into(view, self._position)
        for digest in self._digests:
            digest.update(view)
        self._position += len(view)
        self._on_bytes(len(view))


@contextmanager
def reading(file: SourceFile, spans: Iterable[Span], *, remote: bool) -> Iterator[Reader]:
    """Yield what gives ascending spans of a file: itself, or its bytes ahead of time if they come over a network."""
    if not remote:
        yield file
        return
    with closing(ReadAhead(file, spans)) as ahead:
        yield ahead
