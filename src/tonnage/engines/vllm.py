"""vLLM: what its own classes allocate for every rank at load, before kernels repack anything.

Source:
    vLLM 0.32.0 ``model_executor/layers`` (``vocab_parallel_embedding.py``, ``linear.py``, ``quantization/fp8.py``,
    ``quantization/modelopt.py``, ``quantization/kv_cache.py``, ``fused_moe``), checked against its classes on torch's
    meta device: ``docs/vllm-agreement.md``.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from tonnage.engines.model import EngineModel, Extra, Local
from tonnage.errors import PlacementError, Problem
from tonnage.formats.quantized import CHANNEL_FORMATS
from tonnage.formats.storage import MODEL_DTYPE
from tonnage.topology import expert_counts, stage_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.modules import Module, Stored
    from tonnage.recipes.schema import FusedRule
    from tonnage.topology import Topology

VOCAB_MULTIPLE = 64
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
FINEST_SCALE_BLOCK = 32
FUSED_FOLLOWERS = frozenset({"up_proj", "w3", "k_proj", "v_proj", "kv_a_proj_with_mqa"})
LATENT_QUERY = "fused_qkv_a"
NVFP4_BLOCK = 16
KV_SCALARS_BYTES = 4 * 2
KV_SCALARS_BYTES_CT = 3 * 4 + 3 * 2
INPUT_SCALE_BYTES = 4
DROPPED_SCALE_BYTES = 2
BIAS_BYTES = 2


def vocab_rows(vocab: int, _tp: int) -> int:
    """Rows are padded to a multiple of 64; the result must divide by the ranks."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def held_shape(entry: Assigned, stored: Stored, local: Local, topology: Topology) -> tuple[tuple[int, ...], str] | None:
    """Return the shape vLLM keeps where it is not the plain slice."""
    fmt, expert = entry.fmt.name, entry.module.rule.is_routed
    _require_whole_blocks(entry, local, topology)
    if fmt.startswith("fp8_e4m3_block") and expert and stored.suffix != ".weight":
        return _block_scales(entry, local, topology)
    if fmt == "nvfp4_e2m1" and expert and stored.suffix == ".weight_scale" and local.in_ % NVFP4_BLOCK:
        return (local.out, local.in_ // NVFP4_BLOCK), "scales of a partial block are dropped"
    if fmt.startswith(("gptq", "awq")):
        return _word_packed(entry, stored, local)
    return _scalars(entry, stored, local)


def _scalars(entry: Assigned, stored: Stored, local: Local) -> tuple[tuple[int, ...], str] | None:
    """Scalars and shapes of parts that are loaded into one fused module: held once, or once for every part."""
    fmt, expert, parts = entry.fmt.name, entry.module.rule.is_routed, len(entry.module.out)
    if copies(entry, stored) and _follows(entry):
        return (0,), "the shape is held once for the fused module"
    static = fmt == "fp8_e4m3_tensor" and stored.suffix == ".input_scale"
    if static and expert and _follows(entry):
        return (0,), "the input scale is held once for gate and up"
    scalars = stored.shape[1:] if entry.module.stack else stored.shape
    if stored.dtype != "F32" or parts < 2 or scalars not in ((), (1,)):
        return None
    if entry.module.stack:
        return None if static else ((local.experts, parts), "one scalar for every fused part")
    return None if expert else ((parts,), "one scalar for every fused part")


def copies(entry: Assigned, stored: Stored) -> bool:
    """Whether parts of a fused module overwrite each other: the unpacked shape of packed weights, which is read of all.

    Source:
        vLLM 0.32.0 ``model_executor/parameter.py`` (``BasevLLMParameter._assert_and_load``), ``fused_moe/layer.py``
        (``_load_single_value``).
    """
    return entry.fmt.name.startswith("int") and stored.suffix == ".weight_shape"


def _follows(entry: Assigned) -> bool:
    """Whether the module is loaded behind another one into the same fused module.

    Experts without a gate have nothing before them, and a latent key nothing where queries have no latent.
    """
    rule = entry.module.rule
    return (
        bool(rule.fused)
        and rule.pattern.rpartition(".")[2] in FUSED_FOLLOWERS
        and (not rule.fused.startswith(LATENT_QUERY) or bool(entry.module.names.get("query_latent", True)))
    )


def _word_packed(entry: Assigned, stored: Stored, local: Local) -> tuple[tuple[int, ...], str] | None:
    """GPTQ and AWQ: no order of activations; experts not whole groups wide are regrouped (``moe_wna16.py``)."""
    if stored.suffix == ".g_idx":
        return (0,), "not held without an order of activations"
    fine = _expert_group(entry, local)
    if fine == entry.fmt.in_grain or stored.suffix not in (".scales", ".qzeros"):
        return None
    if stored.suffix == ".qzeros" and entry.fmt.name.startswith("gptq"):
        return (0,), "no zero points where experts are regrouped"
    per_word = entry.fmt.out_grain if stored.suffix == ".qzeros" else 1
    return (-(-local.in_ // fine), local.out // per_word), f"experts regrouped by {fine}"


def _expert_group(entry: Assigned, local: Local) -> int:
    """Return the group experts are held in: the stored one, halved until a rank's width is whole groups."""
    group, rule = entry.fmt.in_grain, entry.module.rule
    width = local.in_ if rule.split == "row" else local.out
    while rule.is_routed and width % group and group > FINEST_SCALE_BLOCK:
        group //= 2
    return group


def held_dtype(entry: Assigned, stored: Stored) -> tuple[str, str] | None:
    """Return another dtype than the stored one.

    Channel scales of FP8 and INT8 are held in F32 (``compressed_tensors_w8a8_fp8.py``, ``..._int8.py``), shapes of
    packed weights in I64 (``compressed_tensors_wNa16.py``), those of experts in the model dtype
    (``compressed_tensors_moe_wna16.py``).
    """
    if entry.fmt.is_plain and entry.module.rule.dtype == MODEL_DTYPE:
        served = "F16" if entry.module.model_dtype == "F16" else "BF16"  # float32 models are served in BF16
        return (served, "held in the model dtype") if stored.dtype in FLOATS and stored.dtype != served else None
    if entry.fmt.name in CHANNEL_FORMATS and stored.suffix == ".weight_scale" and stored.dtype != "F32":
        return "F32", "scales are held in F32"
    if copies(entry, stored) and not _follows(entry):
        return ("BF16", "held in the model dtype") if entry.module.rule.is_routed else ("I64", "held as I64")
    return None


def _require_whole_blocks(entry: Assigned, local: Local, topology: Topology) -> None:
    """Refuse a cut inside a scale block, which vLLM refuses as well.

    Experts in block FP8 (``quant_method`` fp8), GPTQ and AWQ are kept on a finer grid instead; those in NVFP4 and MXFP4
    are allocated all the same. Sources: ``fp8_utils.py`` ``validate_fp8_block_shape``, ``modelopt.py``,
    ``gptq_marlin.py``, ``mxfp8_utils.py``.

    Raises:
        PlacementError: A rank's part of the cut axis is no whole number of blocks.
    """
    rule, fmt = entry.module.rule, entry.fmt
    finer = ("nvfp4", "mxfp4", "gptq", "awq", *(["fp8_e4m3_block"] if entry.module.method == "fp8" else []))
    if topology.tp == 1 or (rule.is_routed and fmt.name.startswith(finer)):
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
    """Scales of experts not whole blocks wide are kept on a finer grid (``refine_fp8_moe_block_shape``)."""
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
    """Return rows a fused module is rounded up by, scalars of quantised KV caches and NVFP4 inputs, biases of GPTQ."""
    return (
        *_fused_rows(assignment, topology),
        *_kv_scalars(assignment, topology),
        *_input_scales(assignment, topology),
        *_gptq_biases(assignment, topology),
    )


def check(assignment: Assignment, topology: Topology) -> tuple[Problem, ...]:
    """Refuse experts in a family without, GPTQ in an order of activations, keys read from another pipeline stage."""
    problems = []
    sections = assignment.blueprint.recipe.sections
    where = f"--engine vllm --ep {topology.ep}"
    if topology.ep > 1 and not any(rule.is_routed for section in sections for rule in section.rules):
        problems.append(Problem(where=where, what="the model has no routed experts", expected="--ep 1"))
    if assignment.blueprint.scheme.act_order and topology.tp > 1:
        what = "GPTQ in an order of activations (desc_act) is not cut"
        problems.append(Problem(where=f"--engine vllm --tp {topology.tp}", what=what, expected="--tp 1"))
    problems.extend(_keys_of_other_stages(assignment, topology.pp))
    return tuple(problems)


def _keys_of_other_stages(assignment: Assignment, pp: int) -> Iterator[Problem]:
    """Yield that a layer reads keys of a layer on an earlier pipeline stage, where they are not.

    A layer without keys of its own reads those of the last layer of its kind that has some.

    Source:
        vLLM 0.32.0 ``model_executor/models/gemma4.py`` (kv_sharing_target_layer_name),
        ``model_executor/layers/attention`` (validate_kv_sharing_target).
    """
    caches = assignment.blueprint.caches
    keepers = {cache.kept: max(cache.layers) for cache in caches if not cache.borrowed}
    reads = [(at, keepers[c.kept]) for c in caches if c.borrowed and c.kept in keepers for at in c.layers]
    layers = max((layer for cache in caches for layer in cache.layers), default=-1) + 1

    def apart(stages: int) -> tuple[int, int] | None:
        """Return the first reader and its keeper on different stages."""
        cut = stage_layers(layers, stages)
        return next((pair for pair in reads if not any(pair[0] in mine and pair[1] in mine for mine in cut)), None)

    if pp > 1 and (found := apart(pp)):
        works = ", ".join(str(size) for size in range(1, pp) if not apart(size))
        yield Problem(
            where=f"--engine vllm --pp {pp}",
            what=f"layer {found[0]} reads the keys of layer {found[1]}, which another stage keeps",
            expected=f"--pp {works}",
            found=str(pp),
        )


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
            nbytes=(missing * (stored.nbytes // entries[0].module.out_size),) * tp,
            first=first,
            why=rule.why,
            source=f"{entries[0].module.section.name}.toml [vllm.fused]",
            part_of=(*entries[0].module.held_in, stored.suffix),
        )


def _kv_scalars(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """Attention layers of a checkpoint with scaled KV caches own q, k, v and probability scales in the model dtype.

    compressed-tensors: q, k and v scales in F32, and as many zero points in the model dtype. modelopt alone, but
    not its mixed precision, creates them for latents too, whatever the checkpoint says of its cache.
    """
    scheme = assignment.blueprint.scheme
    layers: set[int] = set()
    for entry in assignment.entries:
        if not _attends(entry.module):
            continue
        latent = "kv_b_proj" in entry.module.rule.pattern
        k_proj = entry.module.rule.pattern.endswith((".k_proj", ".qkv_proj"))
        if (k_proj and (scheme.kv_scales or scheme.method in ("fp8", "modelopt", "compressed-tensors"))) or (
            latent and scheme.method == "modelopt"
        ):
            layers.update(entry.first)
    if layers:
        ct = scheme.method == "compressed-tensors"
        method = "compressed_tensors.py CompressedTensorsKVCacheMethod" if ct else "kv_cache.py BaseKVCacheMethod"
        yield Extra(
            component="engine.kv_scales",
            nbytes=(KV_SCALARS_BYTES_CT if ct else KV_SCALARS_BYTES,) * topology.tp,
            first=tuple(sorted(layers)),
            why=f"q, k, v scales and {'zero points' if ct else 'probability scales'} of every attention layer",
            source=f"vLLM 0.32.0 quantization/{method}.create_weights",
        )


def _attends(module: Module) -> bool:
    """Whether it is of a layer of the language model, or of a draft that is loaded and not left out with its target."""
    rules = module.section.engines.get("vllm")
    if module.rule.role == "mtp":
        return rules is None or rules.every is None
    return module.rule.role == "attention" and module.layered


def _input_scales(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """NVFP4 of modelopt: input scales of all experts on every rank; one to drop for every weight-only linear part."""
    last = max((max(e.first) for e in assignment.entries if e.module.layered and e.first), default=0)
    for entry in assignment.entries:
        module, suffixes = entry.module, {tensor.suffix for tensor in entry.stored}
        if ".weight_scale_2" not in suffixes or module.rule.role == "mtp":
            continue
        stored = ".input_scale" in suffixes
        if module.rule.is_routed:
            experts = module.stack or entry.copies
            here = expert_counts(experts, topology.ep) if topology.ep > 1 else (experts,) * topology.tp
            missing = tuple(experts - (mine if stored else 0) for mine in here)
            nbytes = tuple(INPUT_SCALE_BYTES * count * len(module.out) for count in missing)
            why = "input scales of all experts are kept on every rank"
        else:
            nbytes = (0 if stored else DROPPED_SCALE_BYTES * len(module.out),) * topology.tp
            why = "an input scale to read and drop, in the model dtype"
        if any(nbytes):
            yield Extra(
                component="engine.input_scales",
                nbytes=nbytes,
                first=entry.first or (last,),
                why=why,
                source="vLLM 0.32.0 quantization/modelopt.py ModelOptNvFp4FusedMoE.create_weights, _DropInputScale",
            )


def _gptq_biases(assignment: Assignment, topology: Topology) -> Iterator[Extra]:
    """GPTQ experts are created with a bias each, unless they are regrouped."""
    for entry in assignment.entries:
        module = entry.module
        if not (module.rule.is_routed and entry.fmt.name.startswith("gptq")):
            continue
        cut = 1 if module.rule.split == "row" else topology.expert_tp
        local = Local(out=module.out_size // cut, in_=module.in_size // (topology.expert_tp // cut), experts=0)
        if _expert_group(entry, local) == entry.fmt.in_grain:
            here = expert_counts(entry.copies, topology.ep) if topology.ep > 1 else (entry.copies,) * topology.tp
            yield Extra(
                component="engine.expert_biases",
                nbytes=tuple(BIAS_BYTES * local.out * mine for mine in here),
                first=entry.first,
                why="a bias for every expert, created before the weights are read",
                source="vLLM 0.32.0 quantization/auto_gptq.py",
            )


VLLM = EngineModel(
    name="vllm",
    uneven=False,
    vocab_rows=vocab_rows,
    held_shape=held_shape,
    extras=extras,
    held_dtype=held_dtype,
    copies=copies,
    check=check,
)
