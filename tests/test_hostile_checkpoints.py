"""Lies across files: containers against configs, links to nowhere, scalars of another shape, words for layers unheard of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.api import PlanRequest, checkpoint_from_config, open_checkpoint, plan_checkpoint, read_config
from tonnage.checkpoint.config import parse_config
from tonnage.container import check_against
from tonnage.errors import CheckpointError, ConfigError, TonnageError
from tonnage.recipes.blueprint import blueprint_of
from tonnage.synth.io import RehearsalOptions, write_rehearsal

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
K31 = ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Kimi-K3.1 with its experts in a container: 16 experts, 512 x 1024, layers 1 to 3."""
    directory = tmp_path_factory.mktemp("container") / "k31"
    write_rehearsal(read_config(K31), directory, RehearsalOptions(scaled_down=True, experts="exl3-v1"))
    return directory


LIES = {
    "fewer experts": ({"num_experts": 8}, "experts"),
    "another width": ({"moe_intermediate_size": 2048}, "intermediate width"),
    "another input": ({"routed_expert_hidden_size": 1024}, "input width"),
    "a dense layer": ({"first_k_dense_replace": 2}, "layers without routed experts in the model; found 1"),
}


@pytest.mark.parametrize(("fields", "says"), LIES.values(), ids=LIES)
def test_container_that_does_not_fit_the_model_is_refused(
    container: Path, fields: dict[str, object], says: str
) -> None:
    opened = open_checkpoint(container)
    config = json.loads((container / "config.json").read_text())
    config["text_config"].update(fields)
    assert opened.assignment.container is not None
    check_against(opened.assignment.blueprint, opened.assignment.container)
    with pytest.raises(CheckpointError, match=says):
        check_against(blueprint_of(parse_config(config, name="x")), opened.assignment.container)


def test_experts_in_the_container_and_in_the_shards_are_refused(container: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_rehearsal(read_config(K31), plain, RehearsalOptions(scaled_down=True, storage="bf16"))
    both = tmp_path / "both"
    shutil.copytree(container, both)
    shutil.copy(plain / "model.safetensors", both / "model.safetensors")
    with pytest.raises(CheckpointError, match="in the container for layer 1, and in the shards as well"):
        open_checkpoint(both)


def test_two_manifests_are_refused(container: Path, tmp_path: Path) -> None:
    both = tmp_path / "two"
    shutil.copytree(container, both)
    shutil.copy(both / "exl3-manifest.json", both / "btx-manifest.json")
    with pytest.raises(CheckpointError, match="two manifests"):
        open_checkpoint(both)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "exl3-manifest.json", "btx-manifest.json"])
def test_link_to_nowhere_is_a_missing_file_and_not_no_file(tmp_path: Path, name: str) -> None:
    shutil.copy(CONFIGS / "Qwen__Qwen3-0.6B.json", tmp_path / "config.json")
    (tmp_path / name).symlink_to("../blobs/missing")
    with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
        open_checkpoint(tmp_path)


def test_layer_words_unheard_of_are_refused() -> None:
    config = json.loads((CONFIGS / "nvidia__Nemotron-H-56B-Base-8K.json").read_text())
    pattern = config["hybrid_override_pattern"]
    for wrong in (pattern.replace("M", "m"), pattern[:-1], pattern + "M", ""):
        with pytest.raises(ConfigError, match="hybrid_override_pattern"):
            checkpoint_from_config({**config, "hybrid_override_pattern": wrong}, name="x")


IMPOSSIBLE = {
    "no layers": {"num_hidden_layers": 0},
    "KV heads that do not divide": {"num_key_value_heads": 3},
    "more KV heads than heads": {"num_key_value_heads": 32},
    "negative layers": {"num_hidden_layers": -1},
    "integers": {"torch_dtype": "int8"},
    "eight bits": {"torch_dtype": "float8_e4m3fn"},
}


@pytest.mark.parametrize("fields", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    config = json.loads((CONFIGS / "Qwen__Qwen3-0.6B.json").read_text())
    with pytest.raises(TonnageError):
        checkpoint_from_config({**config, **fields}, name="x")


@pytest.mark.parametrize("group", [1, 2, 4, 31])
def test_group_that_ends_inside_a_word_is_refused(group: int) -> None:
    config = json.loads((CONFIGS / "Qwen__Qwen3-0.6B.json").read_text())
    for stated in (
        {"quant_method": "gptq", "bits": 4, "group_size": group},
        {"quant_method": "awq", "bits": 4, "group_size": group},
    ):
        with pytest.raises(TonnageError, match="group size"):
            checkpoint_from_config({**config, "quantization_config": stated}, name="x")


def test_many_small_values_cost_little(tmp_path: Path) -> None:
    for text in ("[" + "0," * 3_000_000 + "0]", "[" + "[]," * 200_000 + "[]]"):
        (tmp_path / "config.json").write_text('{"a": ' + text + "}")
        with pytest.raises(ConfigError, match="too many values"):
            open_checkpoint(tmp_path / "config.json")


def test_float32_weights_are_held_in_the_model_dtype_by_vllm() -> None:
    config = json.loads((CONFIGS / "Qwen__Qwen3-0.6B.json").read_text())
    held = {
        dtype: plan_checkpoint(
            checkpoint_from_config({**config, "torch_dtype": dtype}, name="x"), PlanRequest(engine="vllm")
        ).ranks[0].weights_bytes
        for dtype in ("bfloat16", "float16", "float32")
    }  # fmt: skip
    assert held["bfloat16"] == held["float16"] == held["float32"] == 1_192_099_840


def test_synth_into_a_relative_directory_leaves_one_directory(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    command = Path(sys.executable).with_name("tonnage")
    words = [command, "synth", CONFIGS / "Qwen__Qwen3-0.6B.json", "-o", "here/small", "--scale-down"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in (tmp_path / "here").iterdir()] == ["small"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_a_refusal() -> None:
    command = Path(sys.executable).with_name("tonnage")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([command, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tonnage: cannot write the output; found No space left on device\n"
