"""Planned KV capacity against what vLLM printed, as ``docs/kv-agreement.md`` reports it."""

from __future__ import annotations

from samples import load_script

agreement = load_script("kv_agreement")


def test_report_is_up_to_date() -> None:
    assert agreement.report(list(agreement.answers())) == agreement.REPORT.read_text()


def test_nine_of_ten_rows_with_an_exact_model_are_within_one_percent() -> None:
    compared = [a for a in agreement.answers() if not a.aside and a.tokens is not None and a.row["exact"]]
    assert len(compared) >= 55
    assert 10 * sum(a.is_close for a in compared) >= 9 * len(compared)


def test_every_row_outside_has_its_reason() -> None:
    outside = [a for a in agreement.answers() if not a.aside and a.tokens is not None and not a.is_close]
    assert {a.row["id"] for a in outside} <= set(agreement.REASONS)


def test_what_the_engine_refused_the_plan_refuses() -> None:
    refused = [a for a in agreement.answers() if not a.aside and agreement.was_refused(a.row)]
    assert len(refused) >= 8
    assert not any(a.fits for a in refused)


def test_longest_context_of_a_refusal_is_within_two_percent() -> None:
    stated = [a for a in agreement.answers() if not a.aside and a.row.get("longest_tokens")]
    unstated = {
        "qwen3.8-27b-exl3-frontier-build-vllm-tp1-119",
    }
    close = [a for a in stated if abs(a.longest_tokens - a.row["longest_tokens"]) * 50 <= a.row["longest_tokens"]]
    assert {a.row["id"] for a in stated} - {a.row["id"] for a in close} <= unstated <= set(agreement.REASONS)
    assert len(close) >= 6
