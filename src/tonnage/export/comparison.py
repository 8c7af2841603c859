"""What ``tonnage compare`` found between a source and what was prepared of it, for the numerics class to cite.

A record is of exactly this source and exactly these weights, or it is refused. The figures are its author's; whoever
signs the package vouches for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from tonnage.errors import Problem, raise_if_any
from tonnage.export.manifest import PackageError

_WHERE = "--compare"
_MOST_NAMED = 8
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]


class Agreement(msgspec.Struct, frozen=True):
    """Next-token distributions of both at the same positions."""

    positions: _Count
    top1_agreement: float
    kl_mean: float
    kl_largest: float
    perplexity_a: float
    perplexity_b: float


class OfText(Agreement, frozen=True, kw_only=True):
    """At every token of a text."""

    title: _Text
    sha256: _Text


class OfPrompts(Agreement, frozen=True, kw_only=True):
    """At every token of the first model's answers."""

    count: _Count
    same_answers: _Count


class EndToEnd(msgspec.Struct, frozen=True):
    """What both models made of a text and of prompts, and what computed it."""

    text: OfText
    prompts: OfPrompts
    weights: _Text
    computed_in: _Text
    device: _Text
    versions: dict[_Text, _Text]


class Tensors(msgspec.Struct, frozen=True):
    """How many tensors were compared, and with what outcome."""

    compared: _Count
    differing: _Count
    incomparable: _Count
    only_a: _Count
    only_b: _Count


class Total(msgspec.Struct, frozen=True):
    """Over all tensors whose values differ."""

    elements: _Count
    differing: _Count
    nonfinite: _Count
    relative_error: float | None
    sqnr_db: float | None
    largest_error: float
    worst: str | None


class Compared(msgspec.Struct, frozen=True):
    """What a package cites.

    Attributes:
        tonnage_version: Who compared.
        identical: Whether both hold the same values under the same names.
        tensors: Counts.
        total: Error over all that differs.
        end_to_end: What it does to answers, if that was measured.
    """

    tonnage_version: _Text
    identical: bool
    tensors: Tensors
    total: Total
    end_to_end: EndToEnd | None


class _Side(msgspec.Struct, frozen=True):
    of: str
    digest: str | None


class _Error(msgspec.Struct, frozen=True):
    name: str
    identical: bool


class Record(Compared, frozen=True, kw_only=True):
    """A document ``tonnage.compare/1``, as far as it is used."""

    schema: Literal["tonnage.compare/1"]
    a: _Side
    b: _Side
    errors: tuple[_Error, ...]

    @property
    def cited(self) -> Compared:
        """The part that goes into a package."""
        return msgspec.convert(msgspec.to_builtins(self), Compared)


def read_record(fields: Mapping[str, Any], *, where: str) -> Record:
    """Return what ``tonnage compare --save`` wrote.

    Raises:
        PackageError: It is none.
    """
    try:
        return msgspec.convert(fields, Record)
    except msgspec.ValidationError as error:
        expected = "what `tonnage compare SOURCE DIR --save RECORD` wrote"
        raise PackageError(
            Problem(where=where, what="not a comparison", expected=expected, found=str(error))
        ) from error


def check_record(record: Record, *, source: str, weights: str | None, converted: Collection[str]) -> None:
    """Refuse a comparison of anything else.

    Args:
        record: Of the comparison.
        source: Digest of the source's headers.
        weights: Digest of what was prepared.
        converted: Names of the tensors that were converted.

    Raises:
        PackageError: Naming what differs.
    """
    raise_if_any(PackageError, _problems(record, source, weights, converted))


def _problems(record: Record, source: str, weights: str | None, converted: Collection[str]) -> Iterator[Problem]:
    sides = (("A", record.a, "checkpoint", source), ("B", record.b, "prepared", weights))
    for name, side, of, digest in sides:
        if digest is None or (side.of, side.digest) != (of, digest):
            what = f"{name} is not the {'source' if of == 'checkpoint' else 'weights'} of this package"
            yield Problem(where=_WHERE, what=what, expected=f"{of} {digest}", found=f"{side.of} {side.digest}")
    differing = sorted({error.name for error in record.errors if not error.identical} - set(converted))
    for tensor in differing[:_MOST_NAMED]:
        yield Problem(where=_WHERE, tensor=tensor, what="differs, and is not on record as converted")
