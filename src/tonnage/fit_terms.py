"""From logged figures to calibrated records: what the maintainers' command fits and the package ships.

Figures are grouped from narrow (one class of GPU, one number of ranks, one kind of model) to all of an engine; every
group becomes one record with a factor to its middle and one to at or above all of it. Nothing here reads a file or
rounds a float: the same logs give the same records.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, get_args

from tonnage.memory.runtime_rules import EARLY_COMMUNICATION
from tonnage.memory.terms import PERMILLE, WIDEST_RANKS, Case, TermFile, TermName, TermRecord
from tonnage.memory.workspace_shape import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tonnage.term_evidence import Seen

_LINKS = (("gpu", "ranks"), ("gpu", "several"), ("several",), ())
_GRAPHS = (("release", "kind", "gpu"), ("kind", "gpu"), ("release", "kind"), ("kind",), ("base",), ())
SCOPES: dict[TermName, tuple[tuple[str, ...], ...]] = {
    "activation": (("kind",), ("base",), ()),
    "context": _LINKS,
    "libraries": _LINKS,
    "graphs": _GRAPHS,
    "graph-estimate": _GRAPHS,
    "total": (("gpu", "ranks", "kind"),),
}
"""For every term what its records state, from narrow to wide.

``several`` is whether there is more than one rank, ``base`` the kind of model with or without vision.
"""

ENOUGH = 3
"""Different figures from which evidence speaks for itself; with fewer the rule counts as one more figure."""
RANK_STEPS = ((1, 1), (2, 2), (3, 4), (5, WIDEST_RANKS))
MARGINS = ((12, 60), (6, 120), (3, 250), (1, 350))
"""Permille the bound stays above the largest figure, by how many different figures there are at least."""
TOTAL_MARGIN_PERMILLE = 100
"""The same for a total: the errors of its terms do not add up, and it counts what the pool's last block left free."""


def fit_files(seen: Iterable[Seen]) -> dict[str, TermFile]:
    """Return one file per engine: every record, and all evidence they refer to."""
    all_seen = list(seen)
    records = fit_records(all_seen)
    files = {}
    for engine in sorted({record.engine for record in records}):
        mine = tuple(record for record in records if record.engine == engine)
        used = {(record.term, log) for record in mine for log in record.evidence}
        evidence = sorted(
            (s.evidence for s in all_seen if s.case.engine == engine and (s.evidence.term, s.evidence.id) in used),
            key=lambda e: (e.term, e.id),
        )
        files[engine] = TermFile(schema="tonnage.terms/1", evidence=tuple(evidence), records=mine)
    return files


def fit_records(seen: Iterable[Seen]) -> tuple[TermRecord, ...]:
    """Return one record for every group of figures with a stated one, narrow ones first, in a fixed order.

    Figures under limits nobody stated count for no middle, and for a bound only where there are few others.
    """
    groups: dict[tuple[Any, ...], list[Seen]] = defaultdict(list)
    for one in seen:
        for scope in SCOPES[one.case.term]:
            key = _key(one.case, scope)
            if key is not None:
                groups[key].append(one)
    found = sorted(groups.items(), key=lambda item: repr(item[0]))
    return tuple(_record(key, members) for key, members in found if any(member.stated for member in members))


def _key(case: Case, scope: tuple[str, ...]) -> tuple[Any, ...] | None:
    """Return what a record of this scope states about the case, or ``None`` where the log does not tell it."""
    since = before = gpu = None
    ranks = (1, WIDEST_RANKS)
    if "release" in scope:
        if case.release is None:
            return None
        early = case.release < EARLY_COMMUNICATION
        since, before = (None, EARLY_COMMUNICATION) if early else (EARLY_COMMUNICATION, None)
    if "gpu" in scope:
        if case.gpu_class is None:
            return None
        gpu = case.gpu_class
    if "ranks" in scope:
        ranks = next(step for step in RANK_STEPS if step[0] <= case.ranks <= step[1])
    kinds: tuple[Kind, ...] = (case.kind,) if "kind" in scope else ()
    if "base" in scope:
        base = case.kind.removesuffix("+vision")
        kinds = tuple(kind for kind in get_args(Kind) if kind.removesuffix("+vision") == base)
    if "several" in scope:
        ranks = (1, 1) if case.ranks == 1 else (2, WIDEST_RANKS)
    if ranks == (1, 1) and scope == ("gpu", "several"):
        return None
    given_up = tuple(name for name in SCOPES[case.term][0] if name not in scope and (name, ranks) != ("ranks", (1, 1)))
    return case.engine, case.term, len(given_up), gpu or "", ranks, kinds, since, before, given_up


def _record(key: tuple[Any, ...], members: Sequence[Seen]) -> TermRecord:
    engine, term, _, gpu, ranks, kinds, since, before, given_up = key
    stated = [member for member in members if member.stated]
    members = stated if len(_different(stated)) >= ENOUGH else members
    different = _different(members)
    rule = [PERMILLE] if len(different) < ENOUGH else []
    ratios = sorted([*rule, *(measured * PERMILLE // predicted for *_, measured, predicted in _different(stated))])
    largest = max(*rule, *(-(-measured * PERMILLE // predicted) for *_, measured, predicted in different))
    total = term == "total"
    margin = TOTAL_MARGIN_PERMILLE if total else next(m for least, m in MARGINS if len(different) >= least)
    middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) // 2
    return TermRecord(
        term=term,
        engine=engine,
        since=since,
        before=before,
        gpu_class=gpu or None,
        ranks=ranks,
        kinds=kinds,
        given_up=given_up,
        expected_permille=middle,
        bound_permille=largest + -(-largest * margin // PERMILLE),
        evidence=tuple(sorted(m.evidence.id for m in members)),
        smallest_bytes=min(m.evidence.measured_bytes for m in members),
        largest_bytes=max(m.evidence.measured_bytes for m in members),
        largest_predicted_bytes=max(m.evidence.predicted_bytes for m in members) if total else 0,
    )


def _different(members: Iterable[Seen]) -> set[tuple[str, int, int, int]]:
    """Return model, ranks, measured and predicted bytes of all figures, equal ones once."""
    return {(m.model, m.case.ranks, m.evidence.measured_bytes, m.evidence.predicted_bytes) for m in members}
