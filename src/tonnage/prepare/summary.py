"""``prepare.json``: what a complete preparation wrote, with digests and what conversion cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tonnage.errors import Problem
from tonnage.prepare.checks import is_as_planned
from tonnage.prepare.io import PrepareError
from tonnage.prepare.journal import ConvertedTensor, Identity, WrittenFile
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
    converted: tuple[ConvertedTensor, ...]
    seconds: float
    worker_seconds: float

    @property
    def written(self) -> tuple[WrittenFile, ...]:
        """All files."""
        return (*(file for rank in self.ranks for file in rank.files), *self.files)


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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PrepareError(
            Problem(where=where, what="not the summary of a preparation; move it away", found=str(error))
        ) from error


def check_summary(
    summary: Summary,
    outputs: Sequence[OutputSize],
    planned_bytes: Mapping[int, int],
    converted: Iterable[tuple[str, int]],
    *,
    where: str,
) -> None:
    """Refuse a summary that says anything else than was planned.

    Args:
        summary: Of the same identity.
        outputs: Every planned file.
        planned_bytes: Weight bytes by rank, in order.
        converted: Planned converted tensors with their elements.
        where: It was found.

    Raises:
        PrepareError: Naming everything that differs.
    """
    problems = _byte_differences(summary, outputs, planned_bytes, where)
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


def _said(file: OutputSize | WrittenFile) -> str:
    digest = f", digest {file.digest}" if isinstance(file, WrittenFile) else ""
    return f"rank {file.rank}, {file.payload_bytes} of {file.file_bytes} bytes{digest}"


def _difference(where: str, field: str, expected: str, found: str) -> Problem:
    what = f"{field} not as planned; --force starts over"
    return Problem(where=where, what=what, expected=expected, found=found)
