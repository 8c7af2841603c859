"""Ask every planner, and make the tables of their answers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import planner_scores
from environments import PLANNERS, ROOT, versions
from planner_cases import Case, Rehearsals, cases

ADAPTERS = Path(__file__).with_name("adapters.py")
PEERS = ("hf-mem", "vramscout", "llm-d-planner", "accelerate", "vramcalc", "modelinfo-cli", "hf-vram-calc")


def ask(peer: str, python: Path, asked: Iterable[Case]) -> dict[str, dict[str, Any]]:
    """Return a peer's answers by case; its parameters are its weights, where it makes no difference of them."""
    lines = "".join(f"{json.dumps(case.question)}\n" for case in asked)
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(PLANNERS.directory)}
    if peer == planner_scores.OWN:
        environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [python, ADAPTERS, peer], input=lines, capture_output=True, text=True, check=False, env=environment
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        print(f"{peer} ended with {done.returncode} after {len(answers)} answers", file=sys.stderr)
    return {answer["id"]: {"parameters": answer.get("weights"), **answer} for answer in answers}


def section() -> tuple[list[str], bool]:
    """Return the tables, and whether every miss of this tool has a reason."""
    with tempfile.TemporaryDirectory() as folder:
        found = cases(Rehearsals(Path(folder)))
        asked = [case for case in found if not case.aside]
        python = PLANNERS.python()
        answers = {planner_scores.OWN: ask(planner_scores.OWN, Path(sys.executable), asked)}
        answers |= {peer: ask(peer, python, asked) for peer in PEERS}
    named = ", ".join(f"{name} {version}" for name, version in versions(python, (*PEERS, "transformers")).items())
    lines = planner_scores.tables(answers, asked, [case for case in found if case.aside])
    return [f"Planners: {named}.", "", *lines], not planner_scores.unexplained(lines)
