"""Other planners and this one on the same models and the same public logs, in one run.

Weights, cache and verdicts of every peer against what engines logged (``tests/data/logs_*.json``) and against vLLM's
own classes, and the time of an answer.
Peers live in an environment of their own, made when it is not there; ``peers/adapters.py`` asks them.

Run: python bench/peers.py [--write]   (``--write`` puts the tables into RESULTS.md)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
ENVIRONMENT = ROOT / ".venv-peers"
ADAPTERS = Path(__file__).parent / "peers" / "adapters.py"
REQUIREMENTS = Path(__file__).parent / "peers" / "requirements.txt"
RESULTS = Path(__file__).parent / "RESULTS.md"
BEGIN, END = "<!-- peers: written by bench/peers.py -->", "<!-- end of peers -->"
PEERS = ("hf-mem", "vramscout", "llm-d-planner", "accelerate", "vramcalc", "modelinfo-cli", "hf-vram-calc")
GIB = 1 << 30

sys.path.insert(0, str(ROOT / "scripts"))
import plan_agreement  # noqa: E402 - a script is no package


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One log, as it is put to every peer.

    Attributes:
        row: What the log says.
        question: The request, with the directory of the checkpoint.
        weights: Logged bytes of weights per rank.
        allocated: Bytes vLLM's own classes allocate for a rank.
        cache: Logged bytes that as many tokens take as one request may have, per rank.
        room: Logged bytes the cache had, per rank.
        ran: Whether the engine started; ``None`` where the log does not tell.
    """

    row: Mapping[str, Any]
    question: Mapping[str, Any]
    weights: int | None = None
    allocated: int | None = None
    cache: float | None = None
    room: int | None = None
    ran: bool | None = None


# --- cases ------------------------------------------------------------------------------------------------------------


class Rehearsals:
    """Checkpoints of whole headers over sparse files, one per config, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        """Make them below this folder."""
        self._folder = folder
        self._made: dict[str, str] = {}

    def of(self, fields: Mapping[str, Any]) -> str | None:
        """Return the directory of a config's checkpoint; ``None`` where no recipe describes it."""
        text = json.dumps(fields, sort_keys=True)
        if text not in self._made:
            self._made[text] = self._make(text)
        return self._made[text] or None

    def _make(self, text: str) -> str:
        number = len(self._made)
        source = self._folder / f"{number}.json"
        source.write_text(text)
        output = self._folder / f"{number}"
        done = subprocess.run(
            [sys.executable, "-c", "import tonnage.cli; tonnage.cli.main()", "synth", str(source), "-o", str(output)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            print(f"no rehearsal: {done.stderr.decode().splitlines()[-1]}", file=sys.stderr)
        return str(output) if done.returncode == 0 else ""


def cases(folder: Path) -> list[Case]:
    """Return every case there is a checkpoint for."""
    made = Rehearsals(folder)
    return [*_weight_cases(made), *_cache_cases(made), *_class_cases(made)]


def _weight_cases(made: Rehearsals) -> Iterator[Case]:
    for row, checkpoint, request in plan_agreement.weighed():
        directory = made.of(checkpoint.config.fields)
        if directory is None:
            continue
        total, share = row.get("gpu_mem_gib"), row.get("gpu_memory_utilization")
        asked = bool(total and share and row.get("max_model_len"))
        question = {
            "id": f"weights {row['id']}",
            "model": row["model"],
            "directory": directory,
            "engine": row["engine"],
            "version": request.version,
            "tp": request.tp,
            "pp": request.pp,
            "dcp": 1,
            "tokens": row.get("max_model_len") or 0,
            "max_batched_tokens": row.get("max_num_batched_tokens"),
            "gpu_bytes": int(Decimal(str(total)) * GIB) if asked else None,
            "utilization": float(share) if asked else None,
        }
        yield Case(
            row=row, question=question, weights=int(Decimal(row["weights_gib"]) * GIB), ran=True if asked else None
        )


def _cache_cases(made: Rehearsals) -> Iterator[Case]:
    for row in plan_agreement.compared_caches():
        length = row.get("context_tokens")
        if not length or row.get("draft_tokens") or not row["exact"]:
            continue
        checkpoint = plan_agreement.cache_checkpoint(row)
        directory = made.of(checkpoint.config.fields)
        if directory is None:
            continue
        room, held = row["kv_gib"] * GIB, row.get("kv_tokens")
        question = {
            "id": f"cache {row['id']}",
            "model": row["model"],
            "directory": directory,
            "engine": "vllm",
            "version": row.get("version"),
            "tp": row["tp"],
            "pp": row["pp"],
            "dcp": row["dcp"],
            "tokens": length,
            "kv_dtype": row["kv_dtype"],
            "max_batched_tokens": row.get("max_batched_tokens"),
        }
        yield Case(
            row=row,
            question=question,
            cache=room * length / held if held else row["needed_gib"] * GIB,
            room=round(room),
            ran=not row.get("needed_gib"),
        )


def _class_cases(made: Rehearsals) -> Iterator[Case]:
    """Yield the models of which vLLM's classes are known as published, on one rank and on eight."""
    oracle = json.loads((DATA / "vllm_oracle.json").read_text())
    for row in (*oracle["first"], *oracle["more"]):
        plain = row["quant"] == "config" and not row["ep"] and row["pp"] == 1 and row["rank"] == 0
        if not plain or row["tp"] not in (1, 8):
            continue
        fields = json.loads((DATA / "configs" / f"{row['config']}.json").read_text())
        directory = made.of(fields)
        if directory is not None:
            question = {
                "id": f"classes {row['config']} tp{row['tp']}",
                "model": row["config"].replace("__", "/"),
                "directory": directory,
                "engine": "vllm",
                "tp": row["tp"],
                "pp": 1,
                "dcp": 1,
                "tokens": 0,
            }
            yield Case(row=row, question=question, allocated=row["params_bytes"])


# --- answers ----------------------------------------------------------------------------------------------------------


def environment() -> Path:
    """Return the interpreter of the peers, installed if they are not."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS], check=True)
        stamp.write_text(REQUIREMENTS.read_text())
    return python


def ask(peer: str, python: Path, asked: Iterable[Case]) -> dict[str, dict[str, Any]]:
    """Return a peer's answers by case."""
    lines = "".join(f"{json.dumps(case.question)}\n" for case in asked)
    done = subprocess.run(
        [python, ADAPTERS, peer],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(ROOT / "src")}
        if peer == "tonnage"
        else {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(ENVIRONMENT)},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        print(
            f"{peer} ended with {done.returncode} after {len(answers)} answers: {done.stderr[-500:]}", file=sys.stderr
        )
    return {answer["id"]: answer for answer in answers}


# --- tables -----------------------------------------------------------------------------------------------------------


def sizes(found: Mapping[str, Mapping[str, Any]], asked: list[Case], what: str, key: str | None = None) -> str:
    """Return the columns of one figure: answered, within 1 %, median and largest error, how many under."""
    errors = []
    for case in asked:
        truth, said = getattr(case, what), found.get(case.question["id"], {}).get(key or what)
        if truth and said is not None:
            errors.append(said / truth - 1)
    if not errors:
        return "0 | | | | "
    close = sum(abs(error) <= 0.01 for error in errors)
    under = sum(error < -0.005 for error in errors)
    worst = max(errors, key=abs)
    return f"{len(errors)} | {close} | {median(map(abs, errors)):.1%} | {worst:+.0%} | {under}"


def rooms(found: Mapping[str, Mapping[str, Any]], asked: list[Case]) -> str:
    """Return the columns of the verdict on a known room: launches the engine refused, and those it ran."""
    refused = [case for case in asked if case.room and case.ran is False]
    ran = [case for case in asked if case.room and case.ran]

    def needs(case: Case) -> int | None:
        need = found.get(case.question["id"], {}).get("cache")
        return None if need is None else int(need)

    right = sum((needs(case) or 0) > (case.room or 0) for case in refused)
    wrong = sum((needs(case) or 0) > (case.room or 0) for case in ran)
    answered = sum(needs(case) is not None for case in (*refused, *ran))
    return f"{answered} of {len(refused) + len(ran)} | {right} of {len(refused)} | {wrong} of {len(ran)}"


def verdicts(found: Mapping[str, Mapping[str, Any]], asked: list[Case]) -> str:
    """Return the columns of the whole verdict on launches that ran."""
    known = [found.get(case.question["id"], {}).get("fits") for case in asked if case.weights and case.ran]
    said = [one for one in known if one is not None]
    return f"{len(said)} of {len(known)} | {sum(not one for one in said)}" if said else "none | "


def table(answers: Mapping[str, Mapping[str, Mapping[str, Any]]], asked: list[Case]) -> str:
    """Return all tables as Markdown."""
    weighed = [case for case in asked if case.weights]
    cached = [case for case in asked if case.cache]
    allocated = [case for case in asked if case.allocated]

    def rows(columns: Any) -> list[str]:
        return [
            f"| {'**tonnage**' if peer == 'tonnage' else peer} | {columns(found)} |" for peer, found in answers.items()
        ]

    return "\n".join(
        [
            f"Weights per rank, {len(weighed)} logs. Under: planned less than was held, by more than 0.5 %.",
            "",
            "| planner | answered | within 1 % | median error | largest | under |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            f"| **tonnage**, bound | {sizes(answers['tonnage'], weighed, 'weights', 'bound')} |",
            *rows(lambda found: sizes(found, weighed, "weights")),
            "",
            f"Parameters of a rank as vLLM 0.32.0's classes allocate them, {len(allocated)} cases on 1 and 8 ranks.",
            "",
            "| planner | answered | within 1 % | median error | largest | under |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *rows(lambda found: sizes(found, allocated, "allocated", "weights")),
            "",
            f"Cache of one request of the longest context, per rank, {len(cached)} logs of the exact model.",
            "",
            "| planner | answered | within 1 % | median error | largest | under |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *rows(lambda found: sizes(found, cached, "cache")),
            "",
            "Does that request fit into the room the engine had: launches it refused, and launches it ran.",
            "",
            "| planner | answered | refused rightly | refused wrongly |",
            "| --- | ---: | ---: | ---: |",
            *rows(lambda found: rooms(found, cached)),
            "",
            "Does one request fit on the GPU, by its memory and the launch's share: launches that ran. Time.",
            "",
            "| planner | answered | refused wrongly | median ms |",
            "| --- | ---: | ---: | ---: |",
            *rows(lambda found: f"{verdicts(found, weighed)} | {_milliseconds(found)}"),
        ]
    )


def _milliseconds(found: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{median(one['seconds'] for one in found.values()) * 1000:.1f}" if found else ""


def main() -> int:
    """Ask everybody and print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        asked = cases(Path(folder))
        python = environment()
        answers = {"tonnage": ask("tonnage", Path(sys.executable), asked)}
        answers |= {peer: ask(peer, python, asked) for peer in PEERS}
    for peer, found in answers.items():
        errors = [answer["error"] for answer in found.values() if "error" in answer]
        if errors:
            print(f"{peer}: no answer to {len(errors)} of {len(found)}, the first: {errors[0]}", file=sys.stderr)
    text = table(answers, asked)
    print(text)
    if "--write" in sys.argv[1:]:
        before, _, rest = RESULTS.read_text().partition(BEGIN)
        RESULTS.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
