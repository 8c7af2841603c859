"""A small checkpoint with EXL3 experts as they are published: codebook mcg, every projection the tensor of one release."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from safetensors import deserialize

from samples import LLAMA
from tonnage.checkpoint.config import parse_config
from tonnage.synth.io import RehearsalOptions, write_rehearsal

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
TENSOR = json.loads((Path(__file__).parent / "data" / "exl3_slices.json").read_text())["tensor"]
MCG = bytes.fromhex("ed1faccb")
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""Experts as wide as the published EXL3 tensor: 256 inputs, 256 outputs."""


def load(folder: Path) -> Stored:
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in deserialize(file.read_bytes())
    }


def save(path: Path, tensors: Stored) -> None:
    header: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in tensors.values()))


def rehearse_exl3(folder: Path, change: Callable[[Stored], Stored] = lambda tensors: tensors, **how: Any) -> Path:
    """Write a small model with EXL3 experts of the codebook mcg, of which the published tensor is each projection."""
    options = {"scaled_down": False, "experts": "exl3", "bits": Fraction(3)} | how
    write_rehearsal(parse_config(MOE, name="moe"), folder, RehearsalOptions(**options))
    tensors: Stored = {}
    for name, (dtype, shape, raw) in load(folder).items():
        module, _, part = name.rpartition(".")
        if part == "mul1":
            tensors[f"{module}.mcg"] = (dtype, shape, MCG)
        elif ".experts." in name and part in ("trellis", "suh", "svh"):
            tensors[name] = (dtype, shape, bytes.fromhex(TENSOR[f"{part}_hex"]))
            assert len(raw) == len(tensors[name][2])
        else:
            tensors[name] = (dtype, shape, raw)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save(folder / "model.safetensors", change(tensors))
    return folder
