"""What the head of an HTTP answer says, checked before one byte of its body is read.

Source:
    RFC 9110: sections 14.4 (Content-Range), 15.3.7 (206), 15.5.17 (416), 8.8.3 (ETag), 10.2.3 (Retry-After).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from tonnage.errors import Problem, SourceError

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_EMPTY = re.compile(r"bytes \*/([0-9]{1,19})")
_LENGTH = re.compile(r"[0-9]{1,19}")
_LONGEST_VERSION = 200
MISSING = frozenset({404, 410})
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
MOVED = frozenset({301, 302, 303, 307, 308})
_FORBIDDEN = {
    401: ("not authorised", "a token or key that may read it"),
    403: ("not allowed", "a token or key that may read it"),
    407: ("the proxy wants to know who asks", "a proxy without credentials"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A range of a file.

    Attributes:
        where: The file, for refusals.
        begin: First byte.
        nbytes: How many.
        total_bytes: Size of the file, if it is known; else a file that is shorter is welcome.
        version: Of the file, if the server states one and it is known.
        whole: Whether an answer with the whole file will do; no more than was asked for is read of it.
    """

    where: str
    begin: int
    nbytes: int
    total_bytes: int | None = None
    version: str | None = None
    whole: bool = False

    @property
    def words(self) -> str:
        """The range in words."""
        return f"bytes {self.begin}-{self.begin + self.nbytes - 1}"

    def refuse(self, what: str, *, expected: str | None = None, found: str | None = None) -> SourceError:
        """Return a refusal of the answer."""
        return SourceError(Problem(where=self.where, what=what, expected=expected, found=found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What an answer brings.

    Attributes:
        nbytes: Of its body.
        total_bytes: Of the file.
        version: ``etag ...``, ``modified ...``, or empty where the server says nothing.
        in_one: Whether the body is the whole file, although a part was asked for.
    """

    nbytes: int
    total_bytes: int
    version: str
    in_one: bool = False


def read_head(asked: Asked, status: int, headers: Mapping[str, str]) -> Head:
    """Return what an answer of status 200, 206 or 416 brings, if it is what was asked for.

    Args:
        asked: The range.
        status: Of the answer.
        headers: By lower-case name.

    Raises:
        SourceError: It is not; the body is not to be read.
    """
    coding = headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise asked.refuse("encoded, which nobody asked for", expected="identity", found=coding[:40])
    version = _version(headers)
    if asked.version is not None and version != asked.version:
        raise asked.refuse("changed since it was first read", expected=asked.version, found=version or "no version")
    head = _extent(asked, status, headers)
    if asked.total_bytes not in (None, head.total_bytes):
        expected, found = f"{asked.total_bytes} bytes", f"{head.total_bytes} bytes"
        raise asked.refuse("another size than stated", expected=expected, found=found)
    if "transfer-encoding" not in headers:
        length = headers.get("content-length", "")
        body = head.total_bytes if head.in_one else head.nbytes
        if status != 416 and (not _LENGTH.fullmatch(length) or int(length) != body):
            raise asked.refuse("wrong Content-Length", expected=str(body), found=length[:40] or "none")
    return Head(nbytes=head.nbytes, total_bytes=head.total_bytes, version=version, in_one=head.in_one)


def _extent(asked: Asked, status: int, headers: Mapping[str, str]) -> Head:
    """Return how much there is of which whole, by status and Content-Range."""
    stated = headers.get("content-range", "")
    if status == 416:
        empty = _EMPTY.fullmatch(stated)
        if asked.begin == 0 and empty and int(empty[1]) == 0:
            return Head(nbytes=0, total_bytes=0, version="")
        raise asked.refuse("no such range", expected=asked.words, found=stated[:80] or "416 without Content-Range")
    if status == 200:
        length = headers.get("content-length", "")
        if asked.begin == 0 and _LENGTH.fullmatch(length) and int(length) <= asked.nbytes:
            return Head(nbytes=int(length), total_bytes=int(length), version="")
        if asked.begin == 0 and asked.whole and _LENGTH.fullmatch(length):
            return Head(nbytes=asked.nbytes, total_bytes=int(length), version="", in_one=True)
        found = f"200 with the whole file{f' of {length} bytes' if _LENGTH.fullmatch(length) else ''}"
        raise asked.refuse("the server ignores ranges", expected=f"206 with {asked.words}", found=found)
    match = _RANGE.fullmatch(stated)
    if match is None:
        raise asked.refuse("wrong Content-Range", expected=asked.words, found=repr(stated[:80]) if stated else "none")
    begin, last, total = map(int, match.groups())
    short = asked.total_bytes is None and last == total - 1 < asked.begin + asked.nbytes - 1
    if begin != asked.begin or last >= total or not (short or last == asked.begin + asked.nbytes - 1) or last < begin:
        raise asked.refuse("wrong Content-Range", expected=asked.words, found=stated)
    return Head(nbytes=last - begin + 1, total_bytes=total, version="")


def _version(headers: Mapping[str, str]) -> str:
    """Return what changes with the file."""
    if etag := headers.get("etag"):
        return f"etag {etag[:_LONGEST_VERSION]}"
    modified = headers.get("last-modified")
    return f"modified {modified[:_LONGEST_VERSION]}" if modified else ""


def refusal(asked: Asked, status: int, headers: Mapping[str, str]) -> SourceError:
    """Return why an answer without the file is final; the hub says more in a header of its own."""
    said = headers.get("x-error-message", "")[:_LONGEST_VERSION]
    found = f"status {status}{f': {said}' if said else ''}"
    what, expected = _FORBIDDEN.get(status, ("unexpected answer", "the file"))
    return asked.refuse(what, expected=expected, found=found)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return how many seconds a server wants to be left alone: given as such, or as a date.

    Args:
        headers: By lower-case name.
        now: Seconds since the epoch.
    """
    text = headers.get("retry-after", "").strip()
    if _LENGTH.fullmatch(text):
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0) if text else None
    except (ValueError, OverflowError):  # a year, or an offset, beyond any date
        return None
