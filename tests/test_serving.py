"""What a plan of a profile says: which rules apply, ranks and stages, and laws over all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samples import LLAMA, opened
from tonnage import Plan, PlanRequest, plan_checkpoint
from tonnage.api import checkpoint_from_config
from tonnage.errors import PlacementError, UnitError
from tonnage.flags.from_plan import serve_plan
from tonnage.memory.supply import Supply, find_gpu, parse_supply, supply_bytes
from tonnage.profile import Profile
from tonnage.units import GIB, MIB

DENSE, ROUTED, HYBRID, LATENT = "Qwen__Qwen3-8B", "Qwen__Qwen3-30B-A3B", "Qwen__Qwen3.5-27B", "deepseek-ai__DeepSeek-V3"
ENGINES = ("vllm", "sglang", "exllamav3", "split")


def planned(
    name: str = DENSE, *, profile: tuple[int | None, int | None, int | None] = (4, 4096, 8192), **asked: Any
) -> Plan:
    """Plan a config for a profile: concurrency, prefill chunk, context."""
    c, p, context = profile
    kv_dtype = asked.pop("kv_dtype", None)
    served = Profile(concurrency=c, prefill_chunk_tokens=p, context_tokens=context, kv_dtype=kv_dtype)
    return plan_checkpoint(opened(name), PlanRequest(**{"engine": "vllm", "profile": served} | asked))


def bound(plan: Plan, component: str, rank: int = 0) -> int:
    return sum(line.bound_nbytes for line in plan.ranks[rank].lines if line.component == component)


def components(plan: Plan, rank: int = 0) -> set[str]:
    return {line.component for line in plan.ranks[rank].lines}


# --- which rules -----------------------------------------------------------------------------------------------------


def test_graphs_are_outside_the_share_in_releases_that_do_not_count_them() -> None:
    whole = 80 * GIB
    share = Supply(nbytes=whole * 9 // 10, basis="exact", source="share", whole_bytes=whole)
    old, new = (
        planned(supply=share, context_held=False, gpu=find_gpu("h100"), version=version) for version in ("0.20", "0.21")
    )
    assert components(new) - components(old) == {"runtime.graphs"}
    assert (old.capacity_tokens() or 0) > (new.capacity_tokens() or 0)
    assert old.ranks[0].service is not None
    assert new.ranks[0].service is not None
    assert old.ranks[0].service.outside_bytes > new.ranks[0].service.outside_bytes > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_holds_context_activations_and_a_cache(engine: str) -> None:
    plan = planned(engine=engine)
    assert {"runtime.context", "workspace.activation"} <= components(plan)
    assert plan.ranks[0].cache_bytes >= 4 * 8192 * 36 * 2 * 8 * 128 * 2


def test_supply_measured_in_a_process_is_without_its_context() -> None:
    inside = planned(supply=parse_supply("80GiB"), context_held=False)
    bare = planned(supply=parse_supply("80GiB"))
    assert components(bare) - components(inside) == {"runtime.context"}
    assert bare.ranks[0].fixed_bytes - inside.ranks[0].fixed_bytes == bound(bare, "runtime.context") > 0


def test_share_of_a_gpu_takes_the_engines_estimate_of_its_graphs_and_its_defaults_are_those_of_the_whole() -> None:
    whole = supply_bytes(find_gpu("h100"))
    shared = Supply(nbytes=whole.nbytes * 4 // 5, basis="exact", source="--gpu x 0.8", whole_bytes=whole.nbytes)
    asked = {"profile": (None, None, 8192), "gpu": find_gpu("h100"), "version": "0.24.0", "context_held": False}
    plan, all_of_it = planned(supply=shared, **asked), planned(supply=whole, **asked)
    (buffers,) = (line for line in plan.ranks[0].lines if line.component == "runtime.buffers")
    assert "1,024 sequences" in buffers.source
    assert plan.ranks[0].service is not None
    assert plan.ranks[0].service.concurrency == 1  # with one request it starts
    assert "estimate" not in components(plan)
    assert bound(plan, "runtime.graphs") != bound(all_of_it, "runtime.graphs") > 0
    assert bound(plan, "workspace.activation") == bound(all_of_it, "workspace.activation")


def test_share_that_is_not_free_beside_the_context_is_refused_before_anything_else() -> None:
    whole = 80 * GIB
    for permille, starts in ((920, True), (998, False)):
        share = Supply(nbytes=whole * permille // 1000, basis="exact", source="share", whole_bytes=whole)
        plan = planned(supply=share, context_held=False, gpu=find_gpu("h100"))
        assert plan.fits is starts
        assert starts or plan.reasons[0].startswith("the engine may not start: share is 79.840 GiB > ")


def test_eager_holds_no_graphs() -> None:
    assert "runtime.graphs" in components(planned())
    assert "runtime.graphs" not in components(planned(eager=True))


def test_context_nobody_states_is_the_models_own() -> None:
    service = planned(profile=(1, 4096, None)).ranks[0].service
    assert service is not None
    assert service.context_tokens == 40960


def test_context_nobody_knows_is_asked_for() -> None:
    checkpoint = checkpoint_from_config(LLAMA, name="small")
    request = PlanRequest(engine="vllm", profile=Profile(concurrency=1, prefill_chunk_tokens=512))
    with pytest.raises(UnitError, match="--context N"):
        plan_checkpoint(checkpoint, request)


def test_weights_are_the_same_whether_a_profile_is_served_or_not() -> None:
    served = planned(ROUTED, tp=2)
    alone = plan_checkpoint(opened(ROUTED), PlanRequest(tp=2, engine="vllm"))
    weights = [line for line in served.ranks[0].lines if line.component.startswith(("weights.", "padding."))]
    assert weights == list(alone.ranks[0].lines)


def test_release_decides_what_counts_as_tokens_of_the_cache() -> None:
    asked = {"kv_bytes": 20 * GIB, "profile": (1, 8192, 8192)}
    old, new = (planned("openai__gpt-oss-20b", version=v, **asked).capacity_tokens() for v in ("0.19.0", "0.33.0"))
    assert old is not None
    assert new is not None
    assert old != new
    assert old % 16 == 0


# --- ranks and stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_stages_share_the_cache_by_their_layers_and_only_the_last_runs_the_draft(engine: str) -> None:
    plan = planned(HYBRID, engine=engine, pp=2, draft_method="mtp", draft_tokens=3)
    caches = [ledger.service.cache.bytes_per_token for ledger in plan.ranks if ledger.service and ledger.service.cache]
    assert caches[1] - caches[0] == caches[0] // 8  # one layer of the draft beside eight of the target
    assert [("draft.weights" in components(plan, rank)) for rank in (0, 1)] == [False, True]


def test_draft_of_exllamav3_is_whole_on_one_gpu_cache_included() -> None:
    alone, drafted = (
        planned(HYBRID, engine="exllamav3", tp=2, **asked).ranks[0].service
        for asked in ({}, {"draft_method": "mtp", "draft_tokens": 1})
    )
    assert alone is not None
    assert drafted is not None
    assert alone.cache is not None
    assert drafted.cache is not None
    assert drafted.cache.bytes_per_token - alone.cache.bytes_per_token == 4 * (256 + 256) * 2


def test_logits_are_the_last_stages() -> None:
    plan = planned("meta-llama__Llama-3.1-8B-Instruct", pp=2, profile=(1024, 8192, 8192))
    first, last = (bound(plan, "workspace.activation", rank) for rank in (0, 1))
    assert last > first


def test_ranks_that_hold_alike_are_worked_out_once() -> None:
    plan = planned(LATENT, tp=8)
    assert len({id(ledger.service) for ledger in plan.ranks}) == 1


def test_ranks_that_do_not_hold_alike_keep_their_own_lines() -> None:
    plan = planned("Qwen__Qwen3-235B-A22B", tp=3, engine="exllamav3")
    for ledger in plan.ranks:
        placed = plan.placement.rank_bytes(0, ledger.rank) if plan.placement else 0
        assert (
            sum(line.nbytes for line in ledger.lines if line.component.startswith(("weights.", "padding."))) == placed
        )


@pytest.mark.parametrize("name", [HYBRID, "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_sglang_is_told_the_slots_of_a_stated_concurrency_so_that_its_tokens_are_enough(name: str) -> None:
    plan = planned(name, engine="sglang", profile=(16, 4096, 32768))
    needed = plan.ranks[0].cache_bytes
    enough = replace(plan, kv_bytes=needed)
    assert (enough.capacity_tokens() or 0) >= 16 * 32768
    assert enough.fits is None


@pytest.mark.parametrize(("name", "reserve_mib"), [(DENSE, 0), ("google__gemma-4-26B-A4B", 100 + 1024)])
def test_fraction_of_sglang_leaves_the_cache_of_the_plan(name: str, reserve_mib: int) -> None:
    """As SGLang computes it: free before weights, less them, less the slack, less what a multimodal model holds."""
    plan = planned(name, engine="sglang", supply=parse_supply("80GiB"), profile=(4, 4096, 8192))
    fraction = serve_plan(plan, Profile(), model="m").fraction
    assert fraction is not None
    free = 80 * GIB - bound(plan, "runtime.context")
    weights = sum(
        line.bound_nbytes
        for line in plan.ranks[0].lines
        if line.component.startswith(("weights.", "padding.", "engine.", "draft."))
    )
    cache = math.floor(free * fraction) - weights - reserve_mib * MIB
    assert cache >= 80 * GIB - plan.ranks[0].fixed_bytes
    assert bound(plan, "runtime.multimodal") == reserve_mib * MIB


def test_cache_of_an_asked_size_too_small_for_the_profile_is_refused_with_or_without_a_supply() -> None:
    for supply in (None, parse_supply("80GiB")):
        plan = planned(supply=supply, kv_bytes=GIB)
        assert plan.fits is False
        assert plan.reasons[0].startswith("the cache of the profile needs 4.502 GiB > 1.000 GiB")
    assert planned(kv_bytes=8 * GIB).fits is None


def test_refused_cache_is_that_of_the_stage_that_needs_most() -> None:
    plan = planned(HYBRID, tp=1, pp=2, kv_bytes=1, supply=parse_supply("900GiB"), draft_method="mtp")
    most = max(ledger.cache_bytes for ledger in plan.ranks) / GIB
    assert f"needs {most:.3f} GiB" in plan.reasons[0]


def test_what_loading_holds_for_a_moment_has_its_own_verdict() -> None:
    asked: dict[str, Any] = {"profile": (1, 512, 512), "eager": True}
    ledger = planned(LATENT, **asked).ranks[0]
    serves = ledger.fixed_bytes + ledger.cache_bytes
    assert serves < ledger.loading_bytes
    tight = planned(LATENT, supply=Supply(nbytes=serves, basis="exact", source="test"), **asked)
    assert tight.spare_bytes(0) == 0
    assert tight.fits is False
    assert tight.reasons[0].startswith("fits serving, does not fit while loading: rank 0 needs ")
    loads = Supply(nbytes=ledger.loading_bytes, basis="exact", source="test")
    assert planned(LATENT, supply=loads, **asked).fits is True


def test_reserve_is_held_while_loading_too() -> None:
    plain, reserved = planned(), planned(reserve_bytes=GIB)
    assert reserved.ranks[0].loading_bytes == plain.ranks[0].loading_bytes + GIB


# --- laws ------------------------------------------------------------------------------------------------------------


CASES = st.tuples(
    st.sampled_from([DENSE, ROUTED, HYBRID, "google__gemma-4-26B-A4B", "openai__gpt-oss-20b"]),
    st.sampled_from(["vllm", "sglang"]),
)


@settings(max_examples=60, deadline=None)
@given(case=CASES, c=st.integers(1, 300), context=st.integers(1, 30_000), more=st.integers(1, 10_000))
def test_more_requests_or_longer_ones_never_need_less(case: tuple[str, str], c: int, context: int, more: int) -> None:
    name, engine = case
    least = planned(name, engine=engine, profile=(c, 4096, context)).ranks[0]
    for profile in ((c + more % 100 + 1, 4096, context), (c, 4096, context + more)):
        ledger = planned(name, engine=engine, profile=profile).ranks[0]
        assert ledger.fixed_bytes >= least.fixed_bytes
        assert ledger.cache_bytes >= least.cache_bytes


@settings(max_examples=60, deadline=None)
@given(case=CASES, c=st.integers(1, 2000), p=st.integers(64, 16384), tp=st.sampled_from([1, 2]))
def test_no_bound_is_under_what_is_expected(case: tuple[str, str], c: int, p: int, tp: int) -> None:
    plan = planned(case[0], engine=case[1], tp=tp, profile=(c, p, 4096))
    for ledger in plan.ranks:
        assert all(line.bound_nbytes >= line.nbytes >= 0 for line in ledger.lines)
        assert ledger.fixed_bytes >= ledger.expected_bytes


@settings(max_examples=60, deadline=None)
@given(case=CASES, c=st.integers(1, 64), context=st.integers(1, 20_000))
def test_what_a_profile_needs_has_room_for_it(case: tuple[str, str], c: int, context: int) -> None:
    plan = planned(case[0], engine=case[1], profile=(c, 4096, context))
    given_exactly = replace(plan, kv_bytes=plan.ranks[0].cache_bytes)
    assert (given_exactly.capacity_tokens() or 0) >= c * context


# --- what a user found -----------------------------------------------------------------------------------------------


def test_gpt_oss_captures_1024_whatever_the_concurrency() -> None:
    """VLLM 0.19 on an H100 logged 1.84 GiB for 83 sizes up to 1024 (public log gpt-oss-20b-vllm-tp1-041)."""
    for concurrency in (4, 1024):
        plan = planned(
            "openai__gpt-oss-20b", profile=(concurrency, 8192, 32768), version="0.19.0", gpu=find_gpu("h100")
        )
        (line,) = (line for line in plan.ranks[0].lines if line.component == "runtime.graphs")
        assert "83 sizes up to 1024" in line.source
        assert line.bound_nbytes >= 184 * GIB // 100


@pytest.mark.parametrize(("tp", "dcp"), [(8, 2), (8, 8), (16, 4)])
def test_keys_are_shared_only_among_ranks_that_hold_the_same_heads(tp: int, dcp: int) -> None:
    with pytest.raises(PlacementError, match="--dcp: more ranks than hold the same keys"):
        planned(tp=tp, dcp=dcp)  # 8 KV heads


def test_ranks_that_hold_the_same_heads_share_their_tokens() -> None:
    alone, shared = (planned(tp=16, dcp=dcp).ranks[0].service for dcp in (1, 2))
    assert alone is not None
    assert shared is not None
    assert alone.cache is not None
    assert shared.cache is not None
    assert shared.cache.bytes_per_token * 2 == alone.cache.bytes_per_token


def test_a_context_beyond_the_config_is_said() -> None:
    assert not [note for note in planned(profile=(1, 4096, 40_960)).notes if "beyond" in note]
    (note,) = (note for note in planned(profile=(1, 4096, 40_961)).notes if "beyond" in note)
    assert "the 40,960 tokens of the config" in note
