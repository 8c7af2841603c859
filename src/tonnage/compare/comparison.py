"""The comparison of two models tensor by tensor, and its document ``tonnage.compare/1``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.compare.figures import Sums, TensorError, byte_error, value_error
from tonnage.compare.pairs import Tensor, model_problems, pair
from tonnage.compare.wholes import CompareError
from tonnage.errors import raise_if_any
from tonnage.version import __version__

if TYPE_CHECKING:
    from tonnage.compare.answers import EndToEnd
    from tonnage.compare.model import Model
    from tonnage.compare.subjects import Subject

SCHEMA = "tonnage.compare/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found.

    Attributes:
        names: Of both directories.
        ranks: How many ranks each is cut over.
        subjects: What they are.
        errors: Of every tensor both have, sorted by name.
        incomparable: Tensors both have, stored in two ways of which this program knows no values.
        only_a: Tensors of the first alone; likewise ``only_b``.
    """

    names: tuple[str, str]
    ranks: tuple[int, int]
    subjects: tuple[Subject, Subject]
    errors: tuple[TensorError, ...]
    incomparable: tuple[tuple[Tensor, Tensor], ...]
    only_a: tuple[Tensor, ...]
    only_b: tuple[Tensor, ...]

    @property
    def differing(self) -> tuple[TensorError, ...]:
        """Tensors something of which differs."""
        return tuple(error for error in self.errors if not error.identical)

    @property
    def identical(self) -> bool:
        """Whether both hold the same values under the same names."""
        return not (self.differing or self.incomparable or self.only_a or self.only_b)

    @property
    def total(self) -> Sums:
        """Sums over the tensors whose values differ."""
        return sum((error.sums for error in self.differing if error.sums), start=Sums())

    @property
    def worst(self) -> TensorError | None:
        """The tensor of the largest relative error; ``None`` where no values differ."""
        known = [error for error in self.differing if error.sums]
        return max(known, key=_relative, default=None)


def _relative(error: TensorError) -> float:
    relative = error.sums.relative if error.sums else 0.0
    return float("inf") if relative is None else relative


def compare_models(a: Model, b: Model) -> Comparison:
    """Return the error of every tensor of one model in two forms; memory does not grow with them.

    Args:
        a: What errors are relative to.
        b: The other.

    Raises:
        CompareError: They are two models, or ranks of one hold different copies.
    """
    where = (a.name, b.name) if a.name != b.name else (str(a.root), str(b.root))
    raise_if_any(CompareError, model_problems(a.fields, b.fields, where=where))
    found = pair(a.tensors, b.tensors, where=where)
    jobs = sorted(
        [(value_error, one) for one in found.values] + [(byte_error, one) for one in found.octets],
        key=lambda job: job[1][0].name,
    )
    return Comparison(
        names=where,
        ranks=(a.ranks, b.ranks),
        subjects=(a.subject, b.subject),
        errors=tuple(compare(one, (a.views, b.views)) for compare, one in jobs),
        incomparable=found.incomparable,
        only_a=found.only_a,
        only_b=found.only_b,
    )


def comparison_document(comparison: Comparison, end_to_end: EndToEnd | None = None) -> dict[str, Any]:
    """Return ``compare --json``."""
    total, worst = comparison.total, comparison.worst
    return {
        "schema": SCHEMA,
        "tonnage_version": __version__,
        **{side: _side(comparison, place) for place, side in enumerate("ab")},
        "identical": comparison.identical,
        "tensors": {
            "compared": len(comparison.errors),
            "differing": len(comparison.differing),
            "incomparable": len(comparison.incomparable),
            "only_a": len(comparison.only_a),
            "only_b": len(comparison.only_b),
        },
        "total": {**_sums(total), "worst": None if worst is None else worst.name},
        "errors": [_error(error) for error in comparison.errors],
        "incomparable": [
            {"name": a.name, "a": a.form, "b": b.form, "a_shape": list(a.shape), "b_shape": list(b.shape)}
            for a, b in comparison.incomparable
        ],
        "only_a": _named(comparison.only_a),
        "only_b": _named(comparison.only_b),
        "end_to_end": None if end_to_end is None else end_to_end.document(),
    }


def _side(comparison: Comparison, place: int) -> dict[str, Any]:
    found = {"name": comparison.names[place], "ranks": comparison.ranks[place]}
    return {**found, **comparison.subjects[place].document()}


def _error(error: TensorError) -> dict[str, Any]:
    facts = {
        "name": error.name,
        "shape": list(error.shape),
        "a": error.forms[0],
        "b": error.forms[1],
        "identical": error.identical,
    }
    if error.sums is None:
        return {**facts, "differing_bytes": error.differing_bytes}
    return {**facts, **_sums(error.sums)}


def _sums(sums: Sums) -> dict[str, Any]:
    return {
        "elements": sums.elements,
        "differing": sums.differing,
        "nonfinite": sums.nonfinite,
        "relative_error": sums.relative,
        "sqnr_db": sums.sqnr_db,
        "largest_error": sums.largest_error,
    }


def _named(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [{"name": tensor.name, "form": tensor.form, "shape": list(tensor.shape)} for tensor in tensors]
