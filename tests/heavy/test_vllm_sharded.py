"""Files of ``export-names --style vllm-sharded`` in stock vLLM: every rank holds what default loading gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import QWEN2, QWEN3_MOE, write_model

from conftest import HERE

pytestmark = pytest.mark.heavy

TONNAGE = Path(sys.executable).with_name("tonnage")
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
QWEN3 = {**QWEN3_MOE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llama": (LLAMA, {"tp": 2}, 15),
    "qwen2": (QWEN2, {"tp": 2}, 16),
    "copied heads": (QWEN2, {"tp": 4}, 16),
    "qwen3": (QWEN3, {"tp": 2}, 19),
    "experts cut": (QWEN3_MOE, {"tp": 2}, 21),
    "experts whole": (QWEN3_MOE, {"tp": 2, "ep": True}, 21),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    jobs = []
    for name, (config, topology, _) in CASES.items():
        base = folder / name.replace(" ", "-")
        base.mkdir()
        checkpoint = write_model(config, base / "checkpoint")
        tp = str(topology["tp"])
        sizes = ["--tp", tp, "--ep", tp if topology.get("ep") else "1"]
        run("prepare", checkpoint, *sizes, "--engine", "vllm", "-o", base / "ranks")
        run("export-names", base / "ranks", "--style", "vllm-sharded", "-o", base / "sharded")
        jobs.append({"sharded": str(base / "sharded"), "checkpoint": str(checkpoint), "topology": topology})
    output = folder / "answers.json"
    done = subprocess.run(
        [sys.executable, HERE / "sharded_contents.py", output, *map(json.dumps, jobs)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(output.read_text()), strict=True))


def run(*words: str | Path) -> None:
    done = subprocess.run([TONNAGE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_what_default_loading_gives_it(answers: dict[str, Any], case: str):
    _, topology, parameters = CASES[case]
    assert answers[case] == [{"parameters": parameters, "different": []}] * topology["tp"]
