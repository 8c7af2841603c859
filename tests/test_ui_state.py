from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.errors import UnitError
from tonnage.plan_options import plan_request
from tonnage.suggestions import suggest
from tonnage.ui.state import (
    DEFAULTS,
    LONGEST_QUERY,
    NAMES,
    PageState,
    State,
    fields_of,
    option,
    parse_query,
    query_of,
    request_of,
    suggested,
)

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=20)
COUNT = st.integers(1, 999_999_999).map(str)
COUNTS = ("tp", "ep", "dcp", "pp", "concurrency", "draft_tokens")
TOKENS = st.builds(str.__add__, COUNT, st.sampled_from(("", "k", "K", "m")))
STATES = st.builds(
    State,
    source=st.sampled_from(("directory", "hub", "config")),
    eager=st.sampled_from(("", "on")),
    **dict.fromkeys(COUNTS, COUNT),
    prefill=TOKENS,
    context=TOKENS,
    **{name: TEXT for name in NAMES if name not in (*COUNTS, "prefill", "context", "source", "eager")},
)


@given(plan=STATES, against=st.none() | STATES)
def test_an_address_says_the_whole_state(plan: State, against: State | None) -> None:
    page = PageState(plan=plan, against=against)
    said = parse_query(query_of(page))
    assert (said.plan, said.against, said.problems) == (plan, against, ())


def test_an_address_says_only_what_is_not_usual() -> None:
    assert query_of(PageState(plan=DEFAULTS)) == ""
    assert query_of(PageState(plan=replace(DEFAULTS, tp="8", checkpoint="a b"))) == "checkpoint=a+b&tp=8"


@given(st.text(max_size=200))
def test_any_address_is_read_or_refused(query: str) -> None:
    page = parse_query(query)
    assert all(str(problem).isprintable() for problem in page.problems)


MALFORMED = {
    "unknown": ("rank=1", "address: no setting of this page; found rank"),
    "twice": ("tp=1&tp=2", "--tp: given twice; found 2"),
    "no number": ("context=many", "--context: cannot be read; expected a whole number, or such as 32k; found many"),
    "no size": ("prefill=4kB", "--profile: cannot be read; expected a whole number, or such as 32k; found 4kB"),
    "negative": ("tp=-1", "--tp: cannot be read; expected a whole number; found -1"),
    "other digits": ("tp=%D9%A3", "--tp: cannot be read; expected a whole number; found ٣"),
    "no source": ("source=ftp", "checkpoint: cannot be read; expected directory, hub, config; found ftp"),
    "no switch": ("eager=yes", "--eager: cannot be read; expected on, or nothing; found yes"),
    "in the pinned plan": ("a=tp%3Dx", "address, plan A, --tp: cannot be read; expected a whole number; found x"),
    "pinned twice": ("a=&a=", "address: given twice; found a"),
    "control characters": ("x%1B%5B2J=1", r"address: no setting of this page; found x\x1b[2J"),
}


@pytest.mark.parametrize(("query", "problem"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_address_is_refused_by_name(query: str, problem: str) -> None:
    assert [str(one) for one in parse_query(query).problems] == [problem]


def test_an_endless_address_is_refused() -> None:
    (problem,) = parse_query("hub=" + "a" * LONGEST_QUERY).problems
    assert problem.found == str(LONGEST_QUERY + 4)


def test_a_request_has_what_was_said_and_nothing_else() -> None:
    assert request_of(State(checkpoint="models/a")) == {
        "checkpoint": {"path": "models/a"}, "tp": 1, "ep": 1, "dcp": 1, "pp": 1, "context": 32768,
        "profile": "c4-p4096", "gpu": "rtx-pro-6000", "engine": "vllm",
    }  # fmt: skip
    state = State(source="hub", hub="org/name", gpu="", context="", concurrency="", prefill="", draft_hub="org/draft")
    more = replace(state, draft_tokens="3", convert="mxfp8", eager="on", utilization="0.9", kv_dtype="fp8")
    assert request_of(more) == {
        "checkpoint": {"hub": "org/name"}, "tp": 1, "ep": 1, "dcp": 1, "pp": 1, "engine": "vllm", "convert": "mxfp8",
        "draft": {"hub": "org/draft"}, "draft_tokens": 3, "eager": True, "utilization": "0.9", "kv_dtype": "fp8",
    }  # fmt: skip
    config = request_of(State(source="config"), "{}")
    assert config["checkpoint"] == {"config": "{}", "name": "config.json"}


def test_tokens_are_written_as_for_the_command() -> None:
    state = State(checkpoint="a", context="32k", prefill="8K")
    asked = request_of(state)
    assert (asked["context"], asked["profile"]) == (32768, "c4-p8K")
    assert request_of(replace(state, context="1M"))["context"] == 1 << 20
    with pytest.raises(UnitError, match=r"--context: not a number of tokens; expected .*; found '0'"):
        request_of(replace(state, context="0"))


HALF = {
    "no directory": (State(), "checkpoint: none is chosen yet"),
    "no config": (State(source="config", checkpoint="models/a"), "checkpoint: none is chosen yet"),
    "half a profile": (
        State(checkpoint="a", prefill=""),
        "--profile: half of it is missing; expected requests and prefill chunk",
    ),
    "two drafts": (
        State(checkpoint="a", draft="b", draft_hub="c/d"),
        "--draft: both given; expected a directory, or a model of the hub",
    ),
}


@pytest.mark.parametrize(("state", "problem"), HALF.values(), ids=HALF)
def test_half_a_state_is_no_request(state: State, problem: str) -> None:
    with pytest.raises(UnitError) as caught:
        request_of(state)
    assert str(caught.value) == problem


def test_every_setting_is_found_by_the_option_problems_name() -> None:
    for name in NAMES:
        if name not in ("source", "hub", "draft_hub"):
            assert name in fields_of(option(name))


def test_suggestions_change_what_they_say() -> None:
    state = State(tp="8", ep="8", dcp="8", draft="d", draft_tokens="3", draft_method="mtp", draft_bytes="1GiB")
    assert suggested(state, "no draft") == State(tp="8", ep="8", dcp="8")
    assert suggested(state, "--tp 16 with --convert mxfp8") == replace(
        state, tp="16", ep="16", dcp="1", convert="mxfp8"
    )
    assert suggested(replace(state, ep="1"), "--tp 16") == replace(state, tp="16", ep="1", dcp="1")
    assert suggested(replace(state, ep=""), "--tp 16") == replace(state, tp="16", ep="1", dcp="1")
    assert suggested(replace(state, ep="1"), "--tp 16 --ep 16") == replace(state, tp="16", ep="16", dcp="1")
    assert suggested(state, "--profile c2-p512") == replace(state, concurrency="2", prefill="512")
    assert suggested(state, "--kv-dtype fp8") == replace(state, kv_dtype="fp8")
    with pytest.raises(ValueError, match="--rank"):
        suggested(state, "--rank 2")


REFUSED = {
    "Qwen__Qwen3-235B-A22B": State(tp="4", context="8192", concurrency="2"),
    "meta-llama__Llama-3.1-8B-Instruct": State(gpu="rtx-4090", context="131072", concurrency="16"),
    "openai__gpt-oss-120b": State(gpu="l40s", tp="2"),
}


@pytest.mark.parametrize(("name", "state"), REFUSED.items(), ids=REFUSED)
def test_what_is_suggested_fits_once_it_is_applied(configs, name: str, state: State) -> None:
    checkpoint = open_checkpoint(configs / f"{name}.json")

    def asked(state: State) -> PlanRequest:
        sizes = {size: int(getattr(state, size)) for size in ("tp", "ep", "dcp", "pp")}
        return plan_request(engine="vllm", gpu=state.gpu, supply=None, profile=f"c{state.concurrency}-p{state.prefill}", context=int(state.context),
                            kv_dtype=None if state.kv_dtype == "auto" else state.kv_dtype, convert=state.convert, **sizes)  # fmt: skip

    assert plan_checkpoint(checkpoint, asked(state)).fits is False
    words = suggest(checkpoint, asked(state))
    assert words
    for text in words:
        assert plan_checkpoint(checkpoint, asked(suggested(state, text))).fits, text
