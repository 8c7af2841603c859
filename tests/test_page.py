"""The report is one file: well formed, whole without a network, true to its plan, and safe whatever the plan says."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import time
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from plan_documents import REQUESTS, XSS, document_of, with_text
from tonnage.errors import ObservationError, one_line
from tonnage.report.page import report_html

VOID = {"meta", "link", "br", "hr", "img", "input", "base"}
SVG_LEAVES = {"rect", "line", "path", "circle", "polyline"}


class Page(HTMLParser):
    """What is in a page: its elements in order, its texts, and that every element is closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID | SVG_LEAVES, tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open:
            self.inside.setdefault(self.open[-1], []).append(data)

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(case: str, against: str | None = None) -> Page:
    return Page(report_html(document_of(case), document_of(against) if against else None))


CASES = [(case, None) for case in REQUESTS] + [("fits", "refused"), ("credit", "fits"), ("no supply", "stages")]


@pytest.mark.parametrize(("case", "against"), CASES)
def test_page_needs_nothing_else_and_runs_only_its_own_script(case: str, against: str | None) -> None:
    page = page_of(case, against)
    (policy,) = (meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    hashes = {
        tag: base64.b64encode(hashlib.sha256("".join(page.inside[tag]).encode()).digest()).decode()
        for tag in ("style", "script")
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert len(page.of("style")) == len(page.of("script")) == 1
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "a", "base", "use", "image"), tag
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "href", "style", "xlink:href")
        ]
        assert {value for name, value in attributes.items() if "//" in (value or "")} <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)", "".join(page.inside["style"]))


@pytest.mark.parametrize(("case", "against"), CASES)
def test_page_can_be_read_aloud(case: str, against: str | None) -> None:
    page = page_of(case, against)
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in pairwise(headings))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.of("svg"):
        labels = (attributes.get("aria-labelledby") or "").split()
        assert attributes.get("aria-hidden") == "true" or (attributes["role"] == "img" and labels)
        assert set(labels) <= set(ids)
    for attributes in page.of("section"):
        assert attributes["aria-labelledby"] in ids
    assert all(
        attributes.get("scope") in ("col", "row") or attributes.get("role") == "rowheader"
        for attributes in page.of("th")
    )
    assert len(page.of("table")) == len(page.of("caption"))
    assert page.of("html") == [{"lang": "en"}]
    assert {meta.get("name") for meta in page.of("meta")} >= {"viewport", "color-scheme"}


@pytest.mark.parametrize("case", REQUESTS)
def test_every_line_is_in_the_ledger_with_basis_source_and_bytes(case: str) -> None:
    document, page = document_of(case), page_of(case)
    for rank in document["ranks"]:
        for line in rank["lines"]:
            for word in (line["component"], line["basis"], line["source"], f"{line['bound_nbytes']:,}"):
                assert " ".join(word.split()) in page.text
            assert {"role": "cell", "class": "number", "data-value": str(line["nbytes"]), "data-label": "expected",
                    "title": f"{line['nbytes']:,} bytes"} in page.of("td")  # fmt: skip
    for remark in document["remarks"]:
        assert remark["why"] in page.text
    for word in (*document["reasons"], *document["suggestions"], *document["notes"], *document["pessimism"]):
        assert " ".join(word.split()) in page.text
    for word in (document["checkpoint"]["digest"], document["tonnage_version"], " ".join(document["options"])):
        assert word in page.text


VERDICTS = {
    "fits": "Fits Every rank holds it. Rank 0, the fullest, needs 67.770 GiB of 94.971 GiB at most and leaves 27.200 GiB.",
    "refused": "Refused Rank 0, the fullest, needs",
    "no supply": "No verdict Nobody said what a GPU supplies. Rank 0, the fullest, needs",
    "too small a cache": "Refused Rank 0, the fullest, needs",
    "credit": "Refused Rank 0, the fullest, needs 182.393 GiB at most. One GPU supplies 94.000 GiB: that is 88.393 GiB too little.",
}


@pytest.mark.parametrize(("case", "words"), VERDICTS.items(), ids=VERDICTS)
def test_page_begins_with_the_verdict_in_words(case: str, words: str) -> None:
    page = page_of(case)
    text = page.text[page.text.index("memory plan") :]
    assert words in text[:500]
    assert text.index(words) < text.index("Ledger")


def test_ranks_that_hold_the_same_have_one_ledger() -> None:
    tables = [table for table in page_of("converted").of("table") if "ledger" in (table.get("class") or "")]
    text = page_of("converted").text
    assert len(tables) == 2
    assert "Ledger of ranks 0-3" in text
    assert "Ledger of ranks 4-7" in text


def test_page_says_what_is_not_planned() -> None:
    unserved = (
        "Not planned: KV cache and recurrent states; activations; libraries, communication buffers and CUDA graphs;"
    )
    assert unserved in page_of("no supply").text
    assert unserved in page_of("credit").text
    assert "Not planned:" not in page_of("fits").text
    assert "weights only: KV cache, activations, graphs" in page_of("no supply").text


def test_page_says_what_a_conversion_changes() -> None:
    document, page = document_of("converted"), page_of("converted")
    assert "No weight is changed" in page_of("fits").text
    assert "not known tensor by tensor" in page_of("credit").text
    assert document["numerics"]["converted"]
    for one in document["numerics"]["converted"]:
        assert f"{one['module']} {one['format']} {one['instances']:,}" in page.text or one["module"] in page.text
        assert str(one["bytes_after"]) in {cell.get("data-value") for cell in page.of("td")}


def test_page_says_how_the_cache_grows() -> None:
    document, page = document_of("fits"), page_of("fits")
    assert "4 requests of 32,768 tokens need 5.876 GiB of cache on rank 0; there is room for 33.076 GiB." in page.text
    titles = {cell.get("title") for cell in page.of("td")}
    assert {f"{point['nbytes']:,} bytes" for point in document["cache_growth"]} <= titles
    assert "Cache against context" not in page_of("no supply").text


def test_page_says_what_changed() -> None:
    page = page_of("fits", "refused")
    before, after = document_of("refused"), document_of("fits")
    assert "It fits; before it was refused." in page.text
    assert "ranks tp2 tp4" in page.text
    for document in (before, after):
        assert f"{document['ranks'][0]['lines'][3]['bound_nbytes'] / 2**30:.3f} GiB" in page.text
    more = after["ranks"][0]["lines"][3]["bound_nbytes"] - before["ranks"][0]["lines"][3]["bound_nbytes"]
    assert f"{more:+,}" in page.text
    assert "What changed" not in page_of("fits").text


def test_page_of_a_plan_against_itself_says_that_nothing_changed() -> None:
    page = page_of("fits", "fits")
    assert "It fits, as before. The fullest rank needs the same: 67.770 GiB." in page.text
    assert "Lines that changed" not in page.text
    assert "18 lines are the same." in page.text


@cache
def page_with(word: str) -> Page:
    return Page(report_html(with_text(document_of("fits"), word), with_text(document_of("credit"), word)))


@pytest.mark.parametrize("text", XSS)
def test_texts_of_strangers_are_text_in_the_page(text: str) -> None:
    hostile, harmless = page_with(text), page_with("harmless")
    kinds = [[(tag, sorted(attributes)) for tag, attributes in page.elements] for page in (hostile, harmless)]
    assert kinds[0] == kinds[1]
    shown = one_line(text)
    assert "".join(hostile.inside["h1"]) == shown
    hits = [  # in lower case: a heading begins with a capital
        "".join(page.texts).lower().count(word.lower()) for page, word in ((hostile, shown), (harmless, "harmless"))
    ]
    assert hits[0] == hits[1] > 50
    values = [
        " ".join(value for _, attributes in page.elements for value in attributes.values() if value).count(word)
        for page, word in ((hostile, shown), (harmless, "harmless"))
    ]
    assert values[0] == values[1]


def test_the_same_plan_is_the_same_page() -> None:
    assert report_html(document_of("fits")) == report_html(document_of("fits"))


def test_page_is_small() -> None:
    assert len(report_html(document_of("converted")).encode()) < 150_000


@pytest.mark.parametrize("document", [{}, {"schema": "tonnage.fit/1"}, {"schema": "tonnage.plan/1"}])
def test_what_is_no_plan_is_refused_by_name(document: dict[str, Any]) -> None:
    with pytest.raises(ObservationError, match="plan: not a plan"):
        report_html(document)
    with pytest.raises(ObservationError, match="the plan to compare with: not a plan"):
        report_html(document_of("fits"), document)


def test_without_the_extra_the_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.report import page

    page._template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        report_html(document_of("fits"))
    assert missing.value.name == "jinja2"


def test_a_plan_of_ever_so_many_kinds_of_remarks_is_written_in_linear_time() -> None:
    document = document_of("fits")
    document["remarks"] = [{"kind": f"kind {n}", "role": "role", "nbytes": 1, "why": "why"} for n in range(20_000)]
    begin = time.process_time()
    assert report_html(document).count("<caption>Kind ") == 20_000
    assert time.process_time() - begin < 30
