"""From a preparation to a package: its documents, the statement to be signed, and what may change of them later.

Values in, values out. What is on record of a preparation is held against its headers and its plan once more: whoever
signs vouches for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, raise_if_any
from tonnage.export.agreement import read_provenance
from tonnage.export.comparison import check_record
from tonnage.export.digests import Digests, hash_of, recorded_weights
from tonnage.export.hashing import digest_of
from tonnage.export.manifest import (
    Layout,
    Manifest,
    PackagedFile,
    PackageError,
    Parallel,
    manifest_bytes,
    parse_manifest,
)
from tonnage.export.naming import check_name, date_in, package_name
from tonnage.export.planned import Prepared, check_plan, with_profile
from tonnage.export.provenance import canonical, provenance, read_origin
from tonnage.export.statement import Signed
from tonnage.prepare.documents import MANIFEST, PACKAGE_DOCUMENTS, PLAN, PROVENANCE, SIGNATURE, SUMMARY
from tonnage.prepare.layout import rank_directory
from tonnage.saved_plan import SavedPlan, SavedProfile, read_plan_document
from tonnage.sources.model import SUFFIX
from tonnage.topology import Topology

if TYPE_CHECKING:
    from tonnage.export.comparison import Compared, Record
    from tonnage.prepare.io import Hash
    from tonnage.prepare.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a package is called, and what is to be served with it.

    Attributes:
        today: Date of the name where none is given, ``YYYY-MM-DD``.
        date: The date that is given.
        name: The name that is given.
        plan: The document of the plan that is given, in place of the recorded one.
        profile: What is given of the profile.
        hash: Algorithm of the manifest's digests that is given, in place of the one it was prepared with.
        added: Files that are put in beside the weights, by plain name.
        compared: What was measured between the source and this, for the numerics class to cite.
    """

    today: str
    date: str | None = None
    name: str | None = None
    plan: Mapping[str, Any] | None = None
    profile: SavedProfile = field(default_factory=SavedProfile)
    hash: Hash | None = None
    added: Mapping[str, bytes] = field(default_factory=dict)
    compared: Record | None = None

    @property
    def given(self) -> bool:
        """Whether a name or a plan is asked for that a finished package may not have."""
        return (self.date, self.name, self.plan, self.profile) != (None, None, None, SavedProfile())


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the header of a file holds."""

    tensors: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """All of a package but its signature and the files that were there before.

    Attributes:
        manifest: Every other file.
        documents: Bytes of ``plan.json``, ``provenance.json`` and ``manifest.json``.
        added: Bytes of the files that are put in.
    """

    manifest: Manifest
    documents: Mapping[str, bytes]
    added: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, as it is signed."""
        return digest_of(self.documents[MANIFEST], "sha256")

    @property
    def signed(self) -> Signed:
        """What is to be signed: SHA-256 of every file, the manifest among them; stock verifiers take no other."""
        digests = self.manifest.digests("sha256") | {MANIFEST: self.digest}
        return Signed(name=self.manifest.name, hash="sha256", digests=digests)


def make_package(summary: Summary, contents: Mapping[str, Contents], digests: Digests, options: Options) -> Package:
    """Return the package of a preparation.

    Args:
        summary: What is on record of it.
        contents: Of every safetensors file, by path, as its header says.
        digests: Of every file: by the algorithm asked for, and SHA-256.
        options: Of the export.

    Raises:
        PackageError: The record contradicts itself, its headers or its plan, or there is no such name.
    """
    identity = summary.identity
    topology = read_origin(identity, where=SUMMARY).topology
    raise_if_any(PackageError, _record_problems(summary, topology))
    raise_if_any(PackageError, _content_problems(summary, contents))
    layout: Layout = "hf" if identity.layout == "hf" else "tp"
    hash_name = options.hash or hash_of(summary)
    owners = _owners(summary, topology)
    files = [
        PackagedFile(
            path=file.path,
            nbytes=file.file_bytes,
            **_stated(digests[file.path], hash_name),
            rank=owners.get(file.path),
            **asdict(contents.get(file.path, Contents(tensors=0, payload_bytes=0))),
        )
        for file in summary.written
    ]
    plan, document = _plan(summary, files, topology, options)
    added = {name: raw for name, raw in options.added.items() if name not in digests}
    origin = provenance(
        summary, hash_name=hash_name, added=added, where=SUMMARY, compared=_compared(summary, options.compared)
    )
    documents = {PLAN: canonical(document, where=PLAN), PROVENANCE: canonical(origin, where=PROVENANCE)}
    files += (document_file(path, raw, hash_name) for path, raw in (*documents.items(), *added.items()))
    manifest = Manifest(
        name=_name(plan, topology, options, options.today),
        tonnage_version=summary.tonnage_version,
        hash=hash_name,
        layout=layout,
        topology=topology,
        ranks=identity.ranks,
        files=tuple(sorted(files, key=lambda file: file.path)),
    )
    raw = manifest_bytes(manifest)
    return Package(manifest=parse_manifest(raw), documents={**documents, MANIFEST: raw}, added=added)


def document_file(path: str, content: bytes, hash_name: Hash) -> PackagedFile:
    """Return a file of all ranks without tensors as a manifest by this algorithm lists it."""
    digests: dict[Hash, str] = {name: digest_of(content, name) for name in ("blake3", "sha256")}
    return PackagedFile(path=path, nbytes=len(content), **_stated(digests, hash_name))


def keep_package(documents: Mapping[str, bytes], options: Options) -> Package:
    """Return a package whose documents are written, finished or not.

    Args:
        documents: As they are.
        options: Of the export; nothing in them may differ from what is there.

    Raises:
        PackageError: The documents are not those of one package, or another one is asked for.
    """
    manifest = parse_manifest(documents[MANIFEST])
    raise_if_any(PackageError, _document_problems(manifest, documents))
    raise_if_any(PackageError, _others(manifest, documents, options))
    if options.given:
        before = parse_object(documents[PLAN], where=PLAN, kind=PackageError)
        document = before if options.plan is None else options.plan
        read_plan_document(document, where=PLAN, kind=PackageError)
        document = with_profile(document, options.profile)
        plan = read_plan_document(document, where=PLAN, kind=PackageError)
        today = date_in(manifest.name) or options.today
        name = _name(plan, manifest.topology, options, today)
        if name != manifest.name:
            raise PackageError(_finished(MANIFEST, "its name", expected=name, found=manifest.name))
        if canonical(document, where=PLAN) != documents[PLAN]:
            raise PackageError(_finished(PLAN, "its plan and profile", expected="those asked for", found="others"))
    return Package(manifest=manifest, documents=dict(documents))


def _compared(summary: Summary, record: Record | None) -> Compared | None:
    """Return what is cited of a comparison, which must be of this source and these weights."""
    if record is None:
        return None
    converted = {tensor.tensor for tensor in summary.converted}
    check_record(record, source=summary.identity.checkpoint, weights=recorded_weights(summary), converted=converted)
    return record.cited


def _others(manifest: Manifest, documents: Mapping[str, bytes], options: Options) -> Iterator[Problem]:
    """Yield the digests, files and figures that are asked for and are not in a finished package."""
    if options.hash not in (None, manifest.hash):
        yield _finished(MANIFEST, "the hash of its digests", expected=options.hash, found=manifest.hash)
    listed = manifest.digests("sha256")
    for name, raw in options.added.items():
        if (expected := digest_of(raw, "sha256")) != (found := listed.get(name, "no such file")):
            yield _finished(name, "its files", expected=expected, found=found)

    if (
        options.compared is not None
        and options.compared.cited != read_provenance(documents[PROVENANCE]).numerics.compared
    ):
        yield _finished(PROVENANCE, "the comparison it cites", expected="the one given", found="none, or another")


def _finished(where: str, part: str, *, expected: str | None, found: str) -> Problem:
    what = f"already packaged: {part} cannot change; prepare again, into another directory, to package it otherwise"
    return Problem(where=where, what=what, expected=expected, found=found)


def _plan(
    summary: Summary, files: list[PackagedFile], topology: Parallel, options: Options
) -> tuple[SavedPlan, dict[str, Any]]:
    """Return the plan, checked against what was written, and its document."""
    if summary.plan is None:
        what = "no plan on record; prepare again with this version"
        raise PackageError(Problem(where=SUMMARY, what=what, expected="plan"))
    recorded = read_plan_document(summary.plan, where=f"plan in {SUMMARY}", kind=PackageError)
    where = "--plan" if options.plan is not None else f"plan in {SUMMARY}"
    document = summary.plan if options.plan is None else options.plan
    payload_bytes = dict.fromkeys(summary.identity.ranks, 0)
    for file in files:
        if file.rank is not None:
            payload_bytes[file.rank] += file.payload_bytes
    prepared = Prepared(
        checkpoint=summary.identity.checkpoint,
        engine=summary.identity.engine,
        topology=topology,
        converted=bool(summary.converted),
        payload_bytes=payload_bytes,
    )
    check_plan(read_plan_document(document, where=where, kind=PackageError), prepared, recorded, where=where)
    document = with_profile(document, options.profile)
    return read_plan_document(document, where=where, kind=PackageError), document


def _name(plan: SavedPlan, topology: Parallel, options: Options, today: str) -> str:
    if options.name is not None:
        return check_name(options.name)
    return package_name(plan.checkpoint.family, topology, plan.profile, options.date or today)


def _owners(summary: Summary, topology: Parallel) -> dict[str, int]:
    """Return whose the files are: whose directory they are in. In layout ``hf`` all weights are of the one rank."""
    identity = summary.identity
    if identity.layout == "hf":
        return {file.path: identity.ranks[0] for file in summary.written if file.path.endswith(SUFFIX)}
    sizes = Topology(tp=topology.tp, ep=topology.ep, pp=topology.pp)
    folders = {rank_directory(sizes, rank): rank for rank in identity.ranks}
    found = {file.path: folders.get(file.path.rpartition("/")[0]) for file in summary.written}
    return {path: rank for path, rank in found.items() if rank is not None}


def _stated(digests: Mapping[Hash, str], name: Hash) -> dict[str, Any]:
    """Return the digests of a file as a manifest by this algorithm states them."""
    return {"digest": digests[name], "sha256": None if name == "sha256" else digests["sha256"]}


def _record_problems(summary: Summary, topology: Parallel) -> Iterator[Problem]:
    """Yield what of a record cannot be: its layout, and files that are not where their rank's are."""
    identity = summary.identity
    if identity.layout not in ("tp", "hf"):
        yield Problem(where=SUMMARY, what="unknown layout", expected="tp or hf", found=repr(identity.layout))
    if not identity.ranks or tuple(rank.rank for rank in summary.ranks) != identity.ranks:
        yield Problem(where=SUMMARY, what="ranks are not those prepared", expected=str(identity.ranks))
        return
    for file in summary.written:
        if file.path in (*PACKAGE_DOCUMENTS, SIGNATURE, SUMMARY):
            yield Problem(where=file.path, what="a file of the checkpoint is called as one that every package has")
    owners = _owners(summary, topology)
    for rank in summary.ranks:
        for file in rank.files:
            if file.rank != rank.rank or owners.get(file.path) != rank.rank:
                expected = f"layout {identity.layout}, rank {rank.rank} of {identity.topology}"
                yield Problem(where=SUMMARY, what="a file that is not in layout", expected=expected, found=file.path)


def _content_problems(summary: Summary, contents: Mapping[str, Contents]) -> Iterator[Problem]:
    """Yield files whose header holds anything else than was recorded."""
    for file in (file for rank in summary.ranks for file in rank.files):
        held = contents.get(file.path)
        found = held.payload_bytes if held else 0
        if found != file.payload_bytes:
            what, expected = "header does not hold what was written", f"{file.payload_bytes} bytes of tensors"
            yield Problem(where=file.path, what=what, expected=expected, found=f"{found} bytes")


def _document_problems(manifest: Manifest, documents: Mapping[str, bytes]) -> Iterator[Problem]:
    hashes: tuple[Hash, ...] = ("blake3", "sha256") if manifest.hash == "blake3" else ("sha256",)
    for name in hashes:
        recorded = manifest.digests(name)
        for path in (PLAN, PROVENANCE):
            found = digest_of(documents[path], name)
            if recorded.get(path) != found:
                yield Problem(where=path, what="not the one of the manifest", expected=recorded.get(path), found=found)
