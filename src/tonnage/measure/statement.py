"""What a directory says of itself: the manifest of a package, or the summary of a preparation.

It is not verified here, for that there is ``tonnage verify``; but a statement the headers contradict is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem
from tonnage.export.manifest import PackageError, Parallel, parse_manifest
from tonnage.export.naming import date_in
from tonnage.export.provenance import read_origin
from tonnage.measure.packages import Origin, PackageKind
from tonnage.prepare.checks import is_digest
from tonnage.prepare.documents import MANIFEST, PROVENANCE, SUMMARY
from tonnage.prepare.summary import read_summary

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSize:
    """Bytes of one safetensors file; ``payload_bytes`` is ``None`` where they were not counted."""

    payload_bytes: int | None
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What is said of the whole directory.

    Attributes:
        kind: Who says it.
        name: Of the package; ``None`` if it has none yet.
        digest: SHA-256 of the document.
        digest_of: Its name.
        topology: Sizes the ranks are cut for.
        layout: ``hf`` if the directory is one unsharded checkpoint.
        origin: What was cut.
        convert: What preparation did to convertible weights.
        files: Every safetensors file by path.
        ranks: Those it says are in it, ascending.
    """

    kind: PackageKind
    name: str | None
    digest: str
    digest_of: str
    topology: Parallel
    layout: str
    origin: Origin
    convert: str | None
    files: Mapping[str, FileSize]
    ranks: tuple[int, ...]

    @property
    def date(self) -> str | None:
        """The date in the name of a package."""
        return None if self.name is None else date_in(self.name)


def package_statement(manifest_raw: bytes, provenance_raw: bytes) -> Statement:
    """Return what a package says of itself.

    Raises:
        PackageError: A document is none.
    """
    manifest = parse_manifest(manifest_raw)
    provenance = _read_provenance(provenance_raw)
    return Statement(
        kind="package",
        name=manifest.name,
        digest=hashlib.sha256(manifest_raw).hexdigest(),
        digest_of=MANIFEST,
        topology=manifest.topology,
        layout=manifest.layout,
        origin=_origin(provenance.source.name, provenance.source.digest, provenance.recipe.family, PROVENANCE),
        convert=provenance.options.convert,
        files={
            file.path: _stated(file.rank, file.payload_bytes, file.nbytes)
            for file in manifest.files
            if file.path.endswith(SUFFIX)
        },
        ranks=manifest.ranks,
    )


def preparation_statement(raw: bytes) -> Statement:
    """Return what a preparation says of itself.

    Raises:
        PrepareError: It is no summary.
        PackageError: Its topology or recipe is none.
    """
    summary = read_summary(raw, where=SUMMARY)
    identity = summary.identity
    recorded = read_origin(identity, where=SUMMARY)
    return Statement(
        kind="preparation",
        name=None,
        digest=hashlib.sha256(raw).hexdigest(),
        digest_of=SUMMARY,
        topology=recorded.topology,
        layout=identity.layout,
        origin=_origin(summary.checkpoint, identity.checkpoint, recorded.family, SUMMARY),
        convert=identity.convert,
        files={
            file.path: _stated(file.rank, file.payload_bytes, file.file_bytes)
            for file in summary.written
            if file.path.endswith(SUFFIX)
        },
        ranks=identity.ranks,
    )


def contradictions(
    statement: Statement, found: Mapping[str, FileSize], elsewhere: Collection[str], *, where: str
) -> Iterator[Problem]:
    """Yield every file that is not as stated: absent, not stated, or of other bytes.

    Args:
        statement: Of a package or preparation.
        found: Its safetensors files by path, as their headers are.
        elsewhere: Directories of ranks that are stated, and are kept elsewhere.
        where: Name of the directory.
    """
    stated_here = {path for path in statement.files if path.rpartition("/")[0] not in elsewhere}
    for path in sorted(stated_here | found.keys()):
        stated, there = statement.files.get(path), found.get(path)
        if stated is None or there is None:
            expected, is_ = ("no such file", "a file") if stated is None else ("a file", "none counted")
            yield _problem(where, path, statement, expected, is_)
        elif stated.file_bytes != there.file_bytes or stated.payload_bytes not in (None, there.payload_bytes):
            yield _problem(where, path, statement, _shown(stated), _shown(there))


def _origin(name: str, digest: str, family: str, where: str) -> Origin:
    if not is_digest(digest):
        raise PackageError(
            Problem(where=where, what="digest of the checkpoint", expected="64 hex digits", found=digest)
        )
    return Origin(name=name, digest=digest, family=family)


def _stated(rank: int | None, payload_bytes: int, file_bytes: int) -> FileSize:
    """Return what is said of a file; in one of no rank, which was copied as it was, no tensors were counted."""
    return FileSize(payload_bytes=None if rank is None else payload_bytes, file_bytes=file_bytes)


def _shown(size: FileSize) -> str:
    payload = "" if size.payload_bytes is None else f", payload {size.payload_bytes}"
    return f"{size.file_bytes} bytes{payload}"


def _problem(where: str, path: str, statement: Statement, expected: str, found: str) -> Problem:
    what = f"not as {statement.digest_of} says"
    return Problem(where=f"{where}/{path}", what=what, expected=expected, found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    convert: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Provenance:
    """The part of the provenance that a measurement repeats."""

    schema: Literal["tonnage.provenance/1"]
    source: _Source
    recipe: _Recipe
    options: _Options


def _read_provenance(raw: bytes) -> _Provenance:
    document = parse_object(raw, where=PROVENANCE, kind=PackageError)
    try:
        return msgspec.convert(document, type=_Provenance)
    except msgspec.ValidationError as error:
        raise PackageError(Problem(where=PROVENANCE, what="not a provenance", found=str(error))) from error
