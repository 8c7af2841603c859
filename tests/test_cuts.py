"""Cutting one axis, against cuts worked out by hand."""

from __future__ import annotations

import pytest

from tonnage.cuts import Uncuttable, cut_axis, deal_axis, share_out, unit_grain
from tonnage.recipes.modules import Run

HEADS = (Run(512, 8),)
QKV = (Run(512, 8), Run(128, 2), Run(128, 2))
CHANNELS = (Run(96, 96),)

EVEN = {
    "heads over two ranks": (HEADS, 2, [((0, 256),), ((256, 512),)]),
    "one rank holds every run": (QKV, 1, [((0, 512), (512, 640), (640, 768))]),
    "fused parts are cut one by one": (
        QKV,
        2,
        [((0, 256), (512, 576), (640, 704)), ((256, 512), (576, 640), (704, 768))],
    ),
    "an empty part has no range": ((Run(4, 4), Run(0, 0)), 2, [((0, 2),), ((2, 4),)]),
}
UNEVEN = {
    "vision heads": ((Run(1536, 12),), 8, 1, [256, 256, 256, 256, 128, 128, 128, 128]),
    "channels in whole blocks of 32": (CHANNELS, 2, 32, [64, 32]),
    "more ranks than blocks": (CHANNELS, 4, 32, [32, 32, 32, 0]),
    "the last block may be short": ((Run(300, 300),), 3, 128, [128, 128, 44]),
    "no grain": (CHANNELS, 5, 1, [20, 19, 19, 19, 19]),
}
REFUSED = {
    "28 heads over 8 ranks": ((Run(3584, 28),), 8, False, 1, Uncuttable(3584, 28)),
    "9 heads of 64 in blocks of 128": ((Run(576, 9),), 3, False, 2, Uncuttable(576, 9, 2)),
    "4 KV heads over 6 ranks": ((Run(512, 4),), 6, True, 1, Uncuttable(512, 4)),
    "half a block cannot be held twice": ((Run(128, 2),), 4, True, 2, Uncuttable(128, 2, 2)),
    "the second part refuses": (QKV, 4, False, 1, Uncuttable(128, 2)),
}


@pytest.mark.parametrize(("runs", "ranks", "expected"), EVEN.values(), ids=EVEN)
def test_even_cut(runs: tuple[Run, ...], ranks: int, expected: list[object]) -> None:
    assert [cut_axis(runs, ranks, rank, replicas=False, uneven=False) for rank in range(ranks)] == expected


@pytest.mark.parametrize(("runs", "ranks", "grain", "expected"), UNEVEN.values(), ids=UNEVEN)
def test_uneven_cut(runs: tuple[Run, ...], ranks: int, grain: int, expected: list[int]) -> None:
    cuts = [cut_axis(runs, ranks, rank, replicas=False, uneven=True, grain=grain) for rank in range(ranks)]
    assert not any(isinstance(cut, Uncuttable) for cut in cuts)
    assert [end - begin for ((begin, end),) in cuts] == expected  # type: ignore[misc]


@pytest.mark.parametrize(("runs", "ranks", "replicas", "grain", "expected"), REFUSED.values(), ids=REFUSED)
def test_refused_cut(runs: tuple[Run, ...], ranks: int, replicas: bool, grain: int, expected: Uncuttable) -> None:
    assert cut_axis(runs, ranks, 0, replicas=replicas, uneven=False, grain=grain) == expected


def test_two_kv_heads_over_four_ranks_are_each_held_twice() -> None:
    cuts = [cut_axis((Run(128, 2),), 4, rank, replicas=True, uneven=False) for rank in range(4)]
    assert cuts == [((0, 64),), ((0, 64),), ((64, 128),), ((64, 128),)]


def test_dealt_units_of_every_part_and_of_128_channels() -> None:
    assert [deal_axis((Run(1024, 8), Run(512, 4)), (2, 1, 1), rank) for rank in range(3)] == [
        ((0, 512), (1024, 1280)),
        ((512, 768), (1280, 1408)),
        ((768, 1024), (1408, 1536)),
    ]
    assert [deal_axis((Run(300, 300),), (1, 0, 2), rank, step=128) for rank in range(3)] == [
        ((0, 128),),
        ((128, 128),),
        ((128, 300),),
    ]


def test_a_part_without_whole_blocks_per_unit_is_held_whole() -> None:
    runs = (Run(1024, 8), Run(128, 128))
    assert [deal_axis(runs, (1, 1), rank, grain=128) for rank in range(2)] == [
        ((0, 512), (1024, 1152)),
        ((512, 1024), (1024, 1152)),
    ]


def test_shares_and_grains() -> None:
    assert share_out(12, 8) == (2, 2, 2, 2, 1, 1, 1, 1)
    assert share_out(2, 3) == (1, 1, 0)
    assert unit_grain(Run(576, 9), 128) == 2
    assert unit_grain(Run(5760, 2880), 32) == 16
    assert unit_grain(Run(1024, 8), 128) == 1
