"""What quantisation configs say about which module, and what is refused of them."""

from __future__ import annotations

import copy
import json
import resource
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.api import checkpoint_from_config
from tonnage.checkpoint.name_tests import Kind
from tonnage.checkpoint.quant import QuantScheme, parse_quantization
from tonnage.errors import ConfigError, RecipeError, TonnageError
from tonnage.recipes.blueprint import MOST_EXPERTS, MOST_LAYERS

CONFIGS = Path(__file__).parent / "data" / "configs"
V4 = ("deepseek_v4", "deepseek_ref")


@cache
def text_of(name: str) -> str:
    return (CONFIGS / f"{name}.json").read_text()


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text_of(name))
    return config


def scheme_of(name: str) -> QuantScheme:
    config = load(name)
    dialect = "deepseek_v4" if config.get("model_type") in V4 else ""
    return parse_quantization(config, config.get("_hf_quant_config"), dialect=dialect)


BLOCK, TENSOR, NVFP4 = "fp8_e4m3_block128x128", "fp8_e4m3_tensor", "nvfp4_e2m1"
LLAMA4 = "language_model.model.layers.1.feed_forward"
LIGHTNING = "nvidia__NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
QWEN36 = "model.language_model.layers"

# (config, method, module, kind, format), read off the config by eye.
STATED: list[tuple[str, str, str, Kind, str]] = [
    ("Qwen__Qwen3-0.6B", "none", "model.layers.0.mlp.up_proj", "linear", "plain"),
    ("Qwen__Qwen3-32B-FP8", "fp8", "model.layers.0.mlp.up_proj", "linear", BLOCK),
    ("Qwen__Qwen3-32B-FP8", "fp8", "lm_head", "head", "plain"),
    ("Qwen__Qwen3-30B-A3B-FP8", "fp8", "model.layers.0.mlp.experts.5.up_proj", "expert", BLOCK),
    ("Qwen__Qwen3-30B-A3B-FP8", "fp8", "model.layers.47.mlp.gate", "linear", "plain"),
    ("MiniMaxAI__MiniMax-M2.5", "fp8", "model.layers.0.block_sparse_moe.gate", "linear", "plain"),  # entry "gate" inside
    ("MiniMaxAI__MiniMax-M2.5", "fp8", "model.layers.0.block_sparse_moe.experts.1.w1", "expert", BLOCK),
    ("deepseek-ai__DeepSeek-V3", "fp8", "model.layers.3.self_attn.kv_a_proj_with_mqa", "linear", BLOCK),
    ("zai-org__GLM-5-FP8", "fp8", "model.layers.3.mlp.experts.0.down_proj", "expert", BLOCK),
    ("deepseek-ai__DeepSeek-V4-Flash", "fp8", "layers.0.ffn.experts.0.w1", "expert", "mxfp4_e2m1"),
    ("deepseek-ai__DeepSeek-V4-Flash", "fp8", "layers.0.attn.wq_a", "linear", BLOCK),
    ("sgl-project__DeepSeek-V4-Flash-FP8", "fp8", "layers.0.ffn.experts.0.w1", "expert", BLOCK),
    ("nvidia__DeepSeek-V4-Flash-NVFP4", "fp8", "layers.0.ffn.experts.0.w1", "expert", NVFP4),
    ("nvidia__DeepSeek-V4-Flash-NVFP4", "fp8", "layers.0.attn.wq_a", "linear", BLOCK),
    ("nvidia__DeepSeek-V4-Flash-NVFP4", "fp8", "mtp.0.ffn.experts.0.w1", "expert", "mxfp4_e2m1"),
    ("moonshotai__Kimi-K2.5", "compressed-tensors", "language_model.model.layers.1.mlp.experts.0.up_proj", "expert", "int4_pack_g32"),
    ("moonshotai__Kimi-K2.5", "compressed-tensors", "language_model.model.layers.1.self_attn.o_proj", "linear", "plain"),
    ("moonshotai__Kimi-K2.5", "compressed-tensors", "language_model.model.layers.1.mlp.shared_experts.up_proj", "linear", "plain"),
    ("moonshotai__Kimi-K2.5", "compressed-tensors", "language_model.model.layers.0.mlp.up_proj", "linear", "plain"),
    ("moonshotai__Kimi-K3", "compressed-tensors", "language_model.model.layers.1.block_sparse_moe.experts.895.w2", "expert", "mxfp4_e2m1"),
    ("moonshotai__Kimi-K3", "compressed-tensors", "vision_tower.encoder.blocks.0.wqkv", "linear", "plain"),
    ("RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "compressed-tensors", f"{LLAMA4}.experts.0.up_proj", "expert", "fp8_e4m3_channel"),
    ("RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "compressed-tensors", f"{LLAMA4}.router", "linear", "plain"),
    ("nvidia__Llama-3.1-70B-Instruct-FP8", "modelopt", "model.layers.0.mlp.up_proj", "linear", TENSOR),
    ("nvidia__Llama-3.1-70B-Instruct-FP8", "modelopt", "lm_head", "head", "plain"),
    ("nvidia__DeepSeek-V3.1-NVFP4", "modelopt", "model.layers.3.mlp.experts.9.up_proj", "expert", NVFP4),
    ("nvidia__DeepSeek-V3.1-NVFP4", "modelopt", "model.layers.0.self_attn.kv_b_proj", "linear", "plain"),
    ("nvidia__DeepSeek-V3.1-NVFP4", "modelopt", "model.layers.61.mlp.experts.9.up_proj", "expert", "plain"),  # wildcard 61*
    ("nvidia__Kimi-K2.6-NVFP4", "modelopt", "language_model.model.layers.0.mlp.up_proj", "linear", "plain"),
    ("nvidia__Kimi-K2.6-NVFP4", "modelopt", "language_model.model.layers.10.mlp.experts.3.up_proj", "expert", NVFP4),
    ("nvidia__Qwen3.5-397B-A17B-NVFP4", "modelopt", "model.language_model.layers.3.mlp.shared_expert.up_proj", "linear", "plain"),
    ("nvidia__Qwen3.6-27B-NVFP4", "modelopt_mixed", f"{QWEN36}.0.linear_attn.out_proj", "linear", TENSOR),
    ("nvidia__Qwen3.6-27B-NVFP4", "modelopt_mixed", "mtp.layers.0.mlp.up_proj", "linear", "plain"),
    (LIGHTNING, "modelopt_mixed", "backbone.layers.0.mixer.in_proj", "linear", TENSOR),
    (LIGHTNING, "modelopt_mixed", "backbone.layers.0.mixer.conv1d", "linear", "plain"),
    ("openai__gpt-oss-20b", "mxfp4", "model.layers.0.mlp.experts.gate_up_proj", "expert", "mxfp4_e2m1"),
    ("openai__gpt-oss-20b", "mxfp4", "model.layers.0.self_attn.q_proj", "linear", "plain"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "method", "module", "kind", "fmt"), STATED)
def test_config_states_this_format_for_this_module(config: str, method: str, module: str, kind: Kind, fmt: str) -> None:
    scheme = scheme_of(config)
    assert scheme.method == method
    assert scheme.format_of(module, kind).name == fmt


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_public_config_is_read_or_ignored_with_a_note(path: Path) -> None:
    config = load(path.stem)
    text = config.get("text_config") or {}
    stated = config.get("quantization_config") or text.get("quantization_config") or config.get("_hf_quant_config")
    scheme = scheme_of(path.stem)
    assert (scheme.method == "none") == (not stated or bool(scheme.notes))
    assert bool(scheme.rules) == (scheme.method != "none")


def test_config_without_a_method_or_producer_is_ignored_as_engines_do() -> None:
    assert scheme_of("Qwen__Qwen3-32B-FP8-Static-PerTensor").notes == (
        "quantization_config names no quant_method: engines ignore it, and so does this plan",
    )
    assert scheme_of("nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8").notes == (
        "hf_quant_config.json names no producer modelopt: engines ignore it, and so does this plan",
    )


def test_quantised_kv_caches_are_seen() -> None:
    assert scheme_of("nvidia__Llama-3.1-70B-Instruct-FP8").kv_scales
    assert scheme_of("nvidia__Gemma-4-31B-IT-NVFP4").kv_scales
    assert not scheme_of("moonshotai__Kimi-K3").kv_scales


def ct(**weights: Any) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": weights.pop("format", "x"),
            "ignore": weights.pop("ignore", ["lm_head"]),
            "config_groups": {
                "group_0": {
                    "targets": weights.pop("targets", ["Linear"]),
                    "weights": weights,
                    "input_activations": weights.pop("acts", None),
                }
            },
        }
    }


def quant(**stated: Any) -> dict[str, Any]:
    return {"quantization_config": stated}


FLAVOURS = {
    "ct mxfp8": (ct(num_bits=8, type="float", strategy="group", group_size=32), "mxfp8_e4m3"),
    "ct mxfp4": (
        ct(num_bits=4, type="float", strategy="group", group_size=32, format="mxfp4-pack-quantized"),
        "mxfp4_e2m1",
    ),
    "ct nvfp4": (ct(num_bits=4, type="float", strategy="tensor_group", group_size=16, acts={"num_bits": 4}), NVFP4),
    "ct int4": (
        ct(num_bits=4, type="int", strategy="group", group_size=128, format="pack-quantized"),
        "int4_pack_g128",
    ),
    "ct fp8 tensor": (ct(num_bits=8, type="float", strategy="tensor"), TENSOR),
    "ct fp8 channel": (ct(num_bits=8, type="float", strategy="channel"), "fp8_e4m3_channel"),
    "ct int8 channel": (
        ct(num_bits=8, type="int", strategy="channel", format="int-quantized"),
        "int8_channel",
    ),
    "ct fp8 block": (ct(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), BLOCK),
    "fp8 without blocks": (quant(quant_method="fp8", activation_scheme="static"), TENSOR),
    "fp8 in capitals": (quant(quant_method="FP8", weight_block_size=[128, 128]), BLOCK),
    "mxfp8 native": (quant(quant_method="mxfp8"), "mxfp8_e4m3"),
    "modelopt mxfp8": (quant(quant_method="modelopt", quant_algo="MXFP8", exclude_modules=[]), "mxfp8_e4m3"),
    "modelopt fp8 block": (quant(quant_method="modelopt", quant_algo="FP8_PB_WO"), BLOCK),
    "modelopt fp8 channel": (
        quant(quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
        "fp8_e4m3_channel",
    ),
    "modelopt w4a16": (quant(quant_method="modelopt_fp4", quant_algo="W4A16_NVFP4"), NVFP4),
    "gptq": (quant(quant_method="gptq", bits=4, group_size=128), "gptq_int4_g128"),
    "awq": (quant(quant_method="awq", w_bit=4, q_group_size=128), "awq_int4_g128"),
    "awq named as gptq does": (quant(quant_method="awq", bits=4, group_size=64), "awq_int4_g64"),
    "inside text_config": ({"text_config": quant(quant_method="fp8", weight_block_size=[128, 128])}, BLOCK),
}


@pytest.mark.parametrize(("config", "fmt"), FLAVOURS.values(), ids=FLAVOURS)
def test_flavour_gives_linear_layers_their_format_and_leaves_the_head(config: dict[str, Any], fmt: str) -> None:
    scheme = parse_quantization(config)
    assert scheme.format_of("model.layers.0.mlp.up_proj", "linear").name == fmt
    if scheme.method != "modelopt":  # modelopt excludes the head by name only
        assert scheme.format_of("lm_head", "head").name == "plain"


def test_weight_only_nvfp4_has_no_input_scale() -> None:
    def suffixes(algo: str) -> list[str]:
        scheme = parse_quantization(quant(quant_method="modelopt", quant_algo=algo))
        return [part.suffix for part in scheme.format_of("x", "linear").parts]

    assert suffixes("NVFP4") == [".weight", ".weight_scale", ".weight_scale_2", ".input_scale"]
    assert suffixes("W4A16_NVFP4") == [".weight", ".weight_scale", ".weight_scale_2"]


def test_groups_with_different_targets_give_different_formats() -> None:
    config = ct(num_bits=8, type="float", strategy="channel")
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    groups["group_0"]["targets"] = ["re:.*self_attn.*", "model.exactly.this"]
    scheme = parse_quantization(config)
    names = ("model.layers.0.self_attn.q_proj", "model.exactly.this", "m.experts.0.w1", "m.mlp.up_proj")
    formats = [scheme.format_of(name, "linear").name for name in names]
    assert formats == ["fp8_e4m3_channel", "fp8_e4m3_channel", NVFP4, "plain"]


def test_modelopt_exclusion_is_wildcard_exact_or_substring() -> None:
    scheme = parse_quantization(
        quant(quant_method="modelopt", quant_algo="FP8", exclude_modules=["*.mlp.gate", "layers.1?.*", "proj_out"])
    )
    plain = ["a.mlp.gate", "layers.12.up", "x.proj_out.y", "proj_out"]
    assert [scheme.format_of(name, "linear").name for name in plain] == ["plain"] * 4
    assert [scheme.format_of(n, "linear").name for n in ("a.mlp.gate.x", "layers.1.up", "proj")] == [TENSOR] * 3


def test_entry_of_an_fp8_ignore_list_names_whole_path_components() -> None:
    scheme = parse_quantization(quant(quant_method="fp8", modules_to_not_convert=["gate", "layers.1.mlp", "model"]))
    assert scheme.format_of("m.layers.0.mlp.gate", "linear").is_plain
    assert scheme.format_of("m.layers.1.mlp.up_proj", "linear").is_plain
    assert scheme.format_of("model.x", "linear").is_plain
    for name in ("m.layers.0.mlp.gate_proj", "m.layers.11.mlp.up_proj", "m.my_model.x"):
        assert scheme.format_of(name, "linear").name == TENSOR


def test_exl3_config_tells_no_rates_and_its_codebook() -> None:
    scheme = parse_quantization(quant(quant_method="exl3", bits=2.5, codebook="mul1"))
    assert scheme.rates_unknown
    assert scheme.codebook == "mul1"


def check_lines(error: TonnageError, *, most: int = 1000) -> None:
    """A refusal is some lines of bounded length."""
    lines = str(error).splitlines()
    assert 1 <= len(lines) <= most
    assert all(len(line) <= 400 for line in lines)


# --- refused -----------------------------------------------------------------------------------------------------------


def test_patterns_of_gptq_leave_modules_plain_or_give_them_sizes_of_their_own() -> None:
    dynamic = {r"-:.*\.shared_expert\.": {}, r"+:model\.layers\.3\.": {"bits": 8}, ".*o_proj": {"group_size": 32}}
    scheme = parse_quantization(quant(quant_method="gptq", bits=4, group_size=128, dynamic=dynamic))
    names = {
        "model.layers.3.mlp.shared_expert.up_proj": "plain",  # the first that matches
        "model.layers.3.self_attn.o_proj": "gptq_int8_g128",
        "model.layers.4.self_attn.o_proj": "gptq_int4_g32",
        "model.layers.4.self_attn.q_proj": "gptq_int4_g128",
    }
    assert {name: scheme.format_of(name, "linear").name for name in names} == names


def test_patterns_of_gptq_pack_nothing_that_is_left_plain() -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}}
    scheme = parse_quantization(quant(**stated, modules_in_block_to_quantize=["mlp."]))
    assert scheme.format_of("model.layers.0.mlp.up_proj", "linear").name == "gptq_int8_g128"
    plain = (("lm_head", "head"), ("visual.blocks.0.mlp.fc1", "tower"), ("model.layers.0.self_attn.q_proj", "linear"))
    assert all(scheme.format_of(name, kind).is_plain for name, kind in plain)
    assert parse_quantization(quant(**stated, lm_head=True)).format_of("lm_head", "head").name == "gptq_int8_g128"


def test_gptq_leaves_plain_what_its_blocks_do_not_list() -> None:
    blocks = [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]
    stated = quant(quant_method="gptq", bits=4, group_size=128, modules_in_block_to_quantize=blocks)
    scheme = parse_quantization(stated)
    assert scheme.format_of("model.layers.0.self_attn.k_proj", "linear").name == "gptq_int4_g128"
    assert scheme.format_of("model.layers.0.self_attn.q_proj", "linear").is_plain


def test_entry_of_an_awq_list_is_any_part_of_a_name() -> None:
    listed = ["model.layers.0.", "mlp.gate"]
    scheme = parse_quantization(quant(quant_method="awq", bits=4, group_size=128, modules_to_not_convert=listed))
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"):
        assert scheme.format_of(name, "linear").is_plain
    assert scheme.format_of("model.layers.10.mlp.up_proj", "linear").name == "awq_int4_g128"


def test_towers_are_plain_where_no_list_says_so() -> None:
    packed = [parse_quantization(quant(quant_method=name, bits=4, group_size=128)) for name in ("gptq", "awq")]
    assert [scheme.format_of("visual.blocks.0.attn.qkv", "tower").is_plain for scheme in packed] == [True, True]
    modelopt = parse_quantization(quant(quant_method="modelopt", quant_algo="FP8"))
    assert modelopt.format_of("model.vision_tower.encoder.layers.0.self_attn.q_proj", "tower").is_plain
    assert modelopt.format_of("model.visual.blocks.0.attn.qkv", "tower").name == TENSOR
    name = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    mixed = quant(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={name: {"quant_algo": "FP8"}})
    assert parse_quantization(mixed).format_of(name, "tower").name == TENSOR  # a list by layer says so


def test_too_many_patterns_of_gptq_are_counted() -> None:
    dynamic = {f"-:{number}": {} for number in range(5000)}
    with pytest.raises(ConfigError, match="dynamic is too long; expected at most 4096 patterns; found 5000"):
        parse_quantization(quant(quant_method="gptq", bits=4, group_size=128, dynamic=dynamic))


HOSTILE: dict[str, dict[str, Any]] = {
    "no object": {"quantization_config": [1]},
    "a number": {"quantization_config": 7},
    "unknown method": quant(quant_method="bitsandbytes"),
    "method is a number": quant(quant_method=8),
    "method is nested": quant(quant_method={"a": {"b": []}}),
    "method of a megabyte": quant(quant_method="x" * 1_000_000),
    "unknown algo": quant(quant_method="modelopt", quant_algo="W4A8_AWQ"),
    "algo is a list": quant(quant_method="modelopt", quant_algo=["FP8"]),
    "no algo": quant(quant_method="modelopt"),
    "unknown activation scheme": quant(quant_method="fp8", activation_scheme="sometimes"),
    "block is a number": quant(quant_method="fp8", weight_block_size=128),
    "block of three": quant(quant_method="fp8", weight_block_size=[128, 128, 128]),
    "block of zero": quant(quant_method="fp8", weight_block_size=[0, 128]),
    "block of floats": quant(quant_method="fp8", weight_block_size=[128.0, 128]),
    "block of booleans": quant(quant_method="fp8", weight_block_size=[True, True]),
    "huge block": quant(quant_method="fp8", weight_block_size=[2**62, 128]),
    "ignore list is a text": quant(quant_method="fp8", ignored_layers="lm_head"),
    "ignore list of numbers": quant(quant_method="fp8", modules_to_not_convert=[1]),
    "ignore list is an object": quant(quant_method="fp8", modules_to_not_convert={"lm_head": True}),
    "ignore list without end": quant(quant_method="fp8", modules_to_not_convert=["x"] * 100_000),
    "entry without end": quant(quant_method="fp8", modules_to_not_convert=["x" * 1000]),
    "too many wildcards": quant(quant_method="modelopt", quant_algo="FP8", exclude_modules=["*a*"] * 5000),
    "wildcard without end": quant(quant_method="modelopt", quant_algo="FP8", exclude_modules=["*" + "?" * 600]),
    "ct without groups": quant(quant_method="compressed-tensors"),
    "ct with empty groups": quant(quant_method="compressed-tensors", config_groups={}),
    "ct group is a list": quant(quant_method="compressed-tensors", config_groups={"g": []}),
    "ct group is a number": quant(quant_method="compressed-tensors", config_groups={"g": 2**63}),
    "ct without weights": quant(quant_method="compressed-tensors", config_groups={"g": {"targets": ["Linear"]}}),
    "ct format is a list": ct(num_bits=8, type="float", strategy="channel", format=["x"]),
    "ct targets are a text": ct(num_bits=8, type="float", strategy="channel", targets="Linear"),
    "ct of 3 bits": ct(num_bits=3, type="int", strategy="group", group_size=32, format="pack-quantized"),
    "ct of 2^62 bits": ct(num_bits=2**62, type="int", strategy="group", group_size=32, format="pack-quantized"),
    "ct of negative groups": ct(num_bits=4, type="int", strategy="group", group_size=-1, format="pack-quantized"),
    "ct of nested bits": ct(num_bits=[[8]], type={"float": 1}, strategy=None),
    "ct block missing": ct(num_bits=8, type="float", strategy="block"),
    "ct pattern that runs away": ct(num_bits=8, type="float", strategy="channel", ignore=["re:((a*)*)*$"]),
    "ct pattern that is none": ct(num_bits=8, type="float", strategy="channel", ignore=["re:["]),
    "ct pattern with a back reference": ct(num_bits=8, type="float", strategy="channel", ignore=[r"re:(a)\1"]),
    "ct pattern in targets": ct(num_bits=8, type="float", strategy="channel", targets=["re:("]),
    "mixed without layers": quant(quant_method="modelopt", quant_algo="MIXED_PRECISION"),
    "mixed list": quant(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=["a"]),
    "mixed layer is a text": quant(
        quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": "FP8"}
    ),
    "mixed layer without algo": quant(
        quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": {}}
    ),
    "gptq without bits": quant(quant_method="gptq", group_size=128),
    "gptq of 3 bits": quant(quant_method="gptq", bits=3, group_size=128),
    "gptq bits as text": quant(quant_method="gptq", bits="4", group_size=128),
    "gptq group -1": quant(quant_method="gptq", bits=4, group_size=-1),
    "gptq patterns are a list": quant(quant_method="gptq", bits=4, group_size=128, dynamic=["-:x"]),
    "gptq pattern that runs away": quant(quant_method="gptq", bits=4, group_size=128, dynamic={"-:((a*)*)*$": {}}),
    "gptq pattern says a number": quant(quant_method="gptq", bits=4, group_size=128, dynamic={"+:x": 8}),
    "gptq pattern of 3 bits": quant(quant_method="gptq", bits=4, group_size=128, dynamic={"+:x": {"bits": 3}}),
    "gptq with too many patterns": quant(
        quant_method="gptq", bits=4, group_size=128, dynamic={f"-:{n}": {} for n in range(5000)}
    ),
    "gptq blocks are a text": quant(
        quant_method="gptq", bits=4, group_size=128, modules_in_block_to_quantize="mlp.up_proj"
    ),
    "gptq blocks of numbers": quant(quant_method="gptq", bits=4, group_size=128, modules_in_block_to_quantize=[[1]]),
    "awq of 0 bits": quant(quant_method="awq", bits=0, group_size=128),
    "exl3 codebook is a number": quant(quant_method="exl3", codebook=3),
    "hf_quant without quantization": {"hf": {"producer": {"name": "modelopt"}}},
    "hf_quant quantization is a list": {"hf": {"producer": {"name": "modelopt"}, "quantization": []}},
}


@pytest.mark.parametrize("config", HOSTILE.values(), ids=HOSTILE)
def test_hostile_quantisation_is_refused_in_one_line(config: dict[str, Any]) -> None:
    config = dict(config)
    with pytest.raises(TonnageError) as caught:
        parse_quantization(config, config.pop("hf", None))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 400


def test_unknown_expert_dtype_is_refused() -> None:
    config = {**quant(quant_method="fp8", weight_block_size=[128, 128]), "expert_dtype": "fp6"}
    with pytest.raises(ConfigError, match="unknown expert_dtype; expected fp4 or fp8; found fp6"):
        parse_quantization(config, dialect="deepseek_v4")


# --- hostile configs, end to end ---------------------------------------------------------------------------------------


def draw(config: dict[str, Any]) -> int:
    """Everything a config alone goes through; returns the payload."""
    return checkpoint_from_config(config, name="x").assignment.payload_bytes


def changed(name: str, value: Any, *path: str) -> dict[str, Any]:
    config = load(name)
    here = config
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return config


LLAMA, MOE = "meta-llama__Llama-3.1-8B-Instruct", "Qwen__Qwen3-30B-A3B"
BEYOND: dict[str, dict[str, Any]] = {
    "10^9 layers": changed(LLAMA, 10**9, "num_hidden_layers"),
    "negative layers": changed(LLAMA, -1, "num_hidden_layers"),
    "one layer too many": changed(LLAMA, MOST_LAYERS + 1, "num_hidden_layers"),
    "vocabulary of 10^18": changed(LLAMA, 10**18, "vocab_size"),
    "vocabulary of 2^63": changed(LLAMA, 2**63, "vocab_size"),
    "vocabulary of 400 digits": changed(LLAMA, 10**399, "vocab_size"),
    "2^62 experts": changed(MOE, 2**62, "num_experts"),
    "one expert too many": changed(MOE, MOST_EXPERTS + 1, "num_experts"),
    "2^62 stacked experts": changed("openai__gpt-oss-20b", 2**62, "num_local_experts"),
    "2^62 heads": changed(LLAMA, 2**62, "num_attention_heads"),
    "no heads": changed(LLAMA, 0, "num_attention_heads"),
    "hidden size as text": changed(LLAMA, "4096", "hidden_size"),
    "hidden size with a fraction": changed(LLAMA, 4096.5, "hidden_size"),
    "hidden size is a list": changed(LLAMA, [4096], "hidden_size"),
    "hidden size is null": changed(LLAMA, None, "hidden_size"),
    "dtype is a list": changed(LLAMA, ["bfloat16"], "torch_dtype"),
    "dtype unknown": changed(LLAMA, "float3", "torch_dtype"),
    "model_type is a number": changed(LLAMA, 3, "model_type"),
    "architectures are a text": changed(LLAMA, "LlamaForCausalLM", "architectures"),
    "text_config is a list": changed("moonshotai__Kimi-K3", [], "text_config"),
    "vision_config is a number": changed("moonshotai__Kimi-K3", 1, "vision_config"),
    "layer lists are texts": changed(
        "moonshotai__Kimi-K3", "4", "text_config", "linear_attn_config", "full_attn_layers"
    ),
    "too few layer types": changed("Qwen__Qwen3.5-35B-A3B", ["full_attention"], "text_config", "layer_types"),
    "layer types are lists": changed("Qwen__Qwen3.5-35B-A3B", [[]] * 10**6, "text_config", "layer_types"),
}


@pytest.mark.parametrize("config", BEYOND.values(), ids=BEYOND)
def test_config_beyond_reason_is_refused_at_once(config: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises((ConfigError, RecipeError)) as caught:
        draw(config)
    check_lines(caught.value)
    assert time.process_time() - began < 10


COSTLY: dict[str, dict[str, Any]] = {
    "a million layer types": changed("Qwen__Qwen3.5-35B-A3B", ["full_attention"] * 10**6, "text_config", "layer_types"),
    "a million dense layers listed": changed(MOE, list(range(10**6)), "mlp_only_layers"),
    "as many layers as are believed": changed(MOE, MOST_LAYERS, "num_hidden_layers"),
    "a long ignore list on many layers": {
        **changed("Qwen__Qwen3-30B-A3B-FP8", MOST_LAYERS, "num_hidden_layers"),
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [f"a.{i}" for i in range(60_000)]},
    },
    "substrings on many layers": {
        **changed(MOE, MOST_LAYERS, "num_hidden_layers"),
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [f"a.{i}" for i in range(60_000)]},
    },
    "patterns on many layers": {
        **changed(MOE, MOST_LAYERS, "num_hidden_layers"),
        **ct(num_bits=8, type="float", strategy="channel", ignore=[f"re:(.|..)*a{i}" for i in range(4000)]),
    },
    "patterns that run away": {**load(MOE), **ct(num_bits=8, type="float", strategy="channel", ignore=["re:(.|..)+$X", "re:" + ".*" * 60 + "X"])},
}  # fmt: skip


@pytest.mark.parametrize("config", COSTLY.values(), ids=COSTLY)
def test_config_made_to_be_costly_takes_bounded_time_and_memory(config: dict[str, Any]) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        draw(config)
    except TonnageError as error:
        check_lines(error)
    assert time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB on Linux


JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**62, 2**63, 10**18, -(2**70), 10**399, 0.5, -0.0, float("nan"), float("inf"),
    "", "x", "4096", "bfloat16", "full_attention", "re:((a*)*)*$", "re:[", "*", "[z-a]*", "\x00\n", "\ud800", [], {}, [[]],
    [None], ["a"], [1, 2], [2**62, 2**62], ["re:("], ["*[!]*"], [True], {"a": {"b": [[]]}}, [0] * 1000, {"": 1},
]  # fmt: skip
MUTATED = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stat().st_size < 60_000)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:4]))
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


@cache
def paths_of(name: str) -> list[tuple[str | int, ...]]:
    return [path for path in paths(load(name)) if not str(path[0]).startswith("_") or path[0] == "_hf_quant_config"]


junk = st.one_of(
    st.sampled_from(JUNK),
    st.integers(-(2**80), 2**80),
    st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)), lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)), max_leaves=6),
)  # fmt: skip


def mutate(config: Any, path: tuple[str | int, ...], value: Any, *, delete: bool) -> None:
    for key in path[:-1]:
        inside = isinstance(config, dict) and key in config
        inside = inside or (isinstance(config, list) and isinstance(key, int) and key < len(config))
        if not inside:
            return
        config = config[key]
    if isinstance(config, dict) and path[-1] in config:
        if delete:
            del config[path[-1]]
        else:
            config[path[-1]] = copy.deepcopy(value)
    elif isinstance(config, list) and isinstance(path[-1], int) and path[-1] < len(config):
        config[path[-1]] = copy.deepcopy(value)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), name=st.sampled_from(MUTATED), count=st.integers(1, 3))
def test_mutated_config_is_drawn_or_refused_never_anything_else(data: st.DataObject, name: str, count: int) -> None:
    config = load(name)
    for _ in range(count):
        path = data.draw(st.sampled_from(paths_of(name)))
        mutate(config, path, data.draw(junk), delete=data.draw(st.booleans()))
    began = time.process_time()
    try:
        draw(config)
    except TonnageError as error:
        check_lines(error)
    assert time.process_time() - began < 10


quant_keys = st.sampled_from(
    [
        "quant_method",
        "quant_algo",
        "weight_block_size",
        "activation_scheme",
        "ignored_layers",
        "modules_to_not_convert",
        "config_groups",
        "ignore",
        "exclude_modules",
        "quantized_layers",
        "kv_cache_scheme",
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "lm_head",
        "codebook",
        "format",
        "moe_quant_algo",
    ]
)
methods = st.sampled_from(
    ["fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "gptq", "awq", "exl3"]
)


@settings(max_examples=250, deadline=None)
@given(
    stated=st.dictionaries(quant_keys, junk, max_size=6),
    method=st.one_of(methods, junk),
    dialect=st.sampled_from(["", "deepseek_v4"]),
)
def test_any_quantisation_config_is_read_or_refused(stated: dict[str, Any], method: Any, dialect: str) -> None:
    try:
        scheme = parse_quantization({"quantization_config": {**stated, "quant_method": method}}, dialect=dialect)
    except TonnageError as error:
        check_lines(error)
    else:
        assert scheme.format_of("model.layers.0.mlp.up_proj", "linear").parts


@settings(max_examples=150, deadline=None)
@given(group=st.dictionaries(st.sampled_from(["targets", "weights", "input_activations", "format"]), st.one_of(junk, st.dictionaries(st.sampled_from(["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "dynamic"]), st.one_of(junk, st.sampled_from([4, 8, 16, 32, "float", "int", "group", "channel", "tensor", "block"])))), max_size=4))  # fmt: skip
def test_any_compressed_tensors_group_is_read_or_refused(group: dict[str, Any]) -> None:
    stated = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": "pack-quantized"}
    try:
        parse_quantization({"quantization_config": stated})
    except TonnageError as error:
        check_lines(error, most=1)
