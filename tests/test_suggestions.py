"""Suggestions: every one that is made fits when it is followed, and is single."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from samples import opened
from tonnage import PlanRequest
from tonnage.api import plan_checkpoint
from tonnage.memory.supply import parse_supply
from tonnage.profile import Profile, parse_profile
from tonnage.suggestions import suggest

DENSE, ROUTED, HYBRID = "Qwen__Qwen3-8B", "Qwen__Qwen3-30B-A3B", "Qwen__Qwen3.5-27B"


def request(supply: str, profile: str | None = "c8-p8192", context: int | None = 32768, **asked: Any) -> PlanRequest:
    served = parse_profile(profile, context_tokens=context) if profile else Profile()
    return PlanRequest(**{"engine": "vllm", "supply": parse_supply(supply), "profile": served} | asked)


def followed(asked: PlanRequest, words: str) -> PlanRequest:
    """Return the request with a suggestion typed behind it."""
    if words == "no draft":
        return replace(asked, draft_method=None, draft_tokens=None, draft_bytes=0)
    typed = shlex.split(words.replace(" with ", " "))
    for option, value in zip(typed[::2], typed[1::2], strict=True):
        match option:
            case "--profile":
                stated = asked.profile
                profile = parse_profile(value, context_tokens=stated.context_tokens, kv_dtype=stated.kv_dtype)
                asked = replace(asked, profile=profile)
            case "--context":
                asked = replace(asked, profile=replace(asked.profile, context_tokens=int(value)))
            case "--kv-dtype":
                asked = replace(asked, profile=replace(asked.profile, kv_dtype=value))
            case "--convert":
                asked = replace(asked, convert=value)
            case "--tp":
                asked = replace(asked, tp=int(value))
            case "--ep":
                asked = replace(asked, ep=int(value))
            case "--pp":
                asked = replace(asked, pp=int(value))
            case _:
                raise AssertionError(option)
    return asked


@pytest.mark.parametrize(
    ("name", "asked", "kinds"),
    [
        (DENSE, request("40GiB"), {"--kv-dtype", "--context", "--profile", "--pp", "--tp"}),
        (DENSE, request("40GiB", engine="sglang"), {"--kv-dtype", "--context", "--profile", "--pp", "--tp"}),
        (DENSE, request("45GiB", engine="exllamav3"), {"--kv-dtype", "--context", "--profile", "--pp", "--tp"}),
        (DENSE, request("40GiB", engine="split"), {"--kv-dtype", "--context", "--profile", "--pp", "--tp"}),
        (ROUTED, request("44GiB", tp=2, context=40960), {"--kv-dtype", "--context", "--profile", "--pp"}),
        (HYBRID, request("68GiB", "c4-p8192", draft_method="mtp", draft_tokens=7), {"no", "--profile", "--convert"}),
        (DENSE, request("12GiB", profile=None, context=None), {"--pp", "--tp", "--convert"}),
    ],
)
def test_every_suggestion_fits_when_it_is_followed(name: str, asked: PlanRequest, kinds: set[str]) -> None:
    assert plan_checkpoint(opened(name), asked).fits is False
    made = suggest(opened(name), asked)
    for words in made:
        assert plan_checkpoint(opened(name), followed(asked, words)).fits is True, words
    assert kinds <= {words.split()[0] for words in made}
    assert len(made) == len(set(made))


def test_shorter_context_and_fewer_requests_are_the_most_that_fit() -> None:
    asked = request("40GiB")
    for words in suggest(opened(DENSE), asked):
        if words.startswith("--context"):
            changed = followed(asked, f"--context {int(words.split()[1]) + 1}")
            assert plan_checkpoint(opened(DENSE), changed).fits is False
        elif words.startswith("--profile") and words.endswith("p8192"):
            c = int(words.split("c")[-1].split("-")[0])
            assert plan_checkpoint(opened(DENSE), followed(asked, f"--profile c{c + 1}-p8192")).fits is False


def test_smaller_prefill_chunk_is_the_largest_half_that_fits() -> None:
    asked = request("30GiB", profile="c2-p262144", context=40960)
    chunks = [
        int(words.rpartition("p")[2]) for words in suggest(opened(DENSE), asked) if words.startswith("--profile c2-")
    ]
    assert len(chunks) == 1
    assert plan_checkpoint(opened(DENSE), followed(asked, f"--profile c2-p{2 * chunks[0]}")).fits is False


def test_small_cache_dtype_is_not_made_smaller() -> None:
    asked = request("30GiB")
    asked = replace(asked, profile=replace(asked.profile, kv_dtype="fp8"))
    assert not any(words.startswith("--kv-dtype") for words in suggest(opened(DENSE), asked))


def test_conversion_is_not_suggested_where_nothing_converts() -> None:
    made = suggest(opened("Qwen__Qwen3-32B-FP8"), request("32GiB"))
    assert made
    assert not any("mxfp8" in words for words in made)


def test_nothing_is_suggested_without_a_supply_or_for_a_credit() -> None:
    assert suggest(opened(DENSE), replace(request("1GiB"), supply=None)) == ()
    assert suggest(opened(DENSE), PlanRequest(supply=parse_supply("1GiB"), estimator="credit", credit_permille=1)) == ()
