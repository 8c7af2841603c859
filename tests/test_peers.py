"""The published comparison with other tools: how answers are scored, what footnotes say, and that every miss has a reason."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samples import load_script

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Import modules of the benchmark by name."""
    for name in ("kv_agreement", "plan_agreement", "weights_agreement"):
        load_script(name)
    sys.path[:0] = [str(ROOT / "bench" / "peers"), str(ROOT / "bench")]

    def found(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield found
    del sys.path[:2]


@pytest.fixture(scope="module")
def scores(bench) -> Any:
    return bench("planner_scores")


@dataclass
class Case:
    log: str
    weights: int | None = None
    allocated: int | None = None
    cache: float | None = None
    room: int | None = None
    ran: bool | None = None
    reason: str = ""
    aside: str = ""
    question: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.question = {"id": self.log}


def answers(**said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"seconds": 0.002, **one} for name, one in said.items()}


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_answer_below_the_measurement_is_below_zero(scores) -> None:
    assert scores.error(90, 100) == -0.1
    assert scores.error(110, 100) == 0.1
    assert scores.error(100, 100) == 0


@pytest.mark.parametrize(("said", "under"), [(9_940, True), (9_960, False), (10_000, False), (12_000, False)])
def test_under_begins_beyond_what_logs_round(scores, said: int, under: bool) -> None:
    assert scores.is_under(scores.error(said, 10_000)) is under


def test_columns_count_answered_close_and_under(scores) -> None:
    asked = [Case(log=name, weights=1000) for name in "abcd"] + [Case(log="e", cache=1.0)]
    found = answers(a={"weights": 1000}, b={"weights": 1009}, c={"weights": 800}, d={"error": "KeyError: x"})
    assert scores.size_columns(found, asked, "weights") == "3 | 2 | 0.90% | -20.0% | 1 | -20.0%"
    assert scores.size_columns({}, asked, "weights") == "0 |  |  |  |  | "


def test_largest_error_keeps_its_sign(scores) -> None:
    asked = [Case(log="a", weights=1000), Case(log="b", weights=1000)]
    found = answers(a={"weights": 1300}, b={"weights": 800})
    assert " | +30.0% | 1 | -20.0%" in scores.size_columns(found, asked, "weights")


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_rooms_count_refusals_by_what_the_engine_did(scores) -> None:
    asked = [
        Case(log="refused", cache=9.0, room=5, ran=False),
        Case(log="refused too", cache=9.0, room=5, ran=False),
        Case(log="ran", cache=3.0, room=5, ran=True),
        Case(log="ran too", cache=3.0, room=5, ran=True),
        Case(log="not told", cache=3.0, room=5, ran=None),
    ]
    found = answers(**{"refused": {"cache": 9}, "refused too": {"cache": 5}, "ran": {"cache": 6}})
    assert scores.room_columns(found, asked) == "3 of 4 | 1 of 2 | 1 of 2"


def test_whole_verdicts_count_launches_that_ran(scores) -> None:
    asked = [Case(log=name, weights=1, ran=True) for name in "abc"] + [Case(log="d", weights=1, ran=None)]
    found = answers(a={"fits": True}, b={"fits": False}, d={"fits": False})
    assert scores.verdict_columns(found, asked) == "2 of 3 | 1"
    assert scores.verdict_columns({}, asked) == "0 of 3 | "


def test_times_are_of_answers_only(scores) -> None:
    found = {"a": {"seconds": 0.001}, "b": {"seconds": 0.003}, "c": {"seconds": 9, "error": "x"}}
    assert scores.milliseconds(found) == "2.0"
    assert scores.refusals(found, [Case(log=name) for name in "abcd"]) == "1 of 4, most of them x; ended before 1"


# --- footnotes -------------------------------------------------------------------------------------------------------


def test_footnotes_name_every_miss_with_its_reason_and_no_other(scores) -> None:
    asked = [
        Case(log="close", weights=10 * GIB),
        Case(log="above", weights=10 * GIB, reason="a driver"),
        Case(log="below", weights=10 * GIB),
    ]
    found = answers(
        close={"weights": 10 * GIB + 1}, above={"weights": 12 * GIB}, below={"weights": 10 * GIB - GIB // 16}
    )
    lines = scores.footnotes(found, asked, "weights")
    assert lines == ["* `above`, 10.00 GiB: +20.0%; a driver.", "* `below`, 10.00 GiB: -0.6%; not known."]
    assert scores.unexplained(lines) == lines[1:]


def test_a_wrong_verdict_is_a_miss_however_close(scores) -> None:
    ran = Case(log="ran", cache=float(GIB), room=GIB, ran=True, reason="r")
    refused = Case(log="refused", cache=float(GIB), room=GIB, ran=False, reason="r")
    over, under = answers(ran={"cache": GIB + 1}), answers(refused={"cache": GIB})
    assert scores.footnotes(over, [ran], "cache") == ["* `ran`, 1.00 GiB: +0.0% and a wrong verdict; r."]
    assert scores.footnotes(under, [refused], "cache") == ["* `refused`, 1.00 GiB: +0.0% and a wrong verdict; r."]
    assert scores.footnotes(answers(ran={"cache": GIB}), [ran], "cache") == []


# --- the cases as they are -------------------------------------------------------------------------------------------


class Nowhere:
    """Checkpoints nobody reads."""

    def of(self, _: object) -> str:
        return "/nowhere"


def test_every_miss_of_the_cache_has_a_reason_and_every_refusal_is_refused(bench, scores) -> None:
    cases = bench("planner_cases")
    asked = [case for case in cases.cache_cases(Nowhere()) if not case.aside]
    assert len(asked) >= 55
    assert sum(case.ran is False for case in asked) >= 4
    found = {}
    for row in cases.plan_agreement.compared_caches():
        if row.get("context_tokens"):
            cache, context = cases.kv_agreement.plan(
                row, cases.plan_agreement.cache_checkpoint(row).assignment.blueprint
            )
            found[f"cache {row['id']}"] = {"cache": cache.needed_bytes(1, context), "seconds": 0.0}
    assert scores.unexplained(scores.footnotes(found, asked, "cache")) == []
    assert all(scores.refuses(found, case) for case in asked if case.ran is False)
    assert not any(scores.refuses(found, case) for case in asked if case.ran)


def test_logs_that_do_not_tell_a_request_are_set_aside_with_the_reason(bench) -> None:
    aside = [case for case in bench("planner_cases").cache_cases(Nowhere()) if case.aside]
    assert {case.log for case in aside} == {
        "gemma-4-26b-a4b-it-vllm-tp1-279",
        "kimi-linear-48b-a3b-instruct-awq-4bit-vllm-tp2-293",
    }


def test_every_miss_of_the_weights_has_a_reason_and_no_bound_is_under(bench, scores) -> None:
    cases = bench("planner_cases")
    asked = list(cases.weight_cases(Nowhere()))
    sizes = {f"weights {size.row['id']}": size for size in cases.plan_agreement.weights()}
    found = {name: {"weights": size.expected, "bound": size.bound} for name, size in sizes.items()}
    assert len(asked) >= 58
    assert scores.unexplained(scores.footnotes(found, asked, "weights")) == []
    assert not any(of < 0 for _, of in scores.errors_of(found, asked, "weights", "bound"))


def test_classes_are_one_model_of_a_family_on_one_rank_and_on_eight(bench) -> None:
    asked = list(bench("planner_cases").class_cases(Nowhere()))
    models = {case.question["model"] for case in asked}
    assert len(models) >= 30
    assert {case.question["tp"] for case in asked} == {1, 8}
    assert len({(case.question["model"], case.question["tp"]) for case in asked}) == len(asked)


# --- the page --------------------------------------------------------------------------------------------------------


def test_tables_are_put_between_their_lines_and_nowhere_else(bench) -> None:
    peers = bench("peers")
    page = f"before\n{peers.begin('verify')}\nold\n{peers.end('verify')}\nafter\n"
    written = peers.put(page, "verify", "new\n")
    assert written == f"before\n{peers.begin('verify')}\n\nnew\n\n{peers.end('verify')}\nafter\n"
    assert peers.put(written, "verify", "new") == written


@pytest.mark.parametrize("page", ["", "{begin}", "{end}{begin}", "{begin}{end}{begin}", "{begin}{end}{end}"])
def test_a_page_without_the_two_lines_is_refused(bench, page: str) -> None:
    peers = bench("peers")
    page = page.format(begin=peers.begin("verify"), end=peers.end("verify"))
    with pytest.raises(ValueError, match="no place"):
        peers.put(page, "verify", "new")


def test_the_page_has_a_place_for_every_section(bench) -> None:
    peers = bench("peers")
    page = peers.RESULTS.read_text()
    for name in peers.SECTIONS:
        assert page.count(peers.begin(name)) == page.count(peers.end(name)) == 1
        assert peers.put(page, name, "x") != page


# --- conversion ------------------------------------------------------------------------------------------------------


def test_equal_share_counts_bytes_and_takes_another_size_as_unequal(bench, tmp_path: Path) -> None:
    converting = bench("converting")
    (tmp_path / "a").write_bytes(bytes(range(8)))
    (tmp_path / "b").write_bytes(bytes([0, 1, 2, 3, 4, 5, 9, 9]))

    def stored(name: str, begin: int, nbytes: int) -> Any:
        return converting.Stored(path=tmp_path / name, begin=begin, nbytes=nbytes)

    left = {"x": stored("a", 0, 8), "y": stored("a", 4, 4)}
    assert converting.equal_share(left, {"x": stored("b", 0, 8)}, ["x"]) == 0.75
    assert converting.equal_share(left, {"x": stored("b", 0, 8)}, ["x", "y"]) == 0.5
    assert converting.equal_share(left, {"x": stored("b", 0, 7)}, ["x"]) == 0
    assert converting.equal_share(left, left, ["x", "y"]) == 1
    with pytest.raises(ValueError, match="no converted"):
        converting.equal_share(left, left, [])
