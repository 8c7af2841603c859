"""What layers keep, as recipes state it, and the bytes of one token in every KV dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samples import LLAMA
from tonnage.api import read_config
from tonnage.checkpoint.config import parse_config
from tonnage.errors import ConfigError, RecipeError, UnknownFamilyError, UnknownFormatError
from tonnage.memory.cache import Attention, Compressed, ConvRun, Indexer, Latent, LayerCache, State, on_stage, owned
from tonnage.memory.cache_dtypes import (
    attention_bytes,
    dtype_bytes,
    index_key_bytes,
    latent_bytes,
    latent_elements_bytes,
    record_bytes,
)
from tonnage.recipes.blueprint import Blueprint, blueprint_of, draw_blueprint
from tonnage.recipes.caches import stated_kv_dtype
from tonnage.recipes.loader import parse_recipe

CONFIGS = Path(__file__).parent / "data" / "configs"


def drawn(**changes: Any) -> Blueprint:
    return blueprint_of(parse_config({**LLAMA, **changes}, name="config.json", hf_quant=None))


def of(config: str) -> Blueprint:
    return blueprint_of(read_config(CONFIGS / f"{config}.json"))


def kept(blueprint: Blueprint) -> list[tuple[object, int]]:
    return [(cache.kept, len(cache.layers)) for cache in blueprint.caches]


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_every_supported_config_says_what_its_layers_keep() -> None:
    seen = 0
    for path in sorted(CONFIGS.glob("*.json")):
        try:
            config = read_config(path)
            blueprint = blueprint_of(config)
        except (ConfigError, UnknownFamilyError):
            continue  # some facts of a model, no whole config; or no recipe yet
        text = config.fields.get("text_config", config.fields)
        layers = {layer for cache in blueprint.caches for layer in cache.layers}
        if config.model_type not in ("nemotron_h", "nemotron-nas"):  # of which some layers keep nothing
            assert layers == set(range(text["num_hidden_layers"])), path.name
            read = {layer for cache in blueprint.caches if cache.borrowed for layer in cache.layers}
            assert len(read) == text.get("num_kv_shared_layers", 0), path.name
        seen += 1
    assert seen >= 85


def test_plain_attention_keeps_keys_and_values_of_every_layer() -> None:
    assert kept(drawn()) == [(Attention(kv_heads=2, head_size=64, value_size=64), 2)]


WINDOWS = {
    "mistral, every layer": ({"model_type": "mistral", "sliding_window": 4096}, [4096, 4096]),
    "mistral, stated by layer": (
        {"model_type": "mistral", "sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, [4096, 0],
    ),
    "mistral without": ({"model_type": "mistral", "sliding_window": None}, [0, 0]),
    "qwen2, switched off": ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [0, 0]),
    "qwen2, in some layers": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, [0, 0],
    ),
    "qwen2, in all": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, [4096, 4096],
    ),
    "gemma2, every other": ({"model_type": "gemma2", "head_dim": 64}, [4096, 0]),
    "gemma3, five of six": (
        {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512, "num_hidden_layers": 6},
        [512, 512, 512, 512, 512, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "windows"), WINDOWS.values(), ids=WINDOWS)
def test_window_is_that_of_the_layer(changes: dict[str, Any], windows: list[int]) -> None:
    found = {layer: c.kept.window_tokens for c in drawn(**changes).caches for layer in c.layers}  # type: ignore[union-attr]
    assert [found[layer] for layer in range(len(windows))] == windows


def test_gpt_oss_alternates_windows() -> None:
    full = Attention(kv_heads=8, head_size=64, value_size=64)
    window = Attention(kv_heads=8, head_size=64, value_size=64, window_tokens=128)
    caches = of("openai__gpt-oss-20b").caches
    assert [(c.kept, c.layers) for c in caches] == [(window, tuple(range(0, 24, 2))), (full, tuple(range(1, 24, 2)))]


def test_gemma4_has_wider_heads_in_full_layers() -> None:
    assert kept(of("google__gemma-4-26B-A4B")) == [
        (Attention(kv_heads=8, head_size=256, value_size=256, window_tokens=1024), 25),
        (Attention(kv_heads=2, head_size=512, value_size=512), 5),
    ]


def test_gemma4_layers_that_share_keys_keep_none() -> None:
    config = read_config(CONFIGS / "google__gemma-4-26B-A4B.json")
    fields = {**config.fields, "text_config": {**config.fields["text_config"], "num_kv_shared_layers": 12}}
    blueprint = blueprint_of(parse_config(fields, name="config.json", hf_quant=None))
    assert max(layer for cache in owned(blueprint.caches) for layer in cache.layers) == 17


def test_llama4_attends_in_chunks_but_for_every_fourth_layer() -> None:
    chunked, full = of("meta-llama__Llama-4-Scout-17B-16E-Instruct").caches
    assert chunked.kept == Attention(kv_heads=8, head_size=128, value_size=128, chunk_tokens=8192)
    assert full.layers == tuple(range(3, 48, 4))


def test_sparse_attention_keeps_index_keys_where_a_layer_chooses_itself() -> None:
    found = {type(cache.kept): cache for cache in of("zai-org__GLM-5.2").caches}
    assert len(found[Latent].layers) == 78
    assert len(found[Indexer].layers) == 21
    assert found[Latent].kept == Latent(rank=512, rope_size=64, sparse=True)
    dense = of("deepseek-ai__DeepSeek-V3")
    assert kept(dense) == [(Latent(rank=512, rope_size=64), 61)]


def test_minimax_index_keys_are_plain() -> None:
    indexer = of("MiniMaxAI__MiniMax-M3").caches[0]
    assert indexer.kept == Indexer(head_size=128, scaled=False)


def test_deepseek_v4_keeps_windows_compressed_records_and_index_keys() -> None:
    assert kept(of("deepseek-ai__DeepSeek-V4-Flash")) == [
        (Compressed(head_size=512, rope_size=64, window_tokens=128), 2),
        (Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=4, index_size=128), 21),
        (Compressed(head_size=512, rope_size=64, window_tokens=128, ratio=128), 20),
    ]


def test_kimi_k3_keeps_states_and_latents() -> None:
    state, latent = of("moonshotai__Kimi-K3").caches
    runs = (ConvRun(units=96, unit_size=128),) * 3
    assert state.kept == State(kind="kda", heads=96, key_size=128, value_size=128, conv=runs, conv_kernel=4)
    assert latent.layers == (*range(3, 92, 4), 92)
    assert state.kept.elements == 96 * 128 * 128
    assert state.kept.conv_channels == 36_864


def test_hybrid_states_take_their_dtype_from_the_config() -> None:
    state, _ = of("Qwen__Qwen3.5-27B").caches
    assert isinstance(state.kept, State)
    assert state.kept.dtype == "F32"
    mamba = of("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").caches[0].kept
    assert isinstance(mamba, State)
    assert (mamba.heads, mamba.key_size, mamba.value_size, mamba.dtype) == (64, 128, 64, "F32")
    assert [run.replicas for run in mamba.conv] == [False, True, True]


def test_layers_of_multi_token_prediction_are_a_drafts() -> None:
    blueprint = of("Qwen__Qwen3.5-27B")
    (draft,) = blueprint.draft_caches
    assert draft.draft
    assert draft.kept == Attention(kv_heads=4, head_size=256, value_size=256)
    assert not any(cache.draft for cache in blueprint.caches)
    sparse = of("deepseek-ai__DeepSeek-V3.2").draft_caches
    assert [(type(cache.kept), cache.layers) for cache in sparse] == [(Indexer, (61,)), (Latent, (61,))]
    assert [cache.kept for cache in of("deepseek-ai__DeepSeek-V4-Flash").draft_caches] == [
        Compressed(head_size=512, rope_size=64, window_tokens=128)
    ]


def test_layers_without_attention_keep_nothing() -> None:
    (cache,) = of("nvidia__Llama-3_3-Nemotron-Super-49B-v1").caches
    assert len(cache.layers) == 49


FP8_SCHEME = {"type": "float", "num_bits": 8, "dynamic": False}
BESIDE = {"quantization": {"kv_cache_quant_algo": "FP8"}}
STATED = {
    "nothing": ({}, None, ""),
    "modelopt, beside the config": ({}, BESIDE, "fp8"),
    "modelopt, in the config": ({"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": FP8_SCHEME}}, None, "fp8"),
    "modelopt, fp4": ({"quantization_config": {"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}}, None, "nvfp4"),
    "config before the file beside it": ({"quantization_config": {"quant_method": "modelopt"}}, BESIDE, ""),
    "compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}}, None, "fp8",
    ),
    "integers": (
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"type": "int", "num_bits": 8}}}, None, "",
    ),
    "unknown": ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "W3"}}, None, ""),
    "null": ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, None, ""),
    "another method": ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": FP8_SCHEME}}, None, ""),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "beside", "dtype"), STATED.values(), ids=STATED)
def test_checkpoint_may_state_its_kv_dtype(fields: dict[str, Any], beside: dict[str, Any] | None, dtype: str) -> None:
    assert stated_kv_dtype(fields, beside) == dtype


# --- wrong recipes and configs ---------------------------------------------------------------------------------------

RECIPE = """
source = "a test"
[index]
layer = "num_hidden_layers"
[module]
"norm" = {{ role = "norm", shape = ["hidden_size"], why = "small" }}
[[cache]]
{}
"""
WRONG = {
    'keeps = "memory"': "unknown kind of cache",
    'keeps = "attention"\nkey = "8"': "missing key",
    'keeps = "attention"\nheads = "8"\nkey = "8"\nrank = "1"': "unknown key",
    'keeps = "attention"\nheads = "8"\nkey = "8"\nlayers = "{block}"': "unknown index",
    'keeps = "attention"\nheads = "8"\nkey = "8"\ndraft = "yes"': "draft is no flag",
    'keeps = "state"\nkind = "magic"': "unknown kind of state",
    'keeps = "state"\nkind = "gdn"\nconv = ["8"]': "a convolution needs its parts and its kernel",
    'keeps = "state"\nkind = "gdn"\nconv = ["8"]\nconv_units = ["1", "2"]\nkernel = "4"': "do not match",
    'keeps = "state"\nkind = "gdn"\nconv = ["8"]\nreplicas = ["no"]\nkernel = "4"': "replicas are no flags",
    'keeps = "attention"\nheads = "8 +"\nkey = "8"': "not an expression",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG.values())
def test_wrong_cache_of_a_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe("test", RECIPE.format(text))


IMPOSSIBLE = {
    'keeps = "attention"\nheads = "0"\nkey = "8"': "no layer can keep this",
    'keeps = "attention"\nheads = "8"\nkey = "8"\nwindow = "1"\nchunk = "1"': "both a window and chunks",
    'keeps = "attention"\nheads = "8"\nkey = "0 - 8"': "beyond reason",
    'keeps = "latent"\nrank = "1 + 1099511627776"\nrope = "0"': "beyond reason",
    'keeps = "state"\nkind = "gdn"\nconv = ["9"]\nconv_units = ["2"]\nkernel = "4"': "9 channels in 2 units",
    'keeps = "state"\nkind = "gdn"\ndtype = "\'float7\'"': "unknown dtype",
    'keeps = "compressed"\nkey = "8"\nrope = "9"\nwindow = "1"': "no layer can keep this",
}


@pytest.mark.parametrize(("text", "message"), IMPOSSIBLE.items(), ids=IMPOSSIBLE.values())
def test_cache_that_cannot_be_is_refused(text: str, message: str) -> None:
    recipe = parse_recipe("test", RECIPE.format(text))
    with pytest.raises(RecipeError, match=message):
        draw_blueprint(recipe, parse_config(LLAMA, name="config.json", hf_quant=None))


# --- values ----------------------------------------------------------------------------------------------------------


def test_stage_keeps_its_layers_and_a_draft_all_of_its_own() -> None:
    attention = Attention(kv_heads=1, head_size=8, value_size=8)
    caches = (LayerCache(kept=attention, layers=(0, 1, 2, 3)), LayerCache(kept=attention, layers=(0,), draft=True))
    assert [cache.layers for cache in on_stage(caches, range(2, 4))] == [(2, 3), (0,)]
    assert [cache.layers for cache in on_stage(caches, range(4, 8))] == [(0,)]


def test_cache_of_no_layer_and_state_without_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="no layer keeps"):
        LayerCache(kept=Indexer(head_size=128), layers=())
    with pytest.raises(ValueError, match="channels and a kernel"):
        State(kind="gdn", conv_kernel=4)


HEAD = Attention(kv_heads=8, head_size=128, value_size=128)
UNEVEN = Attention(kv_heads=8, head_size=192, value_size=128)
BYTES = {
    "model dtype": (HEAD, "auto", 512),
    "fp8": (HEAD, "fp8_e5m2", 256),
    "int8 with scales": (HEAD, "int8_per_token_head", 264),
    "int4 with scales": (HEAD, "int4_per_token_head", 136),
    "nvfp4": (HEAD, "nvfp4", 144),
    "uneven": (UNEVEN, "bfloat16", 640),
    "uneven nvfp4": (UNEVEN, "nvfp4", 180),
}


@pytest.mark.parametrize(("attention", "kv_dtype", "nbytes"), BYTES.values(), ids=BYTES)
def test_bytes_of_a_key_and_a_value(attention: Attention, kv_dtype: str, nbytes: int) -> None:
    assert attention_bytes(attention, kv_dtype, "BF16") == nbytes


def test_bytes_of_a_latent() -> None:
    sparse = Latent(rank=512, rope_size=64, sparse=True)
    sizes = {dtype: latent_bytes(sparse, dtype, "BF16") for dtype in ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")}
    assert sizes == {"auto": 1152, "fp8": 576, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
    assert latent_bytes(sparse, "int8_per_token_head", "BF16") == 584
    assert latent_elements_bytes(sparse, "fp8_ds_mla", "BF16") == 576
    assert latent_elements_bytes(sparse, "auto", "F32") == 2304


def test_bytes_of_index_keys_and_records() -> None:
    assert index_key_bytes(Indexer(head_size=128), "BF16") == 132
    assert index_key_bytes(Indexer(head_size=128, scaled=False), "BF16") == 256
    record = Compressed(head_size=512, rope_size=64, window_tokens=128)
    assert record_bytes(record, "fp8", "BF16") == 584
    assert record_bytes(record, "bfloat16", "BF16") == 1024


def test_unknown_model_dtype_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match=r"unknown dtype.*found F5"):
        dtype_bytes("F5")
