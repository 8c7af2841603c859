"""A repository of the Hugging Face hub, pinned to a commit.

The hub's own client says what there is: commit, sizes, digests; it brings the token, the endpoint and the cache that
are configured for it. Ranges are then read with ``http``, as the client has no call for them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tonnage.errors import Problem, SourceError, one_line
from tonnage.sources.answers import AGAIN, Asked, retry_after
from tonnage.sources.connections import NO_HOST, Origin, is_header_text, is_no_host, origin_of
from tonnage.sources.hanging_up import sigpipe_held_back
from tonnage.sources.http import WebClient
from tonnage.sources.limits import ALLOW_HTTP, Limits, is_set
from tonnage.sources.local import LocalSource
from tonnage.sources.model import FileFacts, Source, is_plain_file_name
from tonnage.sources.remote import MOST_FILES, RemoteSource, not_kept
from tonnage.sources.shelf import Listing, Shelf
from tonnage.sources.transfer import Transfer

LISTING_LIMIT_BYTES = 64 << 20
_PLAIN = {"Accept-Encoding": "identity"}
_OTHER_WEIGHTS = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OID = re.compile(r"[0-9a-f]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_ADDRESS = re.compile(
    rf"hf:(?://)?(?P<repository>{_NAME}(?:/{_NAME})?)(?:@(?P<revision>[\w][\w./+-]{{0,199}}))?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where on the hub.

    Attributes:
        repository: Its name.
        revision: A branch, tag or commit.
        folder: Below it; empty is the top.
    """

    repository: str
    revision: str
    folder: str = ""

    @property
    def address(self) -> str:
        """As users write it."""
        return f"hf:{self.repository}@{self.revision}"

    @property
    def below(self) -> str:
        """The folder as a prefix of paths."""
        return f"{self.folder}/" if self.folder else ""

    @property
    def key(self) -> str:
        """What its files are kept under."""
        return f"{constants.ENDPOINT} {self.repository}@{self.revision}{f'/{self.folder}' if self.folder else ''}"


def open_hub(text: str, limits: Limits, transfer: Transfer, folder: str = "") -> Source:
    """Return the files of ``hf:org/name[@revision]`` at the commit the revision stands for now.

    Args:
        text: The address.
        limits: What the hub may cost.
        transfer: Where that is counted.
        folder: Whose files; those at the top if not given.

    Raises:
        SourceError: It is no such address, the hub cannot be reached, or has nothing of that name to show.
    """
    match = _ADDRESS.fullmatch(text.rstrip("/"))
    if match is None or ".." in text or "--" in match["repository"] or match["repository"].endswith(".git"):
        expected = "hf:organisation/name[@revision]"
        raise SourceError(Problem(where=text, what="not an address on the hub", expected=expected))
    revision = match["revision"] or constants.DEFAULT_REVISION
    asked = _Place(repository=match["repository"], revision=revision, folder=folder)
    shelf = Shelf(asked.key)
    listing = shelf.listing() if limits.offline or _COMMIT.fullmatch(revision) else None
    if listing is None and not limits.offline:
        _home()
        listing = _ask(asked, limits, transfer)
        shelf.put_listing(listing)
    place = asked if listing is None else replace(asked, revision=listing.revision)
    pinned = Shelf(place.key)
    if listing is not None:
        pinned.put_listing(listing)
    name = place.repository.rpartition("/")[2]
    snapshot = None if folder else _snapshot(place.repository, place.revision, listing)
    if snapshot is not None:
        if _COMMIT.fullmatch(snapshot.name):
            place = replace(place, revision=snapshot.name)
        return LocalSource(snapshot, alias=place.address, title=name)
    if listing is None:
        raise not_kept(text)
    files = HubFiles(place, listing, limits, transfer)
    return RemoteSource(
        name=name, address=place.address, files=files, shelf=pinned, limits=limits, transfer=transfer, pinned=True
    )


class HubFiles:
    """Files of a repository at one commit."""

    def __init__(self, place: _Place, listing: Listing, limits: Limits, transfer: Transfer) -> None:
        """Ask for nothing yet.

        Args:
            place: The commit.
            listing: What is in it.
            limits: What it may cost.
            transfer: Where that is counted.
        """
        home, token = _home()
        credentials = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._place = place
        self._listing = listing
        self._client = WebClient(
            limits=limits, transfer=transfer, home=home, credentials=credentials, elsewhere=True,
            plain=home.scheme == "http",
        )  # fmt: skip
        self._known: dict[str, str] = {}
        self._lock = Lock()

    def listed(self) -> Listing:
        """Return what the hub listed."""
        return self._listing

    def looked(self, name: str) -> None:  # noqa: ARG002 - whichever
        """Nothing: what is there is listed."""
        return

    def whole_file(self, facts: FileFacts) -> None:  # noqa: ARG002 - whichever
        """None: parts are given of every file."""
        return

    def fetch(self, facts: FileFacts, view: memoryview, offset: int) -> None:
        """Fill a buffer with part of a file, from where the hub last sent us for it."""
        name = f"{self._place.below}{facts.name}"
        where = f"{self._place.address}/{name}"
        asked = Asked(where=where, begin=offset, nbytes=len(view), total_bytes=facts.nbytes)
        known = self._known.get(name)
        if known is not None:
            try:
                self._client.read_into(known, asked, view)
            except SourceError:  # such places are given for a while
                with self._lock:
                    self._known.pop(name, None)
            else:
                return
        url = hf_hub_url(self._place.repository, name, revision=self._place.revision, endpoint=constants.ENDPOINT)
        found = self._client.read_into(url, asked, view)
        if found != url:
            with self._lock:
                self._known[name] = found


def _home() -> tuple[Origin, str | None]:
    """Return the hub and the token for it.

    Raises:
        SourceError: The token would be sent in the clear, or is none.
    """
    endpoint = constants.ENDPOINT
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token is not None and not is_header_text(token):
        raise SourceError(Problem(where="the token of the hub", what="cannot be sent", expected="letters and digits"))
    return origin_of(endpoint, where=endpoint, plain=token is None or is_set(ALLOW_HTTP)), token


# --- what the hub says ------------------------------------------------------------------------------------------------


def _ask(place: _Place, limits: Limits, transfer: Transfer) -> Listing:
    """Return the files in a folder of a repository, with the commit of a revision.

    Raises:
        SourceError: There is no such repository or revision for this user, or the hub cannot be reached.
    """
    text = place.address
    api = HfApi(endpoint=constants.ENDPOINT, headers=_PLAIN)

    def ask() -> Any:
        return api.model_info(
            place.repository, revision=place.revision, files_metadata=True, timeout=limits.connect_seconds
        )

    info = _asked(text, ask, limits, transfer)
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise SourceError(Problem(where=text, what="no commit", expected="40 hexadecimal digits", found=commit[:80]))
    files, folders = {}, set()
    for one in info.siblings or ():
        if type(one.rfilename) is not str:
            found = repr(one.rfilename)[:80]
            raise SourceError(Problem(where=text, what="no name of a file", expected="text", found=found))
        name, slash, _ = one.rfilename.removeprefix(place.below).partition("/")
        if not one.rfilename.startswith(place.below) or not is_plain_file_name(name):
            continue  # nothing could open it
        if slash:
            folders.add(name)
        else:
            files[name] = _facts(text, name, one)
    if len(files) + len(folders) > MOST_FILES:
        found = str(len(files) + len(folders))
        raise SourceError(Problem(where=text, what="files", expected=f"at most {MOST_FILES}", found=found))
    return Listing(files=files, folders=tuple(sorted(folders)), revision=commit)


def _facts(text: str, name: str, one: Any) -> FileFacts:
    """Return what the hub says of a file."""
    lfs = one.lfs
    nbytes = one.size if lfs is None else lfs.size
    if type(nbytes) is not int or nbytes < 0:
        raise SourceError(Problem(where=text, what=f"no size of {one.rfilename}", expected="bytes", found=repr(nbytes)))
    oid = one.blob_id if lfs is None else lfs.sha256
    if not (type(oid) is str and (_OID if lfs is None else _SHA256).fullmatch(oid)):
        expected = "hexadecimal digits, 64 of a large file"
        raise SourceError(
            Problem(where=text, what=f"no digest of {one.rfilename}", expected=expected, found=repr(oid)[:80])
        )
    return FileFacts(name=name, nbytes=nbytes, version=f"oid {oid}", sha256=None if lfs is None else oid)


def _asked(text: str, ask: Callable[[], Any], limits: Limits, transfer: Transfer) -> Any:
    """Return an answer of the hub's client, asked for again while that may help."""
    pause = limits.pause_seconds
    deadline = time.monotonic() + limits.total_seconds
    attempt = 0
    while True:
        attempt += 1
        try:
            with sigpipe_held_back(), _bounded(text, limits, transfer):
                return ask()
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, *_NO_HUB) as error:
            final = _final(text, error)
            if final is not None:
                raise final from error
            if is_no_host(error) and not transfer.nbytes:
                raise _refusal(text, *NO_HOST, f"{constants.ENDPOINT}: {error}") from error
            found, seconds = _passing(error, pause)
        if attempt == limits.attempts or time.monotonic() + seconds > deadline:
            raise _refusal(text, f"given up after {attempt} attempts", f"an answer of {constants.ENDPOINT}", found)
        time.sleep(seconds)
        pause *= 2


_NO_HUB = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What the client raises of JSON that is not a hub's."""

_FINAL: dict[type[Exception], tuple[str, str]] = {
    GatedRepoError: ("gated", "its terms accepted on the hub, and a token of that account (HF_TOKEN)"),
    RepositoryNotFoundError: (
        "no such repository, or a private one", "a repository of that name, or a token that may read it (HF_TOKEN)",
    ),
    RevisionNotFoundError: ("no such revision", "a branch, tag or commit of the repository"),
    HFValidationError: ("not a name on the hub", "organisation/name"),
}  # fmt: skip
"""Refusals that no further attempt changes, the more special ones first."""


def _final(text: str, error: Exception) -> SourceError | None:
    """Return the refusal that an error is, unless it may pass."""
    for kind, (what, expected) in _FINAL.items():
        if isinstance(error, kind):
            return _refusal(text, what, expected)
    if isinstance(error, OfflineModeIsEnabled):
        return not_kept(text)
    if isinstance(error, HfHubHTTPError) and error.response.status_code not in AGAIN:
        found = f"status {error.response.status_code}: {error.server_message or ''}".rstrip(": ")
        return _refusal(text, "refused by the hub", "its files", found)
    if isinstance(error, _NO_HUB):
        return _refusal(text, "not the answer of a hub", "what is in a repository", type(error).__name__)
    return None


def _passing(error: Exception, pause: float) -> tuple[str, float]:
    """Return what went wrong, and how long to wait."""
    if not isinstance(error, HfHubHTTPError):
        return str(error) or type(error).__name__, pause
    headers = {name.lower(): value for name, value in error.response.headers.items()}
    wanted = retry_after(headers, time.time())
    return f"status {error.response.status_code}", pause if wanted is None else wanted


def _refusal(text: str, what: str, expected: str, found: str | None = None) -> SourceError:
    return SourceError(Problem(where=text, what=what, expected=expected, found=found and one_line(found)[:200]))


_SESSION = Lock()


@contextmanager
def _bounded(text: str, limits: Limits, transfer: Transfer) -> Iterator[None]:
    """Bound and count what the hub's client receives: it reads any answer whole, and all threads share its session."""
    with _SESSION:
        yield from _hooked(text, limits, transfer)


def _hooked(text: str, limits: Limits, transfer: Transfer) -> Iterator[None]:
    session = get_session()
    hooks, timeout = session.event_hooks, session.timeout
    deadline = time.monotonic() + limits.answer_seconds + limits.connect_seconds

    def bound(response: httpx2.Response) -> None:
        transfer.add(requests=1)
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise _refusal(text, "encoded, which nobody asked for", "identity", coding)
        response.stream = _Bounded(response.stream, text, deadline, transfer)

    session.event_hooks = {**hooks, "response": [*hooks.get("response", ()), bound]}
    session.timeout = limits.connect_seconds
    try:
        yield
    finally:
        session.event_hooks, session.timeout = hooks, timeout


class _Bounded(httpx2.SyncByteStream):
    """The body of an answer, counted, and cut off where it is too long or too slow."""

    def __init__(self, stream: Any, text: str, deadline: float, transfer: Transfer) -> None:
        self._stream = stream
        self._text = text
        self._deadline = deadline
        self._transfer = transfer

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        for piece in self._stream:
            received += len(piece)
            self._transfer.add(nbytes=len(piece))
            if received > LISTING_LIMIT_BYTES:
                raise _refusal(self._text, "an answer without end", f"at most {LISTING_LIMIT_BYTES} bytes")
            if time.monotonic() > self._deadline:
                raise httpx2.ReadTimeout("the answer came too slowly")
            yield piece

    def close(self) -> None:
        self._stream.close()


# --- what is on this machine ------------------------------------------------------------------------------------------


def _snapshot(repository: str, commit: str, listing: Listing | None) -> Path | None:
    """Return the directory of a commit in the hub's cache if all that is ever read of it is there.

    Without a listing, offline, whatever is there counts; a shard file that is missing is found by the index.
    """
    config = try_to_load_from_cache(repository, "config.json", revision=commit)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    here = LocalSource(directory).list_files()
    wanted = () if listing is None else listing.files.values()
    complete = all(
        one.name in here and here[one.name].nbytes == one.nbytes
        for one in wanted
        if not one.name.startswith(".") and Path(one.name).suffix not in _OTHER_WEIGHTS
    )
    return directory if complete else None
