"""Small models have the tensor kinds of the full ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.checkpoint.config import parse_config
from tonnage.errors import ConfigError, RecipeError, UnknownFamilyError
from tonnage.recipes.blueprint import blueprint_of
from tonnage.synth.layout import plan_layout
from tonnage.synth.shrink import scale_down
from tonnage.synth.storage import store_as

CONFIGS = sorted((Path(__file__).parent / "data" / "configs").glob("*.json"))
MOST_BYTES = 1_000_000_000


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_with_a_recipe_scales_down(path: Path) -> None:
    fields = json.loads(path.read_text())
    try:
        config = parse_config(fields, name=path.stem, hf_quant=fields.get("_hf_quant_config"))
        full = blueprint_of(config)
    except (UnknownFamilyError, RecipeError, ConfigError) as error:
        pytest.skip(str(error).splitlines()[0][:80])

    small = scale_down(config)

    assert {(m.rule.pattern, m.rule.role) for m in blueprint_of(small).modules} == {
        (m.rule.pattern, m.rule.role) for m in full.modules
    }
    assert plan_layout(store_as(small).entries).payload_bytes < MOST_BYTES


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "small"),
    [(64, 8, (16, 2)), (28, 4, (14, 2)), (40, 8, (10, 2)), (96, 96, (16, 16)), (64, 1, (16, 1)), (12, 4, (12, 4))],
)
def test_heads_keep_their_ratio_and_width(heads: int, kv_heads: int, small: tuple[int, int]) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 128 * heads}
    fields = scale_down(parse_config({**LLAMA, **sizes}, name="x")).fields

    assert (fields["num_attention_heads"], fields["num_key_value_heads"]) == small
    assert fields["head_dim"] == 128


def test_sizes_are_capped_and_tokens_stay_in_the_vocabulary() -> None:
    fields = scale_down(parse_config(LLAMA, name="x")).fields

    assert fields == {
        **LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 1024,
        "bos_token_id": 0,
        "eos_token_id": [1, 8],
        "head_dim": 128,
    }


def test_a_small_config_stays_as_it_is() -> None:
    tiny = {
        **LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
    }  # fmt: skip

    assert scale_down(parse_config(tiny, name="x")).fields == tiny


def test_layer_lists_are_cut_with_the_layers_and_draft_entries_stay() -> None:
    path = next(path for path in CONFIGS if path.stem == "deepseek-ai__DeepSeek-V4-Flash")
    before = json.loads(path.read_text())
    fields = scale_down(parse_config(before, name="x")).fields
    layers, ratios = fields["num_hidden_layers"], before["compress_ratios"]

    assert (before["num_hidden_layers"], len(ratios), before["num_nextn_predict_layers"]) == (43, 44, 1)
    assert fields["compress_ratios"] == [*ratios[:layers], ratios[43]]
