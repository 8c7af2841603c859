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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.blueprint import Stored
    from tonnage.recipes.schema import FusedRule
    from tonnage.topology import Topology

VOCAB_MULTIPLE = 64
FINEST_SCALE_BLOCK = 32
KV_SCALARS = 4
KV_SCALAR_BYTES = 2


def vocab_rows(vocab: int, _tp: int) -> int:
    """Rows are padded to a multiple of 64; the result must divide by the ranks."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def held_shape(entry: Assigned, stored: Stored, local: Local, topology: Topology) -> tuple[tuple[int, ...], str] | None:
    """Return the shape vLLM keeps where it is not the plain slice."""
    fmt, expert = entry.fmt.name, entry.module.rule.role == "expert"
    if fmt.startswith("fp8_e4m3_block") and stored.suffix in (".weight_scale_inv", ".scale", ".weight_scale"):
        return _block_scales(entry, local, topology) if expert else None
    if fmt == "nvfp4_e2m1" and expert and stored.suffix == ".weight_scale" and local.in_ % 16:
        return (local.out, local.in_ // 16), "scales of a partial block are dropped"
    parts = len(entry.module.out)
    if stored.shape == () and stored.dtype == "F32" and parts > 1 and not expert:
        return (parts,), "one scalar for every fused part"
    return None


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
    """Return rows a fused module is rounded up by, and the scale scalars of quantised KV caches."""
    return (*_fused_rows(assignment, topology), *_kv_scalars(assignment))


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
    """Attention layers of a checkpoint with scaled KV caches own q, k, v and probability scales in the model dtype."""
    scheme = assignment.blueprint.scheme
    layers: set[int] = set()
    for entry in assignment.entries:
        if entry.module.rule.role == "attention" and entry.module.layered:
            latent = "kv_b_proj" in entry.module.rule.pattern
            k_proj = entry.module.rule.fused == "qkv_proj"
            if (k_proj and (scheme.kv_scales or scheme.method in ("fp8", "modelopt", "compressed-tensors"))) or (latent and scheme.kv_scales):
                layers.update(entry.first)
    if layers:
        yield Extra(
            component="engine.kv_scales",
            nbytes=KV_SCALARS * KV_SCALAR_BYTES,
            first=tuple(sorted(layers)),
            why="q, k, v and probability scales of every attention layer",
            source="vLLM 0.32.0 quantization/kv_cache.py BaseKVCacheMethod.create_weights",
        )


VLLM = EngineModel(name="vllm", uneven=False, vocab_rows=vocab_rows, held_shape=held_shape, extras=extras)
