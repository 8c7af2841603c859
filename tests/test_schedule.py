"""Schedules of a small model, against takes worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from samples import LLAMA
from tonnage.assignment import Assignment, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.headers import Header, TensorEntry
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.engines import engine
from tonnage.engines.model import EngineModel
from tonnage.errors import CheckpointError, PlacementError, UnknownFormatError
from tonnage.formats.dtypes import payload_bytes
from tonnage.matching import assign_headers
from tonnage.placement import place
from tonnage.prepare.jobs import Job, OutputTensor, Schedule, Step
from tonnage.prepare.schedule import make_schedule
from tonnage.recipes.blueprint import blueprint_of
from tonnage.synth.layout import plan_layout
from tonnage.synth.storage import store_as
from tonnage.topology import Topology

SMALL: dict[str, Any] = {**LLAMA, "vocab_size": 301, "attention_bias": True}
WIDE = {**SMALL, "head_dim": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def shard_of(tensors: dict[str, tuple[str, tuple[int, ...]]], file: str = "model.safetensors") -> ShardHeader:
    """A header with these tensors, one after the other, behind 1000 bytes of JSON."""
    entries, begin = [], 0
    for name, (dtype, shape) in tensors.items():
        end = begin + payload_bytes(dtype, shape)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    header = Header(tensors=tuple(entries), metadata={}, data_begin=1008)
    return ShardHeader(shard_file=file, layer=None, skeleton=header, data_begin=1008, file_bytes=1008 + begin)


def stored(fields: dict[str, Any], **how: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of a model's checkpoint in file order."""
    model = store_as(parse_config(fields, name="test"), **how)
    (file,) = plan_layout(model.entries).shards
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors()}


def assigned(fields: dict[str, Any], shards: list[ShardHeader]) -> Assignment:
    return assign_headers(blueprint_of(parse_config(fields, name="test")), shards)


def scheduled(
    fields: dict[str, Any] = SMALL,
    *,
    convert: bool = False,
    name: str = "split",
    of: Topology | None = None,
    **how: Any,
) -> Schedule:
    shards = [shard_of(stored(fields))]
    assignment = assigned(fields, shards)
    placed = convert_to_mxfp8(assignment) if convert else assignment
    return make_schedule(place(placed, of or Topology(tp=2), engine(name)), shards, **how)


def steps(schedule: Schedule, name: str) -> Step:
    (found,) = (step for job in schedule.jobs for step in job.steps if step.source.name.endswith(name))
    return found


def written(schedule: Schedule, name: str) -> list[OutputTensor]:
    """A tensor on every rank that has it."""
    outputs = (output for job in schedule.jobs for output in job.outputs)
    return [tensor for output in outputs for tensor in output.tensors if tensor.name.endswith(name)]


CUTS: dict[str, tuple[str, list[tuple[int | None, tuple[tuple[int, int], ...]]], list[tuple[int, ...]]]] = {
    "column": ("0.mlp.up_proj.weight", [(0, ((0, 256),)), (0, ((256, 512),))], [(256, 256)] * 2),
    "column bias": ("0.self_attn.q_proj.bias", [(0, ((0, 128),)), (0, ((128, 256),))], [(128,)] * 2),
    "row": ("0.mlp.down_proj.weight", [(1, ((0, 256),)), (1, ((256, 512),))], [(256, 256)] * 2),
    "row bias": ("0.self_attn.o_proj.bias", [(None, ()), (None, ())], [(256,)] * 2),
    "replicated": ("1.input_layernorm.weight", [(None, ()), (None, ())], [(256,)] * 2),
    "vocabulary": ("embed_tokens.weight", [(0, ((0, 151),)), (0, ((151, 301),))], [(151, 256)] * 2),
}


@pytest.mark.parametrize(("name", "takes", "shapes"), CUTS.values(), ids=CUTS)
def test_takes(name: str, takes: list[Any], shapes: list[tuple[int, ...]]) -> None:
    schedule = scheduled()
    assert [(take.axis, take.ranges) for take in steps(schedule, name).takes] == takes
    assert [tensor.shape for tensor in written(schedule, name)] == shapes


def test_the_vocabulary_ends_in_zero_rows() -> None:
    assert [take.zero_bytes for take in steps(scheduled(), "lm_head.weight").takes] == [0, 256 * 2]


def test_ranks_beyond_the_vocabulary_hold_zeros_only() -> None:
    schedule = scheduled(
        {**SMALL, "vocab_size": 5, "num_attention_heads": 4, "num_key_value_heads": 4}, of=Topology(tp=4)
    )
    takes = steps(schedule, "lm_head.weight").takes
    assert [(take.ranges, take.zero_bytes // 512) for take in takes] == [
        (((0, 2),), 0),
        (((2, 4),), 0),
        (((4, 5),), 1),
        ((), 2),
    ]


def test_a_cut_is_noted_with_axis_ranges_and_full_shape() -> None:
    schedule = scheduled()
    assert [t.note for t in written(schedule, "1.mlp.down_proj.weight")] == [
        "[1,[[0,256]],[256,512]]",
        "[1,[[256,512]],[256,512]]",
    ]
    assert {t.note for t in written(schedule, "layernorm.weight")} == {""}


def test_source_offsets_count_the_header() -> None:
    (job,) = scheduled().jobs
    assert min(step.source.begin for step in job.steps) == 1008


# Conversion


def test_converted_weights_are_codes_and_scales_in_source_elements() -> None:
    schedule = scheduled(convert=True)
    row = steps(schedule, "0.mlp.down_proj.weight")
    assert row.convert
    assert [(take.axis, take.ranges) for take in row.takes] == [(1, ((0, 256),)), (1, ((256, 512),))]
    assert [(t.dtype, t.shape) for t in written(schedule, "0.mlp.down_proj.weight")] == [("F8_E4M3", (256, 256))] * 2
    assert [(t.dtype, t.shape, t.note) for t in written(schedule, "0.mlp.down_proj.weight_scale")] == [
        ("U8", (256, 8), "[1,[[0,8]],[256,16]]"),
        ("U8", (256, 8), "[1,[[8,16]],[256,16]]"),
    ]
    for take in row.takes:
        assert take.scale_begin == take.begin + 256 * 256


def test_what_is_not_a_projection_keeps_its_bytes() -> None:
    plain = {step.source.name for job in scheduled(convert=True).jobs for step in job.steps if not step.convert}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"} <= plain
    assert not any(name.endswith("_proj.weight") for name in plain)


def test_scalars_of_a_quantised_cache_beside_a_converted_weight_are_kept() -> None:
    tensors = stored(SMALL)
    beside = {f"model.layers.{n}.self_attn.k_proj.k_scale": ("F32", shape) for n, shape in enumerate([(), (1,)])}
    shards = [shard_of({**beside, **tensors})]
    placement = place(convert_to_mxfp8(assigned(SMALL, shards)), Topology(tp=2), engine("split"))
    schedule = make_schedule(placement, shards)
    assert [(t.dtype, t.shape) for t in written(schedule, ".k_scale")] == [("F32", ()), ("F32", (1,))] * 2


def test_outputs_with_converted_tensors_name_the_rule() -> None:
    (job,) = scheduled(convert=True, scale_rule="even").jobs
    assert {dict(output.metadata)["mxfp8_scale_rule"] for output in job.outputs} == {"even"}
    (job,) = scheduled(scale_rule="even").jobs
    assert not any("mxfp8_scale_rule" in dict(output.metadata) for output in job.outputs)


# Order


def test_wider_elements_come_first_and_converted_ones_last() -> None:
    tensors = {**stored(SMALL), "model.layers.0.self_attn.k_proj.k_scale": ("F32", ())}
    shards = [shard_of(tensors)]
    placement = place(convert_to_mxfp8(assigned(SMALL, shards)), Topology(tp=2), engine("split"))
    (job,) = make_schedule(placement, shards).jobs
    kinds = ["convert" if step.convert else step.source.dtype for step in job.steps]
    assert kinds == sorted(kinds, key=["F32", "BF16", "convert"].index)
    for output in job.outputs:
        names = [tensor.name for tensor in output.tensors]
        codes = [n for n, tensor in enumerate(output.tensors) if tensor.dtype == "F8_E4M3"]
        assert all(names[n + 1] == f"{names[n]}_scale" for n in codes)


def jobs_of(job_bytes: int) -> list[Job]:
    return list(scheduled(job_bytes=job_bytes).jobs)


def test_jobs_are_whole_tensors_of_at_most_so_many_bytes() -> None:
    jobs = jobs_of(300_000)
    assert all(job.read_bytes <= 300_000 for job in jobs)
    assert all(a.read_bytes + b.read_bytes > 300_000 for a, b in pairwise(jobs))
    assert [job.number for job in jobs] == list(range(len(jobs)))
    assert jobs[0].outputs[1].path == f"weights/tp2/rank-1/model-00001-of-{len(jobs):05d}.safetensors"


def test_a_larger_tensor_is_a_job_of_its_own() -> None:
    assert all(len(job.steps) == 1 for job in jobs_of(1))


def test_jobs_do_not_span_files() -> None:
    names = iter(stored(SMALL).items())
    first = dict(next(names) for _ in range(9))
    shards = [shard_of(first, "a.safetensors"), shard_of(dict(names), "b.safetensors")]
    placement = place(assigned(SMALL, shards), Topology(tp=2), engine("split"))
    assert [job.source_file for job in make_schedule(placement, shards).jobs] == ["a.safetensors", "b.safetensors"]


def test_jobs_are_made_anew_and_equal() -> None:
    jobs = scheduled().jobs
    assert jobs[0] == jobs[0]
    assert jobs[0] is not jobs[0]
    assert [*jobs[:]] == [*jobs]


# Ranks


def test_some_ranks_get_the_files_they_would_get_with_all() -> None:
    whole, part = scheduled(job_bytes=300_000), scheduled(job_bytes=300_000, ranks=[1])
    assert part.ranks == (1,)
    outputs = [[output for output in job.outputs if output.rank == 1] for job in whole.jobs]
    assert [list(job.outputs) for job in part.jobs] == outputs
    assert {take.rank for job in part.jobs for step in job.steps for take in step.takes} == {1}


def test_stages_take_their_layers() -> None:
    schedule = scheduled(of=Topology(tp=1, pp=2))
    at = {tensor.name: output.rank for job in schedule.jobs for output in job.outputs for tensor in output.tensors}
    assert {rank for name, rank in at.items() if ".layers.0." in name} == {0}
    assert {rank for name, rank in at.items() if ".layers.1." in name} == {1}
    assert (at["model.embed_tokens.weight"], at["lm_head.weight"]) == (0, 1)
    assert {output.path.rpartition("/")[0] for job in schedule.jobs for output in job.outputs} == {
        "weights/tp1-pp2/rank-0",
        "weights/tp1-pp2/rank-1",
    }


def test_a_stage_that_takes_nothing_of_a_file_has_no_output() -> None:
    schedule = scheduled(of=Topology(tp=1, pp=2), job_bytes=300_000, ranks=[0])
    assert all(job.outputs and job.steps for job in schedule.jobs)
    assert len(schedule.jobs) < len(scheduled(of=Topology(tp=1, pp=2), job_bytes=300_000).jobs)


def test_whole_experts_are_on_one_rank_each() -> None:
    fields = {**SMALL, "model_type": "mixtral", "num_local_experts": 5}
    schedule = scheduled(fields, of=Topology(tp=2, ep=2))
    held = [
        [take.rank for take in steps(schedule, f"0.block_sparse_moe.experts.{e}.w1.weight").takes] for e in range(5)
    ]
    assert held == [[0], [0], [0], [1], [1]]
    assert {tensor.note for tensor in written(schedule, ".w1.weight")} == {""}


def test_stacked_experts_are_cut_on_their_axis() -> None:
    fields = {**SMALL, "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 64}
    schedule = scheduled(fields, of=Topology(tp=2, ep=2))
    takes = steps(schedule, "0.mlp.experts.down_proj").takes
    assert [(take.axis, take.ranges) for take in takes] == [(0, ((0, 2),)), (0, ((2, 4),))]


def test_modules_of_experts_stored_two_ways_are_told_apart() -> None:
    fields = {**WIDE, "model_type": "mixtral", "num_local_experts": 3, "quantization_config": {"quant_method": "exl3"}}
    tensors = stored({key: value for key, value in fields.items() if key != "quantization_config"}, storage="exl3")
    tensors = {
        name: (dtype, (*shape[:2], 64) if name.endswith("experts.1.w1.trellis") else shape)
        for name, (dtype, shape) in tensors.items()
    }
    shards = [shard_of(tensors)]
    schedule = make_schedule(place(assigned(fields, shards), Topology(tp=2), engine("split")), shards)
    shapes = [written(schedule, f"0.block_sparse_moe.experts.{e}.w1.trellis")[0].shape[2] for e in range(3)]
    assert shapes == [32, 64, 32]


# Formats


def test_partial_blocks_of_fp8_stay_at_the_end_of_the_axis() -> None:
    fields = {**WIDE, "intermediate_size": 448, "quantization_config": FP8}
    schedule = scheduled(fields)
    assert [(t.shape, t.note) for t in written(schedule, "0.mlp.up_proj.weight_scale_inv")] == [
        ((2, 2), "[0,[[0,2]],[4,2]]"),
        ((2, 2), "[0,[[2,4]],[4,2]]"),
    ]
    assert [t.shape for t in written(schedule, "0.mlp.up_proj.weight")] == [(256, 256), (192, 256)]


def test_the_bias_of_a_row_cut_in_exl3_is_on_the_first_rank_only() -> None:
    shards = [shard_of(stored(WIDE, storage="exl3"))]
    fields = {**WIDE, "quantization_config": {"quant_method": "exl3"}}
    schedule = make_schedule(place(assigned(fields, shards), Topology(tp=2), engine("split")), shards)
    assert [take.rank for take in steps(schedule, "0.self_attn.o_proj.bias").takes] == [0]
    assert [take.rank for take in steps(schedule, "0.self_attn.o_proj.svh").takes] == [0, 1]
    trellis = steps(schedule, "0.self_attn.o_proj.trellis").takes
    assert [(take.axis, take.ranges) for take in trellis] == [(0, ((0, 16),)), (0, ((16, 32),))]


def test_columns_an_engine_pads_are_zeros_after_every_row() -> None:
    fields = {**SMALL, "model_type": "gpt_oss", "num_local_experts": 2, "head_dim": 64, "intermediate_size": 192}
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    schedule = scheduled({**fields, "vocab_size": 320}, name="vllm")
    takes = steps(schedule, "0.mlp.experts.down_proj_scales").takes
    assert [(take.axis, take.ranges, take.zero_bytes) for take in takes] == [(2, ((0, 4),), 0), (2, ((4, 6),), 2)]
    assert [(tensor.shape, tensor.note) for tensor in written(schedule, "0.mlp.experts.down_proj_scales")] == [
        ((2, 256, 4), "[2,[[0,4]],[2,256,6]]"),
        ((2, 256, 4), "[2,[[4,6]],[2,256,6]]"),
    ]


def packed(style: str, **weights: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}}
    return {"quant_method": "compressed-tensors", "format": style, "config_groups": groups, "ignore": ["lm_head"]}


def test_scales_an_engine_converts_while_it_copies_them_are_written_as_stored() -> None:
    stated = packed("float-quantized", num_bits=8, type="float", strategy="channel")
    schedule = scheduled({**SMALL, "quantization_config": stated}, name="vllm")
    found = [(tensor.dtype, tensor.shape) for tensor in written(schedule, "0.mlp.up_proj.weight_scale")]
    assert found == [("BF16", (256, 1))] * 2


def test_a_shape_every_part_of_a_fused_module_overwrites_is_written_of_all_parts() -> None:
    stated = packed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
    schedule = scheduled({**SMALL, "vocab_size": 320, "quantization_config": stated}, name="vllm")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        found = [
            (tensor.dtype, tensor.shape, tensor.note)
            for tensor in written(schedule, f"0.self_attn.{name}.weight_shape")
        ]
        assert found == [("I32", (2,), "")] * 2


def test_rows_an_engine_pads_and_converts_are_zeros_of_the_stored_dtype() -> None:
    schedule = scheduled({**SMALL, "dtype": "float32"}, name="vllm")
    takes = steps(schedule, "model.embed_tokens.weight").takes
    assert [(take.ranges, take.zero_bytes) for take in takes] == [(((0, 160),), 0), (((160, 301),), 19 * 256 * 4)]
    assert {(tensor.dtype, tensor.shape) for tensor in written(schedule, "embed_tokens.weight")} == {
        ("F32", (160, 256))
    }


# Refusals


def test_scales_that_engines_read_by_value_are_refused() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    shape = stored(SMALL)[name][1]
    for dtype in ("U8", "F8_E8M0"):
        tensors = stored(SMALL) | {name: ("F8_E4M3", shape), f"{name}_scale": (dtype, (shape[0], shape[1] // 32))}
        shards = [shard_of(tensors)]
        placement = place(assigned(SMALL, shards), Topology(), engine("split"))
        if dtype == "U8":
            assert make_schedule(placement, shards, layout="hf").jobs
            continue
        said = "up_proj.weight_scale: scale of MXFP8 that engines convert .* expected U8, .* found F8_E8M0"
        with pytest.raises(UnknownFormatError, match=said):
            make_schedule(placement, shards)


def test_a_standard_checkpoint_is_of_no_engine() -> None:
    said = "--layout hf: has the shapes of the checkpoint, as every engine loads it; expected engine split; found vllm"
    with pytest.raises(PlacementError, match=said):
        scheduled(name="vllm", of=Topology(), layout="hf")


def refused(name: str, fields: dict[str, Any], tp: int) -> Iterator[str]:
    with pytest.raises(PlacementError) as refusal:
        scheduled(fields, name=name, of=Topology(tp=tp))
    return (str(problem) for problem in refusal.value.problems)


def test_an_engine_that_holds_other_bytes_is_refused_by_tensor() -> None:
    fields = {**SMALL, "model_type": "phi3", "quantization_config": {"quant_method": "fp8"}}
    (*_, last) = refused("vllm", fields, 2)
    assert "gate_up_proj.weight_scale: the engine does not hold the slice: one scalar for every fused part" in last


HEEDLESS = EngineModel(
    name="heedless",
    uneven=False,
    vocab_rows=lambda vocab, tp: -(-vocab // tp) * tp,
    held_shape=lambda *_: None,
    extras=lambda *_: (),
)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
INSIDE: dict[str, tuple[dict[str, Any], bool, str]] = {
    "GPTQ group": ({"quantization_config": GPTQ}, False, "o_proj.qzeros: cut inside a block of 128 that shares one stored index; expected multiples of 128; found 0 to 64"),
    "scale block": ({"head_dim": 24}, True, "o_proj.weight_scale: cut inside a block of 32 that shares one stored index; expected multiples of 32; found 0 to 24"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "convert", "says"), INSIDE.values(), ids=INSIDE)
def test_a_cut_inside_a_block_is_refused_by_tensor(fields: dict[str, Any], convert: bool, says: str) -> None:
    shards = [shard_of(stored({**SMALL, **fields}))]
    assignment = assigned({**SMALL, **fields}, shards)
    placed = convert_to_mxfp8(assignment) if convert else assignment
    with pytest.raises(PlacementError) as refusal:
        make_schedule(place(placed, Topology(tp=4), HEEDLESS), shards)
    assert says in str(refusal.value)


def test_headers_that_were_not_placed_are_refused() -> None:
    tensors = stored(SMALL)
    shards = [shard_of(tensors)]
    placement = place(assigned(SMALL, shards), Topology(tp=2), engine("split"))
    strange = shard_of({**tensors, "model.layers.9.mlp.up_proj.weight": ("BF16", (2, 2))})
    with pytest.raises(CheckpointError, match=r"layers\.9\.mlp\.up_proj\.weight: no placed module stores this tensor"):
        make_schedule(placement, [strange])
    other = shard_of({**tensors, "model.norm.weight": ("F32", (256,))})
    with pytest.raises(CheckpointError, match=r"norm\.weight: not the tensor that was placed; expected BF16 \[256\]"):
        make_schedule(placement, [other])
    fewer = shard_of({name: kind for name, kind in tensors.items() if "norm" not in name})
    with pytest.raises(CheckpointError, match="rank 0 does not take what is planned"):
        make_schedule(placement, [fewer])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ranks": [2]}, "no such rank; expected 0..1; found 2"),
        ({"ranks": []}, "no rank"),
        ({"layout": "hf"}, "--tp 1"),
    ],
)
def test_requests_that_cannot_be_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        scheduled(**how)


def test_a_transposed_weight_is_never_converted() -> None:
    shards = [shard_of(stored(SMALL))]
    assignment = convert_to_mxfp8(assigned(SMALL, shards))
    entries = tuple(
        replace(entry, module=replace(entry.module, rule=replace(entry.module.rule, transposed=True)))
        for entry in assignment.entries
    )
    with pytest.raises(PlacementError, match="cannot be converted; expected a weight stored"):
        make_schedule(place(replace(assignment, entries=entries), Topology(tp=2), engine("split")), shards)
