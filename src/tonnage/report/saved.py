"""A saved plan for pictures and pages: its figures follow from each other, and every text is printable on one line.

What they show is made from this value and nothing else, so that all of it is in the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tonnage.errors import ObservationError, Problem, one_line, raise_if_any
from tonnage.saved_plan import SavedPlan, read_plan_document


def read_saved(document: Mapping[str, Any], *, where: str = "plan") -> SavedPlan:
    """Return what a plan document says, control characters in its texts escaped.

    Args:
        document: What ``plan --json`` printed, parsed.
        where: It is from, for the refusal.

    Raises:
        ObservationError: It is none, or its figures contradict each other; with all problems of the latter.
    """
    plan = read_plan_document(document, where=where, kind=ObservationError)
    raise_if_any(ObservationError, _contradictions(plan, where))
    return msgspec.convert(_printable(msgspec.to_builtins(plan)), SavedPlan)


def _printable(value: Any) -> Any:
    """Return a value with every text in it made one printable line; values of a checked document are not deep."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {key: _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value


def _contradictions(plan: SavedPlan, where: str) -> Iterator[Problem]:
    def differs(what: str, expected: object, found: object) -> Iterator[Problem]:
        if expected != found:
            yield Problem(where=where, what=what, expected=str(expected), found=str(found))

    count = len(plan.ranks)
    yield from differs("number of ranks", plan.topology.world_size, count)
    if plan.binding_rank >= count:
        yield Problem(where=where, what="binding_rank", expected=f"below {count}", found=str(plan.binding_rank))
    if plan.cache.rank is not None and plan.cache.rank >= count:
        yield Problem(where=where, what="cache.rank", expected=f"below {count}", found=str(plan.cache.rank))
    for number, rank in enumerate(plan.ranks):
        yield from differs(f"ranks[{number}].rank", number, rank.rank)
        for line in rank.lines:
            if line.bound_nbytes < line.nbytes:
                what = f"bound_nbytes of {line.component}, rank {number}"
                yield Problem(where=where, what=what, expected=f"at least {line.nbytes}", found=str(line.bound_nbytes))
        bounds = [(line.transient, line.bound_nbytes) for line in rank.lines]
        yield from differs(f"ranks[{number}].fixed_bytes", held_together(bounds), rank.fixed_bytes)
        values = [(line.transient, line.nbytes) for line in rank.lines]
        yield from differs(f"ranks[{number}].expected_bytes", held_together(values), rank.expected_bytes)
        yield from differs(f"ranks[{number}].weights_bytes", rank.line_bytes, rank.weights_bytes)
        spare = None if plan.supply_bytes is None else plan.supply_bytes - plan.needed_bytes(rank)
        yield from differs(f"ranks[{number}].spare_bytes", spare, rank.spare_bytes)
    if plan.binding_rank < count:
        most = max(map(plan.needed_bytes, plan.ranks))
        yield from differs("needed bytes of binding_rank", most, plan.needed_bytes(plan.binding))
    yield from differs("fits", _verdict(plan), plan.fits)


def _verdict(plan: SavedPlan) -> bool | None:
    """Return the verdict that follows from the figures and the reasons; what is refused for others states them."""
    given, supply = plan.cache.given_bytes, plan.supply_bytes
    refused = bool(plan.reasons) or any(
        (given is not None and rank.cache_bytes > given)
        or (supply is not None and max(plan.needed_bytes(rank), rank.loading_bytes) > supply)
        for rank in plan.ranks
    )
    return False if refused else None if supply is None else True


def held_together(sizes: list[tuple[bool, int]]) -> int:
    """Return what lines hold at most at once: persistent ones add up, of transient ones the largest counts.

    >>> held_together([(False, 5), (True, 2), (True, 3)])
    8
    """
    persistent = sum(nbytes for transient, nbytes in sizes if not transient)
    return persistent + max((nbytes for transient, nbytes in sizes if transient), default=0)
