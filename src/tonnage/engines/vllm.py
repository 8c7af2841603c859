"""vLLM: what its own classes allocate for every rank at load, before kernels repack anything.

Source:
    vLLM 0.32.0 ``model_executor/layers`` (``vocab_parallel_embedding.py``, ``linear.py``, ``quantization/fp8.py``,
    ``quantization/modelopt.py``, ``quantization/kv_cache.py``, ``fused_moe``), checked against its classes on torch's meta
    device: ``docs/vllm-agreement.md``.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from tonnage.engines.model import EngineModel, Extra, Local
from tonnage.errors import PlacementError, Problem
from tonnage.topology import expert_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.blueprint import Stored
    from tonnage.recipes.schema import FusedRule
    from tonnage.topology import Topology

VOCAB_MULTIPLE = 64
FINEST_SCALE_BLOCK = 32
FUSED_SECONDS = frozenset({"up_proj", "w3"})
KV_SCALARS_BYTES = 4 * 2
KV_SCALARS_BYTES_CT = 3 * 4 + 3 * 2
INPUT_SCALE_BYTES = 4
DROPPED_SCALE_BYTES = 2


def vocab_rows(vocab: int, _tp: int) -> int:
    """Rows are padded to a multiple of 64; the result must divide by the ranks."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def held_shape(entry: Assigned, stored: Stored, local: Local, topology: Topology) -> tuple[tuple[int, ...], str] | None:
    """Return the shape vLLM keeps where it is not the plain slice."""
    fmt, expert = entry.fmt.name, entry.module.rule.is_routed
    _require_whole_blocks(entry, local, topology)
    if fmt.startswith("fp8_e4m3_block") and stored.suffix in (".weight_scale_inv", ".scale", ".weight_scale"):
        return _block_scales(entry, local, topology) if expert else None
    if fmt == "nvfp4_e2m1" and expert and stored.suffix == ".weight_scale" and local.in_ % 16:
        return (local.out, local.in_ // 16), "scales of a partial block are dropped"
    second = entry.module.rule.pattern.rpartition(".")[2] in FUSED_SECONDS
    if fmt.startswith("int") and expert and second and stored.suffix == ".weight_shape":
        return (0,), "the shape is held once for gate and up"
    parts = len(entry.module.out)
    if stored.shape == () and stored.dtype == "F32" and parts > 1 and not expert:
        return (parts,), "one scalar for every fused part"
    return None


def held_dtype(entry: Assigned, stored: Stored) -> tuple[str, str] | None:
    """Return another dtype than the stored one.

    Channel scales of FP8 are held in F32 (``compressed_tensors_w8a8_fp8.py``), shapes of packed experts in the model dtype
    (``compressed_tensors_moe_wna16.py``).
    """
    if entry.fmt.name == "fp8_e4m3_channel" and stored.suffix == ".weight_scale" and stored.dtype != "F32":
        return "F32", "scales are held in F32"
    second = entry.module.rule.pattern.rpartition(".")[2] in FUSED_SECONDS
    if entry.module.rule.is_routed and entry.fmt.name.startswith("int") and stored.suffix == ".weight_shape" and not second:
        return "BF16", "the shape is held in the model dtype"
    return None


def _require_whole_blocks(entry: Assigned, local: Local, topology: Topology) -> None:
    """Refuse a cut inside a scale block, which vLLM refuses as well.

    Experts in block FP8 are kept on a finer grid instead (:func:`_block_scales`); those in NVFP4 and MXFP4 are allocated all
    the same. Sources: ``fp8_utils.py`` ``validate_fp8_block_shape``, ``modelopt.py``, ``gptq_marlin.py``, ``mxfp8_utils.py``.

    Raises:
        PlacementError: A rank's part of the cut axis is no whole number of blocks.
    """
    rule, fmt = entry.module.rule, entry.fmt
    if topology.tp == 1 or (rule.is_routed and fmt.name.startswith(("fp8_e4m3_block", "nvfp4", "mxfp4"))):
        return
    for axis, mine, whole, grain in (
        ("in", local.in_, entry.module.in_size, fmt.in_grain),
        ("out", local.out, entry.module.out_size, fmt.out_grain),
    ):
        if mine % grain and mine != whole:
            raise PlacementError(
                Problem(
                    where=f"--tp {topology.tp} --engine vllm",
                    tensor=rule.pattern,
                    what=f"axis {axis} of {whole} elements leaves {mine} per rank, no whole blocks of {fmt.name}",
                    expected=f"a multiple of {grain} per rank",
                    found=str(mine),
                )
            )


def _block_scales(entry: Assigned, local: Local, topology: Topology) -> tuple[tuple[int, ...], str] | None:
    """Expert scales are kept on a finer grid where a rank's width is not whole blocks (``refine_fp8_moe_block_shape``)."""
    block_out, block_in = entry.fmt.out_grain, entry.fmt.in_grain
    on_in = entry.module.rule.split == "row"
    width, hidden = (local.in_, local.out) if on_in else (local.out, local.in_)
    if width % block_out == 0 and (topology.tp == 1 or width % block_in == 0):
        return None
    fine = gcd(block_out, block_in, width, hidden)
    if fine < FINEST_SCALE_BLOCK:
        raise PlacementError(
            Problem(
                where=f"--tp {topology.tp} --engine vllm",
                tensor=entry.module.rule.pattern,
                what=f"{width} channels per rank are no whole scale blocks",
                expected=f"a width with a common divisor of at least {FINEST_SCALE_BLOCK} with {block_out}",
                found=str(fine),
            )
        )
    return (-(-local.out // fine), -(-local.in_ // fine)), f"scales kept on a grid of {fine} x {fine}"


def extras(assignment: Assignment, topology: Topology) -> tuple[Extra, ...]:
    """Return rows a fused module is rounded up by, and the scalars of quantised KV caches and of NVFP4 inputs."""
    return (*_fused_rows(assignment, topology), *_kv_scalars(assignment), *_input_scales(assignment, topology))


def _fused_rows(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    rows: dict[tuple[str, tuple[int, ...]], list[Assigned]] = {}
    for entry in assignment.entries:
        rules = entry.module.section.engines.get("vllm")
        if rules and entry.module.rule.fused in rules.fused:
            rows.setdefault((entry.module.rule.fused, entry.first), []).append(entry)
    for (name, first), entries in rows.items():
        rule = entries[0].module.section.engines["vllm"].fused[name]
        yield from _rounding(rule, name, first, entries, topology)


def _rounding(
    rule: FusedRule, name: str, first: tuple[int, ...], entries: list[Assigned], topology: Topology
) -> Iterator[Extra]:
    tp = topology.tp
    held = sum(e.module.out_size if e.module.rule.split == "replicated" else e.module.out_size // tp for e in entries)
    multiple = rule.rows_multiple.evaluate_int({**entries[0].module.names, "tp": tp})
    missing = -held % multiple
    if missing:
        stored = entries[0].stored[0]
        yield Extra(
            component=f"padding.{name}",
            nbytes=missing * entries[0].module.in_size * stored.nbytes // (entries[0].module.out_size * entries[0].module.in_size),
            first=first,
            why=rule.why,
            source=f"{entries[0].module.section.name}.toml [vllm.fused]",
        )


def _kv_scalars(assignment: Assignment) -> Iterator[Extra]:
    """Attention layers of a checkpoint with scaled KV caches own q, k, v and probability scales in the model dtype.

    compressed-tensors: q, k and v scales in F32, and as many zero points in the model dtype.
    """
    scheme = assignment.blueprint.scheme
    layers: set[int] = set()
    for entry in assignment.entries:
        if entry.module.rule.role == "attention" and entry.module.layered:
            latent = "kv_b_proj" in entry.module.rule.pattern
            k_proj = entry.module.rule.fused == "qkv_proj"
            if (k_proj and (scheme.kv_scales or scheme.method in ("fp8", "modelopt", "compressed-tensors"))) or (latent and scheme.kv_scales):
                layers.update(entry.first)
    if layers:
        ct = scheme.method == "compressed-tensors"
        method = "compressed_tensors.py CompressedTensorsKVCacheMethod" if ct else "kv_cache.py BaseKVCacheMethod"
        yield Extra(
            component="engine.kv_scales",
            nbytes=KV_SCALARS_BYTES_CT if ct else KV_SCALARS_BYTES,
            first=tuple(sorted(layers)),
            why=f"q, k, v scales and {'zero points' if ct else 'probability scales'} of every attention layer",
            source=f"vLLM 0.32.0 quantization/{method}.create_weights",
        )


def _input_scales(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """NVFP4 of modelopt: input scales of all experts on every rank, and one to drop for every weight-only linear part.

    Where ranks hold unequal numbers of experts, the rank with the fewest is counted.
    """
    last = max((max(e.first) for e in assignment.entries if e.module.layered and e.first), default=0)
    for entry in assignment.entries:
        module, suffixes = entry.module, {tensor.suffix for tensor in entry.stored}
        if ".weight_scale_2" not in suffixes or module.rule.role == "mtp":
            continue
        stored = ".input_scale" in suffixes
        if module.rule.is_routed:
            experts = module.stack or entry.copies
            missing = experts - (expert_counts(experts, topology.ep)[-1] if stored else 0)
            nbytes, why = missing * INPUT_SCALE_BYTES, "input scales of all experts are kept on every rank"
        else:
            nbytes, why = (0 if stored else DROPPED_SCALE_BYTES), "an input scale to read and drop, in the model dtype"
        if nbytes:
            yield Extra(
                component="engine.input_scales",
                nbytes=nbytes * len(module.out),
                first=entry.first or (last,),
                why=why,
                source="vLLM 0.32.0 quantization/modelopt.py ModelOptNvFp4FusedMoE.create_weights, _DropInputScale",
            )


VLLM = EngineModel(
    name="vllm", uneven=False, vocab_rows=vocab_rows, held_shape=held_shape, extras=extras, held_dtype=held_dtype
)
