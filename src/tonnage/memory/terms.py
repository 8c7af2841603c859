"""Calibrated records: how far a modelled term was from what engines logged, where that was seen, and how it is applied.

A record holds for a term of one engine within stated ranges. ``expected_permille`` brings the model to the middle of
the evidence, ``bound_permille`` to at or above all of it, with a margin that is larger where evidence is thin. The
narrowest record that contains a case is used. Outside every narrow range a wider one is used, its bound widened once
more for every range given up, and the term's source says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from tonnage.memory.runtime_rules import LINKED
from tonnage.memory.term import Term
from tonnage.memory.workspace_shape import Deployment, GpuClass, Kind, Release
from tonnage.units import counted, gib

if TYPE_CHECKING:
    from collections.abc import Sequence

TermName = Literal["activation", "context", "libraries", "graphs", "graph-estimate", "total"]
"""``total``: everything beside weights, cache and context, where a published package shows only the sum."""
PERMILLE = 1000
WIDENED_PERMILLE = 1250
"""What the bound is multiplied with for every range a case is outside of."""
UNSEEN_BOUND_PERMILLE = 2000
"""Bound of a modelled term without any record."""
WIDEST_RANKS = 1 << 10


class LogEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One logged figure beside the rule's.

    Attributes:
        term: What it is a figure of.
        id: Name of the log record.
        source: Where the log is published.
        measured_bytes: As logged, with half a unit of its last printed digit added.
        predicted_bytes: What the rule alone says.
    """

    term: TermName
    id: str
    source: str
    measured_bytes: int
    predicted_bytes: int


class TermRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fitted correction of one term and the range it holds in; ``None`` and empty mean any.

    Attributes:
        term: Which term.
        engine: Which engine.
        since: First release it was seen with.
        before: First release after those.
        gpu_class: Class of GPU.
        ranks: Smallest and largest number of ranks that talk to each other.
        kinds: Kinds of models.
        given_up: Ranges a narrower record would state and this one does not.
        expected_permille: Factor to the middle of the evidence.
        bound_permille: Factor to at or above all of it.
        evidence: Logs it was fitted to, by their ids.
        smallest_bytes: The smallest figure among them.
        largest_bytes: The largest.
        largest_predicted_bytes: Of a total: the most that was predicted of any of them.
    """

    term: TermName
    engine: str
    since: Release | None = None
    before: Release | None = None
    gpu_class: GpuClass | None = None
    ranks: tuple[int, int] = (1, WIDEST_RANKS)
    kinds: tuple[Kind, ...] = ()
    given_up: tuple[str, ...] = ()
    expected_permille: int
    bound_permille: int
    evidence: tuple[str, ...]
    smallest_bytes: int
    largest_bytes: int
    largest_predicted_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse a record without evidence, or with a bound under its expectation."""
        if not self.evidence or not 0 <= self.expected_permille <= self.bound_permille:
            raise ValueError(f"{self.term} of {self.engine}: no evidence, or a bound under the expectation")

    def holds_for(self, case: Case) -> bool:
        """Whether the case is within every stated range."""
        release = case.release
        return (
            (self.term, self.engine) == (case.term, case.engine)
            and (self.since is None or (release is not None and release >= self.since))
            and (self.before is None or (release is not None and release < self.before))
            and self.gpu_class in (None, case.gpu_class)
            and self.ranks[0] <= case.ranks <= self.ranks[1]
            and (not self.kinds or case.kind in self.kinds)
        )

    @property
    def narrowness(self) -> tuple[int, int, int]:
        """Order of preference: fewest ranges given up, then most stated, then most evidence."""
        stated = (self.since or self.before, self.gpu_class, self.ranks != (1, WIDEST_RANKS), self.kinds)
        return (-len(self.given_up), sum(map(bool, stated)), len(self.evidence))


class TermFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of records and all evidence they refer to."""

    schema: Literal["tonnage.terms/1"]
    evidence: tuple[LogEvidence, ...]
    records: tuple[TermRecord, ...]

    def __post_init__(self) -> None:
        """Refuse records whose bound is under their evidence, or whose evidence is not there.

        Raises:
            ValueError: It names the record and the log.
        """
        known = {(seen.term, seen.id): seen for seen in self.evidence}
        for record in self.records:
            for log in record.evidence:
                seen = known.get((record.term, log))
                if seen is None or scaled_up(seen.predicted_bytes, record.bound_permille) < seen.measured_bytes:
                    raise ValueError(f"{record.term} of {record.engine}: no evidence {log}, or a bound under it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a record is looked up for.

    Attributes:
        term: Which term.
        engine: Which engine.
        release: Its release, if known.
        gpu_class: Class of GPU, if known.
        ranks: Ranks that talk to each other.
        kind: Kind of model.
    """

    term: TermName
    engine: str
    release: Release | None
    gpu_class: GpuClass | None
    ranks: int
    kind: Kind


def case_of(term: TermName, deployment: Deployment, kind: Kind) -> Case:
    """Return the case of a term: the baseline sees all ranks, everything else those of one stage.

    Libraries of GPUs without fast links hold nothing for their number.
    """
    topology = deployment.topology
    unlinked = deployment.gpu_class is not None and deployment.gpu_class not in LINKED
    ranks = topology.world_size if term == "context" else topology.tp
    return Case(
        term=term,
        engine="vllm" if deployment.engine == "split" and term != "total" else deployment.engine,
        release=deployment.release,
        gpu_class=deployment.gpu_class,
        ranks=1 if term == "libraries" and unlinked else ranks,
        kind=kind,
    )


def find_record(records: Sequence[TermRecord], case: Case) -> TermRecord | None:
    """Return the narrowest record that contains the case, or ``None``."""
    return max((r for r in records if r.holds_for(case)), key=lambda r: r.narrowness, default=None)


def calibrated(
    component: str, predicted: tuple[int, int], case: Case, records: Sequence[TermRecord], *, transient: bool = False,
    rule: str,
) -> Term:  # fmt: skip
    """Return a modelled term, corrected by the narrowest record for its case.

    Args:
        component: Name of the term in a ledger.
        predicted: Bytes by the rule alone, expected and at most.
        case: What it is looked up for.
        records: All records.
        transient: As in :class:`Term`.
        rule: The rule in a few words.
    """
    expected, most = predicted
    record = find_record(records, case)
    if record is None:
        bound = max(scaled_up(expected, UNSEEN_BOUND_PERMILLE), most)
        return Term(
            component=component, nbytes=expected, bound_nbytes=bound, transient=transient,
            basis="assumed", source=f"{rule}; no log of {case.engine} shows it: twice the rule as bound",
        )  # fmt: skip
    nbytes = scaled_up(expected, record.expected_permille)
    bound = scaled_up(expected, record.bound_permille)
    for _ in _outside(record, case):
        bound = scaled_up(bound, WIDENED_PERMILLE)
    return Term(
        component=component, nbytes=nbytes, bound_nbytes=max(nbytes, bound, most), transient=transient,
        basis="calibrated", source=f"{rule}; {_evidence(record, case)}",
    )  # fmt: skip


def in_total(terms: Sequence[Term], case: Case, records: Sequence[TermRecord]) -> tuple[Term, ...]:
    """Return terms corrected by a record of their sum; as they are without one for the case.

    Expected bytes take the record's factor. The bounds together are no more than the record allows, and what each of
    them has above its expectation shrinks alike. A sum larger than any that was seen keeps the bounds of its own terms
    for the excess, so that the record of a small profile vouches for no large one.

    Args:
        terms: Of one rank; their sum is what the record is of.
        case: Of term ``total``.
        records: All records.
    """
    record = find_record(records, case)
    expected, own = (sum(getattr(term, name) for term in terms) for name in ("nbytes", "bound_nbytes"))
    if record is None or not expected:
        return tuple(terms)
    most = max(own, scaled_up(expected, record.bound_permille))
    excess = max(expected - record.largest_predicted_bytes, 0)
    allowed = scaled_up(record.largest_predicted_bytes, record.bound_permille) + -(-excess * most // expected)
    margin = max(min(most, allowed) - scaled_up(expected, record.expected_permille), 0)
    beyond = "; this sum is larger, with bounds of its own for the excess" if excess else ""
    seen = f"sum of such terms: {_evidence(record, case)}{beyond}"
    room = [term.bound_nbytes - term.nbytes if own > expected else term.nbytes for term in terms]
    corrected = []
    for term, above in zip(terms, room, strict=True):
        nbytes = scaled_up(term.nbytes, record.expected_permille)
        bound = nbytes + -(-margin * above // sum(room))
        source = f"{term.source}; {seen}"
        corrected.append(replace(term, nbytes=nbytes, bound_nbytes=bound, basis="calibrated", source=source))
    return tuple(corrected)


def _outside(record: TermRecord, case: Case) -> tuple[str, ...]:
    """Return what of the case is in no narrower record; what nobody stated is not outside anything."""
    unstated = {name for name, value in (("release", case.release), ("gpu", case.gpu_class)) if value is None}
    return tuple(name for name in record.given_up if name not in unstated)


def scaled_up(nbytes: int, permille: int) -> int:
    """Return a number of bytes times a permille, rounded up."""
    return -(-nbytes * permille // PERMILLE)


def _evidence(record: TermRecord, case: Case) -> str:
    """Say how much evidence there is, how large it is, and what of the case it does not cover.

    Evidence is of other sizes than the case: what is at or above it is the bound for its size, not the one for this.
    """
    what = "package" if record.term == "total" else "log"
    count = f"{'each of' if len(record.evidence) > 1 else 'the'} {counted(len(record.evidence), what)}"
    sizes = dict.fromkeys(gib(nbytes, digits=2) for nbytes in (record.smallest_bytes, record.largest_bytes))
    text = f"bound at or above {count} when scaled to its size ({'-'.join(sizes)} GiB)"
    outside = _outside(record, case)
    if not outside:
        return text
    wanted = {
        "release": f"release {'.'.join(map(str, case.release))}" if case.release else "this release",
        "gpu": case.gpu_class or "this GPU", "ranks": counted(case.ranks, "rank"), "kind": f"{case.kind} models",
    }  # fmt: skip
    missing = ", ".join(wanted[name] for name in outside)
    return f"{text}; none is of {missing}: widened"
