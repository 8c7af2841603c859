"""JSON has the fields of the contract as plain integers; tables add up to what they say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.api import Checkpoint, PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.inspection import inspect_assignment
from tonnage.memory.supply import parse_supply
from tonnage.profile import parse_profile
from tonnage.report.documents import inspect_document, plan_document
from tonnage.report.tables import inspect_table, plan_table, render

CONFIGS = Path(__file__).parent / "data" / "configs"


def opened(name: str) -> Checkpoint:
    return checkpoint_from_config(json.loads((CONFIGS / f"{name}.json").read_text()), name=name, digest="d" * 64)


CASES: dict[str, tuple[str, PlanRequest]] = {
    "fits": ("Qwen__Qwen3-8B", PlanRequest(tp=2, supply=parse_supply("40GiB"), reserve_bytes=1 << 30)),
    "refused": ("Qwen__Qwen3-8B", PlanRequest(tp=1, supply=parse_supply("8GiB"), engine="vllm")),
    "no supply": ("Qwen__Qwen3-8B", PlanRequest(tp=4)),
    "converted": ("Qwen__Qwen3-8B", PlanRequest(tp=2, convert="mxfp8")),
    "experts, stages": ("Qwen__Qwen3-30B-A3B", PlanRequest(tp=4, ep=4, pp=2, engine="vllm")),
    "uneven": ("Kimi-K3.1-Pro", PlanRequest(tp=8, convert="mxfp8")),
    "credit": (
        "Kimi-K3.1-Pro",
        PlanRequest(tp=8, estimator="credit", credit_permille=475, supply=parse_supply("94GiB")),
    ),
}


def document(name: str, request: PlanRequest) -> dict[str, Any]:
    request = replace(request, profile=parse_profile("c4-p4096"))
    checkpoint = opened(name)
    written = plan_document(checkpoint, request, plan_checkpoint(checkpoint, request), ["--tp 2"])
    reloaded: dict[str, Any] = json.loads(json.dumps(written))
    assert reloaded == written  # nothing but JSON values in it
    return reloaded


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize(("name", "request_"), CASES.values(), ids=CASES)
def test_plan_document_has_the_fields_of_the_contract(name: str, request_: PlanRequest) -> None:
    plan = document(name, request_)
    assert plan["schema"] == "tonnage.plan/1"
    assert plan["checkpoint"].keys() == {"name", "digest", "family"}
    assert plan["topology"] == {"tp": request_.tp, "ep": request_.ep, "pp": request_.pp, "dcp": 1}
    assert plan["profile"] == {
        "name": "c4-p4096", "concurrency": 4, "prefill_chunk_tokens": 4096, "context_tokens": None, "kv_dtype": None,
    }  # fmt: skip
    for rank in plan["ranks"]:
        assert rank.keys() >= {"rank", "lines", "weights_bytes", "fixed_bytes", "cache_bytes", "spare_bytes"}
        for line in rank["lines"]:
            assert line.keys() == {"component", "nbytes", "bound_nbytes", "transient", "basis", "source"}
            assert line["source"]
            assert line["basis"] in ("exact", "modelled", "calibrated", "assumed")
    assert plan["cache"].keys() >= {"bytes_per_token_per_rank", "capacity_tokens"}
    assert plan["numerics"].keys() == {"class", "converted"}
    assert plan.keys() >= {"supply_bytes", "binding_rank", "fits", "reasons", "suggestions"}
    assert plan["suggestions"] == ["--tp 2"]


@pytest.mark.parametrize(("name", "request_"), CASES.values(), ids=CASES)
def test_every_number_of_a_plan_document_is_a_plain_integer(name: str, request_: PlanRequest) -> None:
    found = numbers(document(name, request_))
    assert found
    assert all(type(number) is int for number in found)


@pytest.mark.parametrize(("name", "request_"), CASES.values(), ids=CASES)
def test_lines_of_every_rank_add_up(name: str, request_: PlanRequest) -> None:
    plan = document(name, request_)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(request_.tp * request_.pp))
    for rank in plan["ranks"]:
        lines = rank["lines"]
        weights = [line for line in lines if line["component"].partition(".")[0] in ("weights", "padding", "engine")]
        assert rank["weights_bytes"] == sum(line["nbytes"] for line in weights)
        transient = [line["bound_nbytes"] for line in lines if line["transient"]]
        assert rank["fixed_bytes"] == sum(line["bound_nbytes"] for line in lines if not line["transient"]) + max(
            transient, default=0
        )
        if plan["supply_bytes"] is not None:
            assert rank["spare_bytes"] == plan["supply_bytes"] - rank["fixed_bytes"] - rank["cache_bytes"]
    largest = max(rank["fixed_bytes"] for rank in plan["ranks"])
    assert plan["ranks"][plan["binding_rank"]]["fixed_bytes"] == largest
    assert plan["fits"] == (None if plan["supply_bytes"] is None else largest <= plan["supply_bytes"])
    assert bool(plan["reasons"]) == (plan["fits"] is False)


def test_conversion_is_listed_with_its_bytes() -> None:
    converted = document(*CASES["converted"])["numerics"]
    assert converted["class"] == "converted"
    # Qwen3-8B, down_proj: 36 layers of 4096 x 12288, 33/64 of their BF16 bytes.
    down = next(row for row in converted["converted"] if row["module"].endswith("down_proj"))
    assert down["bytes_before"] == 36 * 4096 * 12_288 * 2
    assert down["bytes_after"] * 64 == down["bytes_before"] * 33
    assert document(*CASES["fits"])["numerics"] == {"class": "neutral", "converted": []}
    assert document(*CASES["credit"])["numerics"]["class"] == "unknown"


@pytest.mark.parametrize("name", ["Qwen__Qwen3-8B", "Kimi-K3.1-Pro", "deepseek-ai__DeepSeek-V3"])
def test_inspect_document_adds_up_in_plain_integers(name: str) -> None:
    checkpoint = opened(name)
    stated = json.loads(json.dumps(inspect_document(checkpoint, inspect_assignment(checkpoint.assignment))))
    assert stated["schema"] == "tonnage.inspect/1"
    assert stated["source"] == "config"
    for table in ("by_role", "by_dtype", "by_format"):
        assert sum(row["nbytes"] for row in stated[table]) == stated["payload_bytes"]
        assert sum(row["tensors"] for row in stated[table]) == stated["tensors"]
    assert all(type(number) is int for number in numbers(stated))


def test_inspect_document_of_kimi_k31_prints_the_counted_bytes() -> None:
    checkpoint = opened("Kimi-K3.1-Pro")
    stated = inspect_document(checkpoint, inspect_assignment(checkpoint.assignment))
    assert (stated["tensors"], stated["payload_bytes"]) == (497_340, 1_561_217_377_280)
    assert (stated["counted_projection_bytes"], stated["latent_pair_bytes"]) == (95_626_985_472, 9_453_961_216)


# --- tables ------------------------------------------------------------------------------------------------------------

ROW = re.compile(r"^(?P<name>[\w.]+) {2,}(?P<bytes>[\d,]+) {2,}")


def rows(text: str) -> list[tuple[str, int]]:
    found = (ROW.match(line) for line in text.splitlines())
    return [(row["name"], int(row["bytes"].replace(",", ""))) for row in found if row]


@pytest.mark.parametrize(("name", "request_"), CASES.values(), ids=CASES)
def test_ledger_table_adds_up_to_its_last_rows(name: str, request_: PlanRequest) -> None:
    checkpoint = opened(name)
    plan = plan_checkpoint(checkpoint, request_)
    printed = rows(render(plan_table(checkpoint, request_, plan, []), width=400))
    totals = dict(printed[-2:])
    assert totals.keys() == {"weights", "fixed"}
    lines = printed[:-2]
    assert sum(nbytes for _, nbytes in lines) == totals["fixed"] == plan.ranks[plan.binding_rank].fixed_bytes
    outside = ("reserve", "draft.weights")
    assert sum(nbytes for line, nbytes in lines if line not in outside) == totals["weights"]


@pytest.mark.parametrize(
    ("case", "verdict"), [("fits", "FITS: spare"), ("refused", "REFUSED: "), ("no supply", "so no verdict")]
)
def test_table_ends_with_the_verdict(case: str, verdict: str) -> None:
    name, request_ = CASES[case]
    checkpoint = opened(name)
    text = render(plan_table(checkpoint, request_, plan_checkpoint(checkpoint, request_), ["--tp 2"]), width=200)
    assert verdict in text
    assert ("would fit with: --tp 2" in text) is (case == "refused")


def test_ranks_that_differ_are_listed_with_their_bytes() -> None:
    name, request_ = CASES["uneven"]
    checkpoint = opened(name)
    plan = plan_checkpoint(checkpoint, request_)
    text = render(plan_table(checkpoint, request_, plan, []), width=1000)
    sizes = {ledger.fixed_bytes for ledger in plan.ranks}
    assert len(sizes) > 1
    for size in sizes:
        assert f"{size:,} bytes" in text


def test_inspect_table_adds_up() -> None:
    checkpoint = opened("deepseek-ai__DeepSeek-V3")
    inspection = inspect_assignment(checkpoint.assignment)
    text = render(inspect_table(checkpoint, inspection), width=200)
    assert f"{inspection.total.nbytes:,} bytes" in text
    table = re.findall(r"^(\w+) +([\d,]+) +([\d,]+) +[\d.]+ *$", text, re.MULTILINE)
    total = sum(int(nbytes.replace(",", "")) for _, _, nbytes in table)
    assert total == 3 * inspection.total.nbytes  # by role, by storage format, by dtype


def test_table_is_plain_text_and_its_rows_have_the_width_asked_for() -> None:
    name, request_ = CASES["refused"]
    checkpoint = opened(name)
    text = render(plan_table(checkpoint, request_, plan_checkpoint(checkpoint, request_), []), width=100)
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("weights.")]
    assert rows
    assert max(map(len, rows)) <= 100
