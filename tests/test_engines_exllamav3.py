"""exllamav3's shares, against bytes worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage import open_checkpoint
from tonnage.assignment import Assignment, assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.engines.exllamav3 import EXLLAMAV3
from tonnage.errors import PlacementError
from tonnage.formats.quantized import exl3
from tonnage.placement import Placed, Placement, place
from tonnage.recipes.blueprint import draw_blueprint
from tonnage.recipes.loader import family_of, load_recipe
from tonnage.recipes.modules import stored_tensors
from tonnage.topology import Topology

CONFIGS = Path(__file__).parent / "data" / "configs"
RATES = {
    "q_proj": 8,
    "k_proj": 6,
    "v_proj": 10,
    "o_proj": 8,
    "gate_proj": 7,
    "up_proj": 7,
    "down_proj": 5,
    "lm_head": 12,
}
"""Twice the bits."""

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 640,
    "vocab_size": 300,
    "attention_bias": True,
}


def in_exl3(fields: dict[str, Any], rates: dict[str, int]) -> Assignment:
    """The assignment headers of an EXL3 checkpoint would give."""
    config = parse_config(fields, name="test")
    plain = assign_blueprint(draw_blueprint(load_recipe(family_of(config.model_type, config.architectures)), config))
    entries = []
    for entry in plain.entries:
        rate = rates.get(entry.module.rule.pattern.rpartition(".")[2])
        fmt = exl3(rate, codebook="mul1") if rate else entry.fmt
        entries.append(replace(entry, fmt=fmt, stored=stored_tensors(entry.module, fmt, config.dtype)))
    return replace(plain, entries=tuple(entries))


def config_of(name: str) -> Assignment:
    return open_checkpoint(CONFIGS / f"{name}.json").assignment


def of(placement: Placement, suffix: str) -> list[Placed]:
    return [p for p in placement.placed if p.entry.module.rule.pattern.endswith(suffix)]


def widths(placement: Placement, suffix: str, layer: int) -> list[int]:
    (placed,) = (p for p in of(placement, suffix) if layer in p.entry.first)
    return [sum(end - begin for begin, end in share.ranges) for share in placed.shares]


# Bytes of a layer in mixed rates: trellis k x n x K / 8, suh 2k, svh 2n, marker 4, bias 2n


def test_mixed_rates_over_three_ranks() -> None:
    placement = place(in_exl3({**TINY, "attention_bias": False}, RATES), Topology(tp=3), EXLLAMAV3)
    # 4 KV heads: 2, 1, 1; then 5 blocks of 128 channels, one more for the ranks that hold least: 1, 2, 2
    attention = [133_124 + 50_692 + 83_460 + 133_124, *[67_076 + 25_860 + 42_244 + 67_076] * 2]
    mlp = [29_956 + 29_956 + 21_764, *[58_884 + 58_884 + 42_500] * 2]
    head = [50_436] * 3  # vocabulary 300, stored as 384: a block of 128 each, the padding in the last
    whole = 300 * 512 * 2 + 3 * 512 * 2  # embedding and norms
    expected = [a + m + h + whole for a, m, h in zip(attention, mlp, head, strict=True)]
    assert [placement.rank_bytes(0, rank) for rank in range(3)] == expected == [842_784, 723_232, 723_232]


def test_a_bias_after_a_cut_of_inputs_is_held_once() -> None:
    without = place(in_exl3({**TINY, "attention_bias": False}, RATES), Topology(tp=2), EXLLAMAV3)
    placement = place(in_exl3(TINY, RATES), Topology(tp=2), EXLLAMAV3)
    # 2 KV heads each: q 512 and k, v 256 outputs; o's 512 on the first rank alone
    more = [placement.rank_bytes(0, rank) - without.rank_bytes(0, rank) for rank in range(2)]
    assert more == [2 * (512 + 256 + 256 + 512), 2 * (512 + 256 + 256)]


def test_padding_rides_in_the_last_slice() -> None:
    placement = place(in_exl3({**TINY, "intermediate_size": 700}, RATES), Topology(tp=2), EXLLAMAV3)
    assert widths(placement, "gate_proj", 0) == widths(placement, "down_proj", 0) == [384, 384]  # 768 stored


def test_a_rank_may_get_nothing() -> None:
    placement = place(in_exl3(TINY, RATES), Topology(tp=6), EXLLAMAV3)
    assert widths(placement, "k_proj", 0) == [128, 128, 128, 128, 0, 0]
    (placed,) = of(placement, "k_proj")
    assert [share.held_bytes > 0 for share in placed.shares] == [True] * 4 + [False] * 2


def test_the_share_of_the_allocator() -> None:
    """112 blocks of a 14336 wide MLP over three equal GPUs, the third of which got fewer of the 8 KV heads."""
    placement = place(config_of("meta-llama__Llama-3.1-8B-Instruct"), Topology(tp=3), EXLLAMAV3)
    assert widths(placement, "k_proj", 0) == [384, 384, 256]
    assert widths(placement, "q_proj", 0) == widths(placement, "o_proj", 0) == [1536, 1536, 1024]
    assert widths(placement, "down_proj", 0) == [4736, 4736, 4864]


def test_embedding_is_whole_and_head_is_cut() -> None:
    placement = place(config_of("meta-llama__Llama-3.1-8B-Instruct"), Topology(tp=4), EXLLAMAV3)
    (embedding,), (head,) = of(placement, "embed_tokens"), of(placement, "lm_head")
    assert (embedding.how, embedding.why) == ("replicated", "every GPU looks tokens up in its own copy")
    assert sorted(end - begin for share in head.shares for begin, end in share.ranges) == [
        32_000,
        32_000,
        32_128,
        32_128,
    ]


def test_latent_attention_is_whole_on_one_rank() -> None:
    placement = place(config_of("deepseek-ai__DeepSeek-V2-Lite"), Topology(tp=2), EXLLAMAV3)
    holders: Counter[tuple[int, ...]] = Counter()
    for placed in of(placement, "kv_b_proj"):
        assert placed.how == "one rank"
        holders[tuple(share.copies for share in placed.shares)] += len(placed.entry.first)
    assert sum(holders.values()) == 27
    assert set(holders) == {(1, 0), (0, 1)}


def test_experts_are_whole_without_asking() -> None:
    placement = place(config_of("Qwen__Qwen3-30B-A3B"), Topology(tp=3), EXLLAMAV3)
    experts = [p for p in of(placement, "down_proj") if p.how == "whole experts"]
    assert {tuple(sorted(share.copies for share in p.shares)) for p in experts} == {(42, 43, 43)}
    assert {p.how for p in of(placement, "mlp.gate")} == {"replicated"}


def test_key_heads_carry_their_value_heads() -> None:
    placement = place(config_of("Qwen__Qwen3.5-27B"), Topology(tp=3), EXLLAMAV3)
    # 16 key heads of 128: 6, 5, 5; three value heads of 128 each
    assert widths(placement, "in_proj_z", 0) == widths(placement, "out_proj", 0) == [2304, 1920, 1920]
    assert widths(placement, "in_proj_qkv", 0) == [2 * 768 + 2304, 2 * 640 + 1920, 2 * 640 + 1920]
    assert widths(placement, "in_proj_b", 0) == [18, 15, 15]


def test_drafts_are_absent_and_vision_is_on_the_first_gpu() -> None:
    placement = place(config_of("Qwen__Qwen3.5-27B"), Topology(tp=2), EXLLAMAV3)
    by_role = {p.entry.module.rule.role: p for p in placement.placed}
    assert by_role["mtp"].how == "absent"
    assert [share.copies for share in by_role["vision"].shares] == [1, 0]


def test_heads_that_cannot_be_paired_are_refused() -> None:
    fields = {**TINY, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}
    with pytest.raises(PlacementError, match=r"sizes that work: 1\n.*3 heads make no whole blocks of 128 channels"):
        place(in_exl3(fields, {}), Topology(tp=3), EXLLAMAV3)


LIMITS = {
    "both kinds of split": (Topology(tp=2, pp=2), "splits by tensors or by layers"),
    "cache by tokens": (Topology(tp=2, dcp=2), "does not split the cache by tokens"),
}


@pytest.mark.parametrize(("topology", "says"), LIMITS.values(), ids=LIMITS)
def test_what_it_cannot_do_is_refused(topology: Topology, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        place(in_exl3(TINY, RATES), topology, EXLLAMAV3)


def test_foreign_formats_are_refused() -> None:
    with pytest.raises(PlacementError, match="storage format is not loaded; expected EXL3 or unquantised; found mxfp8"):
        place(convert_to_mxfp8(in_exl3(TINY, {})), Topology(tp=1), EXLLAMAV3)
