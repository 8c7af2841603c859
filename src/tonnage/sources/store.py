"""A prefix of an object store, through obstore. Its own environment variables say where the store is and who asks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from tonnage.errors import Problem, SourceError, one_line
from tonnage.sources.connections import is_header_text, origin_of
from tonnage.sources.limits import ALLOW_HTTP, Limits, is_set
from tonnage.sources.model import FileFacts, is_plain_file_name
from tonnage.sources.parallel import GrowthLimit, waited
from tonnage.sources.remote import MOST_FILES, RemoteSource
from tonnage.sources.shelf import Listing, Shelf
from tonnage.sources.transfer import Transfer

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables that name another server than Amazon's."""

_SETTINGS = ("AWS_", "GOOGLE_")

_ADDRESS = re.compile(
    r"(?P<scheme>s3|gs)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220})(?:/(?P<prefix>[^?#]*))?", re.IGNORECASE
)
LISTING_BYTES = 256 << 20
"""Of memory for a listing: twice what the most objects take that a directory may have."""
_PIECE_BYTES = 1 << 20
_LARGEST_WINDOW_BYTES = 256 << 20
_KEYS = "keys that may read it (AWS_ACCESS_KEY_ID..., or AWS_SKIP_SIGNATURE=true where everybody may)"
_NO_KEYS = "169.254.169.254"
"""Whom obstore asks for keys where the environment has none: the host of a virtual machine."""

Result = TypeVar("Result")


def open_store(text: str, limits: Limits, transfer: Transfer) -> RemoteSource:
    """Return the objects directly below ``s3://bucket/prefix`` or ``gs://bucket/prefix``; nothing is asked for yet.

    Raises:
        SourceError: It is no such address, or the endpoint would be reached in the clear.
    """
    address = plain_address(text)
    files = StoreFiles(address, limits, transfer)
    shelf = Shelf(f"{endpoint() if address.startswith('s3:') else ''} {address}")
    name = address.rpartition("/")[2]
    return RemoteSource(name=name, address=address, files=files, shelf=shelf, limits=limits, transfer=transfer)


def plain_address(text: str) -> str:
    """Return an address as everybody writes it: no slash at its end.

    Raises:
        SourceError: It is none.
    """
    match = _ADDRESS.fullmatch(text)
    prefix = "" if match is None else (match["prefix"] or "").strip("/")
    if match is None or not all(prefix.split("/") if prefix else ()) or {".", ".."} & set(prefix.split("/")):
        raise SourceError(Problem(where=text, what="not an address of objects", expected="s3://bucket/prefix"))
    return f"{match['scheme'].lower()}://{match['bucket']}{f'/{prefix}' if prefix else ''}"


def new_store(address: str, limits: Limits) -> Any:
    """Return obstore's store at an address, for reading and for writing.

    Raises:
        SourceError: Its settings are wrong, or would send everything in the clear to another machine.
    """
    _check_settings()
    server = endpoint() if address.startswith("s3:") else ""
    plain = bool(server) and origin_of(server, where=server, plain=is_set(ALLOW_HTTP)).scheme == "http"
    whole = limits.total_seconds + _LARGEST_WINDOW_BYTES / limits.slowest
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
        "read_timeout": timedelta(seconds=limits.connect_seconds),
        "timeout": timedelta(seconds=whole),
        "allow_http": plain,
    }
    retry: dict[str, Any] = {
        "max_retries": limits.attempts - 1,
        "retry_timeout": timedelta(seconds=limits.total_seconds),
        "backoff": {"init_backoff": timedelta(seconds=limits.pause_seconds)},
    }
    settings: dict[str, Any] = {"endpoint": server} if server else {}
    try:
        return from_url(address, client_options=options, retry_config=retry, **settings)  # type: ignore[call-overload]
    except (BaseError, ValueError) as error:
        raise SourceError(Problem(where=address, what="cannot be used", found=said(error))) from error


def _check_settings() -> None:
    """Refuse a variable that obstore would put into a header and cannot: it would end the process."""
    for name in sorted(os.environ):
        if name.startswith(_SETTINGS) and not is_header_text(os.environ[name]):
            raise SourceError(Problem(where=name, what="cannot be sent", expected="printable ASCII"))


def listing_limit(address: str, limits: Limits) -> GrowthLimit:
    """Return how long and how large a listing may be: it has pages without end, or a page has none."""
    return GrowthLimit(address, limits.total_seconds, LISTING_BYTES)


def endpoint() -> str:
    """Return the URL of the server that is asked in the place of Amazon's; empty if none is named."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")


class StoreFiles:
    """Objects below one prefix."""

    def __init__(self, address: str, limits: Limits, transfer: Transfer) -> None:
        """Ask for nothing yet.

        Args:
            address: As :func:`plain_address` returns it.
            limits: What the store may cost.
            transfer: Where that is counted.
        """
        self._address = address
        self._limits = limits
        self._transfer = transfer
        self._store = new_store(address, limits)

    def listed(self) -> Listing:
        """Return the objects and prefixes directly below."""
        limit = listing_limit(self._address, self._limits)
        found = self._asked("", lambda: waited(lambda: obstore.list_with_delimiter(self._store), limit))
        objects, prefixes = found["objects"], found["common_prefixes"]
        if len(objects) + len(prefixes) > MOST_FILES:
            expected, count = f"at most {MOST_FILES}", str(len(objects) + len(prefixes))
            raise SourceError(Problem(where=self._address, what="objects", expected=expected, found=count))
        if not objects and not prefixes:
            raise SourceError(Problem(where=self._address, what="nothing there", expected="objects below it"))
        files = [_facts(one) for one in objects]
        folders = sorted({prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes})
        return Listing(
            files={one.name: one for one in files if is_plain_file_name(one.name)},  # nothing could open others
            folders=tuple(filter(is_plain_file_name, folders)),
        )

    def looked(self, name: str) -> None:  # noqa: ARG002 - whichever
        """Nothing: what is there is listed."""
        return

    def whole_file(self, facts: FileFacts) -> None:  # noqa: ARG002 - whichever
        """None: parts are given of every file."""
        return

    def fetch(self, facts: FileFacts, view: memoryview, offset: int) -> None:
        """Fill a buffer with part of an object; what came before a connection broke is kept."""
        deadline = time.monotonic() + self._limits.total_seconds + len(view) / self._limits.slowest
        done = attempt = 0
        while done < len(view):
            attempt += 1
            options: Any = {"range": (offset + done, offset + len(view))}
            if facts.version.startswith("etag "):
                options["if_match"] = facts.version.removeprefix("etag ")
            answer = self._asked(facts.name, lambda: obstore.get(self._store, facts.name, options=options))  # noqa: B023
            self._check(facts, answer, offset + done, offset + len(view))
            try:
                for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                    done = self._take(facts, view, done, memoryview(piece))
                    if time.monotonic() > deadline:
                        raise self._refusal(facts.name, "the answer came too slowly", None, f"{done} bytes")
            except (BaseError, OSError) as error:
                if attempt >= self._limits.attempts or time.monotonic() > deadline:
                    what = f"given up after {attempt} attempts"
                    raise self._refusal(facts.name, what, "an answer", said(error)) from error
            else:
                if done < len(view):
                    raise self._refusal(facts.name, "truncated", f"{len(view)} bytes", f"{done} bytes")

    def _take(self, facts: FileFacts, view: memoryview, done: int, piece: memoryview) -> int:
        """Add bytes that came; return how many there are then."""
        self._transfer.add(nbytes=len(piece))
        if done + len(piece) > len(view):
            expected, found = f"{len(view)} bytes", f"{done + len(piece)} bytes or more"
            raise self._refusal(facts.name, "more than was asked for", expected, found)
        view[done : done + len(piece)] = piece
        return done + len(piece)

    def _check(self, facts: FileFacts, answer: Any, begin: int, end: int) -> None:
        now = _facts(answer.meta)
        if (now.nbytes, now.version) != (facts.nbytes, facts.version):
            expected = f"{facts.nbytes} bytes, {facts.version}"
            raise self._refusal(
                facts.name, "changed since it was listed", expected, f"{now.nbytes} bytes, {now.version}"
            )
        if tuple(answer.range) != (begin, end):
            found = "bytes {}-{}".format(*answer.range)
            raise self._refusal(facts.name, "another range", f"bytes {begin}-{end}", found)

    def _asked(self, name: str, ask: Callable[[], Result]) -> Result:
        """Return an answer of the store; obstore asks again where that may help.

        Raises:
            SourceError: There is none, or it is a refusal.
        """
        self._transfer.add(requests=1)
        try:
            return ask()
        except FileNotFoundError as error:
            raise self._refusal(name, "no such object or bucket", "what was listed", None) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._refusal(name, "not allowed", _KEYS, said(error)) from error
        except PreconditionError as error:
            raise self._refusal(name, "changed since it was listed", "the same object", None) from error
        except (BaseError, OSError, ValueError) as error:
            if _NO_KEYS in str(error):
                raise self._refusal(name, "no keys", _KEYS, None) from error
            if not name and "404 Not Found" in str(error):  # of a listing obstore has no other word for it
                raise self._refusal(name, "no such object or bucket", "a bucket", None) from error
            raise self._refusal(name, "no answer that helps", "the object", said(error)) from error

    def _refusal(self, name: str, what: str, expected: str | None, found: str | None) -> SourceError:
        where = f"{self._address}/{name}" if name else self._address
        return SourceError(Problem(where=where, what=what, expected=expected, found=found))


def _facts(meta: Any) -> FileFacts:
    name = meta["path"].rpartition("/")[2]
    etag = meta["e_tag"]
    version = f"etag {etag}" if etag else f"modified {meta['last_modified'].isoformat()}"
    return FileFacts(name=name, nbytes=meta["size"], version=version)


_INNERMOST = re.compile(r"(?:Generic \w+ error: )?(.*?)(?:\n.*)?", re.DOTALL)


def said(error: BaseException) -> str:
    """Return the first line of what a library says."""
    match = _INNERMOST.fullmatch(str(error))
    return one_line(match[1] if match else str(error))[:240]
