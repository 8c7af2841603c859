"""The documents of packages that are joined: read and verified without any other file, and written where they go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tonnage.errors import PlacementError, Problem, one_line, raise_if_any
from tonnage.export.agreement import document_problems, read_package_plan, read_provenance
from tonnage.export.hashing import ReadRefusedError, digest_of, read_whole
from tonnage.export.io import alone, holds
from tonnage.export.joining import Part
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, Manifest, PackageError, parse_manifest
from tonnage.export.package import Package
from tonnage.export.signature import SignatureRefusedError, Trust, read_signature
from tonnage.export.statement import Signed
from tonnage.export.verify import VerifyError, VerifyRequest, opened_package, scope_of, signature_in, signed_manifest
from tonnage.prepare.documents import PACKAGE_DOCUMENTS, PLAN, PROVENANCE, SIGNATURE
from tonnage.prepare.io import write_whole
from tonnage.prepare.output_dir import make_parents, remove_partials


def read_part(directory: Path, trusts: Sequence[Trust]) -> Part:
    """Return a package by its documents; of its other files none is looked at, and none need be here.

    Args:
        directory: Of the package, or of copies of its four documents.
        trusts: By any of whom it must be signed.

    Raises:
        VerifyError: It is not signed so, or its documents are not those signed or do not agree.
        CheckpointError: There is no such directory.
        KeyFileError: The file of a trusted key is none.
    """
    where = one_line(str(directory))
    with _of(where), opened_package(directory) as root:
        signed = _read_by_any(signature_in(root), trusts)
        manifest = parse_manifest(signed_manifest(root, signed))
        scope_of(signed, manifest, VerifyRequest(fast=True))
        plan, provenance = (_document(root, name, manifest) for name in (PLAN, PROVENANCE))
        agreed = document_problems(read_package_plan(plan), read_provenance(provenance), manifest)
        raise_if_any(VerifyError, agreed)
        return Part(where=where, manifest=manifest, plan=plan, provenance=provenance)


def write_documents(directory: Path, package: Package, signature: bytes) -> bool:
    """Write the documents of a package into a directory of their own, the signature last; return whether any was new.

    Raises:
        PackageError: The directory holds anything else, another joined package included.
        PrepareError: They cannot be written, or another join is at work there.
    """
    documents = {**{name: package.documents[name] for name in PACKAGE_DOCUMENTS}, SIGNATURE: signature}
    make_parents(directory, SIGNATURE)
    with alone(directory):
        return _write(directory, documents)


def _write(directory: Path, documents: Mapping[str, bytes]) -> bool:
    remove_partials(directory, documents)
    foreign = sorted({path.name for path in directory.iterdir()} - documents.keys())
    if foreign:
        expected = f"a new or an empty directory, or one of {', '.join(documents)}"
        found = ", ".join(map(one_line, foreign[:10]))
        raise PackageError(Problem(where=str(directory), what="output is in use", expected=expected, found=found))
    missing = [name for name, raw in documents.items() if not holds(directory / name, raw)]
    if missing and (directory / SIGNATURE).exists():  # written last, so what is there is whole
        raise PackageError(
            Problem(
                where=str(directory), what="another joined package is there", expected="a new or an empty directory"
            )
        )
    for name in missing:
        write_whole(directory / name, documents[name])
    return bool(missing)


@contextmanager
def _of(where: str) -> Iterator[None]:
    """Say of which part a problem is."""
    try:
        yield
    except (PackageError, PlacementError, ReadRefusedError, SignatureRefusedError, VerifyError) as error:
        raise VerifyError(*(replace(one, where=f"{where}/{one.where}") for one in error.problems)) from error


def _read_by_any(raw: bytes, trusts: Sequence[Trust]) -> Signed:
    """Return what a signature says if it is by one of these."""
    problems: list[Problem] = []
    for trust in trusts:
        try:
            return read_signature(raw, trust)
        except SignatureRefusedError as error:
            problems += error.problems
    raise SignatureRefusedError(*problems)


def _document(root: int, name: str, manifest: Manifest) -> bytes:
    """Return a document the manifest states the digest of."""
    raw = read_whole(root, name, limit_bytes=MANIFEST_LIMIT_BYTES)
    expected, found = manifest.digests("sha256")[name], digest_of(raw, "sha256")
    if expected != found:
        raise VerifyError(Problem(where=name, what="contents are not those signed", expected=expected, found=found))
    return raw
