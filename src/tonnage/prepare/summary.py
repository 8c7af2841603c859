"""``prepare.json``: what a complete preparation wrote, with digests and what conversion cost."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tonnage.errors import Problem
from tonnage.prepare.io import PrepareError
from tonnage.prepare.journal import ConvertedTensor, Identity, WrittenFile
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
            Problem(where=where, what="not the summary of a preparation; --force starts over", found=str(error))
        ) from error
