"""What SECURITY.md promises: each line of its tables names tests that exist, and some promises are held here."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fuzz.target import SEEDS
from samples import LLAMA
from tonnage.cli import app
from tonnage.errors import TonnageError
from tonnage.observe.io import observe_blocks
from tonnage.observe.reader import ENGINES
from tonnage.observe.scan import LONGEST_LINE

ROOT = Path(__file__).resolve().parent.parent
POLICY = (ROOT / "SECURITY.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [line for line in POLICY.splitlines() if line.startswith("| ")]


@cache
def functions(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^def (\w+)\(", (ROOT / path).read_text(), re.MULTILINE))


# --- the tables -------------------------------------------------------------------------------------------------------


def test_every_test_the_policy_names_exists() -> None:
    named = NAMED.findall(POLICY)
    assert len(named) > 40
    for path, name in named:
        assert name in functions(path), f"{path}::{name}"


def test_every_promise_of_the_policy_names_a_test() -> None:
    table = [row for row in ROWS if not row.startswith(("| ---", "| game", "| input"))]
    assert len(table) > 30
    assert [row for row in table if not NAMED.search(row)] == []


# --- nothing is unpacked, nothing is executed ---------------------------------------------------------------------------

UNPACKERS = frozenset(
    [
        "bz2",
        "gzip",
        "lzma",
        "marshal",
        "pickle",
        "shelve",
        "tarfile",
        "xml",
        "yaml",
        "zipfile",
        "zlib",
        "zstandard",
        "brotli",
        "dill",
        "cloudpickle",
        "joblib",
    ]
)
OWN_PROCESSES = {"prepare/pool.py": {"pickle"}}
"""Catches what its pickles raise: a run and its workers talk over a socket pair nobody else has."""
EXECUTORS = frozenset({"eval", "exec", "compile", "__import__"})


WORDS = re.compile(rf"\b(?:{'|'.join(sorted(UNPACKERS | EXECUTORS | {'shell'}))})\b")


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Return the modules that hold one of the words at all."""
    source = ROOT / "src" / "tonnage"
    found = ((path, path.read_text()) for path in sorted(source.rglob("*.py")))
    return tuple((path.relative_to(source).as_posix(), ast.parse(text)) for path, text in found if WORDS.search(text))


def imported(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names = plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names - {"xml.sax.saxutils"}}  # which writes, and reads nothing


def test_no_archive_is_opened_and_nothing_is_unpacked() -> None:
    found = {name: imported(tree) & UNPACKERS for name, tree in modules()}
    assert {name: what for name, what in found.items() if what and what - {"zlib"}} == OWN_PROCESSES
    for name, tree in modules():
        if "zlib" in found[name]:  # a checksum is no decompression
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_zlib(node.value)}
            assert used <= {"crc32", "adler32"}, name


def is_zlib(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "zlib"


def test_no_text_is_executed() -> None:
    for name, tree in modules():
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & EXECUTORS, name
        shells = [
            key for node in ast.walk(tree) if isinstance(node, ast.Call) for key in node.keywords if key.arg == "shell"
        ]
        assert not shells, name


# --- terminals ----------------------------------------------------------------------------------------------------------

EVIL = "\x1b[2J\x9b31m\u202e\x07\n[bold]b[/bold]\x1b]0;title\x07"
PLAN, MEASURED = SEEDS / "package_documents" / "plan.json", SEEDS / "measurement" / "small.json"
CREDIT = next((ROOT / "src" / "tonnage" / "calibrations" / "credit").glob("*.json"))
CONFIG = ROOT / "tests" / "data" / "configs" / "Qwen__Qwen3-0.6B.json"
LOG = ROOT / "tests" / "data" / "logs" / "vllm_0_26_tp2_colours_crlf.log"
DOCUMENTS = {
    "a plan": (PLAN, ["explain", "--plan", "FILE", "--measured", MEASURED], ["observe", LOG, "--plan", "FILE"]),
    "a measurement": (
        MEASURED,
        ["explain", "--plan", PLAN, "--measured", "FILE"],
        ["calibrate", CONFIG, "--measured", "FILE", "--tp", "2"],
    ),
    "a record": (CREDIT, ["calibrations", "show", "FILE"], ["plan", CONFIG, "--tp", "2", "--estimator", "credit", "--calibration", "FILE"]),
    "a config": (CONFIG, ["inspect", "FILE"], ["flags", "FILE", "--engine", "vllm", "--gpu", "b200", "--profile", "c1-p64", "--context", "64"]),
}  # fmt: skip


def texts(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every text of a document."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from texts(value, (*path, key))
    elif isinstance(tree, str):
        yield path


def spoiled(source: Path, path: tuple[Any, ...]) -> str:
    """Return a document with one text made longer by what a terminal obeys."""
    document = here = json.loads(source.read_text())
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] += EVIL
    return json.dumps(document)


def said(*words: object) -> str:
    """Return everything a command says, its refusal included."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, TonnageError | SystemExit), done.exception
    refusal = str(done.exception) if isinstance(done.exception, TonnageError) else ""
    return done.output + refusal


@pytest.mark.parametrize(("source", "first", "second"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_no_text_of_a_document_reaches_the_terminal_raw(
    source: Path, first: list[object], second: list[object], tmp_path: Path
) -> None:
    paths = [*texts(json.loads(source.read_text()))]
    shown = 0
    for path in paths[:: -(-len(paths) // 8)]:
        (tmp_path / "spoiled.json").write_text(spoiled(source, path))
        for words in (first, second):
            text = said(*(tmp_path / "spoiled.json" if word == "FILE" else word for word in words))
            assert text
            assert not [c for c in text if not c.isprintable() and c != "\n"], (path, text)
            assert ("b[/bold]" in text) == ("[bold]b[/bold]" in text), "markup is obeyed"
            shown += "[bold]" in text
    assert shown, "nothing of it was said at all"


@pytest.mark.parametrize("name", [f"a{EVIL}".replace("/", "|"), "[bold]b[|bold]"])
def test_a_directory_of_any_name_reaches_the_terminal_escaped(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(LLAMA))
    (place / f"{name}.gguf").write_bytes(b"")  # named by a stranger, and by a note
    for words in (
        ["inspect", place],
        ["plan", place, "--tp", "2"],
        ["measure", place],
        ["observe", place],
        ["inspect", place / "x"],
    ):
        text = said(*words)
        assert "[bold]b[|" in text
        assert not [c for c in text if not c.isprintable() and c != "\n"], text


# --- time ---------------------------------------------------------------------------------------------------------------


def test_a_line_made_for_a_pattern_of_a_log_takes_time_that_grows_with_its_length() -> None:
    """Every marker, then what each kind of repeat in a pattern could go back over, over and over."""
    for fill in (b"9", b"9,", b" ", b"'a'='a' ", b"a=1, ", b"1.1 GiB ", b"(((", b"\x1b[1;1", b"a"):
        for engine in ENGINES:
            markers = {one.marker.encode() for one in engine.patterns}
            lines = [marker + fill * (LONGEST_LINE // 8 // len(fill)) for marker in markers]
            lines.append(b" ".join(markers) + fill * (LONGEST_LINE // len(fill)))
            began = time.process_time()
            observe_blocks(iter([b"\n".join(lines) + b"\n"]))
            assert time.process_time() - began < 0.02 * len(lines) + 5, (engine.name, fill)
