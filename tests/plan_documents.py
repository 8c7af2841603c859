"""Plan documents for tests: of real configs, and any that add up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from samples import opened
from tonnage.api import PlanRequest, plan_checkpoint
from tonnage.memory.supply import find_gpu, parse_supply, supply_bytes
from tonnage.profile import parse_profile
from tonnage.report.documents import plan_document

CONTROLS = (
    "\x1b[2J\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;https://example.invalid\x1b\\link\x1b]8;;\x1b\\", "\x9b31mred",
    "line\r\nbreak\u2028and\u2029more", "back\b\b\bspace\0null", "\u202etxt.exe\u202c", "zero\u200bwidth\ufeffmark",
    "<\0script>window.xss=1</script>", "[bold red]markup[/bold red]", "[link=https://example.invalid]x[/link]",
    "$(touch pwned) `touch pwned`", "=cmd|' /C calc'!A0", "../../../etc/passwd",
)  # fmt: skip
"""Texts that terminals, shells and other readers obey."""
XSS = (*(Path(__file__).parent / "data" / "xss.txt").read_text().splitlines(), *CONTROLS)
"""Those, and texts that break out of text wherever a page forgets that they are text."""

_GPU = find_gpu("rtx-pro-6000")
_ON_GPU: dict[str, Any] = {"engine": "vllm", "gpu": _GPU, "supply": supply_bytes(_GPU)}
_SERVED = parse_profile("c4-p4096", context_tokens=32_768)
REQUESTS: dict[str, tuple[str, PlanRequest]] = {
    "fits": ("Qwen__Qwen3-235B-A22B-FP8", PlanRequest(tp=4, profile=_SERVED, **_ON_GPU)),
    "refused": ("Qwen__Qwen3-235B-A22B-FP8", PlanRequest(tp=2, profile=_SERVED, **_ON_GPU)),
    "no supply": ("Qwen__Qwen3-8B", PlanRequest(tp=4)),
    "too small a cache": ("Qwen__Qwen3-8B", PlanRequest(tp=2, engine="vllm", profile=_SERVED, kv_bytes=1 << 30)),
    "cache given": ("Qwen__Qwen3-8B", PlanRequest(tp=2, profile=_SERVED, kv_bytes=30 << 30, **_ON_GPU)),
    "stages": ("Qwen__Qwen3-30B-A3B", PlanRequest(tp=2, ep=2, pp=2, profile=_SERVED, **_ON_GPU)),
    "converted": (
        "Kimi-K3.1-Pro",
        PlanRequest(tp=8, convert="mxfp8", supply=parse_supply("180GiB"), profile=_SERVED),
    ),
    "credit": (
        "Kimi-K3.1-Pro",
        PlanRequest(tp=8, estimator="credit", credit_permille=475, supply=parse_supply("94GiB"), reserve_bytes=6 << 30),
    ),
}


@cache
def _written(case: str) -> str:
    name, request = REQUESTS[case]
    checkpoint = opened(name)
    plan = plan_checkpoint(checkpoint, request)
    suggestions = () if plan.fits is not False else ("--tp 8", "--kv-dtype fp8")
    options = (f"--tp {request.tp}", f"--engine {request.engine}")
    return json.dumps(plan_document(checkpoint, request, plan, suggestions, options=options, growth=True))


def document_of(case: str) -> dict[str, Any]:
    """Return the document of a plan of :data:`REQUESTS`, one's own to change."""
    found: dict[str, Any] = json.loads(_written(case))
    return found


def by_hand(ranks: Iterable[Iterable[dict[str, Any]]], **changes: Any) -> dict[str, Any]:
    """Return a document of ranks with these lines, which are exact and have no bound of their own unless they say so."""
    known = {"transient": False, "basis": "exact", "source": "by hand"}
    whole = [[{"bound_nbytes": one["nbytes"], **known, **one} for one in lines] for lines in ranks]
    return {
        "schema": "tonnage.plan/1",
        "checkpoint": {"name": "small", "digest": "a" * 64, "family": "llama"},
        "engine": "vllm",
        "estimator": "exact",
        "topology": {"tp": len(whole), "ep": 1, "pp": 1, "dcp": 1},
        "profile": {},
        "supply_bytes": None,
        "ranks": [{"rank": number, "lines": lines, **_sums(lines)} for number, lines in enumerate(whole)],
        "binding_rank": 0,
        "fits": None,
        "cache": {},
        "numerics": {"class": "neutral", "converted": []},
    } | changes


def _sums(lines: list[dict[str, Any]]) -> dict[str, int]:
    weights = (one["nbytes"] for one in lines if one["component"].startswith(("weights.", "padding.", "engine.")))
    return {"weights_bytes": sum(weights), "fixed_bytes": 0, "expected_bytes": 0, "cache_bytes": 0}


def with_text(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a document that says a text wherever a checkpoint, a config or a user has a word in it."""
    ranks = [
        {
            **rank,
            "lines": [{**line, "component": f"weights.{text}", "source": text} for line in rank["lines"]],
            "weights_bytes": sum(line["nbytes"] for line in rank["lines"]),
        }
        for rank in document["ranks"]
    ]
    assert all(rank["weights_bytes"] for rank in ranks)
    return {
        **document,
        "checkpoint": dict.fromkeys(document["checkpoint"], text),
        "engine": text,
        "estimator": text,
        "profile": {**document["profile"], "name": text, "kv_dtype": text},
        "supply": document["supply"] and {"basis": "exact", "source": text},
        "ranks": ranks,
        "options": [text],
        "tonnage_version": text,
        "cache": {**document["cache"], "source": text},
        "numerics": {
            "class": text,
            "converted": [{"module": text, "format": text, "instances": 1, "bytes_before": 2, "bytes_after": 1}],
        },
        "remarks": [{"kind": text, "role": text, "nbytes": 1, "why": text}],
        "fits": False,
        **{key: [text] for key in ("reasons", "suggestions", "pessimism", "notes")},
    }


@st.composite
def plan_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Any document that adds up: ranks that are alike or not, with or without a supply, a cache, transient lines."""
    sizes = st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 40))
    components = st.sampled_from(
        ("weights.expert", "weights.mlp", "padding.expert", "engine.rotary", "draft.weights", "runtime.context",
         "workspace.activation", "reserve", "something.else")
    )  # fmt: skip
    lines = st.lists(st.tuples(components, sizes, sizes, st.booleans()), max_size=8)
    kinds = draw(st.lists(st.tuples(lines, sizes, sizes), min_size=1, max_size=3))
    tp, given = draw(st.integers(1, 8)), draw(st.none() | sizes)
    supply = draw(st.none() | sizes)
    ranks = [_rank(number, kinds[draw(st.integers(0, len(kinds) - 1))], supply, given) for number in range(tp)]
    return {
        **document_of("no supply"),
        "topology": {"tp": tp, "ep": 1, "pp": 1, "dcp": 1},
        "supply_bytes": supply,
        "supply": None if supply is None else {"basis": "exact", "source": "--supply"},
        "ranks": ranks,
        "binding_rank": max(range(tp), key=lambda rank: _needed(ranks[rank], given)),
        "fits": _verdict(ranks, supply, given),
        "cache": {"given_bytes": given},
    }


def _needed(rank: dict[str, Any], given: int | None) -> int:
    needed: int = rank["fixed_bytes"] + (rank["cache_bytes"] if given is None else given)
    return needed


def _verdict(ranks: list[dict[str, Any]], supply: int | None, given: int | None) -> bool | None:
    """Whether every rank serves, loads, and has room for its cache; ``None`` where nothing says how much there is."""
    if given is not None and any(rank["cache_bytes"] > given for rank in ranks):
        return False
    if supply is None:
        return None
    return all(_needed(rank, given) <= supply and rank["loading_bytes"] <= supply for rank in ranks)


def _rank(number: int, kind: tuple[list[Any], int, int], supply: int | None, given: int | None) -> dict[str, Any]:
    drawn, cache_bytes, loading = kind
    lines = [
        {"component": component, "nbytes": nbytes, "bound_nbytes": nbytes + more, "transient": transient,
         "basis": "exact", "source": "drawn"}
        for component, nbytes, more, transient in drawn
    ]  # fmt: skip

    def held(key: str) -> int:
        transient = [line[key] for line in lines if line["transient"]]
        return sum(line[key] for line in lines if not line["transient"]) + max(transient, default=0)

    fixed = held("bound_nbytes")
    weights = sum(line["nbytes"] for line in lines if line["component"].startswith(("weights.", "padding.", "engine.")))
    return {
        "rank": number, "lines": lines, "weights_bytes": weights, "fixed_bytes": fixed, "expected_bytes": held("nbytes"),
        "cache_bytes": cache_bytes, "loading_bytes": loading,
        "spare_bytes": None if supply is None else supply - fixed - (cache_bytes if given is None else given),
    }  # fmt: skip
