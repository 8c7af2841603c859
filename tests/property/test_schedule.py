"""Laws of schedules: planned bytes are scheduled bytes, for every family, engine and topology that can be placed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.assignment import Assignment, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.headers import Header, TensorEntry
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.engines import engine
from tonnage.errors import PlacementError
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.placement import Placement, can_place, place
from tonnage.prepare.jobs import Job, Schedule, Step, Take
from tonnage.prepare.schedule import make_schedule
from tonnage.recipes.blueprint import blueprint_of
from tonnage.synth.layout import plan_layout
from tonnage.synth.shrink import scale_down
from tonnage.synth.storage import store_as
from tonnage.topology import Topology

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FAMILIES = (
    "MiniMaxAI__MiniMax-M2.5",
    "MiniMaxAI__MiniMax-M3",
    "Qwen__Qwen2.5-7B-Instruct",
    "Qwen__Qwen3-30B-A3B-FP8",
    "Qwen__Qwen3-VL-235B-A22B-Instruct",
    "Qwen__Qwen3.5-35B-A3B",
    "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "XiaomiMiMo__MiMo-7B-Base",
    "deepseek-ai__DeepSeek-V3.2",
    "deepseek-ai__DeepSeek-V4-Flash",
    "google__gemma-4-26B-A4B",
    "meta-llama__Llama-4-Maverick-17B-128E-Instruct",
    "mistralai__Mixtral-8x22B-v0.1",
    "moonshotai__Kimi-K2.5",
    "moonshotai__Kimi-K3",
    "nvidia__GLM-5-NVFP4",
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1",
    "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "nvidia__Qwen3.6-35B-A3B-NVFP4",
    "openai__gpt-oss-120b",
    "zai-org__GLM-5.2",
)
TOPOLOGIES = tuple(
    Topology(tp=tp, ep=ep, pp=pp) for tp in (1, 2, 3, 4, 8) for ep in {1, tp} for pp in ((1, 3) if ep == 1 else (1,))
)


def headers_of(entries: Any) -> list[ShardHeader]:
    """Shard headers as they would be read, one file per layer."""
    shards = []
    for file in plan_layout(entries, sharded=True).shards:
        tensors = tuple(
            TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, begin=t.begin, end=t.end) for t in file.tensors()
        )
        header = Header(tensors=tensors, metadata={}, data_begin=4096)
        size = 4096 + header.payload_bytes
        shards.append(ShardHeader(shard_file=file.name, layer=None, skeleton=header, data_begin=4096, file_bytes=size))
    return shards


@cache
def family(name: str) -> tuple[Assignment, list[ShardHeader]]:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    config = scale_down(parse_config(fields, name=name, hf_quant=fields.get("_hf_quant_config")))
    model = store_as(config)
    return Assignment(blueprint=blueprint_of(config), entries=model.entries), headers_of(model.entries)


def taken_bytes(step: Step, take: Take) -> int:
    """Bytes of a take, counted from its ranges alone; of codes and scales, if converted."""
    source = step.source
    indices = source.shape[take.axis or 0] if source.shape else 1
    taken = indices if take.axis is None else sum(end - begin for begin, end in take.ranges)
    elements = prod(source.shape) // max(indices, 1) * taken
    if step.convert:
        return elements + elements // 32
    outer = 1 if take.axis is None else prod(source.shape[: take.axis])
    return elements * DTYPE_BITS[source.dtype] // 8 + outer * take.zero_bytes


def check_job(job: Job) -> Counter[int]:
    """Outputs have no holes, every tensor is aligned, and the takes are the outputs' bytes in their order."""
    for output in job.outputs:
        edge = 0
        for tensor in output.tensors:
            assert tensor.begin == edge
            assert edge % max(DTYPE_BITS[tensor.dtype] // 8, 1) == 0
            edge += tensor.nbytes
    ends: Counter[int] = Counter()
    for step in job.steps:
        assert [take.rank for take in step.takes] == sorted({take.rank for take in step.takes})
        for take in step.takes:
            assert take.begin == ends[take.rank]
            ends[take.rank] += taken_bytes(step, take)
    assert {output.rank: output.payload_bytes for output in job.outputs} == {
        output.rank: ends[output.rank] for output in job.outputs
    }
    assert set(ends) <= {output.rank for output in job.outputs}
    return ends


def assert_scheduled_as_planned(placement: Placement, schedule: Schedule) -> None:
    total: Counter[int] = Counter()
    for job in schedule.jobs:
        total.update(check_job(job))
    tp = placement.topology.tp
    for rank in range(placement.topology.world_size):
        planned = placement.rank_bytes(rank // tp, rank % tp)
        added = sum(
            placement.extra_multiplicity(extra, rank // tp) * extra.nbytes[rank % tp] for extra in placement.extras
        )
        converted = sum(
            placement.multiplicity(placed, rank // tp) * share.copies * (piece.held_bytes - piece.file_bytes)
            for placed in placement.placed
            for share in [placed.shares[rank % tp]]
            for piece in share.pieces
        )
        assert total[rank] == planned - added - converted
    assert (added, converted) == (0, 0) or placement.engine.name != "split"


@pytest.mark.parametrize("name", FAMILIES)
def test_planned_bytes_are_scheduled_bytes(name: str) -> None:
    assignment, shards = family(name)
    for convert in (False, True):
        wanted = convert_to_mxfp8(assignment) if convert else assignment
        for topology in TOPOLOGIES[convert::2]:
            if can_place(wanted, topology, engine("split")):
                placement = place(wanted, topology, engine("split"))
                assert_scheduled_as_planned(placement, make_schedule(placement, shards, job_bytes=1 << 20))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("of", ["vllm", "sglang", "exllamav3"])
def test_what_an_engine_holds_is_scheduled_or_refused(name: str, of: str) -> None:
    assignment, shards = family(name)
    for topology in TOPOLOGIES[::3]:
        if can_place(assignment, topology, engine(of)):
            placement = place(assignment, topology, engine(of))
            problems = []
            try:
                assert_scheduled_as_planned(placement, make_schedule(placement, shards))
            except PlacementError as refusal:
                problems = [problem.tensor for problem in refusal.problems]
            pieces = [piece for p in placement.placed for share in p.shares for piece in share.pieces]
            others = [piece for piece in pieces if piece.held_bytes != piece.file_bytes and not piece.copied]
            assert bool(problems) == bool(others)
            assert all(problems)


LLAMAS = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "mixtral", "phi3", "gemma2"]),
        "hidden_size": st.sampled_from([64, 96, 256]),
        "intermediate_size": st.sampled_from([32, 96, 160, 512]),
        "num_attention_heads": st.sampled_from([4, 6, 8]),
        "num_key_value_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([16, 32]),
        "num_hidden_layers": st.integers(1, 3),
        "num_local_experts": st.integers(1, 5),
        "vocab_size": st.integers(1, 70),
        "tie_word_embeddings": st.booleans(),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
    }
)


@given(fields=LLAMAS, topology=st.sampled_from(TOPOLOGIES), convert=st.booleans(), job_bytes=st.integers(1, 1 << 17))
@settings(max_examples=60, deadline=None)
def test_how_it_is_cut_into_jobs_does_not_matter(
    fields: dict[str, Any], topology: Topology, convert: bool, job_bytes: int
) -> None:
    model = store_as(parse_config(fields, name="test"))
    assignment = Assignment(blueprint=blueprint_of(parse_config(fields, name="test")), entries=model.entries)
    if convert:
        assignment = convert_to_mxfp8(assignment)
    if not can_place(assignment, topology, engine("split")):
        return
    shards, placement = headers_of(model.entries), place(assignment, topology, engine("split"))
    whole, small = make_schedule(placement, shards), make_schedule(placement, shards, job_bytes=job_bytes)
    assert_scheduled_as_planned(placement, small)
    assert written(whole) == written(small)
    for rank in range(topology.world_size):
        mine = make_schedule(placement, shards, job_bytes=job_bytes, ranks=[rank])
        outputs = [output for job in small.jobs for output in job.outputs if output.rank == rank]
        assert [output for job in mine.jobs for output in job.outputs] == outputs


def written(schedule: Schedule) -> dict[tuple[int, str], Any]:
    found: dict[tuple[int, str], Any] = {}
    for job in schedule.jobs:
        for output in job.outputs:
            for tensor in output.tensors:
                assert (output.rank, tensor.name) not in found
                found[output.rank, tensor.name] = replace(tensor, begin=0)
    return found
