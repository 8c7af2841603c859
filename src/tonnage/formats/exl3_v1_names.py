"""The two spellings of the slot container: exl3-v1 and BTX. Every payload byte and every rule is the same.

Source:
    local-inference-lab/b12x, schema texts of ``exl3-v1`` and ``btx-atoms-v1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Codebook = Literal["mcg", "lut_e4m3", "lut_fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one of the two spellings of the container names things; payload bytes are equal.

    Attributes:
        kind: Manifest ``kind``.
        schema: Manifest ``schema``.
        manifest_name: File name of the manifest.
        layer_prefix: Beginning of a layer's file name.
        channels_key: Geometry key, and metadata key, of the channels per slot.
        slots_key: Geometry key of the number of slots.
        hadamard_key: Key that switches the intermediate Hadamard.
        row_alignment_key: Layout key of the row alignment.
        codes: Tensor of the rows.
        sign_pattern: Tensor of the sign patterns.
        codebooks: Spelling of each codebook.
    """

    kind: str
    schema: str
    manifest_name: str
    layer_prefix: str
    channels_key: str
    slots_key: str
    hadamard_key: str
    row_alignment_key: str
    codes: str
    sign_pattern: str
    codebooks: tuple[tuple[Codebook, str], ...]

    def layer_file(self, layer: int) -> str:
        """Return the usual file name of a layer."""
        return f"{self.layer_prefix}{layer:05d}.safetensors"


EXL3_V1 = Dialect(
    kind="exl3-manifest",
    schema="exl3-v1",
    manifest_name="exl3-manifest.json",
    layer_prefix="exl3-layer-",
    channels_key="slot_channels",
    slots_key="num_slots",
    hadamard_key="intermediate_hadamard",
    row_alignment_key="row_alignment",
    codes="codes",
    sign_pattern="sign_pattern",
    codebooks=(("mcg", "mcg"), ("lut_e4m3", "lut_e4m3"), ("lut_fp16", "lut_fp16")),
)
BTX = Dialect(
    kind="btx-manifest",
    schema="btx-atoms-v1",
    manifest_name="btx-manifest.json",
    layer_prefix="btx-layer-",
    channels_key="atom_channels",
    slots_key="atom_slots",
    hadamard_key="coupled",
    row_alignment_key="atom_row_alignment",
    codes="atoms",
    sign_pattern="rotation_draws",
    codebooks=(("mcg", "mcg"), ("lut_e4m3", "sqg_e4m3"), ("lut_fp16", "sqg_fp16")),
)
DIALECTS = (EXL3_V1, BTX)
