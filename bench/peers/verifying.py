"""Verification of one package by this tool and by stock ``model_signing``: time, and which faults each finds.

Both have the public key and the same files. What only this tool can be asked (one rank, one of two keys) is not here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench_verify import STOCK, TONNAGE, Case, make_package, seconds_inside, write_keys
from environments import CONVERTERS, versions

LAYERS = 8
SMALL_LAYERS = 1
ROUNDS = 5
RANKS = 2


class Fault(NamedTuple):
    """Something done to a copy of a package.

    Attributes:
        what: In words.
        spoil: Does it to a directory; beside it are the keys of a stranger and another package of the same signer.
        harmless: It changes nothing that is signed, so that finding it is a false alarm.
    """

    what: str
    spoil: Callable[[Path, Path], None]
    harmless: bool = False


def weights(package: Path) -> list[Path]:
    """Return the weight files of a package, in order."""
    return sorted(package.rglob("*.safetensors"))


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def _swap(left: Path, right: Path) -> None:
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


def _link(path: Path) -> None:
    outside = path.parents[2] / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def _foreign(package: Path, other: Path) -> None:
    shutil.copy(other / "model.sig", package / "model.sig")


def _unsigned_statement(package: Path, _: Path) -> None:
    bundle = json.loads((package / "model.sig").read_text())
    bundle["dsseEnvelope"]["signatures"] = []
    (package / "model.sig").write_text(json.dumps(bundle))


FAULTS = (
    Fault("one bit of a weight flipped", lambda p, _: _flip(weights(p)[0], weights(p)[0].stat().st_size - 7)),
    Fault("one bit of a header flipped", lambda p, _: _flip(weights(p)[0], 20)),
    Fault("one bit of config.json flipped", lambda p, _: _flip(p / "config.json", 3)),
    Fault("weight file missing", lambda p, _: weights(p)[-1].unlink()),
    Fault("weight file cut short", lambda p, _: os.truncate(weights(p)[0], weights(p)[0].stat().st_size - 1)),
    Fault("weight file a byte longer", lambda p, _: os.truncate(weights(p)[0], weights(p)[0].stat().st_size + 1)),
    Fault("weight file added", lambda p, _: shutil.copy(weights(p)[0], weights(p)[0].with_name("more.safetensors"))),
    Fault("directory with a file added", lambda p, _: shutil.copytree(weights(p)[0].parent, p / "more")),
    Fault("empty directory added", lambda p, _: (p / "more").mkdir()),
    Fault("hidden file added", lambda p, _: (p / ".hidden").write_text("x")),
    Fault("files of two ranks swapped", lambda p, _: _swap(weights(p)[0].parent, weights(p)[-1].parent)),
    Fault("weight file is a link to its bytes elsewhere", lambda p, _: _link(weights(p)[0])),
    Fault("signature missing", lambda p, _: (p / "model.sig").unlink()),
    Fault("signature of another package of the signer", _foreign),
    Fault("signature stripped from its statement", _unsigned_statement),
    Fault("modes and times of files changed", lambda p, _: _touch(p), harmless=True),
)


def _touch(package: Path) -> None:
    for path in weights(package):
        path.chmod(0o600)
        os.utime(path, (1, 1))


def words(package: Path, public: Path) -> dict[str, list[object]]:
    """Return the command of each tool."""
    return {
        "tonnage": [TONNAGE, "verify", package, "--key", public, "--json"],
        "model_signing": [CONVERTERS.python(), "-c", STOCK, package, public],
    }


def finds(command: list[object]) -> str:
    """Return what a tool says of a package: empty if it accepts it, its first line of complaint otherwise."""
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)
    if not done.returncode:
        return ""
    if done.stdout.startswith("{"):
        return str(json.loads(done.stdout)["problems"][0])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"ended with {done.returncode}"


def detection(whole: Path, other: Path, public: Path, scratch: Path) -> tuple[list[str], bool]:
    """Return a row for every fault, and whether this tool finds all of them and no more."""
    lines, right = [], True
    for fault in FAULTS:
        spoilt = scratch / "spoilt" / "package"
        shutil.copytree(whole, spoilt)
        fault.spoil(spoilt, other)
        said = {tool: finds(command) for tool, command in words(spoilt, public).items()}
        right = right and bool(said["tonnage"]) is not fault.harmless
        lines.append(f"| {fault.what} | {' | '.join('refused' if one else 'accepted' for one in said.values())} |")
        shutil.rmtree(spoilt.parent)
    return lines, right


def speed(package: Path, public: Path) -> list[str]:
    """Return the columns of one package: GB/s of both and the ratio."""
    nbytes = sum(path.stat().st_size for path in weights(package))
    runs: dict[str, list[float]] = {tool: [] for tool in words(package, public)}
    for number in range(ROUNDS + 1):
        for tool, command in words(package, public).items():
            taken = seconds_inside(command)
            if number:  # the first round fills the page cache
                runs[tool].append(taken)
    ratio = median(stock / own for own, stock in zip(runs["tonnage"], runs["model_signing"], strict=True))
    speeds = [f"{nbytes / 1e9 / min(taken):.2f}" for taken in runs.values()]
    return [f"{nbytes / 1e9:.2f}", *speeds, f"{ratio:.2f}"]


def section(scratch: Path) -> tuple[list[str], bool]:
    """Return the tables, and whether this tool finds every fault and nothing else."""
    private, public = write_keys(scratch)
    version = versions(CONVERTERS.python(), ["model-signing"])["model-signing"]
    lines = [
        f"model-signing {version}. GB/s inside the process, shortest of {ROUNDS} rounds; ratio: their median.",
        "",
        "| package | GB | tonnage | model_signing | times |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case in (Case(8, "blake3"), Case(8, "sha256")):
        package = make_package(scratch / case.hash, case, LAYERS, private)
        lines.append(f"| {case.hash}, {len(weights(package))} files | {' | '.join(speed(package, public))} |")
        shutil.rmtree(package)
    whole = make_package(scratch / "whole", Case(1, "sha256"), SMALL_LAYERS, private, tp=RANKS)
    other = make_package(scratch / "other", Case(1, "sha256"), SMALL_LAYERS + 1, private, tp=RANKS)
    found, right = detection(whole, other, public, scratch)
    accepted = [tool for tool, command in words(whole, public).items() if not finds(command)]
    lines += [
        "",
        f"A package of {RANKS} ranks, which {' and '.join(accepted) or 'nobody'} accept:",
        "",
        "| what is done to it | tonnage | model_signing |",
        "| --- | --- | --- |",
        *found,
    ]
    return lines, right and "tonnage" in accepted
