"""``tonnage export-names``: what a loader of rank-sliced EXL3 keeps is what the rank was prepared to hold."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_samples import MCG, TENSOR, Stored, load, rehearse_exl3
from samples import prepare_small
from tonnage import open_rank
from tonnage.cli.export_names import export_names
from tonnage.errors import PlacementError
from tonnage.prepare.io import PrepareError
from tonnage.prepare.reader import TensorView
from tonnage.rank_names.exl3 import write_rank_names
from tonnage.rank_names.naming import rank_names

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
THEIRS = re.compile(r"^(?P<prefix>.+)\.rank(?P<rank>\d+)\.(?P<field>trellis|suh|svh|mcg|mul1)$")
"""The expression the loader looks names up with."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``moe``, prepared as ``ranks`` for two ranks, and written by rank as ``sliced``."""
    path = tmp_path_factory.mktemp("home")
    rehearse_exl3(path / "moe")
    prepare_small(path / "moe", path / "ranks", convert="none")
    write_rank_names(path / "ranks", path / "sliced")
    return path


def test_a_loader_keeps_for_every_rank_what_it_was_prepared_to_hold(home: Path) -> None:
    written, source = load(home / "sliced"), load(home / "moe")
    for rank in range(2):
        kept = {
            f"{match['prefix']}.{match['field']}": tensor
            for name, tensor in written.items()
            if (match := THEIRS.match(name)) and int(match["rank"]) == rank
        }
        with open_rank(home / "ranks", rank) as prepared:
            experts = {name for name in prepared if ".experts." in name}
            assert kept.keys() == experts
            for name, (dtype, shape, raw) in kept.items():
                view = prepared.tensors[name]
                assert (dtype, shape, raw) == (view.dtype, view.shape, prepared[name].tobytes())
    others = {name: tensor for name, tensor in written.items() if not THEIRS.match(name)}
    assert others == {name: tensor for name, tensor in source.items() if ".experts." not in name}


@pytest.mark.parametrize(("projection", "kind"), [("gate_proj", "column"), ("up_proj", "column"), ("down_proj", "row")])
def test_slices_of_the_published_tensor_are_the_published_slices(home: Path, projection: str, kind: str) -> None:
    written = load(home / "sliced")
    expected = [one for one in TENSOR["slices"] if one["kind"] == kind]
    assert len(expected) == 2
    for rank, one in enumerate(expected):
        for layer, expert in ((0, 0), (1, 1)):
            module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.rank{rank}"
            for part in ("trellis", "suh", "svh"):
                assert hashlib.sha256(written[f"{module}.{part}"][2]).hexdigest() == one[f"{part}_sha256"]
            assert written[f"{module}.trellis"][:2] == ("I16", tuple(one["trellis_shape"]))
            assert written[f"{module}.mcg"] == ("I32", (), MCG)


def test_the_config_states_what_the_loader_asks_for(home: Path) -> None:
    config = json.loads((home / "sliced" / "config.json").read_bytes())
    assert config["hybrid_tr3_tail"] == {
        "format": "exl3-trellis",
        "bits": 3,
        "codebook": "mcg",
        "experts_per_layer": 2,
        "moe_layers": [0, 1],
        "rotation_layout": "per_expert_v1",
        "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}",
        "tp": 2,
    }
    assert config["quantization_config"]["quant_method"] == "exl3"
    assert "tensor_storage" not in config["quantization_config"]
    assert not (home / "sliced" / "quantization_config.json").exists()


def test_the_index_names_every_tensor(home: Path) -> None:
    index = json.loads((home / "sliced" / "model.safetensors.index.json").read_bytes())
    written = load(home / "sliced")
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in written.values())


def test_files_are_as_small_as_asked_and_tensors_aligned(home: Path, tmp_path: Path) -> None:
    document = write_rank_names(home / "ranks", tmp_path / "out", file_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == document["files"] > 3
    assert load(tmp_path / "out") == load(home / "sliced")
    for file in files:
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        del header["__metadata__"]
        assert len(header) == 1 or len(raw) - 8 - size <= 100_000
        widths = {"I32": 4, "I16": 2, "F16": 2, "BF16": 2, "F32": 4}
        assert all(one["data_offsets"][0] % widths[one["dtype"]] == 0 for one in header.values())


def test_experts_at_two_rates_are_named_in_a_file(tmp_path: Path) -> None:
    def change(tensors: Stored) -> Stored:
        for name, (dtype, shape, raw) in tensors.items():
            if ".experts.1." in name and name.endswith(".trellis"):
                wider = (*shape[:2], 64)
                tensors[name] = (dtype, wider, np.resize(np.frombuffer(raw, "u1"), 2 * int(np.prod(wider))).tobytes())
        return tensors

    rehearse_exl3(tmp_path / "moe", change)
    prepare_small(tmp_path / "moe", tmp_path / "ranks", convert="none")
    tail = write_rank_names(tmp_path / "ranks", tmp_path / "out")["hybrid_tr3_tail"]
    assert (tail["bits"], tail["k_values"]) == ("mixed", [3, 4])
    file, _, field = tail["bits_per_expert"].rpartition(":")
    rates = json.loads((tmp_path / "out" / file).read_bytes())
    assert {layer: one[field] for layer, one in rates.items()} == {"0": [3, 4], "1": [3, 4]}


# --- refusals ---------------------------------------------------------------------------------------------------------


def view(name: str, dtype: str, shape: tuple[int, ...], cut: Any = None) -> TensorView:
    return TensorView(file="f", name=name, dtype=dtype, shape=shape, begin=0, nbytes=0, cut=cut)


def ranks(tp: int = 2) -> dict[int, dict[str, TensorView]]:
    """Headers of one expert in one layer, 256 by 256 at three bits, by hand."""
    held: dict[int, dict[str, TensorView]] = {}
    for rank in range(tp):
        low, high, part = 16 // tp * rank, 16 // tp * (rank + 1), 256 // tp
        span = ((part * rank, part * (rank + 1)),)
        for projection, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0)):
            module = f"model.layers.4.mlp.experts.0.{projection}"
            trellis = (16, 16 // tp, 48) if axis else (16 // tp, 16, 48)
            whole, cut = view("", "F16", (256,)), view("", "F16", (part,), (0, span, (256,)))
            held.setdefault(rank, {}).update(
                {
                    f"{module}.trellis": view("", "I16", trellis, (axis, ((low, high),), (16, 16, 48))),
                    f"{module}.suh": whole if axis else cut,
                    f"{module}.svh": cut if axis else whole,
                    f"{module}.mcg": view("", "I32", ()),
                }
            )
    return held


UP = "model.layers.4.mlp.experts.0.up_proj"


def test_headers_by_hand_are_accepted() -> None:
    found = rank_names(ranks(), where="here")
    assert (found.tp, found.rates) == (2, {4: (3,)})
    assert found.sliced[0] == "model.layers.4.mlp.experts.0.gate_proj.trellis"
    assert len(found.sliced) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.clear(), "no experts to be sliced"),
        (lambda held: held.pop(f"{UP}.mcg"), "parts; expected trellis, suh, svh, mcg; found suh, svh, trellis"),
        (lambda held: held.update({f"{UP}.mul1": held.pop(f"{UP}.mcg")}), "found mul1, suh, svh, trellis"),
        (lambda held: held.update({f"{UP}.bias": held[f"{UP}.svh"]}), "found bias, mcg, suh, svh, trellis"),
        (lambda held: held.update({"lm_head.trellis": held[f"{UP}.trellis"]}), "EXL3 outside the routed experts"),
        (
            lambda held: held.update({name.replace(".0.", ".2."): one for name, one in held.items()}),
            "not the same experts",
        ),
        (
            lambda held: held.update({name.replace("layers.4", "layers.6"): one for name, one in held.items()}),
            "not one run",
        ),
        (
            lambda held: held.update({f"{UP}.suh": replace(held[f"{UP}.suh"], dtype="BF16")}),
            "of rank 0",
        ),
    ],
)
def test_what_the_loader_does_not_read_is_refused(change: Callable[[Any], Any], message: str) -> None:
    held = ranks()
    for one in held.values():
        change(one)
    with pytest.raises(PlacementError, match=message):
        rank_names(held, where="here")


def test_whole_experts_on_single_ranks_are_refused() -> None:
    held = ranks()
    for name in [name for name in held[1] if ".up_proj." in name]:
        del held[1][name]
    with pytest.raises(PlacementError, match="of rank 1"):
        rank_names(held, where="here")


def test_slices_inside_a_block_of_128_channels_are_refused() -> None:
    with pytest.raises(PlacementError, match="a multiple of 128 for each of 4 ranks"):
        rank_names(ranks(4), where="here")


def test_a_missing_rank_is_refused() -> None:
    held = ranks()
    with pytest.raises(PlacementError, match="not all ranks"):
        rank_names({1: held[1]}, where="here")


@pytest.mark.parametrize("rate", [2, 7])
def test_rates_without_a_kernel_are_refused(rate: int) -> None:
    held = ranks()
    for one in held.values():
        for name in [name for name in one if name.endswith(".trellis")]:
            axis, spans, whole = one[name].cut or (0, (), ())
            shape = (*one[name].shape[:2], 16 * rate)
            one[name] = replace(one[name], shape=shape, cut=(axis, spans, (*whole[:2], 16 * rate)))
    with pytest.raises(PlacementError, match="K one of"):
        rank_names(held, where="here")


def test_a_checkpoint_without_such_experts_is_refused(tonnage: Tonnage, tmp_path: Path) -> None:
    prepare_small(tmp_path / "llama", tmp_path / "ranks", convert="none")
    done = tonnage("export-names", tmp_path / "ranks", "--style", "exl3", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "no experts to be sliced by rank" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_empty_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(PrepareError, match="not empty"):
        write_rank_names(home / "ranks", tmp_path)


def test_a_config_that_does_not_state_exl3_is_refused(home: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(home / "ranks", tmp_path / "ranks")
    config = json.loads((changed / "config.json").read_bytes())
    del config["quantization_config"]
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlacementError, match='quant_method "exl3"'):
        write_rank_names(changed, tmp_path / "out")


def test_the_command_says_what_it_wrote(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Example: tonnage export-names prepared --style exl3 -o rank-sliced" in (export_names.__doc__ or "")
    export_names(home / "ranks", tmp_path / "json", "exl3", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "tonnage.export-names/1"
    assert document["sliced_tensors"] == 2 * 2 * 2 * 3 * 4
    export_names(home / "ranks", tmp_path / "table", "exl3", as_json=False)
    assert "tensors of 2 ranks" in capsys.readouterr().out
