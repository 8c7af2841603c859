import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smollm2 import Weights
from vllm_classes import Rank, parameter_bytes

from tonnage import PlanRequest, open_checkpoint, plan_checkpoint

pytestmark = pytest.mark.heavy

PARAMETERS = 134_515_008
BF16_BYTES = 2
TENSORS = 30 * 9 + 2
BYTES_PER_RANK = {1: 269_030_016, 3: 89_723_520}
TONNAGE = Path(sys.executable).with_name("tonnage")
GENERATE = Path(__file__).with_name("generate.py")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights()


@pytest.fixture(scope="module")
def checkpoint(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("SmolLM2-135M")
    weights.write_checkpoint(folder)
    return folder


def tonnage(*arguments: str | Path) -> Any:
    answer = subprocess.run([TONNAGE, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


def test_inspect_finds_nothing_missing_or_unexpected(checkpoint: Path):
    found = tonnage("inspect", checkpoint)

    assert found["source"] == "headers"
    assert found["tensors"] == TENSORS
    assert found["payload_bytes"] == PARAMETERS * BF16_BYTES
    assert found["notes"] == []


def test_plan_for_three_ranks_is_the_known_number(checkpoint: Path):
    ranks = tonnage("plan", checkpoint, "--engine", "vllm", "--tp", "3")["ranks"]

    assert [rank["weights_bytes"] for rank in ranks] == [BYTES_PER_RANK[3]] * 3


@pytest.mark.parametrize("tp", BYTES_PER_RANK)
def test_plan_equals_vllm_classes(checkpoint: Path, tp: int):
    config = json.loads((checkpoint / "config.json").read_text())
    plan = plan_checkpoint(open_checkpoint(checkpoint), PlanRequest(tp=tp, engine="vllm"))

    allocated = [parameter_bytes(config, Rank(tp=tp, rank=rank)) for rank in range(tp)]

    assert allocated == [BYTES_PER_RANK[tp]] * tp
    assert [rank.weights_bytes for rank in plan.ranks] == allocated


def test_vllm_loads_it_and_it_makes_sense(weights: Weights, checkpoint: Path):
    """A wrong order of query and key rows still knows the capital, but not which letter is next."""
    prompts = {
        ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"): ["ĠParis"],
        ("A", "ĠB", "ĠC", "ĠD", "ĠE"): ["ĠF", "ĠG", "ĠH", "ĠI"],
    }
    asked = [json.dumps(weights.token_ids(*prompt)) for prompt in prompts]

    answer = subprocess.run(
        [sys.executable, GENERATE, checkpoint, "5", *asked], capture_output=True, text=True, check=False
    )

    assert answer.returncode == 0, answer.stderr
    found = [json.loads(line) for line in answer.stdout.splitlines()[-len(prompts) :]]
    expected = [weights.token_ids(*tokens) for tokens in prompts.values()]
    assert [tokens[: len(wanted)] for tokens, wanted in zip(found, expected, strict=True)] == expected
