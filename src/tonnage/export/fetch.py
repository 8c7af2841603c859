"""A package, or some ranks of it, from anywhere onto this machine: nothing gets its name before it is what was signed.

First the signature and the manifest it states; then every file, hashed while it is written, under its final name when
its digest is the signed one; last, when headers and documents agree as well, the manifest and the signature. So a
directory that was fetched in part is no package, and the same command goes on where the last one ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem, raise_if_any
from tonnage.export.contents import Scope, Standing, check_files
from tonnage.export.hashing import (
    WINDOW_BYTES,
    Account,
    Content,
    ReadRefusedError,
    Target,
    check_size,
    read_all,
    read_targets,
)
from tonnage.export.io import alone, holds
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackagedFile, PackageError, parse_manifest
from tonnage.export.remote import FILES_AT_ONCE, RemotePackage
from tonnage.export.signature import SIGNATURE_LIMIT_BYTES, SignatureRefusedError, Trust, read_signature
from tonnage.export.verify import VerifyError, VerifyRequest, checked_manifest, scope_of
from tonnage.export.walk import grouped
from tonnage.prepare.ahead import reading
from tonnage.prepare.checks import check_disk
from tonnage.prepare.documents import MANIFEST, SIGNATURE
from tonnage.prepare.io import NewFile, new_digest, own_tag, sync_directory, write_whole
from tonnage.prepare.output_dir import check_foreign, make_parents, path_within, remove_partials
from tonnage.prepare.survey import OutputSize
from tonnage.sources.remote import gives_parts

if TYPE_CHECKING:
    from tonnage.export.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A package, or some ranks of it, on this machine.

    Attributes:
        path: Where.
        manifest: As signed.
        signer: By whom.
        ranks: That are there.
        files: Of these ranks, and those of all ranks; manifest and signature included.
        nbytes: Of these files.
        fetched_bytes: Of those that were fetched.
    """

    path: Path
    manifest: Manifest
    signer: str
    ranks: tuple[int, ...]
    files: int
    nbytes: int
    fetched_bytes: int


def fetch_package(
    package: RemotePackage,
    output: Path,
    trust: Trust,
    request: VerifyRequest | None = None,
    on_progress: Callable[[Standing], None] = lambda _: None,
) -> Fetched:
    """Fetch a package, or what an earlier run left to fetch of it.

    Args:
        package: Where it is.
        output: A directory: new, empty, or with some of this package in it.
        trust: By whom it must be signed.
        request: Which ranks; all by default.
        on_progress: Told a few times a second how far it is.

    Raises:
        VerifyError: It is not what was signed, or by somebody else.
        PackageError: The directory holds something else.
        PrepareError: The disk is full, or the system refuses.
        SourceError: A server cannot be reached, or answers wrong.
    """
    try:
        signature = package.read_whole(SIGNATURE, SIGNATURE_LIMIT_BYTES)
        signed = read_signature(signature, trust)
        listing = checked_manifest(package.read_whole(MANIFEST, MANIFEST_LIMIT_BYTES), signed)
        manifest = parse_manifest(listing)
        scope = scope_of(signed, manifest, request or VerifyRequest())
    except (ReadRefusedError, SignatureRefusedError, PackageError, PlacementError) as error:
        raise VerifyError(*error.problems) from error
    make_parents(output, MANIFEST)
    with alone(output) as root:
        _check_here(output, manifest, listing)
        left = _left(root, output, scope)
        _check_room(output, left)
        try:
            _Fetching(package, output, scope, left, on_progress).run()
        finally:
            remove_partials(output, _listed(manifest))  # of a file that a silent server still holds up
        checked = check_files(root, replace(scope, fast=True, besides=_documents(output)), lambda _: None)
        if checked.problems:
            raise VerifyError(*grouped(checked.problems))
        for name, raw in ((MANIFEST, listing), (SIGNATURE, signature)):
            if not holds(output / name, raw):
                write_whole(path_within(output, name), raw)
    return Fetched(
        path=output,
        manifest=manifest,
        signer=signed.signer,
        ranks=scope.ranks,
        files=len(scope.files) + 2,
        nbytes=sum(file.nbytes for file in scope.files) + len(listing) + len(signature),
        fetched_bytes=sum(file.nbytes for file in left) + len(listing) + len(signature),
    )


# --- what is there ----------------------------------------------------------------------------------------------------


def _documents(output: Path) -> tuple[str, ...]:
    return tuple(name for name in (MANIFEST, SIGNATURE) if os.path.lexists(output / name))


def _listed(manifest: Manifest) -> set[str]:
    return {file.path for file in manifest.files} | {MANIFEST, SIGNATURE}


def _check_here(output: Path, manifest: Manifest, listing: bytes) -> None:
    """Refuse a directory with anything in it that is not of this package, and remove what is unfinished of it."""
    listed = _listed(manifest)
    check_foreign(output, listed, listed)
    if os.path.lexists(output / MANIFEST) and not holds(output / MANIFEST, listing):
        raise PackageError(Problem(where=str(output), what="another package is here", expected="an empty directory"))
    remove_partials(output, listed)


def _left(root: int, output: Path, scope: Scope) -> tuple[PackagedFile, ...]:
    """Return the files that are not there yet. Those that are must be as they were signed; they are read.

    Raises:
        PackageError: A file is another.
    """
    there = [file for file in scope.files if path_within(output, file.path).exists()]
    targets = [Target(path=file.path, nbytes=file.nbytes, keep="nothing", hashes=scope.hashes) for file in there]
    by_path = {file.path: file for file in there}
    problems: list[Problem] = []
    for content in read_targets(root, targets, lambda _nbytes, _files: None):
        problems += content.problems
        if not content.problems and content.digests != scope.expected(by_path[content.path]):
            what, expected = "not the file of this package; remove it", scope.expected(by_path[content.path])[0]
            problems.append(Problem(where=content.path, what=what, expected=expected, found=content.digests[0]))
    raise_if_any(PackageError, sorted(problems, key=lambda problem: problem.where))
    return tuple(file for file in scope.files if file.path not in by_path)


def _check_room(output: Path, left: Sequence[PackagedFile]) -> None:
    sizes = [
        OutputSize(path=file.path, rank=file.rank, payload_bytes=file.payload_bytes, file_bytes=file.nbytes)
        for file in left
    ]
    check_disk(output, sizes)


# --- what is fetched --------------------------------------------------------------------------------------------------


class _Fetching:
    """Fetches files, several at a time."""

    def __init__(
        self,
        package: RemotePackage,
        output: Path,
        scope: Scope,
        left: Sequence[PackagedFile],
        on_progress: Callable[[Standing], None],
    ) -> None:
        self._package = package
        self._output = output
        self._scope = scope
        self._left = {file.path: file for file in sorted(left, key=lambda file: -file.nbytes)}
        self._on_progress = on_progress

    def run(self) -> None:
        """Fetch everything.

        Raises:
            VerifyError: Files are not as they were signed; those that are keep their names.
            PrepareError: The disk is full, or the system refuses.
            SourceError: A server cannot be reached, or answers wrong.
        """
        total = sum(file.nbytes for file in self._scope.files)
        there = total - sum(file.nbytes for file in self._left.values())

        def tell(nbytes: int, files: int) -> None:
            tasks = len(self._scope.files)
            done = tasks - len(self._left) + files
            standing = Standing(
                done_bytes=there + nbytes, total_bytes=total, resumed_bytes=there, tasks_done=done, tasks=tasks
            )
            self._on_progress(standing)

        account = Account(tell)
        targets = [self._target(file) for file in self._left.values()]
        problems: list[Problem] = []
        for content in read_all(partial(self._fetch, account), targets, account, at_once=FILES_AT_ONCE):
            problems += content.problems
        raise_if_any(VerifyError, sorted(problems, key=lambda problem: problem.where))

    def _target(self, file: PackagedFile) -> Target:
        return Target(path=file.path, nbytes=file.nbytes, keep="nothing", hashes=self._scope.hashes)

    def _fetch(self, account: Account, target: Target) -> Content:
        """Fetch a file; under its final name it is the one that was signed."""
        path = make_parents(self._output, target.path)
        digests = [new_digest(name) for name in target.hashes]
        try:
            with closing(NewFile(path, target.nbytes, tag=own_tag(), digests=digests)) as file:
                for piece in self._pieces(target):
                    if account.stopped:
                        return Content(path=target.path)
                    file.write(piece)
                    account.add(len(piece))
                problems = tuple(self._differences(target, file.hexdigests()))
                if not problems:
                    file.sync()
                    file.publish()
        except ReadRefusedError as error:
            return Content(path=target.path, problems=error.problems)
        if not problems:
            sync_directory(path.parent)
            account.add(0, files=1)
        return Content(path=target.path, problems=problems)

    def _pieces(self, target: Target) -> Iterator[memoryview]:
        """Yield a file from its first byte to its last; every piece is valid until the next."""
        window = memoryview(bytearray(min(WINDOW_BYTES, target.nbytes)))
        with self._package.opened(target.path) as file:
            check_size(target, file.facts.nbytes)
            with reading(file, [(0, target.nbytes)], remote=gives_parts(file)) as reader:
                for begin in range(0, target.nbytes, WINDOW_BYTES):
                    piece = window[: target.nbytes - begin]
                    reader.read_into(piece, begin)
                    yield piece

    def _differences(self, target: Target, found: tuple[str, ...]) -> Iterator[Problem]:
        expected = self._scope.expected(self._left[target.path])
        for name, wanted, digest in zip(target.hashes, expected, found, strict=True):
            if wanted != digest:
                what = f"{name} digest is not the signed one; nothing of it was kept"
                yield Problem(where=target.path, what=what, expected=wanted, found=digest)
