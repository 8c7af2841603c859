"""Bars in a terminal fit its width, cross the supply only where a rank is refused, and are ASCII where they must be."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_documents import REQUESTS, XSS, document_of, plan_documents, with_text
from samples import opened
from tonnage.api import plan_checkpoint
from tonnage.errors import one_line
from tonnage.report.saved import read_saved
from tonnage.report.tables import plan_table, render
from tonnage.report.terminal import RankBars, plain_text

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("tests/data/configs/Qwen__Qwen3-235B-A22B-FP8.json").absolute()
COMMAND = Path(sys.executable).with_name("tonnage")
BLOCKS = "█▓▒░"


def printed(document: dict[str, Any], width: int, *, plain: bool = False) -> list[str]:
    return render(RankBars(plan=read_saved(document)), width=width, plain=plain).splitlines()


@given(plan_documents(), st.integers(40, 200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_the_terminal(document: dict[str, Any], width: int, plain: bool) -> None:
    lines = printed(document, width, plain=plain)
    assert max(map(len, lines)) <= width
    if plain:
        assert all(line.isascii() for line in lines)


@given(plan_documents(), st.integers(40, 200))
@settings(max_examples=60, deadline=None)
def test_exactly_a_refused_rank_crosses_the_stroke(document: dict[str, Any], width: int) -> None:
    text = "\n".join(printed(document, width))
    short = any((rank["spare_bytes"] or 0) < 0 for rank in document["ranks"])
    assert bool(re.search(f"│[{BLOCKS}]", text)) == short
    assert (", short " in text) == short
    assert ("│" in text) == (document["supply_bytes"] is not None)


@given(plan_documents(), st.integers(72, 200))
@settings(max_examples=40, deadline=None)
def test_a_bar_is_as_long_as_its_share(document: dict[str, Any], width: int) -> None:
    lines = printed(document, width)
    given_bytes = document["cache"]["given_bytes"]
    needs = {
        rank["fixed_bytes"] + (rank["cache_bytes"] if given_bytes is None else given_bytes): rank
        for rank in document["ranks"]
    }
    longest = max(*needs, document["supply_bytes"] or 0, 1)
    rows = [line for line in lines if re.match(r"ranks? \d", line)]
    cells = max(sum(line.count(block) for block in f"{BLOCKS}·") for line in rows)
    for row in rows:
        filled = sum(row.count(block) for block in BLOCKS)
        assert any(abs(filled - needed * cells / longest) <= 1 + cells / 100 for needed in needs)


def test_ranks_that_are_alike_are_one_bar() -> None:
    lines = printed(document_of("converted"), 100)
    assert [line.split("  ")[0] for line in lines[:2]] == ["ranks 0-3", "ranks 4-7"]
    assert len(lines) == 3


def test_a_narrow_terminal_has_name_and_bar_below_each_other() -> None:
    assert printed(document_of("fits"), 40) == [
        "ranks 0-3  67.770 GiB, spare 27.200 GiB",
        "██████████████████████▓▒▒░░············│",
        "█ weights  ▓ beside them",
        "▒ up to the bounds  ░ cache  · spare",
        "│ supply 94.971 GiB",
    ]


def test_many_kinds_of_ranks_are_shown_as_those_that_need_most() -> None:
    document = document_of("no supply")
    rank = document["ranks"][0]
    document["topology"]["tp"] = 40
    document["ranks"] = [{**rank, "rank": number, "loading_bytes": number} for number in range(40)]
    lines = printed(document, 80)
    assert sum(line.startswith("rank ") for line in lines) == 16
    assert "and 24 more kinds of ranks that need less" in lines


@pytest.mark.parametrize("case", REQUESTS)
def test_a_plain_table_is_ascii_without_colour(case: str) -> None:
    name, request = REQUESTS[case]
    checkpoint = opened(name)
    table = plan_table(
        checkpoint, request, plan_checkpoint(checkpoint, request), (), before=read_saved(document_of("fits"))
    )
    text = render(table, width=100, plain=True)
    assert text.isascii()
    assert "\x1b" not in text
    assert "|" in text or request.supply is None
    assert "changed: " in text


def test_what_ascii_has_no_letter_for_is_escaped() -> None:
    assert plain_text("a · b… é 日") == "a - b... \\xe9 \\u65e5"


def test_the_table_says_what_changed_line_by_line() -> None:
    name, request = REQUESTS["fits"]
    checkpoint = opened(name)
    plan = plan_checkpoint(checkpoint, request)
    text = render(plan_table(checkpoint, request, plan, (), before=read_saved(document_of("refused"))), width=120)
    assert "changed: It fits; before it was refused. The fullest rank needs" in text
    assert "  ranks: tp2 -> tp4" in text
    assert re.search(
        r"^weights\.expert +113,575,919,616 +56,787,959,808 +-56,787,959,808 +-52\.888 GiB$", text, re.MULTILINE
    )


@pytest.mark.parametrize("text", XSS)
def test_texts_of_strangers_are_printable_lines(text: str) -> None:
    name, request = REQUESTS["no supply"]
    checkpoint = opened(name)
    plan = plan_checkpoint(checkpoint, request)
    before = read_saved(with_text(document_of("fits"), text))
    for plain in (False, True):
        shown = render(plan_table(checkpoint, request, plan, (), before=before), width=400, plain=plain)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert shown.isascii() or not plain
        word = one_line(text)
        assert (plain_text(word) if plain else word) in shown


def run(*words: object, columns: int, **environment: str) -> str:
    """Run the command in a terminal of its own."""
    keep = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
    main, other = pty.openpty()
    with subprocess.Popen(
        [COMMAND, *map(str, words)], stdout=other, stderr=other, stdin=other, close_fds=True,
        env={"TERM": "xterm-256color", "LANG": "C.UTF-8", **keep, "COLUMNS": str(columns), **environment},
    ):  # fmt: skip
        os.close(other)
        output = b""
        while True:
            try:
                block = os.read(main, 1 << 16)
            except OSError:  # Linux says so at the end
                break
            output += block
            if not block:
                break
    os.close(main)
    return output.decode().replace("\r\n", "\n")


PLAN = ("plan", CONFIG, "--tp", 4, "--supply", "60GiB")
ESCAPES = re.compile(r"\x1b\[[\d;]*m")


def test_a_terminal_has_colours_and_blocks_in_its_width() -> None:
    text = run(*PLAN, columns=50)
    assert "\x1b[34m█" in text
    assert "│ supply 60.000 GiB" in ESCAPES.sub("", text)
    bars = [line for line in ESCAPES.sub("", text).splitlines() if line.startswith("█████")]
    assert [len(bar) for bar in bars] == [50]


TERMINALS: dict[str, tuple[tuple[str, ...], dict[str, str], bool, bool]] = {
    "--plain": (("--plain",), {}, False, False),
    "NO_COLOR": ((), {"NO_COLOR": "1"}, False, True),
    "TERM=dumb": ((), {"TERM": "dumb"}, False, False),
    "no UTF-8": ((), {"PYTHONIOENCODING": "latin-1"}, True, False),
}


@pytest.mark.parametrize(("words", "environment", "colour", "blocks"), TERMINALS.values(), ids=TERMINALS)
def test_a_terminal_gets_what_it_asks_for(
    words: tuple[str, ...], environment: dict[str, str], colour: bool, blocks: bool
) -> None:
    text = run(*PLAN, *words, columns=80, **environment)
    assert bool(re.search(r"\x1b\[[\d;]*3\d", text)) == colour
    assert ("█" in text) == blocks
    assert ("####" in text) == (not blocks)


def test_a_pipe_gets_blocks_without_colour_at_110_columns() -> None:
    done = subprocess.run([COMMAND, *map(str, PLAN)], capture_output=True, text=True, check=True)
    (bar,) = (line for line in done.stdout.splitlines() if line.startswith("ranks 0-3  █"))
    assert "\x1b" not in done.stdout
    assert len(bar) == 110


def test_the_page_about_reports_shows_the_bars_of_the_readme() -> None:
    block = re.search(r"```text\n((?:.*\n)+?)```", (ROOT / "docs" / "report.md").read_text())
    assert block is not None
    assert block[1] in (ROOT / "README.md").read_text()
