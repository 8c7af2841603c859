"""``tonnage export-names --style vllm-sharded``: fused tensors are their parts behind each other, every key is there."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from packages import run
from samples import LLAMA, rehearse, write_key
from tonnage import open_rank
from tonnage.errors import PlacementError
from tonnage.prepare.reader import TensorView
from tonnage.rank_names.fused import fused_tensors
from tonnage.rank_names.vllm_sharded import write_vllm_sharded

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""The first layer is dense, the second has experts; 300 rows of the vocabulary are padded to 320."""


def prepared(folder: Path, config: dict[str, Any], *words: str) -> Path:
    rehearse(folder / "source", config, scaled_down=False)
    run("prepare", folder / "source", "--tp", 2, "--engine", "vllm", "--workers", 1, "-o", folder / "ranks", *words)
    return folder / "ranks"


def load(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in deserialize(path.read_bytes())}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture model as ``ranks``, and as ``sharded``."""
    path = tmp_path_factory.mktemp("home")
    write_vllm_sharded(prepared(path, MOE), path / "sharded")
    return path


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_tensors_are_their_parts_behind_each_other(home: Path, rank: int) -> None:
    written = load(home / "sharded" / f"model-rank-{rank}-part-0.safetensors")
    with open_rank(home / "ranks", rank) as held:

        def joined(*names: str) -> bytes:
            return b"".join(held[f"model.layers.{name}.weight"].tobytes() for name in names)

        assert written["model.layers.0.self_attn.qkv_proj.weight"] == (
            "BF16",
            [128 + 64 + 64, 256],
            joined("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj"),
        )
        assert written["model.layers.0.mlp.gate_up_proj.weight"] == (
            "BF16",
            [512, 256],
            joined("0.mlp.gate_proj", "0.mlp.up_proj"),
        )
        experts = [f"1.mlp.experts.{expert}" for expert in range(4)]
        both = [f"{expert}.{projection}_proj" for expert in experts for projection in ("gate", "up")]
        assert written["model.layers.1.mlp.experts.routed_experts.w13_weight"] == ("BF16", [4, 64, 256], joined(*both))
        down = [f"{expert}.down_proj" for expert in experts]
        assert written["model.layers.1.mlp.experts.routed_experts.w2_weight"] == ("BF16", [4, 256, 32], joined(*down))
        assert written["model.layers.1.mlp.experts.gate.weight"][2] == joined("1.mlp.gate")
        assert written["model.embed_tokens.weight"][1:] == ([160, 256], held["model.embed_tokens.weight"].tobytes())


def test_every_key_of_the_model_is_there_and_no_other(home: Path) -> None:
    attention = ["qkv_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"]
    attention += [f"attn.{scale}" for scale in ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")]
    every = [f"self_attn.{name}" for name in attention] + ["input_layernorm.weight", "post_attention_layernorm.weight"]
    dense = ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    routed = ["gate.weight", "routed_experts.w13_weight", "routed_experts.w2_weight"]
    expected = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in every}
    expected |= {f"model.layers.0.{name}" for name in dense} | {f"model.layers.1.mlp.experts.{name}" for name in routed}
    written = load(home / "sharded" / "model-rank-0-part-0.safetensors")

    assert written.keys() == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert written["model.layers.1.self_attn.attn._k_scale"] == ("F32", [], struct.pack("<f", 1))


def test_a_head_that_is_the_embedding_has_the_name_that_sorts_first(tmp_path: Path) -> None:
    write_vllm_sharded(prepared(tmp_path, {**LLAMA, "tie_word_embeddings": True}), tmp_path / "out")
    written = load(tmp_path / "out" / "model-rank-1-part-0.safetensors")
    with open_rank(tmp_path / "ranks", 1) as held:
        assert written["lm_head.weight"][2] == held["model.embed_tokens.weight"].tobytes()
    assert "model.embed_tokens.weight" not in written


def test_a_package_is_written_like_what_it_was_made_of(home: Path, tmp_path: Path) -> None:
    package = shutil.copytree(home / "ranks", tmp_path / "package")
    run("export", package, "--key", write_key(tmp_path)[0])
    write_vllm_sharded(package, tmp_path / "out")
    for file in (home / "sharded").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_files_are_as_small_as_asked(home: Path, tmp_path: Path) -> None:
    document = write_vllm_sharded(home / "ranks", tmp_path / "out", file_bytes=200_000)
    for rank in (0, 1):
        parts = sorted((tmp_path / "out").glob(f"model-rank-{rank}-part-*.safetensors"))
        assert len(parts) > 3
        together = {name: one for part in parts for name, one in load(part).items()}
        assert together == load(home / "sharded" / f"model-rank-{rank}-part-0.safetensors")
    assert document["files"] == len(list((tmp_path / "out").glob("*.safetensors")))


def test_the_config_stays_as_it_is(home: Path) -> None:
    assert (home / "sharded" / "config.json").read_bytes() == (home / "ranks" / "config.json").read_bytes()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "split"), "not all ranks of a preparation for vLLM"),
        (("--pp", "2"), "not all ranks of a preparation for vLLM"),
        (("--ranks", "0"), "no rank holds index 160"),
        (("--convert", "mxfp8"), "no place in the model is known for it"),
    ],
)
def test_what_is_not_all_of_a_plain_model_for_vllm_is_refused(
    tonnage: Tonnage, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = tonnage("export-names", prepared(tmp_path, LLAMA, *words), "--style", "vllm-sharded", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def view(*shape: int, dtype: str = "BF16") -> TensorView:
    return TensorView(file="f", name="n", dtype=dtype, shape=shape, begin=0, nbytes=2 * int(np.prod(shape)))


LAYER = {
    **{f"model.layers.0.self_attn.{name}_proj.weight": view(8, 16) for name in "qkv"},
    **{
        f"model.layers.0.mlp.experts.{n}.{name}_proj.weight": view(4, 16) for n in (2, 3) for name in ("gate", "up")
    },
    **{f"model.layers.0.mlp.experts.{n}.down_proj.weight": view(16, 4) for n in (2, 3)},
}  # fmt: skip


def test_whole_experts_of_a_rank_are_stacked_in_order() -> None:
    found = {one.name: one for one in fused_tensors(LAYER, model_type="qwen3_moe", where="here")}
    stacked = found["model.layers.0.mlp.experts.routed_experts.w13_weight"]
    assert stacked.shape == (2, 8, 16)
    names = [name.split("experts.")[1].split("_")[0] for name in stacked.sources]
    assert names == ["2.gate", "2.up", "3.gate", "3.up"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.self_attn.k_proj.weight": None}, r"qkv_proj\.weight: parts are missing"),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": None}, r"w13_weight: parts are missing"),
        ({"model.layers.0.self_attn.k_proj.weight": view(8, 16, dtype="F32")}, "several dtypes"),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": view(5, 16)}, "several dtypes or shapes"),
        ({"model.layers.0.self_attn.sinks": view(4)}, "no place in the model is known"),
        ({"model.visual.proj.weight": view(4, 4)}, "no place in the model is known"),
        ({"model.norm.weight": view(4, dtype="F8_E4M3")}, "is quantised"),
    ],
)
def test_tensors_without_a_known_place_are_refused(change: dict[str, TensorView | None], message: str) -> None:
    held = {name: one for name, one in {**LAYER, **change}.items() if one is not None}
    with pytest.raises(PlacementError, match=message):
        fused_tensors(held, model_type="qwen3_moe", where="here")


def test_a_family_whose_names_are_not_known_is_refused(home: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(home / "ranks", tmp_path / "ranks")
    config = json.loads((changed / "config.json").read_bytes())
    (changed / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    with pytest.raises(PlacementError, match="fused names are not known"):
        write_vllm_sharded(changed, tmp_path / "out")
