"""``manifest.json``: every file of a package with size, digest and rank. The bytes are canonical (RFC 8785).

A manifest that was read is as hostile as any input: it is believed only after its digest stood in a verified signature,
and even then every path in it is checked before it is used.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import msgspec

from tonnage.checkpoint.strict_json import MOST_CONTAINERS, MOST_PROBLEMS, MOST_VALUES
from tonnage.errors import Problem, TonnageError
from tonnage.prepare.documents import MANIFEST, SIGNATURE
from tonnage.topology import MOST_RANKS, cut_words

MANIFEST_SCHEMA: Literal["tonnage.manifest/1"] = "tonnage.manifest/1"
MANIFEST_LIMIT_BYTES = 64 << 20
"""Of a manifest, as of a signature. It has at most as many files and ranks as any JSON here has objects."""

LONGEST_NAME = 128
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {LONGEST_NAME}, a letter or digit first"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")

Layout = Literal["tp", "hf"]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # what every reader of JSON keeps exact
_Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class PackageError(TonnageError):
    """A directory cannot become a package, or is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The parallel sizes the ranks were cut for."""

    tp: _Size
    ep: _Size = 1
    pp: _Size = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    @property
    def words(self) -> str:
        """The sizes in words."""
        return cut_words(self.tp, self.ep, self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """One file of a package; the manifest itself and the signature are not listed.

    Attributes:
        path: Relative to the package, with ``/``.
        nbytes: Size.
        digest: Of the whole file, by the manifest's algorithm, lower-case hex.
        sha256: SHA-256 of the whole file, as signatures state it; ``None`` where ``digest`` is that.
        rank: Global rank whose directory it is in; ``None`` for a file of all ranks.
        tensors: Tensors in its header; 0 for a file without.
        payload_bytes: Bytes of these tensors.
    """

    path: str
    nbytes: _Count
    digest: _Digest
    sha256: _Digest | None = None
    rank: _Count | None = None
    tensors: _Count = 0
    payload_bytes: _Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a package consists of.

    Attributes:
        schema: Of the document.
        name: Of the package.
        tonnage_version: Who wrote it.
        hash: Algorithm of the digests; beside those of another than SHA-256 stands SHA-256.
        layout: ``tp``: one directory per rank; ``hf``: one standard checkpoint.
        topology: Sizes the ranks were cut for.
        ranks: Global ranks in this package, ascending.
        files: Sorted by path.
    """

    schema: Literal["tonnage.manifest/1"] = MANIFEST_SCHEMA
    name: str
    tonnage_version: str
    hash: Literal["blake3", "sha256"]
    layout: Layout
    topology: Parallel
    ranks: tuple[_Count, ...]
    files: tuple[PackagedFile, ...]

    def by_rank(self) -> dict[int, list[PackagedFile]]:
        """Return the files of every rank."""
        found: dict[int, list[PackagedFile]] = {rank: [] for rank in self.ranks}
        for file in self.files:
            if file.rank is not None and file.rank in found:
                found[file.rank].append(file)
        return found

    def digests(self, algorithm: str) -> dict[str, str]:
        """Return the digests by an algorithm, by path; none if they are not stated."""
        if algorithm == self.hash:
            return {file.path: file.digest for file in self.files}
        return {file.path: file.sha256 for file in self.files if file.sha256 is not None and algorithm == "sha256"}


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the canonical bytes: keys sorted, no blanks, UTF-8, totals per rank beside the files they are sums of."""
    document = msgspec.to_builtins(manifest)
    document["ranks"] = [
        {
            "rank": rank,
            "tensors": sum(file.tensors for file in files),
            "payload_bytes": sum(file.payload_bytes for file in files),
            "file_bytes": sum(file.nbytes for file in files),
        }
        for rank, files in manifest.by_rank().items()
    ]
    return msgspec.json.encode(document, order="sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Total:
    rank: _Count
    tensors: _Count
    payload_bytes: _Count
    file_bytes: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """The manifest as it is written, with the totals of every rank."""

    schema: Literal["tonnage.manifest/1"]
    name: str
    tonnage_version: str
    hash: Literal["blake3", "sha256"]
    layout: Layout
    topology: Parallel
    ranks: tuple[_Total, ...]
    files: tuple[PackagedFile, ...]


def parse_manifest(raw: bytes, *, where: str = MANIFEST) -> Manifest:
    """Return a manifest, checked whole: written canonically, paths plain, sorted and unique, ranks of the topology.

    Raises:
        PackageError: Naming every problem, up to a few dozen.
    """
    _check_length(raw, where)
    try:
        found = msgspec.json.decode(raw, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PackageError(Problem(where=where, what="not a manifest of a package", found=str(error))) from error
    fields = {name: getattr(found, name) for name in _Document.__dataclass_fields__ if name != "ranks"}
    manifest = Manifest(**fields, ranks=tuple(total.rank for total in found.ranks))
    problems = tuple(islice(_problems(manifest, where), MOST_PROBLEMS))
    if not problems and manifest_bytes(manifest) != raw:
        what = "not written canonically, or the totals of a rank are not the sums of its files"
        problems = (Problem(where=where, what=what),)
    if problems:
        raise PackageError(*problems)
    return manifest


def _check_length(raw: bytes, where: str) -> None:
    """Refuse, before there is an object for any of it, a text of more files and ranks than a package is worth."""
    too_many = raw.count(b",") > MOST_VALUES or raw.count(b"[") + raw.count(b"{") > MOST_CONTAINERS
    if too_many or len(raw) > MANIFEST_LIMIT_BYTES:
        expected = f"at most {MANIFEST_LIMIT_BYTES} bytes, {MOST_CONTAINERS} files and ranks"
        raise PackageError(Problem(where=where, what="manifest too large", expected=expected))


def is_package_path(path: str) -> bool:
    """Whether a path stays in its package and is written in the one plain way.

    >>> [is_package_path(path) for path in ("weights/tp2/rank-0/a", "../a", "/a", "a//b", "a/./b", "")]
    [True, False, False, False, False, False]
    """
    return (
        bool(path)
        and path.isprintable()
        and "\\" not in path
        and not path.startswith("/")
        and posixpath.normpath(path) == path
        and path.split("/", maxsplit=1)[0] not in ("..", ".")
    )


def is_package_name(name: str) -> bool:
    """Whether a name is that of a package: plain, so that a directory can have it.

    >>> [is_package_name(name) for name in ("kimi-k3-tp8-20261130", "..", "a/b", "-a", "")]
    [True, False, False, False, False]
    """
    return _NAME.fullmatch(name) is not None


def _problems(manifest: Manifest, where: str) -> Iterator[Problem]:
    if not is_package_name(manifest.name):
        yield Problem(where=where, what="not the name of a package", expected=NAME_RULE, found=repr(manifest.name))
    ranks = frozenset(manifest.ranks)
    paths = [file.path for file in manifest.files]
    if paths != sorted(set(paths)):
        yield Problem(where=where, what="files are not sorted, or one stands twice")
    for file in manifest.files:
        if not is_package_path(file.path) or file.path in (MANIFEST, SIGNATURE):
            yield Problem(where=where, what="not a path of a file in a package", found=repr(file.path))
        if file.rank is not None and file.rank not in ranks:
            yield Problem(where=where, what=f"{file.path} is of a rank that is not here", found=str(file.rank))
        if (file.sha256 is None) != (manifest.hash == "sha256"):
            expected = "none" if manifest.hash == "sha256" else "one"
            yield Problem(where=where, what=f"SHA-256 of {file.path} beside its {manifest.hash}", expected=expected)
        if file.payload_bytes > file.nbytes:
            yield Problem(where=where, what=f"{file.path} holds more than its size", found=str(file.payload_bytes))
    if list(manifest.ranks) != sorted(set(manifest.ranks)):
        yield Problem(where=where, what="ranks are not sorted, or one stands twice")
    if any(rank >= manifest.topology.world_size for rank in manifest.ranks):
        expected = f"less than {manifest.topology.world_size}"
        yield Problem(where=where, what="a rank beyond the topology", expected=expected, found=str(manifest.ranks[-1]))
