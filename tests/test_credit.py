"""The credit estimator, against a reported case and by law."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tonnage.credit import (
    CreditBound,
    CreditChoice,
    CreditInputs,
    choose_permille,
    credit_estimate,
    credit_savings,
    worst_rank_bound,
)
from tonnage.errors import CreditError
from tonnage.units import MIB, gib, parse_size

SEED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "seed_case.json").read_text())
MEASURED = (SEED["measured"]["largest_rank_bytes"], SEED["measured"]["smallest_rank_bytes"])


def seed_inputs() -> CreditInputs:
    return CreditInputs(
        device_bytes=SEED["stored_bytes"] + SEED["draft_bytes"],
        tp_size=SEED["tp_size"],
        counted_bf16_bytes=SEED["counted_projection_elements"] * 2,
        latent_pair_bytes=SEED["latent_pair_bf16_bytes"],
    )


def test_seed_inputs_follow_from_their_parts() -> None:
    inputs = seed_inputs()
    assert inputs.device_bytes == SEED["device_bytes"] == 802_341_903_064
    assert inputs.counted_bf16_bytes == SEED["counted_projection_bf16_bytes"] == 95_626_985_472
    assert inputs.per_rank_before_credit_bytes == SEED["per_rank_counted_before_credit_bytes"] == 100_292_737_883
    assert inputs.latent_pair_credit_bytes == SEED["latent_pair_credit_bytes"] == 590_872_576
    assert SEED["latent_pair_credit_fraction"] == "1/16"


def test_seed_old_credit_lands_above_what_the_profile_can_hold() -> None:
    inputs = seed_inputs()
    savings = credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, SEED["old_credit_permille"])
    assert savings == SEED["old_credit_savings_bytes"] == 36_450_992_128
    estimate = credit_estimate(inputs.device_bytes, inputs.tp_size, savings)
    assert estimate == 95_736_363_867
    assert gib(estimate, digits=2) == SEED["old_per_rank_estimate_gib_as_reported"] == "89.16"


def test_seed_measured_ranks() -> None:
    largest, smallest = MEASURED
    assert gib(largest) == SEED["measured"]["largest_rank_gib_as_reported"] == "88.034"
    assert gib(smallest) == SEED["measured"]["smallest_rank_gib_as_reported"] == "88.024"
    assert largest - smallest == 27 * 3 * 128 * 1024 * 33 // 32 == 10_948_608
    assert (SEED["measured"]["exports"], SEED["measured"]["identical_across_exports"]) == (12, True)


def test_seed_bound_of_the_worst_rank() -> None:
    bound = worst_rank_bound(seed_inputs(), MEASURED)
    assert bound.savings_bytes == SEED["worst_rank_bound_bytes"] == 46_133_217_240
    assert bound.projections_bytes == 46_133_217_240 - 590_872_576
    assert bound.fraction_text() == SEED["worst_rank_bound_percent_as_reported"] == "47.62"
    assert bound.fraction_text(digits=0) == "47"


def test_seed_chosen_credit() -> None:
    choice = choose_permille(seed_inputs(), MEASURED)
    assert choice.permille == SEED["new_credit_permille"] == 475
    assert choice.savings_bytes == SEED["new_credit_savings_bytes"] == 46_013_690_675
    assert choice.estimate_bytes == SEED["new_per_rank_estimate_bytes"] == 94_541_026_549
    assert gib(choice.estimate_bytes, digits=2) == SEED["new_per_rank_estimate_gib_as_reported"] == "88.05"
    assert choice.headroom_bytes == SEED["headroom_over_largest_rank_bytes"] == 14_940_821
    assert choice.headroom_bytes // MIB == int(SEED["headroom_mib_as_reported"]) == 14


def test_seed_ideal_reduction_is_mxfp8_against_bf16() -> None:
    saved_permille = (64 - 33) * 1000 // 64  # 33 bytes of MXFP8 for 64 of BF16
    assert saved_permille == 484
    assert SEED["ideal_reduction_percent_as_reported"] == "48.4"


def test_seed_profile_is_refused_with_the_old_credit_and_fits_with_the_new() -> None:
    profile = SEED["profile"]
    supply = parse_size(profile["supply_gib_as_reported"] + "GiB")
    fixed_old = parse_size(profile["fixed_gib_with_old_credit_as_reported"] + "GiB")
    inputs = seed_inputs()
    old, new = (
        credit_estimate(
            inputs.device_bytes,
            inputs.tp_size,
            credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, permille),
        )
        for permille in (SEED["old_credit_permille"], SEED["new_credit_permille"])
    )
    fixed_new = fixed_old - old + new
    assert (fixed_old <= supply) is profile["fits_with_old_credit"] is False
    assert (fixed_new <= supply) is profile["fits_with_new_credit"] is True
    assert gib(supply - fixed_new, digits=2) == "1.07"


def test_fraction_of_the_bound_is_never_rounded_up() -> None:
    def percent(device: int, measured: int, counted: int) -> str:
        inputs = CreditInputs(device_bytes=device, tp_size=1, counted_bf16_bytes=counted)
        return worst_rank_bound(inputs, [measured]).fraction_text()

    assert percent(20_000, 15_239, 9_999) == "47.61"  # 47.6147...
    assert percent(20_000, 10_001, 10_000) == "99.99"
    assert percent(20_000, 20_001, 30_000) == "-0.01"  # -0.0033...
    with pytest.raises(CreditError, match="no counted projection bytes"):
        percent(20_000, 10_000, 0)


def test_one_byte_more_at_the_edge_is_the_next_lower_credit() -> None:
    inputs = seed_inputs()
    edge = choose_permille(inputs, MEASURED).estimate_bytes
    assert choose_permille(inputs, [edge]).permille == 475
    assert choose_permille(inputs, [edge]).headroom_bytes == 0
    assert choose_permille(inputs, [edge + 1]).permille == 470
    assert choose_permille(inputs, [edge + 1], step=1).permille == 474


def test_the_worst_rank_of_any_package_decides() -> None:
    inputs = seed_inputs()
    assert choose_permille(inputs, [1, *MEASURED, MEASURED[0] + 200_000_000]).permille == 455


REFUSED = {
    "no measurement": ([], 5, "no measured ranks"),
    "empty rank": ([0, 5], 5, "a measured rank holds nothing"),
    "zero step": ([1], 0, "step out of range"),
    "step too large": ([1], 1001, "step out of range"),
    "above any credit": ([501], 5, "a measured rank holds more than the estimate without any credit"),
}


@pytest.mark.parametrize(("measured", "step", "message"), REFUSED.values(), ids=REFUSED)
def test_calibration_is_refused(measured: list[int], step: int, message: str) -> None:
    inputs = CreditInputs(device_bytes=1000, tp_size=2, counted_bf16_bytes=400)
    with pytest.raises(CreditError, match=message):
        choose_permille(inputs, measured, step=step)


def test_impossible_inputs_are_refused_all_at_once() -> None:
    with pytest.raises(CreditError) as caught:
        CreditInputs(device_bytes=-1, tp_size=0, counted_bf16_bytes=-2, latent_pair_bytes=-3)
    assert len(caught.value.problems) == 4
    for permille in (-1, 1001):
        with pytest.raises(CreditError, match="expected 0 to 1000 permille"):
            credit_savings(1, 1, permille)
    with pytest.raises(CreditError, match="savings exceed the bytes"):
        credit_estimate(10, 2, 11)


def test_credit_larger_than_the_checkpoint_is_passed_over() -> None:
    inputs = CreditInputs(device_bytes=100, tp_size=1, counted_bf16_bytes=200)
    assert choose_permille(inputs, [10]).permille == 450


@dataclass(frozen=True)
class Case:
    inputs: CreditInputs
    measured: list[int]
    step: int


sizes = st.integers(0, 1 << 42)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    inputs = CreditInputs(
        device_bytes=draw(st.integers(1, 1 << 42)),
        tp_size=draw(st.integers(1, 64)),
        counted_bf16_bytes=draw(sizes),
        latent_pair_bytes=draw(sizes),
    )
    assume(inputs.latent_pair_credit_bytes <= inputs.device_bytes)
    most = inputs.per_rank_before_credit_bytes - inputs.latent_pair_credit_bytes // inputs.tp_size
    assume(most >= 1)
    measured = draw(st.lists(st.integers(1, most), min_size=1, max_size=16))
    return Case(inputs=inputs, measured=measured, step=draw(st.integers(1, 1000)))


@given(cases())
def test_estimate_never_lands_under_a_measurement(case: Case) -> None:
    choice = choose_permille(case.inputs, case.measured, step=case.step)
    assert choice.estimate_bytes >= max(case.measured)
    assert choice.headroom_bytes >= 0
    assert choice.permille % case.step == 0


@given(cases())
def test_the_next_step_would_land_under_a_measurement(case: Case) -> None:
    choice = choose_permille(case.inputs, case.measured, step=case.step)
    assume(choice.permille + case.step <= 1000)
    inputs = case.inputs
    more = credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, choice.permille + case.step)
    assert inputs.device_bytes // inputs.tp_size - more // inputs.tp_size < max(case.measured)


@given(cases(), st.integers(1, 1 << 30))
def test_a_larger_measurement_never_raises_the_credit(case: Case, more: int) -> None:
    before = choose_permille(case.inputs, case.measured, step=case.step)
    try:
        after = choose_permille(case.inputs, [*case.measured, max(case.measured) + more], step=case.step)
    except CreditError:
        return
    assert after.permille <= before.permille


def test_values_are_frozen() -> None:
    bound = CreditBound(inputs=seed_inputs(), largest_measured_bytes=1)
    with pytest.raises(AttributeError):
        CreditChoice(bound=bound, permille=1, step_permille=1).permille = 2  # type: ignore[misc]
