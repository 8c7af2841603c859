"""What was fetched once, on the disk: small parts of files by address and version.

A shelf is a directory of one source below ``$XDG_CACHE_HOME/tonnage/sources``. An entry carries its checksum; one that
is damaged counts as absent and is fetched again. Entries get their name when they are whole. The oldest shelves go when
all together are too large. Where nothing can be kept, a directory that ends with the process takes the place.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import finalize

import msgspec

from tonnage.sources.model import FileFacts, is_plain_file_name

MOST_BYTES = 4 << 30
"""Of all shelves together."""

_MAGIC = b"tonnage1"
_HEAD_BYTES = 20
_LISTING = "listing"
_LISTING_LIMIT_BYTES = 64 << 20
_ENTRY_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What is in a source.

    Attributes:
        files: By name.
        folders: Names.
        revision: What the names and versions are pinned to, if anything.
    """

    files: Mapping[str, FileFacts]
    folders: tuple[str, ...] = ()
    revision: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    files: list[FileFacts]
    folders: list[str]
    revision: str


def cache_directory() -> Path | None:
    """Return where shelves stand: below ``$XDG_CACHE_HOME``, else below ``.cache`` in the home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() has no answer where this one stays as it is
        if home == "~":
            return None
        base = f"{home}/.cache"
    return Path(base) / "tonnage" / "sources"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Shelf:
    """The entries of one source.

    Attributes:
        key: Its address, with everything that tells it from another.
        root: Where all shelves stand; ``None`` keeps nothing beyond this process.
    """

    key: str
    root: Path | None = field(default_factory=cache_directory)
    _directory: Path | None = None

    def get(self, facts: FileFacts, offset: int, nbytes: int) -> bytes | None:
        """Return part of a file if it is here, whole and undamaged."""
        content = self._read(_entry_name(facts, offset))
        return None if content is None or len(content) < nbytes else content[:nbytes]

    def put(self, facts: FileFacts, offset: int, content: bytes) -> None:
        """Keep part of a file, in place of a shorter one."""
        self._write(_entry_name(facts, offset), content)

    def listing(self) -> Listing | None:
        """Return what was last listed, if it is here; what no source could have listed counts as absent."""
        raw = self._read(_LISTING)
        if raw is None or len(raw) > _LISTING_LIMIT_BYTES:
            return None
        try:
            found = msgspec.json.decode(raw, type=_Document)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        names = [*(one.name for one in found.files), *found.folders]
        if not all(map(is_plain_file_name, names)) or any(one.nbytes < 0 for one in found.files):
            return None
        files = {one.name: one for one in found.files}
        return Listing(files=files, folders=tuple(found.folders), revision=found.revision)

    def put_listing(self, listing: Listing) -> None:
        """Keep what was listed."""
        files, folders = list(listing.files.values()), list(listing.folders)
        self._write(_LISTING, msgspec.json.encode(_Document(files=files, folders=folders, revision=listing.revision)))

    def _place(self) -> Path:
        """Return the directory, made if it is not there; a temporary one where that is not possible.

        Raises:
            OSError: Not even that is.
        """
        if self._directory is None:
            name = hashlib.sha256(self.key.encode("utf-8", "surrogatepass")).hexdigest()[:40]
            try:
                if self.root is None:
                    raise FileNotFoundError
                place = self.root / name
                if not place.is_dir():
                    place.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _make_room(self.root)
                if not os.access(place, os.W_OK | os.X_OK):
                    raise PermissionError
                with suppress(OSError):
                    os.utime(place)
            except OSError:
                place = Path(tempfile.mkdtemp(prefix="tonnage-"))
                finalize(self, shutil.rmtree, place, ignore_errors=True)
            self._directory = place
        return self._directory

    def _read(self, name: str) -> bytes | None:
        try:
            with open(self._place() / name, "rb", opener=_plainly) as file:
                raw = file.read(_ENTRY_LIMIT_BYTES)
        except OSError:
            return None
        content = raw[_HEAD_BYTES:]
        return content if raw[:_HEAD_BYTES] == _head(content) else None

    def _write(self, name: str, content: bytes) -> None:
        """Write an entry; a disk that is full keeps nothing, nor does one without any place to write."""
        try:
            place = self._place()
        except OSError:
            return
        partial = place / f".{name}.{secrets.token_hex(8)}"
        try:
            with partial.open("xb") as file:
                file.write(_head(content))
                file.write(content)
            partial.replace(place / name)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _plainly(path: str, flags: int) -> int:
    """Open a file that is one: no link is followed, and nothing is waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _head(content: bytes) -> bytes:
    return _MAGIC + zlib.crc32(content).to_bytes(4, "little") + len(content).to_bytes(8, "little")


def _entry_name(facts: FileFacts, offset: int) -> str:
    text = f"{facts.name}\0{facts.version}\0{facts.nbytes}\0{offset}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _make_room(root: Path) -> None:
    """Remove the shelves used longest ago while all are too large together."""
    shelves = []
    with os.scandir(root) as found:
        for entry in found:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shelves.append((entry.stat().st_mtime_ns, entry.path, _bytes_in(entry.path)))
    total = sum(nbytes for _, _, nbytes in shelves)
    for _, path, nbytes in sorted(shelves):
        if total <= MOST_BYTES:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= nbytes


def _bytes_in(directory: str) -> int:
    with os.scandir(directory) as found:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in found)
