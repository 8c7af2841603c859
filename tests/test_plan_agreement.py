"""Whole plans against collected logs, as ``docs/plan-agreement.md`` reports them."""

from __future__ import annotations

from samples import load_script

load_script("kv_agreement")  # the script imports it by name
agreement = load_script("plan_agreement")


def test_report_is_up_to_date() -> None:
    assert agreement.report() == agreement.REPORT.read_text()


def test_weights_are_within_one_percent_on_95_of_100_and_never_above_their_bound() -> None:
    sizes = agreement.weights()
    assert len(sizes) >= 58
    assert 100 * sum(abs(size.error_permille) <= 10 for size in sizes) >= 95 * len(sizes)
    assert all(size.bound >= size.logged for size in sizes)


def test_all_beside_the_cache_is_within_ten_percent_and_never_above_its_bound() -> None:
    sizes = agreement.totals()
    assert len(sizes) >= 42
    errors = sorted(abs(size.error_permille) for size in sizes)
    assert errors[len(errors) // 2] <= 40
    assert errors[-1] <= 100
    assert all(size.bound >= size.logged for size in sizes)


def test_cache_that_a_share_leaves_is_within_one_percent_on_nine_of_ten_and_never_less_than_the_least() -> None:
    sizes = agreement.budgets()
    assert len(sizes) >= 42
    assert 10 * sum(abs(size.error_permille) <= 10 for size in sizes) >= 9 * len(sizes)
    assert all(size.bound <= size.logged for size in sizes)


def test_tokens_of_nine_of_ten_exact_models_are_within_one_percent() -> None:
    exact = [count for count in agreement.tokens() if count.row["exact"]]
    assert len(exact) >= 61
    assert 10 * sum(abs(count.error_permille) <= 10 for count in exact) >= 9 * len(exact)


def test_more_tokens_than_logged_have_a_reason() -> None:
    over = {count.row["id"] for count in agreement.tokens() if count.error_permille > 10}
    assert over <= set(agreement.kv_agreement.REASONS)


def test_what_the_engine_refused_the_plan_refuses_for_its_cache() -> None:
    refused = agreement.refusals()
    assert len(refused) >= 8
    for one in refused:
        assert one.fit.plan.fits is False
        assert "--kv-bytes" in one.fit.plan.reasons[0]


def test_longest_context_is_the_engines_or_what_the_launch_was_is_not_known() -> None:
    stated = [one for one in agreement.refusals() if one.row.get("longest_tokens")]
    far = {one.row["id"] for one in stated if not agreement.is_close(one)}
    assert far <= set(agreement.kv_agreement.REASONS)
    assert len(stated) - len(far) >= 6
