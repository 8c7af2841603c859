"""A package that is there already, signed or all but signed: checked once more before anybody signs it again.

Who signs vouches for it. A package with a signature must be what that signature states, whoever made it: its manifest,
the files in it, their sizes, headers and documents, as ``verify --fast`` checks them. Without a signature the manifest
alone states digests, and nobody vouched for it: so every file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem, raise_if_any
from tonnage.export.contents import Scope, check_files
from tonnage.export.digests import read_digests
from tonnage.export.hashing import digest_of
from tonnage.export.manifest import PackageError
from tonnage.export.signature import SignatureRefusedError, read_unverified
from tonnage.export.verify import VerifyError, VerifyRequest, scope_of
from tonnage.export.walk import grouped
from tonnage.prepare.documents import MANIFEST, SIGNATURE, STATE

if TYPE_CHECKING:
    from tonnage.export.manifest import Manifest
    from tonnage.export.package import Package
    from tonnage.export.statement import Signed
    from tonnage.prepare.io import Hash


def check_signed(root: int, package: Package, signature: bytes) -> None:
    """Refuse to sign again what is not the package its signature states.

    Args:
        root: Descriptor of its directory.
        package: As its documents say.
        signature: Its signature; by whom it is is not looked at.

    Raises:
        PackageError: Naming every difference.
    """
    with _refusing():
        signed = read_unverified(signature)
    expected, found = signed.digests.get(MANIFEST), digest_of(package.documents[MANIFEST], signed.hash)
    if expected != found:
        what = f"not the file that {SIGNATURE} states; without {SIGNATURE} export reads every file and signs anew"
        raise PackageError(Problem(where=MANIFEST, what=what, expected=expected, found=found))
    _check(root, _scope(signed, package.manifest))


def check_unsigned(root: int, package: Package, on_progress: Callable[[int, int], None]) -> int:
    """Refuse to sign files that are not those of a manifest nobody signed, and return the bytes read for it.

    Args:
        root: Descriptor of its directory.
        package: As its documents say.
        on_progress: Told the bytes and files done so far.

    Raises:
        PackageError: Naming every difference.
    """
    scope = _scope(package.signed, package.manifest)
    _check(root, replace(scope, closed=frozenset({STATE}), besides=(MANIFEST,)))
    manifest = package.manifest
    sizes = {file.path: file.nbytes for file in manifest.files}
    names: tuple[Hash, ...] = (manifest.hash, "sha256")
    stated = {name: manifest.digests(name) for name in names}
    recorded = {path: {name: stated[name][path] for name in names} for path in sizes}
    read_digests(root, sizes, recorded, manifest.hash, on_progress)
    return sum(sizes.values())


def _scope(signed: Signed, manifest: Manifest) -> Scope:
    with _refusing():
        return scope_of(signed, manifest, VerifyRequest(fast=True))


def _check(root: int, scope: Scope) -> None:
    raise_if_any(PackageError, grouped(check_files(root, scope, lambda _: None).problems))


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what a verification would fail with into a refusal of the input."""
    try:
        yield
    except (VerifyError, SignatureRefusedError, PlacementError) as error:
        raise PackageError(*error.problems) from error
