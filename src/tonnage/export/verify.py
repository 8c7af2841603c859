"""Whether a directory is the package that was signed: nothing in it is believed before its digest stood in a signature.

In this order: the signature; the manifest, whose digest it states; the tree, which must be the manifest's and nothing
besides; every file, hashed, and parsed from the bytes that were hashed; and last whether what was signed fits together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tonnage.checkpoint.io import INDEX_LIMIT_BYTES
from tonnage.errors import CheckpointError, PlacementError, Problem, TonnageError, UnitError
from tonnage.export.agreement import Numerics
from tonnage.export.contents import Checked, Scope, Standing, check_files, keep_of
from tonnage.export.hashing import ReadRefusedError, digest_of, read_whole
from tonnage.export.manifest import (
    MANIFEST_LIMIT_BYTES,
    Manifest,
    PackageError,
    parse_manifest,
)
from tonnage.export.rank_checks import place_problems, topology_of
from tonnage.export.remote import RemotePackage
from tonnage.export.signature import SIGNATURE_LIMIT_BYTES, SignatureRefusedError, Trust, read_signature
from tonnage.export.statement import Signed
from tonnage.export.walk import grouped, is_ignored
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, SIGNATURE
from tonnage.prepare.layout import rank_directory
from tonnage.units import ranges

_MOST_NAMED = 10


class VerifyError(TonnageError):
    """A directory is not the package that was signed. Exit code 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """How much is to be verified.

    Attributes:
        ranks: Global ranks, with the files of all ranks; ``None`` for the whole package.
        tp: Tensor-parallel size the package must be cut for.
        fast: Trust sizes and headers: the payload of weight files is not read.
    """

    ranks: tuple[int, ...] | None = None
    tp: int | None = None
    fast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
        request: What was asked for.
        signed: What the signature says; ``None`` if it is refused.
        manifest: ``None`` if it is refused.
        ranks: Those checked.
        files: Files checked, the manifest and the signature included.
        nbytes: Of these files.
        hashed_bytes: Of these, hashed.
        signature_bytes: Of these, the signature's own.
        absent: Of these ranks, those of which no file is here.
        unchecked: What was not looked at, in words.
        numerics: What the weights are to those of the source, as was signed; ``None`` if it is not verified.
        problems: Why it is not verified; those of one file name it alone.
        seconds: Wall clock.
    """

    request: VerifyRequest
    signed: Signed | None = None
    manifest: Manifest | None = None
    ranks: tuple[int, ...] = ()
    files: int = 0
    nbytes: int = 0
    hashed_bytes: int = 0
    signature_bytes: int = 0
    absent: tuple[int, ...] = ()
    unchecked: tuple[str, ...] = ()
    numerics: Numerics | None = None
    problems: tuple[Problem, ...] = ()
    seconds: float = 0.0

    @property
    def verified(self) -> bool:
        """Whether all that was asked for is as it was signed."""
        return not self.problems

    @property
    def in_part(self) -> bool:
        """Whether less than the whole package was asked for."""
        return self.request.fast or self.request.ranks is not None

    def check(self) -> None:
        """Refuse what is not verified.

        Raises:
            VerifyError: With all problems; files that are missing or too much are named together.
        """
        if self.problems:
            raise VerifyError(*grouped(self.problems), *self._hints())

    def _hints(self) -> Iterator[Problem]:
        """Yield what else to ask for where whole ranks are kept elsewhere."""
        here = sorted(set(self.ranks) - set(self.absent))
        if self.absent and here:
            expected = f"--ranks {ranges(here).replace(' ', '')} verifies those that are"
            yield Problem(where=f"ranks {ranges(self.absent)}", what="not here at all", expected=expected)


def verify_package(
    directory: Path | RemotePackage,
    trust: Trust,
    request: VerifyRequest | None = None,
    on_progress: Callable[[Standing], None] = lambda _: None,
) -> Verification:
    """Verify a package and return what was found; problems are part of it.

    Args:
        directory: Of the package, or where it is elsewhere.
        trust: By whom it must be signed.
        request: How much of it; all by default.
        on_progress: Told a few times a second how far it is.

    Raises:
        CheckpointError: There is no such directory.
        KeyFileError: The file of a trusted key or certificate is none.
        SourceError: A server cannot be reached, or answers wrong.
        UnitError: A rank is asked for that the topology of the package has not got.
    """
    begin = time.monotonic()
    wanted = request or VerifyRequest()
    if isinstance(directory, RemotePackage):
        found = _verify(directory.read_whole, directory.check, trust, wanted, on_progress)
        found = replace(found, unchecked=(*found.unchecked, "what else there is at this address"))
    else:
        with opened_package(directory) as root:
            found = _verify(partial(_read, root), partial(check_files, root), trust, wanted, on_progress)
    return replace(found, seconds=time.monotonic() - begin)


def _verify(
    read: Callable[[str, int], bytes],
    check: Callable[[Scope, Callable[[Standing], None]], Checked],
    trust: Trust,
    request: VerifyRequest,
    on_progress: Callable[[Standing], None],
) -> Verification:
    found = Verification(request=request)
    try:
        raw = read(SIGNATURE, SIGNATURE_LIMIT_BYTES)
        signed = read_signature(raw, trust)
        found = replace(found, signed=signed)
        listing = checked_manifest(read(MANIFEST, MANIFEST_LIMIT_BYTES), signed)
        manifest = parse_manifest(listing)
        found = replace(found, manifest=manifest)
        scope = scope_of(signed, manifest, request)
    except (VerifyError, ReadRefusedError, SignatureRefusedError, PackageError, PlacementError) as error:
        return replace(found, problems=error.problems)
    checked = check(scope, on_progress)
    return replace(
        found,
        ranks=scope.ranks,
        files=len(scope.files) + 2,
        nbytes=sum(file.nbytes for file in scope.files) + len(raw) + len(listing),
        hashed_bytes=checked.hashed_bytes + len(listing),
        signature_bytes=len(raw),
        absent=checked.absent,
        unchecked=tuple(_unchecked(scope, checked.ignored)),
        numerics=checked.numerics,
        problems=checked.problems,
    )


@contextmanager
def opened_package(directory: Path) -> Iterator[int]:
    """Open the directory of a package and yield its descriptor.

    Raises:
        CheckpointError: There is no such directory.
    """
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        problem = Problem(where=str(directory), what="not a directory that can be read", found=error.strerror)
        raise CheckpointError(problem) from error
    try:
        yield root
    finally:
        os.close(root)


# --- what is trusted --------------------------------------------------------------------------------------------------


def _read(root: int, path: str, limit_bytes: int) -> bytes:
    return signature_in(root) if path == SIGNATURE else read_whole(root, path, limit_bytes=limit_bytes)


def signature_in(root: int) -> bytes:
    """Return the bytes of a package's signature.

    Raises:
        VerifyError: It has none.
        ReadRefusedError: It cannot be read.
    """
    try:
        os.stat(SIGNATURE, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError as error:
        what = "missing: not a package; `tonnage export` makes one of a preparation"
        raise VerifyError(Problem(where=SIGNATURE, what=what)) from error
    return read_whole(root, SIGNATURE, limit_bytes=SIGNATURE_LIMIT_BYTES)


def signed_manifest(root: int, signed: Signed) -> bytes:
    """Return the bytes of the manifest the signature states the digest of.

    Raises:
        VerifyError: It signs none, or another.
        ReadRefusedError: It cannot be read.
    """
    return checked_manifest(read_whole(root, MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES), signed)


def checked_manifest(raw: bytes, signed: Signed) -> bytes:
    """Return the bytes of a manifest that are those the signature states the digest of.

    Raises:
        VerifyError: It signs none, or another.
    """
    if MANIFEST not in signed.digests:
        raise VerifyError(Problem(where=SIGNATURE, what=f"does not sign a {MANIFEST}"))
    expected, found = signed.digests[MANIFEST], digest_of(raw, signed.hash)
    if found != expected:
        raise VerifyError(Problem(where=MANIFEST, what="not the file that was signed", expected=expected, found=found))
    return raw


def scope_of(signed: Signed, manifest: Manifest, request: VerifyRequest) -> Scope:
    """Return what is to be checked.

    Raises:
        VerifyError: The manifest does not say what was signed, makes no sense, or is not of what was asked for.
        PlacementError: There is no such topology.
        UnitError: A rank is asked for that the topology has not got.
    """
    topology = topology_of(manifest)
    problems = [*_signed_problems(signed, manifest), *place_problems(manifest, topology)]
    problems += _request_problems(manifest, request)
    if problems:
        raise VerifyError(*problems)
    _check_ranks(request, topology.world_size)
    ranks = manifest.ranks if request.ranks is None else tuple(sorted(set(request.ranks)))
    others = set(manifest.ranks) - set(ranks)
    return Scope(
        signed=signed,
        manifest=manifest,
        topology=topology,
        ranks=ranks,
        files=tuple(file for file in manifest.files if file.rank not in others),
        closed=frozenset(rank_directory(topology, rank) for rank in others),
        fast=request.fast,
    )


def _signed_problems(signed: Signed, manifest: Manifest) -> Iterator[Problem]:
    """Yield where manifest and signature differ: in the files they name, or in a digest that both state."""
    listed = {file.path: file for file in manifest.files}
    yield from _named(MANIFEST, "files listed and not signed", listed.keys() - signed.digests.keys())
    yield from _named(MANIFEST, "files signed and not listed", signed.digests.keys() - listed.keys() - {MANIFEST})
    yield from _named(MANIFEST, "files every package has are not listed", {PLAN, PROVENANCE} - listed.keys())
    for path, found in manifest.digests(signed.hash).items():
        if found != (expected := signed.digests.get(path, found)):
            yield Problem(where=MANIFEST, what=f"not the signed digest of {path}", expected=expected, found=found)
    for file in manifest.files:
        if is_ignored(file.path):
            yield Problem(where=file.path, what="listed, and of a name that is not looked at")
        if keep_of(file.path) == "all" and file.nbytes > INDEX_LIMIT_BYTES:
            expected = f"at most {INDEX_LIMIT_BYTES} bytes"
            yield Problem(where=file.path, what="file too large", expected=expected, found=f"{file.nbytes} bytes")


def _request_problems(manifest: Manifest, request: VerifyRequest) -> Iterator[Problem]:
    if request.tp is not None and request.tp != manifest.topology.tp:
        expected, found = f"TP {request.tp}", f"TP {manifest.topology.tp}"
        yield Problem(where=MANIFEST, what="cut for another tensor-parallel size", expected=expected, found=found)
    for rank in sorted(set(request.ranks or ()) & set(range(manifest.topology.world_size)) - set(manifest.ranks)):
        expected = f"one of {', '.join(map(str, manifest.ranks[:_MOST_NAMED]))}"
        yield Problem(where=MANIFEST, what="no such rank in this package", expected=expected, found=str(rank))


def _check_ranks(request: VerifyRequest, world_size: int) -> None:
    """Refuse an option that no package of this topology could answer."""
    beyond = sorted(rank for rank in set(request.ranks or ()) if rank >= world_size)
    if beyond:
        expected, found = f"0 to {world_size - 1}", ", ".join(map(str, beyond[:_MOST_NAMED]))
        raise UnitError(
            Problem(where="--rank, --ranks", what="no such rank in this topology", expected=expected, found=found)
        )


def _named(where: str, what: str, names: Collection[str]) -> Iterator[Problem]:
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        yield Problem(where=where, what=what, found=", ".join(sorted(names)[:_MOST_NAMED]) + more)


def _unchecked(scope: Scope, ignored: Collection[str]) -> Iterator[str]:
    """Yield what was not looked at."""
    if ignored:
        yield f"{', '.join(ignored)}: no part of a package, not looked at"
    others = sorted(set(scope.manifest.ranks) - set(scope.ranks))
    absent = sorted(set(range(scope.topology.world_size)) - set(scope.manifest.ranks))
    if others:
        yield f"ranks not looked at: {', '.join(map(str, others))}"
    if absent and scope.manifest.layout == "tp":
        yield f"ranks not in this package: {', '.join(map(str, absent))}"
    if scope.manifest.layout == "tp" and (others or absent):
        yield "whether the parts of all ranks make whole tensors"
    if scope.fast:
        count = sum(keep_of(file.path) == "header" for file in scope.files)
        yield f"contents of weight files, {count} in all: not hashed, sizes and headers only"
