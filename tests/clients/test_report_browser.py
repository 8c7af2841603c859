"""The report in a real browser: one file, nothing loaded, nothing said on the console, sorted by its script, accessible."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from plan_documents import REQUESTS, XSS, document_of, with_text
from samples import PATIENCE
from tonnage.report.page import report_html
from tonnage.report.picture import rank_picture

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


class Opened:
    """A file in the browser, and all it asked for and said."""

    def __init__(self, browser: Browser, path: Path, **settings: object) -> None:
        self.page: Page = browser.new_page(**settings)  # type: ignore[arg-type]
        self.page.set_default_timeout(PATIENCE * 1000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def column(self, number: int) -> list[str]:
        """Return the texts of a column of the first ledger."""
        found: list[str] = self.page.locator(f".ledger tbody tr > :nth-child({number})").all_inner_texts()
        return found


def written(folder: Path, case: str, against: str | None = None) -> Path:
    path = folder / "report.html"
    path.write_text(report_html(document_of(case), document_of(against) if against else None))
    return path


@pytest.mark.parametrize("case", REQUESTS)
def test_a_report_loads_nothing_and_says_nothing(browser: Browser, tmp_path: Path, case: str) -> None:
    path = written(tmp_path, case, "fits")
    opened = Opened(browser, path, viewport=DESKTOP)
    assert opened.asked == [path.as_uri()]
    assert opened.said == []
    assert opened.page.locator("h2#verdict").inner_text().split()[-1] in ("Fits", "Refused", "verdict")


def test_the_ledger_is_sorted_by_every_column(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, written(tmp_path, "fits"), viewport=DESKTOP)
    before = opened.column(1)
    sizes = [int(text.replace(",", "")) for text in opened.column(4)]
    head = opened.page.locator(".ledger thead th").nth(3)
    for descending in (True, False):
        head.get_by_role("button").click()
        found = [int(text.replace(",", "")) for text in opened.column(4)]
        assert found == sorted(sizes, reverse=descending)
        assert head.get_attribute("aria-sort") == ("descending" if descending else "ascending")
    opened.page.locator(".ledger thead th").nth(4).get_by_role("button").press("Enter")
    assert opened.column(5) == sorted(opened.column(5))
    assert opened.page.locator(".ledger thead [aria-sort]").count() == 1
    assert sorted(opened.column(1)) == sorted(before)
    assert opened.said == []


def test_a_report_is_whole_without_scripts(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written(tmp_path, "fits").as_uri())
    assert page.locator(".ledger tbody tr").count() == len(document_of("fits")["ranks"][0]["lines"])
    assert page.locator("thead button").count() == 0
    context.close()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("case", "against"), [("fits", "refused"), ("refused", None), ("converted", None), ("credit", None)]
)
def test_no_accessibility_fault(
    browser: Browser, tmp_path: Path, case: str, against: str | None, scheme: str, size: dict[str, int]
) -> None:
    opened = Opened(browser, written(tmp_path, case, against), viewport=size, color_scheme=scheme)
    found = Axe().run(opened.page).response
    faults = found["violations"]
    assert len(found["passes"]) > 20
    assert [(fault["id"], fault["impact"], fault["nodes"][0]["html"][:200]) for fault in faults] == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_is_not_scrolled_sideways(browser: Browser, tmp_path: Path, width: int) -> None:
    opened = Opened(browser, written(tmp_path, "converted", "fits"), viewport={"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    shown = opened.page.locator(".picture:visible")
    assert shown.count() == 2  # one of each pair
    assert opened.page.locator(".picture:visible svg").first.bounding_box()["width"] <= width  # type: ignore[index]


CUT = """() => [...document.querySelectorAll("main *")].filter(one =>
    getComputedStyle(one).overflowX === "hidden" && !one.matches(".hidden") && one.scrollWidth > one.clientWidth
).map(one => one.className)"""


@pytest.mark.parametrize("width", [390, 768, 1000, 1200, 1440])
def test_no_figure_is_cut_whatever_the_width(browser: Browser, tmp_path: Path, width: int) -> None:
    document = document_of("fits")
    document["profile"] |= {"concurrency": 64, "context_tokens": 1_048_576}
    document["cache"] |= {"concurrency": 64, "context_tokens": 1_048_576, "capacity_tokens": 123_456_789_012}
    path = tmp_path / "report.html"
    path.write_text(report_html(document))
    opened = Opened(browser, path, viewport={"width": width, "height": 800})
    assert opened.page.evaluate(CUT) == []


def test_texts_of_strangers_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_html(document_of("no supply")))
    opened = Opened(browser, path)
    for text in XSS:
        path.write_text(report_html(with_text(document_of("no supply"), text), with_text(document_of("credit"), text)))
        opened.page.reload()
        assert opened.page.locator("script").count() == 1
        assert opened.page.evaluate("window.xss") is None, text
        assert set(opened.asked) == {path.as_uri()}, text
        assert opened.said == [], text


def test_a_picture_on_its_own_has_its_colours(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    path.write_text(rank_picture(document_of("fits"), standalone=True))
    colours = set()
    for scheme in ("light", "dark"):
        opened = Opened(browser, path, color_scheme=scheme)
        assert opened.said == []
        colours.add(opened.page.evaluate("getComputedStyle(document.querySelector('rect.tn-experts')).fill"))
    assert colours == {"rgb(31, 78, 133)", "rgb(77, 143, 214)"}


def test_a_report_prints_in_light_colours_on_few_pages(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, written(tmp_path, "fits"), color_scheme="dark")
    opened.page.emulate_media(media="print")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    printed = opened.page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF")
    assert 1 <= printed.count(b"/Type /Page\n") <= 4
