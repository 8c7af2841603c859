"""Take the pictures of `docs/images` that README and docs/ui.md show: the page as a browser draws it.

A server is started on the full-size rehearsal of Kimi-K3.1-Pro, which takes no room, and Chromium looks at it.

Run: python scripts/screenshots.py (in the environment of `make clients`)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

from playwright.sync_api import Browser, Locator, Page, Playwright, expect, sync_playwright

from tonnage.api import read_config
from tonnage.synth.io import RehearsalOptions, write_rehearsal

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 300_000
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ALONE = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""The browser asks nothing of the network on its own account, and runs where nobody may make a sandbox."""
K31 = {"tp": "8", "dcp": "8", "engine": "split", "prefill": "3072", "context": "131072"}
"""The published profile of the package on 8 GPUs at half its context, before conversion."""
K31_NAME = "kimi-k3.1-pro-exl3-2bit"
CONFIGS = ("Qwen__Qwen3-235B-A22B-FP8", "meta-llama__Meta-Llama-3.1-8B")
_MOST_MS = 120_000
_WIDE, _PHONE = (1280, 1060), (390, 844)


def write_models(directory: Path) -> None:
    """Write what is chosen from: the full-size rehearsal of Kimi-K3.1-Pro, and configs."""
    source = ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json"
    write_rehearsal(read_config(source), directory / K31_NAME, RehearsalOptions(experts="exl3-v1"))
    for name in CONFIGS:
        shutil.copy(ROOT / "tests" / "data" / "configs" / f"{name}.json", directory)


@contextmanager
def served(*directories: Path | str, cwd: Path = ROOT) -> Iterator[str]:
    """Run `tonnage ui` on a free port, and yield its address."""
    command = Path(sys.executable).with_name("tonnage")
    words = (command, "ui", *directories, "--port", "0", "--no-browser")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=cwd) as process:  # noqa: S603 - our own command
        try:
            assert process.stdout is not None
            address = re.search(r"http://\S+", process.stdout.readline())
            assert address is not None
            yield address[0].rstrip("/")
        finally:
            process.terminate()


def chromium(playwright: Playwright) -> Browser:
    """Return the system's browser, started."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=list(ALONE))


def drawn(page: Page) -> None:
    """Wait until the charts are there, and what would fit."""
    expect(page.locator("#heat .heatmaplayer image").first).to_be_visible(timeout=_MOST_MS)
    expect(page.locator("#growth .scatterlayer path").first).to_be_visible(timeout=_MOST_MS)
    expect(page.locator("#suggestions [data-looking]")).to_have_count(0, timeout=_MOST_MS)
    expect(page.locator("#answer[aria-busy]")).to_have_count(0)


def _refused(page: Page) -> Page:
    expect(page.locator("#headline")).to_contain_text("Refused")
    drawn(page)
    return page


def _compared(page: Page) -> Locator:
    """Pin the refused plan, apply the first suggestion, and show both."""
    _refused(page).get_by_role("button", name="Pin as A").click()
    page.get_by_role("button", name="conversion to MXFP8", exact=True).click()
    expect(page.locator("#compared .sentence")).to_contain_text("It fits; before it was refused.")
    drawn(page)
    return page.locator("#compared")


def _phone(page: Page) -> Page:
    expect(page.locator("#headline")).to_contain_text("Fits")
    drawn(page)
    page.locator("#pocket").click()
    return page


def _take(browser: Browser, address: str, name: str) -> None:
    pictures = {
        "ui": (_refused, _WIDE, "light", {"convert": "mxfp8", "context": "262144"}),
        "ui-compare": (_compared, _WIDE, "dark", {}),
        "ui-phone": (_phone, _PHONE, "light", {"convert": "mxfp8"}),
    }
    show, (width, height), scheme, more = pictures[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    state: Mapping[str, str] = {"checkpoint": f"models/{K31_NAME}"} | K31 | more
    page.goto(f"{address}/?{urlencode(state)}")
    shown = show(page)
    page.mouse.move(0, 0)
    _save(shown, name)
    context.close()


def _take_report(browser: Browser, scratch: Path) -> None:
    """Shoot the report of the plan that the README prints."""
    config = ROOT / "tests" / "data" / "configs" / "Qwen__Qwen3-235B-A22B-FP8.json"
    report = scratch / "report.html"
    words = ("--tp", "4", "--engine", "vllm", "--gpu", "rtx-pro-6000", "--profile", "c4-p4096", "--context", "32768")
    command = Path(sys.executable).with_name("tonnage")
    subprocess.run((command, "plan", config, *words, "--html", report), check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    page = browser.new_page(viewport={"width": 1200, "height": 700}, color_scheme="light")
    page.goto(report.as_uri())
    _save(page, "report")
    page.close()


def _save(shown: Page | Locator, name: str) -> None:
    path = IMAGES / f"{name}.png"
    shown.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{path.name} is larger than {MOST_BYTES:,} bytes")


def main() -> None:
    """Take them all."""
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        models = Path(scratch) / "models"
        models.mkdir()
        write_models(models)
        with served("models", cwd=Path(scratch)) as address:
            browser = chromium(playwright)
            for name in ("ui", "ui-compare", "ui-phone"):
                _take(browser, address, name)
            _take_report(browser, Path(scratch))
            browser.close()


if __name__ == "__main__":
    main()
