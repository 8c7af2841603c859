"""``tonnage explain``: one rank line by line, what is compared and what is not, and when the plan was below."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_documents import by_hand
from samples import LLAMA
from tonnage.api import PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.explain import Explanation, explain, explain_document, read_planned, with_draft
from tonnage.measure.record import Measurement, MeasurementError, read_measurement
from tonnage.recipes.schema import ROLES
from tonnage.report.documents import plan_document
from tonnage.report.measured import explain_table
from tonnage.report.tables import render

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
Lines = dict[str, int | tuple[int, int]]
DATA = Path(__file__).resolve().parent / "data"
K31 = "src/tonnage/synth/kimi_k31.json"
DIGEST, OTHER = "a" * 64, "b" * 64


def plan_of(*ranks: Lines, **changes: Any) -> dict[str, Any]:
    """A plan with these lines; two numbers are a value and its bound."""
    return by_hand((map(line, rank.items()) for rank in ranks), **{"engine": "split", **changes})


def line(item: tuple[str, int | tuple[int, int]]) -> dict[str, Any]:
    component, size = item
    nbytes, bound = size if isinstance(size, tuple) else (size, size)
    return {"component": component, "nbytes": nbytes, "bound_nbytes": bound}


def record_of(*ranks: dict[str, int] | int, **changes: Any) -> dict[str, Any]:
    """A record of ranks by class, or of payload bytes alone."""
    rows: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        classes = {} if isinstance(rank, int) else rank
        rows.append(
            {
                "rank": number,
                "payload_bytes": rank if isinstance(rank, int) else sum(rank.values()),
                "by_class": [
                    {"class": name, "dtype": "BF16", "nbytes": nbytes, "tensors": 1} for name, nbytes in classes.items()
                ],
            }
        )
    sizes = {"tp": len(ranks), "ep": 1, "pp": 1}
    return {"ranks": rows, "topology": sizes, "checkpoint": {"digest": DIGEST}, "convert": "none"} | changes


def explained(plan: dict[str, Any], record: dict[str, Any], rank: int | None = None) -> Explanation:
    return explain(read_planned(json.dumps(plan).encode(), "plan.json"), measurement_of(record), rank=rank)


def measurement_of(record: dict[str, Any]) -> Measurement:
    return read_measurement(json.dumps(record).encode(), "record.json")


def rows(explanation: Explanation) -> list[tuple[str, int | None, int | None, int | None]]:
    return [(one.component, one.bound_bytes, one.measured_bytes, one.difference_bytes) for one in explanation.lines]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_the_largest_difference_comes_first_and_what_is_not_compared_last() -> None:
    plan = plan_of(
        {"weights.mlp": 100, "weights.norm": 8, "weights.head": (40, 45), "reserve": 7, "draft.weights": 900}
    )
    found = explained(plan, record_of({"mlp": 90, "norm": 8, "head": 60}))
    assert rows(found) == [
        ("weights.head", 45, 60, -15),
        ("weights.mlp", 100, 90, 10),
        ("weights.norm", 8, 8, 0),
        ("draft.weights", 900, None, None),
        ("reserve", 7, None, None),
    ]
    assert [one.remark for one in found.lines[3:]] == ["not measured", "not measured"]
    assert (found.total.planned_bytes, found.total.bound_bytes, found.total.measured_bytes) == (148, 153, 158)
    assert (found.verdict, [(one.rank, one.nbytes) for one in found.below]) == ("below", [(0, 5)])


def test_padding_of_a_slice_is_in_the_files_and_what_an_engine_adds_is_not() -> None:
    plan = plan_of({"weights.head": 40, "padding.head": 5, "padding.fused_qkv": 3, "engine.kv_scales": 2})
    found = explained(plan, record_of({"head": 45}))
    assert rows(found) == [
        ("weights.head", 45, 45, 0),
        ("padding.fused_qkv", 3, None, None),
        ("engine.kv_scales", 2, None, None),
    ]
    assert [one.remark for one in found.lines] == [
        "5 bytes of padding in it", "added by the engine, in no file", "added by the engine, in no file",
    ]  # fmt: skip
    assert (found.verdict, found.total.bound_bytes) == ("equal", 45)


def test_what_only_one_side_has_is_shown() -> None:
    found = explained(plan_of({"weights.mtp": 30, "weights.mlp": 9}), record_of({"mlp": 9, "vision": 4, "unknown": 2}))
    assert rows(found) == [
        ("weights.mtp", 30, 0, 30),
        ("weights.vision", 0, 4, -4),
        ("weights.unknown", 0, 2, -2),
        ("weights.mlp", 9, 9, 0),
    ]
    assert [one.remark for one in found.lines] == ["", "not planned", "not planned", ""]


@pytest.mark.parametrize("record", [record_of(80), record_of({"unknown": 80})], ids=["no classes", "all unknown"])
def test_without_classes_only_the_total_is_compared(record: dict[str, Any]) -> None:
    found = explained(plan_of({"weights.mlp": 60, "weights.norm": 30}), record)
    assert rows(found) == [("weights.mlp", 60, None, None), ("weights.norm", 30, None, None)]
    assert {one.remark for one in found.lines} == {"measured in total only"}
    assert (found.total.difference_bytes, found.verdict) == (10, "above")


def test_a_credit_is_compared_in_total() -> None:
    found = explained(plan_of({"weights.credit": 100}, estimator="credit"), record_of({"mlp": 100}))
    assert rows(found) == [("weights.credit", 100, None, None)]
    assert found.verdict == "equal"


@given(
    planned=st.dictionaries(st.sampled_from(ROLES), st.integers(0, 99)),
    padded=st.dictionaries(st.sampled_from(ROLES), st.integers(0, 9)),
    measured=st.dictionaries(st.sampled_from((*ROLES, "unknown")), st.integers(0, 99)),
)
def test_lines_add_up_to_the_total(planned: dict[str, int], padded: dict[str, int], measured: dict[str, int]) -> None:
    lines: Lines = {f"weights.{role}": size for role, size in planned.items()}
    lines |= {f"padding.{role}": size for role, size in padded.items()}
    found = explained(plan_of(lines), record_of(measured))
    assert sum(one.bound_bytes or 0 for one in found.lines) == sum(planned.values()) + sum(padded.values())
    assert found.total.measured_bytes == sum(measured.values())
    if any(role != "unknown" for role in measured):
        assert sum(one.difference_bytes or 0 for one in found.lines) == found.total.difference_bytes
        sizes = [abs(one.difference_bytes or 0) for one in found.lines]
        assert sizes == sorted(sizes, reverse=True)
    assert bool(found.below) == (sum(measured.values()) > sum(planned.values()) + sum(padded.values()))


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_the_rank_that_holds_most_is_explained_and_any_rank_contradicts() -> None:
    plan = plan_of({"weights.mlp": 10}, {"weights.mlp": 20}, {"weights.mlp": 30})
    found = explained(plan, record_of(12, 20, 25))
    assert (found.rank, found.verdict) == (2, "above")
    assert [(one.rank, one.nbytes) for one in found.below] == [(0, 2)]
    second = explained(plan, record_of(12, 20, 25), rank=1)
    assert (second.rank, second.verdict, second.below) == (1, "equal", ())


def test_a_report_is_held_against_the_rank_it_names_or_the_largest_planned() -> None:
    plan = plan_of({"weights.mlp": 10}, {"weights.mlp": 20})
    named = explained(plan, {"measured": {"largest_rank_bytes": 12, "smallest_rank_bytes": 11, "largest_rank": 0}})
    assert (named.rank, [one.nbytes for one in named.below]) == (0, [2])
    both = explained(
        plan_of({"weights.mlp": 10}, {"weights.mlp": 9}),
        {"measured": {"largest_rank_bytes": 12, "smallest_rank_bytes": 11, "largest_rank": 1}},
    )
    assert [(one.rank, one.nbytes) for one in both.below] == [(1, 3), (None, 1)]
    unnamed = explained(plan, {"measured": {"largest_rank_bytes": 12, "smallest_rank_bytes": 11}})
    assert (unnamed.rank, unnamed.total.bound_bytes, unnamed.below) == (None, 20, ())
    assert any("held against the one planned to hold most" in note for note in unnamed.notes)
    assert any("does not say of which checkpoint" in note for note in unnamed.notes)


def test_another_conversion_is_noted() -> None:
    found = explained(plan_of({"weights.mlp": 10}), record_of({"mlp": 5}, convert="mxfp8"))
    assert found.notes == ("planned neutral, measured converted (convert mxfp8)",)
    assert explained(plan_of({"weights.mlp": 10}), record_of({"mlp": 5})).notes == ()


# --- refusals ---------------------------------------------------------------------------------------------------------

PLAN = plan_of({"weights.mlp": 10}, {"weights.mlp": 10})
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], int | None, str]] = {
    "other checkpoint": (PLAN, record_of(1, 1, checkpoint={"digest": OTHER}), None, f"record.json: of another checkpoint than the plan (one made from config.json alone has a digest of its own); expected {DIGEST}; found {OTHER}"),
    "other TP size": (PLAN, record_of(1), None, "record.json: cut for another topology; expected tp2 ep1 pp1; found tp1"),
    "other expert size": (PLAN, record_of(1, 1, topology={"tp": 2, "ep": 2}), None, "expected tp2 ep1 pp1; found ep2"),
    "other ranks": (PLAN, {"ranks": [{"payload_bytes": 1}]}, None, "record.json: other ranks than planned; expected 2 ranks (tp2 ep1 pp1); found 1"),
    "rank beyond": (PLAN, {"measured": {"largest_rank_bytes": 1, "smallest_rank_bytes": 1, "largest_rank": 5}}, None, "other ranks than planned"),
    "rank not measured": (PLAN, record_of(1, 1), 2, "record.json: rank 2 was not measured; expected 0, 1; found --rank 2"),
    "not a plan": ({"schema": "tonnage.plan/1"}, record_of(1), None, "plan.json: not a plan; expected what `tonnage plan --json` prints"),
    "other document": (plan_of({}, schema="tonnage.prepare/1"), record_of(1), None, "plan.json: not a plan"),
    "fraction": (plan_of({"weights.mlp": 1.5}), record_of(1), None, "Expected `int`, got `float`"),  # type: ignore[dict-item]
    "negative": (plan_of({"weights.mlp": -1}), record_of(1), None, "Expected `int` >= 0"),
    "bound below": (plan_of({"weights.mlp": (2, 1)}), record_of(1), None, "plan.json: rank 0: weights.mlp above its bound; expected 1"),
    "ranks of no topology": (plan_of({}, topology={"tp": 3, "ep": 1, "pp": 1, "dcp": 1}), record_of(1, 1, 1), None, "plan.json: ranks of a plan; expected 0..2 (tp3 ep1 pp1); found 1"),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "record", "rank", "said"), BAD.values(), ids=BAD)
def test_what_does_not_belong_together_is_refused(plan, record, rank, said):
    with pytest.raises(MeasurementError) as caught:
        explained(plan, record, rank)
    assert said in str(caught.value)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory, tonnage: Tonnage) -> Callable[[int], Path]:
    """The seed case planned with a credit in permille."""
    home = tmp_path_factory.mktemp("seed")

    def planned(permille: int) -> Path:
        words = ("--tp", 8, "--estimator", "credit", "--device-bytes", 802_341_903_064, "--credit-permille", permille)
        done = tonnage("plan", K31, *words, "--json")
        assert done.returncode == 0, done.stderr
        path = home / f"{permille}.json"
        path.write_text(done.stdout)
        return path

    return planned


def test_names_and_numbers_are_whole_at_80_columns() -> None:
    large = 180_807_008_256
    lines: Lines = {"weights.shared_expert": large, "weights.recurrent": 7, "reserve": large}
    alike = explained(plan_of(lines), record_of(large + 7))
    bounded = explained(plan_of({**lines, "weights.recurrent": (7, 9)}), record_of(large + 7))
    for explanation, columns in ((alike, 5), (bounded, 6)):
        text = render(explain_table(explanation), width=80)
        assert len(re.split("  +", text.splitlines()[1])) == columns
        assert re.search(r"^weights\.shared_expert +180,807,008,256", text, re.MULTILINE)
        assert f"{large + 7:,}" in text
        assert not any(line.endswith(" ") for line in text.splitlines())
    assert max(map(len, render(explain_table(alike), width=80).splitlines())) <= 80


def test_the_seed_case_is_above_its_largest_rank_by_the_reported_headroom(seed, tonnage: Tonnage) -> None:
    done = tonnage("explain", "--plan", seed(475), "--measured", DATA / "seed_case.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["rank"], found["verdict"]) == ("tonnage.explain/1", 0, "above")
    assert (found["bound_bytes"], found["measured_bytes"]) == (94_541_026_549, 94_526_085_728)
    assert found["difference_bytes"] == 14_940_821
    assert (found["below"], found["estimator"]) == ([], "credit")


def test_a_credit_beyond_the_bound_is_contradicted_with_exit_5(seed, tonnage: Tonnage) -> None:
    done = tonnage("explain", "--plan", seed(480), "--measured", DATA / "seed_case.json")
    assert done.returncode == 5
    # 100,292,737,883 - (95,626,985,472 x 480 / 1000 + 590,872,576) / 8 = 94,481,259,683
    assert "94,481,259,683" in done.stdout
    assert "CONTRADICTED: the plan is below what was measured: rank 0 by 44,826,045 bytes" in done.stdout


def test_an_unusable_plan_is_one_line_and_exit_2(tmp_path: Path, tonnage: Tonnage) -> None:
    done = tonnage("explain", "--plan", tmp_path / "plan.json", "--measured", DATA / "seed_case.json")
    assert (done.returncode, done.stdout) == (2, "")
    line = "cannot be read; expected a readable regular file; found No such file or directory"
    assert done.stderr == f"tonnage: {tmp_path / 'plan.json'}: {line}\n"


def test_every_plan_document_can_be_read_and_says_the_same() -> None:
    checkpoint = checkpoint_from_config(LLAMA | {"vocab_size": 301}, name="small", digest=DIGEST)
    for engine in ("split", "vllm", "sglang", "exllamav3"):
        request = PlanRequest(tp=2, engine=engine, draft_bytes=5, reserve_bytes=7)
        plan = plan_checkpoint(checkpoint, request)
        document = plan_document(checkpoint, request, plan, ())
        measured = record_of(*(ledger.weights_bytes for ledger in plan.ranks))
        found = explained(document, measured)
        engines = sum(one.nbytes for one in plan.ranks[0].lines if one.component.startswith("engine."))
        assert found.total.difference_bytes == -engines
        assert [one.component for one in found.lines if one.remark == "not measured"] == ["reserve", "draft.weights"]
        assert explain_document(found)["lines"][0]["difference_bytes"] is None


def test_measured_ranks_that_hold_the_draft_are_held_against_weights_and_draft() -> None:
    checkpoint = checkpoint_from_config(LLAMA, name="small", digest=DIGEST)
    request = PlanRequest(tp=2, draft_bytes=1000)
    document = plan_document(checkpoint, request, plan_checkpoint(checkpoint, request), ())
    plan = read_planned(json.dumps(document).encode(), "plan.json")
    weights = plan.ranks[0].role_bytes
    report = {"tp_size": 2, "largest_rank_bytes": weights + 500, "smallest_rank_bytes": weights}
    measured = read_measurement(json.dumps(report).encode(), "measured.json")
    assert [one.rank for one in explain(plan, measured).below]
    drafted = explain(with_draft(plan), measured)
    assert drafted.below == ()
    assert drafted.total.difference_bytes == 0
