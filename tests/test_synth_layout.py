"""Files, names, order and offsets of rehearsal checkpoints, against figures of real ones."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.errors import TonnageError, UnknownFormatError
from tonnage.formats.dtypes import payload_bytes
from tonnage.synth.fills import Fill
from tonnage.synth.layout import LaidTensor, Layout, header_bytes, index_bytes, lay_out, plan_layout
from tonnage.synth.shrink import scale_down
from tonnage.synth.storage import Experts, Storage, store_as

CONFIGS = Path(__file__).parent / "data" / "configs"
LIBRARY_ORDER = [
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
]  # fmt: skip
"""As safetensors 0.8.0 writes tensors of every dtype it takes."""


def config(name: str) -> ModelConfig:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    return parse_config(fields, name=name, hf_quant=fields.get("_hf_quant_config"))


def layout(name: str, *, sharded: bool | None = None, **storage: Any) -> Layout:
    model = store_as(config(name), **storage)
    return plan_layout(model.entries, geometry=model.geometry, sharded=sharded)


def test_kimi_k3_from_its_config_is_the_released_checkpoint() -> None:
    k3 = layout("Kimi-K3")

    assert (len(k3.files), k3.tensor_count, k3.payload_bytes) == (96, 497_220, 1_560_860_324_864)
    assert [file.name for file in (k3.shards[0], k3.shards[95])] == [
        "model-00001-of-00096.safetensors",
        "model-00096-of-00096.safetensors",
    ]
    # Shard map of the release: dense layer 0; KDA layers; MLA layers; embedding, head and norms; projector; vision tower.
    counts = [file.tensor_count for file in k3.shards]
    assert [counts[i] for i in (0, 1, 3, 92, 93, 94, 95)] == [23, 5404, 5398, 5398, 5, 3, 165]


def test_kimi_k31_with_its_experts_in_a_container_is_the_published_size() -> None:
    k31 = layout("Kimi-K3.1-Pro", experts="exl3-v1")

    assert k31.payload_bytes == 796_967_966_208
    assert (len(k31.shards), len(k31.slot_files)) == (96, 92)
    assert {file.payload_bytes for file in k31.slot_files} == {7_415_289_728}
    assert (k31.slot_files[0].name, k31.slot_files[-1].name) == (
        "exl3-layer-00001.safetensors",
        "exl3-layer-00092.safetensors",
    )
    assert [tensor.name for tensor in k31.slot_files[0].tensors()] == [
        "down_svh", "gate_suh", "rotations", "up_suh", "codes", "sign_pattern",
    ]  # fmt: skip


def test_kimi_k31_in_mxfp4_is_kimi_k3_and_the_indexer() -> None:
    k31 = layout("Kimi-K3.1-Pro")

    assert (k31.tensor_count, k31.payload_bytes) == (497_340, 1_561_217_377_280)


@pytest.mark.parametrize(
    ("name", "sharded", "files"),
    [
        ("Qwen__Qwen3-0.6B", None, ["model.safetensors"]),
        ("Qwen__Qwen3-0.6B", True, [f"model-{i:05d}-of-00029.safetensors" for i in range(1, 30)]),
        ("meta-llama__Llama-3.1-8B-Instruct", None, [f"model-{i:05d}-of-00033.safetensors" for i in range(1, 34)]),
        ("meta-llama__Llama-3.1-8B-Instruct", False, ["model.safetensors"]),
    ],
)
def test_small_checkpoints_are_one_file_unless_asked_otherwise(
    name: str, sharded: bool | None, files: list[str]
) -> None:
    assert [file.name for file in layout(name, sharded=sharded).files] == files


def test_index_is_sorted_and_counts_the_shards_alone() -> None:
    k31 = layout("Kimi-K3.1-Pro", experts="exl3-v1")
    text = index_bytes(k31).decode()
    index = json.loads(text)

    assert index["metadata"] == {"total_size": 796_967_966_208 - 92 * 7_415_289_728}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["weight_map"]["language_model.lm_head.weight"] == "model-00094-of-00096.safetensors"
    assert len(index["weight_map"]) == sum(shard.tensor_count for shard in k31.shards)
    assert text == json.dumps(index, indent=2) + "\n"


def test_tensors_stand_in_the_order_of_the_library() -> None:
    given = [("x", dtype, (8,), payload_bytes(dtype, (8,)), Fill("bytes")) for dtype in sorted(LIBRARY_ORDER)]

    assert [tensor.dtype for tensor in lay_out(given)] == LIBRARY_ORDER


def test_header_is_byte_for_byte_that_of_the_library() -> None:
    arrays = {
        "b.weight": np.zeros((3, 5), np.float32),
        "a.weight": np.zeros((3, 5), np.float32),
        "a.scale": np.zeros((), np.float32),
        "a.codes": np.zeros((7,), np.uint8),
        "a.half": np.zeros((2, 2), np.float16),
        "a.index": np.zeros((3,), np.int64),
    }
    names = {"float32": "F32", "uint8": "U8", "float16": "F16", "int64": "I64"}
    given = [(n, names[str(a.dtype)], a.shape, a.nbytes, Fill("bytes")) for n, a in arrays.items()]

    written = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    header = header_bytes(lay_out(given), {"format": "pt"})

    assert written[: len(header)] == header
    assert len(written) == len(header) + sum(a.nbytes for a in arrays.values())


def test_header_is_padded_to_eight_with_spaces() -> None:
    assert header_bytes((), {"format": "np"}) == b"\x20" + bytes(7) + b'{"__metadata__":{"format":"np"}}'
    assert header_bytes((), {"format": "x"}) == b"\x20" + bytes(7) + b'{"__metadata__":{"format":"x"}} '


def tensors_of(model: Layout, prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: list[LaidTensor] = [t for file in model.files for t in file.tensors() if t.name.startswith(prefix)]
    return {t.name.removeprefix(prefix): (t.dtype, t.shape) for t in found}


# Llama-3.1-8B: q_proj 4096 -> 4096, k_proj 4096 -> 1024. Suffix, dtype and shape as each format stores them.
LLAMA_Q = {
    ("config", "2"): {"q_proj.weight": ("BF16", (4096, 4096))},
    ("bf16", "2"): {"q_proj.weight": ("BF16", (4096, 4096))},
    ("mxfp8", "2"): {"q_proj.weight": ("F8_E4M3", (4096, 4096)), "q_proj.weight_scale": ("U8", (4096, 128))},
    ("exl3", "3"): {
        "q_proj.trellis": ("I16", (256, 256, 48)),
        "q_proj.suh": ("F16", (4096,)),
        "q_proj.svh": ("F16", (4096,)),
        "q_proj.mul1": ("I32", ()),
    },
    ("exl3", "2.5"): {
        "q_proj.trellis": ("I16", (256, 256, 40)),
        "q_proj.suh": ("F16", (4096,)),
        "q_proj.svh": ("F16", (4096,)),
        "q_proj.mul1": ("I32", ()),
    },
}


@pytest.mark.parametrize(("how", "expected"), LLAMA_Q.items(), ids=map("-".join, LLAMA_Q))
def test_storage_of_a_projection(how: tuple[Storage, str], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    storage, bits = how
    llama = layout("meta-llama__Llama-3.1-8B-Instruct", storage=storage, bits=Fraction(bits))

    assert tensors_of(llama, "model.layers.0.self_attn.q") == {k[1:]: v for k, v in expected.items()}
    assert tensors_of(llama, "model.embed_tokens.") == {"weight": ("BF16", (128256, 4096))}


def test_exl3_head_has_its_own_rate_and_the_padded_width() -> None:
    qwen = layout("Qwen__Qwen3-8B", storage="exl3", bits=Fraction(3))  # 151,936 rows = 1187 blocks of 128

    assert tensors_of(qwen, "lm_head.trel") == {"lis": ("I16", (256, 9496, 96))}


STATEMENTS: list[tuple[str, Storage, Experts, str, dict[str, Any]]] = [
    ("meta-llama__Llama-3.1-8B-Instruct", "exl3", "same", "2.5", {"quant_method": "exl3", "version": "1.6.5", "bits": 2.5, "head_bits": 6, "codebook": "mul1"}),
    ("Kimi-K3.1-Pro", "config", "exl3-v1", "2", {"quant_method": "exl3", "bits": 2, "exl3": {"manifest": "exl3-manifest.json"}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "storage", "experts", "bits", "expected"), STATEMENTS)
def test_config_states_the_storage_in_the_place_of_the_old_statement(
    name: str, storage: Storage, experts: Experts, bits: str, expected: dict[str, Any]
) -> None:
    source = config(name)
    fields = store_as(source, storage=storage, experts=experts, bits=Fraction(bits)).fields
    scope, before = fields, source.fields
    if "quantization_config" in source.fields.get("text_config", {}):
        assert "quantization_config" not in fields
        scope, before = fields["text_config"], source.fields["text_config"]
        expected = {**expected, "original_quantization_config": before["quantization_config"]}

    assert scope["quantization_config"] == expected
    assert {k: v for k, v in scope.items() if k != "quantization_config"} == {
        k: v for k, v in before.items() if k != "quantization_config"
    }


def test_unquantised_storage_drops_the_statement() -> None:
    model = store_as(config("nvidia__Qwen3-235B-A22B-NVFP4"), storage="bf16")

    assert model.hf_quant is None
    assert not [key for key in model.fields if "quant" in key]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("meta-llama__Llama-3.1-8B-Instruct", {"experts": "exl3-v1"}, "experts do not suit an exl3-v1 container"),
    ("Kimi-K3", {"experts": "exl3-v1", "bits": Fraction(5, 2)}, "rate is not whole"),
    ("Kimi-K3", {"experts": "exl3-v1", "bits": Fraction(5)}, "not a rate of codebook lut_e4m3"),
    ("Kimi-K3", {"experts": "exl3", "bits": Fraction(1, 3)}, "unknown rate"),
    ("Kimi-K3", {"experts": "exl3", "bits": Fraction(9)}, "unknown rate"),
    ("openai__gpt-oss-20b", {"storage": "exl3"}, "EXL3 stores every expert by itself"),
    ("openai__gpt-oss-20b", {"experts": "exl3-v1"}, "without biases"),
]


@pytest.mark.parametrize(("name", "how", "message"), REFUSED)
def test_storage_a_model_cannot_have_is_refused(name: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(TonnageError, match=message):
        store_as(config(name), **how)


def test_a_scheme_without_rates_is_refused() -> None:
    fields = {**config("Qwen__Qwen3-0.6B").fields, "quantization_config": {"quant_method": "exl3", "bits": 3}}

    with pytest.raises(UnknownFormatError, match="keeps a rate per tensor"):
        store_as(parse_config(fields, name="x"))


def test_scaled_down_kimi_k3_keeps_every_kind_on_four_layers() -> None:
    text = scale_down(config("Kimi-K3")).fields["text_config"]

    assert {key: text[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts")} == {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16, "num_experts": 16,
    }  # fmt: skip
    assert text["linear_attn_config"]["full_attn_layers"] == [4]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert text["quantization_config"] == config("Kimi-K3").fields["text_config"]["quantization_config"]
