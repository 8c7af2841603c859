"""A package into an object store: every file hashed while it is sent, the manifest after all files, the signature last.

An object appears when all of it has arrived, and only if what was read had the digest the manifest states: the last
bytes of a file are sent after that was seen. Its digest stands beside it, so that a run that goes on sends nothing
twice. Before there is a manifest and a signature nobody takes what is there for a package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import Problem, raise_if_any
from tonnage.export.contents import Standing
from tonnage.export.hashing import digest_of, read_whole
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackagedFile, PackageError, parse_manifest
from tonnage.export.sending import FILES_AT_ONCE, Local, Sending, stated
from tonnage.export.signature import SIGNATURE_LIMIT_BYTES, SignatureRefusedError, read_unverified
from tonnage.prepare.documents import MANIFEST, SIGNATURE
from tonnage.prepare.io import new_digest
from tonnage.sources.parallel import in_order

if TYPE_CHECKING:
    from tonnage.export.objects import Objects, There
    from tonnage.prepare.io import Hash

_LOOKS_AT_ONCE = 12
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A package in an object store.

    Attributes:
        address: Where.
        files: All of them, manifest and signature included.
        nbytes: Of all files.
        sent_bytes: Of files that were sent.
        found_bytes: Of files that were there.
        confirmed: How many of the files sent have the checksum, as the store states it, of what was read; of the others
            the size alone was compared.
        sent: How many were sent.
        read_bytes: Of files that were read back.
        aborted: Unfinished uploads of these objects that an earlier run left and that are gone now; ``None`` if the
            store did not say.
    """

    address: str
    files: int
    nbytes: int
    sent_bytes: int
    found_bytes: int
    confirmed: int
    sent: int
    read_bytes: int
    aborted: int | None


def upload_package(
    directory: Path,
    objects: Objects,
    *,
    force: bool = False,
    check: bool = False,
    on_progress: Callable[[Standing], None] = lambda _: None,
) -> Uploaded:
    """Put a finished package into an object store, or what an earlier run left to put there.

    Args:
        directory: Of the package.
        objects: Where it goes.
        force: Remove what else is there.
        check: Read every object back.
        on_progress: Told a few times a second how far it is.

    Raises:
        PackageError: The directory is no package, or a file of it is not as its manifest states; or something else is
            there already.
        SourceError: The store cannot be reached, or refuses.
    """
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        local = _read(root)
        found = _found(local, objects, force=force)
        aborted = objects.abort_unfinished(frozenset(local.sizes))
        sending = Sending(local, objects, found, on_progress)
        sending.run()
        for name in (MANIFEST, SIGNATURE):
            if name not in found:
                objects.put_whole(name, local.documents[name])
        read_bytes = _read_back(local, objects) if check else 0
    finally:
        os.close(root)
    total = sum(local.sizes.values())
    found_bytes = sum(local.sizes[path] for path in found)
    return Uploaded(
        address=objects.address,
        files=len(local.sizes),
        nbytes=total,
        sent_bytes=total - found_bytes,
        found_bytes=found_bytes,
        confirmed=sending.confirmed,
        sent=sending.sent,
        read_bytes=read_bytes,
        aborted=aborted,
    )


def _read(root: int) -> Local:
    """Return a package by what its signature states; by whom it is is not looked at."""
    signature = read_whole(root, SIGNATURE, limit_bytes=SIGNATURE_LIMIT_BYTES)
    raw = read_whole(root, MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES)
    try:
        signed = read_unverified(signature)
    except SignatureRefusedError as error:
        raise PackageError(*error.problems) from error
    expected, found = signed.digests.get(MANIFEST), digest_of(raw, signed.hash)
    if expected != found:
        raise PackageError(Problem(where=MANIFEST, what="not the one that was signed", expected=expected, found=found))
    manifest = parse_manifest(raw)
    documents = {MANIFEST: raw, SIGNATURE: signature}
    return Local(root=root, hash=manifest.hash, files=manifest.files, documents=documents)


# --- what is there ----------------------------------------------------------------------------------------------------


def _found(local: Local, objects: Objects, *, force: bool) -> frozenset[str]:
    """Return the files of the package that are there; with ``force`` nothing else is there any more.

    Raises:
        PackageError: Something else is there, and must not be removed.
    """
    there = objects.listed()
    manifest = objects.read_small(MANIFEST, MANIFEST_LIMIT_BYTES) if MANIFEST in there else None
    if manifest is not None and manifest != local.documents[MANIFEST] and not force:
        what = "another package is here; --force removes it"
        raise PackageError(Problem(where=objects.address, what=what, expected="nothing, or this package"))
    found = {MANIFEST} if manifest == local.documents[MANIFEST] else set()
    if SIGNATURE in there and objects.read_small(SIGNATURE, SIGNATURE_LIMIT_BYTES) == local.documents[SIGNATURE]:
        found.add(SIGNATURE)
    found |= _same(local, objects, there)
    others = sorted(there.keys() - found - ({SIGNATURE} if MANIFEST in found else set()))
    if others and not force:
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise PackageError(
            Problem(
                where=objects.address,
                what="objects that are not of this package are here; --force removes them",
                expected="nothing, or this package",
                found=", ".join(others[:_MOST_NAMED]) + more,
            )
        )
    # First what would make a package of the rest.
    for path in sorted(others, key=lambda path: (path != SIGNATURE, path != MANIFEST, path)):
        objects.delete(path)
    return frozenset(found)


def _same(local: Local, objects: Objects, there: Mapping[str, There]) -> set[str]:
    """Return the listed files that are there as the manifest states them."""
    sized = [file for file in local.files if file.path in there and there[file.path].nbytes == file.nbytes]

    def is_same(file: PackagedFile) -> bool:
        beside = objects.stated_digest(file.path)
        if beside is not None:
            return beside == stated(local, file)
        return _hashed(objects, file, local.hash) == file.digest  # put there by somebody else

    same = in_order(is_same, sized, threads=_LOOKS_AT_ONCE)
    return {file.path for file, is_there in zip(sized, same, strict=True) if is_there}


def _hashed(objects: Objects, file: PackagedFile, name: Hash) -> str:
    digest = new_digest(name)
    for piece in objects.pieces(file.path, file.nbytes):
        digest.update(piece)
    return digest.hexdigest()


def _read_back(local: Local, objects: Objects) -> int:
    """Read every object and compare it; return the bytes read.

    Raises:
        PackageError: Naming every one that is not what was sent.
    """

    def problem(file: PackagedFile) -> Problem | None:
        found = _hashed(objects, file, local.hash)
        where, what = f"{objects.address}/{file.path}", "the object is not what was sent"
        return None if found == file.digest else Problem(where=where, what=what, expected=file.digest, found=found)

    found = in_order(problem, local.files, threads=FILES_AT_ONCE)
    raise_if_any(PackageError, [one for one in found if one is not None])
    for name, raw in local.documents.items():
        if objects.read_small(name, len(raw)) != raw:
            raise PackageError(Problem(where=f"{objects.address}/{name}", what="the object is not what was sent"))
    return sum(local.sizes.values())
