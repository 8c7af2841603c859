"""Seeds, everything that once broke a parser, and a few changed inputs: what `make fuzz` does for hours, in seconds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import attempt, der, figures, mutate, trees
from fuzz.every import TARGETS
from fuzz.target import CRASHES, PART, SEEDS, Target
from tonnage.errors import Problem, TonnageError

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))}
MOST_SEEDS = 12
MOST_CHANGED = 25
CASES = [path for path in sorted(CRASHES.rglob("*")) if path.is_file()]
TEXTS = st.text(st.sampled_from("a\ud800\udfff\x1b#\u00e9"), max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@pytest.mark.parametrize("path", CASES, ids=[path.relative_to(CRASHES).as_posix() for path in CASES])
def test_what_once_broke_a_parser_is_answered(path: Path) -> None:
    assert attempt.attempt(TARGETS[path.parent.name], path.read_bytes()) is None


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_comes_of_them_are_answered(name: str) -> None:
    target, rng = TARGETS[name], Random(name)
    seeds = target.seeds()
    assert seeds
    for raw in (*seeds[:: -(-len(seeds) // MOST_SEEDS)], *changed(target, rng)):
        finding = attempt.attempt(target, raw)
        assert finding is None, f"{finding.kind} {finding.place}\n{finding.text}\n{raw!r:.2000}"


def changed(target: Target, rng: Random) -> list[bytes]:
    """Return seeds after one change and after several."""
    found = []
    seeds = target.seeds()
    for _ in range(MOST_CHANGED):
        raw = rng.choice((*found[-4:], rng.choice(seeds)))
        found.append(target.mutate(raw, rng)[: target.longest])
    return found


def test_every_case_belongs_to_a_target() -> None:
    assert {path.parent.name for path in CASES} <= set(TARGETS)
    assert {path.name for path in SEEDS.iterdir()} <= {*TARGETS}


def test_the_page_names_every_target_and_every_case() -> None:
    page = (TESTS.parent / "docs" / "fuzzing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| ([\d,]+) \| ([\d,.]+) \| \d+ \| \d+ \| (\d+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == sorted(TARGETS)
    for name, _, _, found in rows:
        assert int(found) == len([path for path in CASES if path.parent.name == name]), name
    told = set(re.findall(r"`(\w+/[\w*-]+)`", page))
    assert all({f"{path.parent.name}/{path.name}", f"{path.parent.name}/*"} & told for path in CASES)


def test_the_figures_of_the_page_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, runs = tmp_path / "fuzzing.md", tmp_path / "figures.jsonl"
    page.write_text(figures.PAGE.read_text())
    monkeypatch.setattr(figures, "PAGE", page)
    run = {"target": "outputs", "executions": 1000, "cpu_seconds": 1.6, "edges": 7, "features": 8, "found": 0}
    runs.write_text("")
    monkeypatch.setattr("sys.argv", ["figures", str(runs)])
    before = page.read_text()
    figures.main()
    assert page.read_text() == before
    runs.write_text(json.dumps(run) + "\n" + json.dumps({**run, "edges": 6, "features": 9}) + "\n")
    figures.main()
    changed = set(page.read_text().splitlines()) - set(before.splitlines())
    assert "| `outputs` | Read the list of files a preparation may have written | 2,000 | 4 | 7 | 9 | 0 |" in changed
    assert len(changed) == 2


@pytest.mark.parametrize("name", TARGETS)
def test_changes_come_from_the_seed_alone(name: str) -> None:
    target = TARGETS[name]
    assert changed(target, Random(7)) == changed(target, Random(7))


# --- what is called a finding -----------------------------------------------------------------------------------------


def raising(error: Exception | None) -> Target:
    def run(_: bytes) -> None:
        if error is not None:
            raise error

    return Target(run=run, mutate=mutate.some_bytes, seeds=list)


FINDINGS = {
    "a value": (None, None),
    "a refusal": (TonnageError(Problem(where="a\x1b[2J", what="b")), None),
    "a refusal of nothing": (TonnageError(), "refusal without a problem"),
    "another exception": (KeyError("a"), "KeyError"),
    "a lack of memory": (MemoryError(), "MemoryError"),
    "an assertion": (AssertionError(), "AssertionError"),
}


@pytest.mark.parametrize(("error", "kind"), FINDINGS.values(), ids=FINDINGS)
def test_only_values_and_refusals_are_answers(error: Exception | None, kind: str | None) -> None:
    finding = attempt.attempt(raising(error), b"")
    assert (finding and finding.kind) == kind


def test_a_refusal_that_writes_to_the_terminal_is_a_finding() -> None:
    class RawError(TonnageError):
        def __str__(self) -> str:
            return "a\x1b[2J"

    finding = attempt.attempt(raising(RawError(Problem(where="a", what="b"))), b"")
    assert finding is not None
    assert finding.kind == "refusal not on its line"


def test_time_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CPU_SECONDS", -1)
    finding = attempt.attempt(raising(None), b"")
    assert finding is not None
    assert finding.kind == "slow"
    monkeypatch.undo()
    monkeypatch.setattr(attempt, "GROWTH_KIB", -1)
    finding = attempt.attempt(raising(None), b"")
    assert finding is not None
    assert finding.kind == "memory"


# --- mutators -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(document=DOCUMENTS)
def test_a_tree_is_written_as_it_was_read(document: object) -> None:
    text = json.dumps(document, separators=(",", ":"))
    assert trees.write(trees.read(text)) == text


def test_a_tree_keeps_duplicate_keys_and_the_spelling_of_numbers() -> None:
    text = '{"a":1,"a":[1.50,-0,1e999,' + "9" * 5000 + "]}"
    assert trees.write(trees.read(text)) == text


def test_der_is_written_as_it_was_read() -> None:
    for raw in TARGETS["certificates"].seeds():
        for one in raw.split(PART):
            tree = der.read(one)
            assert len(der.lists(tree)) > 10
            assert b"".join(map(der.written, tree)) == one
            assert x509.load_der_x509_certificate(one).public_bytes(Encoding.DER) == one


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_a_changed_header_has_its_length_or_is_changed_as_bytes(seed: int) -> None:
    raw = TARGETS["matching"].seeds()[0]
    other = mutate.shard_file(raw, Random(seed))
    payload = raw[8 + int.from_bytes(raw[:8], "little") :]
    length = int.from_bytes(other[:8], "little")
    assert other[8 + length :] == payload or abs(len(other) - len(raw)) < 2000


def test_the_runner_says_how_much_was_tried(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fuzz", "--seconds", "0.4", "--work", tmp_path, "outputs", "command_words"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == ["outputs", "command_words"]
    assert all(row["executions"] > 0 and row["cpu_seconds"] >= 0.2 and row["found"] == 0 for row in rows)
    assert f"{sum(row['executions'] for row in rows):,} executions" in done.stdout
    assert list((tmp_path / "found").iterdir()) == []


def test_the_runner_knows_its_targets(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fuzz", "--work", tmp_path, "no-such-target"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 2
    assert "no target no-such-target" in done.stderr


def test_what_was_found_is_kept_with_its_reason_and_counted_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fuzz.worker import Worker

    worker = Worker(raising(KeyError("a")), 1000, tmp_path, tmp_path)
    for raw in (b"first", b"second", b"first"):
        worker.feed(raw)
    name = f"run-{hashlib.sha256(b'first').hexdigest()[:12]}"
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.txt"}
    assert (tmp_path / name).read_bytes() == b"first"
    assert (tmp_path / f"{name}.txt").read_text().startswith("KeyError ")
    assert (worker.executions, worker.found) == (3, 1)
    assert "FOUND run: KeyError" in capfd.readouterr().err
