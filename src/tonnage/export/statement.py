"""The signed statement: the digest of every file, as OpenSSF model signing v1.0 writes it into an in-toto payload.

Read only after its signature was verified, and still not believed: a signer may be careless.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, TonnageError, raise_if_any
from tonnage.export.manifest import is_package_path
from tonnage.prepare.documents import SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.prepare.io import Hash

PAYLOAD_TYPE: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What was signed.

    Attributes:
        name: Of the package, as the signer called it.
        hash: Algorithm of the digests.
        digests: Lower-case hex by path; paths are plain and relative.
        signer: Who signed it, as the verified signature says: hint of a key, subject of a certificate, identity. No
            part of what was signed, and of no comparison.
    """

    name: str
    hash: Hash
    digests: dict[str, str]
    signer: str = field(default="", compare=False)


class _Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    algorithm: str
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Serialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: Literal["files"]
    hash_type: Literal["blake3", "sha256"]
    allow_symlinks: Literal[False]
    ignore_paths: list[str] = []


class _Predicate(msgspec.Struct, frozen=True):
    """What else is in it is to be ignored, says the format."""

    serialization: _Serialization
    resources: list[_Resource]


class _RootDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str


class _Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    digest: _RootDigest


class _Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    kind: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"]
    subject: Annotated[list[_Subject], msgspec.Meta(min_length=1, max_length=1)]
    predicate: _Predicate


def read_statement(payload: bytes, *, where: str, kind: type[TonnageError]) -> Signed:
    """Return what a verified payload says.

    Args:
        payload: As it was signed.
        where: It was found.
        kind: Of refusals.

    Raises:
        TonnageError: As ``kind``: another predicate, an unknown algorithm, a path that leaves the package or stands
            twice, or a digest over all that is not of these.
    """
    document = parse_object(payload, where=where, kind=kind)
    try:
        statement = msgspec.convert(document, type=_Statement)
    except msgspec.ValidationError as error:
        expected = "a statement of OpenSSF model signing v1.0 over whole files"
        raise kind(Problem(where=where, what="signs something else", expected=expected, found=str(error))) from error
    raise_if_any(kind, _problems(statement, where))
    return Signed(
        name=statement.subject[0].name,
        hash=statement.predicate.serialization.hash_type,
        digests={resource.name: resource.digest for resource in statement.predicate.resources},
    )


def _problems(statement: _Statement, where: str) -> Iterator[Problem]:
    algorithm = statement.predicate.serialization.hash_type
    root = hashlib.sha256()
    seen: set[str] = set()
    for resource in statement.predicate.resources:
        if resource.algorithm != algorithm:
            what = f"digest of {resource.name} by another algorithm"
            yield Problem(where=where, what=what, expected=algorithm, found=resource.algorithm)
        if not is_package_path(resource.name) or resource.name == SIGNATURE:
            yield Problem(where=where, what="not a path of a file in a package", found=repr(resource.name))
        if resource.name in seen:
            yield Problem(where=where, what=f"{resource.name} is signed twice")
        seen.add(resource.name)
        root.update(bytes.fromhex(resource.digest))
    expected = statement.subject[0].digest.sha256
    if root.hexdigest() != expected:
        what = "digest over all digests is another"
        yield Problem(where=where, what=what, expected=expected, found=root.hexdigest())
