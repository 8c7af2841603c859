"""``prepare.json``: what a complete preparation wrote, with digests and what conversion cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tonnage.errors import Problem
from tonnage.prepare.checks import is_as_planned, is_digest
from tonnage.prepare.io import PrepareError
from tonnage.prepare.journal import ConvertedTensor, Identity, SourceDigest, WrittenFile
from tonnage.prepare.survey import OutputSize
from tonnage.version import __version__

SUMMARY_SCHEMA = "tonnage.prepare/1"
SUMMARY_LIMIT_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """What one rank got.

    Attributes:
        rank: Global rank.
        planned_bytes: Weight bytes, as planned.
        files: Its safetensors files.
    """

    rank: int
    planned_bytes: int
    payload_bytes: int
    file_bytes: int
    files: tuple[WrittenFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A complete preparation; field by field what ``prepare.json`` holds.

    Attributes:
        schema: Of the document.
        tonnage_version: Who wrote it.
        checkpoint: Name of the source.
        identity: What the written bytes depend on.
        ranks: In order.
        files: Whole files, of all ranks.
        sources: Every file of the source that was read, by name, with its digest; none in a document of a version that
            took no digests.
        plan: The document of the plan (``tonnage.plan/1``) that was followed, if it was handed in.
        converted: Converted tensors with their error.
        seconds: Wall clock of the run that completed it.
        worker_seconds: Of all jobs, those of earlier runs included.
    """

    schema: str = SUMMARY_SCHEMA
    tonnage_version: str = __version__
    checkpoint: str
    identity: Identity
    ranks: tuple[RankSummary, ...]
    files: tuple[WrittenFile, ...]
    sources: tuple[SourceDigest, ...] = ()
    plan: Mapping[str, Any] | None = None
    converted: tuple[ConvertedTensor, ...]
    seconds: float
    worker_seconds: float

    @property
    def written(self) -> tuple[WrittenFile, ...]:
        """All files."""
        return (*(file for rank in self.ranks for file in rank.files), *self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedRank:
    """What the document of a plan says of a rank's weights."""

    rank: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanDocument:
    """The part of a plan's document that a preparation is held to."""

    schema: Literal["tonnage.plan/1"]
    ranks: tuple[_PlannedRank, ...]


def summary_bytes(summary: Summary) -> bytes:
    """Return the document."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def read_summary(raw: bytes, *, where: str) -> Summary:
    """Return what a document says.

    Raises:
        PrepareError: It is none.
    """
    try:
        return msgspec.json.decode(raw, type=Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PrepareError(
            Problem(where=where, what="not the summary of a preparation; move it away", found=str(error))
        ) from error


def check_summary(
    summary: Summary,
    outputs: Sequence[OutputSize],
    planned_bytes: Mapping[int, int],
    converted: Iterable[tuple[str, int]],
    *,
    plan: Mapping[str, Any] | None,
    where: str,
) -> None:
    """Refuse a summary that says anything else than was planned; what it says nothing of is not missed.

    Args:
        summary: Of the same identity.
        outputs: Every planned file.
        planned_bytes: Weight bytes by rank, in order.
        converted: Planned converted tensors with their elements.
        plan: The document of the plan. Only bytes are compared: names of a checkpoint and words of a version change.
        where: It was found.

    Raises:
        PrepareError: Naming everything that differs.
    """
    problems = _byte_differences(summary, outputs, planned_bytes, where)
    problems += _source_differences(summary, where)
    if plan is not None and summary.plan is not None and _weights(summary.plan) != _weights(plan):
        problems.append(_difference(where, "plan", "the weights_bytes of every rank", "others, or none"))
    found = sorted((tensor.tensor, tensor.elements) for tensor in summary.converted)
    if found != (wanted := sorted(converted)):
        names = sorted({name for name, _ in set(found) ^ set(wanted)}) or ["a tensor more than once"]
        problems.append(_difference(where, "converted tensors", "those planned", ", ".join(names)))
    if problems:
        raise PrepareError(*problems)


def check_bytes(
    summary: Summary, outputs: Sequence[OutputSize], planned_bytes: Mapping[int, int], *, where: str
) -> None:
    """Refuse a summary whose files or ranks are not as planned; the part of :func:`check_summary` every run ends with.

    Raises:
        PrepareError: Naming everything that differs.
    """
    if problems := _byte_differences(summary, outputs, planned_bytes, where):
        raise PrepareError(*problems)


def _byte_differences(
    summary: Summary, outputs: Sequence[OutputSize], planned_bytes: Mapping[int, int], where: str
) -> list[Problem]:
    return [
        *_file_differences(summary, outputs, where),
        *_rank_differences(summary, outputs, planned_bytes, where),
    ]


def _file_differences(summary: Summary, outputs: Sequence[OutputSize], where: str) -> Iterator[Problem]:
    """Compare file by file: under which rank it stands, its rank, its bytes, the form of its digest."""
    planned = {output.path: output for output in outputs}
    seen: set[str] = set()
    ranked = [(rank.rank, file) for rank in summary.ranks for file in rank.files]
    for rank, file in (*ranked, *((None, file) for file in summary.files)):
        wanted = planned.get(file.path)
        if wanted is None or file.path in seen:
            yield _difference(where, file.path, "no such file" if wanted is None else "it once", "it recorded")
        elif rank != wanted.rank or not is_as_planned(file, wanted):
            yield _difference(where, file.path, _said(wanted), _said(file))
        seen.add(file.path)
    for path in sorted(planned.keys() - seen):
        yield _difference(where, path, _said(planned[path]), "no record of it")


def _rank_differences(
    summary: Summary, outputs: Sequence[OutputSize], planned_bytes: Mapping[int, int], where: str
) -> Iterator[Problem]:
    ranks = tuple(rank.rank for rank in summary.ranks)
    if ranks != tuple(planned_bytes):
        yield _difference(where, "ranks", str(tuple(planned_bytes)), str(ranks))
        return
    for rank in summary.ranks:
        own = [output for output in outputs if output.rank == rank.rank]
        wanted = (
            planned_bytes[rank.rank],
            sum(output.payload_bytes for output in own),
            sum(output.file_bytes for output in own),
        )
        found = (rank.planned_bytes, rank.payload_bytes, rank.file_bytes)
        if found != wanted:
            yield _difference(where, f"bytes of rank {rank.rank}", str(wanted), str(found))


def _source_differences(summary: Summary, where: str) -> Iterator[Problem]:
    """Compare with the files of the identity, which is that of the preparation."""
    if not summary.sources:
        return
    wanted = [(facts.name, facts.nbytes) for facts in summary.identity.sources]
    if [(source.name, source.nbytes) for source in summary.sources] != wanted:
        yield _difference(where, "sources", f"{len(wanted)} files", "others, or other sizes")
    for source in summary.sources:
        if source.digest is not None and not is_digest(source.digest):
            yield _difference(where, f"source {source.name}", "a digest, or null", source.digest)


def _weights(plan: Mapping[str, Any]) -> tuple[_PlannedRank, ...] | None:
    """Return the weight bytes of every rank; ``None`` if this is no plan."""
    try:
        return msgspec.convert(plan, _PlanDocument).ranks
    except msgspec.ValidationError:
        return None


def _said(file: OutputSize | WrittenFile) -> str:
    digests = ""
    if isinstance(file, WrittenFile):
        digests = f", digest {file.digest}" + (f", SHA-256 {file.sha256}" if file.sha256 else "")
    return f"rank {file.rank}, {file.payload_bytes} of {file.file_bytes} bytes{digests}"


def _difference(where: str, field: str, expected: str, found: str) -> Problem:
    what = f"{field} not as planned; --force starts over"
    return Problem(where=where, what=what, expected=expected, found=found)
