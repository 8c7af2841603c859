"""``plan.json`` must add up: every rank once, and weights that are the sum of their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plan_documents import by_hand
from tonnage.errors import TonnageError
from tonnage.export.manifest import PackageError, Parallel
from tonnage.export.planned import Prepared, check_plan
from tonnage.saved_plan import SavedPlan, read_plan_document

PREPARED = Prepared(
    checkpoint="a1", engine="vllm", topology=Parallel(tp=2), converted=False, payload_bytes={0: 6, 1: 5}
)


def document() -> dict[str, Any]:
    """A plan of two ranks."""
    sizes = {"weights.attn": 4, "weights.ffn": 1, "padding.vocab": 1, "engine.scales": 1, "reserve": 100}
    plan = by_hand([[{"component": name, "nbytes": nbytes} for name, nbytes in sizes.items()], []])
    plan["checkpoint"]["digest"] = "a1"
    plan["ranks"][1]["weights_bytes"] = 5
    return plan


def read(plan: dict[str, Any]) -> SavedPlan:
    return read_plan_document(plan, where="plan.json", kind=PackageError)


def refusal(change: Callable[[dict[str, Any]], object]) -> str:
    changed = document()
    change(changed)
    with pytest.raises(PackageError) as caught:
        check_plan(read(changed), PREPARED, read(changed), where="plan.json")
    return str(caught.value)


def test_a_plan_that_adds_up_is_taken() -> None:
    plan = read(document())
    check_plan(plan, PREPARED, plan, where="plan.json")
    assert [(rank.role_bytes, rank.line_bytes) for rank in plan.ranks] == [(5, 7), (0, 0)]


def test_a_plan_that_says_what_is_written_is_held_to_it_whatever_its_lines_are() -> None:
    """An engine may hold less than the files have: what it converts is in them as stored."""
    said = document()
    said["ranks"][0] |= {"lines": [], "weights_bytes": 3, "payload_bytes": 6}
    plan = read(said)
    check_plan(plan, PREPARED, plan, where="plan.json")


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "sum": (
        lambda plan: plan["ranks"][0].update(weights_bytes=8),
        "weights_bytes of rank 0; expected the sum of its lines, 7; found 8",
    ),
    "line": (lambda plan: plan["ranks"][0]["lines"][3].update(nbytes=2), "expected the sum of its lines, 8; found 7"),
    "rank twice": (lambda plan: plan["ranks"].append(plan["ranks"][1]), "ranks; expected each of 2, once; found 3"),
    "rank missing": (lambda plan: plan["ranks"].pop(), "ranks; expected each of 2, once; found 1"),
    "no ranks": (lambda plan: plan["ranks"].clear(), "not a plan"),
    "payload": (
        lambda plan: plan["ranks"][0].update(payload_bytes=7),
        "for rank 0; expected 7 bytes, as planned; found 6",
    ),
    "payload without its own": (
        lambda plan: plan["ranks"][0].update(lines=[], weights_bytes=4),
        "written for rank 0; expected 0..4 bytes, as planned; found 6",
    ),
    "another rank": (lambda plan: plan["ranks"][1].update(rank=2), "ranks; expected each of 2, once; found 2"),
    "negative": (lambda plan: plan["ranks"][0]["lines"][0].update(nbytes=-1), "not a plan"),
}


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_a_plan_that_does_not_add_up_is_refused(lie: Callable[[dict[str, Any]], object], said: str) -> None:
    try:
        assert said in refusal(lie)
    except TonnageError as error:
        assert said in str(error)  # noqa: PT017 - refused while it is read
