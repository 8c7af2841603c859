"""Freeze what this version writes, for every later version to read: `python scripts/freeze.py --date 2026-11-30`.

Into ``tests/data/frozen/VERSION`` go a small checkpoint, its signed package, a preparation that was interrupted, and
one record of every kind. ``tests/test_frozen.py`` reads them. What a released version froze is never written again;
before a release the directory may be made anew with ``--again``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tonnage.checkpoint.config import parse_config
from tonnage.cli import main as tonnage
from tonnage.observe.io import hold_against, read_plan
from tonnage.prepare import run as preparing
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "data" / "frozen"
KEY = FROZEN / "key.pem"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 96,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
SOURCE_TIME = 1_700_000_000
"""Of the last change of the checkpoint's files: a preparation that was killed knows it, and a clone does not."""
SERVED = ("tests/data/configs/Qwen__Qwen3-30B-A3B.json", "--engine", "vllm", "--gpu", "rtx-pro-6000", "--profile",
          "c4-p4096", "--context", "8192", "--json")  # fmt: skip
LOG = "tests/data/logs/vllm_0_27_tp1.log"
EVIDENCE = "tests/data/logs_runtime.json"
TP = ("--tp", "2", "--convert", "mxfp8", "--workers", "1")
MOST_BYTES = 300_000


def write_checkpoint(path: Path) -> None:
    """Write a Llama of 41,000 parameters with equal weights everywhere: they are drawn with a seed."""
    write_rehearsal(parse_config(CONFIG, name="frozen"), path, RehearsalOptions())
    dice = random.Random(__version__)  # noqa: S311 - weights of a fixture
    for file in path.glob("*.safetensors"):
        raw = file.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        elements = (len(raw) - begin) // 2
        # sign, an exponent of 118 to 124, any mantissa: BF16 between 2^-9 and 2^-2
        values = (
            (dice.getrandbits(1) << 15) | (dice.randint(118, 124) << 7) | dice.getrandbits(7) for _ in range(elements)
        )
        file.write_bytes(raw[:begin] + b"".join(value.to_bytes(2, "little") for value in values))
    (path / "tokenizer.json").write_text('{"version": "1.0"}\n')
    set_times(path)


def set_times(path: Path) -> None:
    """Give the files of the checkpoint the time a killed preparation knows."""
    for file in path.iterdir():
        os.utime(file, (SOURCE_TIME, SOURCE_TIME))


def run(*words: object, into: Path | None = None) -> int:
    """Run the command in this process; its output goes into a file, or nowhere."""
    with mock.patch.object(sys, "argv", ["tonnage", *map(str, words)]), contextlib.ExitStack() as stack:
        out = stack.enter_context((into or Path(os.devnull)).open("w"))
        stack.enter_context(contextlib.redirect_stdout(out))
        try:
            tonnage()
        except SystemExit as stopped:
            return int(stopped.code or 0)
    return 0


def must(*words: object, into: Path | None = None) -> None:
    """Run the command; it must succeed.

    Raises:
        RuntimeError: It does not.
    """
    status = run(*words, into=into)
    if status:
        raise RuntimeError(f"{words}: exit code {status}")


@contextlib.contextmanager
def killed_after(tasks: int) -> Iterator[None]:
    """Let preparations end as by Ctrl-C once so many tasks are done."""
    whole = preparing.run_preparation

    def until(preparation: object, _: object, **how: object) -> object:
        def watch(standing: preparing.Standing) -> None:
            if standing.tasks_done >= tasks:
                raise KeyboardInterrupt

        return whole(preparation, watch, **how)

    with mock.patch.object(preparing, "run_preparation", until):
        yield


def freeze(place: Path, date: str) -> None:
    """Write everything into a directory, from within: records name what they are of as it was given."""
    checkpoint, package, measured = Path("checkpoint"), Path("package"), Path("measurement.json")
    write_checkpoint(checkpoint)
    with killed_after(2), contextlib.suppress(KeyboardInterrupt):
        run("prepare", checkpoint, *TP, "-o", "killed")
    if not Path("killed/.prepare/journal.jsonl").is_file():
        raise RuntimeError("the preparation was not killed")
    must("prepare", checkpoint, *TP, "-o", package)
    must("export", package, "--key", KEY, "--profile", "c4-p4096", "--date", date)
    must("measure", package, "-o", measured, "--date", date)
    must("compare", checkpoint, package, "--json", into=Path("compare.json"))
    must("calibrate", ROOT / "src/tonnage/synth/kimi_k31.json", "--measured", ROOT / "tests/data/seed_case.json",
         "--device-bytes", "802341903064", "--draft-bytes", "5373504512", "-o", "credit.json", "--name",
         f"frozen-{__version__}", "--date", date)  # fmt: skip
    served = Path("served-plan.json").absolute()
    with contextlib.chdir(ROOT):  # a plan names its config as it was given
        must("plan", *SERVED, into=served)
    must("observe", ROOT / LOG, "--save", "observation.json", "--gpu", "rtx-5090")
    status = 5 if hold_against(str(ROOT / LOG), read_plan(Path("served-plan.json"))).exceeds else 0
    evidence = json.loads((ROOT / EVIDENCE).read_text())
    row = evidence["rows"][0]
    config = evidence["configs"][row["model_id"]]
    Path("logs.jsonl").write_text(json.dumps({**row, "config": config}) + "\n")
    must("calibrations", "fit-terms", "logs.jsonl", "-o", "terms")
    facts = {"version": __version__, "date": date, "source_time": SOURCE_TIME, "observed_status": status, "log": LOG}
    Path("frozen.json").write_text(json.dumps(facts, indent=2) + "\n")
    nbytes = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    if nbytes > MOST_BYTES:
        raise RuntimeError(f"{nbytes} bytes; at most {MOST_BYTES}")
    print(f"{place}: {nbytes:,} bytes")


def main() -> None:
    """Freeze this version."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--date", required=True, help="of the release, YYYY-MM-DD")
    options.add_argument("--again", action="store_true", help="replace what is there: only before the release")
    said = options.parse_args()
    place = FROZEN / __version__
    if said.again:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with contextlib.chdir(place):
        freeze(place, said.date)


if __name__ == "__main__":
    main()
