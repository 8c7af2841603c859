"""The tensors of a GGUF file as those of the checkpoint it was made of: names, shapes and order of rows turned back.

Values stay as far from the original as the bits of the file leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gguf import GGUFReader, dequantize

Change = Callable[[str, torch.Tensor], torch.Tensor]
"""What undoes a change of the converter, given the name in the checkpoint."""


def field(reader: GGUFReader, name: str) -> Any:
    """Return what the file says under a key."""
    return reader.fields[name].contents()


def bf16_tensors(
    reader: GGUFReader, outer: Mapping[str, str], inner: Mapping[str, str], change: Change
) -> dict[str, torch.Tensor]:
    """Return every tensor in BF16.

    Args:
        reader: Of the file.
        outer: Names outside the layers, there and in the checkpoint.
        inner: Names of a layer's modules, likewise.
        change: Applied to every tensor in float32.
    """
    tensors = {}
    for stored in reader.tensors:
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if stored.name in outer:
            name = outer[stored.name]
        else:
            _, layer, module, _ = stored.name.split(".")
            name = f"model.layers.{layer}.{inner[module]}.weight"
        tensors[name] = change(name, tensor).to(torch.bfloat16).contiguous()
    return tensors
