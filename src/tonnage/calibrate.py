"""Measurements to a calibrated credit: the largest that no measured rank contradicts, with all its evidence.

The arithmetic is :mod:`tonnage.credit`; here measurements become evidence, and a choice becomes a record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.calibrations.credit_records import (
    CheckpointFacts,
    CreditRecord,
    Evidence,
    Inputs,
    RankBytes,
    check_name,
    record_document,
)
from tonnage.credit import MXFP8_SAVES, CreditChoice, CreditInputs, choose_permille, credit_estimate, credit_savings
from tonnage.errors import CreditError, Problem, raise_if_any
from tonnage.measure.record import Measurement
from tonnage.units import ranges

CALIBRATE_SCHEMA = "tonnage.calibrate/1"
_ALWAYS_UNMEASURED = (
    "other TP sizes",
    "other checkpoints",
    "memory of a GPU after loading: engine padding, repacked scales, cache, runtime",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What a credit is fitted to.

    Attributes:
        name: Of the checkpoint.
        family: The recipe that answered.
        digest: Of its headers; ``None`` if it was planned from its config alone.
        stored_bytes: All its bytes.
        inputs: Of the estimator.
        draft_bytes: The part of the device bytes that is a draft; the measured ranks hold it too.
        step_permille: The credit is a multiple of it.
        date: Of the record, ``YYYY-MM-DD``.
    """

    name: str
    family: str
    digest: str | None
    stored_bytes: int
    inputs: CreditInputs
    draft_bytes: int
    step_permille: int
    date: str


def calibrate(
    fitting: Fitting,
    measurements: Sequence[Measurement],
    *,
    name: str | None = None,
    not_measured: Sequence[str] = (),
) -> CreditRecord:
    """Return the record of the largest credit whose estimate is at or above every measured rank.

    Args:
        fitting: Checkpoint, topology and step.
        measurements: Of packages of this checkpoint and TP size, at least one.
        name: Of the record; made of checkpoint, TP size and credit if not given.
        not_measured: What else the evidence does not cover.

    Raises:
        CreditError: A measurement is of another checkpoint or TP size, or holds more than the estimate without any
            credit.
    """
    raise_if_any(CreditError, (*_mismatches(fitting, measurements), *_repeated(measurements)))
    measured = [rank.payload_bytes for measurement in measurements for rank in measurement.ranks]
    choice = choose_permille(fitting.inputs, measured, step=fitting.step_permille)
    _check_possible(choice)
    identifier = check_name(name) if name is not None else _record_name(fitting, choice)
    return CreditRecord(
        id=identifier,
        date=fitting.date,
        checkpoint=CheckpointFacts(
            name=fitting.name, family=fitting.family, digest=fitting.digest, stored_bytes=fitting.stored_bytes
        ),
        tp=fitting.inputs.tp_size,
        inputs=Inputs(
            device_bytes=fitting.inputs.device_bytes,
            draft_bytes=fitting.draft_bytes,
            counted_bf16_bytes=fitting.inputs.counted_bf16_bytes,
            latent_pair_bytes=fitting.inputs.latent_pair_bytes,
        ),
        step_permille=choice.step_permille,
        permille=choice.permille,
        evidence=tuple(map(evidence_of, measurements)),
        not_measured=(*_unmeasured(measurements), *_ALWAYS_UNMEASURED, *not_measured),
    )


def _unmeasured(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield which ranks stand in no measurement."""
    if any(not measurement.is_complete and not measurement.absent_ranks for measurement in measurements):
        yield "ranks between the largest and the smallest"
    measured = {rank.rank for measurement in measurements for rank in measurement.ranks}
    absent = {rank for measurement in measurements for rank in measurement.absent_ranks} - measured
    if absent:
        yield f"ranks {ranges(sorted(absent))}"


def evidence_of(measurement: Measurement) -> Evidence:
    """Return a measurement as the evidence of a record."""
    ranks = tuple(
        RankBytes(rank=rank.rank, nbytes=rank.payload_bytes) for rank in measurement.ranks if rank.rank is not None
    )
    return Evidence(
        source=measurement.source,
        date=measurement.date,
        packages=measurement.packages,
        package_digests=measurement.package_digests,
        largest_rank_bytes=measurement.largest_bytes,
        smallest_rank_bytes=measurement.smallest_bytes,
        ranks=ranks if measurement.is_complete or measurement.absent_ranks else (),
    )


def calibrate_document(record: CreditRecord, before: CreditRecord | None) -> dict[str, Any]:
    """Return ``calibrate --json``: the record, what follows from it, and what the credit used so far would estimate."""
    choice = record.choice
    if choice is None:
        raise ValueError(f"{record.id}: no evidence")
    inputs = choice.bound.inputs
    return {
        "schema": CALIBRATE_SCHEMA,
        "per_rank_before_credit_bytes": inputs.per_rank_before_credit_bytes,
        "largest_rank_bytes": choice.bound.largest_measured_bytes,
        "bound_bytes": choice.bound.savings_bytes,
        "bound_fraction": float(f"{choice.bound.fraction_text(digits=6)}e-2"),
        "bound_percent": choice.bound.fraction_text(),
        "chosen_permille": record.permille,
        "step_permille": record.step_permille,
        "savings_bytes": choice.savings_bytes,
        "estimate_bytes": choice.estimate_bytes,
        "headroom_bytes": choice.headroom_bytes,
        "ideal_fraction": float(MXFP8_SAVES),
        "ideal_savings_bytes": inputs.ideal_savings_bytes,
        "before": None if before is None else _before(choice, before),
        "evidence": record_document(record)["evidence"],
        "not_measured": list(record.not_measured),
        "record": record_document(record),
    }


def _before(choice: CreditChoice, before: CreditRecord) -> dict[str, Any]:
    """Return what the credit used so far estimates, and by how much that is too pessimistic."""
    inputs = choice.bound.inputs
    savings = credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, before.permille)
    estimate = credit_estimate(inputs.device_bytes, inputs.tp_size, savings)
    return {
        "id": before.id,
        "permille": before.permille,
        "savings_bytes": savings,
        "estimate_bytes": estimate,
        "pessimism_bytes": estimate - choice.bound.largest_measured_bytes,
    }


def _mismatches(fitting: Fitting, measurements: Sequence[Measurement]) -> Iterator[Problem]:
    """Yield what was measured of something else."""
    for measurement in measurements:
        if measurement.tp is not None and measurement.tp != fitting.inputs.tp_size:
            expected, found = f"TP {fitting.inputs.tp_size}", f"TP {measurement.tp}"
            yield Problem(where=measurement.source, what="measured at another TP size", expected=expected, found=found)
        if any((size or 1) > 1 for size in (measurement.ep, measurement.pp)):
            yield Problem(where=measurement.source, what="the credit covers tensor parallelism only")
        digest = measurement.checkpoint_digest
        if fitting.digest is not None and digest is not None and digest != fitting.digest:
            yield Problem(
                where=measurement.source, what="packages of another checkpoint", expected=fitting.digest, found=digest
            )


def _repeated(measurements: Sequence[Measurement]) -> Iterator[Problem]:
    """Yield packages that stand in the evidence twice; of one that several hosts keep, each may measure its ranks."""
    measured = Counter(
        (digest, number)
        for measurement in measurements
        for digest in measurement.package_digests
        for number in {rank.rank for rank in measurement.ranks}
    )
    for digest in sorted({digest for (digest, _), times in measured.items() if times > 1}):
        yield Problem(where="--measured", what="a package is measured twice", expected="once", found=digest)
    sources = [(one.source, one.ranks) for one in measurements if not one.package_digests]
    for source, times in Counter(sources).items():
        if times > 1:
            yield Problem(where="--measured", what="given twice", expected="once", found=source[0])


def _check_possible(choice: CreditChoice) -> None:
    """Refuse measurements that save more than every counted byte: they are not of what was counted.

    Raises:
        CreditError: As said.
    """
    bound, counted = choice.bound.projections_bytes, choice.bound.inputs.counted_bf16_bytes
    if bound > counted:
        raise CreditError(
            Problem(
                where="--measured",
                what="the ranks save more than there is to convert; are --device-bytes and --draft-bytes those of the "
                "packages?",
                expected=f"at most {counted} bytes",
                found=f"{bound} bytes",
            )
        )


def _record_name(fitting: Fitting, choice: CreditChoice) -> str:
    plain = re.sub(r"[^a-z0-9._]+", "-", fitting.name.lower()).strip("-._")[:60] or fitting.family.replace("_", "-")
    return f"{plain}-tp{fitting.inputs.tp_size}-{choice.permille}"


def without_record(records: Sequence[CreditRecord], measurements: Sequence[Measurement], *, named: bool) -> list[str]:
    """Return the sources of measurements that can be held against none of the records."""
    return [
        measurement.source
        for measurement in measurements
        if not any(True for record in records for _ in evidence_for(record, [measurement], named=named))
    ]


def evidence_for(record: CreditRecord, measurements: Sequence[Measurement], *, named: bool) -> Iterator[Evidence]:
    """Yield those measurements that a record can be held against: of its TP size and its checkpoint.

    Args:
        record: The calibration.
        measurements: Of any packages.
        named: The record was named, so that it is meant where one of the two does not say of which checkpoint it is.
            Where neither says it, the TP size decides.
    """
    for measurement in measurements:
        of_tp = measurement.tp is None or measurement.tp == record.tp
        ours, theirs = record.checkpoint.digest, measurement.checkpoint_digest
        if of_tp and (ours == theirs or (named and None in (ours, theirs))):
            yield evidence_of(measurement)
