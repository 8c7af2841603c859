"""What several test files start from."""

from __future__ import annotations

import json
from typing import Any

from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.formats.exl3_v1 import SlotGeometry

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A config of tensors small enough to write out."""

KIMI_K3 = SlotGeometry(
    num_experts=896,
    hidden_size=3584,
    intermediate_size=3072,
    moe_layer_indices=tuple(range(1, 93)),
    codebook="lut_e4m3",
    bits=2,
    pre_block=512,
    post_block=128,
    row_alignment=4096,
    extent_alignment_slots=4,
    extent_barriers=(48,),
)
SMALL = SlotGeometry(
    num_experts=4, hidden_size=512, intermediate_size=1024, moe_layer_indices=(1, 3), codebook="mcg", bits=4
)
PAIRS = SlotGeometry(
    num_experts=3,
    hidden_size=256,
    intermediate_size=512,
    moe_layer_indices=(0,),
    codebook="mcg",
    pair_kinds=("P33", "P24", "P43"),
    row_alignment=4096,
    extent_alignment_slots=8,
)


def read_shards(files: dict[str, list[str]]) -> dict[str, ShardHeader]:
    """Read the headers of shards of one-byte tensors, by file name."""
    reader = HeaderReader()
    shards = {}
    for shard_file, names in files.items():
        header = {name: {"dtype": "U8", "shape": [], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
        raw = json.dumps(header).encode()
        prefix = len(raw).to_bytes(8, "little") + raw
        shards[shard_file] = reader.read(prefix, shard_file=shard_file, file_bytes=len(prefix) + len(names))
    return shards
