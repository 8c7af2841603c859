"""Serving: what is planned is what is started, what is refused is not started, and what was started is ended whole."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from packages import make_package, run
from samples import LLAMA, PATIENCE, opened, prepare_small, until, write_key
from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.cli import app, status_of
from tonnage.cli.fit_terms import read_logs
from tonnage.errors import DriverError, FlagsError, TonnageError
from tonnage.flags.values import ServeCommand
from tonnage.memory.devices import DeviceMemory
from tonnage.observe.io import observe_blocks
from tonnage.profile import Profile
from tonnage.serve import io
from tonnage.serve.log import EARLIER, LOG, RECENT, BoundedLog
from tonnage.serve.outcome import Outcome
from tonnage.serve.source import open_served
from tonnage.serve.words import Address, Program, engine_environment, engine_words, masked, unsaid

FAKE = Path(__file__).with_name("fake_vllm.py")
SMALL = {**LLAMA, "num_key_value_heads": 4, "vocab_size": 320}
HELD = 1_477_120
"""Of each of two ranks in BF16: two layers of attention, MLP and two norms, half of embedding and head, a norm."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    folder = tmp_path_factory.mktemp("package") / "small"
    return make_package(folder, keys[0], SMALL, "--tp", 2, "--engine", "vllm", scaled_down=False)


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "copy"))


class Machine:
    """A machine with an engine on its path: what was started, and how it went."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, key: Path, port: int) -> None:
        self.folder, self.out, self.run, self.key, self.port = (
            folder,
            folder / "started.json",
            folder / "run",
            key,
            port,
        )
        self._monkeypatch = monkeypatch
        engine = folder / "bin" / "vllm"
        engine.parent.mkdir()
        engine.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
        engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{engine.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setattr("tonnage.serve.process._LEFT_SECONDS", 0.2)
        monkeypatch.setattr("tonnage.serve.run._MOST_QUIET_SECONDS", PATIENCE)
        monkeypatch.setattr(io, "_ASK_SECONDS", PATIENCE)  # the answer of an engine that has one is waited for

    def words(self, package: Path, *words: object) -> list[str]:
        usual = ("--key", self.key, "--profile", "c2-p128", "--context", "256", "--device", "cpu", "--supply", "1GiB")
        given = {str(word) for word in words}
        kept = [w for n in range(0, len(usual), 2) if usual[n] not in given for w in usual[n : n + 2]]
        if "--unsigned" in given:
            kept = kept[2:]
        where = ("--port", self.port, "--run", self.run, "--timeout", PATIENCE)
        ordered = list(map(str, (*kept, *where)))
        extra = list(map(str, words))
        return ["serve", str(package), *ordered, *extra]

    def tell(self, mode: str, **facts: Any) -> None:
        told = {"mode": mode, "out": str(self.out), "held": HELD, "tokens": 640, **facts}
        told["record"] = str(self.run / "observation.json")
        self._monkeypatch.setenv("FAKE_ENGINE", json.dumps(told))

    def serve(self, package: Path, *words: object, mode: str = "serves", **facts: Any) -> Any:
        self.tell(mode, **facts)
        return CliRunner().invoke(app, self.words(package, *words))

    def refusal(self, package: Path, *words: object, status: int = 2) -> str:
        """Return why nothing was started."""
        result = self.serve(package, *words)
        assert isinstance(result.exception, TonnageError), result.output
        assert status_of(result.exception) == status
        assert not self.out.exists()
        assert not self.run.exists()
        return str(result.exception)

    @property
    def started(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "observation.json").read_text())
        return found

    def nothing_runs(self) -> bool:
        return not any(is_running(pid) for pid in self.started["processes"])


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path], port: int) -> Machine:
    return Machine(tmp_path, monkeypatch, keys[1], port)


# --- what is served ---------------------------------------------------------------------------------------------------


def test_a_checked_package_is_started_as_planned_measured_and_ended(machine: Machine, package: Path):
    done = machine.serve(package, "--check", "--eager", "--", "--seed", "7", sends=0)

    assert done.exit_code == 0, done.output
    words = machine.started["words"]
    assert words[:2] == ["serve", str(package)]
    for pair in (
        ("--load-format", "tonnage"), ("--tensor-parallel-size", "2"), ("--max-model-len", "256"),
        ("--max-num-seqs", "2"), ("--max-num-batched-tokens", "128"), ("--host", "127.0.0.1"),
        ("--model-loader-extra-config", json.dumps({"public_key": str(machine.key)})), ("--seed", "7"),
        ("--served-model-name", "llama-tp2-20260131"),
    ):  # fmt: skip
        assert pair in set(pairwise(words)), pair
    assert "--enforce-eager" in words
    assert "--trust-remote-code" not in words
    assert "verified: llama-tp2-20260131" in done.stderr
    assert "within every bound: 2 figures compared" in done.stdout
    until(machine.nothing_runs)


def test_the_cache_on_a_cpu_is_what_the_profile_needs(machine: Machine, package: Path):
    """2 layers x K and V x 2 heads x 64 x 2 bytes a token; 2 requests of 256 tokens in blocks of 128, and one more."""
    done = machine.serve(package, "--check", "--fast")

    assert "headers only; the engine's workers hash the weights" in done.stderr
    words = machine.started["words"]
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2 * 2 * 2 * 64 * 2 * 128 * (2 * 2 + 1))
    assert "cache: 640 tokens measured, 640 planned" in done.stdout


def test_the_record_is_the_one_of_observe_and_is_taken_by_fit_terms(machine: Machine, package: Path, tmp_path: Path):
    done = machine.serve(package, "--check", "--save", tmp_path / "record.json", "--json")

    record = machine.record
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert (record["schema"], record["device"], record["tp"]) == ("tonnage.observation/1", "cpu", 2)
    assert record["weights_bytes_per_rank"] == HELD
    assert record["log"]["nbytes"] <= (machine.run / LOG).stat().st_size
    lines = tmp_path / "logs.jsonl"
    lines.write_text(json.dumps(record) + "\n")
    used, left_out = read_logs(lines)
    assert (len(used), left_out) == (1, [])

    document = json.loads(done.stdout)
    assert (document["schema"], document["verified"], document["contradicts"]) == ("tonnage.serve/1", True, False)
    assert document["words"] == json.loads((machine.run / "command.json").read_text())["words"]
    assert json.loads((machine.run / "plan.json").read_text())["fits"] is True


@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGINT, "serves"), (signal.SIGTERM, "serves"), (signal.SIGHUP, "serves")]
)
def test_whoever_ends_it_ends_all_of_it_and_keeps_the_record(machine: Machine, package: Path, number: int, mode: str):
    done = machine.serve(package, mode=mode, sends=number)

    assert done.exit_code == 0, done.output
    assert f"serving llama-tp2-20260131 at http://127.0.0.1:{machine.port}/v1" in done.stderr
    until(machine.nothing_runs)
    assert machine.record["kv_tokens"] == 640


@pytest.mark.parametrize("how", [("--check",), ()], ids=["check", "served"])
def test_a_measurement_over_its_bound_is_said_and_ends_in_5(machine: Machine, package: Path, how: tuple[str, ...]):
    done = machine.serve(package, *how, held=HELD + (1 << 24), sends=0 if how else signal.SIGINT)

    assert done.exit_code == 5
    assert "CONTRADICTS THE PLAN" in done.stdout
    assert "weights: measured" in done.stdout
    assert "weights: measured" not in done.stderr
    assert machine.record["weights_bytes_per_rank"] == HELD + (1 << 24)


def test_a_cache_smaller_than_the_profile_ends_in_5(machine: Machine, package: Path):
    done = machine.serve(package, "--check", tokens=511)

    assert done.exit_code == 5
    assert "FALLS SHORT: cache: 511 tokens measured, the profile is 2 x 256 tokens" in done.stdout


def test_an_engine_that_says_no_figure_serves_and_a_check_of_it_fails(machine: Machine, package: Path):
    assert machine.serve(package, "--check", mode="silent").exit_code == 2
    shutil.rmtree(machine.run)
    assert machine.serve(package, mode="silent", sends=signal.SIGINT).exit_code == 0


# --- ends nobody wants ------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_early_is_quoted_and_nothing_of_a_terminal_obeyed(machine: Machine, package: Path):
    done = machine.serve(package, mode="dies")

    assert done.exit_code == 2
    assert "the engine ended by itself, exit code 7" in done.stderr
    assert "RuntimeError: no such kernel" in done.stderr
    assert "\x1b" not in done.output
    until(machine.nothing_runs)
    assert not (machine.run / "observation.json").exists()


def test_an_engine_that_refuses_for_memory_contradicts_the_plan(machine: Machine, package: Path):
    done = machine.serve(package, mode="refuses")

    assert done.exit_code == 5
    assert "the plan fits, and the engine refuses: less memory is free than the cache asks for" in done.stderr


def test_an_engine_that_dies_later_is_an_error(machine: Machine, package: Path):
    done = machine.serve(package, mode="dies later")

    assert done.exit_code == 2
    assert "ended by itself, exit code 3" in done.stderr
    until(machine.nothing_runs)


def test_an_engine_that_is_never_ready_is_ended(machine: Machine, package: Path, monkeypatch: pytest.MonkeyPatch):
    """The time is up once it runs."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * machine.out.exists(), sleep=time.sleep)
    monkeypatch.setattr("tonnage.serve.run.time", clock)
    done = machine.serve(package, "--timeout", "1000", mode="never")

    assert done.exit_code == 2
    assert "not ready within 1000 s" in done.stderr
    until(machine.nothing_runs)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_before_it_is_ready_is_no_success(machine: Machine, package: Path, number: int, code: int):
    assert machine.serve(package, mode="never", sends=number).exit_code == code
    until(machine.nothing_runs)


def test_an_engine_that_will_not_end_is_killed_with_its_workers(machine: Machine, package: Path):
    done = machine.serve(package, "--check", "--grace", "0", mode="stubborn")

    assert done.exit_code == 0
    until(machine.nothing_runs)


def test_a_worker_in_a_session_of_its_own_ends_with_the_engine(machine: Machine, package: Path):
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = machine.serve(package, "--check", mode="scatters")
        assert done.exit_code == 0
        assert machine.nothing_runs()
        assert other.poll() is None


ORPHANS = """
import os, subprocess, sys
from tonnage.serve.adoption import adopting, children, end_children, wait_for_ended

def orphan(seconds):
    sleeping = f"import time; time.sleep({seconds})"
    parent = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]]).pid, flush=True); sys.stdin.read()"
    words = [sys.executable, "-S", "-c", parent, sleeping]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return started, int(started.stdout.readline())

def end(started):
    started.stdin.close()
    started.wait()

before, stranger = orphan(3600)
with adopting() as others:
    engine, worker = orphan(0)
    end(before)
    end(engine)
    assert {stranger, worker} <= children()
    while worker in children():
        wait_for_ended(others, engine.pid)
    left, late = orphan(3600)
    end(left)
    end_children(others)
    assert children() == {stranger}
    assert os.waitpid(stranger, os.WNOHANG) == (0, 0)  # it runs
    os.kill(stranger, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is adopted elsewhere")
def test_what_is_adopted_is_ended_and_waited_for_unless_it_was_there_before():
    subprocess.run([sys.executable, "-c", ORPHANS], check=True, timeout=PATIENCE)


def test_keys_are_passed_on_and_neither_shown_nor_kept(machine: Machine, package: Path):
    secrets = ("sesame-1", "sesame-2", "hf_sesame")
    extra = ("--seed", "7", "--api-key", *secrets[:2], f"--hf_token={secrets[2]}")
    for told in (machine.serve(package, "--dry-run", *how, "--", *extra) for how in ((), ("--json",))):
        assert told.exit_code == 0
        assert not any(secret in told.output for secret in secrets)

    done = machine.serve(package, "--check", "--json", "--show-log", "--", *extra)
    assert done.exit_code == 0
    assert machine.started["words"][-6:] == list(extra)
    kept = "".join(path.read_text() for path in machine.run.iterdir() if path.name != LOG)
    for secret in secrets:
        assert secret not in done.output + kept
    shown = ["--seed", "7", "--api-key", "***", "***", "--hf_token=***"]
    assert json.loads(done.stdout)["words"][-6:] == shown
    assert done.stderr.count(" ".join(shown)) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--api-k", "abcd"], ["--other.secret=abcd"], ["--ssl-password", "abcd", "efgh"], ["--AUTH_TOKEN", "abcd"],
        ["env", "HF_TOKEN=abcd", "vllm", "serve"], ["docker", "--env=VLLM_API_KEY=abcd", "vllm"],
        ["--x", '{"a": [{"api_keys": ["abcd"]}], "size": 2}'], ['--x={"token": {"value": "\\u0061bcd"}}'],
        ["--otlp-traces-endpoint", "http://me:abcd@host/v1"],
    ],
)  # fmt: skip
def test_what_is_called_a_secret_is_one_shortened_or_not(words: list[str]):
    assert "abcd" not in " ".join(masked(words))
    assert unsaid("the key abcd is wrong", words) == "the key *** is wrong"


def test_a_secret_of_the_environment_is_not_repeated_and_none_is_in_a_refusal():
    assert unsaid("sesame-1 at home", ["vllm"], {"VLLM_API_KEY": "sesame-1", "HOME": "at home"}) == "*** at home"
    with pytest.raises(FlagsError) as refused:
        engine_words(COMMAND, Program(words=("vllm", "serve")), HERE, ['--kv-transfer-config={"token": "abcd"}'])
    assert "abcd" not in str(refused.value)


def test_a_flood_fills_no_disk_and_hides_no_figure(machine: Machine, package: Path):
    done = machine.serve(package, "--check", "--log-limit", "512KiB", mode="floods")

    assert done.exit_code == 0
    assert sum(file.stat().st_size for file in machine.run.glob("engine*.log")) <= 512 << 10
    assert machine.record["kv_tokens"] == 640
    assert "the log began with more than half of --log-limit" in done.stderr


def test_hostile_lines_reach_no_terminal_and_later_ones_are_not_measured(machine: Machine, package: Path):
    done = machine.serve(package, "--show-log", mode="hostile", sends=signal.SIGINT)

    assert done.exit_code == 0
    assert "red" in done.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
    assert max(map(len, done.stderr.splitlines())) < 1000
    assert "999999999999" in done.stderr
    assert machine.record["weights_bytes_per_rank"] == HELD


def test_a_process_is_ended_by_a_signal_from_outside(machine: Machine, package: Path):
    machine.tell("serves")
    command = Path(sys.executable).with_name("tonnage")
    with subprocess.Popen(
        [command, *machine.words(package)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ours:
        assert ours.stdout is not None
        for line in ours.stdout:
            if line.startswith("serving "):
                break
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(PATIENCE) == 0
    until(machine.nothing_runs)


def test_a_table_nobody_reads_is_no_reason_to_end(machine: Machine, package: Path):
    machine.tell("serves")
    command = Path(sys.executable).with_name("tonnage")
    with subprocess.Popen(
        [command, *machine.words(package)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ours:
        assert ours.stdout is not None
        assert ours.stderr is not None
        ours.stdout.close()
        said = [next(line for line in ours.stderr if line.startswith("serving "))]  # which follows the table
        assert ours.poll() is None
        ours.send_signal(signal.SIGTERM)
        said += ours.stderr
        assert ours.wait(PATIENCE) == 0
    assert said[1:] == ["ended\n"]
    until(machine.nothing_runs)


def test_a_full_disk_behind_the_table_is_no_reason_to_end(machine: Machine, package: Path):
    machine.tell("serves")
    command = [Path(sys.executable).with_name("tonnage"), *machine.words(package, "--check")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "note: the table cannot be printed: No space left on device" in done.stderr


def test_an_engine_holds_the_claim_on_its_port_when_nobody_else_does(port: int):
    with io.claimed(port) as descriptors:
        engine = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=descriptors)
    with engine:
        with pytest.raises(TonnageError, match=f"--port {port}: another engine has this port"), io.claimed(port):
            pass
        engine.communicate(b"\n")
    with io.claimed(port):
        pass


@pytest.mark.parametrize(
    ("said", "healthy"),
    [
        ((b"HTTP/1.1 200 OK\r\n\r\n",), True),
        ((b"HTTP/1.0 ", b"200"), True),
        ((b"HTTP/1.1 503 No\r\n\r\n",), False),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",) * 1000, False),
        ((b"HTTP/1.1 200"[:9], *(b"" for _ in range(9))), False),
        ((b"H", b"T", b"T", b"P", b"/", b"1", b".", b"1", b" ", b"2", b"0"), False),
        ((b"x" * 100_000,), False),
    ],
    ids=["ready", "in pieces", "not yet", "goes on", "hangs", "drips", "speaks otherwise"],
)
def test_whoever_answers_slowly_or_without_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: tuple[bytes, ...], healthy: bool
):
    monkeypatch.setattr(io, "_ASK_SECONDS", PATIENCE if healthy else 0.3)
    asked, waited = threading.Event(), []

    def answer(server: socket.socket) -> None:
        one, _ = server.accept()
        with one, suppress(OSError):
            for part in said:
                one.sendall(part)
                if len(said) < 1000 and asked.wait(0.05):
                    break
            waited.append(asked.wait(PATIENCE))

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        answering = threading.Thread(target=answer, args=(server,), daemon=True)
        answering.start()
        found = io.is_healthy(replace(HERE, port=server.getsockname()[1]))
        asked.set()
        answering.join()
        assert found is healthy
        assert waited in ([], [True])  # whoever answered had not ended by himself


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_started(machine: Machine, package: Path):
    done = machine.serve(package, "--supply", "2500KiB", "--check")

    assert done.exit_code == 3
    assert "REFUSED: rank 0 needs" in done.stdout
    assert "--tp 4 (prepared anew)" in done.stdout
    assert "nothing was started" in done.stderr
    assert not machine.out.exists()
    planned = machine.serve(package, "--supply", "2500KiB", "--check", "--json")
    assert json.loads(planned.stdout)["schema"] == "tonnage.plan/1"


def test_a_dry_run_prints_what_would_be_started_and_starts_nothing(machine: Machine, package: Path):
    done = machine.serve(package, "--dry-run")
    assert done.exit_code == 0, done.output
    assert not machine.out.exists()
    assert not machine.run.exists()
    *_, verdict, command = done.stdout.splitlines()
    assert verdict.startswith("FITS: spare ")
    assert "verified: " in done.stderr
    assert done.stderr.endswith("nothing was started (--dry-run)\n")
    told = json.loads(machine.serve(package, "--dry-run", "--json").stdout)
    assert (told["schema"], told["verified"], told["plan"]["fits"]) == ("tonnage.serve-dry-run/1", True, True)
    assert shlex.split(command) == [*(f"{a}={b}" for a, b in sorted(told["environment"].items())), *told["words"]]
    assert told["environment"]["PYTHONSAFEPATH"] == "1"

    assert machine.serve(package, "--check").exit_code == 0
    assert told["words"][1:] == machine.started["words"]


def test_a_dry_run_refuses_what_a_run_would(machine: Machine, copy: Path, tmp_path: Path):
    assert machine.serve(copy, "--dry-run", "--supply", "2500KiB").exit_code == 3
    with closing(socket.create_server(("127.0.0.1", machine.port))):
        assert "cannot be listened at" in machine.refusal(copy, "--dry-run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "full: not empty" in machine.refusal(copy, "--dry-run", "--run", tmp_path / "full")
    refused = machine.refusal(copy, "--dry-run", "--engine-command", "no-such-engine serve")
    assert refused.startswith("no-such-engine: cannot be started; expected a program")
    (copy / "config.json").write_text("{}")
    assert "config.json" in machine.refusal(copy, "--dry-run", status=4)


def test_a_tampered_package_is_not_started(machine: Machine, copy: Path):
    weights = next((copy / "weights" / "tp2" / "rank-1").glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert "weights/tp2/rank-1" in machine.refusal(copy, status=4)


def test_another_signer_is_not_started(machine: Machine, package: Path, tmp_path: Path):
    stranger = write_key(tmp_path, "stranger")[1]
    assert "model.sig" in machine.refusal(package, "--key", stranger, status=4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--tp", "4"), "--tp: cut for another topology; expected tp2 ep1 pp1; found 4"),
        (("--profile", "c4"), "not a profile"),
        (("--free", "all"), "--free: the engine runs on a CPU"),
        (("--utilization", "0.5"), "--utilization: the engine runs on a CPU"),
        (("--unsigned", "--identity", "a"), "by whom it must be signed"),
        (("--unsigned", "--fast"), "--fast: nobody would hash the weights"),
        (("--engine-command", ""), "names no program"),
        (("elsewhere",), "elsewhere: no flag of the engine; expected one package"),
        (("--", "--max_model_len=9"), "--max_model_len=9: follows from the plan; expected --context"),
        (("--", "-tp", "4", "--data-parallel-size=2"), "--data-parallel-size=2: would serve something else than was planned"),
        (("--log-limit", "much"), "--log-limit"),
        (("--log-limit", "262143B"), "--log-limit: too little for a start-up log; expected 262144 bytes or more"),
        (("--name", "-x"), "--name: no name of a model"),
        (("--engine-command", "vllm 'serve"), "--engine-command: no words; found No closing quotation"),
        (("--host", "a" * 64 + ".invalid"), "cannot be listened at"),
        (("--host", "\udcff"), "cannot be listened at"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_refused_before_anything_is_started(machine: Machine, package: Path, words: tuple[str, ...], expected: str):
    assert expected in machine.refusal(package, *words)


def test_nobody_is_trusted_by_default(machine: Machine, package: Path):
    machine.tell("serves")
    words = machine.words(package)
    at = words.index("--key")
    result = CliRunner().invoke(app, words[:at] + words[at + 2 :])
    assert "by whom it must be signed; expected one of --key" in str(result.exception)
    assert not machine.out.exists()


def test_a_place_that_is_taken_is_refused(machine: Machine, package: Path, tmp_path: Path):
    (tmp_path / "record.json").write_text("{}")
    assert "record.json: already there" in machine.refusal(package, "--save", tmp_path / "record.json")
    with closing(socket.create_server(("127.0.0.1", machine.port))):
        assert "cannot be listened at" in machine.refusal(package)
    assert "is inside what is served" in machine.refusal(package, "--run", package / "run")
    (tmp_path / "link").symlink_to(package, target_is_directory=True)
    for place in (package, tmp_path / "link"):
        assert "another --save FILE" in machine.refusal(package, "--save", place / "record.json")
    with io.claimed(machine.port):
        assert f"--port {machine.port}: another engine has this port" in machine.refusal(package)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "full: not empty" in machine.refusal(package, "--run", tmp_path / "full")


def test_a_run_that_cannot_be_kept_is_refused(machine: Machine, package: Path):
    (machine.folder / "file").write_text("")
    machine.run = machine.folder / "file" / "run"
    assert machine.refusal(package) == f"{machine.run}: cannot be made; found Not a directory"


def test_no_engine_is_one_line(machine: Machine, package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert "cannot be started" in str(machine.serve(package, "--engine-command", "./no-such-engine").exception)
    assert not machine.run.exists()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert (
        machine.refusal(package)
        == "vllm: is not installed; expected `vllm` beside this program or on the path, or --engine-command"
    )


# --- what nobody signed -----------------------------------------------------------------------------------------------


def test_a_preparation_is_served_unsigned_with_a_warning(machine: Machine, tmp_path: Path):
    source = tmp_path / "source"
    prepare_small(source, tmp_path / "split", tp=1, convert="none")
    run("prepare", source, "-o", tmp_path / "prepared", "--workers", 1, "--engine", "vllm", "--tp", 2)
    done = machine.serve(tmp_path / "prepared", "--unsigned", "--check", held=1)

    assert done.exit_code == 0, done.output
    assert "warning: prepared is not verified: --unsigned" in done.stderr
    assert "--model-loader-extra-config" not in machine.started["words"]


def test_a_checkpoint_is_served_unsigned_as_any_engine_reads_it(machine: Machine, tmp_path: Path):
    prepare_small(tmp_path / "source", tmp_path / "split", tp=1, convert="none")
    done = machine.serve(tmp_path / "source", "--unsigned", "--check", "--tp", "2", "--name", "mine", held=1)

    assert done.exit_code == 0, done.output
    words = machine.started["words"]
    assert "--load-format" not in words
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--served-model-name") + 1] == "mine"


def test_a_standard_checkpoint_is_verified_here_and_read_by_the_engine_alone(machine: Machine, keys, tmp_path: Path):
    package = make_package(tmp_path / "package", keys[0], LLAMA, "--layout", "hf", "--convert", "mxfp8")
    assert "--fast: nobody would hash the weights of a standard checkpoint" in machine.refusal(package, "--fast")
    done = machine.serve(package, "--check", held=1)

    assert done.exit_code == 0, done.output
    assert "bytes hashed" in done.stderr
    assert not {"--load-format", "--model-loader-extra-config"} & set(machine.started["words"])


def test_ranks_cut_by_other_rules_are_refused(machine: Machine, tmp_path: Path):
    prepare_small(tmp_path / "source", tmp_path / "split", convert="none")
    assert "cut by the rules of another engine; expected prepare --engine vllm; found split" in machine.refusal(
        tmp_path / "split", "--unsigned"
    )


def test_an_incomplete_preparation_is_refused(machine: Machine, copy: Path):
    for name in ("model.sig", "manifest.json"):
        (copy / name).unlink()
    (copy / ".prepare").mkdir()
    assert "preparation is not complete" in machine.refusal(copy, "--unsigned")


# --- packages as plans see them ---------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "vocab_size": 320,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words", "options"),
    [
        (SMALL, ("--tp", 2), {"tp": 2}),
        (LLAMA, ("--tp", 2, "--convert", "mxfp8"), {"tp": 2, "convert": "mxfp8"}),
        (LLAMA, ("--tp", 4), {"tp": 4}),
        (LLAMA, ("--pp", 2), {"pp": 2}),
        (EXPERTS, ("--tp", 2, "--ep", 2, "--convert", "mxfp8"), {"tp": 2, "ep": 2, "convert": "mxfp8"}),
    ],
    ids=["tp2", "mxfp8, padded vocabulary", "repeated heads", "two stages", "whole experts"],
)
def test_the_plan_of_a_package_is_the_plan_it_was_made_by(
    tmp_path: Path, keys: tuple[Path, Path], fields: dict[str, Any], words: tuple[object, ...], options: dict[str, Any]
):
    package = make_package(tmp_path / "package", keys[0], fields, "--engine", "vllm", *words, scaled_down=False)
    served = open_served(package)
    whole = {**options, "engine": "vllm", "profile": Profile(concurrency=2, context_tokens=256)}
    source = plan_checkpoint(open_checkpoint(tmp_path / "package-checkpoint"), PlanRequest(**whole))
    found = plan_checkpoint(served.checkpoint, PlanRequest(**{**whole, "convert": "none"}))

    assert [[(line.component, line.nbytes, line.bound_nbytes) for line in rank.lines] for rank in found.ranks] == [
        [(line.component, line.nbytes, line.bound_nbytes) for line in rank.lines] for rank in source.ranks
    ]
    served.check_plan(found)
    with pytest.raises(TonnageError, match="not those of the plan on record"):
        served.check_plan(replace(found, ranks=tuple(replace(rank, lines=()) for rank in found.ranks)))


def test_a_cpu_holds_weights_and_cache_and_mxfp8_as_the_bf16_it_becomes():
    checkpoint = opened("meta-llama__Llama-3.1-8B-Instruct")
    asked = PlanRequest(engine="vllm", device="cpu", profile=Profile(concurrency=1, context_tokens=1024))
    plain = plan_checkpoint(checkpoint, asked)
    coded = plan_checkpoint(checkpoint, replace(asked, convert="mxfp8"))

    assert {line.component.partition(".")[0] for line in plain.ranks[0].lines} == {"weights", "engine"}
    assert coded.ranks[0].fixed_bytes == plain.ranks[0].fixed_bytes
    assert "engine.emulation" in {line.component for line in coded.ranks[0].lines}
    assert plain.ranks[0].cache_bytes == (1024 // 128 + 1) * 128 * 32 * 2 * 8 * 128 * 2
    assert plain.notes[-1].startswith("on a CPU only weights and cache are planned")


# --- words and environment --------------------------------------------------------------------------------------------

COMMAND = ServeCommand(words=("vllm", "serve", "/m", "--tensor-parallel-size", "1"))
HERE = Address(host="127.0.0.1", port=8000, name="m")


def test_a_build_without_a_command_names_the_model_by_a_flag():
    program = Program(words=("python", "-m", "server"), names_model=True)
    assert engine_words(COMMAND, program, HERE, ())[:5] == ("python", "-m", "server", "--model", "/m")


@pytest.mark.parametrize(
    "word",
    ["--max-model-len", "--max-model", "--max_num_seqs=3", "--no-enforce-eager", "--speculative-config.method", "-tp", "-tp=2",
     "-dpl", "-O3", "-cc.mode=0", "-t", "-e", "-s.method", "-qfp8", "-q=fp8", "-n2", "--convert", "--grpc", "--config", "--kv-offloading-size", "--load", "--h", "--device-memory-utilization", "-q"],
)  # fmt: skip
def test_a_flag_that_would_change_the_plan_is_refused(word: str):
    with pytest.raises(FlagsError, match=r"follows from the plan|something else than was planned"):
        engine_words(COMMAND, Program(words=("vllm", "serve")), HERE, (word, "1"))


@pytest.mark.parametrize(
    "word", ["--seed", "--chat-template", "--tokenizer", "--api-key", "--enable-log-requests", "-x", "--"]
)
def test_other_flags_are_passed_on(word: str):
    assert engine_words(COMMAND, Program(words=("vllm", "serve")), HERE, (word, "-1"))[-2:] == (word, "-1")


def test_the_environment_says_figures_imports_nothing_from_here_and_keeps_the_rest():
    mine = {"A": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "40", "CUDA_VISIBLE_DEVICES": "3"}
    theirs = engine_environment(mine)
    assert (theirs["A"], theirs["VLLM_LOGGING_LEVEL"], theirs["PYTHONSAFEPATH"]) == ("1", "INFO", "1")
    assert (theirs["HF_HUB_OFFLINE"], theirs["CUDA_VISIBLE_DEVICES"]) == ("1", "3")
    assert "VLLM_CPU_KVCACHE_SPACE" not in theirs
    assert engine_environment({"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"
    assert engine_environment(mine, ("0", "2"))["CUDA_VISIBLE_DEVICES"] == "0,2"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000")],  # noqa: S104
)
def test_clients_are_told_an_address_that_can_be_asked(host: str, url: str):
    assert replace(HERE, host=host).url == url


def test_remote_code_is_passed_on_with_a_warning(machine: Machine, package: Path):
    done = machine.serve(package, "--check", "--", "--trust-remote-code")
    assert done.exit_code == 0
    assert "warning: --trust-remote-code lets the engine execute what is in the package" in done.stderr


# --- memory -----------------------------------------------------------------------------------------------------------


def test_gpus_are_those_the_driver_says_and_the_engine_gets_the_same(machine: Machine, package: Path, monkeypatch):
    total, free = 24 << 30, (20 << 30, 22 << 30, 18 << 30)
    devices = tuple(
        DeviceMemory(
            index=n, uuid=f"GPU-{n}", name="Nobody's GPU", total_bytes=total, free_bytes=left, reserved_bytes=0
        )
        for n, left in enumerate(free)
    )
    monkeypatch.setattr("tonnage.supply_options.read_devices", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    machine.tell("serves")
    words = machine.words(package, "--check", "--device", "gpu")
    at = words.index("--supply")
    done = CliRunner().invoke(app, words[:at] + words[at + 2 :])

    assert "least free of 2: GPU 2" in done.stderr, done.output
    assert machine.started["environment"]["CUDA_VISIBLE_DEVICES"] == "2,1"
    assert machine.started["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    words = machine.started["words"]
    utilization = float(words[words.index("--gpu-memory-utilization") + 1])
    assert 0 < utilization < 18 / 24
    budget = int(words[words.index("--kv-cache-memory-bytes") + 1])
    plan = json.loads((machine.run / "plan.json").read_text())
    assert budget == (18 << 30) - max(rank["fixed_bytes"] for rank in plan["ranks"]) == plan["cache"]["given_bytes"]
    assert machine.record["device"] == "gpu"


def test_without_a_driver_nobody_guesses(machine: Machine, package: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine.tell("serves")
    words = machine.words(package, "--device", "gpu")
    at = words.index("--supply")
    result = CliRunner().invoke(app, words[:at] + words[at + 2 :])
    assert "--gpu NAME or --supply SIZE" in str(result.exception)
    assert "--device: is taken to be gpu; expected --device cpu" in str(result.exception)
    assert not machine.out.exists()


def test_a_run_is_kept_where_nobody_else_reads_it(tmp_path: Path):
    served = tmp_path / "served"
    places = []
    for _ in range(2):
        places.append(io.run_directory(None, "m", served, {"XDG_STATE_HOME": str(tmp_path)}))
        io.make_run_directory(places[-1])
    first, second = places
    assert first.parent == second.parent == tmp_path / "tonnage" / "serve"
    assert first != second
    assert stat.S_IMODE(first.stat().st_mode) == 0o700


def test_a_cpu_supplies_what_is_available_shared_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:    600 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(io, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(io, "_CGROUP", tmp_path)
    assert io.machine_supply(1).nbytes == 600 << 10
    assert io.machine_supply(3).nbytes == 200 << 10

    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    found = io.machine_supply(1)
    assert found.nbytes == 150_000
    assert "container" in found.source

    (tmp_path / "meminfo").write_text("nothing\n")
    with pytest.raises(DriverError, match="does not say what is available; expected --supply SIZE"):
        io.machine_supply(1)


# --- the log ----------------------------------------------------------------------------------------------------------


def test_a_log_keeps_how_it_began_and_what_came_last(tmp_path: Path):
    limit = 1 << 20
    log = BoundedLog(tmp_path, limit)
    lines = [f"line {number:09d}\n".encode() for number in range(200_000)]
    for begin in range(0, len(lines), 5000):
        log.write(b"".join(lines[begin : begin + 5000]))
    log.close()

    first, recent = (tmp_path / LOG).read_bytes(), (tmp_path / RECENT).read_bytes()
    assert b"".join(lines).startswith(first)
    assert b"".join(lines).endswith((tmp_path / EARLIER).read_bytes() + recent)
    assert len(first) == limit // 2
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= limit
    assert log.tail(2) == ["line 000199998", "line 000199999"]
    assert not log.begins_whole
    assert stat.S_IMODE((tmp_path / LOG).stat().st_mode) == 0o600


def test_a_log_that_cannot_be_written_holds_nobody_up(tmp_path: Path):
    log = BoundedLog(tmp_path, 1 << 10)
    for folder in (tmp_path / RECENT, tmp_path / EARLIER / "full"):
        folder.mkdir(parents=True)
    log.write(b"a\n" * 4096)
    log.write(b"the end\n")
    assert log.lost == "Directory not empty"
    assert log.tail(1) == ["the end"]
    assert (tmp_path / LOG).stat().st_size == 512
    log.close()
    log.write(b"later\n")


def test_a_log_on_a_cpu_says_what_is_held_and_reserved():
    seen = observe_blocks(iter([(Path(__file__).parent / "data" / "logs" / "vllm_0_32_cpu.log").read_bytes()]))
    assert seen is not None
    figures = {name: reading.quantity.nbytes for name, reading in seen.figures.items() if reading.quantity}
    assert (figures["weights_read"], figures["weights_held"]) == (269_030_016, 269_030_016)
    assert (figures["kv_reserved"], figures["node_total"]) == (64_424_509, 25_275_882_536)
    assert figures["kv_tokens"] == 2816
    assert [(entry.component, entry.quantity.nbytes) for entry in seen.ranks[0].ledger] == [
        ("weights", 269_030_016), ("cache", 64_424_509),
    ]  # fmt: skip
    assert "baseline" not in figures


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(end="checked", ready=True), 0),
        (Outcome(end="stopped", ready=True, signal=2), 0),
        (Outcome(end="stopped", ready=True, signal=2, contradicts=True), 5),
        (Outcome(end="checked", ready=True, contradicts=True), 5),
        (Outcome(end="stopped", ready=False, signal=15), 143),
        (Outcome(end="died", ready=False), 2),
        (Outcome(end="died", ready=False, contradicts=True), 5),
        (Outcome(end="died", ready=True, contradicts=True), 2),
        (Outcome(end="late", ready=False), 2),
    ],
)
def test_exit_code_says_how_it_ended(outcome: Outcome, code: int):
    assert outcome.exit_code == code
