"""Parts of tensors on the ranks of a stage: what makes a whole and what does not, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.export.manifest import Manifest, PackagedFile, Parallel
from tonnage.export.rank_checks import header_problems, stage_problems
from tonnage.topology import Topology

Part = tuple[int, Any] | None
"""Rows on a rank and the ranges they are of, or 0 for a whole tensor; ``None`` if the rank holds none."""


def shard(
    tensors: dict[str, Part], *, whole: int, dtype: str = "U8", reader: HeaderReader | None = None
) -> ShardHeader:
    """A file of tensors of two columns, cut along their rows."""
    header: dict[str, Any] = {}
    slices, begin = [], 0
    for name, part in tensors.items():
        if part is not None:
            rows, ranges = part
            header[name] = {"dtype": dtype, "shape": [rows, 2], "data_offsets": [begin, begin + 2 * rows]}
            slices.append([0, ranges, [whole, 2]] if ranges != 0 else 0)
            begin += 2 * rows
    raw = json.dumps({"__metadata__": {"slices": json.dumps(slices)}, **header}).encode()
    prefix = len(raw).to_bytes(8, "little") + raw
    return (reader or HeaderReader()).read(prefix, shard_file="a", file_bytes=len(prefix) + begin)


def faults(parts: list[Part], *, whole: int = 8, engine: str = "vllm", ep: int = 1) -> list[str]:
    stage = {rank: {"a": shard({"t": part}, whole=whole)} if part else {} for rank, part in enumerate(parts)}
    return [problem.what for problem in stage_problems(stage, Topology(tp=len(parts), ep=ep), engine=engine)]


WHOLE: dict[str, tuple[list[Part], int]] = {
    "halves": ([(4, [[0, 4]]), (4, [[4, 8]])], 8),
    "halves of fused parts": ([(4, [[0, 2], [4, 6]]), (4, [[2, 4], [6, 8]])], 8),
    "unequal parts": ([(5, [[0, 5]]), (3, [[5, 8]])], 8),
    "replicated": ([(8, 0), (8, 0)], 8),
    "padded rows": ([(4, [[0, 4]]), (4, [[4, 7]])], 7),
    "nothing but padding": ([(4, [[0, 4]]), (4, [[4, 5]]), (4, [])], 5),
    "copies by pairs": ([(4, [[0, 4]]), (4, [[0, 4]]), (4, [[4, 8]]), (4, [[4, 8]])], 8),
    "heads cut, the part behind on all ranks, joined where they meet": ([(5, [[0, 3], [6, 8]]), (5, [[3, 8]])], 8),
}
BROKEN: dict[str, tuple[list[Part], str]] = {
    "a hole": ([(3, [[0, 3]]), (4, [[4, 8]])], "no rank holds index 3 of 8"),
    "a hole in front": ([(3, [[1, 4]]), (4, [[4, 8]])], "no rank holds index 0 of 8"),
    "a hole behind": ([(4, [[0, 4]]), (3, [[4, 7]])], "no rank holds index 7 of 8"),
    "one half twice": ([(4, [[0, 4]]), (4, [[0, 4]])], "no rank holds index 4 of 8"),
    "no row twice on a rank": ([(6, [[0, 4], [3, 5]]), (3, [[5, 8]])], "rank 0 holds index 3 twice"),
    "overlap across pairs": (
        [(2, [[0, 2]]), (3, [[2, 5]]), (2, [[4, 6]]), (2, [[6, 8]])],
        "index 4 is held by ranks [1, 2], no group that holds copies",
    ),
    "whole here, cut there": ([(4, 0), (4, [[4, 8]])], "whole on one rank, and not of the shape it is cut from on another"),
    "two shapes": ([(8, 0), (7, 0)], "whole, and not of one shape on all ranks"),
    "a rank without": ([(8, 0), None], "held by 1 of 2 ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "whole"), WHOLE.values(), ids=WHOLE)
def test_parts_that_make_a_whole(parts: list[Part], whole: int) -> None:
    assert faults(parts, whole=whole) == []


@pytest.mark.parametrize(("parts", "fault"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not(parts: list[Part], fault: str) -> None:
    assert faults(parts) == [fault]


def test_a_rank_may_hold_nothing_of_whole_experts_and_of_what_is_shared_out_unequally() -> None:
    assert faults([(8, 0), None], engine="split") == faults([(8, 0), None], engine="vllm", ep=2) == []
    assert faults([(4, [[0, 4]]), (4, [[4, 8]]), None], engine="split") == []
    assert faults([(4, [[0, 4]]), None], engine="split") == ["no rank holds index 4 of 8"]


def test_a_fault_names_the_tensor_and_what_every_rank_holds() -> None:
    stage = {rank: {"a": shard({"t": (4, [[0, 4]])}, whole=8)} for rank in (2, 3)}
    (problem,) = stage_problems(stage, Topology(tp=2, pp=2), engine="split")
    assert str(problem) == (
        "a: t: no rank holds index 4 of 8; found rank 2 U8 [4, 2] of 0: ((0, 4),); rank 3 U8 [4, 2] of 0: ((0, 4),)"
    )


def test_dtypes_and_whole_shapes_are_the_same_on_all_ranks() -> None:
    halves = [{"t": (4, [[0, 4]])}, {"t": (4, [[4, 8]])}]
    for other, what in (
        (shard(halves[1], whole=8, dtype="I8"), "not of one dtype on all ranks"),
        (shard(halves[1], whole=9), "not cut along one axis of one shape on all ranks"),
    ):
        stage = {0: {"a": shard(halves[0], whole=8)}, 1: {"a": other}}
        assert [problem.what for problem in stage_problems(stage, Topology(tp=2), engine="split")] == [what]


def test_a_file_of_another_layer_on_another_rank_is_found_though_layers_are_alike() -> None:
    """Files of the same skeletons are compared once, but only if they are of one layer."""
    readers = HeaderReader(), HeaderReader()
    halves = (4, [[0, 4]]), (4, [[4, 8]])

    def file(rank: int, layer: int) -> ShardHeader:
        return shard({f"model.layers.{layer}.t": halves[rank]}, whole=8, reader=readers[rank])

    def stage(*layers: int) -> dict[int, dict[str, ShardHeader]]:
        first = {name: file(0, layer) for layer, name in enumerate("abc")}
        return {0: first, 1: {name: file(1, layer) for layer, name in zip(layers, "abc", strict=True)}}

    assert list(stage_problems(stage(0, 1, 2), Topology(tp=2), engine="split")) == []
    found = list(stage_problems(stage(0, 2, 1), Topology(tp=2), engine="split"))
    assert {(problem.where, problem.tensor) for problem in found} == {
        (name, f"model.layers.{layer}.t") for name in "bc" for layer in (1, 2)
    }


def test_scales_of_mxfp8_that_engines_read_by_value_are_named() -> None:
    found = shard({"q.weight_scale": (4, 0), "q.scale": (4, 0)}, whole=4, dtype="F8_E8M0")
    file = PackagedFile(path="a", nbytes=1000, digest="0" * 64)
    manifest = Manifest(
        name="a", tonnage_version="1", hash="sha256", layout="hf", topology=Parallel(tp=1), ranks=(0,), files=(file,)
    )
    (problem,) = header_problems(file, found, manifest, Topology())
    assert (problem.tensor, problem.expected, problem.found) == ("q.weight_scale", "U8, of the same bytes", "F8_E8M0")
