"""``tonnage compare`` end to end: a real model in BF16 against itself, its MXFP8 forms, and a form that is broken."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DEEPSEEK_V3, GEMMA3, QWEN2, QWEN3_MOE, write_model
from smollm2 import Weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from samples import write_key
from tonnage.compare.end_to_end import loaded, logits_of
from tonnage.compare.model import open_model
from tonnage.compare.texts import shipped_text

pytestmark = pytest.mark.heavy

TONNAGE = Path(sys.executable).with_name("tonnage")
PROMPTS = 8


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TONNAGE, *words], capture_output=True, text=True, check=False)


def end_to_end(a: Path, b: Path, *words: str | Path) -> dict[str, Any]:
    done = run("compare", a, b, "--end-to-end", "--json", *words)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("SmolLM2-135M")
    weights = Weights()
    weights.write_checkpoint(folder)
    weights.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def mxfp8(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp8") / "ranks"
    done = run("prepare", checkpoint, "--tp", "3", "--convert", "mxfp8", "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_mxfp8_over_three_ranks_answers_nearly_as_bf16(
    checkpoint: Path, mxfp8: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = end_to_end(checkpoint, mxfp8, "--save", tmp_path / "record")

    text, prompts = found["end_to_end"]["text"], found["end_to_end"]["prompts"]
    for name, figures in (("text", text), ("answers", prompts)):
        record_property(
            "figures",
            f"SmolLM2-135M MXFP8 against BF16, {name}: top-1 {figures['top1_agreement']:.4f}, KL mean"
            f" {figures['kl_mean']:.5f}, largest {figures['kl_largest']:.5f}, perplexity"
            f" {figures['perplexity_a']:.4f} and {figures['perplexity_b']:.4f}, {figures['positions']} positions",
        )
    assert found["tensors"] == {"compared": 272, "differing": 210, "incomparable": 0, "only_a": 0, "only_b": 0}
    assert 30 < found["total"]["sqnr_db"] < 33
    assert text["positions"] > 800
    assert 0.8 < text["top1_agreement"] < 1
    assert 0.001 < text["kl_mean"] < 0.06
    assert text["perplexity_b"] == pytest.approx(text["perplexity_a"], rel=0.05)
    assert prompts["count"] == PROMPTS
    assert 0.8 < prompts["top1_agreement"] <= 1
    assert 0.001 < prompts["kl_mean"] < 0.06
    assert_cited(mxfp8, tmp_path, text)


def assert_cited(prepared: Path, folder: Path, text: dict[str, Any]) -> None:
    """Sign what was compared, with the record: whoever verifies is told the figures."""
    package = shutil.copytree(prepared, folder / "package")
    private, public = write_key(folder)
    assert run("export", package, "--key", private, "--compare", folder / "record").returncode == 0
    verified = run("verify", package, "--key", public)
    assert (
        f"top-1 {text['top1_agreement']:.2%}, KL {text['kl_mean']:.3g} nats over {text['positions']:,} tokens"
        in verified.stdout
    )


def test_perplexity_is_what_transformers_gives_from_the_checkpoint_itself(checkpoint: Path) -> None:
    found = end_to_end(checkpoint, checkpoint)["end_to_end"]

    assert found["text"]["top1_agreement"] == found["prompts"]["top1_agreement"] == 1
    assert found["text"]["kl_largest"] == found["prompts"]["kl_largest"] == 0
    assert found["prompts"]["same_answers"] == PROMPTS
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(shipped_text(), return_tensors="pt")["input_ids"]
    losses, count = 0.0, 0
    with torch.inference_mode():
        for part in ids.split(512, dim=1):
            losses += model(part, labels=part).loss.item() * (part.shape[1] - 1)
            count += part.shape[1] - 1
    assert found["text"]["positions"] == count
    assert found["text"]["perplexity_a"] == pytest.approx(math.exp(losses / count), rel=1e-5)
    assert 2 < found["text"]["perplexity_a"] < 60


def test_a_layer_that_is_lost_shows(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.15.mlp.down_proj.weight"].zero_()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())

    (tmp_path / "prompts").write_text("The capital of France is\n")

    found = end_to_end(checkpoint, tmp_path, "--prompts", tmp_path / "prompts")

    assert found["total"]["worst"] == "model.layers.15.mlp.down_proj.weight"
    assert found["total"]["relative_error"] == 1
    assert found["end_to_end"]["prompts"]["count"] == 1
    assert found["end_to_end"]["text"]["kl_mean"] > 0.1
    assert found["end_to_end"]["text"]["perplexity_b"] > found["end_to_end"]["text"]["perplexity_a"]


def test_a_checkpoint_without_a_weight_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.3.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())

    done = run("compare", tmp_path, checkpoint, "--end-to-end")

    assert done.returncode == 2
    assert "model.layers.3.self_attn.q_proj.weight" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("config", [QWEN2, GEMMA3, QWEN3_MOE, DEEPSEEK_V3], ids=lambda config: config["model_type"])
def test_two_ranks_give_the_logits_of_the_checkpoint_they_were_cut_from(config: dict[str, Any], tmp_path: Path) -> None:
    """Biases, a tied head, experts that transformers stacks, latent attention: all find their way."""
    checkpoint = write_model(config, tmp_path / "checkpoint")
    done = run("prepare", checkpoint, "--tp", "2", "--engine", "vllm", "-o", tmp_path / "ranks")
    assert done.returncode == 0, done.stderr
    ids = list(range(5, 45))
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with open_model(tmp_path / "ranks") as model, loaded(model) as (ours, ignored):
        assert ignored == ()
        assert torch.equal(logits_of(ours, ids, 1), logits_of(theirs, ids, 1))
