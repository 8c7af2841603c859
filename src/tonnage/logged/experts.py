"""Routed experts after loading: kernels of mixtures of experts keep widths and scales rounded up, each in its own way.

Which kernel serves depends on the GPU and on options; where it is not known the most likely one is expected and the
largest one of those possible is the bound.

Source:
    vLLM 0.32.0 ``fused_moe/oracle`` (``mxfp4.py``, ``nvfp4.py``, ``mxfp8.py``, ``unquantized.py``: order of choice and
    rounding), ``quantization/utils`` (``marlin_utils.py``, ``marlin_utils_fp4.py``, ``flashinfer_utils.py``). What
    Triton pads to on Hopper is not: it is fitted to two published start-up logs of gpt-oss, one on either side of
    :data:`TRITON_WIDER_SINCE` (``docs/weights-agreement.md``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from tonnage.errors import PlacementError, Problem, one_line
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.memory.term import Term
from tonnage.units import round_up

if TYPE_CHECKING:
    from tonnage.placement import Placed, Placement

COMPONENT = "engine.moe_padding"
TRITON_WIDER_SINCE = (0, 19)
FITTED = frozenset({"triton"})
"""Kernels whose rounding follows logs, not a source; without rounding they are not named."""
WIDE_TRTLLM = "flashinfer_trtllm_256"
WIDE_TRTLLM_BEFORE = (0, 19)
"""Releases taken to have rounded MXFP4 to 256 in TRT-LLM's kernels: no source at hand, so only their bound is wider."""
TRTLLM_ACTIVATIONS = frozenset({"silu", "relu2"})
"""What unquantised experts in kernels that round up can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a kernel rounds up.

    Attributes:
        intermediate: Multiple of the intermediate size per rank.
        hidden: Multiple of the hidden size.
        values_in: Multiple of the inputs of the values alone.
        scale_rows: Multiple of the rows of scales.
        scale_columns: Multiple of the columns of scales.
        scale_share: Further bytes of scales, as one part of the values' elements; 0 for none.
    """

    intermediate: int = 1
    hidden: int = 1
    values_in: int = 1
    scale_rows: int = 1
    scale_columns: int = 1
    scale_share: int = 0


SWIZZLED = Tile(intermediate=16, scale_rows=128, scale_columns=4)
TILES: Mapping[str, Mapping[str, Tile]] = {
    "mxfp4": {
        "marlin": Tile(intermediate=128, hidden=256),
        "triton": Tile(intermediate=128, values_in=256),
        "flashinfer_trtllm": Tile(intermediate=128, hidden=256),
        "flashinfer_trtllm_256": Tile(intermediate=256, hidden=256),
        "flashinfer_cutlass": Tile(intermediate=128, hidden=128),
        "cutlass": Tile(intermediate=128, hidden=128),
        "deepgemm": Tile(intermediate=128, hidden=128),
        "aiter": Tile(intermediate=128, hidden=128),
        "aiter_256": Tile(intermediate=256, hidden=256),
        "emulation": Tile(intermediate=32, hidden=32),
        "b12x": Tile(),
    },
    "nvfp4": {
        "marlin": Tile(intermediate=64),
        "marlin_128": Tile(intermediate=128),
        "flashinfer_trtllm": Tile(intermediate=16, hidden=256, scale_rows=128, scale_columns=4),
        "flashinfer_trtllm_512": Tile(intermediate=128, hidden=512, scale_rows=128, scale_columns=4),
        "flashinfer_cutlass": SWIZZLED,
        "flashinfer_cutedsl": SWIZZLED,
        "cutlass": SWIZZLED,
        "b12x": Tile(intermediate=64),
        "emulation": Tile(),
    },
    "mxfp8": {
        "flashinfer_trtllm": Tile(intermediate=128, hidden=256),
        "deepgemm": Tile(scale_rows=4, scale_columns=4),
        "marlin": Tile(intermediate=64),
        "triton": Tile(),
        "aiter": Tile(),
    },
    "fp8_block": {
        "triton": Tile(),
        "flashinfer_trtllm": Tile(),
        "deepgemm": Tile(scale_share=128),
        "deepgemm_f32": Tile(),
        "marlin": Tile(intermediate=64, scale_share=64),
        "aiter": Tile(),
    },
    "plain": {
        "triton": Tile(),
        "flashinfer_trtllm": Tile(intermediate=128),
        "flashinfer_cutlass": Tile(intermediate=16),
        "aiter": Tile(intermediate=128),
    },
    "packed": {"marlin": Tile(intermediate=64)},
}
CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mxfp4": {
        "sm80": ("marlin",),
        "sm89": ("marlin",),
        "sm90": ("triton", "marlin", "flashinfer_cutlass"),
        "sm100": ("flashinfer_trtllm", "flashinfer_trtllm_256", "flashinfer_cutlass", "marlin"),
        "sm120": ("marlin", "triton", "flashinfer_cutlass"),
        "amd": ("aiter", "aiter_256", "triton"),
        "": ("marlin", "triton", "flashinfer_trtllm_256", "flashinfer_trtllm", "flashinfer_cutlass"),
    },
    "nvfp4": {
        "sm80": ("marlin", "marlin_128"),
        "sm89": ("marlin", "marlin_128"),
        "sm90": ("marlin", "marlin_128"),
        "sm100": ("flashinfer_trtllm", "flashinfer_trtllm_512", "flashinfer_cutlass", "marlin_128"),
        "sm120": ("flashinfer_cutlass", "marlin_128", "b12x"),
        "amd": ("emulation",),
        "": ("flashinfer_trtllm", "flashinfer_trtllm_512", "flashinfer_cutlass", "marlin_128"),
    },
    "mxfp8": {
        "sm80": ("marlin",),
        "sm89": ("marlin",),
        "sm90": ("marlin",),
        "sm100": ("flashinfer_trtllm", "deepgemm", "marlin"),
        "sm120": ("marlin",),
        "amd": ("aiter",),
        "": ("flashinfer_trtllm", "deepgemm", "marlin"),
    },
    "fp8_block": {
        "sm80": ("marlin",),
        "sm100": ("flashinfer_trtllm", "deepgemm"),
        "sm120": ("triton", "deepgemm"),
        "": ("triton", "deepgemm"),
    },
    "plain": {
        "sm100": ("flashinfer_trtllm", "triton"),
        "amd": ("triton", "aiter"),
        "": ("triton", "flashinfer_cutlass"),
    },
    "packed": {"": ("marlin",)},
}
"""By GPU class, in the order of likelihood; the empty class stands for those not named."""


BACKENDS = frozenset(name for tiles in TILES.values() for name in tiles)
_LOGGED_FORMATS = re.compile(r"_(?:mxfp4|nvfp4|mxfp8|fp8|bf16).*")


def backend_of(text: str) -> str:
    """Return a kernel of routed experts by an engine's option or log: ``FLASHINFER_TRTLLM_MXFP4_BF16`` is one of them.

    Raises:
        PlacementError: No such kernel is known here.
    """
    name = _LOGGED_FORMATS.sub("", text.lower().replace("-", "_")).replace("deep_gemm", "deepgemm")
    if name not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise PlacementError(Problem(where="MoE backend", what="unknown", expected=known, found=one_line(text)))
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """The routed experts of layers that are alike, on one rank.

    Attributes:
        kind: Key of :data:`TILES`.
        layers: How many layers.
        experts: Experts of one layer.
        parts: 2 for gate and up, 1 for up alone.
        hidden: Hidden size.
        intermediate: Width per rank.
        bits: Bits of a value.
        group: Elements that share a scale; 0 without.
        scale_bytes: Bytes of a scale.
        activation: Of the experts, as the config names it.
        gpt_oss: Stored in blocks as gpt-oss is; Triton serves no other MXFP4 experts unasked.
        held_bytes: What the placement holds of values and scales in one layer.
    """

    kind: str
    layers: int
    experts: int
    parts: int
    hidden: int
    intermediate: int
    bits: int
    group: int
    scale_bytes: int
    activation: str
    gpt_oss: bool
    held_bytes: int

    def padded(self, tile: Tile) -> int:
        """Return what a kernel's rounding adds to one layer."""
        inner = round_up(self.intermediate, lcm(tile.intermediate, self.group if self.kind == "packed" else 1))
        hidden = round_up(self.hidden, tile.hidden)
        both = self._matrix(self.parts * inner, hidden, tile) + self._matrix(hidden, inner, tile)
        if self.kind == "packed":  # zero points are held as well, and rounded up no more than the values
            plain = Tile()
            held = self._matrix(self.parts * self.intermediate, self.hidden, plain)
            return max(0, self.experts * (both - held - self._matrix(self.hidden, self.intermediate, plain)))
        return max(0, self.experts * both - self.held_bytes)

    def _matrix(self, rows: int, columns: int, tile: Tile) -> int:
        values = rows * round_up(columns, tile.values_in) * self.bits // 8
        more = rows * columns // tile.scale_share if tile.scale_share else 0
        if not self.group:
            return values + more
        across = round_up(-(-columns // self.group), tile.scale_columns)
        down = round_up(rows, tile.scale_rows) if self.kind != "fp8_block" else -(-rows // self.group)
        return values + more + down * across * self.scale_bytes


def expert_padding(
    stacks: tuple[ExpertStack, ...],
    *,
    engine: str,
    gpu_class: str,
    version: tuple[int, ...] | None,
    backend: str | None,
) -> Iterator[Term]:
    """Yield the padding of all experts of a rank.

    Args:
        stacks: Its experts.
        engine: ``vllm``, or ``sglang``, whose unquantised experts are served by Triton unless it is told otherwise.
        gpu_class: Class of the GPU; empty if it is not known.
        version: Release of the engine; ``None`` if it is not known.
        backend: Kernel the engine was told, or logged; ``None`` leaves it open.
    """
    usual = most = 0
    names: set[str] = set()
    for stack in stacks:
        tiles = TILES[stack.kind]
        choices = _choices(stack, engine, gpu_class, backend)
        if version is not None and version >= WIDE_TRTLLM_BEFORE:
            choices = tuple(name for name in choices if name != WIDE_TRTLLM) or choices
        added = [stack.layers * stack.padded(_tile(tiles[name], name, version)) for name in choices]
        usual, most = usual + added[0], most + max(added)
        names.update({choices[0]} if max(added) else ())
    if most:
        yield Term(
            component=COMPONENT,
            nbytes=usual,
            bound_nbytes=most,
            basis="calibrated" if FITTED & names else "exact" if backend and usual == most else "modelled",
            source=f"experts rounded up for {', '.join(sorted(names))} (vLLM 0.32.0 fused_moe/oracle)",
        )


def _choices(stack: ExpertStack, engine: str, gpu_class: str, backend: str | None) -> tuple[str, ...]:
    """Return the kernels that may serve, the most likely one first."""
    if backend is not None and backend in TILES[stack.kind]:
        return (backend,)
    if stack.kind == "plain" and stack.activation not in TRTLLM_ACTIVATIONS:
        return ("triton",)
    by_class = CHOICES[stack.kind]
    choices = by_class.get(gpu_class, by_class[""])
    if stack.kind == "mxfp4" and not stack.gpt_oss:
        return tuple(name for name in choices if name != "triton")
    first_triton = engine == "sglang" and stack.kind == "plain"
    return tuple(sorted(choices, key=lambda name: name != "triton")) if first_triton else choices


def _tile(tile: Tile, name: str, version: tuple[int, ...] | None) -> Tile:
    """Return the rounding of a release: Triton's experts were a multiple of 64 wide before."""
    if name == "triton" and tile.values_in > 1 and version is not None and version < TRITON_WIDER_SINCE:
        return Tile(intermediate=64, values_in=tile.values_in)
    return tile


def expert_stacks(placement: Placement, pp_rank: int, tp_rank: int) -> tuple[ExpertStack, ...]:
    """Return the routed experts of a rank; those in formats no kernel here repacks are left out."""
    pairs: dict[tuple[str, ...], list[Placed]] = {}
    for placed in placement.placed:
        rule = placed.entry.module.rule
        if rule.is_routed and rule.is_linear and placement.multiplicity(placed, pp_rank):
            key = (placed.entry.module.section.name, rule.pattern.rpartition(".")[0], repr(placed.entry.first))
            pairs.setdefault(key, []).append(placed)
    found = (_stack(members, placement, pp_rank, tp_rank) for members in pairs.values())
    return tuple(stack for stack in found if stack is not None)


def _stack(members: list[Placed], placement: Placement, pp_rank: int, tp_rank: int) -> ExpertStack | None:
    down = [p for p in members if p.entry.module.rule.split == "row"]
    up = [p for p in members if p.entry.module.rule.split == "column"]
    if len(down) != 1 or not up or down[0].shares[tp_rank].copies == 0:
        return None
    module, share = down[0].entry.module, down[0].shares[tp_rank]
    known = value_format(down[0].entry.fmt.name)
    if known is None:
        return None
    kind, bits, group = known
    stacked = sum(end - begin for begin, end in share.ranges) if share.axis == "stack" else module.stack
    experts = stacked if module.stack else share.copies
    return ExpertStack(
        kind=kind,
        layers=placement.multiplicity(down[0], pp_rank),
        experts=experts,
        parts=max(1, sum(p.entry.module.out_size for p in up) // module.in_size),
        hidden=module.out_size,
        intermediate=-(-module.in_size // placement.topology.expert_tp),
        bits=bits,
        group=group,
        scale_bytes=scale_bytes(down[0]),
        activation=_activation(module.names),
        gpt_oss=any(stored.suffix.endswith("_blocks") for stored in down[0].entry.stored),
        held_bytes=sum(matrix_bytes(p, tp_rank) for p in members),
    )


def _activation(names: Mapping[str, object]) -> str:
    found = next(
        (names[key] for key in ("hidden_activation", "mlp_hidden_act", "hidden_act") if names.get(key)), "silu"
    )
    return str(found)


def matrix_bytes(placed: Placed, tp_rank: int) -> int:
    """Return the bytes of values and block scales of a module on one rank, for one value of its first index."""
    share = placed.shares[tp_rank]
    pieces = zip(placed.entry.stored, share.pieces, strict=False)
    return share.copies * sum(
        piece.held_bytes for stored, piece in pieces if {"out", "in"} <= {dim.axis for dim in stored.dims}
    )


def scale_bytes(placed: Placed) -> int:
    """Return the bytes of one block scale of a module; 0 without any."""
    scales = [stored for stored in placed.entry.stored[1:] if {"out", "in"} <= {dim.axis for dim in stored.dims}]
    return DTYPE_BITS[scales[0].dtype] // 8 if scales else 0


def value_format(name: str) -> tuple[str, int, int] | None:
    """Return kind, bits of a value and elements per scale of a storage format; ``None`` where no kernel repacks it."""
    if name == "plain":
        return "plain", 16, 0
    if name.startswith("fp8_e4m3_block"):
        return "fp8_block", 8, int(name.rpartition("x")[2])
    for prefix, facts in (("mxfp4", (4, 32)), ("nvfp4", (4, 16)), ("mxfp8", (8, 32))):
        if name.startswith(prefix):
            return prefix, *facts
    if name.startswith(("gptq_int", "awq_int", "int")) and "_g" in name:
        bits = name.partition("int")[2].partition("_")[0]
        return "packed", int(bits), int(name.rpartition("_g")[2])
    return None
