"""Measured packages, alone and held against each other, and the document of a measurement.

Packages are measured together only if they are cut alike from one checkpoint; then they are identical, or every class
of tensors that differs is named. Packages of some ranks each are held against each other where they have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tonnage.errors import Problem, raise_if_any
from tonnage.export.manifest import Parallel
from tonnage.measure.classes import CLASSES
from tonnage.measure.record import (
    MEASUREMENT_SCHEMA,
    ClassSum,
    MeasuredRank,
    MeasurementError,
    largest_rank,
    smallest_rank,
)

PackageKind = Literal["package", "preparation", "ranks", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What was cut, as far as it is on record."""

    name: str | None = None
    digest: str | None = None
    family: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPackage:
    """One package as measured.

    Attributes:
        name: Its own, or that of its directory.
        path_name: Name of its directory.
        kind: What the directory is; ``ranks`` are those of another tool, or without a document that says whose.
        digest: SHA-256 that tells it from others.
        digest_of: What was hashed: ``manifest.json``, ``prepare.json`` or ``headers``.
        date: That in its name, if there is one.
        topology: Sizes it is cut for.
        checkpoint: What was cut.
        convert: What preparation did to convertible weights; ``None`` if that is not on record.
        ranks: Those that are in it, in order.
        notes: What the reader must know.
    """

    name: str
    path_name: str
    kind: PackageKind
    digest: str
    digest_of: str
    date: str | None
    topology: Parallel
    checkpoint: Origin
    convert: str | None
    ranks: tuple[MeasuredRank, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One class and dtype on one rank that differs from the first package."""

    package: str
    rank: int
    here: ClassSum
    first: ClassSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Packages of one checkpoint, cut alike.

    Attributes:
        packages: As given.
        differences: From the first package that has the rank; empty if all are identical.
    """

    packages: tuple[MeasuredPackage, ...]
    differences: tuple[Difference, ...]

    @property
    def ranks(self) -> tuple[MeasuredRank, ...]:
        """Per rank the one with the largest payload of all packages that have it."""
        found: dict[int | None, list[MeasuredRank]] = {}
        for rank in (rank for package in self.packages for rank in package.ranks):
            found.setdefault(rank.rank, []).append(rank)
        return tuple(largest_rank(found[number]) for number in sorted(found, key=lambda number: number or 0))

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks of the topology that no package has."""
        here = {rank.rank for package in self.packages for rank in package.ranks}
        return tuple(rank for rank in range(self.packages[0].topology.world_size) if rank not in here)

    @property
    def checkpoint(self) -> Origin:
        """What was cut, as far as one of the packages knows."""
        known = [package.checkpoint for package in self.packages]
        return Origin(
            name=next((one.name for one in known if one.name), None),
            digest=next((one.digest for one in known if one.digest), None),
            family=next((one.family for one in known if one.family), None),
        )

    @property
    def convert(self) -> str | None:
        """What preparation did to convertible weights, if it is the same in all packages."""
        found = {package.convert for package in self.packages}
        return found.pop() if len(found) == 1 else None


def compare(packages: Sequence[MeasuredPackage]) -> Comparison:
    """Return packages held against each other.

    Raises:
        MeasurementError: They are not cut alike, or of different checkpoints; each is named.
    """
    raise_if_any(MeasurementError, _mismatches(packages))
    return Comparison(packages=tuple(packages), differences=tuple(_differences(packages)))


def measurement_document(comparison: Comparison, *, date: str) -> dict[str, Any]:
    """Return ``measure --json``, which is also the record that :func:`~tonnage.measure.record.read_measurement` reads.

    Args:
        comparison: What was measured.
        date: Of the measurement, ``YYYY-MM-DD``.
    """
    ranks, checkpoint = comparison.ranks, comparison.checkpoint
    largest, smallest = largest_rank(ranks), smallest_rank(ranks)
    return {
        "schema": MEASUREMENT_SCHEMA,
        "date": date,
        "checkpoint": msgspec.to_builtins(checkpoint),
        "topology": msgspec.to_builtins(comparison.packages[0].topology),
        "convert": comparison.convert,
        "largest": _extreme(largest),
        "smallest": _extreme(smallest),
        "spread_bytes": largest.payload_bytes - smallest.payload_bytes,
        "identical": not comparison.differences,
        "differences": [_difference(one) for one in comparison.differences],
        "ranks": msgspec.to_builtins(ranks),
        "absent_ranks": list(comparison.absent_ranks),
        "packages": [_package(package) for package in comparison.packages],
    }


def _package(package: MeasuredPackage) -> dict[str, Any]:
    fields = ("name", "path_name", "kind", "digest", "digest_of", "date", "convert", "notes", "ranks")
    return {name: msgspec.to_builtins(getattr(package, name)) for name in fields}


def _extreme(rank: MeasuredRank) -> dict[str, int | None]:
    return {"rank": rank.rank, "payload_bytes": rank.payload_bytes, "file_bytes": rank.file_bytes}


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "package": found.package,
        "rank": found.rank,
        "class": found.here.tensor_class,
        "dtype": found.here.dtype,
        "nbytes": found.here.nbytes,
        "tensors": found.here.tensors,
        "first_nbytes": found.first.nbytes,
        "first_tensors": found.first.tensors,
    }


# --- comparing --------------------------------------------------------------------------------------------------------


def _mismatches(packages: Sequence[MeasuredPackage]) -> Iterator[Problem]:
    """Yield what keeps packages from being measured together: every one is held against the first that knows."""
    for what, facts in (
        ("cut for another topology", [package.topology.words for package in packages]),
        ("of another checkpoint", [package.checkpoint.digest for package in packages]),
        ("of another model family", [package.checkpoint.family for package in packages]),
    ):
        known = [(fact, package.path_name) for fact, package in zip(facts, packages, strict=True) if fact is not None]
        for fact, name in known[1:]:
            if fact != known[0][0]:
                yield Problem(where=name, what=what, expected=f"{known[0][0]} as {known[0][1]}", found=fact)


def _differences(packages: Sequence[MeasuredPackage]) -> Iterator[Difference]:
    """Yield where a rank is not as in the first package that has it."""
    first: dict[int | None, MeasuredRank] = {}
    for package in packages:
        for rank in package.ranks:
            known = first.setdefault(rank.rank, rank)
            if known is not rank:
                yield from _rank_differences(package, known, rank)


def _rank_differences(package: MeasuredPackage, first: MeasuredRank, here: MeasuredRank) -> Iterator[Difference]:
    known, found = _by_key(first), _by_key(here)
    for key in sorted(known.keys() | found.keys(), key=lambda key: (CLASSES.index(key[0]), key[1])):
        empty = ClassSum(tensor_class=key[0], dtype=key[1], nbytes=0, tensors=0)
        one, two = known.get(key, empty), found.get(key, empty)
        if one != two:
            assert here.rank is not None  # ranks found in directories have numbers
            yield Difference(package=package.path_name, rank=here.rank, here=two, first=one)


def _by_key(rank: MeasuredRank) -> dict[tuple[str, str], ClassSum]:
    return {(part.tensor_class, part.dtype): part for part in rank.by_class}
