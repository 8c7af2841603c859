"""Planned against measured, line by line: where the bytes of one rank differ, and whether the plan was ever below.

What is written to files is compared: the weights of every role with the measured class of that name, and the padding of
their slices with them. What an engine adds when it loads, a draft, a reserve are in no file that was measured: their
lines are shown with that remark and compared with nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import structs

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, one_line, raise_if_any
from tonnage.measure.classes import UNKNOWN
from tonnage.measure.record import MeasuredRank, Measurement, MeasurementError
from tonnage.recipes.schema import ROLES
from tonnage.saved_plan import SavedLine, SavedPlan, SavedRank, check_ranks, read_plan_document
from tonnage.units import ranges

EXPLAIN_SCHEMA = "tonnage.explain/1"
Verdict = Literal["equal", "above", "below"]

_WEIGHTS, _PADDING, _ENGINE, _DRAFT = "weights.", "padding.", "engine.", "draft."
_PADDED_SLICES = frozenset(_PADDING + role for role in ROLES)
"""Zeros behind the slice of a role are written; the padding of a module an engine fuses has its name and is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLine:
    """One line, planned and measured; ``None`` where one of them does not know it.

    Attributes:
        component: As in the plan.
        planned_bytes: Expected.
        bound_bytes: At or above all evidence.
        measured_bytes: In the files.
        remark: What else is to be known about it.
    """

    component: str
    planned_bytes: int | None
    bound_bytes: int | None
    measured_bytes: int | None
    remark: str = ""

    @property
    def difference_bytes(self) -> int | None:
        """Bound less measured; ``None`` where nothing is compared."""
        if self.bound_bytes is None or self.measured_bytes is None:
            return None
        return self.bound_bytes - self.measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """A rank that holds more than was planned at most."""

    rank: int | None
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A rank explained.

    Attributes:
        plan: What was planned.
        rank: The measured rank; ``None`` if it was not said which it is.
        lines: The largest difference first, those that are compared with nothing last.
        total: All bytes in files.
        below: Ranks whose plan was below: the one explained if one was asked for, else any.
        notes: What the comparison does not cover.
    """

    plan: SavedPlan
    rank: int | None
    lines: tuple[ExplainedLine, ...]
    total: ExplainedLine
    below: tuple[Below, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """What the plan is to what was measured on this rank."""
        difference = self.total.difference_bytes or 0
        return "equal" if not difference else "above" if difference > 0 else "below"


def read_planned(raw: bytes, where: str) -> SavedPlan:
    """Return a plan of ``plan --json`` that files can be held against.

    Raises:
        MeasurementError: It is no plan, a bound is below its value, or ranks are not those of its topology.
    """
    where = one_line(where)
    plan = read_plan_document(parse_object(raw, where=where, kind=MeasurementError), where=where, kind=MeasurementError)
    check_ranks(plan, where=where, kind=MeasurementError)
    return plan


def with_draft(plan: SavedPlan) -> SavedPlan:
    """Return a plan as of ranks whose files hold the draft as well."""
    ranks = (structs.replace(rank, lines=tuple(_drafted(line) for line in rank.lines)) for rank in plan.ranks)
    return structs.replace(plan, ranks=tuple(ranks))


def _drafted(line: SavedLine) -> SavedLine:
    return structs.replace(line, component=_WEIGHTS + line.component) if line.component.startswith(_DRAFT) else line


def explain(plan: SavedPlan, measurement: Measurement, *, rank: int | None = None) -> Explanation:
    """Return one rank line by line.

    Args:
        plan: What was planned.
        measurement: What was found.
        rank: Which; by default the one that holds most.

    Raises:
        MeasurementError: They are of different checkpoints or sizes, or the rank was not measured.
    """
    raise_if_any(MeasurementError, _mismatches(plan, measurement))
    measured = measurement.largest if rank is None else _measured_rank(measurement, rank)
    planned = _planned_rank(plan, measured)
    shown = measurement.ranks if rank is None else (measured,)
    return Explanation(
        plan=plan,
        rank=measured.rank,
        lines=tuple(sorted(_lines(planned, measured), key=_order)),
        total=_total(planned, measured),
        below=tuple(_below(plan, shown)),
        notes=tuple(_notes(plan, measurement, measured)),
    )


def explain_document(explanation: Explanation) -> dict[str, Any]:
    """Return ``explain --json``."""
    plan, total = explanation.plan, explanation.total
    return {
        "schema": EXPLAIN_SCHEMA,
        "checkpoint": msgspec.to_builtins(plan.checkpoint),
        "engine": plan.engine,
        "estimator": plan.estimator,
        "topology": {"tp": plan.topology.tp, "ep": plan.topology.ep, "pp": plan.topology.pp},
        "rank": explanation.rank,
        "lines": [
            {**msgspec.to_builtins(line), "difference_bytes": line.difference_bytes} for line in explanation.lines
        ],
        "planned_bytes": total.planned_bytes,
        "bound_bytes": total.bound_bytes,
        "measured_bytes": total.measured_bytes,
        "difference_bytes": total.difference_bytes,
        "verdict": explanation.verdict,
        "below": msgspec.to_builtins(explanation.below),
        "notes": list(explanation.notes),
    }


# --- one rank ---------------------------------------------------------------------------------------------------------


def _measured_rank(measurement: Measurement, rank: int) -> MeasuredRank:
    found = next((one for one in measurement.ranks if one.rank == rank), None)
    if found is None:
        known = ", ".join(str(one.rank) for one in measurement.ranks if one.rank is not None) or "no rank by number"
        raise MeasurementError(
            Problem(
                where=measurement.source, what=f"rank {rank} was not measured", expected=known, found=f"--rank {rank}"
            )
        )
    return found


def _planned_rank(plan: SavedPlan, measured: MeasuredRank) -> SavedRank:
    """Return the plan of a measured rank; of one without a number the plan of the rank that holds most."""
    if measured.rank is None:
        return max(plan.ranks, key=_bound_bytes)
    return plan.ranks[measured.rank]


def _lines(planned: SavedRank, measured: MeasuredRank) -> Iterator[ExplainedLine]:
    if _by_class(planned, measured):
        yield from _classes(planned, measured)
    else:
        for line in _written(planned):
            yield _uncompared(line, "measured in total only")
    for line in planned.lines:
        if not _in_files(line.component):
            by_engine = line.component.startswith((_PADDING, _ENGINE))
            yield _uncompared(line, "added by the engine, in no file" if by_engine else "not measured")


def _written(rank: SavedRank) -> tuple[SavedLine, ...]:
    """Return the lines of bytes that are in files."""
    return tuple(line for line in rank.lines if _in_files(line.component))


def _bound_bytes(rank: SavedRank) -> int:
    """Return the bytes of files, at their bound."""
    return sum(line.bound_nbytes for line in _written(rank))


def _in_files(component: str) -> bool:
    return component.startswith(_WEIGHTS) or component in _PADDED_SLICES


def _by_class(planned: SavedRank, measured: MeasuredRank) -> bool:
    """Whether both sides know what the bytes are for."""
    roles = _PADDED_SLICES | {_WEIGHTS + role for role in ROLES}
    known = {part.tensor_class for part in measured.by_class} - {UNKNOWN}
    return bool(known) and all(line.component in roles for line in _written(planned))


def _classes(planned: SavedRank, measured: MeasuredRank) -> Iterator[ExplainedLine]:
    sums: dict[str, int] = defaultdict(int)
    for part in measured.by_class:
        sums[part.tensor_class] += part.nbytes
    lines = {line.component: line for line in _written(planned)}
    for tensor_class in dict.fromkeys((*ROLES, *sums)):
        weights, padding = lines.get(_WEIGHTS + tensor_class), lines.get(_PADDING + tensor_class)
        there = [line for line in (weights, padding) if line is not None]
        if there or tensor_class in sums:
            yield ExplainedLine(
                component=_WEIGHTS + tensor_class,
                planned_bytes=sum(line.nbytes for line in there),
                bound_bytes=sum(line.bound_nbytes for line in there),
                measured_bytes=sums.get(tensor_class, 0),
                remark=f"{padding.nbytes:,} bytes of padding in it" if padding else "" if there else "not planned",
            )


def _uncompared(line: SavedLine, remark: str) -> ExplainedLine:
    return ExplainedLine(
        component=line.component,
        planned_bytes=line.nbytes,
        bound_bytes=line.bound_nbytes,
        measured_bytes=None,
        remark=remark,
    )


def _total(planned: SavedRank, measured: MeasuredRank) -> ExplainedLine:
    return ExplainedLine(
        component="weights",
        planned_bytes=sum(line.nbytes for line in _written(planned)),
        bound_bytes=_bound_bytes(planned),
        measured_bytes=measured.payload_bytes,
    )


def _order(line: ExplainedLine) -> tuple[bool, int, str]:
    difference = line.difference_bytes
    return difference is None, -abs(line.bound_bytes or 0 if difference is None else difference), line.component


# --- all of them ------------------------------------------------------------------------------------------------------


def _below(plan: SavedPlan, ranks: tuple[MeasuredRank, ...]) -> Iterator[Below]:
    """Yield ranks with more than was planned; one without a number has more than was planned for any."""
    for measured in ranks:
        missing = measured.payload_bytes - _bound_bytes(_planned_rank(plan, measured))
        if missing > 0:
            yield Below(rank=measured.rank, nbytes=missing)


def _mismatches(plan: SavedPlan, measurement: Measurement) -> Iterator[Problem]:
    where, topology = measurement.source, plan.topology
    if measurement.checkpoint_digest not in (None, plan.checkpoint.digest):
        what = "of another checkpoint than the plan (one made from config.json alone has a digest of its own)"
        yield Problem(where=where, what=what, expected=plan.checkpoint.digest, found=measurement.checkpoint_digest)
    stated = ((name, getattr(measurement, name), getattr(topology, name)) for name in ("tp", "ep", "pp"))
    different = [f"{name}{measured}" for name, measured, planned in stated if measured not in (None, planned)]
    known = len(measurement.ranks) + len(measurement.absent_ranks)
    beyond = [one.rank for one in measurement.ranks if one.rank is not None and one.rank >= topology.world_size]
    if different:
        yield Problem(where=where, what="cut for another topology", expected=topology.cut, found=" ".join(different))
    elif beyond or (_says_which(measurement) and known != topology.world_size):
        expected, found = f"{topology.world_size} ranks ({topology.cut})", f"{known}"
        yield Problem(where=where, what="other ranks than planned", expected=expected, found=found)


def _says_which(measurement: Measurement) -> bool:
    """Whether every rank is measured, or named as one that is not."""
    return measurement.is_complete or bool(measurement.absent_ranks)


def _notes(plan: SavedPlan, measurement: Measurement, measured: MeasuredRank) -> Iterator[str]:
    where = measurement.source
    if measurement.checkpoint_digest is None:
        yield f"{where} does not say of which checkpoint it is: taken to be that of the plan"
    if measurement.tp is None:
        yield f"{where} does not say its TP size: taken to be that of the plan"
    if measured.rank is None:
        yield f"{where} does not say which rank this is: held against the one planned to hold most"
    if measurement.absent_ranks:
        yield f"{where} has no ranks {ranges(measurement.absent_ranks)}: they are held against nothing"
    planned = plan.numerics.kind
    if measurement.convert is not None and planned in ("neutral", "converted"):
        converted = "neutral" if measurement.convert == "none" else "converted"
        if converted != planned:
            yield f"planned {planned}, measured {converted} (convert {one_line(measurement.convert)})"
