"""What the plug-in decides without vLLM: which files are a rank's, whether they may be loaded, what their headers say."""

from __future__ import annotations

import shutil
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from samples import prepare_small, write_key
from tonnage.errors import TonnageError
from tonnage.prepare.reader import TensorView
from tonnage.topology import Topology
from tonnage.vllm_plugin.opening import LoadError, open_rank_files, public_key_of
from tonnage.vllm_plugin.statement import missing_statement

TP2 = Topology(tp=2)
RANK = "weights/tp2/rank-1"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    return prepare_small(folder / "source", folder / "prepared")


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def refusal(directory: Path, topology: Topology = TP2, **options: Any) -> str:
    with pytest.raises(TonnageError) as caught:
        open_rank_files(directory, topology, topology.world_size - 1, **options)
    return str(caught.value)


def test_a_rank_is_opened_with_what_was_planned_for_it(prepared: Path):
    files = open_rank_files(prepared, TP2, 1)
    assert files.view.directory == prepared / RANK
    assert files.view.payload_bytes == files.planned_bytes > 0
    assert not files.verified


def test_a_rank_is_opened_where_no_other_is(copy: Path):
    shutil.rmtree(copy / "weights/tp2/rank-0")
    assert open_rank_files(copy, TP2, 1).view.tensors


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Topology(tp=4), "weights/tp4; found tp2"),
        (Topology(tp=1), "weights/tp1; found tp2"),
        (Topology(tp=2, ep=2), "weights/tp2-ep2; found tp2"),
        (Topology(tp=2, pp=2), "weights/tp2-pp2; found tp2"),
    ],
)
def test_another_topology_is_refused(prepared: Path, topology: Topology, expected: str):
    assert refusal(prepared, topology) == f"{prepared}: cut for another topology; expected {expected}"


def test_a_missing_rank_is_refused(copy: Path):
    shutil.rmtree(copy / RANK)
    assert refusal(copy) == f"{copy}: rank is missing; expected {RANK}; found rank-0"


def test_a_missing_file_is_refused(copy: Path):
    (weights,) = (copy / RANK).glob("*.safetensors")
    weights.unlink()
    assert f"{RANK}/{weights.name}: file is missing" in refusal(copy)


def test_a_file_of_another_size_is_refused(copy: Path):
    (weights,) = (copy / RANK).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert f"{RANK}/{weights.name}: not as it was written" in refusal(copy)


def test_a_file_too_much_is_refused(copy: Path):
    (copy / RANK / "more.safetensors").write_bytes(b"")
    assert refusal(copy) == f"{RANK}/more.safetensors: not of this package"


@pytest.mark.parametrize("place", ["weights", "weights/tp2", RANK, f"{RANK}/model.safetensors.index.json"])
def test_a_link_is_not_followed(copy: Path, tmp_path: Path, place: str):
    (copy / place).rename(tmp_path / "elsewhere")
    (copy / place).symlink_to(tmp_path / "elsewhere")
    assert refusal(copy) == f"{place}: a link; expected what was written there itself"


def test_an_incomplete_preparation_is_refused(copy: Path):
    (copy / "prepare.json").unlink()
    assert "preparation is not complete" in refusal(copy)


def test_what_is_not_signed_is_not_verified(copy: Path, tmp_path: Path):
    assert "model.sig" in refusal(copy, public_key=write_key(tmp_path)[1])


def test_no_directory_and_no_ranks_are_refused(tmp_path: Path):
    assert "no such directory" in refusal(tmp_path / "none")
    assert "holds no weights by rank" in refusal(tmp_path)


@pytest.mark.parametrize("options", [{"key": "a"}, {"public_key": ""}, {"public_key": 1}, {"public_key": "a", "b": 2}])
def test_options_are_a_key_or_refused(options: dict[str, Any]):
    with pytest.raises(LoadError, match="model_loader_extra_config: "):
        public_key_of(options)


def test_the_key_is_a_path():
    assert public_key_of({}) is None
    assert public_key_of({"public_key": "a.pem"}) == Path("a.pem")


# --- what headers say -------------------------------------------------------------------------------------------------


def tensors(*names: str, codes: tuple[str, ...] = ()) -> dict[str, TensorView]:
    """Return BF16 weights [64, 64], and MXFP8 weights of the same shape."""
    plain = [(f"{name}.weight", "BF16", (64, 64)) for name in names]
    coded = [(f"{name}.weight", "F8_E4M3", (64, 64)) for name in codes]
    scales = [(f"{name}.weight_scale", "U8", (64, 2)) for name in codes]
    return {
        name: TensorView(file="a", name=name, dtype=dtype, shape=shape, begin=0, nbytes=0)
        for name, dtype, shape in (*plain, *coded, *scales)
    }


def test_a_config_of_plain_weights_lacks_nothing():
    assert missing_statement(tensors("model.layers.0.mlp.up_proj"), {}) is None


def test_mxfp8_is_stated_of_what_is_mxfp8_alone():
    found = missing_statement(
        tensors(
            "model.embed_tokens",
            "model.layers.0.mlp.experts.3.up_proj",
            "model.layers.1.mlp.experts.3.w1",
            codes=("model.layers.0.self_attn.q_proj",),
        ),
        {},
    )
    assert found is not None
    assert found["quant_method"] == "compressed-tensors"
    (group,) = found["config_groups"].values()
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    assert weights.items() <= group["weights"].items()
    assert found["ignore"] == [
        "model.embed_tokens",
        *(f"model.layers.0.mlp.experts.0.{part}_proj" for part in ("down", "gate", "up")),
        *(f"model.layers.1.mlp.experts.0.{part}" for part in ("down_proj", "gate_proj", "up_proj", "w1")),
    ]


def test_a_config_that_states_it_lacks_nothing():
    coded = tensors("lm_head", codes=("a.q_proj",))
    assert missing_statement(coded, {"quantization_config": missing_statement(coded, {})}) is None


def test_a_config_that_states_something_else_is_refused():
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(LoadError, match=r"config\.json: a\.q_proj: stored as MXFP8 beside"):
        missing_statement(tensors(codes=("a.q_proj",)), fields)


def test_scales_of_other_formats_are_no_mxfp8():
    coded = tensors(codes=("a",))
    scale = coded["a.weight_scale"]
    for dtype, shape in (("F32", (64, 1)), ("U8", (64, 1)), ("U8", (2, 2))):
        other = TensorView(file="a", name=scale.name, dtype=dtype, shape=shape, begin=0, nbytes=0)
        assert missing_statement({**coded, scale.name: other}, {}) is None


def test_the_plug_in_is_declared_and_there_without_vllm():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["tonnage"].partition(":")
    assert callable(getattr(import_module(module), name))
