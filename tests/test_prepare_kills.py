"""Preparations killed at random moments: what has a final name is whole, and the next run ends where it should.

A small checkpoint is cut into many jobs that are read in small windows. A run says so often as it gets on; it, or one of
its workers, is killed a random moment after a random one of these lines.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samples import LLAMA, PATIENCE, rehearse

KILLS = 30
LANES = 2
MOST_LINES = 25
SMALL: dict[str, Any] = {**LLAMA, "num_hidden_layers": 6, "vocab_size": 301}
RUN = """
import sys
from pathlib import Path
from tonnage.api import open_checkpoint
from tonnage.assignment import convert_to_mxfp8
from tonnage.engines import engine
from tonnage.errors import TonnageError
from tonnage.placement import place
from tonnage.prepare.request import PrepareOptions, prepare_placement
from tonnage.prepare.run import run_preparation
from tonnage.topology import Topology

source, output = map(Path, sys.argv[1:3])
checkpoint = open_checkpoint(source)
assignment = convert_to_mxfp8(checkpoint.assignment) if "convert" in sys.argv else checkpoint.assignment
placement = place(assignment, Topology(tp=2), engine("split"))
options = PrepareOptions(workers=2, window_bytes=2048, job_bytes=150_000)
try:
    preparation = prepare_placement(
        placement, source, output, options, headers=checkpoint.headers, digest=checkpoint.digest
    )
    run_preparation(preparation, lambda standing: print(standing.tasks_done, standing.resumed_bytes, flush=True))
except TonnageError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@dataclass
class Run:
    """A preparation in a process of its own."""

    process: subprocess.Popen[str]
    resumed: bool = False
    """Whether a line read so far says that bytes of an earlier run were kept."""

    def line(self) -> str:
        """Wait for the next line of progress; empty when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.resumed |= bool(line) and int(line.split()[1]) > 0
        return line

    def workers(self) -> list[int]:
        """Return its children."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> tuple[int, str]:
        """Wait for its end; return exit status and what it said on stderr."""
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def start(source: Path, output: Path, *, convert: bool) -> Run:
    return Run(
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(source), str(output), *["convert"] * convert],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def contents(output: Path) -> dict[str, bytes]:
    """Every file under its final name; the summary without its times."""
    found = {}
    for path in output.rglob("*"):
        relative = path.relative_to(output)
        if path.is_file() and relative.parts[0] != ".prepare" and not path.name.endswith(".partial"):
            found[relative.as_posix()] = path.read_bytes()
    if "prepare.json" in found:
        document = json.loads(found["prepare.json"])
        del document["seconds"], document["worker_seconds"]
        found["prepare.json"] = json.dumps(document).encode()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights."""
    path = tmp_path_factory.mktemp("kills") / "source"
    rehearse(path, SMALL)
    return path


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, bytes]]:
    """What an undisturbed run writes, without and with conversion."""
    found = {}
    for convert in (False, True):
        output = tmp_path_factory.mktemp("kills") / "undisturbed"
        run = start(source, output, convert=convert)
        lines = sum(1 for _ in iter(run.line, ""))
        assert run.end() == (0, "")
        assert lines >= MOST_LINES
        assert not (output / ".prepare").exists()
        found[convert] = contents(output)
    return found


def kill_once(run: Run, dice: random.Random, *, a_worker: bool) -> bool:
    """Kill a run or one of its workers at a random moment; False if it ended before."""
    for _ in range(dice.randrange(1, MOST_LINES)):
        if not run.line():
            return False
    time.sleep(dice.random() * 0.01)  # so that it is hit between any two lines, not right after one
    workers = run.workers()
    victim = dice.choice(workers) if a_worker and workers else run.process.pid
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def check_contents(output: Path, wanted: dict[str, bytes], *, complete: bool) -> None:
    """Every final name stands for a whole file, and the summary for a complete preparation."""
    found = contents(output)
    assert [name for name in found if found[name] != wanted.get(name)] == []
    if complete or "prepare.json" in found:
        assert found == wanted


def kill_and_resume(source: Path, undisturbed: dict[bool, dict[str, bytes]], folder: Path, seed: int) -> int:
    """Disturb preparations until enough were killed; return how many went on with what was there."""
    dice = random.Random(seed)
    kills = resumed = preparations = 0
    while kills < KILLS // LANES:
        output, convert = folder / f"{seed}-{preparations}", preparations == 0
        preparations += 1
        for _ in range(4):
            run = start(source, output, convert=convert)
            kills += kill_once(run, dice, a_worker=dice.random() < 0.4)
            resumed += run.resumed
            status, said = run.end()
            assert status in (0, -signal.SIGKILL, 2), said
            if status == 2:
                assert "its worker was killed; run the same command again to resume; found SIGKILL" in said
            check_contents(output, undisturbed[convert], complete=status == 0)
        run = start(source, output, convert=convert)
        run.line()
        assert run.end() == (0, "")
        resumed += run.resumed
        check_contents(output, undisturbed[convert], complete=True)
        assert {path.name for path in output.rglob("*.partial")} == set()
        assert not (output / ".prepare").exists()
    return resumed


def test_whatever_is_killed_nothing_incomplete_has_a_final_name_and_the_end_is_the_same(
    source: Path, undisturbed: dict[bool, dict[str, bytes]], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(LANES) as pool:
        lanes = [pool.submit(kill_and_resume, source, undisturbed, tmp_path, 20261130 + lane) for lane in range(LANES)]
    resumed = sum(lane.result() for lane in lanes)
    assert resumed > 0, "no run went on with what another had written"
