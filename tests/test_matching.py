"""Headers against recipes: what is complete is accepted, and every other tensor is named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tonnage.assignment import Assignment, assign_blueprint
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.recognise import AUXILIARY, SUFFIXES
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.errors import CheckpointError
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.matching import MOST_NAMED, assign_headers
from tonnage.recipes.blueprint import blueprint_of

Tensors = dict[str, tuple[str, list[int]]]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 256, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
EXL3 = {"quant_method": "exl3", "bits": 2.5, "codebook": "mul1"}


def llama_tensors(layers: int = 3) -> Tensors:
    """What transformers writes for LLAMA: widths 4 heads x 16 = 64 and 2 heads x 16 = 32."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", [128, 64]),
        "model.norm.weight": ("BF16", [64]),
        "lm_head.weight": ("BF16", [128, 64]),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
            "self_attn.o_proj": [64, 64], "mlp.gate_proj": [96, 64], "mlp.up_proj": [96, 64], "mlp.down_proj": [64, 96],
            "input_layernorm": [64], "post_attention_layernorm": [64],
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    return tensors


def moe_linears(layers: int = 2, experts: int = 4) -> dict[str, list[int]]:
    """The quantised linears of MOE, ``[out, in]``: everything in the layers but norms and routers."""
    linears: dict[str, list[int]] = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        linears[f"{at}.self_attn.q_proj"] = [128, 128]
        linears[f"{at}.self_attn.k_proj"] = linears[f"{at}.self_attn.v_proj"] = [64, 128]
        linears[f"{at}.self_attn.o_proj"] = [128, 128]
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                linears[f"{at}.mlp.experts.{expert}.{part}"] = [128, 128]
    return linears


def moe_rest(layers: int = 2, experts: int = 4) -> Tensors:
    """What MOE keeps in BF16 whatever the quantisation."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", [256, 128]),
        "model.norm.weight": ("BF16", [128]),
        "lm_head.weight": ("BF16", [256, 128]),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.mlp.gate.weight"] = ("BF16", [experts, 128])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = ("BF16", [128])
        for norm in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{norm}.weight"] = ("BF16", [32])
    return tensors


def moe_bf16() -> Tensors:
    return moe_rest() | {f"{name}.weight": ("BF16", shape) for name, shape in moe_linears().items()}


def moe_fp8() -> Tensors:
    """Block FP8: one F32 scale for every 128 x 128."""
    tensors = moe_rest()
    for name, (out, in_) in moe_linears().items():
        tensors[f"{name}.weight"] = ("F8_E4M3", [out, in_])
        tensors[f"{name}.weight_scale_inv"] = ("F32", [-(-out // 128), -(-in_ // 128)])
    return tensors


def exl3(out: int, in_: int, words: int) -> Tensors:
    """EXL3 of one linear: outputs padded to 128, ``words`` = 16 x bits per tile, codebook mul1."""
    out = -(-out // 128) * 128
    return {
        ".trellis": ("I16", [in_ // 16, out // 16, words]),
        ".suh": ("F16", [in_]),
        ".svh": ("F16", [out]),
        ".mul1": ("I32", []),
    }


def moe_exl3(words: Mapping[str, int] | None = None, default: int = 32) -> Tensors:
    tensors = moe_rest()
    for name, (out, in_) in moe_linears().items():
        kinds = exl3(out, in_, (words or {}).get(name, default))
        tensors |= {name + suffix: kind for suffix, kind in kinds.items()}
    return tensors


def header(
    tensors: Tensors, *, shard_file: str = "model.safetensors", reader: HeaderReader | None = None
) -> ShardHeader:
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    prefix = len(text).to_bytes(8, "little") + text
    return (reader or HeaderReader()).read(prefix, shard_file=shard_file, file_bytes=len(prefix) + offset)


def by_layer(tensors: Tensors) -> list[ShardHeader]:
    """One file per layer, so that equal layers share a template, and one file for the rest."""
    groups: dict[str, Tensors] = {}
    for name, kind in tensors.items():
        _, found, rest = name.partition(".layers.")
        groups.setdefault(rest.partition(".")[0] if found else "rest", {})[name] = kind
    reader = HeaderReader()
    return [header(part, shard_file=f"model-{key}.safetensors", reader=reader) for key, part in groups.items()]


def match(config: Mapping[str, Any], shards: Tensors | Iterable[ShardHeader], **kwargs: Any) -> Assignment:
    headers = [header(shards)] if isinstance(shards, dict) else list(shards)
    return assign_headers(blueprint_of(parse_config(config, name="test")), headers, **kwargs)


def refusal(config: Mapping[str, Any], shards: Tensors | Iterable[ShardHeader]) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        match(config, shards)
    return str(caught.value).splitlines()


def nbytes(tensors: Tensors) -> int:
    return sum(prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in tensors.values())


# --- complete ----------------------------------------------------------------------------------------------------------

COMPLETE = {
    "llama": (LLAMA, llama_tensors()),
    "moe": (MOE, moe_bf16()),
    "moe fp8": ({**MOE, "quantization_config": FP8}, moe_fp8()),
    "moe exl3": ({**MOE, "quantization_config": EXL3}, moe_exl3()),
}


@pytest.mark.parametrize(("config", "tensors"), COMPLETE.values(), ids=COMPLETE)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "one file per layer"])
def test_complete_checkpoint_is_accepted_with_all_its_tensors_and_bytes(
    config: dict[str, Any], tensors: Tensors, split: bool
) -> None:
    assignment = match(config, by_layer(tensors) if split else tensors)
    assert assignment.tensors == len(tensors)
    assert assignment.payload_bytes == nbytes(tensors)
    assert assignment.notes == ()


def test_llama_bytes_by_hand() -> None:
    # Per layer 2 x (4096 + 2 x 2048 + 4096 + 3 x 6144) + 2 x 128; ends 2 x (2 x 8192) + 128.
    assert match(LLAMA, llama_tensors()).payload_bytes == 3 * (2 * 30_720 + 256) + 32_768 + 128


def test_order_of_tensors_and_files_does_not_matter() -> None:
    names = list(moe_fp8().items())
    random.Random(7).shuffle(names)
    config = {**MOE, "quantization_config": FP8}
    shards = [header(dict(names[i::3]), shard_file=f"model-{i}.safetensors") for i in range(3)]
    assert match(config, shards).payload_bytes == match(config, moe_fp8()).payload_bytes
    assert match(config, reversed(shards)) == match(config, shards)


def test_weights_and_scales_of_one_module_may_be_in_different_files() -> None:
    tensors = moe_fp8()
    scales = {name: kind for name, kind in tensors.items() if name.endswith("_scale_inv")}
    weights = {name: kind for name, kind in tensors.items() if name not in scales}
    shards = [header(weights, shard_file="a.safetensors"), header(scales, shard_file="b.safetensors")]
    assert match({**MOE, "quantization_config": FP8}, shards).tensors == len(tensors)


def test_head_that_is_tied_may_be_absent_or_stored_anyway() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    stored = llama_tensors()
    without = {name: kind for name, kind in stored.items() if name != "lm_head.weight"}
    assert match(tied, without).tensors == len(without)
    assert match(tied, stored).tensors == len(stored)
    assert match(tied, stored).payload_bytes - match(tied, without).payload_bytes == 128 * 64 * 2


def test_kv_cache_scales_beside_a_projection_are_kept() -> None:
    tensors = llama_tensors()
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = ("F32", [])
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = ("F32", [1])
    assignment = match(LLAMA, tensors)
    assert assignment.tensors == len(tensors)
    assert assignment.payload_bytes == nbytes(llama_tensors()) + 3 * 2 * 4


def test_config_that_promises_fp8_over_bf16_files_is_noted() -> None:
    assignment = match({**MOE, "quantization_config": FP8}, moe_bf16())
    assert assignment.payload_bytes == nbytes(moe_bf16())
    expert = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    assert f"{expert}: config states fp8_e4m3_block128x128, stored as plain" in assignment.notes


def test_config_that_promises_bf16_over_fp8_files_is_noted() -> None:
    assignment = match(MOE, moe_fp8())
    assert assignment.payload_bytes == nbytes(moe_fp8())
    assert any("config states plain, stored as fp8_e4m3_block128x128" in note for note in assignment.notes)


@pytest.mark.parametrize(("dtype", "noted"), [("U8", False), ("F8_E8M0", True)])
def test_scales_of_mxfp8_that_engines_read_by_value_are_noted(dtype: str, noted: bool) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = llama_tensors() | {name: ("F8_E4M3", [96, 64]), f"{name}_scale": (dtype, [96, 2])}
    said = [note for note in match(LLAMA, tensors).notes if "F8_E8M0, which engines convert by value" in note]
    assert [note.startswith("model.layers.{layer}.mlp.up_proj: ") for note in said] == [True] * noted


def test_norms_may_be_stored_in_another_float_dtype() -> None:
    tensors = {n: ("F32" if "norm" in n else d, s) for n, (d, s) in llama_tensors().items()}
    assert match(LLAMA, tensors).payload_bytes == nbytes(tensors)


def test_rates_that_differ_from_expert_to_expert_are_recognised_one_by_one() -> None:
    # Expert 2 of layer 1 at 3.5 bits (56 words), expert 3's down_proj at 4 bits (64 words), all others at 2 bits.
    words = {f"model.layers.1.mlp.experts.2.{part}": 56 for part in ("gate_proj", "up_proj", "down_proj")}
    words["model.layers.1.mlp.experts.3.down_proj"] = 64
    tensors = moe_exl3(words)
    for shards in ([header(tensors)], by_layer(tensors)):
        assignment = match({**MOE, "quantization_config": EXL3}, shards)
        assert assignment.tensors == len(tensors)
        assert assignment.payload_bytes == nbytes(tensors)
        down = {
            (entry.fmt.name, entry.first, entry.members)
            for entry in assignment.entries
            if entry.module.rule.pattern.endswith("experts.{expert}.down_proj")
        }
        assert down == {
            ("exl3_2bit", (0,), ()),
            ("exl3_2bit", (1,), (0, 1)),
            ("exl3_3.5bit", (1,), (2,)),
            ("exl3_4bit", (1,), (3,)),
        }


def test_experts_of_a_layer_may_be_kept_in_a_container_elsewhere() -> None:
    tensors = {n: k for n, k in moe_bf16().items() if not (".layers.1." in n and ".experts." in n)}
    assignment = match(MOE, tensors, elsewhere=frozenset({1}))
    assert assignment.tensors == len(tensors)


def test_exl3_without_the_marker_of_the_stated_codebook_is_noted() -> None:
    tensors = {name: kind for name, kind in moe_exl3().items() if name != "model.layers.1.self_attn.o_proj.mul1"}
    assignment = match({**MOE, "quantization_config": EXL3}, tensors)
    pattern = "model.layers.{layer}.self_attn.o_proj"
    assert assignment.notes == (f"{pattern}: config states codebook mul1, stored without its marker",)
    assert assignment.payload_bytes == nbytes(tensors)


# --- missing -----------------------------------------------------------------------------------------------------------

MISSING = {
    "a dense weight": (LLAMA, llama_tensors(), "model.layers.1.mlp.down_proj.weight"),
    "a norm": (LLAMA, llama_tensors(), "model.layers.2.input_layernorm.weight"),
    "the final norm": (LLAMA, llama_tensors(), "model.norm.weight"),
    "the embedding": (LLAMA, llama_tensors(), "model.embed_tokens.weight"),
    "the head": (LLAMA, llama_tensors(), "lm_head.weight"),
    "one expert's part": (MOE, moe_bf16(), "model.layers.1.mlp.experts.2.up_proj.weight"),
    "the last expert's part": (MOE, moe_bf16(), "model.layers.0.mlp.experts.3.gate_proj.weight"),
    "a dense scale": ({**MOE, "quantization_config": FP8}, moe_fp8(), "model.layers.0.self_attn.o_proj.weight_scale_inv"),
    "one expert's scale": ({**MOE, "quantization_config": FP8}, moe_fp8(), "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"),
    "one expert's codes": ({**MOE, "quantization_config": FP8}, moe_fp8(), "model.layers.1.mlp.experts.3.down_proj.weight"),
    "a dense trellis": ({**MOE, "quantization_config": EXL3}, moe_exl3(), "model.layers.0.self_attn.q_proj.trellis"),
    "a dense sign vector": ({**MOE, "quantization_config": EXL3}, moe_exl3(), "model.layers.0.self_attn.q_proj.suh"),
    "one expert's trellis": ({**MOE, "quantization_config": EXL3}, moe_exl3(), "model.layers.0.mlp.experts.1.up_proj.trellis"),
    "one expert's sign vector": ({**MOE, "quantization_config": EXL3}, moe_exl3(), "model.layers.0.mlp.experts.1.up_proj.svh"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "gone"), MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "one file per layer"])
def test_missing_tensor_is_named(config: dict[str, Any], tensors: Tensors, gone: str, split: bool) -> None:
    rest = {name: kind for name, kind in tensors.items() if name != gone}
    lines = refusal(config, by_layer(rest) if split else rest)
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint: {gone}: missing tensor"), lines


def test_missing_scale_of_every_expert_of_a_layer_is_named() -> None:
    tensors = {n: k for n, k in moe_fp8().items() if not ("layers.0" in n and "up_proj.weight_scale_inv" in n)}
    lines = refusal({**MOE, "quantization_config": FP8}, tensors)
    assert any("model.layers.0.mlp.experts.0.up_proj.weight_scale_inv: missing tensor" in line for line in lines), lines


def test_missing_layer_is_named_whole() -> None:
    rest = {name: kind for name, kind in llama_tensors().items() if ".layers.1." not in name}
    lines = refusal(LLAMA, rest)
    gone = sorted(set(llama_tensors()) - set(rest))
    assert sorted(line.removeprefix("checkpoint: ").partition(":")[0] for line in lines) == gone
    assert len(gone) == 9


def test_missing_expert_on_every_layer_is_counted_beyond_the_first_twenty() -> None:
    rest = {name: kind for name, kind in moe_bf16().items() if ".experts.0." not in name and ".experts.1." not in name}
    config = {**MOE, "num_hidden_layers": 2}
    lines = refusal(config, rest)
    assert len(lines) == 12  # two experts x three parts x two layers
    more = {**MOE, "num_experts": 16}
    lines = refusal(more, moe_bf16() | {f"model.layers.{i}.mlp.gate.weight": ("BF16", [16, 128]) for i in range(2)})
    assert len(lines) == MOST_NAMED + 1
    assert lines[-1] == "checkpoint: and 52 more missing tensors"  # 12 experts x 3 parts x 2 layers - 20


def test_config_that_claims_a_million_tensors_more_costs_little() -> None:
    rest = moe_bf16() | {f"model.layers.{i}.mlp.gate.weight": ("BF16", [65_536, 128]) for i in range(2)}
    lines = refusal({**MOE, "num_experts": 65_536, "num_hidden_layers": 4}, rest)
    assert len(lines) <= 2 * MOST_NAMED + 2
    assert any("more missing tensors" in line for line in lines)


# --- unexpected --------------------------------------------------------------------------------------------------------

UNEXPECTED = {
    "a stranger": (LLAMA, llama_tensors(), "model.layers.0.self_attn.q_norm.weight", ("BF16", [16])),
    "a stranger outside the layers": (LLAMA, llama_tensors(), "model.extra.weight", ("BF16", [4])),
    "a layer beyond the last": (LLAMA, llama_tensors(), "model.layers.3.mlp.up_proj.weight", ("BF16", [96, 64])),
    "expert 4 of 4": (MOE, moe_bf16(), "model.layers.1.mlp.experts.4.gate_proj.weight", ("BF16", [128, 128])),
    "a bias the config denies": (LLAMA, llama_tensors(), "model.layers.1.self_attn.q_proj.bias", ("BF16", [64])),
    "a scale without a rule": (LLAMA, llama_tensors(), "model.layers.1.mlp.up_proj.weight_zero_point", ("I32", [1])),
    "a number with a leading zero": (LLAMA, llama_tensors(), "model.layers.00.mlp.up_proj.weight", ("BF16", [96, 64])),
    "a # for a layer": (LLAMA, llama_tensors(), "model.layers.#.mlp.up_proj.weight", ("BF16", [96, 64])),
    "a # for a number and in a word": (LLAMA, llama_tensors(), "model.layers.#.mlp.u#p##.weight", ("BF16", [96, 64])),
    "a placeholder for a layer": (LLAMA, llama_tensors(), "model.layers.{layer}.mlp.up_proj.weight", ("BF16", [96, 64])),
    "a placeholder for an expert's layer": (MOE, moe_bf16(), "model.layers.{layer}.mlp.experts.2.gate_proj.weight", ("BF16", [128, 128])),
    "a # for an expert": (MOE, moe_bf16(), "model.layers.1.mlp.experts.#.gate_proj.weight", ("BF16", [128, 128])),
    "an expert with a leading zero": (MOE, moe_bf16(), "model.layers.1.mlp.experts.02.gate_proj.weight", ("BF16", [128, 128])),
    "an expert in other digits": (MOE, moe_bf16(), "model.layers.1.mlp.experts.\u0662.gate_proj.weight", ("BF16", [128, 128])),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "name", "kind"), UNEXPECTED.values(), ids=UNEXPECTED)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "one file per layer"])
def test_unexpected_tensor_is_named(
    config: dict[str, Any], tensors: Tensors, name: str, kind: tuple[str, list[int]], split: bool
) -> None:
    more = {**tensors, name: kind}
    lines = refusal(config, by_layer(more) if split else more)
    assert any(line.startswith(f"checkpoint: {name}: unexpected tensor") for line in lines), lines


@pytest.mark.parametrize("number", ["4", "03", "\u0663", "#"])
def test_expert_beyond_the_range_does_not_make_up_for_a_missing_one(number: str) -> None:
    tensors = moe_bf16()
    tensors[f"model.layers.1.mlp.experts.{number}.gate_proj.weight"] = tensors.pop(
        "model.layers.1.mlp.experts.2.gate_proj.weight"
    )
    lines = refusal(MOE, tensors)
    assert any("experts.2.gate_proj.weight: missing tensor" in line for line in lines)
    assert any(f"experts.{number}.gate_proj.weight: unexpected tensor" in line for line in lines)


def test_scale_beyond_the_range_does_not_make_up_for_a_missing_one() -> None:
    tensors = moe_fp8()
    at = "model.layers.1.mlp.experts"
    tensors[f"{at}.4.gate_proj.weight_scale_inv"] = tensors.pop(f"{at}.2.gate_proj.weight_scale_inv")
    for shards in ([header(tensors)], by_layer(tensors)):
        lines = refusal({**MOE, "quantization_config": FP8}, shards)
        assert f"checkpoint: {at}.2.gate_proj.weight_scale_inv: missing tensor" in lines
        assert any(line.startswith(f"checkpoint: {at}.4.gate_proj.weight_scale_inv: unexpected") for line in lines)


def test_kv_cache_scale_that_is_no_scalar_is_refused() -> None:
    lines = refusal(LLAMA, llama_tensors() | {"model.layers.0.self_attn.k_proj.k_scale": ("F32", [5])})
    assert len(lines) == 1
    assert "model.layers.0.self_attn.k_proj.k_scale" in lines[0]


def test_checkpoint_of_another_family_names_what_is_missing_and_what_is_unexpected() -> None:
    lines = refusal(LLAMA, moe_bf16())
    assert any("missing tensor" in line for line in lines)
    assert any("unexpected tensor" in line for line in lines)


# --- misshapen ---------------------------------------------------------------------------------------------------------

MISSHAPEN = {
    "a weight": (LLAMA, llama_tensors(), "model.layers.1.mlp.up_proj.weight", ("BF16", [64, 96]), "expected BF16 [96, 64]; found BF16 [64, 96]"),
    "a norm": (LLAMA, llama_tensors(), "model.norm.weight", ("BF16", [65]), "expected BF16 [64]; found BF16 [65]"),
    "a norm of integers": (LLAMA, llama_tensors(), "model.norm.weight", ("I16", [64]), "expected BF16 [64]; found I16 [64]"),
    "an integer weight": (LLAMA, llama_tensors(), "model.layers.0.self_attn.k_proj.weight", ("I16", [32, 64]), "expected BF16 [32, 64]; found I16 [32, 64]"),
    "an expert": (MOE, moe_bf16(), "model.layers.1.mlp.experts.3.down_proj.weight", ("BF16", [128, 64]), "expected BF16 [128, 128]; found BF16 [128, 64]"),
    "a scale": ({**MOE, "quantization_config": FP8}, moe_fp8(), "model.layers.0.self_attn.q_proj.weight_scale_inv", ("F32", [3, 3]), "expected F32 [1, 1]; found F32 [3, 3]"),
    "one expert's scale": ({**MOE, "quantization_config": FP8}, moe_fp8(), "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv", ("F32", [3, 3]), "expected F32 [1, 1]; found F32 [3, 3]"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "name", "kind", "text"), MISSHAPEN.values(), ids=MISSHAPEN)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "one file per layer"])
def test_misshapen_tensor_is_named_with_expected_and_found(
    config: dict[str, Any], tensors: Tensors, name: str, kind: tuple[str, list[int]], text: str, split: bool
) -> None:
    wrong = {**tensors, name: kind}
    lines = refusal(config, by_layer(wrong) if split else wrong)
    assert lines == [f"checkpoint: {name}: misshapen tensor; {text}"]


def test_rate_that_does_not_exist_is_named() -> None:
    tensors = moe_exl3({"model.layers.1.mlp.experts.2.up_proj": 72})
    lines = refusal({**MOE, "quantization_config": EXL3}, tensors)
    assert len(lines) == 1
    assert "model.layers.1.mlp.experts.2.up_proj.trellis" in lines[0]
    assert "found I16 [8, 8, 72]" in lines[0]


# --- laws --------------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.sampled_from(sorted(COMPLETE)),
    pick=st.integers(0, 10**6),
    harm=st.sampled_from(["drop", "rename", "reshape", "transpose", "retype"]),
    split=st.booleans(),
)
def test_one_harmed_tensor_is_refused_by_its_name(case: str, pick: int, harm: str, split: bool) -> None:
    config, tensors = COMPLETE[case]
    names = list(tensors)
    name = names[pick % len(names)]
    assume(
        not (harm in ("drop", "rename") and name.endswith(".mul1"))
    )  # legal: then it is another codebook, which a note says
    dtype, shape = tensors[name]
    harmed = dict(tensors)
    del harmed[name]
    if harm == "rename":
        harmed[name + ".old"] = (dtype, shape)
    elif harm == "reshape":
        harmed[name] = (dtype, [*shape, 3])
    elif harm == "transpose":
        harmed[name] = (dtype, [*(size + 1 for size in shape), 2])
    elif harm == "retype":
        harmed[name] = ("C64", shape)
    shards = by_layer(harmed) if split else [header(harmed)]
    with pytest.raises(CheckpointError) as caught:
        match(config, shards)
    assert name in str(caught.value)


# --- names that spell out a number -------------------------------------------------------------------------------------


def small_k31() -> dict[str, Any]:
    """Kimi-K3.1 with 4 layers, 4 experts and 2 vision blocks; widths as published."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "configs" / "Kimi-K3.1-Pro.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "num_experts": 4}
    text["linear_attn_config"] |= {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    text["dsa_config"]["dsa_layers"] = [4]
    config["vision_config"]["vt_num_hidden_layers"] = 2
    return config


def promised(config: Mapping[str, Any]) -> Tensors:
    """Every tensor the recipe promises: the input of these tests, not their expectation."""
    return {
        entry.module.name(*indices) + stored.suffix: (stored.dtype, list(stored.shape))
        for entry in assign_blueprint(blueprint_of(parse_config(config, name="test"))).entries
        for indices in entry.module.instances()
        for stored in entry.stored
    }


def test_projector_layers_are_told_apart_by_the_number_in_their_names() -> None:
    config = small_k31()
    tensors = promised(config)
    # mm_projector: 2 x 2 patches of width 1024 merged to 4096, then 4096 -> 4096 -> hidden 7168.
    assert tensors["mm_projector.proj.0.weight"] == ("BF16", [4096, 4096])
    assert tensors["mm_projector.proj.2.weight"] == ("BF16", [7168, 4096])
    assert match(config, tensors).tensors == len(tensors)
    assert match(config, by_layer(tensors)).payload_bytes == nbytes(tensors)


@pytest.mark.parametrize("gone", ["mm_projector.proj.0.weight", "mm_projector.proj.2.weight"])
def test_missing_projector_layer_is_named_with_its_number(gone: str) -> None:
    tensors = promised(small_k31())
    del tensors[gone]
    assert refusal(small_k31(), tensors) == [f"checkpoint: {gone}: missing tensor"]


def test_swapped_projector_layers_are_misshapen_and_a_third_is_unexpected() -> None:
    tensors = promised(small_k31())
    first, second = "mm_projector.proj.0.weight", "mm_projector.proj.2.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    tensors["mm_projector.proj.1.weight"] = ("BF16", [4])
    lines = refusal(small_k31(), tensors)
    assert f"checkpoint: {first}: misshapen tensor; expected BF16 [4096, 4096]; found BF16 [7168, 4096]" in lines
    assert f"checkpoint: {second}: misshapen tensor; expected BF16 [7168, 4096]; found BF16 [4096, 4096]" in lines
    assert any("mm_projector.proj.1.weight: unexpected tensor" in line for line in lines)


# --- anything at all ---------------------------------------------------------------------------------------------------

strange_names = st.builds(
    "{}{}".format,
    st.sampled_from(
        [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.mlp.experts.2.up_proj",
            "model.layers.1.mlp.experts.9.up_proj",
            "model.layers.7.mlp.gate",
            "lm_head",
            "model.norm.weight",
            "model.layers.0",
            "experts",
            "1",
            "",
        ]
    ),
    st.sampled_from([*SUFFIXES, *AUXILIARY, ".old", ".0", "."]),
).filter(bool)
strange_kinds = st.tuples(
    st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.sampled_from([0, 1, 8, 16, 64, 128]), max_size=4)
).filter(lambda kind: prod(kind[1]) * DTYPE_BITS[kind[0]] % 8 == 0)


@settings(max_examples=200, deadline=None)
@given(
    case=st.sampled_from(sorted(COMPLETE)),
    strange=st.dictionaries(strange_names, strange_kinds, min_size=1, max_size=6),
    alone=st.booleans(),
)
def test_any_tensors_are_assigned_to_the_byte_or_refused(case: str, strange: Tensors, alone: bool) -> None:
    config, tensors = COMPLETE[case]
    stored = strange if alone else {**tensors, **strange}
    try:
        assignment = match(config, stored)
    except CheckpointError:
        return
    assert assignment.tensors == len(stored)
    assert assignment.payload_bytes == nbytes(stored)
