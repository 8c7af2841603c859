"""One small request of every kind, for the description of the interface: each can be sent as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_SERVED = {
    "checkpoint": {"config": _CONFIG, "name": "small-llama"},
    "engine": "vllm",
    "gpu": "h100",
    "profile": "c4-p4096",
    "context": 8192,
}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "plan": {**_SERVED, "tp": 2},
    "fit": {**_SERVED, "gpus": 2},
    "regions": {**_SERVED, "tp": 2, "most_concurrency": 16},
    "flags": {**_SERVED, "tp": 2},
    "observe": {
        "log": "INFO 01-02 03:04:05 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 4.2 seconds\n",
        "gpu": "h100",
    },
    "report": {**_SERVED, "tp": 2},
}
"""By the names of answers."""
