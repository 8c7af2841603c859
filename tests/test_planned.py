"""``plan.json`` must add up: every rank once, and weights that are the sum of their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tonnage.errors import TonnageError
from tonnage.export.manifest import PackageError, Parallel
from tonnage.export.planned import Prepared, check_plan, read_plan

PREPARED = Prepared(
    checkpoint="a1", engine="vllm", topology=Parallel(tp=2), converted=False, payload_bytes={0: 6, 1: 5}
)


def document() -> dict[str, Any]:
    """A plan of two ranks."""

    def line(component: str, nbytes: int) -> dict[str, Any]:
        return {"component": component, "nbytes": nbytes, "basis": "exact"}

    lines = [line("weights.attn", 4), line("weights.ffn", 1), line("padding.vocab", 1), line("engine.scales", 1)]
    return {
        "schema": "tonnage.plan/1",
        "checkpoint": {"digest": "a1", "family": "llama"},
        "engine": "vllm",
        "estimator": "exact",
        "topology": {"tp": 2, "ep": 1, "pp": 1},
        "profile": {},
        "ranks": [
            {"rank": 0, "lines": [*lines, line("reserve", 100)], "weights_bytes": 7},
            {"rank": 1, "lines": [], "weights_bytes": 5},
        ],
        "numerics": {"converted": []},
    }


def refusal(change: Callable[[dict[str, Any]], object]) -> str:
    changed = document()
    change(changed)
    with pytest.raises(PackageError) as caught:
        check_plan(read_plan(changed, where="plan.json"), PREPARED, read_plan(changed, where="x"), where="plan.json")
    return str(caught.value)


def test_a_plan_that_adds_up_is_taken() -> None:
    plan = read_plan(document(), where="plan.json")
    check_plan(plan, PREPARED, plan, where="plan.json")
    assert [(rank.role_bytes, rank.line_bytes) for rank in plan.ranks] == [(5, 7), (0, 0)]


def test_a_plan_that_says_what_is_written_is_held_to_it_whatever_its_lines_are() -> None:
    """An engine may hold less than the files have: what it converts is in them as stored."""
    said = document()
    said["ranks"][0] |= {"lines": [], "weights_bytes": 3, "payload_bytes": 6}
    plan = read_plan(said, where="plan.json")
    check_plan(plan, PREPARED, plan, where="plan.json")


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "sum": (
        lambda plan: plan["ranks"][0].update(weights_bytes=8),
        "weights_bytes of rank 0; expected the sum of its lines, 7; found 8",
    ),
    "line": (lambda plan: plan["ranks"][0]["lines"][3].update(nbytes=2), "expected the sum of its lines, 8; found 7"),
    "rank twice": (lambda plan: plan["ranks"].append(plan["ranks"][1]), "ranks; expected each of 2, once; found 3"),
    "rank missing": (lambda plan: plan["ranks"].pop(), "ranks; expected each of 2, once; found 1"),
    "no ranks": (lambda plan: plan["ranks"].clear(), "ranks; expected each of 2, once; found 0"),
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
    "huge": (lambda plan: plan["ranks"][1].update(weights_bytes=2**53), "not a plan"),
}


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_a_plan_that_does_not_add_up_is_refused(lie: Callable[[dict[str, Any]], object], said: str) -> None:
    try:
        assert said in refusal(lie)
    except TonnageError as error:
        assert said in str(error)  # noqa: PT017 - refused while it is read
