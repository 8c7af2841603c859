"""Ranges of files on web servers, with the standard library: bounded bytes, bounded time, nothing decoded.

One request asks for one range. What arrived before a connection broke is kept, and the next attempt asks for the rest.
A redirect is followed on its own host; to another one only where that is usual, and then without credentials.
"""

from __future__ import annotations

import http.client
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple
from urllib.parse import urljoin
from weakref import finalize

from tonnage.errors import SourceError, one_line
from tonnage.sources.answers import AGAIN, MISSING, MOVED, Asked, Head, read_head, refusal, retry_after
from tonnage.sources.connections import NO_HOST, Connection, Origin, is_no_host, origin_of, target_of
from tonnage.sources.hanging_up import sigpipe_held_back
from tonnage.sources.limits import Limits
from tonnage.sources.transfer import Transfer
from tonnage.version import __version__

_PIECE = 256 << 10
_MOST_REDIRECTS = 5
_MOST_STALE = 64
_SMALL = 64 << 10
_LONGEST_PAUSE = 30.0


class _BrokenError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, reason: str, pause: float | None = None, *, stale: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause = pause
        self.stale = stale  # the connection had been idle for too long, nothing of the answer came


class Found(NamedTuple):
    """A file that was found: the head of the answer, its first bytes, and where it was in the end."""

    head: Head
    start: bytes
    url: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class WebClient:
    """Connections to servers, kept open between requests; used by many threads.

    Attributes:
        limits: Of what a server can cost.
        transfer: Where it is counted.
        home: Whose files they are.
        credentials: Headers that nobody else gets.
        elsewhere: Whether redirects to other hosts are followed.
        plain: Whether http is fine beyond this machine.
    """

    limits: Limits
    transfer: Transfer
    home: Origin
    credentials: Mapping[str, str] = field(default_factory=dict)
    elsewhere: bool = False
    plain: bool = False
    _idle: dict[Origin, list[Connection]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        finalize(self, _close_all, self._idle)

    def look(self, url: str, asked: Asked) -> Found | None:
        """Return the beginning of a file whose size is not known, or ``None`` if there is no such file.

        Raises:
            SourceError: The server cannot be reached, or answers wrong.
        """
        buffer = bytearray(asked.nbytes)
        request = _Request(self, url, asked, memoryview(buffer))
        head = request.run()
        return None if head is None else Found(head, bytes(buffer[: head.nbytes]), request.url)

    def read_into(self, url: str, asked: Asked, view: memoryview) -> str:
        """Fill a buffer with a range of a file whose size is known, and return where it was found in the end.

        Raises:
            SourceError: The server cannot be reached, has no such file any more, or answers wrong.
        """
        request = _Request(self, url, asked, view)
        if request.run() is None:
            raise asked.refuse("no longer there", expected="the file that was listed", found="no such file")
        return request.url

    def take(self, origin: Origin) -> Connection:
        """Return a connection, an idle one if there is any."""
        with self._lock:
            idle = self._idle.get(origin)
            connection = idle.pop() if idle else None
        if connection is None:
            return Connection(origin, self.limits)
        connection.whole = False
        return connection

    def settle(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if its answer was not read to the end."""
        if not connection.whole:
            connection.close()
            return
        connection.used = True
        with self._lock:
            self._idle.setdefault(connection.origin, []).append(connection)


def _close_all(idle: Mapping[Origin, list[Connection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()


class _Request:
    """One range, asked for until it is whole or hopeless."""

    def __init__(self, client: WebClient, url: str, asked: Asked, view: memoryview) -> None:
        self.url = url
        self._client = client
        self._asked = asked
        self._view = view
        self._done = 0
        self._first: Head | None = None
        self._deadline = time.monotonic() + client.limits.total_seconds + asked.nbytes / client.limits.slowest

    def run(self) -> Head | None:
        """Return the head of the answer, the body in the buffer; ``None`` if there is no such file."""
        limits, first = self._client.limits, self.url
        pause, attempt, stale = limits.pause_seconds, 0, 0
        while True:
            before = self._done
            try:
                return self._follow()
            except _BrokenError as error:
                reason, wanted = error.reason, error.pause
                if error.stale and stale < _MOST_STALE:
                    stale += 1
                    continue
            attempt = 1 if self._done - before >= _SMALL else attempt + 1
            seconds = pause * random.uniform(0.5, 1.0) if wanted is None else wanted  # noqa: S311 - spreads retries
            if attempt >= limits.attempts or time.monotonic() + seconds > self._deadline:
                break
            time.sleep(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE)
            self.url = first  # what it was redirected to may have expired
        found = reason if wanted is None else f"{reason}, to be asked again after {wanted:.0f} s"
        raise self._asked.refuse(f"given up after {attempt} attempts", expected="an answer", found=found)

    def _follow(self) -> Head | None:
        for _ in range(_MOST_REDIRECTS):
            target = self._ask()
            if not isinstance(target, str):
                return target
            self.url = self._checked(target)
        raise self._asked.refuse("redirected without end", expected=f"at most {_MOST_REDIRECTS} redirects")

    def _checked(self, target: str) -> str:
        """Return where a redirect leads, if it may be followed."""
        asked, client = self._asked, self._client
        try:
            url = urljoin(self.url, target)
        except ValueError as error:
            raise asked.refuse("redirected to what is no URL", found=target) from error
        before = origin_of(self.url, where=asked.where, plain=client.plain)
        after = origin_of(url, where=asked.where, plain=client.plain and before.scheme == "http")
        if before.scheme == "https" and after.scheme == "http":
            raise asked.refuse("redirected from https to http", expected="https", found=after.host)
        if after != before and not client.elsewhere:
            expected = f"{before.host}, or the address it is at now"
            raise asked.refuse("redirected to another host", expected=expected, found=f"{after.host}:{after.port}")
        return url

    def _ask(self) -> Head | str | None:
        """Send the request once; return the head of the whole answer, a place to ask instead, or ``None``."""
        origin = origin_of(self.url, where=self._asked.where, plain=self._client.plain)
        begin = self._asked.begin + self._done
        headers = {
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Range": f"bytes={begin}-{self._asked.begin + len(self._view) - 1}",
            "User-Agent": f"tonnage/{__version__}",
        }
        if origin == self._client.home:
            headers.update(self._client.credentials)
        connection = self._client.take(origin)
        self._client.transfer.add(requests=1)
        limits, done = self._client.limits, self._done
        seconds = limits.answer_seconds + (len(self._view) - done) / limits.slowest
        connection.clock.deadline = min(time.monotonic() + seconds, self._deadline)
        try:
            with sigpipe_held_back():
                return self._receive(connection, connection.send(target_of(self.url), headers))
        except ssl.SSLCertVerificationError as error:
            expected = "a certificate this machine trusts (SSL_CERT_FILE names more)"
            found = error.verify_message
            raise self._asked.refuse("the server is not who it says", expected=expected, found=found) from error
        except (OSError, http.client.HTTPException) as error:
            if is_no_host(error) and not self._client.transfer.nbytes:
                what, expected = NO_HOST
                raise self._asked.refuse(what, expected=expected, found=broken_by(error)) from error
            stale = connection.used and self._done == done and isinstance(error, ConnectionError)
            raise _BrokenError(broken_by(error), stale=stale) from error
        finally:
            self._client.settle(connection)

    def _receive(self, connection: Connection, response: http.client.HTTPResponse) -> Head | str | None:
        headers = {name.lower(): value for name, value in response.getheaders()}
        status = response.status
        if status in (200, 206):
            head = read_head(self._rest(), status, headers)
            self._first = self._first or head
            self._read_body(response, head.nbytes, more=head.in_one)
            self._keep(connection, response)
            return Head(nbytes=self._done, total_bytes=head.total_bytes, version=head.version, in_one=head.in_one)
        self._drain(connection, response)
        if status == 416:
            return read_head(self._rest(), status, headers)
        if status in MOVED and "location" in headers:
            return headers["location"]
        if status in MISSING:
            return None
        if status in AGAIN:
            raise _BrokenError(f"status {status}", retry_after(headers, time.time()))
        raise refusal(self._asked, status, headers)

    def _drain(self, connection: Connection, response: http.client.HTTPResponse) -> None:
        """Read a small body that nobody needs, so that the connection can be used again."""
        if response.length is not None and response.length <= _SMALL:
            self._client.transfer.add(nbytes=len(response.read()))
            self._keep(connection, response)

    def _keep(self, connection: Connection, response: http.client.HTTPResponse) -> None:
        """Note that an answer has come whole and that its connection can be used again."""
        if response.length == 0:
            response.close()
        if response.isclosed() and not response.will_close:
            connection.whole = True

    def _rest(self) -> Asked:
        """Return what is still to be asked for, of the same file as what has come."""
        asked, first = self._asked, self._first
        end = len(self._view) if first is None else min(len(self._view), first.total_bytes - asked.begin)
        return Asked(
            where=asked.where,
            begin=asked.begin + self._done,
            nbytes=end - self._done,
            total_bytes=asked.total_bytes if first is None else first.total_bytes,
            version=asked.version if first is None else first.version,
            whole=asked.whole,
        )

    def _read_body(self, response: http.client.HTTPResponse, nbytes: int, *, more: bool) -> None:
        """Read exactly so many bytes, and see that no more come where none should."""
        end = self._done + nbytes
        while self._done < end:
            piece = response.read1(min(end - self._done, _PIECE))
            if not piece:
                raise _BrokenError(f"the connection closed after {self._done} of {end} bytes")
            if len(piece) > end - self._done:  # a chunk of negative size is read without bound by the standard library
                raise self._endless(nbytes)
            self._view[self._done : self._done + len(piece)] = piece
            self._done += len(piece)
            self._client.transfer.add(nbytes=len(piece))
        if more:  # of which nothing is wanted
            return
        try:
            extra = response.read1(1)
        except (OSError, http.client.HTTPException):  # whatever it is, it is none of ours
            return
        if extra:
            raise self._endless(nbytes)

    def _endless(self, nbytes: int) -> SourceError:
        found = f"more than {nbytes} bytes"
        return self._asked.refuse("the answer does not end", expected=f"{nbytes} bytes", found=found)


def broken_by(error: BaseException) -> str:
    """Return what went wrong, in the words of the system."""
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection closed without an answer"
    if isinstance(error, TimeoutError):
        return str(error) if "slowly" in str(error) else "no answer in time"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return one_line(text)
