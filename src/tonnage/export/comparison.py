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
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Error = Annotated[float, msgspec.Meta(ge=0)]
_Divergence = Annotated[float, msgspec.Meta(ge=-0.01)]
"""At least zero, rounding aside."""
_Perplexity = Annotated[float, msgspec.Meta(gt=0)]
_Decibels = Annotated[float, msgspec.Meta(ge=-10_000, le=10_000)]
"""More than squares of float64 can be apart."""
_Versions = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=64)]


class Agreement(msgspec.Struct, frozen=True):
    """Next-token distributions of both at the same positions."""

    positions: _Count
    top1_agreement: _Share
    kl_mean: _Divergence
    kl_largest: _Divergence
    perplexity_a: _Perplexity
    perplexity_b: _Perplexity


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
    versions: _Versions


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
    relative_error: _Error | None
    sqnr_db: _Decibels | None
    largest_error: _Error
    worst: Annotated[str, msgspec.Meta(max_length=4096)] | None


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

    def __post_init__(self) -> None:
        """Refuse figures that contradict each other."""
        counts = self.tensors
        apart = counts.differing or counts.incomparable or counts.only_a or counts.only_b
        if self.identical == bool(apart) or counts.differing > counts.compared:
            raise ValueError("counts of tensors that contradict each other or `identical`")
        if self.total.differing > self.total.elements:
            raise ValueError("more elements that differ than elements")
        if self.end_to_end and self.end_to_end.prompts.same_answers > self.end_to_end.prompts.count:
            raise ValueError("more answers that are the same than answers")


class _Side(msgspec.Struct, frozen=True):
    of: str
    digest: str | None


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    identical: bool


class Record(Compared, frozen=True, kw_only=True):
    """A document ``tonnage.compare/1``, as far as it is used."""

    schema: Literal["tonnage.compare/1"]
    a: _Side
    b: _Side
    errors: tuple[_Tensor, ...]

    def __post_init__(self) -> None:
        """Refuse counts of other tensors than those that are named."""
        Compared.__post_init__(self)
        names = {error.name for error in self.errors}
        differing = sum(not error.identical for error in self.errors)
        counted = (self.tensors.compared, self.tensors.compared, self.tensors.differing)
        if (len(self.errors), len(names), differing) != counted:
            raise ValueError("other tensors in `errors` than are counted")

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
    for tensor in sorted(set(converted) - {error.name for error in record.errors})[:_MOST_NAMED]:
        yield Problem(where=_WHERE, tensor=tensor, what="was converted, and is not among those compared")
