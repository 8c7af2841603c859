"""Laws of cuts, and conservation of bytes for every family and engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage import open_checkpoint
from tonnage.assignment import Assigned, Assignment, assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.cuts import Ranges, Uncuttable, cut_axis, deal_axis
from tonnage.engines import ENGINES
from tonnage.formats.quantized import exl3
from tonnage.placement import Placed, can_place, place
from tonnage.recipes.blueprint import draw_blueprint
from tonnage.recipes.loader import families, family_of, load_recipe
from tonnage.recipes.modules import Run, stored_tensors
from tonnage.topology import Topology

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DRAFTS = ("dflash", "eagle", "eagle3")
"""Recipes of draft heads, which are no models: tests/test_draft.py."""

runs = st.lists(
    st.builds(lambda units, step: Run(units * step, units), st.integers(1, 40), st.integers(1, 9)),
    min_size=1,
    max_size=3,
)
ranks = st.integers(1, 16)


def cuts_of(axis: list[Run], tp: int, **how: Any) -> list[Ranges]:
    found = [cut_axis(axis, tp, rank, **how) for rank in range(tp)]
    return [cut for cut in found if not isinstance(cut, Uncuttable)]


@given(axis=runs, tp=ranks, grain=st.integers(1, 8))
def test_uneven_cuts_partition_every_run_in_order_and_differ_by_one_grain(axis: list[Run], tp: int, grain: int) -> None:
    cuts = cuts_of(axis, tp, replicas=False, uneven=True, grain=grain)
    assert len(cuts) == tp
    offset = 0
    for number, run in enumerate(axis):
        ranges = [cut[number] for cut in cuts]
        step = run.size // run.units * grain
        assert ranges[0][0] == offset
        assert ranges[-1][1] == offset + run.size
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert all((begin - offset) % step == 0 or begin == offset + run.size for begin, _ in ranges)
        sizes = [-(-(end - begin) // step) for begin, end in ranges]
        assert max(sizes) - min(sizes) <= 1
        offset += run.size


@given(axis=runs, tp=ranks, grain=st.integers(1, 8), replicas=st.booleans())
def test_even_cuts_are_equal_and_hold_every_unit_equally_often(
    axis: list[Run], tp: int, grain: int, replicas: bool
) -> None:
    cuts = cuts_of(axis, tp, replicas=replicas, uneven=False, grain=grain)
    assert len(cuts) in (0, tp)
    if not cuts:
        return
    offset = 0
    for number, run in enumerate(axis):
        ranges = [cut[number] for cut in cuts]
        assert len({end - begin for begin, end in ranges}) == 1
        times = [sum(begin <= unit < end for begin, end in ranges) for unit in range(offset, offset + run.size)]
        assert len(set(times)) == 1
        assert replicas or times[0] == 1
        offset += run.size


@given(units=st.integers(1, 40), step=st.integers(1, 9), data=st.data())
def test_dealt_units_partition_the_axis(units: int, step: int, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, units), max_size=6)))
    counts = [end - begin for begin, end in pairwise([0, *edges, units])]
    ranges = [deal_axis((Run(units * step, units),), counts, rank)[0] for rank in range(len(counts))]
    assert [end - begin for begin, end in ranges] == [step * count for count in counts]
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(units * step))


# Conservation: what the ranks take together is the inventory and its replicas

ONE_PER_FAMILY = (
    "MiniMaxAI__MiniMax-M2.5",
    "MiniMaxAI__MiniMax-M3",
    "Qwen__Qwen2.5-7B-Instruct",
    "Qwen__Qwen3-0.6B",
    "Qwen__Qwen3-30B-A3B",
    "Qwen__Qwen3-30B-A3B-FP8",
    "Qwen__Qwen3-VL-2B-Instruct",
    "Qwen__Qwen3-VL-235B-A22B-Instruct",
    "Qwen__Qwen3.5-35B-A3B",
    "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "XiaomiMiMo__MiMo-7B-Base",
    "deepseek-ai__DeepSeek-V2-Lite",
    "deepseek-ai__DeepSeek-V3.2",
    "deepseek-ai__DeepSeek-V4-Flash",
    "google__gemma-4-26B-A4B",
    "mistralai__Mixtral-8x7B-v0.1",
    "moonshotai__Kimi-K2.5",
    "moonshotai__Kimi-K3",
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "openai__gpt-oss-20b",
    "zai-org__GLM-5",
    "CohereLabs__c4ai-command-r-plus",
    "LGAI-EXAONE__EXAONE-4.0-32B",
    "Qwen__Qwen1.5-MoE-A2.7B",
    "Qwen__Qwen2.5-VL-7B-Instruct",
    "allenai__Olmo-3.1-32B-Instruct",
    "bigcode__starcoder2-3b",
    "facebook__opt-125m",
    "google__gemma-4-12b-it",
    "google__gemma-4-E4B-it",
    "google__gemma-7b",
    "ibm-granite__granite-4.0-micro",
    "microsoft__Phi-3.5-MoE-instruct",
    "microsoft__phi-2",
    "mistralai__Mistral-Small-3.1-24B-Instruct-2503",
    "moonshotai__Kimi-VL-A3B-Instruct",
    "zai-org__GLM-4-9B-0414",
    "zai-org__GLM-4.5-Air",
)
_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1001,
}
INLINE: dict[str, dict[str, Any]] = {
    "phi3": {**_LLAMA_LIKE, "model_type": "phi3"},
    "granite": {**_LLAMA_LIKE, "model_type": "granite", "tie_word_embeddings": True},
    "granitemoe": {**_LLAMA_LIKE, "model_type": "granitemoe", "num_local_experts": 10},
    "gemma2": {**_LLAMA_LIKE, "model_type": "gemma2"},
    "llama in AWQ": {
        **_LLAMA_LIKE,
        "model_type": "llama",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    },
}
WIDE = {**_LLAMA_LIKE, "head_dim": 128, "intermediate_size": 1500, "attention_bias": True}
IN_EXL3: dict[str, dict[str, Any]] = {
    "llama in EXL3": {**WIDE, "model_type": "llama"},
    "mixtral in EXL3": {**WIDE, "model_type": "mixtral", "num_local_experts": 7},
}
TP_SIZES = (1, 2, 3, 4, 8)


def drawn(fields: dict[str, Any]) -> Assignment:
    config = parse_config(fields, name="test")
    return assign_blueprint(draw_blueprint(load_recipe(family_of(config.model_type)), config))


def mixed_exl3(plain: Assignment) -> Assignment:
    """Projections and the head in EXL3: two bits for the first three experts, four for all else."""
    entries = []
    for entry in plain.entries:
        rule = entry.module.rule
        if not (rule.convert or rule.is_routed or rule.role == "head"):
            entries.append(entry)
            continue
        parts = ((4, (0, 1, 2)), (8, (3, 4, 5, 6))) if rule.is_routed else ((8, ()),)
        for rate, members in parts:
            fmt = exl3(rate, codebook="mcg")
            stored = stored_tensors(entry.module, fmt, "BF16")
            entries.append(replace(entry, fmt=fmt, stored=stored, members=members, copies=len(members) or entry.copies))
    return replace(plain, entries=tuple(entries))


def assignments() -> dict[str, Assignment]:
    found = {name: open_checkpoint(CONFIGS / f"{name}.json").assignment for name in ONE_PER_FAMILY}
    found.update((name, drawn(fields)) for name, fields in INLINE.items())
    found.update((name, mixed_exl3(drawn(fields))) for name, fields in IN_EXL3.items())
    return found


ASSIGNMENTS = assignments()


def axis_of(placed: Placed) -> str:
    (axis,) = {share.axis for share in placed.shares if share.copies}
    return axis


def held_times(placed: Placed) -> int:
    """How often every element of the axis is held; the ranges must cover each equally often."""
    edges = sorted({edge for share in placed.shares for found in share.ranges for edge in found})
    ranges = [found for share in placed.shares if share.copies for found in share.ranges]
    times = {sum(low <= begin < high for low, high in ranges) for begin, end in pairwise(edges) if begin < end}
    assert len(times) == 1
    return times.pop()


def expected_bytes(entry: Assigned, placed: Placed) -> int:
    """Bytes all ranks take of one layer: the inventory as often as it is held."""
    holders = sum(share.copies > 0 for share in placed.shares)
    if placed.how == "absent":
        return 0
    if placed.how in ("replicated", "one rank"):
        return holders * entry.copies * entry.instance_bytes
    if placed.how == "whole experts":
        return entry.copies * entry.instance_bytes
    axis = axis_of(placed)
    times = held_times(placed)
    once = entry.fmt.pads_to > 1 and axis == "in"
    total = 0
    for tensor in entry.stored:
        cut = any(dim.axis == axis for dim in tensor.dims)
        total += tensor.nbytes * (times if cut else 1 if once and tensor.suffix == ".bias" else holders)
    return entry.copies * total


def shares_blocks(placed: Placed) -> bool:
    """Whether a cut falls inside a block whose scale both ranks then hold: even cuts of FP8 and of packed words."""
    axis = axis_of(placed)
    per = max((dim.per for tensor in placed.entry.stored for dim in tensor.dims if dim.axis == axis), default=1)
    return any(edge % per for share in placed.shares for found in share.ranges for edge in found)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("config", ASSIGNMENTS)
def test_ranks_take_the_inventory_and_its_replicas(config: str, name: str) -> None:
    engine, assignment = ENGINES[name], ASSIGNMENTS[config]
    for tp in TP_SIZES:
        for ep in {1, tp}:
            topology = Topology(tp=tp, ep=ep)
            if not can_place(assignment, topology, engine):
                assert tp > 1 or engine.check(assignment, topology)
                continue
            layers = 0
            for placed in place(assignment, topology, engine).placed:
                layers += len(placed.entry.first) or 1
                taken, expected = (
                    sum(share.slice_bytes for share in placed.shares),
                    expected_bytes(placed.entry, placed),
                )
                if placed.how == "split" and shares_blocks(placed):
                    assert not engine.uneven
                    assert taken >= expected
                else:
                    assert taken == expected
            assert layers == sum(len(entry.first) or 1 for entry in assignment.entries)


@pytest.mark.parametrize("config", ASSIGNMENTS)
def test_conversion_is_cut_without_loss(config: str) -> None:
    assignment = convert_to_mxfp8(ASSIGNMENTS[config])
    for tp in TP_SIZES:
        if can_place(assignment, Topology(tp=tp), ENGINES["split"]):
            for placed in place(assignment, Topology(tp=tp), ENGINES["split"]).placed:
                assert sum(share.slice_bytes for share in placed.shares) == expected_bytes(placed.entry, placed)


def test_every_recipe_is_among_them() -> None:
    drawn = {assignment.blueprint.recipe.family for assignment in ASSIGNMENTS.values()}
    recipes = {facts.get("recipe", name) for name, facts in families().items()}
    covered = {families()[family].get("recipe", family) for family in drawn}
    assert recipes - covered <= {"gemma3", "kimi_linear", "llama4", "qwen3_5", "qwen3_next", *DRAFTS}
