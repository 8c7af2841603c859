"""Plan documents are read again as they were written, and never believed where they contradict themselves."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from plan_documents import REQUESTS, XSS, document_of, plan_documents, with_text
from samples import opened
from tonnage.api import plan_checkpoint
from tonnage.errors import ObservationError, one_line
from tonnage.profile import parse_profile
from tonnage.report.bars import bars
from tonnage.report.documents import plan_document
from tonnage.report.page import plan_page
from tonnage.report.saved import read_saved

HUGE = 1 << 63


@pytest.mark.parametrize("case", REQUESTS)
def test_a_document_is_read_as_it_was_written(case: str) -> None:
    document = document_of(case)
    read = json.loads(msgspec.json.encode(read_saved(document)))
    read["numerics"]["class"] = read["numerics"].pop("kind")
    assert {read["profile"].pop(name) for name in ("draft_name", "draft_tokens")} == {None}  # said of packages
    assert read == document


def test_a_document_of_an_earlier_version_is_read() -> None:
    document = document_of("fits")
    for key in ("tonnage_version", "options", "cache_growth"):
        del document[key]
    del document["cache"]["rank"]
    assert read_saved(document).tonnage_version == ""


@given(plan_documents())
@settings(max_examples=50)
def test_any_document_that_adds_up_is_read(document: dict[str, Any]) -> None:
    plan = read_saved(document)
    assert [rank.fixed_bytes for rank in plan.ranks] == [rank["fixed_bytes"] for rank in document["ranks"]]


@given(plan_documents())
@settings(max_examples=50)
def test_bars_are_all_ranks_once_and_as_long_as_what_they_need(document: dict[str, Any]) -> None:
    found = bars(read_saved(document))
    assert sorted(rank for bar in found for rank in bar.ranks) == list(range(document["topology"]["tp"]))
    given_bytes = document["cache"]["given_bytes"]
    for bar in found:
        for rank in (document["ranks"][number] for number in bar.ranks):
            assert bar.needed_bytes == rank["fixed_bytes"] + (
                rank["cache_bytes"] if given_bytes is None else given_bytes
            )
            solid = [part.nbytes for part in bar.parts if part.kind not in ("margin", "cache", "given")]
            assert sum(solid) == rank["expected_bytes"]
        assert all(part.nbytes > 0 for part in bar.parts)


LIES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "another schema": (("schema",), "tonnage.fit/1", "plan: not a plan; expected schema 'tonnage.plan/1'; found 'tonnage.fit/1'"),
    "no schema": (("schema",), None, "found None"),
    "a newer schema": (("schema",), "tonnage.plan/2", "found 'tonnage.plan/2'"),
    "no ranks": (("ranks",), [], "`$.ranks`"),
    "ranks missing": (("topology", "tp"), 8, "plan: number of ranks; expected 8; found 4"),
    "a rank twice": (("ranks", 1, "rank"), 0, "plan: ranks[1].rank; expected 1; found 0"),
    "binding rank": (("binding_rank",), 4, "plan: binding_rank; expected below 4; found 4"),
    "negative bytes": (("ranks", 0, "lines", 0, "nbytes"), -1, "`$.ranks[0].lines[0].nbytes`"),
    "bytes beyond counting": (("ranks", 0, "cache_bytes"), HUGE, "plan: ranks[0].spare_bytes; expected -9"),
    "bytes as a truth value": (("ranks", 0, "cache_bytes"), True, "`$.ranks[0].cache_bytes`"),
    "bytes as text": (("supply_bytes",), "94GiB", "`$.supply_bytes`"),
    "a fraction of a byte": (("ranks", 0, "fixed_bytes"), 1.5, "`$.ranks[0].fixed_bytes`"),
    "bound under the value": (("ranks", 0, "lines", 0, "bound_nbytes"), 0, "bound_nbytes of weights.embedding, rank 0"),
    "fixed": (("ranks", 2, "fixed_bytes"), 5, "plan: ranks[2].fixed_bytes; expected"),
    "expected": (("ranks", 2, "expected_bytes"), 5, "plan: ranks[2].expected_bytes; expected"),
    "spare": (("ranks", 3, "spare_bytes"), 5, "plan: ranks[3].spare_bytes; expected"),
    "weights": (("ranks", 1, "weights_bytes"), 5, "plan: ranks[1].weights_bytes; expected"),
    "a verdict that its reasons deny": (("reasons",), ["short"], "plan: fits; expected False; found True"),
    "refused for nothing": (("fits",), False, "plan: fits; expected True; found False"),
    "no verdict beside a supply": (("fits",), None, "plan: fits; expected True; found None"),
    "loads more than there is": (("ranks", 0, "loading_bytes"), HUGE, "plan: fits; expected False; found True"),
    "a cache that is given less": (("cache", "given_bytes"), 1, "plan: fits; expected False; found True"),
    "an unknown basis": (("ranks", 0, "lines", 0, "basis"), "guessed", "`$.ranks[0].lines[0].basis`"),
    "a verdict that is no truth value": (("fits",), "yes", "`$.fits`"),
    "cache of no rank": (("cache", "rank"), 4, "plan: cache.rank; expected below 4; found 4"),
    "numerics no object": (("numerics",), [], "`$.numerics`"),
    "growth for nobody": (("cache_growth", 0, "concurrency"), 0, "`$.cache_growth[0].concurrency`"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), LIES.values(), ids=LIES)
def test_a_lie_is_refused_by_name(path: tuple[Any, ...], value: Any, said: str) -> None:
    document = document_of("fits")
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ObservationError) as refused:
        read_saved(document)
    assert said in str(refused.value)


def test_a_plan_that_is_short_does_not_pass_for_one_that_fits() -> None:
    document = document_of("fits")
    for rank in document["ranks"]:
        rank["spare_bytes"] -= document["supply_bytes"] - (1 << 30)
    document["supply_bytes"] = 1 << 30
    with pytest.raises(ObservationError, match="plan: fits; expected False; found True"):
        read_saved(document)


def test_the_rank_that_needs_most_is_not_another() -> None:
    document = document_of("fits")
    rank = document["ranks"][2]
    rank["lines"][0]["bound_nbytes"] += 1
    rank["fixed_bytes"] += 1
    rank["spare_bytes"] -= 1
    with pytest.raises(ObservationError, match="plan: needed bytes of binding_rank; expected"):
        read_saved(document)
    document["binding_rank"] = 2
    assert read_saved(document).binding.rank == 2


def test_a_plan_beyond_all_memory_there_is_is_read() -> None:
    name, request = REQUESTS["fits"]
    huge = replace(request, profile=parse_profile("c1000000-p4096", context_tokens=1 << 50))
    checkpoint = opened(name)
    document = json.loads(
        json.dumps(plan_document(checkpoint, huge, plan_checkpoint(checkpoint, huge), (), growth=True))
    )
    plan = read_saved(document)
    assert plan.fits is False
    assert plan.needed_bytes(plan.binding) > HUGE
    assert "Refused" in plan_page(plan)


def test_every_contradiction_is_named() -> None:
    document = document_of("fits")
    for rank in document["ranks"]:
        rank["fixed_bytes"] += 1
    with pytest.raises(ObservationError) as refused:
        read_saved(document)
    assert len(refused.value.problems) == 8  # the sum of its lines, and what is spare beside it, of four ranks


@pytest.mark.parametrize("text", XSS)
def test_every_text_read_is_one_printable_line(text: str) -> None:
    plan = msgspec.to_builtins(read_saved(with_text(document_of("fits"), text)))

    def texts(value: Any) -> list[str]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [value] if isinstance(value, str) else [one for child in inner for one in texts(child)]

    found = texts(copy.deepcopy(plan))
    assert all(one.isprintable() for one in found)
    assert one_line(text) in found
