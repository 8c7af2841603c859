"""The slot container of trellis-coded experts (exl3-v1, and BTX under other names): geometry, tensors, bytes.

One safetensors file per MoE layer holds all its routed experts, cut into slots of 32 intermediate channels: row ``s``
of ``codes`` is slot ``s`` of every expert. A rank owns a run of slots, and its own copy of the few tensors that have no
slot axis. The manifest is in ``exl3_v1_manifest``, names in ``exl3_v1_names``, who owns what in ``exl3_v1_partition``.

Notation: E experts, H hidden width of the expert, I intermediate width, S = I / 32 slots, K bits.

Source:
    local-inference-lab/b12x, format text and reader of exl3-v1; row and layer sizes as in its section on row layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.errors import ConfigError, Problem, raise_if_any
from tonnage.formats.dtypes import payload_bytes
from tonnage.formats.exl3_v1_names import EXL3_V1, Codebook, Dialect

CODEBOOK_BITS: dict[Codebook, tuple[int, ...]] = {"mcg": (2, 3, 4, 5, 6), "lut_e4m3": (2, 3, 4), "lut_fp16": (5, 6)}
MCG_SEED = 0xCBAC1FED
SLOT_CHANNELS = 32
SLOTS_PER_PAIR = 8
PAIR_BITS: dict[str, tuple[int, int]] = {"P22": (2, 2), "P33": (3, 3), "P24": (2, 4), "P43": (4, 3), "P44": (4, 4)}
"""Bits of the low and the high record of a pair; its rate byte is ``low << 4 | high``."""

_ROTATION_BYTES_PER_SLOT_AND_EXPERT = 3 * SLOT_CHANNELS * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGeometry:
    """What a manifest declares about all its layers.

    Attributes:
        num_experts: Routed experts per layer, E.
        hidden_size: Width of the expert's input and output, H.
        intermediate_size: Intermediate width before tensor parallelism, I.
        moe_layer_indices: Layers in the container, ascending.
        codebook: Trellis codebook, spelled as in exl3-v1.
        bits: K for uniform rates; None for a rate per expert and pair of 128-channel records.
        pair_kinds: Rates that may occur, for rates per expert and pair; else empty.
        per_expert_input_rotations: Whether each expert has its own input and output vectors.
        pre_block: Hadamard block before the activation; None without the intermediate Hadamard.
        post_block: Hadamard block after it; None without.
        row_alignment: Rows of ``codes`` are spaced by a multiple of this many bytes.
        extent_alignment_slots: Runs of slots begin and end on multiples of this.
        extent_barriers: Slots no run may cross, ascending.

    Raises:
        ConfigError: The values contradict the format; all contradictions at once.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    moe_layer_indices: tuple[int, ...]
    codebook: Codebook
    bits: int | None = None
    pair_kinds: tuple[str, ...] = ()
    per_expert_input_rotations: bool = False
    pre_block: int | None = None
    post_block: int | None = None
    row_alignment: int = 4096
    extent_alignment_slots: int = 4
    extent_barriers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a geometry the format does not have."""
        raise_if_any(ConfigError, (*_width_problems(self), *_rate_problems(self), *_layout_problems(self)))

    @property
    def num_slots(self) -> int:
        """Slots of 32 channels along the intermediate axis."""
        return self.intermediate_size // SLOT_CHANNELS

    @property
    def intermediate_hadamard(self) -> bool:
        """Whether the intermediate axis is rotated, which needs the blocks and the sign patterns."""
        return self.pre_block is not None

    @property
    def whole_tensor_bytes(self) -> int:
        """Bytes of a layer that have no slot axis, so that every rank holds them: vectors and sign patterns."""
        vectors = 6 * self.hidden_size * (self.num_experts if self.per_expert_input_rotations else 1)
        return vectors + (self.num_experts if self.intermediate_hadamard else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """One tensor of a layer file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return payload_bytes(self.dtype, self.shape, where=self.name)


def uniform_row_bytes(geometry: SlotGeometry) -> int:
    """Return the used bytes of one row at uniform rate: ``E * 12 * H * K``.

    Raises:
        ConfigError: The rates differ by expert, so that rows can only be sized from the rate tables.
    """
    if geometry.bits is None:
        raise ConfigError(
            Problem(
                where="codes",
                what="row size of rates per expert and pair is not in the manifest",
                expected="the row stride of the layer file",
            )
        )
    return geometry.num_experts * 3 * _section_bytes(geometry, geometry.bits, geometry.bits)


def aligned_row_bytes(geometry: SlotGeometry, used_bytes: int) -> int:
    """Return the row stride for the largest used row: rounded up to the row alignment."""
    return -(-used_bytes // geometry.row_alignment) * geometry.row_alignment


def layer_tensors(
    geometry: SlotGeometry, *, row_stride_bytes: int | None = None, dialect: Dialect = EXL3_V1
) -> tuple[LayerTensor, ...]:
    """Return the tensors of one layer file in the order the usual writer puts them: wider dtypes first, then by name.

    Args:
        geometry: What the manifest declares.
        row_stride_bytes: Stride of the rows of ``codes``; needed for rates per expert and pair, else derived.
        dialect: Names to use.

    Raises:
        ConfigError: The stride is needed and missing, or no row of this geometry can have it.
    """
    stride = _checked_stride(geometry, row_stride_bytes)
    slots, experts = geometry.num_slots, geometry.num_experts
    vector = (experts, geometry.hidden_size) if geometry.per_expert_input_rotations else (geometry.hidden_size,)
    tensors = [
        LayerTensor(name="down_svh", dtype="F16", shape=vector),
        LayerTensor(name="gate_suh", dtype="F16", shape=vector),
        LayerTensor(name="rotations", dtype="F16", shape=(slots, experts, 3, SLOT_CHANNELS)),
        LayerTensor(name="up_suh", dtype="F16", shape=vector),
        LayerTensor(name=dialect.codes, dtype="U8", shape=(slots, stride)),
    ]
    if geometry.bits is None:
        rates = (slots // SLOTS_PER_PAIR, experts)
        tensors += [LayerTensor(name=name, dtype="U8", shape=rates) for name in ("rates_fc1", "rates_fc2")]
    if geometry.intermediate_hadamard:
        tensors.append(LayerTensor(name=dialect.sign_pattern, dtype="U8", shape=(experts,)))
    return tuple(tensors)


def rank_layer_bytes(geometry: SlotGeometry, slots: int, *, row_stride_bytes: int | None = None) -> int:
    """Return what a rank with this many slots holds of one layer, as stored: its rows, and the whole tensors.

    Raises:
        ConfigError: As ``layer_tensors``.
    """
    per_slot = _checked_stride(geometry, row_stride_bytes) + _ROTATION_BYTES_PER_SLOT_AND_EXPERT * geometry.num_experts
    rates = 2 * (slots // SLOTS_PER_PAIR) * geometry.num_experts if geometry.bits is None else 0
    return slots * per_slot + rates + geometry.whole_tensor_bytes


def layer_metadata(geometry: SlotGeometry, layer: int, *, dialect: Dialect = EXL3_V1) -> dict[str, str]:
    """Return the ``__metadata__`` a layer file must carry."""
    return {
        "schema": dialect.schema,
        "codebook": dict(dialect.codebooks)[geometry.codebook],
        "layer": str(layer),
        "num_experts": str(geometry.num_experts),
        "hidden_size": str(geometry.hidden_size),
        "intermediate_size": str(geometry.intermediate_size),
        dialect.channels_key: str(SLOT_CHANNELS),
    }


def _section_bytes(geometry: SlotGeometry, low_bits: int, high_bits: int) -> int:
    """Bytes of one projection of one expert in one row: two planes of H/16 tiles, 32 * K bytes a tile."""
    return geometry.hidden_size // 16 * 32 * (low_bits + high_bits)


def _checked_stride(geometry: SlotGeometry, row_stride_bytes: int | None) -> int:
    if row_stride_bytes is None:
        return aligned_row_bytes(geometry, uniform_row_bytes(geometry))
    if geometry.bits is None:
        sections = [_section_bytes(geometry, *PAIR_BITS[kind]) for kind in geometry.pair_kinds]
        least = geometry.num_experts * 3 * min(sections)
    else:
        least = uniform_row_bytes(geometry)
    if row_stride_bytes < least or row_stride_bytes % geometry.row_alignment:
        expected = f"a multiple of {geometry.row_alignment}, at least {least}"
        raise ConfigError(
            Problem(where="codes", what="impossible row stride", expected=expected, found=str(row_stride_bytes))
        )
    return row_stride_bytes


def _width_problems(geometry: SlotGeometry) -> Iterator[Problem]:
    positive = {
        "geometry.num_experts": geometry.num_experts,
        "geometry.hidden_size": geometry.hidden_size,
        "geometry.intermediate_size": geometry.intermediate_size,
        "layout.row_alignment": geometry.row_alignment,
        "layout.extent_alignment_slots": geometry.extent_alignment_slots,
    }
    for where, value in positive.items():
        if value <= 0:
            yield Problem(where=where, what="not a positive number", expected="1 or more", found=str(value))
    yield from _multiple("geometry.hidden_size", geometry.hidden_size, 16)
    yield from _multiple("geometry.intermediate_size", geometry.intermediate_size, SLOT_CHANNELS)
    layers = geometry.moe_layer_indices
    if not layers or min(layers) < 0 or list(layers) != sorted(set(layers)):
        yield Problem(
            where="geometry.moe_layer_indices",
            what="not a set of layers",
            expected="distinct layer numbers, at least one",
            found=str(list(layers[:20])),
        )


def _rate_problems(geometry: SlotGeometry) -> Iterator[Problem]:
    allowed = CODEBOOK_BITS[geometry.codebook]
    if (geometry.bits is None) != bool(geometry.pair_kinds):
        yield Problem(where="rates", what="needs either bits or pair kinds")
    if geometry.bits is not None and geometry.bits not in allowed:
        yield Problem(
            where="rates.bits",
            what=f"not a rate of codebook {geometry.codebook}",
            expected=f"one of {list(allowed)}",
            found=str(geometry.bits),
        )
    kinds = geometry.pair_kinds
    if len(set(kinds)) != len(kinds) or not set(kinds) <= PAIR_BITS.keys():
        expected = "distinct kinds out of " + ", ".join(PAIR_BITS)
        yield Problem(
            where="rates.pair_kinds", what="not a set of kinds", expected=expected, found=str(list(kinds[:20]))
        )
    for kind in kinds:
        if not {*PAIR_BITS.get(kind, ())} <= {*allowed}:
            yield Problem(where="rates.pair_kinds", what=f"not a rate of codebook {geometry.codebook}", found=kind)
    if kinds and geometry.num_slots % SLOTS_PER_PAIR:
        yield from _multiple("geometry.num_slots", geometry.num_slots, SLOTS_PER_PAIR)


def _layout_problems(geometry: SlotGeometry) -> Iterator[Problem]:
    if (geometry.pre_block is None) != (geometry.post_block is None):
        yield Problem(where="hadamard", what="needs both blocks or neither")
    for name, block, width in (
        ("pre_block", geometry.pre_block, geometry.hidden_size),
        ("post_block", geometry.post_block, geometry.intermediate_size),
    ):
        if block is not None and (block <= 0 or block % SLOT_CHANNELS or width % block):
            expected = f"a multiple of {SLOT_CHANNELS} that divides {width}"
            yield Problem(where=f"hadamard.{name}", what="impossible block", expected=expected, found=str(block))
    slots, alignment = geometry.num_slots, geometry.extent_alignment_slots
    if alignment > 0 and slots % alignment:
        expected = f"a divisor of {slots} slots"
        yield Problem(where="layout.extent_alignment_slots", what="impossible", expected=expected, found=str(alignment))
    barriers = geometry.extent_barriers
    if list(barriers) != sorted(set(barriers)) or any(not 0 < barrier < slots for barrier in barriers):
        expected = f"distinct slots between 0 and {slots}"
        yield Problem(
            where="layout.extent_barriers", what="impossible", expected=expected, found=str(list(barriers[:20]))
        )


def _multiple(where: str, value: int, of: int) -> Iterator[Problem]:
    if value % of:
        yield Problem(
            where=where, what="not a whole number of blocks", expected=f"a multiple of {of}", found=str(value)
        )
