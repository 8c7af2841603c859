"""What fits: a context or a concurrency one larger than the answer does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samples import opened
from tonnage import PlanRequest
from tonnage.api import plan_checkpoint
from tonnage.errors import PlacementError, UnitError
from tonnage.fit import Fit, fit_checkpoint, ways
from tonnage.memory.supply import find_gpu, parse_supply, supply_bytes
from tonnage.profile import Profile

DENSE, ROUTED, HYBRID, WINDOWS = (
    "Qwen__Qwen3-8B", "Qwen__Qwen3-30B-A3B", "Qwen__Qwen3.5-27B", "google__gemma-4-26B-A4B",
)  # fmt: skip


def request(supply: str, *, c: int = 4, context: int | None = 8192, **asked: Any) -> PlanRequest:
    profile = Profile(concurrency=c, prefill_chunk_tokens=4096, context_tokens=context)
    return PlanRequest(**{"engine": "vllm", "supply": parse_supply(supply), "profile": profile} | asked)


def fits(name: str, asked: PlanRequest, **changes: int) -> bool | None:
    return plan_checkpoint(opened(name), replace(asked, profile=replace(asked.profile, **changes))).fits


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (DENSE, request("21GiB")),
        (DENSE, request("40GiB", c=900)),
        (ROUTED, request("66GiB", engine="sglang")),
        (ROUTED, request("63GiB", engine="exllamav3")),
        (HYBRID, request("60GiB")),
        (HYBRID, request("33GiB", tp=2, pp=2)),
        (HYBRID, request("80GiB", engine="sglang")),
        (WINDOWS, request("58GiB")),
        (HYBRID, request("60GiB", draft_method="mtp", draft_tokens=3)),
        (DENSE, request("14GiB", tp=4, kv_bytes=3 << 30)),
        (DENSE, request("22GiB", kv_bytes=3 << 30)),
    ],
)
def test_answers_fit_and_one_more_does_not(name: str, asked: PlanRequest) -> None:
    found = fit_checkpoint(opened(name), asked)
    longest, most = found.longest_context, found.most_concurrency
    assert longest > 0
    assert most > 0
    assert fits(name, asked, context_tokens=longest)
    assert fits(name, asked, concurrency=most)
    assert not fits(name, asked, concurrency=most + 1)
    own = opened(name).config.fields
    own = own.get("text_config", own)["max_position_embeddings"]
    assert longest <= own
    assert longest == own or not fits(name, asked, context_tokens=longest + 1)


def test_nothing_fits_where_weights_do_not() -> None:
    found = fit_checkpoint(opened(DENSE), request("12GiB"))
    assert (found.plan.fits, found.longest_context, found.most_concurrency) == (False, 0, 0)


def test_context_is_never_longer_than_the_models_own() -> None:
    assert fit_checkpoint(opened(DENSE), request("900GiB", c=1)).longest_context == 40960


def test_cache_of_an_asked_size_is_the_limit_though_there_is_more_memory() -> None:
    small, large = (
        fit_checkpoint(opened(DENSE), request("80GiB", c=1, kv_bytes=n << 30)).longest_context for n in (1, 2)
    )
    assert small == (1024**3 // (36 * 2 * 8 * 128 * 2 * 16) - 1) * 16
    assert 2 * small <= large <= 2 * small + 16


def sizes(found: list[Fit]) -> list[tuple[int, int]]:
    return [(one.request.tp, one.request.ep) for one in found]


def test_every_way_that_divides_heads_and_experts_is_tried() -> None:
    asked = request("80GiB")
    assert sizes(list(ways(opened(DENSE), asked, gpus=8))) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert sizes(list(ways(opened(ROUTED), asked, gpus=4))) == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]
    assert sizes(list(ways(opened(DENSE), replace(asked, pp=2), gpus=4))) == [(1, 1), (2, 1)]


def test_more_ranks_leave_room_for_longer_contexts() -> None:
    found = list(ways(opened(DENSE), request("14GiB", c=16), gpus=8))
    longest = [one.longest_context for one in found]
    assert longest == sorted(longest)
    assert longest[0] == 0 < longest[-1]


def test_one_way_is_the_same_alone_and_among_all() -> None:
    asked = request("24GiB", tp=2)
    among = next(one for one in ways(opened(DENSE), asked, gpus=2) if one.request.tp == 2)
    assert among == fit_checkpoint(opened(DENSE), asked)


def test_dcp_is_kept_where_it_divides_the_ranks() -> None:
    found = list(ways(opened("deepseek-ai__DeepSeek-V3"), request("200GiB", dcp=4), gpus=8))
    assert {one.request.tp: one.request.dcp for one in found}[8] == 4
    assert {one.request.tp: one.request.dcp for one in found}[2] == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (PlanRequest(engine="vllm", profile=Profile(concurrency=1)), "--gpu, --supply"),
        (PlanRequest(engine="vllm", supply=parse_supply("9GiB")), "--profile"),
        (PlanRequest(supply=parse_supply("9GiB"), profile=Profile(concurrency=1)), "--profile and --context"),
    ],
)
def test_question_without_supply_or_profile_is_refused(asked: PlanRequest, says: str) -> None:
    for ask in (lambda: fit_checkpoint(opened(DENSE), asked), lambda: list(ways(opened(DENSE), asked, gpus=2))):
        with pytest.raises(UnitError, match=says):
            ask()


def test_one_way_that_cannot_be_shared_is_an_error_with_the_sizes_that_can() -> None:
    with pytest.raises(PlacementError, match="tensor-parallel sizes that work: 1, 2, 4, 8"):
        fit_checkpoint(opened(DENSE), request("80GiB", tp=3))


def test_gpu_of_the_table_is_a_supply() -> None:
    gpu = find_gpu("h100")
    asked = replace(request("1GiB"), supply=supply_bytes(gpu), gpu=gpu)
    assert fit_checkpoint(opened(DENSE), asked).plan.fits is True
