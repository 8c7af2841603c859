"""A file of a web server that ignores ranges, such as ``python -m http.server``: read once, from its first byte on.

For whoever reads files whole and knows their digests, as packages are; planning wants parts of large files.
"""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass, field

from tonnage.errors import SourceError
from tonnage.sources.answers import MISSING, Asked, read_head, refusal
from tonnage.sources.connections import Connection, origin_of, target_of
from tonnage.sources.http import WebClient, broken_by
from tonnage.version import __version__

_PIECE = 256 << 10
_MOST_SKIPPED = 1 << 20
"""Bytes that are read for nothing on the way to others."""


@dataclass(slots=True, eq=False)
class WholeFile:
    """One file, over a connection of its own.

    Attributes:
        client: Its limits, and where it is counted what came.
        url: Where the file was found.
        asked: All of it, of the size and version it was found with.
    """

    client: WebClient
    url: str
    asked: Asked
    _position: int = 0
    _connection: Connection | None = None
    _response: http.client.HTTPResponse | None = field(default=None, repr=False)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the next bytes; from behind, the file is begun again.

        Raises:
            SourceError: The server cannot be reached or answers wrong, or the bytes are far ahead.
        """
        if self._response is None or offset < self._position:
            self._begin()
        if offset - self._position > _MOST_SKIPPED:
            found = f"byte {offset}, {self._position} bytes after the first"
            raise self.asked.refuse("the server ignores ranges", expected="a file that is read in order", found=found)
        scratch = memoryview(bytearray(min(offset - self._position, _PIECE)))
        while self._position < offset:
            self._fill(scratch[: offset - self._position])
        self._fill(view)

    def close(self) -> None:
        """Close the connection, whatever is still to come."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None
        self._position = 0

    def _begin(self) -> None:
        self.close()
        limits, asked = self.client.limits, self.asked
        self._connection = Connection(origin_of(self.url, where=asked.where, plain=self.client.plain), limits)
        seconds = limits.total_seconds + limits.answer_seconds + asked.nbytes / limits.slowest
        self._connection.clock.deadline = time.monotonic() + seconds
        self.client.transfer.add(requests=1)
        wanted = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": f"tonnage/{__version__}"}
        try:
            response = self._connection.send(target_of(self.url), wanted)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        self._check(response)
        self._response = response

    def _check(self, response: http.client.HTTPResponse) -> None:
        """Refuse an answer that is not exactly the file that was found."""
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status in MISSING:
            raise self.asked.refuse("no longer there", expected="the file that was found", found="no such file")
        if response.status != 200:
            raise refusal(self.asked, response.status, headers)
        if "transfer-encoding" in headers:
            found = headers["transfer-encoding"][:40]
            raise self.asked.refuse("no stated length", expected=f"{self.asked.nbytes} bytes", found=found)
        read_head(self.asked, response.status, headers)

    def _fill(self, view: memoryview) -> None:
        assert self._response is not None  # it was begun
        done = 0
        while done < len(view):
            try:
                count = self._response.readinto(view[done : done + _PIECE])
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from error
            if not count:
                raise self._broken(ConnectionError("the connection closed"))
            done += count
            self._position += count
            self.client.transfer.add(nbytes=count)

    def _broken(self, error: Exception) -> SourceError:
        """Return that it has to be begun again: without ranges nothing can be gone on with."""
        found = f"{broken_by(error)} after {self._position} of {self.asked.nbytes} bytes"
        return self.asked.refuse(
            "the answer broke off, and without ranges it cannot go on", expected="a file", found=found
        )
