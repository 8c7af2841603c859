"""The slot container: sizes and partitions, against worked figures of Kimi-K3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import KIMI_K3, PAIRS, SMALL
from tonnage.errors import ConfigError, PlacementError
from tonnage.formats.exl3_v1 import (
    LayerTensor,
    SlotGeometry,
    aligned_row_bytes,
    layer_metadata,
    layer_tensors,
    rank_layer_bytes,
    uniform_row_bytes,
)
from tonnage.formats.exl3_v1_names import BTX
from tonnage.formats.exl3_v1_partition import fork_extents, partition_extents

HOSTILE = Path(__file__).parent / "hostile" / "manifests"


# Sizes


def payload_bytes(geometry: SlotGeometry, *, row_stride_bytes: int | None = None) -> int:
    """Return the payload of one layer file."""
    return sum(tensor.nbytes for tensor in layer_tensors(geometry, row_stride_bytes=row_stride_bytes))


def test_kimi_k3_layer() -> None:
    assert uniform_row_bytes(KIMI_K3) == 77_070_336 == 896 * 86_016 == 2**19 * 147
    tensors = {tensor.name: tensor for tensor in layer_tensors(KIMI_K3)}
    assert tensors["codes"] == LayerTensor(name="codes", dtype="U8", shape=(96, 77_070_336))
    assert tensors["codes"].nbytes == 7_398_752_256
    assert tensors["rotations"] == LayerTensor(name="rotations", dtype="F16", shape=(96, 896, 3, 32))
    assert tensors["rotations"].nbytes == 16_515_072
    vectors = [tensors[name] for name in ("gate_suh", "up_suh", "down_svh")]
    assert {(tensor.dtype, tensor.shape) for tensor in vectors} == {("F16", (3584,))}
    assert sum(tensor.nbytes for tensor in vectors) == 21_504
    assert tensors["sign_pattern"] == LayerTensor(name="sign_pattern", dtype="U8", shape=(896,))
    assert len(tensors) == 6
    assert payload_bytes(KIMI_K3) == 7_415_289_728
    assert payload_bytes(KIMI_K3) * 92 == 682_206_654_976


def test_kimi_k3_alignment_up_to_half_a_mebibyte_adds_nothing() -> None:
    assert payload_bytes(replace(KIMI_K3, row_alignment=524_288)) == 7_415_289_728
    assert aligned_row_bytes(replace(KIMI_K3, row_alignment=1 << 20), 77_070_336) == 77_594_624


def test_kimi_k3_vectors_per_expert_cost_a_known_sum() -> None:
    per_expert = replace(KIMI_K3, per_expert_input_rotations=True)
    assert payload_bytes(per_expert) - payload_bytes(KIMI_K3) == 19_246_080
    assert {tensor.name: tensor.shape for tensor in layer_tensors(per_expert)}["up_suh"] == (896, 3584)


def test_tensors_come_in_the_order_of_the_usual_writer() -> None:
    assert [tensor.name for tensor in layer_tensors(KIMI_K3)] == [
        "down_svh",
        "gate_suh",
        "rotations",
        "up_suh",
        "codes",
        "sign_pattern",
    ]
    names = [tensor.name for tensor in layer_tensors(KIMI_K3, dialect=BTX)]
    assert names[4:] == ["atoms", "rotation_draws"]


def test_metadata_repeats_the_manifest_as_texts() -> None:
    expected = {
        "schema": "exl3-v1",
        "codebook": "lut_e4m3",
        "layer": "7",
        "num_experts": "896",
        "hidden_size": "3584",
        "intermediate_size": "3072",
        "slot_channels": "32",
    }
    assert layer_metadata(KIMI_K3, 7) == expected
    del expected["slot_channels"]
    expected |= {"schema": "btx-atoms-v1", "codebook": "sqg_e4m3", "atom_channels": "32"}
    assert layer_metadata(KIMI_K3, 7, dialect=BTX) == expected


def test_rates_per_expert_and_pair_are_sized_from_their_tables() -> None:
    # H 256: 16 tiles; a section of P33 or P24 is 16 * 32 * 6 = 3072 bytes, of P43 3584.
    used = 2 * (3072 + 3072 + 3584) + 3584 + 3072 + 3072
    assert aligned_row_bytes(PAIRS, used) == 32_768
    tensors = {tensor.name: tensor.shape for tensor in layer_tensors(PAIRS, row_stride_bytes=32_768)}
    assert tensors["codes"] == (16, 32_768)
    assert tensors["rates_fc1"] == tensors["rates_fc2"] == (2, 3)
    payload = 16 * 32_768 + 192 * 16 * 3 + 6 * 256 + 2 * 2 * 3
    assert payload_bytes(PAIRS, row_stride_bytes=32_768) == payload == 535_052
    assert rank_layer_bytes(PAIRS, 8, row_stride_bytes=32_768) == 8 * (32_768 + 576) + 6 + 1536
    assert rank_layer_bytes(PAIRS, 16, row_stride_bytes=32_768) == payload


def test_row_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="row size of rates per expert and pair is not in the manifest"):
        payload_bytes(PAIRS)
    for stride in (32_767, 24_576):  # not aligned; below the least the declared kinds need, 27,648
        with pytest.raises(ConfigError, match="impossible row stride; expected a multiple of 4096, at least 27648"):
            payload_bytes(PAIRS, row_stride_bytes=stride)
    with pytest.raises(ConfigError, match="at least 77070336"):
        payload_bytes(KIMI_K3, row_stride_bytes=4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair_kinds": ("P33",)}, "needs either bits or pair kinds"),
        ({"bits": None}, "needs either bits or pair kinds"),
        ({"pre_block": 128}, "needs both blocks or neither"),
        ({"bits": None, "pair_kinds": ("P33", "P33")}, "rates.pair_kinds: not a set of kinds"),
        ({"bits": None, "pair_kinds": ("P24",), "codebook": "lut_fp16"}, "not a rate of codebook lut_fp16; found P24"),
        (
            {"bits": None, "pair_kinds": ("P24",), "intermediate_size": 32 * 12},
            "geometry.num_slots: not a whole number of blocks; expected a multiple of 8; found 12",
        ),
        ({"intermediate_size": 1000, "extent_alignment_slots": 1}, "expected a multiple of 32; found 1000"),
        ({"moe_layer_indices": ()}, "distinct layer numbers, at least one; found []"),
        ({"intermediate_size": 2880}, "layout.extent_alignment_slots: impossible; expected a divisor of 90 slots"),
    ],
)
def test_geometry_the_format_does_not_have_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **change)
    assert message in str(caught.value)


# Partitions

FORK_TABLE = {  # TP: slots per layer, slots of all layers, bytes of all layers; smallest and largest
    2: ((48, 48), (4416, 4416), (341_104_357_888, 341_104_357_888)),
    4: ((24, 24), (2208, 2208), (170_553_209_344, 170_553_209_344)),
    6: ((16, 16), (1472, 1472), (113_702_826_496, 113_702_826_496)),
    8: ((12, 12), (1104, 1104), (85_277_635_072, 85_277_635_072)),
    9: ((8, 12), (976, 984), (75_390_611_968, 76_008_550_912)),
    10: ((8, 12), (880, 884), (67_975_344_640, 68_284_314_112)),
    12: ((8, 8), (736, 736), (56_852_443_648, 56_852_443_648)),
    16: ((4, 8), (544, 560), (42_021_908_992, 43_257_786_880)),
    24: ((4, 4), (368, 368), (28_427_252_224, 28_427_252_224)),
}


@pytest.mark.parametrize("tp_size", FORK_TABLE)
def test_kimi_k3_under_the_fork(tp_size: int) -> None:
    per_layer, in_all, nbytes = FORK_TABLE[tp_size]
    partition = [fork_extents(KIMI_K3, tp_size, position) for position in range(len(KIMI_K3.moe_layer_indices))]
    counts = [[len(extent) for extent in extents] for extents in partition]
    assert (min(map(min, counts)), max(map(max, counts))) == per_layer
    totals = [sum(layer) for layer in zip(*counts, strict=True)]
    assert (min(totals), max(totals)) == in_all
    found = [sum(rank_layer_bytes(KIMI_K3, len(held)) for held in rank) for rank in zip(*partition, strict=True)]
    assert (min(found), max(found)) == nbytes
    assert sum(found) == 682_206_654_976 + 92 * (tp_size - 1) * 22_400


def test_the_fork_rotates_owners_from_layer_to_layer() -> None:
    geometry = replace(SMALL, extent_barriers=(16,))  # 32 slots, blocks of 4
    assert fork_extents(geometry, 3, 0) == (range(8), range(8, 16), range(16, 32))
    assert fork_extents(geometry, 3, 1) == (range(16, 32), range(8), range(8, 16))
    ten = replace(KIMI_K3, moe_layer_indices=(5, 9))
    assert fork_extents(ten, 10, 1)[2] == fork_extents(ten, 10, 0)[0] == range(12)


@pytest.mark.parametrize(
    ("geometry", "tp_size", "message"),
    [
        (KIMI_K3, 1, "unusable TP size for the vLLM fork; expected 2 to 24; found 1"),
        (KIMI_K3, 25, "expected 2 to 24; found 25"),
        (replace(KIMI_K3, extent_barriers=()), 8, "one barrier at half of 96 slots"),
        (replace(KIMI_K3, extent_barriers=(24,)), 8, "found [24]"),
        (replace(KIMI_K3, extent_barriers=(24, 48)), 8, "found [24, 48]"),
        (replace(KIMI_K3, extent_alignment_slots=32), 2, "a multiple of 32"),
        (replace(SMALL, extent_barriers=(16,)), 9, "expected at most 8, a block of 4 slots each; found 9"),
    ],
)
def test_what_the_fork_cannot_cut_is_refused(geometry: SlotGeometry, tp_size: int, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        fork_extents(geometry, tp_size, 0)
    assert message in str(caught.value)


def test_container_rule_gives_the_first_ranks_the_larger_runs() -> None:
    geometry = replace(SMALL, intermediate_size=2304, extent_alignment_slots=8)
    assert partition_extents(geometry, 2) == (range(40), range(40, 72))
    assert partition_extents(geometry, 1) == (range(72),)


def test_container_rule_gives_further_ranks_to_the_neediest_segment() -> None:
    geometry = replace(SMALL, intermediate_size=32 * 24, extent_alignment_slots=4, extent_barriers=(16,))
    assert partition_extents(geometry, 2) == (range(16), range(16, 24))
    assert partition_extents(geometry, 3) == (range(8), range(8, 16), range(16, 24))
    # both segments at two blocks a rank: the one with more blocks is served first
    assert partition_extents(geometry, 4) == (range(8), range(8, 12), range(12, 16), range(16, 24))
    assert [len(extent) for extent in partition_extents(geometry, 6)] == [4] * 6


@pytest.mark.parametrize(
    ("geometry", "world_size", "message"),
    [
        (KIMI_K3, 1, "expected 2 to 24 ranks; found 1"),
        (KIMI_K3, 25, "expected 2 to 24 ranks; found 25"),
        (replace(KIMI_K3, extent_barriers=(6,)), 2, "expected multiples of 4 slots; found [6]"),
    ],
)
def test_what_the_container_rule_cannot_cut_is_refused(geometry: SlotGeometry, world_size: int, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        partition_extents(geometry, world_size)
    assert message in str(caught.value)


@given(blocks=st.integers(1, 40), alignment=st.integers(1, 8), data=st.data())
def test_container_rule_covers_every_slot_once(blocks: int, alignment: int, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, blocks - 1), max_size=3)) if blocks > 1 else set()
    geometry = replace(
        SMALL,
        intermediate_size=32 * blocks * alignment,
        extent_alignment_slots=alignment,
        extent_barriers=tuple(sorted(cut * alignment for cut in cuts)),
    )
    world_size = data.draw(st.integers(len(cuts) + 1, blocks))
    extents = partition_extents(geometry, world_size)
    assert len(extents) == world_size
    assert [slot for extent in extents for slot in extent] == list(range(geometry.num_slots))
    assert all(extent and not extent.start % alignment and not extent.stop % alignment for extent in extents)
    assert not any(extent.start < barrier < extent.stop for extent in extents for barrier in geometry.extent_barriers)


@given(tp_size=st.integers(2, 24), position=st.integers(0, 200))
def test_the_fork_covers_every_slot_once(tp_size: int, position: int) -> None:
    extents = fork_extents(KIMI_K3, tp_size, position)
    assert sorted(slot for extent in extents for slot in extent) == list(range(96))
    assert all(extent and not extent.start % 4 and not extent.stop % 4 for extent in extents)
    assert not any(extent.start < 48 < extent.stop for extent in extents)
