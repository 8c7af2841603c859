"""``tonnage measure``: bytes per rank and class from headers alone, whoever cut the ranks; strangers' directories."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from samples import LLAMA, prepare_small, rehearse, write_key
from tonnage.api import read_config
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.cli.explain import explain
from tonnage.cli.measure import measure
from tonnage.cli.records import write_records
from tonnage.errors import TonnageError
from tonnage.export.manifest import Manifest, Parallel, manifest_bytes
from tonnage.measure.classes import class_sums
from tonnage.measure.io import measure_package, measure_packages, read_measurement_file
from tonnage.measure.packages import MeasuredPackage, measurement_document
from tonnage.measure.record import MeasurementError, read_measurement
from tonnage.measure.statement import package_statement
from tonnage.recipes.blueprint import Blueprint, blueprint_of
from tonnage.synth.io import RehearsalOptions, write_rehearsal

Tensors = dict[str, tuple[str, list[int]]]
Tonnage = Callable[..., subprocess.CompletedProcess[str]]
DATA = Path(__file__).resolve().parent / "data"
SMALL: dict[str, Any] = {**LLAMA, "vocab_size": 301}
BYTES_OF = {"BF16": 2, "F8_E4M3": 1, "U8": 1, "F32": 4}
ROLE_OF_PART = {
    "embed_tokens": "embedding", "lm_head": "head", "q_proj": "attention", "k_proj": "attention", "v_proj": "attention",
    "o_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp", "norm": "norm",
    "input_layernorm": "norm", "post_attention_layernorm": "norm",
}  # fmt: skip
"""By hand: what the module before the last dot of a Llama tensor's name is for."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint ``small``, prepared as ``plain`` and ``mxfp8`` for two ranks; not to be changed."""
    path = tmp_path_factory.mktemp("home")
    rehearse(path / "small", SMALL, sharded=True)
    prepare_small(path / "small", path / "plain", convert="none")
    prepare_small(path / "small", path / "mxfp8")
    return path


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``k3`` with experts in a container, prepared as ``ranks`` (layout tp) and ``whole`` (layout hf)."""
    path = tmp_path_factory.mktemp("container")
    config = read_config(DATA / "configs" / "moonshotai__Kimi-K3.json")
    write_rehearsal(config, path / "k3", RehearsalOptions(scaled_down=True, experts="exl3-v1"))
    prepare_small(path / "k3", path / "ranks", convert="none")
    prepare_small(path / "k3", path / "whole", convert="none", tp=1, layout="hf")
    return path


@pytest.fixture
def foreign(home: Path, tmp_path: Path) -> Path:
    """Ranks cut by tonnage, without the document that says so; to be changed."""
    path = shutil.copytree(home / "plain", tmp_path / "foreign")
    (path / "prepare.json").unlink()
    return path


def sums(package: MeasuredPackage, rank: int) -> dict[tuple[str, str], int]:
    return {(part.tensor_class, part.dtype): part.nbytes for part in package.ranks[rank].by_class}


def document(*paths: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(measurement_document(measure_packages(paths), date="2026-11-30")))
    return result


def safetensors_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """Return a file of zeros, one tensor after the other."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES_OF[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(end)


def by_hand(directory: Path) -> dict[tuple[str, str], int]:
    """Sum up the tensors of a Llama rank as the safetensors library reads them."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for file in directory.glob("*.safetensors"):
        for name, tensor in safetensors.deserialize(file.read_bytes()):
            found[ROLE_OF_PART[name.split(".")[-2]], tensor["dtype"]] += len(tensor["data"])
    return dict(found)


# --- what is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "mxfp8"])
def test_every_rank_is_measured_to_the_byte_by_role_and_dtype(home: Path, name: str) -> None:
    package = measure_package(home / name)
    assert [rank.rank for rank in package.ranks] == [0, 1]
    for rank in package.ranks:
        directory = home / name / f"weights/tp2/rank-{rank.rank}"
        expected = by_hand(directory)
        assert sums(package, rank.rank or 0) == expected
        assert rank.payload_bytes == sum(expected.values())
        assert rank.file_bytes == sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        assert rank.tensors == sum(part.tensors for part in rank.by_class)


def test_a_preparation_says_what_was_cut_and_how(home: Path) -> None:
    package = measure_package(home / "mxfp8")
    recorded = json.loads((home / "mxfp8" / "prepare.json").read_bytes())
    assert (package.kind, package.digest_of, package.convert) == ("preparation", "prepare.json", "mxfp8")
    assert package.checkpoint.name == "small"
    assert package.checkpoint.digest == recorded["identity"]["checkpoint"]
    assert package.checkpoint.family == "llama"
    assert [rank.payload_bytes for rank in package.ranks] == [rank["planned_bytes"] for rank in recorded["ranks"]]
    assert {dtype for _, dtype in sums(package, 0)} == {"BF16", "F8_E4M3", "U8"}
    assert package.notes == ()


def test_layer_files_of_a_container_are_experts(container: Path) -> None:
    package = measure_package(container / "ranks")
    for rank in package.ranks:
        files = sorted((container / f"ranks/weights/tp2/rank-{rank.rank}").glob("exl3-layer-*.safetensors"))
        payload = sum(len(t["data"]) for file in files for _, t in safetensors.deserialize(file.read_bytes()))
        found = sums(package, rank.rank or 0)
        assert len(files) == 3
        assert sum(nbytes for (role, _), nbytes in found.items() if role == "expert") == payload
        assert "unknown" not in {role for role, _ in found}
        assert sum(found.values()) == rank.payload_bytes


def test_an_unsharded_checkpoint_is_rank_0_of_1_with_its_container(container: Path) -> None:
    source, whole = measure_package(container / "k3"), measure_package(container / "whole")
    assert (source.kind, whole.kind) == ("checkpoint", "preparation")
    assert (source.topology.tp, len(source.ranks), source.digest_of) == (1, 1, "headers")
    assert sums(source, 0) == sums(whole, 0)
    both = measure_package(container / "ranks")
    assert sums(source, 0)["vision", "BF16"] <= sum(sums(both, rank)["vision", "BF16"] for rank in (0, 1))


def test_a_signed_package_is_measured_as_its_preparation_was(home: Path, tmp_path: Path, tonnage: Tonnage) -> None:
    package = shutil.copytree(home / "mxfp8", tmp_path / "package")
    done = tonnage("export", package, "--key", write_key(tmp_path)[0], "--date", "2026-11-30")
    assert done.returncode == 0, done.stderr
    found = document(package, home / "mxfp8")
    assert found["identical"] is True
    first, second = found["packages"]
    assert (first["kind"], first["digest_of"], first["date"]) == ("package", "manifest.json", "2026-11-30")
    assert first["name"].startswith("llama-tp2")
    assert first["ranks"] == second["ranks"]
    assert found["convert"] == "mxfp8"
    assert found["checkpoint"]["digest"] == measure_package(home / "mxfp8").checkpoint.digest
    (package / "model.sig").unlink()
    assert refusal(package) == "package: package is not finished; expected model.sig; found manifest.json"


@pytest.mark.parametrize("spelling", ["rank-{}", "rank{}", "rank_{}", "rank-0{}"])
@pytest.mark.parametrize("place", ["", "weights", "weights/tp2", "tp2"])
def test_ranks_of_other_tools_are_found(foreign: Path, tmp_path: Path, spelling: str, place: str) -> None:
    other = tmp_path / "other"
    for rank in (0, 1):
        shutil.copytree(foreign / f"weights/tp2/rank-{rank}", other / place / spelling.format(rank))
    shutil.copy(foreign / "config.json", other)
    package = measure_package(other)
    assert (package.kind, package.topology.tp, package.name) == ("ranks", 2, "other")
    assert package.ranks == measure_package(foreign).ranks
    assert (package.checkpoint.name, package.checkpoint.digest, package.convert) == (None, None, None)
    assert package.digest == measure_package(foreign).digest


def test_without_a_config_all_classes_are_unknown(foreign: Path) -> None:
    known = measure_package(foreign)
    (foreign / "config.json").write_text(json.dumps({**SMALL, "model_type": "no_such_model"}))
    strange = measure_package(foreign)
    assert "no_such_model" in strange.notes[0]
    (foreign / "config.json").unlink()
    package = measure_package(foreign)
    assert package.notes == ("foreign: no config.json, so all classes are unknown",)
    assert package.ranks == strange.ranks
    assert sums(package, 0) == {("unknown", "BF16"): known.ranks[0].payload_bytes}


def test_ranks_that_say_nothing_are_counted(tmp_path: Path) -> None:
    for rank in range(3):
        place = tmp_path / "plain" / f"rank{rank}"
        place.mkdir(parents=True)
        (place / "a.safetensors").write_bytes(safetensors_bytes({"w": ("U8", [rank + 1])}))
    package = measure_package(tmp_path / "plain")
    assert [rank.payload_bytes for rank in package.ranks] == [1, 2, 3]
    assert "nothing says for how many ranks it is cut, 3 are counted" in package.notes[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(*paths: Path) -> str:
    with pytest.raises(TonnageError) as caught:
        measure_packages(paths)
    return str(caught.value)


def swap_ranks(path: Path) -> None:
    first, second, between = path / "weights/tp2/rank-0", path / "weights/tp2/rank-1", path / "x"
    first.rename(between)
    second.rename(first)
    between.rename(second)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


RANK = "weights/tp2/rank-1"
FILE = f"{RANK}/model-00001-of-00002.safetensors"
LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing rank": (lambda p: shutil.rmtree(p / RANK), "foreign: rank 1 missing; expected 2 ranks (tp2 ep1 pp1); found 1"),
    "no ranks": (lambda p: shutil.rmtree(p / "weights"), "foreign: no ranks to measure"),
    "rank beyond": (lambda p: shutil.copytree(p / RANK, p / "weights/tp2/rank-2"), "foreign/weights/tp2/rank-2: a rank beyond the topology; expected less than 2"),
    "endless rank": (lambda p: shutil.copytree(p / RANK, p / "weights/tp2/rank-9999999"), "rank-9999999: a rank beyond the topology"),
    "rank twice": (lambda p: shutil.copytree(p / RANK, p / "weights/tp2/rank_1"), "foreign/weights/tp2: rank 1 twice; expected one directory; found rank-1, rank_1"),
    "mixed sizes": (lambda p: shutil.copytree(p / "weights/tp2", p / "weights/tp4"), "foreign: ranks of several topologies; expected weights/tpN/rank-R, rank-R, or safetensors files; found weights/tp2, weights/tp4"),
    "ranks and a whole": (lambda p: shutil.copy(p / FILE, p), "ranks of several topologies"),
    "swapped ranks": (swap_ranks, "foreign/weights/tp2/rank-0/model-00001-of-00002.safetensors: its metadata has another rank than its place; expected 0; found 1"),
    "another size": (lambda p: (p / "weights/tp2").rename(p / "weights/tp2-ep2"), "its metadata has another ep_size than its place; expected 2; found 1"),
    "linked rank": (lambda p: link(p / RANK), f"foreign/{RANK}: a link, which is not followed"),
    "linked weights": (lambda p: link(p / "weights"), "foreign/weights: a link, which is not followed"),
    "linked sizes": (lambda p: link(p / "weights/tp2"), "foreign/weights/tp2: a link, which is not followed"),
    "linked file": (lambda p: link(p / FILE), f"foreign/{FILE}: a link, which is not followed"),
    "linked config": (lambda p: link(p / "config.json"), "foreign/config.json: a link, which is not followed"),
    "linked summary": (lambda p: (p / "prepare.json").symlink_to("/dev/zero"), "foreign/prepare.json: a link, which is not followed"),
    "rank is a file": (lambda p: (p / "weights/tp2/rank-2").write_text(""), "foreign/weights/tp2/rank-2: not a directory of a rank"),
    "directory in a rank": (lambda p: (p / RANK / "more").mkdir(), f"foreign/{RANK}/more: a directory inside a rank"),
    "garbage header": (lambda p: (p / FILE).write_bytes(b"\xff" * 100), f"foreign/{FILE}: "),
    "truncated": (lambda p: (p / FILE).write_bytes((p / FILE).read_bytes()[:-1]), f"foreign/{FILE}: truncated"),
    "file of the index missing": (lambda p: (p / FILE).unlink(), f"foreign/{RANK}/model.safetensors.index.json: "),
    "no files": (lambda p: [f.unlink() for f in (p / RANK).iterdir()], f"foreign/{RANK}: no shard files"),
    "unfinished": (lambda p: (p / ".prepare").mkdir(), "foreign: preparation is not complete; expected prepare.json; found only .prepare"),
    "not a summary": (lambda p: (p / "prepare.json").write_text("{}"), "prepare.json: not the summary of a preparation"),
    "only a manifest": (lambda p: (p / "manifest.json").write_text("{}"), "foreign: package is not finished"),
    "no manifest": (lambda p: [(p / name).write_text("{}") for name in ("manifest.json", "model.sig", "provenance.json")], "manifest.json: not a manifest of a package"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "line"), LIES.values(), ids=LIES)
def test_a_directory_that_is_not_what_it_must_be_is_refused_by_name(
    foreign: Path, lie: Callable[[Path], object], line: str
) -> None:
    assert measure_package(foreign).ranks
    lie(foreign)
    assert line in refusal(foreign)


def test_a_rank_alone_and_the_weights_of_an_unfinished_preparation_are_refused(foreign: Path) -> None:
    assert "its metadata has another tp_size than its place; expected 1; found 2" in refusal(foreign / RANK)
    (foreign / ".prepare").mkdir()
    assert "foreign: preparation is not complete" in refusal(foreign / "weights" / "tp2")


def test_a_checkpoint_may_be_links_into_a_cache_and_what_tonnage_wrote_may_not(container: Path, tmp_path: Path) -> None:
    for name in ("k3", "whole"):
        (tmp_path / name).mkdir()
        for file in (container / name).iterdir():
            (tmp_path / name / file.name).symlink_to(file)
    assert measure_package(tmp_path / "k3").ranks == measure_package(container / "k3").ranks
    assert refusal(tmp_path / "whole").startswith("whole/prepare.json: a link, which is not followed")
    (tmp_path / "whole" / "prepare.json").unlink()
    shutil.copy(container / "whole" / "prepare.json", tmp_path / "whole")
    assert refusal(tmp_path / "whole").startswith(
        "whole/model-00001-of-00001.safetensors: a link, which is not followed"
    )


def test_a_file_that_is_not_as_recorded_is_named(home: Path, tmp_path: Path) -> None:
    path = shutil.copytree(home / "plain", tmp_path / "changed")
    (path / RANK / "more.safetensors").write_bytes(safetensors_bytes({"w": ("U8", [3])}))
    assert any("more.safetensors: not named by the index, not counted" in note for note in measure_package(path).notes)
    (path / RANK / "model.safetensors.index.json").unlink()
    assert (
        refusal(path)
        == f"changed/{RANK}/more.safetensors: not as prepare.json says; expected no such file; found a file"
    )
    shutil.copy(path / RANK / "more.safetensors", path / FILE)
    (path / RANK / "more.safetensors").unlink()
    said = refusal(path)
    assert said.startswith(f"changed/{FILE}: not as prepare.json says; expected ")
    assert said.endswith(f"; found {(path / FILE).stat().st_size} bytes, payload 3")


def test_packages_that_do_not_belong_together_are_refused(home: Path, container: Path, foreign: Path) -> None:
    (foreign / "weights/tp2").rename(foreign / "weights/tp2-pp1")
    assert "plain: of another checkpoint; expected " in refusal(container / "ranks", home / "plain")
    assert "small: cut for another topology; expected tp2 ep1 pp1 as plain; found tp1 ep1 pp1" in refusal(
        home / "plain", home / "small"
    )
    assert "of another model family; expected kimi_k3 as ranks; found llama" in refusal(container / "ranks", foreign)
    assert "given twice" in refusal(home / "plain", home / "plain" / ".")
    assert "no such directory" in refusal(home / "nothing")


def test_a_payload_that_is_not_as_recorded_is_named(home: Path, tmp_path: Path) -> None:
    path = shutil.copytree(home / "plain", tmp_path / "changed")
    recorded = json.loads((path / "prepare.json").read_bytes())
    file = recorded["ranks"][1]["files"][0]
    file["payload_bytes"] += 1
    (path / "prepare.json").write_text(json.dumps(recorded))
    sizes = f"{file['file_bytes']} bytes, payload {file['payload_bytes']}"
    assert refusal(path).startswith(f"changed/{file['path']}: not as prepare.json says; expected {sizes}; found ")


# --- several packages -------------------------------------------------------------------------------------------------


def test_copies_are_identical(home: Path, foreign: Path) -> None:
    found = document(home / "plain", foreign)
    assert (found["identical"], found["differences"], len(found["packages"])) == (True, [], 2)
    assert found["checkpoint"]["name"] == "small"
    assert found["convert"] is None


def test_what_differs_is_named_and_the_larger_is_the_bound(home: Path) -> None:
    found = document(home / "mxfp8", home / "plain")
    assert found["identical"] is False
    mlp = [one for one in found["differences"] if one["class"] == "mlp" and one["rank"] == 1]
    # 2 layers were scaled down to 1: gate, up and down of 512 x 256, half of each on a rank
    half = 512 * 256 // 2
    assert mlp == [
        {"package": "plain", "rank": 1, "class": "mlp", "dtype": "BF16", "nbytes": 3 * half * 2, "tensors": 3, "first_nbytes": 0, "first_tensors": 0},
        {"package": "plain", "rank": 1, "class": "mlp", "dtype": "F8_E4M3", "nbytes": 0, "tensors": 0, "first_nbytes": 3 * half, "first_tensors": 3},
        {"package": "plain", "rank": 1, "class": "mlp", "dtype": "U8", "nbytes": 0, "tensors": 0, "first_nbytes": 3 * half // 32, "first_tensors": 3},
    ]  # fmt: skip
    assert {one["class"] for one in found["differences"]} == {"attention", "mlp"}
    assert found["ranks"] == found["packages"][1]["ranks"]
    assert found["largest"]["payload_bytes"] == max(rank["payload_bytes"] for rank in found["packages"][1]["ranks"])


# --- classes ----------------------------------------------------------------------------------------------------------


def header_of(tensors: Tensors, metadata: dict[str, str] | None = None, file: str = "a") -> ShardHeader:
    raw = safetensors_bytes(tensors, metadata)
    size = int.from_bytes(raw[:8], "little") + 8
    return HeaderReader().read(raw[:size], shard_file=f"{file}.safetensors", file_bytes=len(raw))


@cache
def experts() -> Blueprint:
    """128 experts on each of 48 layers."""
    return blueprint_of(read_config(DATA / "configs" / "Qwen__Qwen3-30B-A3B.json"))


CLASS_OF_NAME = {
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.q_proj.weight_scale": "attention",
    "model.layers.0.self_attn.q_proj.bias": "attention",
    "model.layers.47.mlp.experts.127.up_proj.weight": "expert",
    "model.layers.47.mlp.experts.3.up_proj.weight": "expert",
    "model.layers.47.mlp.experts.128.up_proj.weight": "unknown",
    "model.layers.48.mlp.experts.0.up_proj.weight": "unknown",
    "model.layers.48.self_attn.q_proj.weight": "unknown",
    "model.layers.0.mlp.gate.weight": "router",
    "model.norm.weight": "norm",
    "model.norm.weight.scale": "unknown",
    "lm_head.weight": "head",
    "draft.layers.0.self_attn.q_proj.weight": "unknown",
    "model.layers.0.self_attn.q_proj.weight_of_another": "unknown",
    "model.layers.00.self_attn.q_proj.weight": "unknown",
}


@given(
    st.dictionaries(
        st.sampled_from(sorted(CLASS_OF_NAME)),
        st.tuples(st.sampled_from(["BF16", "F8_E4M3", "U8", "F32"]), st.lists(st.integers(0, 5), max_size=3)),
    )
)
def test_classes_add_up_to_the_payload_and_nothing_is_guessed(tensors):
    expected: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for name, (dtype, shape) in tensors.items():
        expected[CLASS_OF_NAME[name], dtype][0] += BYTES_OF[dtype] * prod(shape)
        expected[CLASS_OF_NAME[name], dtype][1] += 1
    shard = header_of(tensors)
    found = class_sums([shard], experts())
    assert {(part.tensor_class, part.dtype): [part.nbytes, part.tensors] for part in found} == expected
    assert sum(part.nbytes for part in found) == shard.payload_bytes


def test_a_file_is_no_layer_of_a_container_by_its_name_alone() -> None:
    tensors = {"codes": ("U8", [7])}
    stranger = header_of(tensors, file="exl3-layer-00001")
    layer = header_of(tensors, {"schema": "exl3-v1"}, file="exl3-layer-00001")
    assert [part.tensor_class for part in class_sums([stranger], experts())] == ["unknown"]
    assert [(part.tensor_class, part.nbytes) for part in class_sums([layer, layer], None)] == [("expert", 14)]


def test_a_package_of_a_checkpoint_without_a_digest_is_refused_as_its_record_would_be() -> None:
    manifest = manifest_bytes(
        Manifest(
            name="a", tonnage_version="1", hash="sha256", layout="tp", topology=Parallel(tp=1), ranks=(0,), files=()
        )
    )
    said: dict[str, Any] = {
        "schema": "tonnage.provenance/1",
        "source": {"name": "small", "digest": "ab" * 32},
        "recipe": {"family": "llama"},
        "options": {"convert": "none"},
    }
    assert package_statement(manifest, json.dumps(said).encode()).origin.digest == "ab" * 32
    for digest in ("", "AB" * 32, "ab" * 31, "x"):
        said["source"]["digest"] = digest
        with pytest.raises(TonnageError, match=r"provenance\.json: digest of the checkpoint; expected 64 hex digits"):
            package_statement(manifest, json.dumps(said).encode())
    with pytest.raises(TonnageError, match="duplicate key recipe"):
        package_statement(manifest, json.dumps(said)[:-1].encode() + b', "recipe": {"family": "other"}}')


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_measured(home: Path) -> None:
    comparison = measure_packages([home / "mxfp8", home / "plain"])
    raw = json.dumps(measurement_document(comparison, date="2026-11-30")).encode()
    measurement = read_measurement(raw, "record.json")
    assert measurement.ranks == comparison.ranks
    assert (measurement.tp, measurement.ep, measurement.pp, measurement.packages) == (2, 1, 1, 2)
    assert (measurement.date, measurement.identical, measurement.is_complete) == ("2026-11-30", False, True)
    assert measurement.checkpoint_digest == comparison.checkpoint.digest
    assert measurement.source == "record.json"


def test_the_reported_seed_case_is_a_measurement_as_it_stands() -> None:
    measurement = read_measurement_file(DATA / "seed_case.json")
    assert (measurement.tp, measurement.packages, measurement.identical) == (8, 12, True)
    assert (measurement.largest.rank, measurement.largest_bytes) == (0, 94_526_085_728)
    assert measurement.smallest_bytes == 94_515_137_120
    assert (measurement.is_complete, measurement.checkpoint_digest, measurement.date) == (False, None, None)


def test_payload_bytes_alone_are_a_measurement_and_unknown_fields_are_left_alone() -> None:
    raw = b'{"ranks": [{"payload_bytes": 7, "colour": 1}, {"payload_bytes": 9}], "made_by": "hand"}'
    measurement = read_measurement(raw, "x")
    assert [(rank.rank, rank.payload_bytes, rank.file_bytes) for rank in measurement.ranks] == [
        (None, 7, None),
        (None, 9, None),
    ]
    assert (measurement.largest_bytes, measurement.smallest_bytes, measurement.tp) == (9, 7, None)
    flat = read_measurement(b'{"largest_rank_bytes": 9, "smallest_rank_bytes": 7}', "x")
    assert (flat.largest_bytes, flat.smallest_bytes, flat.packages) == (9, 7, 1)


ONE = '{"rank": 0, "payload_bytes": 5}'
BAD_RECORDS = {
    "not JSON": ("[", "not JSON"),
    "an array": ("[]", "not a JSON object"),
    "nothing": ("{}", "expected ranks with payload_bytes, or largest_rank_bytes and smallest_rank_bytes"),
    "no ranks": ('{"ranks": []}', "length >= 1"),
    "other document": ('{"schema": "tonnage.prepare/1", "ranks": [{"payload_bytes": 5}]}', "expected tonnage.measurement/1; found tonnage.prepare/1"),
    "fraction": ('{"ranks": [{"payload_bytes": 5.0}]}', "Expected `int`, got `float`"),
    "text": ('{"ranks": [{"payload_bytes": "5"}]}', "Expected `int`, got `str`"),
    "boolean": ('{"ranks": [{"payload_bytes": true}]}', "Expected `int`, got `bool`"),
    "negative": ('{"ranks": [{"payload_bytes": -1}]}', "Expected `int` >= 0"),
    "endless": ('{"ranks": [{"payload_bytes": 9223372036854775808}]}', "Expected `int` <= 9223372036854775807"),
    "twice the key": ('{"ranks": [], "ranks": [{"payload_bytes": 5}]}', "duplicate key ranks"),
    "rank twice": (f'{{"ranks": [{ONE}, {ONE}]}}', "rank 0; expected once; found 2 times"),
    "half numbered": (f'{{"ranks": [{ONE}, {{"payload_bytes": 5}}]}}', "ranks without a number; expected none, or all of them; found 1"),
    "rank missing": (f'{{"ranks": [{ONE}], "topology": {{"tp": 2, "pp": 2}}}}', "ranks; expected 4; found 1; missing 1, 2, 3"),
    "ranks too many": ('{"ranks": [{"payload_bytes": 5}, {"payload_bytes": 5}], "tp_size": 1}', "ranks; expected 1; found 2"),
    "rank beyond": ('{"ranks": [{"rank": 1, "payload_bytes": 5}], "tp_size": 1}', "rank; expected less than 1; found 1"),
    "two sizes": (f'{{"ranks": [{ONE}], "tp_size": 1, "topology": {{"tp": 2}}}}', "tp_size; expected topology.tp 2; found 1"),
    "size beyond": (f'{{"ranks": [{ONE}], "tp_size": 1025}}', "Expected `int` <= 1024"),
    "files too small": ('{"ranks": [{"payload_bytes": 5, "file_bytes": 4}]}', "file_bytes of a rank; expected at least its payload 5; found 4"),
    "classes do not add up": ('{"ranks": [{"rank": 0, "payload_bytes": 5, "by_class": [{"class": "mlp", "dtype": "U8", "nbytes": 4, "tensors": 1}]}]}', "payload_bytes of rank 0; expected the sum of its classes 4; found 5"),
    "largest": (f'{{"ranks": [{ONE}], "largest": {{"payload_bytes": 4}}}}', "largest; expected 5, as its ranks say; found 4"),
    "smallest": (f'{{"ranks": [{ONE}], "smallest": {{"payload_bytes": 6}}}}', "smallest; expected 5, as its ranks say; found 6"),
    "spread": (f'{{"ranks": [{ONE}], "spread_bytes": 1}}', "spread_bytes; expected 0, as its ranks say; found 1"),
    "digest": (f'{{"ranks": [{ONE}], "checkpoint": {{"digest": "AB"}}}}', "$.checkpoint.digest"),
    "date": (f'{{"ranks": [{ONE}], "date": "2026-13-01"}}', "$.date"),
    "date and more": (f'{{"ranks": [{ONE}], "date": "2026-11-30\\n"}}', "$.date"),
    "report backwards": ('{"measured": {"largest_rank_bytes": 5, "smallest_rank_bytes": 6}}', "largest_rank_bytes; expected at least smallest_rank_bytes 6; found 5"),
    "report without smallest": ('{"measured": {"largest_rank_bytes": 5}}', "smallest_rank_bytes"),
    "report of no packages": ('{"largest_rank_bytes": 5, "smallest_rank_bytes": 5, "exports": 0}', "Expected `int` >= 1"),
    "report of a rank beyond": ('{"tp_size": 8, "measured": {"largest_rank_bytes": 5, "smallest_rank_bytes": 5, "largest_rank": 8}}', "rank; expected less than 8; found 8"),
    "report is no object": ('{"measured": 5}', "not a measurement"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_record_that_cannot_be_is_refused(text: str, line: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        read_measurement(text.encode(), "x\n.json")
    assert str(caught.value).startswith(r"x\n.json: ")
    assert line in str(caught.value)
    assert str(caught.value).count("\n") == 0


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_record_and_shows_it(home: Path, tmp_path: Path, tonnage: Tonnage) -> None:
    record = tmp_path / "new" / "record.json"
    done = tonnage("measure", home / "mxfp8", "-o", record, "--date", "2026-11-30", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(record.read_bytes()) == document(home / "mxfp8")
    vocabulary, norms, converted = 2 * 151 * 256 * 2, 3 * 256 * 2, (196_608 + 393_216) // 2 * 33 // 32
    assert read_measurement_file(record).largest_bytes == vocabulary + norms + converted


def test_a_record_is_not_written_over_anything_else(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    write_records([record], b"one", force=False)
    write_records([record], b"one", force=False)
    with pytest.raises(TonnageError, match="something else is there already; --force writes over it"):
        write_records([record], b"two", force=False)
    assert record.read_bytes() == b"one"
    write_records([record], b"two", force=True)
    assert record.read_bytes() == b"two"
    for force in (False, True):
        with pytest.raises(TonnageError, match="not a file, and not written over"):
            write_records([tmp_path], b"two", force=force)


def test_the_table_names_what_differs(home: Path, tonnage: Tonnage) -> None:
    done = tonnage("measure", home / "mxfp8", home / "plain")
    assert done.returncode == 0, done.stderr
    row = next(
        line for line in done.stdout.splitlines() if line.startswith("plain ") and "F8_E4M3" in line and "mlp" in line
    )
    assert row.split() == ["plain", "0", "mlp", "F8_E4M3", "0", "196,608"]
    assert "mxfp8 of small (llama) · preparation · tp2 · convert mxfp8" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[2] == (
        "2 packages, they differ: ranks 0-1, attention, mlp; of each rank the largest of all packages is shown"
    )
    assert lines[3].startswith("rank  payload bytes")
    assert [line[:4] for line in lines[4:6]] == ["   0", "   1"]
    assert not any(line.endswith(" ") for line in lines)


def test_packages_that_are_identical_are_called_so(home: Path, tmp_path: Path, tonnage: Tonnage) -> None:
    shutil.copytree(home / "plain", tmp_path / "again")
    lines = tonnage("measure", home / "plain", tmp_path / "again").stdout.splitlines()
    assert lines[2] == "2 packages, identical: the same bytes per rank and class, shown once"


def test_a_missing_rank_is_one_line_and_exit_2(foreign: Path, tonnage: Tonnage) -> None:
    shutil.rmtree(foreign / RANK)
    done = tonnage("measure", foreign)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tonnage: foreign: rank 1 missing; expected 2 ranks (tp2 ep1 pp1); found 1\n"


def test_the_examples_of_measure_and_explain_run(home: Path, tmp_path: Path, tonnage: Tonnage) -> None:
    shutil.copytree(home / "plain", tmp_path / "prepared")
    plan = tonnage("plan", home / "small", "--tp", 2, "--json")
    (tmp_path / "plan.json").write_text(plan.stdout)
    for command in (measure, explain):
        example = (command.__doc__ or "").partition("Example: tonnage ")[2]
        done = tonnage(*shlex.split(example), cwd=tmp_path)
        assert done.returncode == 0, (example, done.stderr)
    assert "equal to what was measured, to the byte" in done.stdout
