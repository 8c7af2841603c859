"""The page in a real browser: Chromium, as the system has it, against `tonnage ui` as a user starts it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from samples import LLAMA, PATIENCE, load_script, served
from tonnage.ui.state import NAMES

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data"
CONFIGS = DATA / "configs"
PAYLOADS = (DATA / "xss.txt").read_text().splitlines()
SHOTS = load_script("screenshots")
K31, K31_NAME = SHOTS.K31, SHOTS.K31_NAME
QWEN = {"tp": "4"}
GRAVE = ("serious", "critical")
expect.set_options(timeout=PATIENCE * 1000)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Checkpoints to choose from."""
    directory = tmp_path_factory.mktemp("models")
    SHOTS.write_models(directory)
    return directory


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """Checkpoints whose names, and the names of whose tensors, are payloads."""
    directory = tmp_path_factory.mktemp("hostile")
    header = {one: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for one in PAYLOADS}
    raw = json.dumps(header).encode()
    for number, payload in enumerate(PAYLOADS):
        folder = directory / f"{number:02} {payload}".replace("/", "_")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | ({} if number else {"model_type": payload})))
        (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    return directory


@pytest.fixture(scope="module")
def server(models: Path, hostile: Path) -> Iterator[str]:
    """The address of a running `tonnage ui`."""
    with served(ROOT, models, hostile, workers=2) as (address, _):
        yield address


class Opened:
    """A page, and what it complained of."""

    def __init__(self, browser: Browser, server: str, models: Path, **options: object) -> None:
        self.context = browser.new_context(
            base_url=server, reduced_motion="reduce", viewport={"width": 1280, "height": 900}, **options
        )
        self.context.set_default_timeout(PATIENCE * 1000)
        self.page: Page = self.context.new_page()
        self.models = models
        self.complaints: list[str] = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def go(self, name: str = "", **state: str) -> Page:
        """Open the page of a state."""
        chosen = {"checkpoint": str(self.models / name)} if name else {}
        self.page.goto(f"/?{urlencode(chosen | state)}")
        return self.page

    def audit(self) -> None:
        """Hold the page against axe, as it is now."""
        found = Axe().run(self.page).response["violations"]
        assert [(one["id"], one["nodes"][0]["target"]) for one in found if one["impact"] in GRAVE] == []


@pytest.fixture
def open_page(browser: Browser, server: str, models: Path) -> Iterator[Callable[..., Opened]]:
    """Opens pages that must not complain of anything."""
    opened: list[Opened] = []

    def make(**options: object) -> Opened:
        opened.append(Opened(browser, server, models, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.context.close()
        assert one.complaints == []


@pytest.fixture
def opened(open_page) -> Opened:
    return open_page()


def headline(page: Page, words: str) -> None:
    expect(page.locator("#headline")).to_contain_text(words)


drawn = SHOTS.drawn


def state_of(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def test_k31_is_refused_and_fits_by_its_suggestion(opened) -> None:
    page = opened.go()
    headline(page, "Choose a model")
    opened.audit()
    page.get_by_label("Checkpoint", exact=True).select_option(label=K31_NAME)
    page.get_by_label("How many").fill("8")
    page.get_by_label("Engine", exact=True).select_option("split")
    page.get_by_label("Decode ctx").fill("8")
    page.get_by_label("Prefill chunk").fill("3072")
    page.get_by_label("Context, tokens").fill("131072")
    headline(page, "Refused: short by 5.469 GiB")
    expect(page.get_by_role("img", name="refused")).to_contain_text("beyond the supply")
    before = page.locator("#picture svg").inner_html()
    suggestion = page.get_by_role("button", name="conversion to MXFP8", exact=True)
    expect(suggestion).to_be_visible()
    drawn(page)
    opened.audit()
    suggestion.click()
    headline(page, "Fits: 238.204 MiB to spare")
    expect(page.get_by_role("status")).to_contain_text("Fits: 238.204 MiB to spare. Rank 0, which needs most, needs")
    expect(page.get_by_label("Conversion")).to_have_value("mxfp8")
    assert page.locator("#picture svg").inner_html() != before
    assert state_of(page) == K31 | {"convert": "mxfp8", "checkpoint": str(opened.models / K31_NAME)}
    drawn(page)
    opened.audit()


def test_the_same_works_without_scripts(open_page) -> None:
    opened = open_page(java_script_enabled=False)
    page = opened.go(K31_NAME, **K31)
    headline(page, "Refused: short by 5.469 GiB")
    page.get_by_role("button", name="conversion to MXFP8", exact=True).click()
    headline(page, "Fits: 238.204 MiB to spare")
    page.get_by_label("Conversion").select_option("none")
    page.get_by_role("button", name="Plan", exact=True).click()
    headline(page, "Refused: short by 5.469 GiB")
    with page.expect_download() as caught:
        page.get_by_role("link", name="Save HTML").click()
    assert "Content-Security-Policy" in Path(caught.value.path()).read_text()


def test_the_map_moves_the_plan_by_pointer_keys_and_table(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    headline(page, "Fits: 27.200 GiB")
    drawn(page)
    box = page.locator("#heat .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 4, box["y"] + 4)  # the shortest context, the most requests
    expect(page.get_by_label("Requests at once")).to_have_value("256")
    expect(page.get_by_label("Context, tokens")).to_have_value("1024")
    page.locator("#heat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("Context, tokens")).to_have_value("2048")
    expect(page.locator("#heat")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("Requests at once")).to_have_value("128")
    page.get_by_text("The same as a table").click()
    cell = page.get_by_role("button", name=re.compile("^256 x 40,960 tokens: short by"))
    expect(cell).to_be_visible()
    opened.audit()
    cell.click()
    headline(page, "Refused: short by")
    expect(page.locator("#heat-table [aria-current]")).to_have_accessible_name(re.compile("^256 x 40,960 tokens"))
    page.go_back()
    expect(page.get_by_label("Requests at once")).to_have_value("128")
    headline(page, "Fits")


def test_the_count_of_gpus_and_tensor_parallel_size_follow_each_other(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    expect(page.get_by_label("How many")).to_have_value("4")
    page.get_by_label("How many").fill("8")
    expect(page.get_by_label("Tensor", exact=True)).to_have_value("8")
    expect(page.locator(".subject")).to_contain_text("tp8")
    page.get_by_label("Pipeline").fill("2")
    expect(page.get_by_label("How many")).to_have_value("16")
    expect(page.locator(".subject")).to_contain_text("tp8 pp2")
    page.get_by_label("How many").fill("9")
    page.get_by_label("How many").press("Enter")
    expect(page.get_by_label("How many")).to_have_value("8")
    expect(page.locator(".subject")).to_contain_text("tp4 pp2")


def test_what_is_refused_although_there_is_room_is_not_shown_as_short(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", kv_bytes="1GiB", **QWEN)
    headline(page, "Refused")
    drawn(page)
    page.get_by_text("The same as a table").click()
    cell = page.get_by_role("button", name=re.compile("^4 x 32,768 tokens: refused$"))
    expect(cell).to_have_text("refused")
    expect(cell).to_have_class("no")


def test_flags_are_copied_and_files_saved(open_page) -> None:
    opened = open_page(permissions=["clipboard-read", "clipboard-write"])
    opened.page.clock.install()
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    drawn(page)
    page.clock.pause_at(
        page.evaluate("Date.now() + 86_400_000")
    )  # or a slow machine looks after "Copied" is gone again
    page.get_by_role("button", name="Copy command").click()
    expect(page.locator("[data-copy=flags]")).to_have_text("Copied")
    expect(page.locator("#announce")).to_have_text("Copied")
    page.clock.run_for(1500)
    expect(page.locator("[data-copy=flags]")).to_have_text("Copy command")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("vllm serve ")
    assert "--tensor-parallel-size 4 --max-model-len 32768" in copied
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#share")).to_have_text("Copied")
    page.clock.resume()
    expect(page.locator("#share")).to_have_text("Copy link")
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url
    with page.expect_download() as caught:
        page.get_by_role("button", name="Save JSON").click()
    document = json.loads(Path(caught.value.path()).read_text())
    assert (document["schema"], document["fits"], document["ranks"][0]["fixed_bytes"]) == (
        "tonnage.plan/1", True, 66_458_813_248,
    )  # fmt: skip
    with page.expect_download() as caught:
        page.get_by_role("link", name="Save HTML").click()
    assert "27.200" in Path(caught.value.path()).read_text()


def test_a_page_that_may_not_copy_says_so(opened) -> None:
    opened.page.add_init_script("Object.defineProperty(navigator, 'clipboard', {})")  # as over plain http
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    drawn(page)
    page.get_by_role("button", name="Copy command").click()
    expect(page.locator("#announce")).to_have_text("Cannot copy")


def test_two_plans_stand_side_by_side(opened) -> None:
    page = opened.go(K31_NAME, **K31)
    headline(page, "Refused")
    page.get_by_role("button", name="Pin as A").click()
    compared = page.get_by_role("region", name="A against B")
    expect(compared).to_contain_text("It is refused, as before.")
    page.get_by_label("Conversion").select_option("mxfp8")
    expect(compared).to_contain_text("It fits; before it was refused. The fullest rank needs 5.702 GiB less")
    expect(compared.get_by_role("img")).to_have_count(2)
    expect(compared.get_by_role("row", name=re.compile("^weights.recurrent"))).to_contain_text("-2.056 GiB")
    opened.audit()
    shared = page.url
    compared.get_by_role("button", name="Back to A").click()
    headline(page, "Refused")
    compared.get_by_role("button", name="Unpin A").click()
    expect(compared).to_have_count(0)
    page.goto(shared)
    expect(compared).to_contain_text("It fits; before it was refused.")


def test_a_log_stands_beside_the_plan(opened) -> None:
    page = opened.go("meta-llama__Meta-Llama-3.1-8B.json", gpu="rtx-5090", context="8192")
    headline(page, "Fits")
    log, answer = DATA / "logs" / "vllm_0_27_tp1.log", page.locator("#log-answer")
    page.locator("#log-file").set_input_files(log)
    expect(answer).to_contain_text("The log is of another model than the plan")
    alike = log.read_bytes().replace(b"Mixed-30B", b"Meta-Llama-3.1-8B")
    page.locator("#log-file").set_input_files({"name": "serve.log", "mimeType": "text/plain", "buffer": alike})
    expect(answer).to_contain_text("A measurement is over its bound")
    expect(answer.get_by_role("row", name=re.compile("weights 17.050"))).to_contain_text("over its bound")
    opened.audit()
    page.get_by_label("Start-up log").fill("a line of nothing")
    page.get_by_role("button", name="Compare with the plan").click()
    expect(answer).to_contain_text("No line of a known engine")


def test_an_address_opens_the_page_it_was_copied_from(opened, open_page) -> None:
    page = opened.go()
    page.get_by_role("radio", name="Config").check()
    page.locator("#config-file").set_input_files(CONFIGS / "Qwen__Qwen3-8B.json")
    headline(page, "Fits")
    page.get_by_label("GPU", exact=True).select_option("h100")
    page.get_by_label("KV cache").select_option("fp8")
    page.get_by_text("Memory and engine").click()
    page.get_by_label("Reserve per GPU").fill("2GiB")
    page.get_by_label("No CUDA graphs").check()
    expect(page.locator("#verdict")).to_have_attribute("data-query", re.compile("reserve=2GiB&eager=on"))
    assert "#config=" in page.url
    verdict, address = page.locator("#verdict").inner_text(), page.url
    other = open_page().page
    other.goto(address)
    expect(other.locator("#verdict")).to_have_text(re.compile("Fits"))
    assert other.locator("#verdict").inner_text() == verdict
    assert (
        other.get_by_role("textbox", name="config.json").input_value()
        == (CONFIGS / "Qwen__Qwen3-8B.json").read_text().strip()
    )
    expect(other.get_by_label("Reserve per GPU")).to_have_value("2GiB")
    expect(other.get_by_label("No CUDA graphs")).to_be_checked()


def test_a_malformed_address_is_refused_politely(opened) -> None:
    page = opened.go(rank="1", tp="many")
    headline(page, "This cannot be planned")
    expect(page.locator(".problems")).to_contain_text("No setting of this page; found rank.")
    expect(page.locator("#tp-error")).to_have_text("Cannot be read; expected a whole number; found many.")
    expect(page.get_by_label("Tensor", exact=True)).to_have_attribute("aria-invalid", "true")
    opened.audit()
    page.get_by_role("link", name="Start afresh", exact=True).click()
    headline(page, "Choose a model")
    refused = [one for one in opened.complaints if "400 (Bad Request)" in one or "cannot be parsed" in one]
    assert refused == opened.complaints  # the browser's own words for what the page says itself
    opened.complaints.clear()


def test_a_problem_is_said_at_its_field_and_goes_with_it(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    headline(page, "Fits")
    page.get_by_text("Memory and engine").click()
    reserve = page.get_by_label("Reserve per GPU")
    reserve.fill("six")
    headline(page, "This cannot be planned")
    expect(reserve).to_have_attribute("aria-invalid", "true")
    expect(reserve).to_have_accessible_description(re.compile("Not a size; expected a number and a unit.*found 'six'"))
    expect(page.get_by_role("region", name="What else fits")).to_have_count(0)
    opened.audit()
    reserve.fill("6GiB")
    headline(page, "Fits: 21.200 GiB")
    expect(reserve).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("radio", name="Hub")).to_have_count(0)
    page.goto("/?source=hub&hub=org%2Fname")  # as a server with --hub would have it
    expect(page.locator("#hub-error")).to_have_text("Hub sources are not enabled; expected tonnage ui --hub.")
    expect(page.locator(".source-hub")).to_contain_text("it was started without --hub")


def test_dark_colours_follow_the_system_and_the_reader(open_page) -> None:
    opened = open_page(color_scheme="dark")
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    headline(page, "Fits")
    drawn(page)
    shade = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(shade)
    assert max(map(int, re.findall(r"\d+", dark)[:3])) < 40
    opened.audit()
    switch = page.get_by_role("button", name="Dark colours")
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    assert min(map(int, re.findall(r"\d+", page.evaluate(shade))[:3])) > 200
    page.reload()
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.click()
    assert page.evaluate(shade) == dark
    drawn(page)
    opened.audit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(open_page, scheme: str) -> None:
    opened = open_page(color_scheme=scheme, has_touch=True)
    opened.page.set_viewport_size({"width": 390, "height": 844})
    page = opened.go(K31_NAME, **K31)
    headline(page, "Refused")
    expect(page.locator("#pocket")).to_have_text("Refused: short by 5.469 GiB")
    expect(page.locator("#pocket")).to_be_in_viewport()
    page.get_by_role("button", name="Pin as A").click()
    expect(page.get_by_role("region", name="A against B")).to_be_visible()
    drawn(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    opened.audit()
    page.locator("#pocket").click()
    expect(page.locator("#headline")).to_be_in_viewport()


def test_it_is_used_by_keys_alone(opened) -> None:
    page = opened.go(K31_NAME, **K31)
    drawn(page)
    expect(page.get_by_role("button", name="conversion to MXFP8", exact=True)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the plan")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="conversion to MXFP8", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    headline(page, "Fits")
    expect(page.locator("#answer")).to_be_focused()


def test_the_latest_change_is_what_is_shown(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    headline(page, "Fits: 27.200 GiB")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route) if "context=1024" in route.request.post_data_json["query"] else route.continue_()

    page.route("**/view", hold)
    with page.expect_request(lambda one: one.url.endswith("/view") and "context=1024" in (one.post_data or "")):
        page.get_by_label("Context, tokens").fill("1024")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
    page.get_by_label("Context, tokens").fill("16384")
    headline(page, "Fits: 30.138 GiB")
    assert len(held) == 1
    held[0].abort()
    expect(page.locator("#answer")).not_to_have_attribute("aria-busy", "true")
    headline(page, "Fits: 30.138 GiB")
    assert state_of(page)["context"] == "16384"


def test_a_server_that_is_gone_is_said(opened) -> None:
    page = opened.go("Qwen__Qwen3-235B-A22B-FP8.json", **QWEN)
    headline(page, "Fits: 27.200 GiB")
    page.route("**/view", lambda route: route.abort())
    page.get_by_label("Context, tokens").fill("1024")
    expect(page.get_by_role("alert")).to_have_text(
        "The server does not answer. Is tonnage ui still running? What is shown is the last plan."
    )
    headline(page, "Fits: 27.200 GiB")
    opened.audit()
    page.unroute("**/view")
    page.get_by_label("Context, tokens").fill("2048")
    expect(page.get_by_role("alert")).to_be_hidden()
    headline(page, "Fits: 32.")
    assert all("ERR_FAILED" in one for one in opened.complaints)
    opened.complaints.clear()


def unharmed(page: Page) -> None:
    assert page.evaluate("() => [window.xss, document.baseURI.startsWith(location.origin)]") == [None, True]


def test_names_of_checkpoints_and_tensors_are_only_text(opened, hostile: Path) -> None:
    page = opened.go()
    options = page.get_by_label("Checkpoint", exact=True)
    for folder in sorted(hostile.iterdir()):
        options.select_option(str(folder))
    headline(page, "This cannot be planned")
    expect(page.locator(".problems li")).to_have_count(40)
    shown = page.locator(".problems").inner_text()
    assert "<img src=x onerror=window.xss=1>" in shown
    unharmed(page)
    options.select_option(str(min(hostile.iterdir())))
    expect(page.locator(".problems")).to_contain_text("<script>window.xss=1</script>")
    unharmed(page)


def test_settings_configs_and_logs_are_only_text(opened) -> None:
    page = opened.page
    texts = [name for name in NAMES if name not in ("source", "eager")]
    for first in range(0, len(PAYLOADS), len(texts)):
        state = dict(zip(texts, PAYLOADS[first : first + len(texts)], strict=False))
        page.goto(f"/?{urlencode(state | {'a': urlencode(state)})}")
        expect(page.locator(".problems").first).to_be_visible()
        unharmed(page)
    for payload in PAYLOADS[::4]:
        page.goto("/?source=config")
        page.get_by_role("textbox", name="config.json").fill(json.dumps(LLAMA | {"model_type": payload}))
        expect(page.locator(".problems li")).to_contain_text("found")
        unharmed(page)
    page.get_by_role("textbox", name="config.json").fill(json.dumps(LLAMA))
    headline(page, "Fits")
    log = (DATA / "logs" / "vllm_0_27_tp1.log").read_text()
    for payload in (one.replace("'", "") for one in PAYLOADS[::4]):
        page.get_by_label("Start-up log").fill(log.replace("example/Mixed-30B", payload))
        page.get_by_role("button", name="Compare with the plan").click()
        expect(page.locator("#log-answer")).to_contain_text(payload)
        unharmed(page)
    opened.complaints[:] = [one for one in opened.complaints if "400" not in one and "cannot be parsed" not in one]
