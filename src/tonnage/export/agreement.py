"""Whether plan and provenance are those of the package they lie in.

One checkpoint, engine and topology, one conversion, and the bytes of every rank as planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem
from tonnage.export.comparison import Compared
from tonnage.export.manifest import Manifest, PackageError, Parallel
from tonnage.export.planned import Prepared, check_plan
from tonnage.prepare.documents import PLAN, PROVENANCE
from tonnage.saved_plan import SavedPlan, read_plan_document


class _Source(msgspec.Struct, frozen=True):
    digest: str
    hash: str


class _Options(msgspec.Struct, frozen=True):
    topology: Parallel
    ranks: tuple[int, ...]
    engine: str
    layout: str
    hash: str


class _Converted(msgspec.Struct, frozen=True):
    tensor: str
    sqnr_db: float | None = None


class Numerics(msgspec.Struct, frozen=True):
    """What the weights are to those of the source.

    Attributes:
        kind: Whether any were converted.
        converted: Those, with their error.
        compared: What was measured of the whole, if it was.
    """

    kind: Literal["neutral", "converted"] = msgspec.field(name="class")
    converted: tuple[_Converted, ...] = ()
    compared: Compared | None = None

    @property
    def worst(self) -> _Converted | None:
        """The converted tensor of the least ratio of signal to noise; ``None`` where there is no noise."""
        noisy = (tensor for tensor in self.converted if tensor.sqnr_db is not None)
        return min(noisy, key=lambda tensor: tensor.sqnr_db or 0, default=None)


class Provenance(msgspec.Struct, frozen=True):
    """The part of a provenance that a package is held to.

    Attributes:
        schema: Of the document.
        source: Digest of the checkpoint's headers, and algorithm of its files' digests.
        options: What was asked for.
        numerics: What became of the weights.
    """

    schema: Literal["tonnage.provenance/1"]
    source: _Source
    options: _Options
    numerics: Numerics


def read_provenance(raw: bytes) -> Provenance:
    """Return what a provenance says.

    Raises:
        PackageError: It is none.
    """
    document = parse_object(raw, where=PROVENANCE, kind=PackageError)
    try:
        return msgspec.convert(document, Provenance)
    except msgspec.ValidationError as error:
        raise PackageError(Problem(where=PROVENANCE, what="not a provenance", found=str(error))) from error


def read_package_plan(raw: bytes) -> SavedPlan:
    """Return what the plan of a package says.

    Raises:
        PackageError: It is none.
    """
    return read_plan_document(parse_object(raw, where=PLAN, kind=PackageError), where=PLAN, kind=PackageError)


def document_problems(plan: SavedPlan, provenance: Provenance, manifest: Manifest) -> Iterator[Problem]:
    """Yield where plan, provenance and manifest differ."""
    options = provenance.options
    facts = (
        ("topology", str(manifest.topology), str(options.topology)),
        ("ranks", str(manifest.ranks), str(options.ranks)),
        ("layout", manifest.layout, options.layout),
        ("hash", manifest.hash, options.hash),
    )
    for name, expected, found in facts:
        if expected != found:
            what = f"{name} is not that of the manifest"
            yield Problem(where=PROVENANCE, what=what, expected=expected, found=found)
    prepared = Prepared(
        checkpoint=provenance.source.digest,
        engine=options.engine,
        topology=manifest.topology,
        converted=provenance.numerics.kind == "converted",
        payload_bytes={rank: sum(file.payload_bytes for file in files) for rank, files in manifest.by_rank().items()},
    )
    try:
        check_plan(plan, prepared, plan, where=PLAN)
    except PackageError as error:
        yield from error.problems
