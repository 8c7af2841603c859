"""The report as it is asked for: with a plan, of a saved plan, against another; written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from plan_documents import CONTROLS, XSS
from samples import LLAMA, file_contents
from tonnage.api import checkpoint_from_config, open_checkpoint
from tonnage.cli import app
from tonnage.errors import TonnageError, one_line
from tonnage.prepare.io import PrepareError

K31 = Path("tests/data/configs/Kimi-K3.1-Pro.json").absolute()
SMALL = ("--tp", "2", "--supply", "1GiB")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small config and a saved plan of it."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "small.json").write_text(json.dumps(LLAMA))
    return folder


def run(*words: object) -> Result:
    """Run the command in this process; a refusal is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, TonnageError):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def saved(place: Path) -> Path:
    path = place / "plan.json"
    path.write_text(run("plan", place / "small.json", *SMALL, "--json").stdout)
    return path


def test_a_report_is_written_beside_the_table(place: Path) -> None:
    done = run("plan", place / "small.json", *SMALL, "--html", place / "fits.html")
    page = (place / "fits.html").read_text()
    assert (done.exit_code, done.stderr) == (0, f"report: {place / 'fits.html'}\n")
    assert "FITS" in done.stdout
    assert page.startswith("<!doctype html>")
    assert "--tp 2 --supply 1GiB" in page


def test_a_refused_plan_is_written_and_exits_with_3(place: Path) -> None:
    done = run("plan", K31, "--tp", 8, "--supply", "94GiB", "--html", place / "refused.html", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["fits"] is False
    page = (place / "refused.html").read_text()
    assert "Refused" in page
    assert "88.393" not in page
    for suggestion in json.loads(done.stdout)["suggestions"]:
        assert f"<code>{suggestion}</code>" in page


def test_the_report_of_a_saved_plan_is_the_report_of_the_plan(place: Path, saved: Path) -> None:
    assert run("plan", place / "small.json", *SMALL, "--html", place / "one.html").exit_code == 0
    done = run("report", saved, "-o", place / "two.html")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"report: {place / 'two.html'}\n")
    assert (place / "one.html").read_bytes() == (place / "two.html").read_bytes()


def test_what_changed_is_in_the_table_and_in_the_report(place: Path, saved: Path) -> None:
    words = ("plan", place / "small.json", "--tp", 1, "--supply", "1GiB", "--against", saved)
    done = run(*words, "--html", place / "changed.html")
    assert done.exit_code == 0
    assert "changed: It fits, as before." in done.stdout
    assert "  ranks: tp2 -> tp1" in done.stdout
    assert "What changed" in (place / "changed.html").read_text()
    assert run("report", saved, "--against", saved, "-o", place / "same.html").exit_code == 0
    assert "The fullest rank needs the same" in (place / "same.html").read_text()


def test_what_changed_is_not_in_json(place: Path, saved: Path) -> None:
    with pytest.raises(TonnageError, match=r"--against: what changed is shown .*; expected --html, or no --json"):
        run("plan", place / "small.json", "--json", "--against", saved)


def test_nothing_is_written_over_without_force(tonnage, place: Path, saved: Path) -> None:
    other = place / "other.html"
    other.write_text("mine")
    for words in (("plan", place / "small.json", "--html", other), ("report", saved, "-o", other)):
        done = tonnage(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"tonnage: {other}: something else is there already; --force writes over it\n"
        assert other.read_text() == "mine"
    assert run("report", saved, "-o", other, "--force").exit_code == 0
    assert other.read_text().startswith("<!doctype html>")
    assert run("report", saved, "-o", other).exit_code == 0  # it is that already


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
def test_what_is_no_file_is_never_written_over(tmp_path: Path, saved: Path, force: tuple[str, ...]) -> None:
    pipe, folder = tmp_path / "pipe.html", tmp_path / "folder.html"
    os.mkfifo(pipe)
    folder.mkdir()
    for other in (pipe, folder):
        with pytest.raises(PrepareError, match="html: not a file, and not written over"):
            run("report", saved, "-o", other, *force)
    assert (pipe.is_fifo(), folder.is_dir()) == (True, True)


def test_where_a_report_is_stands_on_one_line(tmp_path: Path, saved: Path) -> None:
    done = run("report", saved, "-o", tmp_path / "two\nlines\x1b[31m.html")
    assert done.stderr.endswith("two\\nlines\\x1b[31m.html\n")


@pytest.mark.parametrize("module", ["jinja2", "markupsafe"])
def test_without_the_extra_nothing_is_written(place: Path, module: str) -> None:
    without = f"import sys; sys.modules['{module}'] = None; from tonnage.cli import main; main()"
    words = ("plan", place / "small.json", "--html", place / "never.html")
    done = subprocess.run(
        [sys.executable, "-c", without, *map(str, words)], capture_output=True, text=True, check=False
    )
    line = f"tonnage: {module} is not installed; it comes with `pip install 'tonnage[html]'`\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert not (place / "never.html").exists()


GARBAGE = {
    "nothing": (b"", "not JSON"),
    "no JSON": (b"plan", "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "another schema": (
        b'{"schema": "tonnage.fit/1"}',
        "not a plan; expected schema 'tonnage.plan/1'; found 'tonnage.fit/1'",
    ),
    "a plan of nothing": (b'{"schema": "tonnage.plan/1"}', "not a plan"),
    "twice": (b'{"schema": "tonnage.plan/1", "schema": "tonnage.plan/1"}', "duplicate key schema"),
    "deep": (b'{"schema": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
}


@pytest.mark.parametrize(("raw", "said"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_by_name_and_nothing_is_written(tmp_path: Path, place: Path, raw: bytes, said: str) -> None:
    (tmp_path / "bad.json").write_bytes(raw)
    before = file_contents(tmp_path)
    for words in (
        ("report", tmp_path / "bad.json"),
        ("report", place / "plan.json", "--against", tmp_path / "bad.json"),
    ):
        with pytest.raises(TonnageError) as refused:
            run(*words, "-o", tmp_path / "out.html")
        assert len(str(refused.value).splitlines()) == 1
        assert str(refused.value).startswith("bad.json: ")
        assert said in str(refused.value)
    assert file_contents(tmp_path) == before


NAMES = [text for text in (*XSS[::6], *CONTROLS) if not {"/", "\x00"} & set(text)]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_are_text(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    done = run("plan", source, "--html", tmp_path / "out.html", "--supply", "1GiB")
    assert [line for line in done.output.split("\n") if not line.isprintable()] == []
    assert one_line(name) in done.output
    page = (tmp_path / "out.html").read_text()
    assert page.count("<script>") == 1
    assert all(character.isprintable() or character == "\n" for character in page)


@pytest.mark.parametrize("text", XSS)
def test_words_of_a_config_are_text_in_a_refusal(text: str) -> None:
    for changes in ({"model_type": text}, {"hidden_size": text}, {text: {text: text}, "vocab_size": [text]}):
        with pytest.raises(TonnageError) as refused:
            checkpoint_from_config({**LLAMA, **changes}, name="config.json")
        assert all(line.isprintable() for line in str(refused.value).split("\n"))


@pytest.mark.parametrize("text", XSS)
def test_names_of_tensors_are_text_in_a_refusal(tmp_path: Path, text: str) -> None:
    header = json.dumps({text: {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(TonnageError) as refused:
        open_checkpoint(str(tmp_path))
    lines = str(refused.value).split("\n")
    assert all(line.isprintable() for line in lines)
    shown = ".*".join(map(re.escape, re.split(r"[#\d]+", one_line(text))))  # numbers are shown as those of many names
    assert any(re.search(shown, line) for line in lines)
