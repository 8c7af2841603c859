"""Pictures of plans: lengths are bytes, nothing leaves the picture, and a refused rank crosses the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_documents import REQUESTS, XSS, document_of, plan_documents, with_text
from tonnage.errors import ObservationError, one_line
from tonnage.report.bars import LABELS
from tonnage.report.growth import draw_growth, growth_of
from tonnage.report.picture import PICTURE_STYLE, rank_picture
from tonnage.report.saved import read_saved

SVG = "{http://www.w3.org/2000/svg}"
widths = st.integers(240, 1200)
SEGMENTS = {f"tn-{kind}" for kind in LABELS}


def drawn(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - made here


def titled(svg: ET.Element, kinds: set[str]) -> Iterator[ET.Element]:
    """Yield the rectangles that say what they are, which those of the legend do not."""
    return (one for one in svg.iter(f"{SVG}rect") if one.get("class") in kinds and one.find(f"{SVG}title") is not None)


def number(element: ET.Element, name: str) -> Fraction:
    return Fraction(element.get(name, "0"))


def rows(svg: ET.Element) -> dict[Fraction, list[ET.Element]]:
    """Return the segments of every bar by where it is, from left to right."""
    found: dict[Fraction, list[ET.Element]] = {}
    for rect in titled(svg, SEGMENTS):
        found.setdefault(number(rect, "y"), []).append(rect)
    return found


def needs(document: dict[str, Any], rank: dict[str, Any]) -> int:
    given_bytes = document["cache"]["given_bytes"]
    needed: int = rank["fixed_bytes"] + (rank["cache_bytes"] if given_bytes is None else given_bytes)
    return needed


@given(plan_documents(), widths)
@settings(max_examples=60, deadline=None)
def test_lengths_are_bytes(document: dict[str, Any], width: int) -> None:
    svg = drawn(rank_picture(document, width=width))
    loading = [rank["loading_bytes"] for rank in document["ranks"]]
    supply = document["supply_bytes"]
    longest = max([needs(document, rank) for rank in document["ranks"]])
    if supply is not None:
        longest = max(longest, supply, *(nbytes for nbytes in loading if nbytes > supply), 0)
    scale = Fraction(width - 2, max(longest, 1))
    for segments in rows(svg).values():
        at = Fraction(1)
        for rect in segments:
            nbytes = int(
                re.search(r"\((\d[\d,]*) bytes\)|: ([\d,]+) bytes", rect[0].text or "")
                .group(0)
                .split()[-2]
                .strip("(")
                .replace(",", "")
            )  # type: ignore[union-attr]
            assert number(rect, "x") == at
            assert abs(number(rect, "width") - nbytes * scale) <= Fraction(1, 50)
            at += number(rect, "width")


@given(plan_documents(), widths)
@settings(max_examples=60, deadline=None)
def test_nothing_is_outside_the_picture(document: dict[str, Any], width: int) -> None:
    svg = drawn(rank_picture(document, width=width))
    _, _, right, bottom = map(int, svg.get("viewBox", "").split())
    assert (right, bottom) == (width, int(svg.get("height", "")))
    for element in svg.iter():
        if element.tag == f"{SVG}rect":
            assert 0 <= number(element, "x") <= number(element, "x") + number(element, "width") <= right
            assert 0 <= number(element, "y") <= number(element, "y") + number(element, "height") <= bottom
        if element.tag == f"{SVG}line":
            assert all(0 <= number(element, name) <= right for name in ("x1", "x2"))
            assert all(0 <= number(element, name) <= bottom for name in ("y1", "y2"))
        if element.tag == f"{SVG}text":
            assert 0 <= number(element, "x") <= right
            assert 0 <= number(element, "y") <= bottom


@given(plan_documents(), widths)
@settings(max_examples=60, deadline=None)
def test_exactly_a_rank_that_is_refused_crosses_the_line(document: dict[str, Any], width: int) -> None:
    svg = drawn(rank_picture(document, width=width))
    over = {number(rect, "y"): rect for rect in titled(svg, {"tn-over"})}
    lines = {
        number(line, "y1") + 4: number(line, "x1")
        for line in svg.iter(f"{SVG}line")
        if line.get("class") == "tn-supply"
    }
    short = {needs(document, rank) for rank in document["ranks"] if (rank["spare_bytes"] or 0) < 0}
    assert bool(over) == bool(short)
    for y, segments in rows(svg).items():
        end = number(segments[-1], "x") + number(segments[-1], "width")
        if y in lines:
            assert (end >= lines[y]) if y in over else (end <= lines[y])
        if y in over:
            assert number(over[y], "x") == lines[y]
            assert number(over[y], "x") + number(over[y], "width") == end
    assert len(lines) == (
        0
        if document["supply_bytes"] is None
        else len({str(r["lines"]) + str((r["cache_bytes"], r["loading_bytes"])) for r in document["ranks"]})
    )


def test_a_rank_that_is_short_by_much_is_drawn_beyond_the_supply() -> None:
    svg = drawn(rank_picture(document_of("refused"), width=860))
    (over,) = titled(svg, {"tn-over"})
    assert number(over, "width") > 100
    assert "short by" in "".join(svg.itertext())


def test_loading_that_needs_more_than_the_supply_is_marked() -> None:
    document = document_of("fits")
    for rank in document["ranks"]:
        rank["loading_bytes"] = document["supply_bytes"] + 1
    document["fits"] = False
    marks = [path for path in drawn(rank_picture(document)).iter(f"{SVG}path") if path.get("class") == "tn-loading"]
    assert [mark[0].text for mark in marks] == [
        "while loading: 94.971 GiB (101,974,016,001 bytes), more than the supply"
    ]
    assert not list(titled(drawn(rank_picture(document_of("fits"))), {"tn-over"}))


@pytest.mark.parametrize("case", REQUESTS)
def test_a_picture_says_in_words_what_it_shows(case: str) -> None:
    document = document_of(case)
    svg = drawn(rank_picture(document, prefix="p"))
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "p-title p-desc"
    title, words = svg[0].text, svg[1].text
    assert title is not None
    assert words is not None
    assert title.startswith(document["checkpoint"]["name"])
    assert words.count(" need") == len(rows(svg))
    assert ("short by" in words) == any((rank["spare_bytes"] or 0) < 0 for rank in document["ranks"])


def test_kinds_differ_by_more_than_colour() -> None:
    text = rank_picture(document_of("fits"))
    kinds = {rect.get("class", "").removeprefix("tn-") for rect in titled(drawn(text), SEGMENTS)}
    plain = kinds - set(re.findall(r"url\(#ranks-(\w+)\)", text))
    assert kinds == {"experts", "weights", "engine", "runtime", "workspace", "margin", "cache"}
    assert plain == {"experts", "runtime", "cache"}  # no two of them are neighbours


def test_a_picture_on_its_own_carries_its_colours_and_nothing_else() -> None:
    alone = rank_picture(document_of("fits"), standalone=True)
    assert PICTURE_STYLE in alone
    assert "<style" not in rank_picture(document_of("fits"))
    for text in (alone, rank_picture(document_of("fits"))):
        assert "style=" not in text
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("text", XSS)
def test_texts_of_strangers_are_text_in_pictures(text: str) -> None:
    def shape(svg: ET.Element) -> list[tuple[str, list[str]]]:
        return [(element.tag, sorted(element.keys())) for element in svg.iter()]

    pictures = [drawn(rank_picture(with_text(document_of("fits"), one))) for one in (text, "plain")]
    assert shape(pictures[0]) == shape(pictures[1])
    assert one_line(text) in (pictures[0][0].text or "")


def test_a_picture_is_no_narrower_than_its_text() -> None:
    with pytest.raises(ValueError, match="at least 240 pixels"):
        rank_picture(document_of("fits"), width=239)


def test_a_document_that_is_none_is_refused() -> None:
    with pytest.raises(ObservationError, match=r"expected schema 'tonnage.plan/1'; found None"):
        rank_picture({})


# --- how the cache grows ----------------------------------------------------------------------------------------------


def test_growth_is_what_the_cache_needs() -> None:
    """Qwen3-235B in FP8 over four ranks: 94 layers of 1 KV head of 128, K and V, BF16: 48,128 bytes per token."""
    document = document_of("fits")
    growth = growth_of(read_saved(document))
    assert growth is not None
    assert growth.planned == (4, 32_768)
    assert growth.concurrencies == (1, 2, 4, 8, 16)
    assert growth.contexts == (8192, 16_384, 24_576, 32_768, 40_960)  # the model's own context is the last
    for (many, tokens), nbytes in growth.nbytes.items():
        assert many * tokens * 48_128 <= nbytes <= many * (tokens + 32) * 48_128
    assert growth.nbytes[growth.planned] == document["ranks"][0]["cache_bytes"]
    assert growth.room == document["supply_bytes"] - document["ranks"][0]["fixed_bytes"]
    assert growth.fits(16, 40_960) is True
    assert growth_of(read_saved(document_of("no supply"))) is None
    assert growth_of(read_saved(document_of("credit"))) is None


def test_growth_has_the_room_the_cache_is_given() -> None:
    growth = growth_of(read_saved(document_of("too small a cache")))
    assert growth is not None
    assert growth.room == 1 << 30
    assert growth.fits(*growth.planned) is False


def test_growth_that_is_no_grid_is_not_drawn() -> None:
    document = document_of("fits")
    del document["cache_growth"][3]
    assert growth_of(read_saved(document)) is None


@pytest.mark.parametrize("case", ["fits", "refused", "too small a cache", "cache given", "stages", "converted"])
@pytest.mark.parametrize("width", [300, 992])
def test_growth_stays_in_its_picture_and_marks_the_plan(case: str, width: int) -> None:
    growth = growth_of(read_saved(document_of(case)))
    assert growth is not None
    svg = drawn(draw_growth(growth, width=width, prefix="g"))
    _, _, right, bottom = map(int, svg.get("viewBox", "").split())
    points = [
        tuple(map(Fraction, point.split(",")))
        for line in svg.iter(f"{SVG}polyline")
        for point in line.get("points", "").split()
    ]
    assert len(list(svg.iter(f"{SVG}polyline"))) == len(growth.concurrencies)
    assert all(0 <= x <= right and 0 <= y <= bottom for x, y in points)
    (circle,) = svg.iter(f"{SVG}circle")
    assert (number(circle, "cx"), number(circle, "cy")) in points
    assert (circle[0].text or "").startswith("planned: ")
