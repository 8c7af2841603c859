"""Pages that list what is in the code list all of it, and nothing that is not there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest

import tonnage
from components import SOURCE, components
from samples import load_script, opened
from tonnage.api import PlanRequest, plan_checkpoint
from tonnage.engines import ENGINES
from tonnage.profile import parse_profile
from tonnage.recipes import cache_rules, loader
from tonnage.recipes.expression_functions import FUNCTIONS
from tonnage.recipes.schema import CACHE_KEYS, ROLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
CODE = re.compile(r"`([^`]+)`")


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of every table of a page."""
    lines = (DOCS / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]


# --- the memory model --------------------------------------------------------------------------------------------


def test_every_line_the_code_makes_has_its_row_with_where_it_is_made():
    said = [row for row in rows("memory-model.md") if row[-1].endswith(".py`")]
    named = [CODE.findall(row[0])[0] for row in said]
    assert [name for name, times in Counter(named).items() if times > 1] == []
    assert {name: set(CODE.findall(row[-1])) for name, row in zip(named, said, strict=True)} == components()
    for row in said:
        line, formula, basis, source, _ = row
        assert formula, line
        assert set(re.findall(r"\w+", basis)) & {"exact", "modelled", "calibrated", "assumed"}, line
        assert source, line


@pytest.mark.parametrize("engine", ENGINES)
def test_lines_of_plans_are_those_of_the_page(engine):
    names = {re.sub(r"\b[A-Z]+\b", "[a-z_]+", name) for name in components()}
    request = PlanRequest(tp=2, engine=engine, profile=parse_profile("c4-p4096", context_tokens=4096), reserve_bytes=1)
    for model in ("Qwen__Qwen3-8B", "Qwen__Qwen3-30B-A3B", "deepseek-ai__DeepSeek-V2-Lite"):
        plan = plan_checkpoint(opened(model), request)
        for line in plan.ranks[0].lines:
            assert any(re.fullmatch(name, line.component) for name in names), line


# --- recipes -----------------------------------------------------------------------------------------------------


def keys_of(heading: str) -> set[str]:
    """Return the keys that the tables below a heading of the page on recipes have rows for."""
    text = (DOCS / "recipes.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = [line.strip("| ").split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {key for cell in first for key in CODE.findall(cell)}


def test_page_on_recipes_has_every_key():
    assert keys_of("Top of a file") == loader._TOP_KEYS
    assert keys_of("A module") == loader._RULE_KEYS
    assert keys_of("An engine's exception") == loader._ENGINE_KEYS | {"rows_multiple"}
    assert keys_of("An include") == loader._INCLUDE_KEYS
    assert keys_of("A cache") == {*cache_rules._COMMON, *CACHE_KEYS}


def test_page_on_recipes_has_what_caches_need_roles_functions_and_facts_of_families():
    page = (DOCS / "recipes.md").read_text()
    for kind, (must, may) in CACHE_KEYS.items():
        wanted = [", ".join(f"`{key}`" for key in keys) for keys in (must, may)]
        assert f"| `{kind}` | {wanted[0]} | {wanted[1]} |" in page
    assert {role for role in ROLES if f"`{role}`" not in page} == set()
    assert {name for name in FUNCTIONS if f"`{name}" not in page} == set()
    families = tomllib.loads((SOURCE / "recipes" / "families.toml").read_text())
    assert {key for facts in families.values() for key in facts if f"`{key}`" not in page} == set()


# --- messages ----------------------------------------------------------------------------------------------------


@cache
def texts() -> set[str]:
    """Return every text of the code; what is put in when it runs is an ellipsis."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found


def pattern_of(message: str) -> re.Pattern[str]:
    """Return what matches a whole text of the code that is this message."""
    return re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)


def test_every_message_of_the_page_is_in_the_code():
    known = texts()
    quoted = [
        message for row in rows("troubleshooting.md") if row[0].startswith("`") for message in CODE.findall(row[0])
    ]
    assert len(quoted) > 80
    assert [said for said in quoted if said not in known and not any(map(pattern_of(said).fullmatch, known))] == []


def test_a_message_that_is_not_in_the_code_is_missed():
    assert not any(pattern_of("weights are sad").fullmatch(text) for text in (*texts(), "weights are sad today"))
    assert pattern_of("weights are …").fullmatch("weights are sad today")


# --- the site ----------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_nav_once():
    nav = (DOCS.parent / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert Counter(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == Counter(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_page_on_python_has_every_public_name_and_no_other():
    named = re.findall(r"^::: (\S+)$", (DOCS / "python.md").read_text(), re.MULTILINE)
    assert {f"tonnage.{name}" for name in tonnage.__all__} - {"tonnage.__version__"} <= set(named)
    assert [name for name in named if resolve_name(name) is None] == []


def test_pages_may_link_to_other_servers_and_load_nothing_from_them():
    fetched = load_script("docs_site").fetched_elsewhere
    assert fetched('<a href="https://x.org">x</a><link rel="next" href="https://x.org/2"><img src="a.png">') == []
    assert fetched('<script src="//cdn.x.org/a.js"></script>') == ["//cdn.x.org/a.js"]
    assert fetched('<link rel="stylesheet" href="https://x.org/a.css">') == ["https://x.org/a.css"]
