"""Small models with random weights, large enough that a wrong slice changes every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tonnage.checkpoint.config import parse_config
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.synth.storage import Storage

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
"""One key-value head, so two ranks hold it twice; the embedding is the head; 300 rows are padded to 320."""

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Its query, key and value projections have biases."""

FEW_WORDS = {**QWEN2, "vocab_size": 80, "tie_word_embeddings": False}
"""80 rows are padded to 128: of four ranks, the last holds padding alone."""


FLOAT32 = {**QWEN2, "torch_dtype": "float32", "tie_word_embeddings": False}
"""Stored in F32, which engines that are told bfloat16 convert while they load."""

GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Its routers have rows that vLLM holds in F32."""


def compressed(weights: dict[str, Any], style: str) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint whose linear layers are stored in one way."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if weights["type"] == "float":
        group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": style,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FP8_CHANNEL = {
    **QWEN2,
    "quantization_config": compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
}
INT4_GROUP = {
    **QWEN2,
    "vocab_size": 256,
    "quantization_config": compressed(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized"
    ),
}


def write_model(config: dict[str, Any], folder: Path, storage: Storage = "config") -> Path:
    """Write a checkpoint of exactly this config with random weights of the scale a trained model has."""
    write_rehearsal(parse_config(config, name=folder.name), folder, RehearsalOptions(storage=storage))
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        stored = sorted(load_file(file).items())
        save_file({name: _values(name, tensor, generator) for name, tensor in stored}, file)
    return folder


def decoded(folder: Path, plain: Path) -> Path:
    """Write the BF16 checkpoint an MXFP8 one stands for: codes times 2^(scale - 127), a scale per 32 inputs."""
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    scales = {name.removesuffix("_scale"): stored.pop(name) for name in list(stored) if name.endswith("_scale")}
    for name, scale in scales.items():
        factors = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)
        stored[name] = (stored[name].double() * factors).to(torch.bfloat16)
    save_file(stored, plain / "model.safetensors")
    return plain


def _values(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return noise; projections count more than the embedding, or a model only repeats what it was told last."""
    noise = torch.randn(like.shape, generator=generator)
    if like.dtype == torch.uint8:  # scales of MXFP8; with the codes below, of the size of other projections
        return torch.randint(118, 121, like.shape, generator=generator, dtype=torch.uint8)
    if like.dtype == torch.float8_e4m3fn:
        return (noise * 32).to(like.dtype)
    if not like.dtype.is_floating_point:
        return (
            like
            if name.endswith("_shape")
            else torch.randint(-(2**31), 2**31, like.shape, generator=generator, dtype=like.dtype)
        )
    if name.endswith("_scale"):
        return (0.01 * noise.abs() + 0.005).to(like.dtype)
    if like.ndim == 1:
        return (1 + 0.2 * noise).to(like.dtype)
    scale = 0.5 if "embed_tokens" in name else 3
    return (noise * scale / like.shape[-1] ** 0.5).to(like.dtype)
