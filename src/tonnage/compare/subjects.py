"""What exactly was compared, so that a package can cite figures: the digest of a checkpoint or of prepared weights."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tonnage.api import open_checkpoint
from tonnage.checkpoint.io import read_bytes
from tonnage.errors import TonnageError
from tonnage.export.digests import recorded_weights, weights_digest
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackageError, parse_manifest
from tonnage.prepare.documents import MANIFEST, SUMMARY
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES, read_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One side of a comparison.

    Attributes:
        of: A checkpoint by its headers, or prepared weights by the digests on record of their files.
        digest: SHA-256; ``None`` where nothing is on record.
    """

    of: Literal["checkpoint", "prepared", "other"] = "other"
    digest: str | None = None

    def document(self) -> dict[str, str | None]:
        """Return it as JSON."""
        return {"of": self.of, "digest": self.digest}


def subject_of(root: Path) -> Subject:
    """Return what a directory is; one that is neither prepared nor a checkpoint this program knows is something else.

    No weight is read: a record of digests is taken at its word, as an export takes it.
    """
    for name, read in ((SUMMARY, _summary_digest), (MANIFEST, _manifest_digest)):
        if os.path.lexists(root / name):
            return Subject(of="prepared", digest=read(root / name))
    with suppress(TonnageError):
        checkpoint = open_checkpoint(root)
        if checkpoint.headers is not None:
            return Subject(of="checkpoint", digest=checkpoint.digest)
    return Subject()


def _summary_digest(path: Path) -> str | None:
    raw = read_bytes(path, limit_bytes=SUMMARY_LIMIT_BYTES, kind=PackageError)
    return recorded_weights(read_summary(raw, where=path.name))


def _manifest_digest(path: Path) -> str:
    raw = read_bytes(path, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
    return weights_digest(parse_manifest(raw).digests("sha256"))
