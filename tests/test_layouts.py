"""Headers, indexes, configs and side files of what is prepared; and reading one rank of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from samples import LLAMA
from tonnage.api import Checkpoint, checkpoint_from_config, open_checkpoint
from tonnage.assignment import Assigned, Assignment, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.headers import parse_header
from tonnage.checkpoint.quant import parse_quantization
from tonnage.engines import engine
from tonnage.errors import CheckpointError, TonnageError, UnknownFormatError
from tonnage.placement import place
from tonnage.prepare.hf import QuantStyle, config_bytes
from tonnage.prepare.jobs import OutputFile, OutputTensor, Schedule
from tonnage.prepare.layout import choose_side_files, header_bytes
from tonnage.prepare.reader import open_rank
from tonnage.prepare.schedule import make_schedule
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.topology import Topology

CONFIGS = Path(__file__).parent / "data" / "configs"


def fields_of(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return fields


def rehearsed(fields: dict[str, Any], directory: Path, **how: Any) -> Checkpoint:
    config = parse_config(fields, name="test", hf_quant=fields.get("_hf_quant_config"))
    write_rehearsal(config, directory, RehearsalOptions(**how))
    return open_checkpoint(directory)


def scheduled(checkpoint: Checkpoint, *, tp: int = 1, convert: bool = True, **how: Any) -> Schedule:
    assert checkpoint.headers is not None
    assignment = convert_to_mxfp8(checkpoint.assignment) if convert else checkpoint.assignment
    return make_schedule(place(assignment, Topology(tp=tp), engine("split")), checkpoint.headers.shards, **how)


def write(schedule: Schedule, source: Path, directory: Path) -> None:
    """Write headers over sparse files, and the other files whole; ``prepare.json`` only says that it is complete."""
    for job in schedule.jobs:
        for output in job.outputs:
            path = directory / output.path
            path.parent.mkdir(parents=True, exist_ok=True)
            header = header_bytes(output)
            path.write_bytes(header)
            with path.open("r+b") as stream:
                stream.truncate(len(header) + output.payload_bytes)
    for file in schedule.files:
        content = file.content if file.source is None else (source / file.source).read_bytes()
        (directory / file.path).parent.mkdir(parents=True, exist_ok=True)
        (directory / file.path).write_bytes(content)
    (directory / "prepare.json").write_text("{}")


# Headers


def test_the_safetensors_library_reads_the_header() -> None:
    tensors = (
        OutputTensor(name="b", dtype="F32", shape=(2, 3), begin=0, note="[0,[[2,4]],[8,3]]"),
        OutputTensor(name="a", dtype="U8", shape=(5,), begin=24),
    )
    output = OutputFile(rank=1, path="x.safetensors", tensors=tensors, metadata=(("format", "pt"), ("rank", "1")))
    raw = header_bytes(output)
    assert len(raw) % 8 == 0
    found = dict(safetensors.deserialize(raw + bytes(range(29))))
    assert {name: (facts["dtype"], facts["shape"], bytes(facts["data"])) for name, facts in found.items()} == {
        "b": ("F32", [2, 3], bytes(range(24))),
        "a": ("U8", [5], bytes(range(24, 29))),
    }
    header = parse_header(raw, file_bytes=len(raw) + 29, where="x")
    assert header.metadata == {"format": "pt", "rank": "1", "slices": "[[0,[[2,4]],[8,3]],0]"}


def test_headers_need_no_escapes(tmp_path: Path) -> None:
    (job,) = scheduled(rehearsed(LLAMA, tmp_path / "c"), tp=2).jobs
    assert all(b"\\" not in header_bytes(output) for output in job.outputs)


# Index and side files


def test_every_rank_has_an_index_of_its_tensors(tmp_path: Path) -> None:
    schedule = scheduled(rehearsed(LLAMA, tmp_path / "c"), tp=2, job_bytes=300_000)
    for rank in range(2):
        (file,) = (f for f in schedule.files if f.path == f"weights/tp2/rank-{rank}/model.safetensors.index.json")
        outputs = [output for job in schedule.jobs for output in job.outputs if output.rank == rank]
        assert json.loads(file.content) == {
            "metadata": {"total_size": sum(output.payload_bytes for output in outputs)},
            "weight_map": {t.name: o.path.rpartition("/")[2] for o in outputs for t in o.tensors},
        }


def test_side_files() -> None:
    along = ("LICENSE", "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tiktoken.model", "README.md", "tokenizer.json", "tokenizer_config.json", "qwen.tiktoken")  # fmt: skip
    never = ("modeling_x.py", "tokenizer.py", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "x.pt", "model.sig", ".hidden.json", "tokenizer.pkl", "prepare.json", "a/b.json", "a\\b.json")  # fmt: skip
    assert choose_side_files(dict.fromkeys((*along, *never), 10)) == tuple(sorted(along))
    assert choose_side_files({"vocab.json": (64 << 20) + 1, "tokenizer.json": 64 << 20}) == ("tokenizer.json",)


def test_side_files_come_along_as_they_are(tmp_path: Path) -> None:
    schedule = scheduled(rehearsed(LLAMA, tmp_path / "c"), tp=2, side_files=("tokenizer.json", "config.json"))
    assert [(f.path, f.source) for f in schedule.files if f.source] == [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
    ]


# An unsharded checkpoint


GEMMA = "google__gemma-4-26B-A4B"
OTHERS = [
    "Qwen__Qwen3-0.6B",
    "Qwen__Qwen3-30B-A3B",
    "deepseek-ai__DeepSeek-V2-Lite",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1",
]


@pytest.mark.parametrize(
    ("name", "style"),
    [
        *((name, style) for name in OTHERS for style in ("compressed-tensors", "modelopt")),
        (GEMMA, "compressed-tensors"),
    ],
)
def test_an_unsharded_checkpoint_reads_back_as_converted(name: str, style: str, tmp_path: Path) -> None:
    checkpoint = rehearsed(fields_of(name), tmp_path / "c", scaled_down=True)
    schedule = scheduled(checkpoint, layout="hf", quant_style=style, job_bytes=1 << 22, side_files=("config.json",))
    write(schedule, tmp_path / "c", tmp_path / "out")
    again, wanted = open_checkpoint(tmp_path / "out").assignment, convert_to_mxfp8(checkpoint.assignment)
    assert again.payload_bytes == wanted.payload_bytes
    assert formats(again) == formats(wanted)
    assert [note for note in again.notes if "config states" in note] == []


def test_a_tower_is_not_announced_in_a_style_that_engines_take_for_plain_there(tmp_path: Path) -> None:
    checkpoint = rehearsed(fields_of(GEMMA), tmp_path / "c", scaled_down=True)
    with pytest.raises(UnknownFormatError) as caught:
        scheduled(checkpoint, layout="hf", quant_style="modelopt", side_files=("config.json",))
    assert {problem.tensor.partition(".encoder.")[0] for problem in caught.value.problems} == {"model.vision_tower"}
    assert "a config in the style of modelopt cannot single this module out" in str(caught.value)


def formats(assignment: Assignment) -> dict[tuple[str, int | None], str]:
    return {
        (entry.module.rule.pattern, first): entry.fmt.name
        for entry in assignment.entries
        for first in entry.first or (None,)
    }


LISTS: dict[QuantStyle, str] = {
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
    "mxfp8": "ignored_layers",
}


def test_without_conversion_everything_comes_along_as_it_is(tmp_path: Path) -> None:
    checkpoint = rehearsed(LLAMA, tmp_path / "c", scaled_down=True)
    schedule = scheduled(checkpoint, convert=False, layout="hf", side_files=("config.json",))
    assert (schedule.files[0].path, schedule.files[0].source) == ("config.json", "config.json")
    (output,) = schedule.jobs[0].outputs
    assert output.path == "model-00001-of-00001.safetensors"
    assert {tensor.note for tensor in output.tensors} == {""}


def test_the_config_states_what_compressed_tensors_asks_for() -> None:
    stated = restated(LLAMA, "compressed-tensors")
    assert stated["quant_method"] == "compressed-tensors"
    assert stated["format"] == "mxfp8-quantized"
    (group,) = stated["config_groups"].values()
    facts = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    assert facts.items() <= group["weights"].items()
    assert group["weights"]["scale_dtype"] == "torch.uint8"
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, True)
    assert group["targets"] == ["Linear"]
    assert stated["ignore"] == ["lm_head"]


def test_the_config_states_what_modelopt_asks_for() -> None:
    assert restated(LLAMA, "modelopt") == {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "group_size": 32,
        "ignore": ["lm_head"],
    }


def test_the_config_states_what_sglang_asks_for() -> None:
    fields = fields_of("Qwen__Qwen3-30B-A3B") | {"num_hidden_layers": 2}
    layers = [f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("experts", "gate")]
    assert restated(fields, "mxfp8") == {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": ["lm_head", *layers],
    }


def test_scales_are_called_as_sglang_calls_them(tmp_path: Path) -> None:
    checkpoint = rehearsed(LLAMA, tmp_path / "c", scaled_down=True)
    schedule = scheduled(checkpoint, layout="hf", quant_style="mxfp8", side_files=("config.json",))
    (output,) = schedule.jobs[0].outputs
    scales = {tensor.name: tensor.dtype for tensor in output.tensors if "_scale" in tensor.name}
    assert set(scales.values()) == {"U8"}
    assert {name.partition("proj")[2] for name in scales} == {".weight_scale_inv"}
    index = next(file.content for file in schedule.files if file.path == "model.safetensors.index.json")
    assert json.loads(index)["weight_map"].keys() == {tensor.name for tensor in output.tensors}


@pytest.mark.parametrize(("style", "key"), LISTS.items(), ids=LISTS)
def test_a_head_that_is_the_embedding_is_no_converted_layer(style: QuantStyle, key: str) -> None:
    """It is not stored, and yet a linear layer to transformers, which would miss its scales and multiply by nothing."""
    assert restated({**LLAMA, "tie_word_embeddings": True}, style)[key] == ["lm_head"]


def converted(fields: dict[str, Any]) -> Assignment:
    return convert_to_mxfp8(checkpoint_from_config(fields, name="test").assignment)


def restated(fields: dict[str, Any], style: QuantStyle) -> dict[str, Any]:
    content = config_bytes(converted(fields), style)
    assert content is not None
    stated: dict[str, Any] = json.loads(content)["quantization_config"]
    return stated


def test_other_fields_of_the_config_stay() -> None:
    content = config_bytes(converted({**LLAMA, "_name_or_path": "x", "rope_theta": 1e6}), "compressed-tensors")
    assert content is not None
    fields = json.loads(content)
    fields.pop("quantization_config")
    assert fields == {**LLAMA, "_name_or_path": "x", "rope_theta": 1e6}


def test_experts_in_another_format_stay_a_group_of_their_own() -> None:
    fields = fields_of("moonshotai__Kimi-K3")
    content = config_bytes(converted(fields), "compressed-tensors")
    assert content is not None
    again = json.loads(content)
    stated = again.get("quantization_config") or again["text_config"]["quantization_config"]
    assert stated["format"] == "mixed-precision"
    assert [group["format"] for group in stated["config_groups"].values()] == [
        "mxfp8-quantized",
        "mxfp4-pack-quantized",
    ]
    assert_says(parse_quantization(again), converted(fields))


@pytest.mark.parametrize("name", ["nvidia__GLM-5-NVFP4", "nvidia__NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"])
def test_modelopt_lists_every_module_where_precisions_are_mixed(name: str) -> None:
    stated = restated(fields_of(name), "modelopt")
    assert stated["quant_algo"] == "MIXED_PRECISION"
    algorithms = {facts["quant_algo"] for facts in stated["quantized_layers"].values()}
    assert "MXFP8" in algorithms
    assert any("NVFP4" in algorithm for algorithm in algorithms)
    assert_says(parse_quantization({"quantization_config": stated}), converted(fields_of(name)))


def assert_says(scheme: Any, assignment: Assignment) -> None:
    """Every linear module on every layer, its first and last expert; a table of embeddings is no linear module."""
    for entry in assignment.entries:
        for name in names(entry) if entry.module.rule.is_linear and entry.module.rule.role != "embedding" else ():
            assert scheme.format_of(name, entry.module.kind).name == entry.fmt.name, name


def names(entry: Assigned) -> list[str]:
    ends = [(extent[0], extent[-1]) for extent in entry.module.rest]
    experts = [(end,) for end in ends[0]] if ends else [()]
    firsts = [(first,) for first in entry.first] or [()]
    return [entry.module.name(*first, *rest) for first in firsts for rest in experts]


UNSAYABLE: dict[str, tuple[str, QuantStyle, str]] = {
    "gpt-oss": ("openai__gpt-oss-20b", "compressed-tensors", "found mxfp4"),
    "modelopt by another": ("nvidia__GLM-5-NVFP4", "compressed-tensors", "found modelopt"),
    "mxfp8 beside another": ("nvidia__GLM-5-NVFP4", "mxfp8", "found modelopt"),
    "compressed-tensors by another": ("moonshotai__Kimi-K3", "modelopt", "found compressed-tensors"),
}


@pytest.mark.parametrize(("name", "style", "says"), UNSAYABLE.values(), ids=UNSAYABLE)
def test_what_no_config_can_say_is_refused(name: str, style: QuantStyle, says: str) -> None:
    with pytest.raises(UnknownFormatError, match=says):
        config_bytes(converted(fields_of(name)), style)


def test_a_stale_statement_beside_the_config_stays_behind(tmp_path: Path) -> None:
    checkpoint = rehearsed(fields_of("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"), tmp_path / "c", scaled_down=True)
    along = ("config.json", "hf_quant_config.json")
    schedule = scheduled(checkpoint, layout="hf", quant_style="modelopt", side_files=along)
    assert "hf_quant_config.json" not in {file.path for file in schedule.files}
    write(schedule, tmp_path / "c", tmp_path / "out")
    assert formats(open_checkpoint(tmp_path / "out").assignment) == formats(convert_to_mxfp8(checkpoint.assignment))


def test_a_container_stays_whole_beside_converted_weights(tmp_path: Path) -> None:
    fields = fields_of("Kimi-K3.1-Pro")
    checkpoint = rehearsed(fields, tmp_path / "c", scaled_down=True, experts="exl3-v1")
    schedule = scheduled(checkpoint, layout="hf", side_files=("config.json", "exl3-manifest.json"))
    copied = {file.path for file in schedule.files if file.source == file.path}
    container = checkpoint.assignment.container
    assert container is not None
    assert copied == {"exl3-manifest.json", *(layer.file for layer in container.manifest.layers)}
    write(schedule, tmp_path / "c", tmp_path / "out")
    again = open_checkpoint(tmp_path / "out")
    assert formats(again.assignment) == formats(convert_to_mxfp8(checkpoint.assignment))
    stated = again.config.fields["text_config"]["quantization_config"]
    assert stated["dense_format"] == "mxfp8"
    assert {"kv_b_proj", "f_a_proj", "b_proj"} <= set(stated["ignored_layers"])
    assert "q_proj" not in stated["ignored_layers"]


def test_the_slots_of_a_rank_are_written_down(tmp_path: Path) -> None:
    checkpoint = rehearsed(fields_of("Kimi-K3.1-Pro"), tmp_path / "c", scaled_down=True, experts="exl3-v1")
    schedule = scheduled(checkpoint, tp=2, side_files=("config.json", "exl3-manifest.json"))
    paths = [file.path for file in schedule.files]
    assert "exl3-manifest.json" not in paths
    (file,) = (file for file in schedule.files if file.path == "weights/tp2/rank-1/tonnage-slots.json")
    document = json.loads(file.content)
    assert (document["schema"], document["tp_size"], document["tp_rank"]) == ("tonnage.slots/1", 2, 1)
    written = {
        output.path.rpartition("/")[2]: (dict(output.metadata), output.payload_bytes)
        for job in schedule.jobs
        for output in job.outputs
        if output.rank == 1 and "exl3-layer" in output.path
    }
    assert written.keys() == {layer["file"] for layer in document["layers"].values()}
    for number, layer in document["layers"].items():
        metadata, nbytes = written[layer["file"]]
        assert (metadata["layer"], metadata["first_slot"], metadata["slot_count"], nbytes) == (
            number,
            str(layer["first_slot"]),
            str(layer["slot_count"]),
            layer["payload_bytes"],
        )


# Reading a rank


def rank_of(path: Path, tensors: dict[str, Any], **metadata: str) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model-00001-of-00001.safetensors", metadata={"format": "pt", **metadata})
    (path.parents[2] / "prepare.json").write_text("{}")
    return path


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
        "u8": np.arange(5, dtype=np.uint8),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 4), np.float16),
    }
    rank_of(tmp_path / "weights" / "tp2" / "rank-1", tensors, rank="1", tp_size="2")
    with open_rank(tmp_path, 1) as view:
        assert set(view) == set(tensors)
        assert view.metadata == {"rank": "1", "tp_size": "2"}
        assert view.payload_bytes == sum(array.nbytes for array in tensors.values())
        kept = view["f32"]
        for name, expected in tensors.items():
            assert view[name].dtype == expected.dtype
            assert view[name].shape == expected.shape
            assert (view[name] == expected).all()
            assert not view[name].flags.owndata or name == "empty"
        with pytest.raises(ValueError, match="read-only"):
            view["u8"][0] = 1
        with pytest.raises(KeyError):
            view["nothing"]
    assert (kept == tensors["f32"]).all()


def test_cuts_are_read_from_the_metadata(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}
    rank_of(tmp_path / "weights" / "tp2" / "rank-0", tensors, slices="[[0,[[2,4]],[8,3]],0]")
    view = open_rank(tmp_path, 0)
    assert view.tensors["a"].cut == (0, ((2, 4),), (8, 3))
    assert view.tensors["b"].cut is None


@pytest.mark.parametrize(
    "slices", ["[0]", "[[1,[[2,4]],[8,3]],0]", "[[0,[[4,2]],[8,3]],0]", "[[0,[[0,3]],[8,3]],0]", "{}", "x"]
)
def test_cuts_that_cannot_be_are_refused(slices: str, tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}
    rank_of(tmp_path / "weights" / "tp2" / "rank-0", tensors, slices=slices)
    with pytest.raises(CheckpointError, match="metadata slices"):
        open_rank(tmp_path, 0)


def test_which_rank_is_meant(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(3, np.float32)}
    rank_of(tmp_path / "weights" / "tp2" / "rank-0", tensors, tp_size="2")
    rank_of(tmp_path / "weights" / "tp4-ep4" / "rank-0", tensors, tp_size="4")
    rank_of(tmp_path / "weights" / "tp4-ep4" / "rank-3", tensors, rank="3")
    assert open_rank(tmp_path, 3).directory.parent.name == "tp4-ep4"
    assert open_rank(tmp_path, 0, tp=4).metadata["tp_size"] == "4"
    assert open_rank(tmp_path / "weights" / "tp2" / "rank-0", 0).metadata["tp_size"] == "2"
    for rank, says in ((0, "several topologies"), (5, "no directory of rank 5")):
        with pytest.raises(CheckpointError, match=says):
            open_rank(tmp_path, rank)
    with pytest.raises(CheckpointError, match="is of another rank; expected 1; found 3"):
        open_rank(tmp_path / "weights" / "tp4-ep4" / "rank-3", 1)


def test_layers_of_a_container_have_names_of_their_own(tmp_path: Path) -> None:
    checkpoint = rehearsed(fields_of("Kimi-K3.1-Pro"), tmp_path / "c", scaled_down=True, experts="exl3-v1")
    write(scheduled(checkpoint, tp=2), tmp_path / "c", tmp_path / "out")
    view = open_rank(tmp_path / "out", 1)
    container = checkpoint.assignment.container
    assert container is not None
    for layer in container.layers:
        codes = view[f"exl3-layer-{layer:05d}/codes"]
        assert codes.shape[1] == container.row_strides[0]
    placement = place(convert_to_mxfp8(checkpoint.assignment), Topology(tp=2), engine("split"))
    assert view.payload_bytes == placement.rank_bytes(0, 1)


def test_packed_and_unknown_elements_are_raw_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = (
        OutputTensor(name="f4", dtype="F4", shape=(2, 4), begin=0),
        OutputTensor(name="bf16", dtype="BF16", shape=(2,), begin=4),
    )
    output = OutputFile(rank=0, path="model-00001-of-00001.safetensors", tensors=tensors)
    (tmp_path / output.path).write_bytes(header_bytes(output) + bytes(range(8)))
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    view = open_rank(tmp_path, 0)
    assert view["f4"].tolist() == [[0, 1], [2, 3]]
    assert view["bf16"].tolist() == [0x0504, 0x0706]


def test_refusals_are_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(TonnageError):
        open_rank(tmp_path, 0)
