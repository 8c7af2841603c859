"""A plan under the credit estimator: what it is told of a checkpoint, and which record its share comes from."""

from __future__ import annotations

from tonnage.calibrations.credit_records import Chosen, Subject, choose_record, use_record
from tonnage.credit import CreditInputs
from tonnage.errors import CreditError, Problem
from tonnage.inspection import counted_bytes
from tonnage.plan import Held, Plan, make_credit_plan
from tonnage.request import Checkpoint, PlanRequest


def credit_plan(checkpoint: Checkpoint, request: PlanRequest, held: tuple[Held, ...]) -> Plan:
    """Return the plan of a checkpoint whose conversion is known as a share only.

    Args:
        checkpoint: What is planned.
        request: What is asked.
        held: What a rank holds beside the weights.

    Raises:
        CreditError: No permille is known, nothing in the checkpoint is counted, or ranks are not those of one stage.
    """
    if request.pp > 1 or request.ep > 1:
        raise CreditError(
            Problem(where="--estimator credit", what="covers tensor parallelism only", expected="--pp 1 --ep 1")
        )
    inputs = credit_inputs(checkpoint, request)
    if request.credit_permille is not None:
        permille, source = request.credit_permille, f"--credit-permille {request.credit_permille}"
        return make_credit_plan(inputs, permille, basis="assumed", source=source, supply=request.supply, held=held)
    chosen = _chosen_record(checkpoint, request)
    record = chosen.record
    if chosen.basis == "calibrated" and request.device_bytes is None and record.inputs.draft_bytes == _draft(request):
        inputs = record.credit_inputs  # the report counted whole files, headers included
    return make_credit_plan(
        inputs, record.permille, basis=chosen.basis, source=chosen.why, supply=request.supply, held=held
    )


def credit_inputs(checkpoint: Checkpoint, request: PlanRequest) -> CreditInputs:
    """Return what the credit estimator is told of a checkpoint.

    Raises:
        CreditError: No projection of it is counted.
    """
    projections, latent = counted_bytes(checkpoint.assignment)
    if not projections:
        raise CreditError(
            Problem(where=checkpoint.name, what="no plain BF16 projection is counted, a credit has nothing to apply to")
        )
    device = request.device_bytes or checkpoint.assignment.payload_bytes + _draft(request)
    return CreditInputs(
        device_bytes=device, tp_size=request.tp, counted_bf16_bytes=projections, latent_pair_bytes=latent
    )


def _draft(request: PlanRequest) -> int:
    """Return all bytes of the draft."""
    return request.draft.assignment.payload_bytes if request.draft else request.draft_bytes


def subject_of(checkpoint: Checkpoint, request: PlanRequest) -> Subject:
    """Return what a credit is wanted for.

    Raises:
        CreditError: No projection of the checkpoint is counted.
    """
    inputs = credit_inputs(checkpoint, request)
    return Subject(
        digest=checkpoint.digest,
        family=checkpoint.family,
        stored_bytes=checkpoint.assignment.payload_bytes,
        device_bytes=inputs.device_bytes,
        counted_bf16_bytes=inputs.counted_bf16_bytes,
        latent_pair_bytes=inputs.latent_pair_bytes,
        tp=request.tp,
    )


def _chosen_record(checkpoint: Checkpoint, request: PlanRequest) -> Chosen:
    subject = subject_of(checkpoint, request)
    if request.credit_record is not None:
        return use_record(request.credit_record, subject)
    chosen = choose_record(request.credit_records, subject)
    if chosen is None:
        raise CreditError(
            Problem(
                where="--estimator credit",
                what=f"no calibrated credit for any {checkpoint.family} checkpoint",
                expected="--credit-permille N, or a record: tonnage calibrate",
            )
        )
    return chosen
