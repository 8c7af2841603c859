"""A calibrated credit as a record: what it was fitted for, to which measurements, and what was not measured.

A record is never taken at its word. Everything that follows from its inputs and evidence is computed again, and a
record whose estimate lies under one of its own measurements is refused wherever it is about to be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.credit import CreditBound, CreditChoice, CreditInputs
from tonnage.errors import CreditError, Problem
from tonnage.memory.supply import Basis
from tonnage.topology import MOST_RANKS

CALIBRATION_SCHEMA: Literal["tonnage.calibration/1"] = "tonnage.calibration/1"
HEADER_SHARE = 1000
"""Stored bytes of a report are those of whole files; headers are far less than one in a thousand of them."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Permille = Annotated[int, msgspec.Meta(ge=0, le=1000)]
_Step = Annotated[int, msgspec.Meta(ge=1, le=1000)]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
Id = Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME.pattern}\Z")]
Date = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Which checkpoint a record was fitted for.

    Attributes:
        name: As reported.
        family: The recipe that answered.
        digest: Of its headers; ``None`` for a report of a checkpoint that was not at hand.
        stored_bytes: All its bytes.
    """

    name: _Text
    family: _Text
    digest: _Text | None
    stored_bytes: _Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the estimator was told; see :class:`tonnage.credit.CreditInputs`."""

    device_bytes: _Size
    draft_bytes: _Count = 0
    counted_bf16_bytes: _Count
    latent_pair_bytes: _Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Measured bytes of one rank."""

    rank: _Count
    nbytes: _Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measurement, of one package or of several that are alike.

    Attributes:
        source: Where it is from: a package's name, or who reported it.
        date: When it was measured, if known.
        packages: How many packages it covers.
        package_digests: Of the packages, if known.
        largest_rank_bytes: Of the rank that holds most.
        smallest_rank_bytes: Of the rank that holds least.
        ranks: Of every rank, if known.
    """

    source: _Text
    date: Date | None = None
    packages: _Size = 1
    package_digests: tuple[_Text, ...] = ()
    largest_rank_bytes: _Size
    smallest_rank_bytes: _Size
    ranks: tuple[RankBytes, ...] = ()

    @property
    def worst_bytes(self) -> int:
        """The largest figure in it, whichever field it stands in."""
        return max(self.largest_rank_bytes, self.smallest_rank_bytes, *(rank.nbytes for rank in self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRecord:
    """A calibration of the credit; field by field what its file holds.

    Attributes:
        schema: Of the document.
        kind: What is calibrated.
        id: Name to refer to it by; the name of its file.
        date: When it was fitted.
        conversion: What the credit stands for.
        checkpoint: Fitted for.
        tp: Ranks it was fitted for.
        inputs: Of the estimator.
        step_permille: The credit is a multiple of it.
        permille: The credit.
        evidence: What it was fitted to; empty for a credit that was only assumed.
        not_measured: What the evidence does not cover.
        supersedes: Records it takes the place of.
    """

    schema: Literal["tonnage.calibration/1"] = CALIBRATION_SCHEMA
    kind: Literal["credit"] = "credit"
    id: Id
    date: Date
    conversion: Literal["mxfp8"] = "mxfp8"
    checkpoint: CheckpointFacts
    tp: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    inputs: Inputs
    step_permille: _Step
    permille: _Permille
    evidence: tuple[Evidence, ...]
    not_measured: tuple[_Text, ...]
    supersedes: tuple[Id, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a record that would take its own place."""
        if self.id in self.supersedes:
            raise ValueError(f"{self.id} supersedes itself")

    @property
    def credit_inputs(self) -> CreditInputs:
        """The inputs as the estimator takes them."""
        return CreditInputs(
            device_bytes=self.inputs.device_bytes,
            tp_size=self.tp,
            counted_bf16_bytes=self.inputs.counted_bf16_bytes,
            latent_pair_bytes=self.inputs.latent_pair_bytes,
        )

    @property
    def choice(self) -> CreditChoice | None:
        """Bound, savings, estimate and headroom, from inputs and evidence alone; ``None`` without evidence."""
        if not self.evidence:
            return None
        worst = max(evidence.worst_bytes for evidence in self.evidence)
        bound = CreditBound(inputs=self.credit_inputs, largest_measured_bytes=worst)
        return CreditChoice(bound=bound, permille=self.permille, step_permille=self.step_permille)


def check_name(name: str) -> str:
    """Return the name of a record, if it can be one: it is the name of a file as well.

    Raises:
        CreditError: It cannot.
    """
    if _NAME.fullmatch(name) is None:
        expected = "lower-case letters, digits, dots, underscores and dashes, at most 100"
        raise CreditError(Problem(where="--name", what="not a name of a record", expected=expected, found=repr(name)))
    return name


def parse_record(raw: bytes, *, where: str) -> CreditRecord:
    """Return a record, its form checked; whether it contradicts its evidence is for :func:`contradictions` to say.

    Raises:
        CreditError: It is none.
    """
    fields = parse_object(raw, where=where, kind=CreditError)
    fields.pop(DERIVED, None)
    try:
        record = msgspec.convert(fields, CreditRecord)
    except msgspec.ValidationError as error:
        raise CreditError(Problem(where=where, what="not a calibration record", found=str(error))) from error
    if unknown := tuple(_unknown(fields, msgspec.to_builtins(record))):
        found = ", ".join(unknown)
        raise CreditError(Problem(where=where, what="not a calibration record: unknown fields", found=found))
    return record


DERIVED = "derived"
"""What follows from a record, for readers; never read back."""


def _unknown(found: object, known: object) -> Iterator[str]:
    """Yield the members of a document that its record has no place for: a misspelt one would be a missing one."""
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            if name in known:
                yield from _unknown(value, known[name])
            else:
                yield repr(name)
    elif isinstance(found, list) and isinstance(known, list | tuple):
        for one, other in zip(found, known, strict=True):
            yield from _unknown(one, other)


def record_document(record: CreditRecord) -> dict[str, Any]:
    """Return the record with all that follows from it, for readers; only the record's own fields are ever read back."""
    document: dict[str, Any] = msgspec.to_builtins(record)
    choice = record.choice
    if choice is not None:
        document[DERIVED] = {
            "per_rank_before_credit_bytes": choice.bound.inputs.per_rank_before_credit_bytes,
            "bound_bytes": choice.bound.savings_bytes,
            "bound_percent": choice.bound.fraction_text(),
            "savings_bytes": choice.savings_bytes,
            "estimate_bytes": choice.estimate_bytes,
            "headroom_bytes": choice.headroom_bytes,
        }
    return document


def record_bytes(record: CreditRecord) -> bytes:
    """Return the file of a record, held against what reads it.

    Raises:
        CreditError: It would be no record.
    """
    content = msgspec.json.format(msgspec.json.encode(record_document(record)), indent=2) + b"\n"
    parse_record(content, where=record.id)
    return content


def contradictions(record: CreditRecord, further: Iterable[Evidence] = ()) -> Iterator[Problem]:
    """Yield every measurement above the record's estimate, of its own evidence or of further ones.

    An estimate that cannot be, because more is saved than there is, lies under everything.
    """
    choice = CreditChoice(
        bound=CreditBound(inputs=record.credit_inputs, largest_measured_bytes=0),
        permille=record.permille,
        step_permille=record.step_permille,
    )
    try:
        estimate = choice.estimate_bytes
    except CreditError as error:
        yield from (replace(problem, where=record.id) for problem in error.problems)
        return
    for evidence in (*record.evidence, *further):
        if evidence.worst_bytes > estimate:
            yield Problem(
                where=record.id,
                what=f"the estimate lies under a rank measured in {evidence.source}",
                expected=f"at most {estimate} bytes",
                found=f"{evidence.worst_bytes} bytes",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a credit is wanted for.

    Attributes:
        digest: Of the checkpoint.
        family: The recipe that answered.
        stored_bytes: All its bytes.
        device_bytes: Those that reach the devices, a draft included.
        counted_bf16_bytes: BF16 bytes of its counted projections.
        latent_pair_bytes: BF16 bytes of its latent pair.
        tp: Ranks.
    """

    digest: str
    family: str
    stored_bytes: int
    device_bytes: int
    counted_bf16_bytes: int
    latent_pair_bytes: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A record, whether it is evidence for the subject or only assumed to carry over, and why."""

    record: CreditRecord
    basis: Basis
    why: str


def choose_record(records: Sequence[CreditRecord], subject: Subject) -> Chosen | None:
    """Return the record to use: of this checkpoint and TP size, else of this family and then only assumed; or none.

    Records that another one supersedes, or that no measurement stands behind, are not chosen. Of several the newest is.

    Raises:
        CreditError: The chosen record's estimate lies under its own evidence.
    """
    replaced = {identifier for record in records for identifier in record.supersedes}
    candidates = [
        record
        for record in records
        if record.id not in replaced and record.evidence and record.checkpoint.family == subject.family
    ]
    if not candidates:
        return None
    return use_record(
        max(candidates, key=lambda one: (_closeness(one, subject), one.date, -one.permille, one.id)), subject
    )


def use_record(record: CreditRecord, subject: Subject) -> Chosen:
    """Return a record with what it is worth for the subject.

    Raises:
        CreditError: Its estimate lies under its own evidence.
    """
    if problems := tuple(contradictions(record)):
        raise CreditError(*problems)
    about = f"calibration {record.id} of {record.date}, {record.permille} permille"
    if not record.evidence:
        return Chosen(record=record, basis="assumed", why=f"{about}, without any measurement")
    same, tp = _is_same(record, subject), record.tp == subject.tp
    if same and tp:
        by = "" if record.checkpoint.digest else ", recognised by its bytes"
        return Chosen(record=record, basis="calibrated", why=f"{about}, fitted to this checkpoint and TP size{by}")
    other = " and ".join(
        text for text, differs in ((record.checkpoint.name, not same), (f"TP {record.tp}", not tp)) if differs
    )
    return Chosen(record=record, basis="assumed", why=f"{about}, fitted to {other}: only assumed to hold here")


def _closeness(record: CreditRecord, subject: Subject) -> tuple[bool, bool]:
    return _is_same(record, subject), record.tp == subject.tp


def _is_same(record: CreditRecord, subject: Subject) -> bool:
    """Whether a record is about this checkpoint: by digest, or by its bytes where no digest was reported."""
    facts, inputs = record.checkpoint, record.inputs
    if facts.digest is not None:
        return facts.digest == subject.digest
    return (
        facts.family == subject.family
        and inputs.counted_bf16_bytes == subject.counted_bf16_bytes
        and inputs.latent_pair_bytes == subject.latent_pair_bytes
        and (
            inputs.device_bytes == subject.device_bytes
            or 0 <= facts.stored_bytes - subject.stored_bytes <= facts.stored_bytes // HEADER_SHARE
        )
    )
