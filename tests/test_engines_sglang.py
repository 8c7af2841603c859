"""SGLang's placement, where it differs from vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage import open_checkpoint
from tonnage.assignment import Assignment
from tonnage.engines import engine
from tonnage.engines.sglang import SGLANG
from tonnage.errors import PlacementError
from tonnage.placement import Placement, place
from tonnage.topology import Topology

CONFIGS = Path(__file__).parent / "data" / "configs"

VOCABULARIES = {
    "whole": (128_256, 1, 128_256),
    "divides after padding to 64": (151_936, 8, 151_936),
    "64 per rank where that does not divide": (151_936, 3, 152_064),
    "odd": (49_155, 6, 49_536),
}


@pytest.mark.parametrize(("vocab", "tp", "rows"), VOCABULARIES.values(), ids=VOCABULARIES)
def test_vocabulary_rows(vocab: int, tp: int, rows: int) -> None:
    assert SGLANG.vocab_rows(vocab, tp) == rows


def config_of(name: str) -> Assignment:
    return open_checkpoint(CONFIGS / f"{name}.json").assignment


def placed(name: str, *, tp: int, ep: int = 1) -> Placement:
    return place(config_of(name), Topology(tp=tp, ep=ep), SGLANG)


ABSORBED = {
    # local heads x (nope + value) x latent x 2 bytes, in every layer
    "DeepSeek-V3 at 8": ("deepseek-ai__DeepSeek-V3", 8, 16 * 256 * 512 * 2, 61),
    "DeepSeek-V2-Lite at 1": ("deepseek-ai__DeepSeek-V2-Lite", 1, 16 * 256 * 512 * 2, 27),
    "Kimi K3 at 8": ("moonshotai__Kimi-K3", 8, 12 * 256 * 512 * 2, 24),
}


@pytest.mark.parametrize(("config", "tp", "nbytes", "layers"), ABSORBED.values(), ids=ABSORBED)
def test_absorbed_projections_are_a_line_of_their_own(config: str, tp: int, nbytes: int, layers: int) -> None:
    extras = placed(config, tp=tp).extras
    assert {extra.component for extra in extras} == {"engine.mla_absorbed"}
    assert {held for extra in extras for held in extra.nbytes} == {nbytes}
    assert sum(len(extra.first) for extra in extras) == layers


def test_no_absorbed_projections_without_latent_attention() -> None:
    assert placed("meta-llama__Llama-3.1-8B-Instruct", tp=8).extras == ()


def test_keys_of_layers_that_read_others_are_built_all_the_same() -> None:
    """Gemma-4-E4B: of 42 layers 15 sliding ones (2 heads of 256) and 3 full ones (of 512) share keys and values."""
    for tp, heads in ((1, 2), (2, 1), (8, 1)):
        extras = placed("google__gemma-4-E4B-it", tp=tp).extras
        held = sorted((extra.nbytes[0], len(extra.first)) for extra in extras)
        one = heads * 256 * 2560 * 2
        assert held == [(one, 15), (one, 15), (2 * one, 3), (2 * one, 3)]
        assert {extra.component for extra in extras} == {"engine.shared_kv"}


def test_same_bytes_as_vllm_on_a_plain_model() -> None:
    assignment = config_of("meta-llama__Llama-3.1-8B-Instruct")
    vllm = place(assignment, Topology(tp=8), engine("vllm"))
    assert placed("meta-llama__Llama-3.1-8B-Instruct", tp=8).rank_bytes(0, 0) == vllm.rank_bytes(0, 0)


def test_what_is_taken_over_from_vllm_says_so() -> None:
    reasons = {
        p.entry.module.rule.role: p.why for p in placed("deepseek-ai__DeepSeek-V3", tp=8).placed if p.how == "absent"
    }
    assert reasons == {"mtp": "as vllm: the draft of multi-token prediction is a model of its own"}


def test_channel_scales_are_held_in_f32() -> None:
    placement = placed("RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", tp=8)
    (down,) = (p for p in placement.placed if p.entry.module.rule.pattern.endswith("shared_expert.down_proj"))
    weight, scale = down.shares[0].pieces
    assert (weight.held_bytes, scale.slice_bytes, scale.held_bytes) == (5120 * 1024, 5120 * 2, 5120 * 4)


def test_experts_whole_on_their_rank() -> None:
    experts = [p for p in placed("Qwen__Qwen3-30B-A3B-FP8", tp=4, ep=4).placed if p.how == "whole experts"]
    assert {share.copies for p in experts for share in p.shares} == {32}


def test_experts_must_divide() -> None:
    with pytest.raises(PlacementError, match=r"experts do not divide by the ranks.*a divisor of 64; found 3"):
        placed("deepseek-ai__DeepSeek-V2-Lite", tp=3, ep=3)
