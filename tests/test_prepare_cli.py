"""``tonnage prepare`` as users run it: what it prints, what it refuses, how it goes on after anything."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
from blake3 import blake3

from samples import LLAMA, PATIENCE, rehearse, until
from tonnage.checkpoint.config import parse_config
from tonnage.cli.progress import progress_line
from tonnage.prepare.run import Standing
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.units import unit_for

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = Path(sys.executable).with_name("tonnage")
SMALL: dict[str, Any] = {**LLAMA, "vocab_size": 301}
HELD = """
import os, sys, time

hold, sync = os.path.join(os.path.dirname(__file__), "hold"), os.fsync

def fsync(descriptor):
    if os.path.exists(hold):
        open(f"{hold}-{os.getpid()}", "w").close()
    while os.path.exists(hold):
        time.sleep(0.01)
    sync(descriptor)

if "tonnage.prepare.worker" in sys.orig_argv:
    os.fsync = fsync
"""
"""A ``sitecustomize`` by which workers that wrote their first file say so and wait, as long as ``hold`` is beside it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of several shard files; not to be changed."""
    path = tmp_path_factory.mktemp("source") / "small"
    rehearse(path, SMALL, sharded=True)
    (path / "tokenizer.json").write_text('{"a": 1}')
    return path


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    """The same, to be changed: size and time of every file are equal."""
    return shutil.copytree(source, tmp_path / "small")


def write_site(site: Path) -> Path:
    """Write what keeps preparations in the middle; return its directory, for the path of modules."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(HELD)
    (site / "hold").touch()
    return site


def begun(site: Path, source: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    """Begin to prepare two ranks; no worker finishes its first file."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [COMMAND, "prepare", source, "--tp", "2", "-o", out, *words], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def prepared(tonnage: Tonnage, *words: object) -> dict[str, Any]:
    """Prepare; return the summary."""
    done = tonnage("prepare", *words, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def refused(tonnage: Tonnage, *words: object) -> str:
    """Prepare in vain; return what it said."""
    done = tonnage("prepare", *words)
    assert done.returncode == 2, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


# --- what it writes ---------------------------------------------------------------------------------------------------


def test_what_is_planned_is_written(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = prepared(tonnage, source, "--tp", "2", "--convert", "mxfp8", "-o", out)
    plan = json.loads(tonnage("plan", source, "--tp", "2", "--convert", "mxfp8", "--json").stdout)
    assert [rank["planned_bytes"] for rank in document["ranks"]] == [rank["weights_bytes"] for rank in plan["ranks"]]
    assert document == json.loads((out / "prepare.json").read_bytes())
    assert document["schema"] == "tonnage.prepare/1"
    for rank in document["ranks"]:
        payload = 0
        for file in rank["files"]:
            raw = (out / file["path"]).read_bytes()
            digests = blake3(raw).hexdigest(), hashlib.sha256(raw).hexdigest()
            assert (len(raw), *digests) == (file["file_bytes"], file["digest"], file["sha256"])
            payload += sum(len(tensor["data"]) for _, tensor in safetensors.deserialize(raw))
        assert payload == rank["payload_bytes"] == rank["planned_bytes"]
    converted = {tensor["tensor"] for tensor in document["converted"]}
    assert len(converted) == 7
    assert all(20 < tensor["sqnr_db"] < 60 for tensor in document["converted"])
    written = {file["path"] for rank in document["ranks"] for file in rank["files"]}
    written |= {file["path"] for file in document["files"]} | {"prepare.json"}
    assert written == set(files(out))
    assert "tokenizer.json" in written


def test_every_source_file_is_named_with_its_digest(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    sums = {path.name: (path.stat().st_size, blake3(path.read_bytes()).hexdigest()) for path in source.iterdir()}
    del sums["model.safetensors.index.json"]  # what it says is in the digest of the checkpoint
    for words in (("--tp", "2"), ("--layout", "hf", "--convert", "mxfp8")):
        out = tmp_path / words[1]
        document = prepared(tonnage, source, *words, "-o", out)
        assert {one["name"]: (one["nbytes"], one["digest"]) for one in document["sources"]} == sums
    plain = prepared(tonnage, source, *words, "-o", tmp_path / "plain", "--no-source-digests")
    copied = {"tokenizer.json": sums["tokenizer.json"][1]}  # the config is written anew
    assert {one["name"]: one["digest"] for one in plain["sources"]} == dict.fromkeys(sums) | copied
    same = ("identity", "ranks", "files", "converted", "plan")
    assert [plain[field] for field in same] == [document[field] for field in same]


@pytest.mark.parametrize(
    ("words", "further"),
    [(("--tp", "2", "--engine", "vllm", "--convert", "mxfp8"), ()), (("--tp", "4"), ("--ranks", "1,3"))],
    ids=["all ranks", "some ranks"],
)
def test_the_plan_on_record_is_the_one_the_command_prints(
    tonnage: Tonnage, source: Path, tmp_path: Path, words: tuple[str, ...], further: tuple[str, ...]
) -> None:
    document = prepared(tonnage, source, *words, *further, "-o", tmp_path / "out")
    printed = json.loads(tonnage("plan", source, *words, "--json").stdout)
    assert document["plan"] == printed | {"options": []}  # what was typed is of the command alone
    weights = {rank["rank"]: rank["weights_bytes"] for rank in document["plan"]["ranks"]}
    assert [weights[rank["rank"]] for rank in document["ranks"]] == [
        rank["payload_bytes"] for rank in document["ranks"]
    ]


def test_the_table_sets_planned_against_written(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    done = tonnage("prepare", source, "--tp", "2", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    header, first, second, *_, last = done.stdout.splitlines()
    assert header.split() == ["rank", "planned", "bytes", "written", "bytes", "difference", "file", "bytes", "files"]
    assert first.split()[1] == first.split()[2]
    assert second.split()[3] == "0"
    assert last.endswith("planned == written on every rank")
    assert "jobs" in done.stderr.splitlines()[0]


def test_a_dry_run_writes_nothing(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tonnage("prepare", source, "--tp", "2", "--convert", "mxfp8", "-o", out, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    assert "at an assumed 500 MB/s written" in done.stdout
    asked = json.loads(
        tonnage("prepare", source, "--tp", "2", "--convert", "mxfp8", "-o", out, "--dry-run", "--json").stdout
    )
    assert f" {unit_for(asked['disk_free_bytes'])[0]} free\n" in done.stdout
    document = prepared(tonnage, source, "--tp", "2", "--convert", "mxfp8", "-o", out)
    assert [rank["payload_bytes"] for rank in asked["ranks"]] == [rank["payload_bytes"] for rank in document["ranks"]]
    assert asked["written_bytes"] == sum(len(raw) for name, raw in files(out).items() if name != "prepare.json")


def test_ranks_of_several_hosts_together_are_all_ranks(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    prepared(tonnage, source, "--tp", "4", "-o", tmp_path / "all")
    prepared(tonnage, source, "--tp", "4", "-o", tmp_path / "a", "--ranks", "0-1")
    prepared(tonnage, source, "--tp", "4", "-o", tmp_path / "b", "--ranks", "2,3")
    both = {**files(tmp_path / "a"), **files(tmp_path / "b")}
    every = files(tmp_path / "all")
    assert both.keys() == every.keys()
    assert [name for name in every if name != "prepare.json" and both[name] != every[name]] == []


RANKS = {"no number": "a", "backwards": "3-1", "empty": "", "too large": "0-99999", "beyond": "0-2"}
RANKS |= {"endless": "9" * 5000, "endless range": "0-" + "9" * 5000, "open": "0-", "other digits": "²"}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_wrong_ranks_are_refused(tonnage: Tonnage, source: Path, tmp_path: Path, ranks: str) -> None:
    said = refused(tonnage, source, "--tp", "2", "-o", tmp_path / "out", "--ranks", ranks)
    assert "--ranks" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_complete_preparation_is_left_alone(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = prepared(tonnage, source, "-o", out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    (out / "manifest.json").write_text("of an export")
    assert "nothing was written: it was prepared so before\n" in tonnage("prepare", source, "-o", out).stderr
    assert prepared(tonnage, source, "-o", out) == document
    assert {path: path.stat().st_mtime_ns for path in before if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }


def test_who_serves_ranks_that_are_cut_by_no_engine_is_said(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    said = "cut by the rules of split, not of an engine"
    cases: dict[tuple[str, ...], bool] = {
        ("--tp", "2"): True,
        ("--tp", "1"): False,
        ("--tp", "2", "--engine", "vllm"): False,
        ("--layout", "hf"): False,
    }
    for number, (words, noted) in enumerate(cases.items()):
        done = tonnage("prepare", source, *words, "-o", tmp_path / str(number))
        assert (done.returncode, said in done.stderr, "nothing was written" in done.stderr) == (0, noted, False), words


def test_workers_do_not_change_the_bytes(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    one = prepared(tonnage, source, "--convert", "mxfp8", "-o", tmp_path / "one", "--workers", "1")
    three = prepared(tonnage, source, "--convert", "mxfp8", "-o", tmp_path / "three", "--workers", "3")
    assert one["ranks"] == three["ranks"]
    assert one["files"] == three["files"]
    assert one["converted"] == three["converted"]


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_an_output_that_is_a_file_is_refused(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "out: output is not a directory" in refused(tonnage, source, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("inside", ["", "sub", "../small/sub/../sub"])
def test_an_output_inside_the_checkpoint_is_refused(tonnage: Tonnage, source: Path, inside: str) -> None:
    before = files(source)
    assert "output lies inside the checkpoint" in refused(tonnage, source, "-o", source / inside)
    assert files(source) == before


def test_foreign_files_are_refused_even_with_force(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for words in ((), ("--force",)):
        assert "out: output is in use" in refused(tonnage, source, "-o", out, *words)
        assert files(out) == {"notes.txt": b"mine"}


def test_a_linked_rank_directory_is_refused(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    (out / "weights" / "tp2").mkdir(parents=True)
    elsewhere.mkdir()
    (out / "weights" / "tp2" / "rank-1").symlink_to(elsewhere)
    assert "rank-1" in refused(tonnage, source, "--tp", "2", "-o", out)
    assert "rank-1" in refused(tonnage, source, "--tp", "2", "-o", out, "--force")
    assert list(elsewhere.iterdir()) == []


def test_an_output_that_cannot_be_made_is_refused(tonnage: Tonnage, source: Path) -> None:
    assert "/proc/nowhere: cannot be written" in refused(tonnage, source, "-o", "/proc/nowhere")


def test_an_engine_that_makes_something_else_of_tensors_is_refused_with_one_that_does_not(
    tonnage: Tonnage, configs: Path, tmp_path: Path
) -> None:
    config = parse_config(json.loads((configs / "Kimi-K3.json").read_bytes()), name="k3")
    write_rehearsal(config, tmp_path / "k3", RehearsalOptions(scaled_down=True))
    words = (tmp_path / "k3", "--tp", 2, "-o", tmp_path / "out", "--dry-run")
    lines = refused(tonnage, *words, "--engine", "vllm").splitlines()
    hint = "tonnage: --engine vllm: makes something else of these tensors while it loads; no file can hold that; "
    assert [line for line in lines if "--engine split" in line] == lines[-1:]
    assert lines[-1] == f"{hint}expected --engine split, which writes slices as stored"
    assert any("A_log: the engine does not hold the slice: only the real heads of the rank" in line for line in lines)
    prepared(tonnage, *words, "--engine", "split")
    assert "--engine split" not in refused(tonnage, *words, "--engine", "split", "--ranks", "7")


def test_a_standard_checkpoint_has_the_shapes_of_its_source_whatever_the_engine(
    tonnage: Tonnage, source: Path, tmp_path: Path
) -> None:
    """301 rows: vLLM holds 320, and refuses files that have them."""
    said = "tonnage: --engine vllm changes nothing: layout hf has the shapes of the checkpoint\n"
    done = tonnage("prepare", source, "--layout", "hf", "--engine", "vllm", "-o", tmp_path / "out", "--json")
    assert (done.returncode, said in done.stderr) == (0, True)
    assert json.loads(done.stdout)["identity"]["engine"] == "split"

    def shapes(directory: Path) -> dict[str, list[int]]:
        found = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safetensors.safe_open(path, "np") as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict
        return found

    assert shapes(tmp_path / "out") == shapes(source)
    assert shapes(source)["model.embed_tokens.weight"][0] == 301


def test_what_a_conversion_leaves_as_it_is_is_said(tonnage: Tonnage, configs: Path, tmp_path: Path) -> None:
    config = parse_config(json.loads((configs / "Qwen__Qwen3-30B-A3B.json").read_bytes()), name="moe")
    write_rehearsal(config, tmp_path / "moe", RehearsalOptions(scaled_down=True))
    words = (tmp_path / "moe", "--tp", 2)
    with safetensors.safe_open(tmp_path / "moe" / "model.safetensors", "np") as file:
        experts = sum(2 * prod(file.get_slice(name).get_shape()) for name in file.keys() if ".experts." in name)  # noqa: SIM118 - no dict
    said = (
        f"--convert mxfp8 leaves projections as they are stored: expert {experts:,} bytes; "
        "--convert mxfp8-experts converts routed experts as well"
    )
    assert said in tonnage("plan", *words, "--convert", "mxfp8").stdout.splitlines()
    out = ("-o", tmp_path / "out")
    assert said in tonnage("prepare", *words, *out, "--convert", "mxfp8", "--dry-run").stdout.splitlines()
    assert said in tonnage("prepare", *words, *out, "--convert", "mxfp8").stdout.splitlines()
    assert "leaves projections" not in tonnage("plan", *words).stdout

    summary = prepared(tonnage, *words, "-o", tmp_path / "experts", "--convert", "mxfp8-experts")
    assert summary["identity"]["convert"] == "mxfp8-experts"
    planned = json.loads(tonnage("plan", *words, "--convert", "mxfp8-experts", "--json").stdout)
    assert not any("leaves projections" in note for note in planned["notes"])
    assert [rank["weights_bytes"] for rank in planned["ranks"]] == [rank["payload_bytes"] for rank in summary["ranks"]]
    converted = {tensor["tensor"] for tensor in summary["converted"]}
    with safetensors.safe_open(tmp_path / "moe" / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert {name for name in names if ".experts." in name} < converted
    assert not converted & {
        name for name in names if name.endswith((".mlp.gate.weight", "lm_head.weight", "norm.weight"))
    }


def test_projections_that_are_all_converted_are_not_mentioned(tonnage: Tonnage, source: Path) -> None:
    assert "leaves projections" not in tonnage("plan", source, "--tp", 2, "--convert", "mxfp8").stdout


def test_a_prepared_directory_is_no_source(tonnage: Tonnage, own_source: Path, tmp_path: Path) -> None:
    (own_source / "README.md").write_text("# Card")
    out = tmp_path / "out"
    assert prepared(tonnage, own_source, "--tp", 2, "-o", out)
    assert (out / "README.md").read_text() == "# Card"
    expected = "its source; `tonnage plan`, fit, flags, inspect, serve and measure take ranks, as they are"
    line = f"tonnage: {out}: a prepared directory, cut into ranks; expected {expected}\n"
    again = ("prepare", out, "-o", tmp_path / "again")
    for words in (again, ("plan", own_source, "--draft", out)):
        done = tonnage(*words)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    (out / "prepare.json").rename(out / "manifest.json")
    (out / "model.sig").write_bytes(b"{}")
    assert tonnage(*again).stderr == line.replace("a prepared directory", "a package")
    prepared(tonnage, own_source, "-o", tmp_path / "hf", "--layout", "hf", "--convert", "mxfp8")
    assert tonnage("plan", tmp_path / "hf", "--tp", 2).returncode == 0


def test_a_config_alone_has_no_weights(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    said = refused(tonnage, source / "config.json", "-o", tmp_path / "out")
    assert "no weights to prepare" in said


def test_a_shard_that_is_a_pipe_is_refused(tonnage: Tonnage, own_source: Path, tmp_path: Path) -> None:
    shard = min(own_source.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    assert "not a regular file" in refused(tonnage, own_source, "-o", tmp_path / "out")


def test_not_enough_disk_is_refused_before_the_first_byte(tonnage: Tonnage, configs: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    assert tonnage("synth", configs / "meta-llama__Meta-Llama-3.1-405B.json", "-o", big).returncode == 0
    out = tmp_path / "out"
    said = refused(tonnage, big, "-o", out)
    assert "out: not enough disk space; expected " in said
    assert files(out) == {}
    dry = tonnage("prepare", big, "-o", out, "--dry-run")
    assert (dry.returncode, dry.stdout) == (2, "")
    assert dry.stderr.startswith(said.partition("; found")[0])


def no_ranks(document: dict[str, Any]) -> None:
    document["files"] += [file for rank in document["ranks"] for file in rank["files"]]
    document["ranks"] = []


def less_planned(document: dict[str, Any]) -> None:
    document["ranks"][1]["planned_bytes"] -= 1


def more_payload(document: dict[str, Any]) -> None:
    document["ranks"][0]["payload_bytes"] += 1


def both_wrong(document: dict[str, Any]) -> None:
    document["ranks"][0]["payload_bytes"] = document["ranks"][0]["planned_bytes"] = -5


def endless(document: dict[str, Any]) -> None:
    document["ranks"][0]["file_bytes"] = 10**4000


def swapped(document: dict[str, Any]) -> None:
    document["ranks"].reverse()


@pytest.mark.parametrize("change", [no_ranks, less_planned, more_payload, both_wrong, endless, swapped])
def test_a_summary_that_says_otherwise_is_not_passed_off_as_planned(
    tonnage: Tonnage, source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    out = tmp_path / "out"
    document = prepared(tonnage, source, "--tp", "2", "-o", out)
    change(document)
    (out / "prepare.json").write_text(json.dumps(document))
    for words in ((), ("--json",)):
        done = tonnage("prepare", source, "--tp", "2", "-o", out, *words)
        assert done.returncode == 2, done.stderr
        assert "prepare.json" in done.stderr or str(out) in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    prepared(tonnage, source, "--tp", "2", "-o", out, "--force")


def test_values_that_are_not_finite_are_kept_as_the_refusal_says(
    tonnage: Tonnage, own_source: Path, tmp_path: Path
) -> None:
    for shard in own_source.glob("*.safetensors"):
        raw = shard.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        shard.write_bytes(raw[:begin] + b"\xff" * (len(raw) - begin))
    words = (own_source, "--convert", "mxfp8", "-o", tmp_path / "out", "--workers", "1")
    assert "--nonfinite keep --force starts over and converts it" in refused(tonnage, *words)
    prepared(tonnage, *words, "--nonfinite", "keep", "--force")


@pytest.mark.parametrize("limit_bytes", [410_000 << 10, 300_000 << 10, 150_000 << 10])
def test_too_little_memory_is_refused_in_one_line(source: Path, tmp_path: Path, limit_bytes: int) -> None:
    done = subprocess.run(
        [COMMAND, "prepare", source, "--convert", "mxfp8", "-o", tmp_path / "out", "--workers", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.splitlines()
    assert all(" jobs" in line for line in before)
    assert last.startswith("tonnage: ")
    assert "run the same command again to resume; found " in last or "memory" in last


def test_a_name_of_any_bytes_can_be_the_output(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [COMMAND, "prepare", source, "-o", os.fsencode(tmp_path) + b"/\xff"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"planned == written on every rank" in done.stdout


# --- how it goes on ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a preparation was begun and interrupted; not to be changed."""
    folder = tmp_path_factory.mktemp("stopped")
    out = folder / "out"
    status, _ = interrupted(write_site(folder / "site"), source, out, signal.SIGINT)
    assert status == 130
    assert (out / ".prepare" / "journal.jsonl").exists()
    return out


@pytest.fixture
def own_stopped(stopped: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(stopped, tmp_path / "stopped")


def interrupted(site: Path, source: Path, out: Path, number: signal.Signals) -> tuple[int, str]:
    """Prepare, send a signal when the first file is written, and return status and stderr."""
    process = begun(site, source, out)
    assert process.stderr is not None
    first = process.stderr.readline()
    until(lambda: any(site.glob("hold-*")))
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, first + said


SIGNALS = {"Ctrl-C": (signal.SIGINT, 130, "interrupted"), "SIGTERM": (signal.SIGTERM, 143, "terminated")}


@pytest.mark.parametrize(("number", "expected", "word"), SIGNALS.values(), ids=SIGNALS)
def test_a_signal_stops_it_cleanly_and_it_says_how_to_go_on(
    tonnage: Tonnage, source: Path, tmp_path: Path, number: signal.Signals, expected: int, word: str
) -> None:
    out = tmp_path / "out"
    status, said = interrupted(write_site(tmp_path / "site"), source, out, number)
    assert status == expected
    assert said.splitlines()[-1] == f"tonnage: {word}; run the same command again to resume"
    assert "Traceback" not in said
    assert list(out.rglob("*.partial")) == []
    prepared(tonnage, source, "--tp", "2", "-o", out)
    whole = tmp_path / "whole"
    prepared(tonnage, source, "--tp", "2", "-o", whole)
    assert {**files(out), "prepare.json": b""} == {**files(whole), "prepare.json": b""}


def test_a_changed_source_is_refused_with_what_changed(tonnage: Tonnage, own_source: Path, stopped: Path) -> None:
    shard = min(own_source.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    said = refused(tonnage, own_source, "--tp", "2", "-o", stopped)
    assert f"begun with another source {shard.name}; --force starts over; expected as then: " in said
    assert said.count("\n") == 1


OPTIONS = {
    "topology": ("--tp", "4"),
    "convert": ("--tp", "2", "--convert", "mxfp8"),
    "hash": ("--tp", "2", "--hash", "sha256"),
    "choice of ranks": ("--tp", "2", "--ranks", "0"),
}


@pytest.mark.parametrize(("field", "words"), OPTIONS.items(), ids=OPTIONS)
def test_other_options_are_refused(
    tonnage: Tonnage, source: Path, stopped: Path, field: str, words: tuple[str, ...]
) -> None:
    assert f"begun with another {field}; --force starts over" in refused(tonnage, source, *words, "-o", stopped)


def test_force_starts_over(tonnage: Tonnage, source: Path, own_stopped: Path, tmp_path: Path) -> None:
    out = own_stopped
    prepared(tonnage, source, "--tp", "2", "-o", out)
    prepared(tonnage, source, "--tp", "4", "-o", out, "--force")
    prepared(tonnage, source, "--tp", "4", "-o", tmp_path / "fresh")
    assert {**files(out), "prepare.json": b""} == {**files(tmp_path / "fresh"), "prepare.json": b""}
    assert {path.name for path in (out / "weights").iterdir()} == {"tp4"}


def test_a_damaged_journal_is_refused_and_force_helps(tonnage: Tonnage, source: Path, own_stopped: Path) -> None:
    out = own_stopped
    (out / ".prepare" / "journal.jsonl").write_text("nonsense\n{}\n")
    assert "damaged journal; --force starts over" in refused(tonnage, source, "--tp", "2", "-o", out)
    prepared(tonnage, source, "--tp", "2", "-o", out, "--force")


def test_a_file_that_is_gone_is_not_passed_off_as_written(tonnage: Tonnage, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = prepared(tonnage, source, "-o", out)
    (out / document["ranks"][0]["files"][0]["path"]).unlink()
    assert "are not as written; --force starts over" in refused(tonnage, source, "-o", out)
    assert prepared(tonnage, source, "-o", out, "--force")["ranks"] == document["ranks"]


def test_a_second_run_is_refused_while_one_is_at_work(tonnage: Tonnage, source: Path, own_stopped: Path) -> None:
    out = own_stopped
    script = (
        "import pathlib, sys; from tonnage.prepare.output_dir import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, out / ".prepare" / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    said = refused(tonnage, source, "--tp", "2", "-o", out)
    assert f"another preparation is writing here; found process {holder.pid}" in said
    holder.communicate()
    prepared(tonnage, source, "--tp", "2", "-o", out)


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a part of the checkpoint only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=4m", "tonnage-test", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["/bin/umount", disk], check=True)


def test_a_disk_that_fills_up_is_refused_in_one_line_and_resumed(
    tonnage: Tonnage, source: Path, small_disk: Path
) -> None:
    """The disk is checked first, so something else takes the room after that."""
    site, out = write_site(small_disk.with_name("site")), small_disk / "out"
    process = begun(site, source, out, "--workers", "1")
    until(lambda: any(site.glob("hold-*")))
    used = sum(len(raw) for raw in files(small_disk).values())
    with (small_disk / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, (3 << 20) + (512 << 10) - used)
    (site / "hold").unlink()
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, said
    *before, said = said.splitlines()
    assert all(" jobs" in line for line in before)
    assert "no space left for it; free some and run the same command again" in said
    assert list(out.rglob("*.partial")) == []
    (small_disk / "other").unlink()
    document = prepared(tonnage, source, "--tp", "2", "-o", out)
    assert all(rank["payload_bytes"] == rank["planned_bytes"] for rank in document["ranks"])


def test_a_file_that_may_not_grow_is_refused_in_one_line_and_resumed(
    tonnage: Tonnage, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [COMMAND, "prepare", source, "--tp", "2", "-o", out],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "file too large for the limit of this process (ulimit -f)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(out.rglob("*.partial")) == []
    document = prepared(tonnage, source, "--tp", "2", "-o", out)
    assert all(rank["payload_bytes"] == rank["planned_bytes"] for rank in document["ranks"])


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_counts_what_this_run_wrote() -> None:
    standing = Standing(done_bytes=3 << 20, total_bytes=4 << 20, resumed_bytes=1 << 20, tasks_done=2, tasks=5)
    assert progress_line(standing, 2.0) == "3.000 of 4.000 MiB, 2 of 5 jobs, 1 MB/s, 1 s left"
    begun = Standing(done_bytes=1 << 20, total_bytes=4 << 20, resumed_bytes=1 << 20, tasks_done=2, tasks=5)
    assert progress_line(begun, 0.0) == "1.000 of 4.000 MiB, 2 of 5 jobs, 1.000 MiB of an earlier run"
