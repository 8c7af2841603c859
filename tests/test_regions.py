"""The grid of what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samples import opened
from tonnage.api import PlanRequest, place_checkpoint, plan_checkpoint
from tonnage.fit import Planner
from tonnage.memory.supply import find_gpu, supply_bytes
from tonnage.profile import Profile
from tonnage.regions import doublings, find_regions

GRIDS = {
    "doublings": ((1024, 8192, 1), [1024, 2048, 4096, 8192]),
    "an end between": ((1024, 5000, 1), [1024, 2048, 4096, 5000]),
    "steps": ((8, 32, 4), [8, 10, 12, 14, 16, 20, 24, 28, 32]),
    "fewer numbers than steps": ((1, 4, 4), [1, 2, 3, 4]),
    "one": ((1, 1, 1), [1]),
    "less than the first": ((7, 7, 4), [7]),
}


@pytest.mark.parametrize(("asked", "expected"), GRIDS.values(), ids=GRIDS)
def test_doublings(asked, expected):
    assert list(doublings(*asked)) == expected


@pytest.mark.parametrize("name", ["Qwen__Qwen3-8B", "ibm-granite__granite-4.0-h-small", "openai__gpt-oss-20b"])
def test_every_cell_is_the_plan_of_its_point_and_more_never_fits_better(name):
    checkpoint, gpu = opened(name), find_gpu("l40s")
    profile = Profile(name="c3-p2048", concurrency=3, prefill_chunk_tokens=2048, context_tokens=5000)
    request = PlanRequest(tp=2, engine="vllm", gpu=gpu, supply=supply_bytes(gpu), profile=profile)
    planner = Planner(checkpoint=checkpoint, placement=place_checkpoint(checkpoint, request), request=request)
    found = find_regions(planner, request, most_context=40_000, most_concurrency=8)
    assert found.contexts == (1024, 2048, 4096, 5000, 8192, 16384, 32768, 40000)
    assert found.concurrencies == (1, 2, 3, 4, 8)
    for row, requests in zip(found.cells, found.concurrencies, strict=True):
        for cell, tokens in zip(row, found.contexts, strict=True):
            served = replace(profile, concurrency=requests, context_tokens=tokens)
            plan = plan_checkpoint(checkpoint, replace(request, profile=served))
            assert (cell.fits, cell.spare_bytes) == (plan.fits, plan.spare_bytes(plan.binding_rank))
            assert cell.cache_bytes == plan.ranks[plan.binding_rank].cache_bytes
    spare = [[cell.spare_bytes for cell in row] for row in found.cells]
    assert all(row == sorted(row, reverse=True) for row in spare)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*spare, strict=True))
    assert any(cell.fits for row in found.cells for cell in row)
