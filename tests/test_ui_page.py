"""The page as it is without a browser: whole without scripts, and every text in it no more than text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest

from samples import LLAMA
from tonnage.ui.messages import HTML, Answer
from tonnage.ui.settings import Settings
from tonnage.ui.shelf import Shelf
from tonnage.ui.state import NAMES
from tonnage.ui.worker import HANDLERS

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
LOGS = ROOT / "tests" / "data" / "logs"
PAYLOADS = (ROOT / "tests" / "data" / "xss.txt").read_text().splitlines()
QWEN = {"checkpoint": str(CONFIGS / "Qwen__Qwen3-235B-A22B-FP8.json"), "tp": "4"}
FEW = ("engine", "gpu", "kv_dtype", "draft", "checkpoint", "reserve", "draft_method", "convert", "tp")


class Shape(HTMLParser):
    """What a page is made of: elements and the names of their attributes, in order, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.values += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)

    def valued(self, tag: str, name: str) -> list[str]:
        return [value for found, attribute, value in self.values if (found, attribute) == (tag, name)]


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(Settings(directories=(str(CONFIGS),)))


def page(shelf: Shelf, **state: str) -> str:
    return shown(HANDLERS["page"](shelf, urlencode(state).encode()))


def part(shelf: Shelf, name: str, state: dict[str, str], **more: object) -> str:
    return shown(HANDLERS[name](shelf, json.dumps({"query": urlencode(state), **more}).encode()))


def shown(answer: Answer) -> str:
    assert answer.media == HTML
    return answer.content.decode()


def test_the_page_is_whole_without_scripts(shelf) -> None:
    html = page(shelf, **QWEN)
    found = Shape(html)
    assert "Fits: 27.200 GiB to spare" in found.text
    assert "56,787,959,808" in found.text  # weights.expert, as the README has it
    assert "/report?" + urlencode(QWEN) in found.valued("a", "href")
    assert "vllm serve Qwen__Qwen3-235B-A22B-FP8 --tensor-parallel-size 4" in html
    assert ("form", "method", "get") in found.values
    named = set(found.valued("input", "name")) | set(found.valued("select", "name"))
    assert {"checkpoint", "tp", "gpu", "context", "convert"} <= named


def test_nothing_of_the_page_is_from_elsewhere_or_inline(shelf) -> None:
    found = Shape(page(shelf, **QWEN))
    assert found.valued("script", "src") == ["/static/theme.js", "/static/page.js"]
    assert [name for name, _ in found.elements].count("script") == 2
    assert "style" not in [name for name, _ in found.elements]
    assert not [name for _, names in found.elements for name in names if name == "style" or name.startswith("on")]
    links = [value for name in ("href", "src", "action") for _, attribute, value in found.values if attribute == name]
    assert all(link.startswith(("/", "?", "#")) for link in links)


def test_tokens_may_be_written_short_and_stand_in_the_form_as_typed(shelf) -> None:
    short, long = (
        Shape(page(shelf, **QWEN | {"context": context, "prefill": prefill}))
        for context, prefill in (("8k", "2K"), ("8192", "2048"))
    )
    assert {"8k", "2K"} <= set(short.valued("input", "value"))
    verdicts = [
        next(text for text in found.text if text.startswith(("Fits: ", "Refused: "))) for found in (short, long)
    ]
    assert verdicts[0] == verdicts[1]


def test_a_refused_plan_has_a_button_for_each_suggestion(shelf) -> None:
    html = page(shelf, **QWEN | {"context": "40960", "concurrency": "64"})
    found = Shape(html)
    assert any(text.startswith("Refused: short by ") for text in found.text)
    queries = found.valued("button", "data-query")
    assert len(queries) == len(found.valued("form", "action")) - 1 >= 2
    for query in queries:
        again = HANDLERS["page"](shelf, query.encode())
        assert "Fits: " in again.content.decode()
    looked_for = part(shelf, "view-suggestions", QWEN | {"context": "40960", "concurrency": "64"})
    assert Shape(looked_for).valued("button", "data-query") == queries


NO_LAUNCH = {
    "split": ({"engine": "split"}, "Prepared ranks are launched by what they are prepared for: choose its engine."),
    "no profile": (
        {"concurrency": "", "prefill": "", "context": ""},
        "Say how many requests of which context are served, and there is a command.",
    ),
    "no command": ({"draft_method": "dspark", "draft_tokens": "4"}, None),
}


def test_the_command_of_a_page_is_for_the_plan_it_shows(shelf) -> None:
    model = {"checkpoint": str(CONFIGS / "Qwen__Qwen3-8B.json")}
    found = Shape(page(shelf, **QWEN | model | {"convert": "mxfp8", "utilization": "0.8", "draft_bytes": "1GiB"})).text
    (command,) = (text for text in found if text.startswith("vllm serve "))
    assert command.startswith("vllm serve Qwen__Qwen3-8B-mxfp8 ")
    assert " --gpu-memory-utilization 0.8 " in command
    notes = [text for text in found if "stands in for what" in text or "left for a draft" in text]
    assert len(notes) == 2


@pytest.mark.parametrize(("state", "words"), NO_LAUNCH.values(), ids=NO_LAUNCH)
def test_a_plan_without_a_launch_command_says_why(shelf, state: dict[str, str], words: str | None) -> None:
    html = page(shelf, **QWEN | state)
    assert 'id="flags"' not in html
    if words is not None:
        assert words in Shape(html).text


def test_a_plan_that_asks_nothing_is_an_invitation(shelf) -> None:
    for state in ({}, {"gpu": "h100", "tp": "8"}, {"source": "hub"}, {"source": "config"}):
        assert "Choose a model" in Shape(page(shelf, **state)).text


def test_the_hub_is_offered_where_it_is_asked(shelf) -> None:
    radios = Shape(page(shelf)).valued("input", "value")
    assert ("directory" in radios, "hub" in radios) == (True, False)
    told = page(shelf, source="hub")
    assert "hub" in Shape(told).valued("input", "value")
    assert "This server asks no hub: it was started without --hub." in Shape(told).text
    asking = page(Shelf(Settings(directories=(str(CONFIGS),), hub=True)))
    assert "hub" in Shape(asking).valued("input", "value")
    assert "started without --hub" not in asking
    assert [' name="draft_hub"' in html for html in (told, asking)] == [False, True]


def test_a_malformed_address_is_refused_with_a_way_back(shelf) -> None:
    answer = HANDLERS["page"](shelf, b"tp=abc&rank=0&checkpoint=%FF")
    found = Shape(answer.content.decode())
    assert answer.status == 400
    assert "Cannot be read; expected a whole number; found abc." in found.text
    assert "No setting of this page; found rank." in found.text
    assert ("a", "href", "/") in found.values


AT_THE_FIELD = {
    "reserve": ({"reserve": "six"}, "reserve"),
    "axis": ({"tp": "3"}, None),
    "kv dtype": ({"kv_dtype": "fp3"}, "kv_dtype"),
    "gpu": ({"gpu": "h1000"}, "gpu"),
    "no count": ({"tp": "0"}, "tp"),
    "checkpoint": ({"checkpoint": "/etc/passwd"}, "checkpoint"),
    "hub": ({"source": "hub", "hub": "org/name"}, "hub"),
    "draft": ({"draft": "/nowhere"}, None),
    "method": ({"draft_method": "guess"}, "draft_method"),
}


@pytest.mark.parametrize(("state", "field"), AT_THE_FIELD.values(), ids=AT_THE_FIELD)
def test_a_problem_stands_at_the_setting_it_concerns(shelf, state: dict[str, str], field: str | None) -> None:
    html = page(shelf, **QWEN | state)
    found = Shape(html)
    assert "This cannot be planned" in found.text
    if field is not None:
        assert field in found.valued("li", "data-fields")
        place = html.partition(f'id="{field}-error"')[2].partition("</p>")[0]
        assert "hidden" not in place.partition(">")[0]
        assert place.partition(">")[2].strip()


def test_two_plans_are_shown_side_by_side(shelf) -> None:
    pinned = urlencode(QWEN | {"context": "40960", "concurrency": "64"})
    html = part(shelf, "view", QWEN | {"a": pinned}, width=1000)
    found = Shape(html)
    assert "It fits; before it was refused." in html
    assert [id_ for id_ in found.valued("svg", "aria-labelledby") if id_.startswith("side-")] == [
        "side-a-title side-a-desc", "side-b-title side-b-desc",
    ]  # fmt: skip
    supplies = re.findall(r'class="tn-supply-guide" x1="([^"]+)"', html)
    assert supplies[0] == supplies[1]  # to one scale
    ids = [value for _, name, value in found.values if name == "id"]
    assert len(ids) == len(set(ids))
    assert "cache" in found.text


def test_a_log_is_held_against_the_plan(shelf) -> None:
    state = QWEN | {"checkpoint": str(CONFIGS / "meta-llama__Meta-Llama-3.1-8B.json"), "gpu": "rtx-5090"}
    log = (LOGS / "vllm_0_27_tp1.log").read_text()
    assert "The log is of another model than the plan" in part(shelf, "view-log", state | {"tp": "1"}, log=log)
    log = log.replace("Mixed-30B", "Meta-Llama-3.1-8B")
    over = part(shelf, "view-log", state | {"tp": "1"}, log=log)
    assert "A measurement is over its bound" in over
    assert {"over its bound", "within"} <= set(Shape(over).text)
    other = part(shelf, "view-log", state | {"tp": "2"}, log=log)
    assert "The log is of another tp than the plan; expected 2; found 1." in other
    assert "No line of a known engine" in part(shelf, "view-log", state, log="nothing")


def test_a_pasted_config_is_planned(shelf) -> None:
    state = {"source": "config", "gpu": "h100"}
    html = part(shelf, "view", state, config=json.dumps(LLAMA))
    assert "config.json" in Shape(html).text
    assert "Fits: " in html
    broken = Shape(part(shelf, "view", state, config='{"model_type": '))
    assert broken.valued("li", "data-fields") == ["config"]


def harmless(payload: str) -> str:
    """Return as much text, none of which means anything in a page."""
    return "".join("x" if letter.isalnum() else "-" for letter in payload).strip() or "x"


@pytest.mark.parametrize(("number", "payload"), list(enumerate(PAYLOADS)))
def test_a_payload_in_any_setting_is_only_text(shelf, number: int, payload: str) -> None:
    everywhere = {name: payload for name in NAMES if name != "source"}
    named = {FEW[number % len(FEW)]: payload}  # alone, so that it is what is refused
    for state in (everywhere, QWEN | named, QWEN | {"a": urlencode(QWEN | named)}):
        plain = {name: harmless(value) if payload in value else value for name, value in state.items() if name != "a"}
        if "a" in state:
            plain["a"] = urlencode(QWEN | {name: harmless(value) for name, value in named.items()})
        assert Shape(page(shelf, **state)).elements == Shape(page(shelf, **plain)).elements


def places(payload: str) -> Iterator[tuple[str, dict[str, object]]]:
    yield "view", {"config": json.dumps(LLAMA | {"model_type": payload})}
    yield "view", {"config": json.dumps(LLAMA | {"dtype": payload})}
    yield "view", {"config": json.dumps(LLAMA | {"hidden_size": payload})}
    yield "view", {"config": payload}
    log = (LOGS / "vllm_0_27_tp1.log").read_text().replace("example/Mixed-30B", payload.replace("'", ""))
    yield "view-log", {"config": json.dumps(LLAMA), "log": log}
    unknown = [line for line in log.splitlines() if "Model loading" not in line and "Free memory" not in line]
    yield "view-log", {"config": json.dumps(LLAMA), "log": "\n".join(unknown)}  # of which model, nobody can tell


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_in_a_config_or_a_log_is_only_text(shelf, payload: str) -> None:
    state = {"source": "config", "gpu": "h100"}
    for (name, body), (_, plain) in zip(places(payload), places(harmless(payload)), strict=True):
        assert Shape(part(shelf, name, state, **body)).elements == Shape(part(shelf, name, state, **plain)).elements


def test_payloads_as_names_of_checkpoints_and_tensors_are_only_text(tmp_path) -> None:
    pages = []
    for kind in (str, harmless):
        base = tmp_path / kind.__name__
        names = [kind(payload).replace("/", "_") for payload in PAYLOADS]
        for number, name in enumerate(names):
            directory = base / f"{number:02} {name}"
            directory.mkdir(parents=True)
            (directory / "config.json").write_text(json.dumps(LLAMA))
            header = {f"{number}.{kind(one)}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                      for number, one in enumerate(PAYLOADS)}  # fmt: skip
            raw = json.dumps(header).encode()
            (directory / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
        served = Shelf(Settings(directories=(str(base),)))
        pages.append([Shape(page(served, checkpoint=str(directory))) for directory in sorted(base.iterdir())[:3]])
    for hostile, plain in zip(*pages, strict=True):
        assert hostile.elements == plain.elements
        assert "This cannot be planned" in hostile.text
