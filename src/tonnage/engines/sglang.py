"""SGLang: what its own classes allocate for every rank at load, before kernels repack anything.

Confirmed from the source of 0.5.23: linear, QKV and routed-expert classes cut as those of vLLM do; the padding of the
vocabulary; whole experts under ``--ep-size``; FP8 channel scales in F32; the copies of ``kv_b_proj`` of absorbed MLA;
keys and values of Gemma 4's layers that read what earlier ones keep, which are built unused;
for Kimi K3 the replicated projections (f_a, q_a, kv_a, latent pair, attention residual).
Read in other versions only: expert-parallel ranks must divide the experts (``moe/fused_moe_triton/layer.py``); experts
in block FP8 are only cut at whole blocks (sgl-project/sglang issue 10641).
Inferred: one scalar for every fused part, as vLLM keeps them; and where a recipe has no ``[sglang]`` table, what its
``[vllm]`` table says of single modules (another dtype, parts of a draft not loaded, a rounded width) is taken over, and
the plan's lines say so. For Kimi K3 that includes the least expert width of 256: SGLang's model does not ask for it,
the Marlin and TRT-LLM kernels for MXFP4 round a slice of 192 up to as much.
Not claimed: rows fused modules are rounded up by, and scalars of quantised KV caches and of NVFP4 inputs.

Source:
    SGLang 0.5.23 ``srt/layers`` (``vocab_parallel_embedding.py``, ``linear.py``, ``quantization/fp8.py``) and
    ``srt/models`` (``deepseek_v2.py``, ``kimi_k3.py``, ``gemma4_causal.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tonnage.engines.model import EngineModel, Extra, Local
from tonnage.engines.vllm import copies
from tonnage.engines.vllm import held_shape as vllm_held_shape
from tonnage.errors import PlacementError, Problem
from tonnage.formats.quantized import CHANNEL_FORMATS
from tonnage.recipes.modules import stored_tensors

if TYPE_CHECKING:
    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.modules import Stored
    from tonnage.topology import Topology

VOCAB_MULTIPLE = 64
ABSORBED_BYTES = 2
ABSORBED_MODULE = "kv_b_proj"


def _vocab_rows(vocab: int, tp: int) -> int:
    """Rows are padded to a multiple of 64, and of 64 per rank where that does not divide by the ranks."""
    rows = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    multiple = VOCAB_MULTIPLE * tp
    return rows if rows % tp == 0 else -(-vocab // multiple) * multiple


def _held_shape(
    entry: Assigned, stored: Stored, local: Local, topology: Topology
) -> tuple[tuple[int, ...], str] | None:
    """Return the shape kept where it is not the plain slice; experts are only cut at whole FP8 blocks."""
    if entry.module.rule.is_routed and entry.fmt.name.startswith("fp8_e4m3_block"):
        _check_blocks(entry, local, topology)
        return None
    return vllm_held_shape(entry, stored, local, topology)


def _held_dtype(entry: Assigned, stored: Stored) -> tuple[str, str] | None:
    """Return F32 for channel scales of FP8 and INT8, which are stored in the model dtype."""
    if entry.fmt.name in CHANNEL_FORMATS and stored.suffix == ".weight_scale" and stored.dtype != "F32":
        return "F32", "scales are held in F32"
    return None


def _check_blocks(entry: Assigned, local: Local, topology: Topology) -> None:
    """Refuse a width that is no whole blocks, as ``Fp8MoEMethod.create_weights`` does."""
    width, block = (
        (local.in_, entry.fmt.in_grain) if entry.module.rule.split == "row" else (local.out, entry.fmt.out_grain)
    )
    if topology.expert_tp > 1 and width % block:
        raise PlacementError(
            Problem(
                where=f"--tp {topology.tp} --engine sglang",
                tensor=entry.module.rule.pattern,
                what=f"{width} channels per rank are no whole scale blocks",
                expected=f"a multiple of {block}, or --ep {topology.tp}, which cuts none",
                found=str(width),
            )
        )


def _extras(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """Yield the two copies of ``kv_b_proj`` that absorbed attention multiplies with: BF16, contiguous, beside it."""
    for entry in assignment.entries:
        module = entry.module
        if module.rule.pattern.endswith(f".{ABSORBED_MODULE}") and module.rule.role == "attention":
            yield Extra(
                component="engine.mla_absorbed",
                nbytes=(module.out_size // topology.tp * module.in_size * ABSORBED_BYTES,) * topology.tp,
                first=entry.first,
                why="w_kc and w_vc of the rank's heads, BF16 copies beside kv_b_proj",
                source="SGLang 0.5.23 srt/models/deepseek_v2.py, after loading",
            )


def _unstored(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """Yield the keys and values of fused projections on layers whose checkpoint has none: they are built all the same.

    Such layers read what earlier ones keep; vLLM builds their queries alone.
    """
    blueprint = assignment.blueprint
    for module in blueprint.modules:
        if not (module.optional and module.rule.fused == "qkv_proj"):
            continue
        stored = {layer for entry in assignment.entries if entry.module.rule is module.rule for layer in entry.first}
        layers = tuple(layer for layer in module.first if layer not in stored)
        if layers:
            heads = sum(run.units for run in module.out)
            whole = sum(tensor.nbytes for tensor in stored_tensors(module, module.fmt, module.model_dtype))
            yield Extra(
                component="engine.shared_kv",
                nbytes=(-(-whole * max(heads // topology.tp, 1) // heads),) * topology.tp,
                first=layers,
                why=f"{module.rule.pattern.rpartition('.')[2]} of {module.out_size} rows, built unused on layers that "
                "read what earlier ones keep",
                source="SGLang 0.5.23 srt/models/gemma4_causal.py, QKVParallelLinear of every layer",
                part_of=(*module.held_in, ".weight"),
            )


def _check(assignment: Assignment, topology: Topology) -> tuple[Problem, ...]:
    """Refuse unequal numbers of experts, and a container only one fork of vLLM reads."""
    problems = []
    if assignment.container is not None:
        problems.append(
            Problem(where="--engine sglang", what="does not read an exl3-v1 container", expected="vllm or split")
        )
    for entry in assignment.entries:
        experts = entry.module.stack or entry.module.experts
        if entry.module.rule.is_routed and experts % topology.ep:
            problems.append(
                Problem(
                    where=f"--ep {topology.ep} --engine sglang",
                    tensor=entry.module.rule.pattern,
                    what="experts do not divide by the ranks (FusedMoE)",
                    expected=f"a divisor of {experts}",
                    found=str(topology.ep),
                )
            )
    return tuple(problems)


SGLANG = EngineModel(
    name="sglang",
    uneven=False,
    vocab_rows=_vocab_rows,
    held_shape=_held_shape,
    extras=lambda assignment, topology: (*_extras(assignment, topology), *_unstored(assignment, topology)),
    held_dtype=_held_dtype,
    copies=copies,
    takes_over=("vllm",),
    check=_check,
)
