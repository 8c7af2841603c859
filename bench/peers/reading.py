"""Headers: how long safetensors and this tool take to read all of a checkpoint, and which lies each refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from environments import CONVERTERS, ROOT, versions

from tonnage.api import read_config
from tonnage.synth.io import RehearsalOptions, write_rehearsal

SCRIPT = Path(__file__).with_name("read_headers.py")
HOSTILE = ROOT / "tests" / "hostile" / "headers"
CONFIGS = ROOT / "tests" / "data" / "configs"
MODELS = ("moonshotai__Kimi-K3", "meta-llama__Llama-3.1-8B-Instruct")
ROUNDS = 5
WAYS = {
    "opened": "safetensors, every file opened",
    "listed": "safetensors, dtype and shape of every tensor",
    "tonnage": "**tonnage**, the same and the index, all checked",
}


def run(way: str, directory: Path) -> dict[str, Any]:
    """Return what one way says of a directory, in a process of its own; one that crashes says so."""
    python = Path(sys.executable) if way == "tonnage" else CONVERTERS.python()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src") if way == "tonnage" else ""}
    done = subprocess.run(
        [python, SCRIPT, way, directory], check=False, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        return {"error": f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def speed(directory: Path) -> list[str]:
    """Return a row for every way: tensors, milliseconds, of the way that lists, peak memory."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(ROUNDS + 1):
        for way, found in runs.items():
            ran = run(way, directory)
            if number:  # the first round fills the page cache
                found.append(ran)
    listed = [ran["seconds"] for ran in runs["listed"]]
    lines = []
    for way, name in WAYS.items():
        seconds = [ran["seconds"] for ran in runs[way]]
        ratio = median(own / other for own, other in zip(seconds, listed, strict=True))
        tensors, peak = runs[way][0]["tensors"], max(ran["peak_mib"] for ran in runs[way])
        lines.append(f"| {name} | {tensors:,} | {median(seconds) * 1000:.1f} | {ratio:.3f} | {peak} |")
    return lines


def lies(scratch: Path) -> tuple[int, dict[str, list[str]]]:
    """Return how many hostile headers there are, and which of them each reader accepts."""
    files = sorted(HOSTILE.glob("*.safetensors"))
    accepted: dict[str, list[str]] = {"safetensors": [], "tonnage": []}
    for path in files:
        directory = scratch / path.stem
        directory.mkdir()
        shutil.copy(path, directory / "model.safetensors")
        for reader, way in (("safetensors", "listed"), ("tonnage", "tonnage")):
            if "error" not in run(way, directory):
                accepted[reader].append(path.stem)
    return len(files), accepted


def section(scratch: Path) -> tuple[list[str], bool]:
    """Return the tables, and whether this tool refuses every lie."""
    lines = [f"safetensors {versions(CONVERTERS.python(), ['safetensors'])['safetensors']}.", ""]
    for name in MODELS:
        directory = scratch / name
        rehearsal = RehearsalOptions(sharded=True)
        write_rehearsal(read_config(CONFIGS / f"{name}.json"), directory, rehearsal)
        files = len(list(directory.glob("*.safetensors")))
        lines += [
            f"{name.replace('__', '/')}, {files} files; median of {ROUNDS} fresh processes, without importing:",
            "",
            "| way | tensors | ms | of listing | peak MiB |",
            "| --- | ---: | ---: | ---: | ---: |",
            *speed(directory),
            "",
        ]
        shutil.rmtree(directory)
    count, accepted = lies(scratch)
    lines += [
        f"{count} headers that lie (`tests/hostile/headers`):",
        "",
        "| reader | refused | accepted |",
        "| --- | ---: | --- |",
        *(
            f"| {'**tonnage**' if reader == 'tonnage' else reader} | {count - len(names)} | {', '.join(names)} |"
            for reader, names in accepted.items()
        ),
    ]
    return lines, not accepted["tonnage"]
