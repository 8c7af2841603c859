"""A directory on a web server. Nothing lists it: which files there are is known from the index, or by asking."""

from __future__ import annotations

import os
import re
from threading import Lock
from urllib.parse import quote, urlsplit

from tonnage.errors import Problem, SourceError
from tonnage.sources.answers import Asked
from tonnage.sources.connections import origin_of
from tonnage.sources.http import WebClient
from tonnage.sources.limits import ALLOW_HTTP, Limits, is_set
from tonnage.sources.model import INDEX_FILE, SUFFIX, FileFacts, is_plain_file_name
from tonnage.sources.parallel import TimeLimit, in_order
from tonnage.sources.remote import MOST_FILES, UNVERSIONED, RemoteSource
from tonnage.sources.shelf import Listing, Shelf
from tonnage.sources.transfer import Transfer
from tonnage.sources.whole import WholeFile

INDEX_LIMIT_BYTES = 192 << 20
SINGLE_FILE = f"model{SUFFIX}"
_SHARD = re.compile(rb':[ \t\r\n]*"([^"\\]{1,255}\.safetensors)"')
_LOOK_BYTES = {SUFFIX: 8}
_LOOK_BYTES_OF_OTHERS = 64 << 10
_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})


def open_web(
    text: str, limits: Limits, transfer: Transfer, *, whole: bool = True, in_one: bool = False
) -> RemoteSource:
    """Return the directory at ``https://host/directory/``; nothing is asked for yet.

    Args:
        text: The address.
        limits: What the server may cost.
        transfer: Where that is counted.
        whole: Whether its shard files are wanted, and not only files that are asked for by name.
        in_one: Whether a server that ignores ranges will do, as files are read from front to back.

    Raises:
        SourceError: It is no such address, or leads in the clear to another machine.
    """
    plain = is_set(ALLOW_HTTP)
    origin = origin_of(text, where=text, plain=plain)
    parts = urlsplit(text)
    if parts.query or parts.fragment:
        expected = "https://host/directory/"
        raise SourceError(Problem(where=text.partition("?")[0], what="more than a directory", expected=expected))
    words = parts.path.strip("/").split("/")
    if origin.host in _HUB_HOSTS:
        expected = f"hf:{'/'.join(words[:2])}"
        raise SourceError(Problem(where=text, what="a page of the hub", expected=expected))
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/"
    shelf = Shelf(base if whole else f"{base} by name")  # which must not pass for all there is
    client = WebClient(limits=limits, transfer=transfer, home=origin, plain=plain)
    files = WebFiles(base, client, shelf, whole=whole, in_one=in_one)
    name = words[-1] or origin.host
    return RemoteSource(name=name, address=base, files=files, shelf=shelf, limits=limits, transfer=transfer)


class WebFiles:
    """Files below one URL."""

    def __init__(self, base: str, client: WebClient, shelf: Shelf, *, whole: bool = True, in_one: bool = False) -> None:
        """Ask for nothing yet.

        Args:
            base: URL of the directory, with a slash at its end.
            client: Who asks.
            shelf: Where an index is kept.
            whole: Whether an index is asked for.
            in_one: Whether files will do that the server gives only whole.
        """
        self._whole = whole
        self._in_one = in_one
        self._only_whole: dict[str, str] = {}
        self._base = base
        self._client = client
        self._shelf = shelf
        self._starts: dict[str, bytes] = {}
        self._lock = Lock()

    def listed(self) -> Listing:
        """Return the shard files that the index names, or the only one there is; none if they are not wanted."""
        if not self._whole:
            return Listing(files={})
        index = self.looked(INDEX_FILE)
        names = [SINGLE_FILE] if index is None else self._named(index)
        limits = self._client.limits
        limit = TimeLimit(self._base, limits.planning_seconds)
        looked = in_order(self.looked, names, threads=limits.parallel, limit=limit)
        found = [one for one in looked if one is not None]
        return Listing(files={one.name: one for one in (*found, *((index,) if index else ()))})

    def _named(self, index: FileFacts) -> list[str]:
        """Return the plain names in an index; what else is wrong with it is found when it is checked."""
        where = f"{self._base}{INDEX_FILE}"
        if index.nbytes > INDEX_LIMIT_BYTES:
            expected, found = f"at most {INDEX_LIMIT_BYTES} bytes", f"{index.nbytes} bytes"
            raise SourceError(Problem(where=where, what="file too large", expected=expected, found=found))
        raw = self._shelf.get(index, 0, index.nbytes)
        if raw is None:
            content = bytearray(index.nbytes)
            self.fetch(index, memoryview(content), 0)
            raw = bytes(content)
            with self._lock:
                self._starts[INDEX_FILE] = raw  # until it is read, and kept
        names = {name.decode("utf-8", "replace") for name in _SHARD.findall(raw)}
        if len(names) > MOST_FILES:
            found = str(len(names))
            raise SourceError(Problem(where=where, what="shard files", expected=f"at most {MOST_FILES}", found=found))
        return sorted(filter(is_plain_file_name, names))

    def looked(self, name: str) -> FileFacts | None:
        """Ask for the beginning of a file: that tells its size and version."""
        if not is_plain_file_name(name):
            return None
        nbytes = _LOOK_BYTES.get(os.path.splitext(name)[1], _LOOK_BYTES_OF_OTHERS)  # noqa: PTH122 - of a URL
        url = self._url(name)
        found = self._client.look(url, Asked(where=url, begin=0, nbytes=nbytes, whole=self._in_one))
        if found is None:
            return None
        version = found.head.version or UNVERSIONED
        facts = FileFacts(name=name, nbytes=found.head.total_bytes, version=version)
        with self._lock:
            if found.head.in_one:
                self._only_whole[name] = found.url
            else:
                self._starts[name] = found.start
        return facts

    def whole_file(self, facts: FileFacts) -> WholeFile | None:
        """Return a file that the server gives only whole; ``None`` for one of which it gives parts."""
        url = self._only_whole.get(facts.name)
        if url is None:
            return None
        version = "" if facts.version == UNVERSIONED else facts.version
        asked = Asked(where=url, begin=0, nbytes=facts.nbytes, total_bytes=facts.nbytes, version=version)
        return WholeFile(client=self._client, url=url, asked=asked)

    def fetch(self, facts: FileFacts, view: memoryview, offset: int) -> None:
        """Fill a buffer with part of a file, without asking if it came when the file was looked at."""
        start = self._starts.get(facts.name, b"")
        if offset == 0 and len(view) <= len(start):
            view[:] = start[: len(view)]
            if len(view) == facts.nbytes:
                with self._lock:
                    self._starts.pop(facts.name, None)
            return
        url = self._url(facts.name)
        version = "" if facts.version == UNVERSIONED else facts.version
        asked = Asked(where=url, begin=offset, nbytes=len(view), total_bytes=facts.nbytes, version=version)
        self._client.read_into(url, asked, view)

    def _url(self, name: str) -> str:
        return self._base + quote(name, safe="")
