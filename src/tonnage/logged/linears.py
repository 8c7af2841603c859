"""Quantised linear weights after loading: swizzled and padded scales, tiles of kernels, absorbed copies of MLA.

Source:
    vLLM 0.32.0 ``model_executor/kernels/linear`` (order of choice), ``quantization/utils/nvfp4_utils.py``,
    ``marlin_utils.py`` (``marlin_padded_nk``), ``marlin_utils_fp8.py``, ``mla_attention.py`` (``split_kv_b_proj``);
    SGLang 0.5.23 keeps scales of MXFP8 in their linear order as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from tonnage.cuts import extent
from tonnage.logged.experts import matrix_bytes, value_format
from tonnage.memory.term import Term
from tonnage.units import round_up

if TYPE_CHECKING:
    from tonnage.placement import Placed, Placement

COMPONENT = "engine.linear_padding"
ABSORBED = "engine.mla_absorbed"
ABSORBED_MODULE = ".kv_b_proj"
EMULATED = "engine.emulation"
BF16_BYTES = 2
SCALE_ROWS, SCALE_COLUMNS = 128, 4
FP4_TILE = 32
PACKED_EXPONENT_ELEMENTS = 128
SWIZZLES = frozenset({"sm100", "sm120", ""})
"""GPU classes with matrix units for block-scaled values; an unknown one is taken for such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One quantised weight as a kernel sees it: fused parts together.

    Attributes:
        kind: Of its format: a key of :data:`tonnage.logged.experts.TILES`.
        rows: Outputs per rank.
        columns: Inputs per rank.
        bits: Bits of a value.
        group: Elements that share a scale.
        held_bytes: What the placement holds of values and scales.
        count: How many a rank holds.
    """

    kind: str
    rows: int
    columns: int
    bits: int
    group: int
    held_bytes: int
    count: int


def linear_padding(linears: tuple[Linear, ...], *, gpu_class: str, engine: str) -> Iterator[Term]:
    """Yield what kernels add to all quantised linear weights of a rank; expected and most are the same rule."""
    usual = sum(linear.count * added_bytes(linear, gpu_class, engine=engine) for linear in linears)
    classes = (gpu_class,) if gpu_class else ("sm80", "sm90", "sm100", "sm120")
    most = sum(linear.count * max(added_bytes(linear, c, engine=engine) for c in classes) for linear in linears)
    if most:
        yield Term(
            component=COMPONENT,
            nbytes=usual,
            bound_nbytes=max(usual, most),
            basis="modelled",
            source=f"scales and tiles as the kernels of {gpu_class or 'an unknown GPU'} keep them"
            " (vLLM 0.32.0 kernels/linear, quantization/utils)",
        )


def added_bytes(linear: Linear, gpu_class: str, *, engine: str = "vllm") -> int:
    """Return what the kernel of a GPU class adds to one weight."""
    rows, columns = linear.rows, linear.columns
    if linear.kind == "fp8_block":
        if gpu_class == "sm100":  # a packed exponent for every row and 128 inputs
            return rows * columns // PACKED_EXPONENT_ELEMENTS
        return rows * columns * BF16_BYTES // linear.group if gpu_class == "sm80" else 0
    if linear.kind not in ("nvfp4", "mxfp8") or gpu_class not in SWIZZLES:
        return 0 if gpu_class == "amd" else _marlin_added(linear)
    scales = round_up(rows, SCALE_ROWS) * round_up(-(-columns // linear.group), SCALE_COLUMNS)
    if linear.kind == "mxfp8":
        linear_scales = rows * -(-columns // linear.group)
        return scales if engine == "sglang" else scales - linear_scales
    values = round_up(rows, FP4_TILE) * round_up(columns, FP4_TILE) // 2
    return max(0, values + scales - linear.held_bytes)


def _marlin_added(linear: Linear) -> int:
    """Return what tiles of Marlin add: the cheaper of two roundings."""
    group = linear.group if linear.kind == "packed" else 1
    held = linear.rows * linear.columns
    padded = min(
        round_up(linear.rows, 64) * round_up(linear.columns, lcm(128, group)),
        round_up(linear.rows, 128) * round_up(linear.columns, lcm(64, group)),
    )
    scale_bits = 16 if linear.kind == "packed" else 8
    more = padded - held
    return more * linear.bits // 8 + more * scale_bits // (8 * linear.group)


def quantised_linears(placement: Placement, pp_rank: int, tp_rank: int) -> tuple[Linear, ...]:
    """Return the quantised linear weights of a rank, experts excepted."""
    fused: dict[tuple[str, ...], list[Placed]] = defaultdict(list)
    for placed in placement.placed:
        rule, fmt = placed.entry.module.rule, placed.entry.fmt
        if rule.is_routed or not rule.is_linear or fmt.is_plain or value_format(fmt.name) is None:
            continue
        if placement.multiplicity(placed, pp_rank) and placed.shares[tp_rank].copies:
            name = f"{rule.pattern.rpartition('.')[0]}.{rule.fused}" if rule.fused else rule.pattern
            fused[placed.entry.module.section.name, name, fmt.name, repr(placed.entry.first)].append(placed)
    return tuple(_linear(members, placement, pp_rank, tp_rank) for members in fused.values())


def _linear(members: list[Placed], placement: Placement, pp_rank: int, tp_rank: int) -> Linear:
    known = value_format(members[0].entry.fmt.name)
    assert known is not None
    kind, bits, group = known
    share = members[0].shares[tp_rank]
    sizes = [_local(placed, tp_rank) for placed in members]
    return Linear(
        kind=kind,
        rows=sum(rows for rows, _ in sizes),
        columns=sizes[0][1],
        bits=bits,
        group=group,
        held_bytes=sum(matrix_bytes(placed, tp_rank) for placed in members) // share.copies,
        count=placement.multiplicity(members[0], pp_rank) * share.copies,
    )


def _local(placed: Placed, tp_rank: int) -> tuple[int, int]:
    """Return rows and columns of a module on one rank."""
    module, share = placed.entry.module, placed.shares[tp_rank]
    mine = extent(share.ranges)
    return (
        mine if share.axis == "out" else module.out_size,
        mine if share.axis == "in" else module.in_size,
    )


def absorbed_copies(placement: Placement, pp_rank: int, tp_rank: int) -> Iterator[Term]:
    """Yield vLLM's matrices of absorbed attention: views of a plain ``kv_b_proj``, BF16 copies of a quantised one."""
    usual = most = 0
    for placed in placement.placed:
        module = placed.entry.module
        if module.rule.pattern.endswith(ABSORBED_MODULE) and module.rule.role in ("attention", "mtp"):
            rows, columns = _local(placed, tp_rank)
            times = placement.multiplicity(placed, pp_rank) * placed.shares[tp_rank].copies
            most += times * rows * columns * BF16_BYTES
            usual += 0 if placed.entry.fmt.is_plain else times * rows * columns * BF16_BYTES
    if most:
        yield Term(
            component=ABSORBED,
            nbytes=usual,
            bound_nbytes=most,
            basis="exact" if usual == most else "modelled",
            source="W_UK and W_UV of the rank's heads (vLLM 0.32.0 mla_attention.py)",
        )


def emulated_weights(placement: Placement, pp_rank: int, tp_rank: int) -> Iterator[Term]:
    """Yield what MXFP8 weights take beyond their stored bytes where they become BF16 after loading: on a CPU.

    One byte more for every code, less the scales, which are dropped.
    """
    more = 0
    for placed in placement.placed:
        if not placed.entry.fmt.name.startswith("mxfp8"):
            continue
        share = placed.shares[tp_rank]
        codes, scales = (
            sum(p.held_bytes for p, s in zip(share.pieces, placed.entry.stored, strict=True) if s.dtype in dtypes)
            for dtypes in (("F8_E4M3",), ("U8", "F8_E8M0"))
        )
        more += placement.multiplicity(placed, pp_rank) * share.copies * (codes - scales)
    if more:
        yield Term(
            component=EMULATED,
            nbytes=more,
            bound_nbytes=more,
            basis="exact",
            source="MXFP8 becomes BF16 after loading: no kernels for it on a CPU (docs/vllm-plugin.md)",
        )
