"""The ledger, the verdict and its reasons; the seed case through the public call; drafts and credits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.api import Checkpoint, PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.errors import CreditError, PlacementError
from tonnage.inspection import counted_bytes
from tonnage.memory.supply import Supply, parse_supply
from tonnage.placed_weights import LedgerLine, exact_line
from tonnage.plan import Plan, RankLedger
from tonnage.report.documents import numerics
from tonnage.suggestions import suggest
from tonnage.units import GIB

DATA = Path(__file__).parent / "data"
SEED: dict[str, Any] = json.loads((DATA / "seed_case.json").read_text())
K31 = json.loads((DATA / "configs" / "Kimi-K3.1-Pro.json").read_text())

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
# Half of LLAMA, in bytes: embedding and head 64 x 64 each; per layer q and o 32 x 64, k and v 16 x 64, gate, up and down
# 48 x 64; the norms whole, two of 64 per layer and one at the end. All BF16.
HALF_EMBEDDING = 64 * 64 * 2
HALF_LAYER = (2 * 32 * 64 + 2 * 16 * 64 + 3 * 48 * 64) * 2
NORMS = (3 * 2 + 1) * 64 * 2
HALF = 2 * HALF_EMBEDDING + 3 * HALF_LAYER + NORMS


def llama(**changes: Any) -> Checkpoint:
    return checkpoint_from_config({**LLAMA, **changes}, name="small")


def supply(nbytes: int) -> Supply:
    return Supply(nbytes=nbytes, basis="exact", source="test")


def line(component: str, nbytes: int, bound: int | None = None, *, transient: bool = False) -> LedgerLine:
    return LedgerLine(
        component=component,
        nbytes=nbytes,
        bound_nbytes=nbytes if bound is None else bound,
        transient=transient,
        basis="modelled",
        source="test",
    )


def plan_of(*ledgers: list[LedgerLine], nbytes: int | None = None) -> Plan:
    ranks = tuple(RankLedger(rank=rank, lines=tuple(lines)) for rank, lines in enumerate(ledgers))
    return Plan(placement=None, supply=None if nbytes is None else supply(nbytes), ranks=ranks, notes=())


# --- ledger ------------------------------------------------------------------------------------------------------------


def test_fixed_is_all_persistent_lines_and_the_largest_transient_one_at_their_bounds() -> None:
    lines = [
        line("weights.mlp", 100),
        line("activations", 40, 70, transient=True),
        line("load peak", 60, 65, transient=True),
        line("nccl", 5, 9),
    ]
    assert plan_of(lines).ranks[0].fixed_bytes == 100 + 9 + 70


def test_weights_are_what_is_stored_padded_and_added_by_the_engine() -> None:
    lines = [
        line("weights.mlp", 1),
        line("padding.head", 2),
        line("engine.kv_scales", 4),
        line("draft.weights", 8),
        line("reserve", 16),
    ]
    ledger = plan_of(lines).ranks[0]
    assert ledger.weights_bytes == 7
    assert ledger.fixed_bytes == 31


def test_rank_without_lines_holds_nothing() -> None:
    assert plan_of([]).ranks[0].fixed_bytes == 0


def test_binding_rank_holds_most_and_the_first_of_equals_binds() -> None:
    assert plan_of([line("a", 1)], [line("a", 3)], [line("a", 3)], [line("a", 2)]).binding_rank == 1
    assert plan_of([line("a", 1)], [line("a", 1)]).binding_rank == 0


def test_binding_rank_is_judged_at_the_bound() -> None:
    assert plan_of([line("a", 5)], [line("a", 1, 6)]).binding_rank == 1


@pytest.mark.parametrize(("have", "spare", "fits"), [(11, 1, True), (10, 0, True), (9, -1, False)])
def test_plan_fits_if_the_binding_rank_has_nothing_less_than_it_needs(have: int, spare: int, fits: bool) -> None:
    plan = plan_of([line("a", 4)], [line("a", 10)], nbytes=have)
    assert plan.spare_bytes(1) == spare
    assert plan.spare_bytes(0) == have - 4
    assert plan.fits is fits
    assert bool(plan.reasons) is not fits


def test_without_a_supply_there_is_no_verdict() -> None:
    plan = plan_of([line("a", 4)])
    assert (plan.fits, plan.spare_bytes(0), plan.reasons) == (None, None, ())


def test_reasons_name_rank_need_supply_shortage_and_the_three_largest_lines() -> None:
    big = [
        line("weights.expert", 3 * GIB),
        line("reserve", 2 * GIB),
        line("draft.weights", GIB),
        line("weights.norm", 1),
    ]
    plan = plan_of([line("a", 1)], big, nbytes=5 * GIB)
    shortage, largest = plan.reasons
    assert "rank 1" in shortage
    assert "6.000 GiB" in shortage
    assert "5.000 GiB" in shortage
    assert str(GIB + 1) in shortage.replace(",", "")
    names = ("weights.expert", "reserve", "draft.weights")
    assert [largest.index(name) for name in names] == sorted(largest.index(name) for name in names)
    assert "weights.norm" not in largest


@pytest.mark.parametrize(("nbytes", "bound"), [(-1, 0), (2, 1), (-5, -1)])
def test_line_that_cannot_be_memory_is_a_programming_error(nbytes: int, bound: int) -> None:
    with pytest.raises(ValueError, match="x: "):
        line("x", nbytes, bound)


def test_exact_line_is_its_own_bound() -> None:
    assert exact_line("x", 5, "here") == LedgerLine(
        component="x", nbytes=5, bound_nbytes=5, basis="exact", source="here"
    )


lines_of = st.lists(
    st.builds(line, st.sampled_from(["weights.mlp", "reserve"]), st.integers(0, 2**40), transient=st.booleans()),
    max_size=6,
)


@given(lines_of, st.integers(0, 5))
def test_fixed_never_rises_when_a_line_is_removed(lines: list[LedgerLine], which: int) -> None:
    fewer = lines[:which] + lines[which + 1 :]
    assert plan_of(fewer).ranks[0].fixed_bytes <= plan_of(lines).ranks[0].fixed_bytes


@given(lines_of)
def test_order_of_lines_does_not_matter(lines: list[LedgerLine]) -> None:
    assert plan_of(lines).ranks[0].fixed_bytes == plan_of(lines[::-1]).ranks[0].fixed_bytes


# --- plans of a checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["split", "vllm"])
def test_plan_of_a_small_llama_by_hand(engine: Any) -> None:
    plan = plan_checkpoint(llama(), PlanRequest(tp=2, engine=engine))
    assert [ledger.weights_bytes for ledger in plan.ranks] == [HALF, HALF]
    by_component = {held.component: held.nbytes for held in plan.ranks[0].lines}
    assert by_component == {
        "weights.embedding": HALF_EMBEDDING,
        "weights.attention": 3 * (2 * 32 * 64 + 2 * 16 * 64) * 2,
        "weights.mlp": 3 * 3 * 48 * 64 * 2,
        "weights.norm": NORMS,
        "weights.head": HALF_EMBEDDING,
    }
    assert {held.basis for held in plan.ranks[0].lines} == {"exact"}


def test_ranks_are_ordered_by_stage_then_tensor_rank() -> None:
    plan = plan_checkpoint(llama(), PlanRequest(tp=2, pp=2))
    assert [ledger.rank for ledger in plan.ranks] == [0, 1, 2, 3]
    # Three layers over two stages: 2 and 1. Embedding with the first; last norm and head with the last.
    layer = HALF_LAYER + 2 * 64 * 2
    first, last = HALF_EMBEDDING + 2 * layer, HALF_EMBEDDING + layer + 64 * 2
    assert [ledger.weights_bytes for ledger in plan.ranks] == [first, first, last, last]


def test_reserve_is_a_line_of_every_rank_and_known_to_be_assumed() -> None:
    plan = plan_checkpoint(llama(), PlanRequest(tp=2, reserve_bytes=1000, supply=supply(HALF + 999)))
    for ledger in plan.ranks:
        assert [(held.nbytes, held.basis) for held in ledger.lines if held.component == "reserve"] == [
            (1000, "assumed")
        ]
        assert ledger.fixed_bytes == HALF + 1000
    assert plan.fits is False
    assert any("reserve" in text for text in plan.pessimism)
    assert plan_checkpoint(llama(), PlanRequest(tp=2, reserve_bytes=1000, supply=supply(HALF + 1000))).fits is True


def test_what_is_held_whole_is_remarked_with_its_reason() -> None:
    remarks = plan_checkpoint(llama(), PlanRequest(tp=2)).remarks
    assert [(remark.kind, remark.role, remark.nbytes) for remark in remarks] == [("whole on every rank", "norm", NORMS)]
    assert remarks[0].why
    assert plan_checkpoint(llama(), PlanRequest(tp=1)).remarks == ()


def test_vocabulary_padding_of_vllm_is_a_line_of_its_own() -> None:
    # 130 rows are padded to 192, 96 a rank; rank 0 holds 96 real rows, rank 1 the other 34.
    plan = plan_checkpoint(llama(vocab_size=130), PlanRequest(tp=2, engine="vllm"))
    padding = [
        sum(held.nbytes for held in ledger.lines if held.component.startswith("padding.")) for ledger in plan.ranks
    ]
    assert padding == [0, 2 * 62 * 64 * 2]
    assert plan.ranks[0].weights_bytes == plan.ranks[1].weights_bytes == HALF + 2 * 32 * 64 * 2


def test_conversion_lists_every_converted_module_with_bytes_before_and_after() -> None:
    plan = plan_checkpoint(llama(), PlanRequest(tp=1, convert="mxfp8"))
    stated = numerics(plan)
    assert stated["class"] == "converted"
    at = "model.layers.{layer}."
    rows = {
        row["module"].removeprefix(at): (row["instances"], row["bytes_before"], row["bytes_after"])
        for row in stated["converted"]
    }
    square, narrow, wide = 64 * 64, 32 * 64, 96 * 64
    assert rows == {
        "self_attn.q_proj": (3, 3 * square * 2, 3 * square * 33 // 32),
        "self_attn.k_proj": (3, 3 * narrow * 2, 3 * narrow * 33 // 32),
        "self_attn.v_proj": (3, 3 * narrow * 2, 3 * narrow * 33 // 32),
        "self_attn.o_proj": (3, 3 * square * 2, 3 * square * 33 // 32),
        "mlp.gate_proj": (3, 3 * wide * 2, 3 * wide * 33 // 32),
        "mlp.up_proj": (3, 3 * wide * 2, 3 * wide * 33 // 32),
        "mlp.down_proj": (3, 3 * wide * 2, 3 * wide * 33 // 32),
    }
    assert {row["format"] for row in stated["converted"]} == {"mxfp8_e4m3"}
    assert plan.ranks[0].weights_bytes == 2 * 128 * 64 * 2 + NORMS + sum(after for _, _, after in rows.values())


def test_weight_whose_inputs_are_no_whole_blocks_is_not_converted() -> None:
    plan = plan_checkpoint(llama(intermediate_size=80), PlanRequest(convert="mxfp8"))
    modules = {row["module"].rpartition(".")[2] for row in numerics(plan)["converted"]}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}  # down_proj has 80 inputs


def test_plan_without_conversion_is_neutral() -> None:
    assert numerics(plan_checkpoint(llama(), PlanRequest(tp=2))) == {"class": "neutral", "converted": []}


def test_suggestions_are_the_smallest_changes_that_fit() -> None:
    request = PlanRequest(tp=1, supply=supply(HALF + 100))
    assert plan_checkpoint(llama(), request).fits is False
    assert suggest(llama(), request) == ("--pp 2 with --convert mxfp8", "--tp 2", "--tp 4")
    assert suggest(llama(), replace(request, supply=supply(2 * HALF - 2000)))[0] == "--convert mxfp8"
    assert suggest(llama(), replace(request, supply=None)) == ()


# --- drafts ------------------------------------------------------------------------------------------------------------


def test_draft_checkpoint_is_placed_like_the_target() -> None:
    plan = plan_checkpoint(llama(), PlanRequest(tp=2, draft=llama(num_hidden_layers=1)))
    draft = 2 * HALF_EMBEDDING + HALF_LAYER + 3 * 64 * 2
    for ledger in plan.ranks:
        held = [item for item in ledger.lines if item.component == "draft.weights"]
        assert [(item.nbytes, item.basis) for item in held] == [(draft, "exact")]
        assert ledger.weights_bytes == HALF
        assert ledger.fixed_bytes == HALF + draft


def test_draft_is_converted_with_the_target() -> None:
    draft = llama(num_hidden_layers=1)
    plain = plan_checkpoint(llama(), PlanRequest(tp=2, draft=draft))
    converted = plan_checkpoint(llama(), PlanRequest(tp=2, draft=draft, convert="mxfp8"))
    # o_proj and down_proj are cut along their inputs: 64 / 2 = 32 and 96 / 2 = 48. Whole blocks of 32 make 64 and 32.
    assert converted.ranks[0].fixed_bytes < plain.ranks[0].fixed_bytes


@pytest.mark.parametrize(
    ("nbytes", "tp", "share"), [(1_000_001, 8, 125_001), (8, 8, 1), (1, 8, 1), (5_373_504_512, 8, 671_688_064)]
)
def test_draft_bytes_are_shared_evenly_rounded_up_and_known_to_be_assumed(nbytes: int, tp: int, share: int) -> None:
    big = llama(num_attention_heads=8, num_key_value_heads=8, hidden_size=128, intermediate_size=256)
    plan = plan_checkpoint(big, PlanRequest(tp=tp, draft_bytes=nbytes))
    held = [item for item in plan.ranks[0].lines if item.component == "draft.weights"]
    assert [(item.nbytes, item.basis) for item in held] == [(share, "assumed")]


def test_draft_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"embed_tokens|self_attn|lm_head"):
        plan_checkpoint(
            llama(num_attention_heads=8, num_key_value_heads=8),
            PlanRequest(tp=8, engine="vllm", draft=llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48)),
        )


# --- the seed case -----------------------------------------------------------------------------------------------------

RESERVE = 5_254_892_486  # 4.894 GiB: all other terms of the profile


def seed_request(permille: int | None, **changes: Any) -> PlanRequest:
    asked: dict[str, Any] = {
        "tp": SEED["tp_size"],
        "estimator": "credit",
        "credit_permille": permille,
        "device_bytes": SEED["device_bytes"],
        "supply": parse_supply("94.010GiB"),
        "reserve_bytes": RESERVE,
    }
    return PlanRequest(**{**asked, **changes})


@pytest.fixture(scope="module")
def k31() -> Checkpoint:
    return checkpoint_from_config(K31, name="Kimi-K3.1-Pro")


def test_seed_case_with_the_old_credit_is_refused_at_94_055_of_94_010(k31: Checkpoint) -> None:
    plan = plan_checkpoint(k31, seed_request(SEED["old_credit_permille"]))
    assert [ledger.weights_bytes for ledger in plan.ranks] == [95_736_363_867] * 8
    assert plan.supply is not None
    assert plan.supply.nbytes == 100_942_468_874
    assert plan.fits is SEED["profile"]["fits_with_old_credit"] is False
    assert "94.055 GiB fixed > supply 94.010 GiB" in plan.reasons[0]


def test_seed_case_with_the_new_credit_fits_with_about_one_gib_to_spare(k31: Checkpoint) -> None:
    plan = plan_checkpoint(k31, seed_request(SEED["new_credit_permille"]))
    assert [ledger.weights_bytes for ledger in plan.ranks] == [SEED["new_per_rank_estimate_bytes"]] * 8
    assert plan.ranks[0].weights_bytes == 94_541_026_549
    assert plan.spare_bytes(0) == 100_942_468_874 - 94_541_026_549 - RESERVE == 1_146_549_839
    assert plan.fits is SEED["profile"]["fits_with_new_credit"] is True
    assert plan.reasons == ()
    assert f"saves {SEED['new_credit_savings_bytes']:,}".replace(",", "") in plan.notes[0].replace(",", "")


def test_credit_from_a_config_counts_its_payload_and_the_draft(k31: Checkpoint) -> None:
    plan = plan_checkpoint(k31, seed_request(475, device_bytes=None, draft_bytes=SEED["draft_bytes"], supply=None))
    device = 1_561_217_377_280 + SEED["draft_bytes"]
    assert plan.ranks[0].weights_bytes == device // 8 - SEED["new_credit_savings_bytes"] // 8
    assert not any(held.component == "draft.weights" for held in plan.ranks[0].lines)


def test_credit_plan_says_how_far_it_stays_under_the_ideal(k31: Checkpoint) -> None:
    # 31/64 of 95,626,985,472 + 9,453,961,216 / 16 - 46,013,690,675 = 896,502,989 saved less, over 8 ranks.
    pessimism = plan_checkpoint(k31, seed_request(475)).pessimism
    assert "0.104 GiB" in pessimism[0]
    assert "48.4 %" in pessimism[0]
    assert numerics(plan_checkpoint(k31, seed_request(475)))["class"] == "unknown"


def test_credit_is_known_to_be_assumed(k31: Checkpoint) -> None:
    (weights, reserve) = plan_checkpoint(k31, seed_request(475)).ranks[0].lines
    assert (weights.component, weights.basis) == ("weights.credit", "assumed")
    assert (reserve.component, reserve.nbytes) == ("reserve", RESERVE)


CREDIT_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no permille": ({"credit_permille": None}, "no calibrated credit"),
    "pipeline stages": ({"pp": 2}, "covers tensor parallelism only"),
    "expert parallelism": ({"ep": 8}, "covers tensor parallelism only"),
    "more than everything": ({"credit_permille": 1001}, "credit out of range; expected 0 to 1000 permille; found 1001"),
    "less than nothing": ({"credit_permille": -1}, "credit out of range"),
    "savings beyond the device": ({"device_bytes": 1000}, "savings exceed the bytes on the devices"),
    "negative device": ({"device_bytes": -1}, "device_bytes cannot be negative"),
}


@pytest.mark.parametrize(("changes", "text"), CREDIT_REFUSALS.values(), ids=CREDIT_REFUSALS)
def test_credit_that_cannot_be_used_is_refused(k31: Checkpoint, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CreditError) as caught:
        plan_checkpoint(k31, seed_request(475, **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_credit_counts_two_bytes_for_every_projection_element(dtype: str) -> None:
    # Per layer q and o 64 x 64, k and v 32 x 64, gate, up and down 96 x 64.
    checkpoint = llama(torch_dtype=dtype)
    assert counted_bytes(checkpoint.assignment) == (3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) * 2, 0)


def test_credit_has_nothing_to_apply_to_where_projections_are_quantised() -> None:
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CreditError, match=r"no plain BF16 projection is counted"):
        plan_checkpoint(checkpoint_from_config(config, name="x"), seed_request(475, tp=1))
