"""A measurement: bytes per rank as somebody found them, by this program or another, read strictly.

Two kinds of documents are read: what ``tonnage measure`` writes, of which the ranks with their payload bytes are
enough, and a report that only knows its largest and smallest rank. What is said must not contradict itself;
what is not said stays unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, TonnageError, one_line, raise_if_any
from tonnage.topology import MOST_RANKS

MEASUREMENT_SCHEMA = "tonnage.measurement/1"
MEASUREMENT_LIMIT_BYTES = 64 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Date = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\Z")]


class MeasurementError(TonnageError):
    """A document is no measurement, or packages cannot be measured together."""


class ClassSum(msgspec.Struct, frozen=True, kw_only=True, rename={"tensor_class": "class"}):
    """The tensors of one class and dtype on one rank.

    Attributes:
        tensor_class: One of :data:`tonnage.recipes.schema.ROLES`, or ``unknown``; ``class`` in documents.
        dtype: As safetensors spells it.
        nbytes: Payload bytes.
        tensors: How many.
    """

    tensor_class: str
    dtype: str
    nbytes: _Count
    tensors: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """What one rank holds.

    Attributes:
        rank: Global rank, ``pp_rank * tp + tp_rank``; ``None`` if it was not said which.
        payload_bytes: Bytes of its tensors.
        file_bytes: Size of its safetensors files.
        tensors: How many.
        by_class: Sums that add up to the payload; empty if they are not known.
    """

    rank: _Count | None = None
    payload_bytes: _Count
    file_bytes: _Count | None = None
    tensors: _Count | None = None
    by_class: tuple[ClassSum, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured, of one or several packages of one checkpoint.

    Attributes:
        source: Where it was read from.
        ranks: At least one. Of several packages, per rank the one with the largest payload. A report of the largest and
            smallest rank has these two, and :attr:`is_complete` is false.
        tp: Tensor-parallel size; ``None`` if unknown. Likewise ``ep`` and ``pp``.
        packages: How many were measured.
        package_digests: Of those that say it.
        checkpoint_name: What was cut.
        checkpoint_digest: SHA-256 as in ``plan --json``.
        convert: What preparation did to convertible weights.
        date: Of the measurement, ``YYYY-MM-DD``.
        identical: Whether all packages hold the same bytes per rank and class.
        is_complete: Whether every rank is here.
        absent_ranks: Those that are not, where it is said which.
    """

    source: str
    ranks: tuple[MeasuredRank, ...]
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    packages: int = 1
    package_digests: tuple[str, ...] = ()
    checkpoint_name: str | None = None
    checkpoint_digest: str | None = None
    convert: str | None = None
    date: str | None = None
    identical: bool | None = None
    is_complete: bool = True
    absent_ranks: tuple[int, ...] = ()

    @property
    def largest(self) -> MeasuredRank:
        """The rank with the largest payload; of several the first."""
        return largest_rank(self.ranks)

    @property
    def largest_bytes(self) -> int:
        """Payload of the largest rank."""
        return self.largest.payload_bytes

    @property
    def smallest_bytes(self) -> int:
        """Payload of the smallest rank."""
        return smallest_rank(self.ranks).payload_bytes


def largest_rank(ranks: Sequence[MeasuredRank]) -> MeasuredRank:
    """Return the rank with the largest payload; of several the first."""
    return max(ranks, key=lambda rank: rank.payload_bytes)


def smallest_rank(ranks: Sequence[MeasuredRank]) -> MeasuredRank:
    """Return the rank with the smallest payload; of several the first."""
    return min(ranks, key=lambda rank: rank.payload_bytes)


def read_measurement(raw: bytes, where: str) -> Measurement:
    """Return what a document measured.

    Args:
        raw: The whole document; at most :data:`MEASUREMENT_LIMIT_BYTES` are worth reading.
        where: File name for the refusal and for ``source``.

    Raises:
        MeasurementError: It is no measurement, a value is of the wrong type or beyond reason, a rank is missing or
            stands twice, or its sums contradict each other; every problem is named.
    """
    where = one_line(where)
    fields = parse_object(raw, where=where, kind=MeasurementError)
    schema = fields.get("schema", MEASUREMENT_SCHEMA)
    if schema != MEASUREMENT_SCHEMA:
        raise MeasurementError(
            Problem(where=where, what="not a measurement", expected=MEASUREMENT_SCHEMA, found=str(schema))
        )
    try:
        if "ranks" in fields:
            return _of_document(msgspec.convert(fields, _Document), where)
        stated = fields.get("measured", fields)
        return _of_report(msgspec.convert(stated, _Report), msgspec.convert(fields, _About), where)
    except msgspec.ValidationError as error:
        expected = "ranks with payload_bytes, or largest_rank_bytes and smallest_rank_bytes"
        raise MeasurementError(
            Problem(where=where, what="not a measurement", expected=expected, found=str(error))
        ) from error


# --- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    tp: _Size | None = None
    ep: _Size | None = None
    pp: _Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    name: str | None = None
    digest: _Sha256 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackageRank:
    rank: _Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A package of the record: what tells it from others, and what of it was measured."""

    digest: _Sha256 | None = None
    ranks: tuple[_PackageRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extreme:
    payload_bytes: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """What both kinds of documents may say about the whole."""

    topology: _Sizes | None = None
    tp_size: _Size | None = None
    checkpoint: _Checkpoint | None = None
    convert: str | None = None
    date: _Date | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document(_About):
    ranks: Annotated[tuple[MeasuredRank, ...], msgspec.Meta(min_length=1, max_length=MOST_RANKS * MOST_RANKS)]
    packages: tuple[_Package, ...] = ()
    absent_ranks: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MOST_RANKS * MOST_RANKS)] = ()
    largest: _Extreme | None = None
    smallest: _Extreme | None = None
    spread_bytes: _Count | None = None
    identical: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    largest_rank_bytes: _Count
    smallest_rank_bytes: _Count
    largest_rank: _Count | None = None
    exports: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    identical_across_exports: bool | None = None


def _of_document(found: _Document, where: str) -> Measurement:
    packages = _whole(found.packages)
    measurement = replace(
        _measurement(found, found.ranks, where, packages=len(packages) or 1, identical=found.identical),
        package_digests=tuple(package.digest for package in packages if package.digest),
        is_complete=not found.absent_ranks,
        absent_ranks=found.absent_ranks,
    )
    problems = [*_rank_problems(measurement), *_sum_problems(found, measurement)]
    raise_if_any(MeasurementError, problems)
    return measurement


def _whole(packages: Sequence[_Package]) -> list[_Package]:
    """Return packages, those of which several directories keep some ranks each counted once."""
    whole: list[_Package] = []
    for package in packages:
        parts = [one for one in whole if one.digest == package.digest and package.digest and package.ranks]
        if any({*one.ranks}.isdisjoint(package.ranks) and one.ranks for one in parts):
            whole = [replace(one, ranks=one.ranks + package.ranks) if one in parts else one for one in whole]
        else:
            whole.append(package)
    return whole


def _of_report(found: _Report, about: _About, where: str) -> Measurement:
    ranks = (
        MeasuredRank(rank=found.largest_rank, payload_bytes=found.largest_rank_bytes),
        MeasuredRank(payload_bytes=found.smallest_rank_bytes),
    )
    measurement = _measurement(
        about,
        ranks,
        where,
        packages=found.exports,
        identical=found.identical_across_exports,
        is_complete=False,
    )
    problems = list(_beyond(measurement))
    if found.largest_rank_bytes < found.smallest_rank_bytes:
        expected = f"at least smallest_rank_bytes {found.smallest_rank_bytes}"
        problems.append(_contradiction(where, "largest_rank_bytes", expected, found.largest_rank_bytes))
    raise_if_any(MeasurementError, problems)
    return measurement


def _measurement(
    about: _About,
    ranks: tuple[MeasuredRank, ...],
    where: str,
    *,
    packages: int,
    identical: bool | None,
    is_complete: bool = True,
) -> Measurement:
    sizes, checkpoint = about.topology or _Sizes(), about.checkpoint or _Checkpoint()
    if None not in (sizes.tp, about.tp_size) and sizes.tp != about.tp_size:
        raise MeasurementError(_contradiction(where, "tp_size", f"topology.tp {sizes.tp}", about.tp_size))
    return Measurement(
        source=where,
        ranks=ranks,
        tp=about.tp_size if sizes.tp is None else sizes.tp,
        ep=sizes.ep,
        pp=sizes.pp,
        packages=packages,
        checkpoint_name=checkpoint.name,
        checkpoint_digest=checkpoint.digest,
        convert=about.convert,
        date=about.date,
        identical=identical,
        is_complete=is_complete,
    )


# --- contradictions ---------------------------------------------------------------------------------------------------


def _rank_problems(measurement: Measurement) -> Iterator[Problem]:
    """Yield ranks that are missing, stand twice, or are beyond the topology."""
    where, ranks = measurement.source, measurement.ranks
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    if numbers and len(numbers) < len(ranks):
        yield _contradiction(where, "ranks without a number", "none, or all of them", len(ranks) - len(numbers))
    for number, times in Counter(numbers).items():
        if times > 1:
            yield _contradiction(where, f"rank {number}", "once", f"{times} times")
    yield from _beyond(measurement)
    for number in sorted({*numbers} & {*measurement.absent_ranks}):
        yield _contradiction(where, f"rank {number}", "measured or absent", "both")
    known, world = len(ranks) + len(measurement.absent_ranks), _world_size(measurement)
    if world is not None and known < world:
        missing = sorted(set(range(world)) - {*numbers, *measurement.absent_ranks}) if numbers else []
        shown = f"; missing {', '.join(map(str, missing[:20]))}" if missing else ""
        yield _contradiction(where, "ranks", f"{world}", f"{known}{shown}")
    elif world is not None and known > world:
        yield _contradiction(where, "ranks", f"{world}", known)


def _beyond(measurement: Measurement) -> Iterator[Problem]:
    world = _world_size(measurement)
    limit = world or MOST_RANKS * MOST_RANKS
    for number in (*(rank.rank for rank in measurement.ranks), *measurement.absent_ranks):
        if number is not None and number >= limit:
            yield _contradiction(measurement.source, "rank", f"less than {limit}", number)


def _world_size(measurement: Measurement) -> int | None:
    return None if measurement.tp is None else measurement.tp * (measurement.pp or 1)


def _sum_problems(found: _Document, measurement: Measurement) -> Iterator[Problem]:
    """Yield sums that are not those of their parts."""
    where = measurement.source
    for rank in measurement.ranks:
        label = "a rank" if rank.rank is None else f"rank {rank.rank}"
        if rank.file_bytes is not None and rank.file_bytes < rank.payload_bytes:
            expected = f"at least its payload {rank.payload_bytes}"
            yield _contradiction(where, f"file_bytes of {label}", expected, rank.file_bytes)
        total = sum(part.nbytes for part in rank.by_class)
        if rank.by_class and total != rank.payload_bytes:
            yield _contradiction(
                where, f"payload_bytes of {label}", f"the sum of its classes {total}", rank.payload_bytes
            )
    spread = measurement.largest_bytes - measurement.smallest_bytes
    stated = (
        ("largest", found.largest and found.largest.payload_bytes, measurement.largest_bytes),
        ("smallest", found.smallest and found.smallest.payload_bytes, measurement.smallest_bytes),
        ("spread_bytes", found.spread_bytes, spread),
    )
    for name, said, is_ in stated:
        if said is not None and said != is_:
            yield _contradiction(where, name, f"{is_}, as its ranks say", said)


def _contradiction(where: str, what: str, expected: str, found: object) -> Problem:
    return Problem(where=where, what=what, expected=expected, found=str(found))
