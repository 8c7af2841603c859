"""Parallel sizes, pipeline stages as vLLM cuts them, and experts per rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import PlacementError
from tonnage.topology import Topology, expert_counts, stage_layers

# Worked by hand from vLLM 0.32.0 distributed/utils.py get_pp_indices: layers // stages each; spare layers go one each to
# the stages before the last, counted backwards from the last but one (the last stage also holds norm and head).
STAGES = {
    "one stage": (61, 1, [61]),
    "even": (80, 4, [20, 20, 20, 20]),
    "61 over 2: the one spare goes to stage 0": (61, 2, [31, 30]),
    "61 over 4: base 15, one spare to stage 2": (61, 4, [15, 15, 16, 15]),
    "62 over 4: base 15, two spare to stages 1 and 2": (62, 4, [15, 16, 16, 15]),
    "63 over 4: base 15, three spare to stages 0, 1, 2": (63, 4, [16, 16, 16, 15]),
    "93 over 8: base 11, five spare to stages 2 to 6": (93, 8, [11, 11, 12, 12, 12, 12, 12, 11]),
    "7 over 8: seven spare to stages 0 to 6": (7, 8, [1, 1, 1, 1, 1, 1, 1, 0]),
    "no layers": (0, 2, [0, 0]),
}


@pytest.mark.parametrize(("layers", "pp", "counts"), STAGES.values(), ids=STAGES)
def test_stages_hold_the_layers_vllm_gives_them(layers: int, pp: int, counts: list[int]) -> None:
    stages = stage_layers(layers, pp)
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))


@given(st.integers(0, 500), st.integers(1, 64))
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    stages = stage_layers(layers, pp)
    assert len(stages) == pp
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert len(stages[-1]) == min(map(len, stages))


EXPERTS = {
    "896 over 16": (896, 16, [56] * 16),
    "128 over 1": (128, 1, [128]),
    "10 over 4: the first two hold one more": (10, 4, [3, 3, 2, 2]),
    "fewer experts than ranks": (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize(("experts", "ep", "counts"), EXPERTS.values(), ids=EXPERTS)
def test_first_ranks_hold_the_experts_left_over(experts: int, ep: int, counts: list[int]) -> None:
    assert list(expert_counts(experts, ep)) == counts


def test_world_is_tensor_ranks_times_stages() -> None:
    assert Topology(tp=8, pp=2, dcp=4).world_size == 16
    assert Topology().world_size == 1


def test_an_expert_is_cut_over_all_ranks_or_over_none() -> None:
    assert Topology(tp=16).expert_tp == 16
    assert Topology(tp=16, ep=16).expert_tp == 1
    assert Topology(tp=1, ep=1).expert_tp == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"tp": 0}, "--tp: out of range; expected 1..1024; found 0"),
    "negative": ({"pp": -1}, "--pp: out of range; expected 1..1024; found -1"),
    "too many": ({"tp": 1025}, "--tp: out of range; expected 1..1024; found 1025"),
    "ep between": (
        {"tp": 8, "ep": 4},
        "--ep: experts spread over all tensor-parallel ranks or none; expected 1 or 8; found 4",
    ),
    "dcp that does not divide": ({"tp": 8, "dcp": 3}, "--dcp: does not divide tp; expected a divisor of 8; found 3"),
}


@pytest.mark.parametrize(("sizes", "line"), REFUSED.values(), ids=REFUSED)
def test_impossible_topology_is_refused(sizes: dict[str, int], line: str) -> None:
    with pytest.raises(PlacementError) as caught:
        Topology(**sizes)
    assert str(caught.value) == line
