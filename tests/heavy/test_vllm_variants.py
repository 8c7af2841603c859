"""Plans against vLLM's own classes for families and quantisation methods that no config in tests/data has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from answers import assert_same
from vllm_classes import Rank

pytestmark = pytest.mark.heavy

FAMILIES = Path(__file__).with_name("configs")
CONFIGS = Path(__file__).parent.parent / "data" / "configs"
DENSE = "meta-llama__Llama-3.1-8B-Instruct"
EXPERTS = "Qwen__Qwen3-30B-A3B"
TOPOLOGIES = {
    "tp=1": Rank(),
    "tp=2": Rank(tp=2, rank=1),
    "tp=2 pp=2": Rank(tp=2, pp=2, rank=3),
    "tp=4": Rank(tp=4, rank=2),
    "tp=8": Rank(tp=8, rank=7),
}
FUSED = {
    "experts without a gate": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "fp8 tensor, static", Rank(tp=2, rank=1)),
    "experts without a gate, packed": ("nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "compressed int4", Rank(tp=2)),
    "projections stored as one": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "compressed nvfp4", Rank(tp=2, pp=2)),
    "projections of a tower stored as one": ("Qwen__Qwen3-VL-4B-Instruct", "compressed nvfp4", Rank(tp=4, rank=3)),
    "experts stored as one": ("google__gemma-4-26B-A4B", "modelopt fp8", Rank(tp=2, rank=1)),
    "experts stored as one, spread": ("google__gemma-4-26B-A4B", "modelopt nvfp4", Rank(tp=2, ep=True, rank=1)),
    "latents without a scaled cache": ("zai-org__GLM-5.1", "modelopt nvfp4", Rank(tp=8, ep=True, pp=2, rank=13)),
    "tower that is never quantised": (
        "meta-llama__Llama-4-Scout-17B-16E-Instruct",
        "compressed int8 channel",
        Rank(tp=4),
    ),
    "tower that modelopt leaves": (
        "mistralai__Mistral-Small-3.1-24B-Instruct-2503",
        "modelopt mxfp8",
        Rank(pp=3, rank=1),
    ),
    "latent key without a latent query": ("moonshotai__Kimi-VL-A3B-Instruct", "compressed int4", Rank(tp=2, rank=1)),
}
"""Modules that engines put together, or take for plain, in ways of their own."""
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(48)]
MODELOPT_PLAIN = ["lm_head", "model.layers.*.mlp.gate", "*.mlp.shared_expert_gate"]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
MX = {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}


def compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


METHODS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "dynamic": {r"-:.*mlp\.gate$": {}},
    },
    "fp8 tensor, dynamic": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", *ROUTERS],
    },
    "fp8 tensor, static": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head", *ROUTERS],
    },
    "modelopt mxfp8": {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    },
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": MODELOPT_PLAIN},
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": MODELOPT_PLAIN},
    "compressed mxfp8": compressed("mxfp8-quantized", MX, {**MX, "dynamic": True}),
    "compressed fp8 tensor": compressed(
        "float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}
    ),
    "compressed fp8 channel": compressed(
        "float-quantized", {**FP8, "strategy": "channel"}, {**FP8, "dynamic": True, "strategy": "token"}
    ),
    "compressed int8 channel": compressed(
        "int-quantized",
        {**FP8, "type": "int", "strategy": "channel"},
        {**FP8, "type": "int", "dynamic": True, "strategy": "token"},
    ),
    "compressed fp8 block": compressed(
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {**FP8, "dynamic": True, "strategy": "group", "group_size": 128},
    ),
    "compressed int4": compressed(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group", "group_size": 128},
    ),
    "compressed nvfp4": compressed("nvfp4-pack-quantized", {**NVFP4, "dynamic": False}, {**NVFP4, "dynamic": "local"}),
}


def methods() -> list[Any]:
    """Return every method with both configs at some topologies."""
    topologies = {DENSE: [Rank(), Rank(tp=4)], EXPERTS: [Rank(), Rank(tp=2, rank=1), Rank(tp=4), Rank(tp=4, ep=True)]}
    return [
        pytest.param(
            method,
            name,
            where,
            id=f"{method} {name} tp={where.tp}{' ep' if where.ep else ''}",
        )
        for method in METHODS
        for name, ranks in topologies.items()
        for where in ranks
    ]


@pytest.mark.parametrize("where", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.json")), ids=lambda path: path.stem)
def test_plan_of_a_further_family_equals_vllm(path: Path, where: Rank):
    assert_same(json.loads(path.read_text()), where)


@pytest.mark.parametrize(("method", "name", "where"), methods())
def test_plan_of_a_further_method_equals_vllm(method: str, name: str, where: Rank):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    quantization = METHODS[method]
    if method == "awq" and name == EXPERTS:  # excluded by a part of the name, which is one of gate_proj as well
        quantization = {**quantization, "modules_to_not_convert": ["mlp.gate"]}

    assert_same({**config, "quantization_config": quantization}, where)


@pytest.mark.parametrize(("name", "method", "where"), FUSED.values(), ids=FUSED)
def test_plan_of_what_is_fused_or_left_plain_equals_vllm(name: str, method: str, where: Rank):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert_same({**config, "quantization_config": METHODS[method]}, where)
