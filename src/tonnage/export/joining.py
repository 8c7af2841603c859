"""Packages of some ranks each as one: a manifest of all their files, to be signed once. No weight is read or moved.

Every host prepares, exports and keeps the files of its own ranks. What is joined are the documents of these packages,
each verified by its own signature; they must be of one checkpoint, one plan, one schedule and one version, and tell the
same of every file that several have. What comes out is what one host would have exported of all ranks: the same bytes,
but for figures of conversion where hosts converted different rows of a tensor, which stand there once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, raise_if_any
from tonnage.export.agreement import document_problems, read_package_plan, read_provenance
from tonnage.export.hashing import digest_of
from tonnage.export.manifest import Manifest, PackagedFile, PackageError, manifest_bytes, parse_manifest
from tonnage.export.naming import check_name
from tonnage.export.package import Package, document_file
from tonnage.export.provenance import canonical
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE

_OF_RANKS = {"source": "files", "options": "ranks"}
"""What of these members of a provenance depends on which ranks were prepared."""


class _File(msgspec.Struct, frozen=True):
    name: str
    nbytes: int
    digest: str | None


class _Source(msgspec.Struct, frozen=True):
    files: tuple[_File, ...]


class _Tensor(msgspec.Struct, frozen=True):
    tensor: str


class _Numerics(msgspec.Struct, frozen=True):
    converted: tuple[_Tensor, ...]


class _Origin(msgspec.Struct, frozen=True):
    source: _Source
    options: dict[str, Any]
    numerics: _Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A package of some ranks, by its verified documents.

    Attributes:
        where: Its directory, for refusals.
        manifest: What it consists of.
        plan: Bytes of its plan.
        provenance: Bytes of its provenance.
    """

    where: str
    manifest: Manifest
    plan: bytes
    provenance: bytes

    @property
    def origin(self) -> dict[str, Any]:
        """Its provenance, checked as far as it is joined.

        Raises:
            PackageError: It is none.
        """
        where = f"{self.where}/{PROVENANCE}"
        document = parse_object(self.provenance, where=where, kind=PackageError)
        try:
            msgspec.convert(document, _Origin)
        except msgspec.ValidationError as error:
            raise PackageError(Problem(where=where, what="not a provenance", found=str(error))) from error
        return document


def join_parts(parts: Sequence[Part], *, name: str | None = None) -> Package:
    """Return the package of the ranks of all parts.

    Args:
        parts: At least one.
        name: Of the package; theirs if not given.

    Raises:
        PackageError: They are not parts of one package; everything that differs is named.
    """
    origins = [part.origin for part in parts]
    raise_if_any(PackageError, (*_manifest_problems(parts, name), *_origin_problems(parts, origins)))
    first = parts[0].manifest
    listed = {file.path: file for part in parts for file in part.manifest.files}
    raise_if_any(PackageError, _file_problems(parts, listed))
    ranks = tuple(sorted({rank for part in parts for rank in part.manifest.ranks}))
    origin = canonical(_origin(origins, ranks), where=PROVENANCE)
    listed[PROVENANCE] = document_file(PROVENANCE, origin, first.hash)
    raw = manifest_bytes(
        Manifest(
            name=first.name if name is None else check_name(name),
            tonnage_version=first.tonnage_version,
            hash=first.hash,
            layout=first.layout,
            topology=first.topology,
            ranks=ranks,
            files=tuple(listed[path] for path in sorted(listed)),
        )
    )
    package = Package(manifest=parse_manifest(raw), documents={PLAN: parts[0].plan, PROVENANCE: origin, MANIFEST: raw})
    plan = read_package_plan(parts[0].plan)
    raise_if_any(PackageError, document_problems(plan, read_provenance(origin), package.manifest))
    return package


# --- what must be alike -----------------------------------------------------------------------------------------------


def _manifest_problems(parts: Sequence[Part], name: str | None) -> Iterator[Problem]:
    first = parts[0]
    for part in parts:
        if part.manifest.layout != "tp":
            yield Problem(where=part.where, what="has no ranks to join", expected="layout tp", found="layout hf")
        facts = (
            ("tonnage_version", first.manifest.tonnage_version, part.manifest.tonnage_version),
            ("hash", first.manifest.hash, part.manifest.hash),
            ("topology", first.manifest.topology.words, part.manifest.topology.words),
            ("plan.json", digest_of(first.plan, "sha256"), digest_of(part.plan, "sha256")),
            ("name; --name gives all of them one", first.manifest.name, name or part.manifest.name),
        )
        for what, expected, found in facts[: -1 if name else None]:
            if expected != found:
                yield _other(part, first, what, expected, found)


def _origin_problems(parts: Sequence[Part], origins: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield members of a provenance that differ, but for what depends on the ranks."""
    for part, origin in zip(parts, origins, strict=True):
        for member in sorted(origins[0].keys() | origin.keys()):
            if member != "numerics":
                left_out = _OF_RANKS.get(member)
                before, here = (_without(one.get(member), left_out) for one in (origins[0], origin))
                if before != here:
                    yield _other(part, parts[0], f"{member} in {PROVENANCE}", str(before), str(here))
        before, here = (one["numerics"].get("compared") for one in (origins[0], origin))
        if before != here:
            yield _other(part, parts[0], f"comparison in {PROVENANCE}", str(before), str(here))


def _without(member: Any, left_out: str | None) -> Any:
    if left_out is None or not isinstance(member, dict):
        return member
    return {name: value for name, value in member.items() if name != left_out}


def _file_problems(parts: Sequence[Part], listed: Mapping[str, PackagedFile]) -> Iterator[Problem]:
    """Yield files that are not the same in all parts that have them; the plan was compared, the provenance is made."""
    for part in parts:
        for file in part.manifest.files:
            known = listed[file.path]
            if file != known and file.path not in (PLAN, PROVENANCE):
                where = f"{part.where}/{file.path}"
                yield Problem(
                    where=where, what="not the file another part has", expected=known.digest, found=file.digest
                )


def _other(part: Part, first: Part, what: str, expected: str, found: str) -> Problem:
    return Problem(
        where=part.where,
        what=f"not a part of one package with {first.where}: another {what}",
        expected=expected,
        found=found,
    )


# --- what is made of them ---------------------------------------------------------------------------------------------


def _origin(origins: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the provenance of all ranks."""
    first = origins[0]
    files: dict[str, dict[str, Any]] = {}
    for file in (file for origin in origins for file in origin["source"]["files"]):
        known = files.setdefault(file["name"], file)
        if known["digest"] is None:
            files[file["name"]] = file
        if known["nbytes"] != file["nbytes"] or (None not in (known["digest"], file["digest"]) and known != file):
            what = "another file of this name was prepared from"
            raise PackageError(
                Problem(where=f"{PROVENANCE}: source {file['name']}", what=what, expected=str(known), found=str(file))
            )
    converted = {
        (tensor["tensor"], canonical(tensor, where=PROVENANCE)): tensor
        for origin in origins
        for tensor in origin["numerics"]["converted"]
    }
    return {
        **first,
        "source": {**first["source"], "files": [files[name] for name in sorted(files)]},
        "options": {**first["options"], "ranks": list(ranks)},
        "numerics": {
            "class": "converted" if converted else "neutral",
            "converted": [converted[key] for key in sorted(converted)],
            "compared": first["numerics"].get("compared"),
        },
    }
