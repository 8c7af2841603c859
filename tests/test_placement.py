"""Placement, against bytes worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tonnage.assignment import Assignment, assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.strict_json import parse_object
from tonnage.container import Container
from tonnage.engines import engine
from tonnage.errors import ConfigError, PlacementError
from tonnage.formats.exl3_v1 import SlotGeometry
from tonnage.formats.exl3_v1_manifest import SlotLayer, SlotManifest
from tonnage.formats.exl3_v1_names import EXL3_V1
from tonnage.placement import Placement, can_place, place
from tonnage.recipes.blueprint import draw_blueprint
from tonnage.recipes.loader import family_of, load_recipe
from tonnage.topology import Topology

CONFIGS = Path(__file__).parent / "data" / "configs"

SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def assignment_of(fields: dict[str, Any]) -> Assignment:
    config = parse_config(fields, name="test")
    return assign_blueprint(draw_blueprint(load_recipe(family_of(config.model_type, config.architectures)), config))


def config_of(name: str) -> Assignment:
    path = CONFIGS / f"{name}.json"
    return assignment_of(parse_object(path.read_bytes(), where=path.name, kind=ConfigError, constants=True))


def held(placement: Placement) -> list[int]:
    return [placement.rank_bytes(0, rank) for rank in range(placement.topology.tp)]


def ranges(placement: Placement, suffix: str) -> list[object]:
    (placed,) = (p for p in placement.placed if p.entry.module.rule.pattern.endswith(suffix))
    return [share.ranges for share in placed.shares]


# Engines on one small model: vocabulary 49152 and 30 layers of hidden 576, 9 query heads and 3 KV heads of 64, 1536


SMOLLM2 = {
    # embedding 49152 x 576 / 3; per layer (192 + 64 + 64 + 192 + 3 x 512) x 576 + 2 x 576; norm 576
    "vllm tp 3": ("vllm", 3, [89_723_520] * 3),
    "sglang tp 3": ("sglang", 3, [89_723_520] * 3),
    "split tp 3": ("split", 3, [89_723_520] * 3),
    "one rank": ("vllm", 1, [269_030_016]),
    # every KV head is held by three ranks, query heads by one: 22_208 + 30 x (64 + 2 x 64 + 64 + 3 x 171 | 170) rows
    "split tp 9": (
        "split",
        9,
        [(5462 * 576 + 30 * ((256 + 3 * n) * 576 + 2 * 576) + 576) * 2 for n in [171] * 6 + [170] * 3],
    ),
}


@pytest.mark.parametrize(("name", "tp", "expected"), SMOLLM2.values(), ids=SMOLLM2)
def test_smollm2(name: str, tp: int, expected: list[int]) -> None:
    assert held(place(assignment_of(SMOLLM2_135M), Topology(tp=tp), engine(name))) == expected


def test_query_heads_meet_their_kv_head() -> None:
    placement = place(assignment_of(SMOLLM2_135M), Topology(tp=9), engine("split"))
    assert ranges(placement, "q_proj") == ranges(placement, "o_proj") == [((64 * r, 64 * r + 64),) for r in range(9)]
    assert ranges(placement, "k_proj") == [((64 * h, 64 * h + 64),) for h in (0, 0, 0, 1, 1, 1, 2, 2, 2)]


def test_gate_up_and_down_are_cut_at_the_same_channels() -> None:
    fields = {**SMOLLM2_135M, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    plain = place(assignment_of(fields), Topology(tp=4), engine("split"))
    assert ranges(plain, "gate_proj") == ranges(plain, "down_proj") == [((384 * r, 384 * r + 384),) for r in range(4)]
    fields["intermediate_size"] = 1568
    mxfp8 = place(convert_to_mxfp8(assignment_of(fields)), Topology(tp=4), engine("split"))
    edges = [0, 416, 800, 1184, 1568]
    expected = [((begin, end),) for begin, end in pairwise(edges)]
    assert ranges(mxfp8, "gate_proj") == ranges(mxfp8, "up_proj") == ranges(mxfp8, "down_proj") == expected


def test_interleaved_gate_and_up_are_cut_in_whole_scale_blocks_of_down() -> None:
    placement = place(config_of("openai__gpt-oss-20b"), Topology(tp=8), engine("split"))
    channels = [384, 384, 352, 352, 352, 352, 352, 352]
    for pattern, step in (("experts.gate_up_proj", 2), ("experts.down_proj", 1)):
        assert [end - begin for ((begin, end),) in ranges(placement, pattern)] == [step * n for n in channels]  # type: ignore[misc]


def test_vocabulary_is_padded_to_the_ranks() -> None:
    fields = {**SMOLLM2_135M, "vocab_size": 49153}
    placement = place(assignment_of(fields), Topology(tp=3), engine("split"))
    assert ranges(placement, "embed_tokens") == [((0, 16385),), ((16385, 32770),), ((32770, 49153),)]
    (embedding,) = (p for p in placement.placed if p.entry.module.rule.role == "embedding")
    assert [share.held_bytes - share.slice_bytes for share in embedding.shares] == [0, 0, 2 * 576 * 2]


# Kimi K3


def test_vision_heads_of_kimi_k3_over_eight_ranks() -> None:
    placement = place(convert_to_mxfp8(config_of("moonshotai__Kimi-K3")), Topology(tp=8), engine("split"))
    edges = [0, 256, 512, 768, 1024, 1152, 1280, 1408, 1536]
    expected = [tuple((1536 * part + begin, 1536 * part + end) for part in range(3)) for begin, end in pairwise(edges)]
    assert ranges(placement, "wqkv") == expected
    sizes = held(placement)
    assert max(sizes) - min(sizes) == 10_948_608  # as measured on packages of its successor


def test_kimi_k3_leaves_whole_what_every_rank_reads() -> None:
    placement = place(config_of("moonshotai__Kimi-K3"), Topology(tp=8), engine("split"))
    whole = [p for p in placement.placed if p.how == "replicated"]
    assert "f_a_proj" in {p.entry.module.rule.pattern.rpartition(".")[2] for p in whole}
    assert all(p.why for p in whole)


def test_what_a_table_of_the_engine_cuts_is_cut() -> None:
    latent = "routed_expert_down_proj"
    k3 = config_of("moonshotai__Kimi-K3")
    assert ranges(place(k3, Topology(tp=8), engine("split")), latent) == [((448 * r, 448 * r + 448),) for r in range(8)]
    assert ranges(place(k3, Topology(tp=8), engine("vllm")), latent) == [()] * 8


def slots_of_kimi_k3(tp: int) -> list[int]:
    geometry = SlotGeometry(
        num_experts=896,
        hidden_size=3584,
        intermediate_size=3072,
        moe_layer_indices=tuple(range(1, 93)),
        codebook="lut_e4m3",
        bits=2,
        pre_block=512,
        post_block=128,
        extent_barriers=(48,),
    )
    layers = tuple(SlotLayer(index=i, file=f"layer_{i:05d}.safetensors", sha256="0" * 64) for i in range(1, 93))
    container = Container(
        manifest=SlotManifest(dialect=EXL3_V1, geometry=geometry, layers=layers), row_strides=(77_070_336,) * 92
    )
    whole = config_of("moonshotai__Kimi-K3")
    entries = tuple(entry for entry in whole.entries if entry.module.rule.role == "norm")
    placement = place(replace(whole, entries=entries, container=container), Topology(tp=tp), engine("split"))
    return [placement.slot_bytes(0, rank) for rank in range(tp)]


def test_slots_over_eight_ranks() -> None:
    # a slot: 77,070,336 of codes and 896 x 3 x 32 x 2 of rotations; a layer: 22,400 that every rank holds
    assert slots_of_kimi_k3(8) == [92 * (12 * 77_242_368 + 22_400)] * 8


def test_slots_over_ten_ranks_rotate_from_layer_to_layer() -> None:
    # 12 or 8 slots per layer; ranks 4 and 9 get the short run twice in the last two layers
    slots = [884, 884, 884, 884, 880, 884, 884, 884, 884, 880]
    assert slots_of_kimi_k3(10) == [n * 77_242_368 + 92 * 22_400 for n in slots]


# Refusals


REFUSALS = {
    "28 heads": (
        "Qwen__Qwen2.5-7B-Instruct",
        "vllm",
        8,
        "self_attn.q_proj: axis out of 3584 elements in 28 units cannot be cut over 8 ranks; expected a divisor of 28; found 8",
        "1, 2, 4",
    ),
    "28 heads cut by us": (
        "Qwen__Qwen2.5-7B-Instruct",
        "split",
        8,
        "self_attn.o_proj: axis in of 3584 elements in 28 units cannot be cut over 8 ranks",
        "1, 2, 4, 28",
    ),
    "96 heads": ("moonshotai__Kimi-K3", "vllm", 7, "96 units cannot be cut over 7 ranks", "1, 2, 4, 8, 16, 32"),
    "8 KV heads": (
        "meta-llama__Llama-3.1-8B-Instruct",
        "split",
        12,
        "self_attn.k_proj: axis out of 1024 elements in 8 units cannot be cut over 12 ranks; expected a divisor of 8 or a multiple",
        "1, 2, 4, 8, 16, 32",
    ),
    "FP8 blocks of no finer grid": (
        "Qwen__Qwen3-30B-A3B-FP8",
        "vllm",
        16,
        "experts.{expert}.gate_proj: 48 channels per rank are no whole scale blocks",
        "1, 2, 4, 8",
    ),
    "FP8 blocks": (
        "Qwen__Qwen3-30B-A3B-FP8",
        "sglang",
        4,
        "experts.{expert}.gate_proj: 192 channels per rank are no whole scale blocks",
        "1, 2",
    ),
}


@pytest.mark.parametrize(("config", "name", "tp", "says", "works"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_names_the_tensor_and_the_sizes_that_work(
    config: str, name: str, tp: int, says: str, works: str
) -> None:
    assignment = config_of(config)
    assert not can_place(assignment, Topology(tp=tp), engine(name))
    with pytest.raises(PlacementError) as refusal:
        place(assignment, Topology(tp=tp), engine(name))
    assert says in str(refusal.value)
    assert str(refusal.value).startswith(f"--tp {tp} --engine {name}: tensor-parallel sizes that work: {works}\n")


def test_tensors_beyond_those_that_are_named_are_counted() -> None:
    with pytest.raises(PlacementError) as refusal:
        place(config_of("meta-llama__Llama-3.1-70B-Instruct"), Topology(tp=6), engine("vllm"))
    _sizes, *named, last = str(refusal.value).splitlines()
    assert len(named) == 6
    assert last == "--tp 6 --engine vllm: and 1 more tensor"


def test_no_width_that_leaves_channels_out() -> None:
    fields = {**SMOLLM2_135M, "num_attention_heads": 9, "vocab_size": 49153}
    with pytest.raises(PlacementError, match="49216 elements"):
        place(assignment_of(fields), Topology(tp=3), engine("vllm"))


def test_keys_are_not_read_from_another_stage() -> None:
    assignment = config_of("google__gemma-4-E4B-it")  # 42 layers, the last 18 read keys of layers 22 and 23
    for pp in (1, 2):
        place(assignment, Topology(pp=pp), engine("vllm"))
    says = r"--pp 3: layer 2\d reads the keys of layer 2[23], which another stage keeps; expected --pp 1, 2; found 3"
    with pytest.raises(PlacementError, match=says):
        place(assignment, Topology(pp=3), engine("vllm"))
    place(assignment, Topology(pp=3), engine("split"))


# Scalars that vLLM creates for the modules it fuses, by its classes for Nemotron-3-Nano, Gemma 4, Qwen3-VL and GLM-5.1


def quantized(name: str, **stated: Any) -> Placement:
    path = CONFIGS / f"{name}.json"
    fields = parse_object(path.read_bytes(), where=path.name, kind=ConfigError, constants=True)
    return place(assignment_of({**fields, "quantization_config": stated}), Topology(), engine("vllm"))


def scalar_bytes(placement: Placement, pattern: str, suffix: str) -> int:
    """Return the bytes of a stored scalar in all layers and copies of one rank."""
    return sum(
        piece.held_bytes * placement.multiplicity(placed, 0) * placed.shares[0].copies
        for placed in placement.placed
        if placed.entry.module.rule.pattern.endswith(pattern)
        for stored, piece in zip(placed.entry.stored, placed.shares[0].pieces, strict=True)
        if stored.suffix == suffix
    )


def test_experts_without_a_gate_have_an_input_scale_of_their_own() -> None:
    nano = quantized("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", quant_method="fp8", activation_scheme="static")
    assert scalar_bytes(nano, "experts.{expert}.up_proj", ".input_scale") == 23 * 128 * 4
    gated = quantized("Qwen__Qwen3-30B-A3B", quant_method="fp8", activation_scheme="static")
    assert scalar_bytes(gated, "experts.{expert}.gate_proj", ".input_scale") == 48 * 128 * 4
    assert scalar_bytes(gated, "experts.{expert}.up_proj", ".input_scale") == 0  # held with that of the gate


def test_modules_stored_as_one_have_a_scalar_for_every_part() -> None:
    stacked = quantized("google__gemma-4-26B-A4B", quant_method="modelopt", quant_algo="FP8")
    assert scalar_bytes(stacked, "experts.gate_up_proj", ".weight_scale") == 30 * 128 * 2 * 4
    assert scalar_bytes(stacked, "experts.gate_up_proj", ".input_scale") == 30 * 128 * 4
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": nvfp4, "input_activations": {**nvfp4, "dynamic": "local"}}
    stated = {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    tower = quantized("Qwen__Qwen3-VL-4B-Instruct", quant_method="compressed-tensors", **stated)
    assert scalar_bytes(tower, "visual.blocks.{block}.attn.qkv", ".weight_global_scale") == 24 * 3 * 4


def test_modelopt_has_scalars_for_latents_whatever_the_cache() -> None:
    placement = quantized("zai-org__GLM-5.1", quant_method="modelopt", quant_algo="NVFP4", group_size=16)
    (scalars,) = (extra for extra in placement.extras if extra.component == "engine.kv_scales")
    assert (len(scalars.first), scalars.nbytes) == (78, (8,))  # q, k, v and probabilities in BF16
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}, "kv_cache_quant_algo": "FP8"}
    for stated in ({"quant_method": "modelopt", **mixed}, {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}):
        assert "engine.kv_scales" not in {extra.component for extra in quantized("zai-org__GLM-5.1", **stated).extras}


def test_towers_that_vllm_builds_plain_are_planned_plain() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    stated = {"format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    scout = quantized("meta-llama__Llama-4-Scout-17B-16E-Instruct", quant_method="compressed-tensors", **stated)
    formats = {p.entry.module.rule.pattern: p.entry.fmt.name for p in scout.placed if p.entry.module.rule.is_linear}
    assert {fmt for name, fmt in formats.items() if name.startswith(("vision_model", "multi_modal"))} == {"plain"}
    assert formats["language_model.model.layers.{layer}.self_attn.o_proj"] == "fp8_e4m3_channel"


def test_unknown_engine_is_refused_with_those_known() -> None:
    with pytest.raises(PlacementError, match="expected vllm, sglang, exllamav3, split; found tensorrt"):
        engine("tensorrt")
