"""Standard checkpoints of converted models in transformers with compressed-tensors: what they say is what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import disable_quantization
from small_models import DEEPSEEK_V3, GEMMA3, QWEN2, QWEN3_MOE, decoded, write_model
from smollm2 import Weights
from transformers import AutoModelForCausalLM

from packages import run

pytestmark = pytest.mark.heavy

TOKENS = 24
LISTED = [list(range(5, 45)), [(11 * place) % 250 + 1 for place in range(24)]]


def converted(checkpoint: Path) -> Path:
    folder = checkpoint.with_name(f"{checkpoint.name}-mxfp8")
    words = ("--layout", "hf", "--convert", "mxfp8", "--engine", "vllm")
    run("prepare", checkpoint, "-o", folder, "--workers", 1, *words)
    return folder


def loaded(folder: Path) -> Any:
    """Load and let nothing be missing, or made up."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert {name: found for name, found in report.items() if found} == {}, report
    return model.eval()


def weights_alone(model: Any) -> Any:
    """Return a model once it was asked, which decodes its weights, with inputs that are no more rounded to MXFP8."""
    with torch.inference_mode():
        model(torch.tensor([LISTED[0]]))
    return model.apply(disable_quantization)


@pytest.mark.parametrize("config", [QWEN2, GEMMA3, QWEN3_MOE, DEEPSEEK_V3], ids=lambda config: config["model_type"])
def test_logits_are_those_of_the_values_that_were_written(config: dict[str, Any], tmp_path: Path) -> None:
    """Biases, a tied head of 300 rows, experts that stay as they are, latent attention."""
    folder = converted(write_model(config, tmp_path / "source"))
    ours, theirs = weights_alone(loaded(folder)), loaded(decoded(folder, tmp_path / "decoded"))
    with torch.inference_mode():
        for ids in LISTED:
            asked = torch.tensor([ids])
            assert torch.equal(ours(asked).logits, theirs(asked).logits)
    found = dict(ours.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert torch.equal(found[name], tensor), name


def test_a_real_model_goes_on_as_its_decoded_weights_do(tmp_path: Path) -> None:
    weights = Weights()
    (tmp_path / "smollm2").mkdir()
    weights.write_checkpoint(tmp_path / "smollm2")
    folder = converted(tmp_path / "smollm2")
    ids = torch.tensor([weights.token_ids("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")])
    model = loaded(folder)

    def answer(of: Any, tokens: int = TOKENS) -> list[int]:
        told: list[int] = of.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        return told

    as_stated = answer(model, 1)
    assert answer(weights_alone(model)) == answer(loaded(decoded(folder, tmp_path / "decoded")))
    assert as_stated == weights.token_ids("ĠParis")
