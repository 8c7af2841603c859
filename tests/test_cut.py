"""What is cut into ranks, planned by every command as ``serve`` plans it; and what each command offers of a plan."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from packages import make_package
from samples import LLAMA, write_key
from tonnage.cli import app
from tonnage.plan_options import plan_request

SERVED = ("--profile", "c2-p512", "--context", "512")
AS_STORED = "cut for tp2 ep1 pp1 by the rules of vllm: bytes are as its ranks store them"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    """Two ranks of a small Llama in MXFP8, cut as vLLM cuts it; its source lies beside it."""
    folder = tmp_path_factory.mktemp("package") / "small"
    words = ("--tp", 2, "--engine", "vllm", "--convert", "mxfp8")
    return make_package(folder, keys[0], LLAMA, *words, scaled_down=False)


@pytest.fixture(scope="module")
def source(package: Path) -> Path:
    return package.with_name("small-checkpoint")


@pytest.fixture
def preparation(package: Path, tmp_path: Path, tonnage_here) -> Path:
    done = tonnage_here("prepare", package.with_name("small-checkpoint"), "--tp", 2, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def printed(tonnage, *words: object) -> dict:
    done = tonnage(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [(), ("--gpu", "h100", *SERVED)], ids=["weights", "served"])
def test_a_package_plans_to_the_ledger_of_its_source(tonnage_here, package: Path, source: Path, options):
    found = printed(tonnage_here, "plan", package, *options)
    asked = printed(tonnage_here, "plan", source, "--tp", 2, "--engine", "vllm", "--convert", "mxfp8", *options)
    assert found["topology"] == asked["topology"] == {"tp": 2, "ep": 1, "pp": 1, "dcp": 1}
    ledgers = [
        [
            [(line["component"], line["nbytes"], line["bound_nbytes"]) for line in rank["lines"]]
            for rank in plan["ranks"]
        ]
        for plan in (found, asked)
    ]
    assert ledgers[0] == ledgers[1]
    assert f"a package, {AS_STORED}" in found["notes"]


def test_inspect_counts_what_ranks_store_whole(tonnage_here, package: Path, source: Path):
    found, before = (printed(tonnage_here, "inspect", place) for place in (package, source))
    measured = printed(tonnage_here, "measure", package)
    assert found["tensors"] == before["tensors"] + 14  # a scale for each of seven projections in two layers
    assert found["payload_bytes"] < before["payload_bytes"]
    norms = 5 * 256 * 2  # whole on both ranks
    assert sum(rank["payload_bytes"] for rank in measured["ranks"]) - norms >= found["payload_bytes"]
    table = tonnage_here("inspect", package).stdout
    assert f"a package, {AS_STORED}" in table
    assert table.splitlines()[0].endswith(", from ranks put together")


def test_fit_and_flags_of_a_package_are_for_the_sizes_it_is_cut_for(tonnage_here, package: Path):
    ways = printed(tonnage_here, "fit", package, "--gpu", "h100", "--gpus", 8, *SERVED)["ways"]
    assert [(way["tp"], way["ep"]) for way in ways] == [(2, 1)]
    words = printed(tonnage_here, "flags", package, "--engine", "vllm", "--gpu", "h100", *SERVED)["words"]
    assert words[2] == str(package)
    for option, value in (("--tensor-parallel-size", "2"), ("--load-format", "tonnage")):
        assert words[words.index(option) + 1] == value


def test_a_preparation_is_planned_by_the_rules_it_is_cut_by(tonnage_here, preparation: Path):
    found = printed(tonnage_here, "plan", preparation)
    assert (
        "a prepared directory, cut for tp2 ep1 pp1 by the rules of split: bytes are as its ranks store them"
        in found["notes"]
    )
    refused = tonnage_here("plan", preparation, "--engine", "vllm")
    assert refused.returncode == 2
    assert "cut by the rules of another engine; expected prepare --engine vllm; found split" in refused.stderr


REFUSED = {
    "sizes": (
        ("plan", "--tp", 4, "--pp", 2),
        ("--tp: cut for another topology; expected tp2 ep1 pp1; found 4",
         "--pp: cut for another topology; expected tp2 ep1 pp1; found 2"),
    ),
    "conversion": (
        ("fit", "--gpu", "h100", "--convert", "mxfp8"),
        ("--convert: a package is planned as its ranks store it; expected prepare --convert of its source; found mxfp8",),
    ),
    "engine without a loader": (
        ("flags", "--engine", "sglang", "--gpu", "h100", *SERVED),
        ("small: cut by the rules of another engine; expected prepare --engine sglang; found vllm",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "lines"), REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_be_planned_as_is_refused(tonnage_here, package: Path, words, lines):
    done = tonnage_here(words[0], package, *words[1:])
    found = [line.removeprefix("tonnage: ") for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.replace(line.partition(":")[0], "small") if "rules" in line else line for line in found] == list(lines)


def test_a_refused_package_suggests_what_must_be_prepared_anew(tonnage_here, preparation: Path):
    done = tonnage_here("plan", preparation, "--supply", "1MiB")
    assert done.returncode == 3
    assert "(prepared anew)" in done.stdout


@pytest.mark.parametrize("supply", ["20GiB", "1MiB"])
def test_a_command_that_does_not_fit_comes_with_what_would(tonnage_here, configs: Path, supply: str):
    words = (configs / "Qwen__Qwen3-8B.json", "--engine", "vllm", "--supply", supply)
    words = (*words, "--profile", "c4-p4096", "--context", 32768)
    planned, done = (tonnage_here(command, *words) for command in ("plan", "flags"))
    way = planned.stdout.splitlines()[-1]
    assert way.startswith(("would fit with: ", "no single change that was tried fits"))
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (3, "", way)


def test_ranks_that_are_not_those_on_record_are_refused(tonnage_here, package: Path, tmp_path: Path):
    copy = Path(shutil.copytree(package, tmp_path / "copy"))
    plan = json.loads((copy / "plan.json").read_text())
    for line in plan["ranks"][1]["lines"]:
        if line["component"] == "weights.mlp":
            line["nbytes"] += 1
            line["bound_nbytes"] += 1
    (copy / "plan.json").write_text(json.dumps(plan))
    done = tonnage_here("plan", copy)
    assert done.returncode == 2
    assert "weights of rank 1 are not those of the plan on record" in done.stderr


@pytest.mark.parametrize("made", ["package", "preparation"])
def test_a_file_of_a_rank_that_is_not_as_it_was_written_is_refused(tonnage_here, request, tmp_path: Path, made: str):
    copy = Path(shutil.copytree(request.getfixturevalue(made), tmp_path / "copy"))
    names = [f"weights/tp2/rank-{rank}/model-00001-of-00001.safetensors" for rank in (0, 1)]
    (copy / names[0]).write_bytes((copy / names[0]).read_bytes()[:-1])
    (copy / names[1]).unlink()
    done = tonnage_here("plan", copy)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith(f"tonnage: {names[0]}: another size than on record; expected ")
    assert second.startswith(f"tonnage: {names[1]}: cannot be read; expected ")
    shutil.rmtree((copy / names[1]).parent)  # of another host
    assert names[1] not in tonnage_here("plan", copy).stderr


def test_a_package_without_its_signature_is_not_planned_as_its_config(tonnage_here, package: Path, tmp_path: Path):
    copy = Path(shutil.copytree(package, tmp_path / "copy"))
    (copy / "model.sig").unlink()
    done = tonnage_here("plan", copy)
    assert done.returncode == 2
    assert "a package without model.sig, cut into ranks" in done.stderr


def test_a_preparation_that_is_not_complete_is_refused(tonnage_here, preparation: Path):
    (preparation / "prepare.json").unlink()
    (preparation / ".prepare").mkdir()
    assert "preparation is not complete; expected prepare.json" in tonnage_here("plan", preparation).stderr


@pytest.mark.parametrize("made", ["package", "preparation"])
def test_without_its_weights_nothing_is_planned_as_its_config_unless_that_is_named(
    tonnage_here, request, tmp_path: Path, made: str
):
    copy = Path(shutil.copytree(request.getfixturevalue(made), tmp_path / "copy"))
    shutil.rmtree(copy / "weights")
    kind = "a package" if made == "package" else "a prepared directory"
    for words in (("plan", copy), ("inspect", copy), ("prepare", copy, "-o", tmp_path / "out")):
        done = tonnage_here(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"tonnage: {copy}: {kind} without its weights; expected its weights, prepared or "
        )
        assert done.stderr.count("\n") == 1
    assert tonnage_here("plan", copy / "config.json").returncode == 0
    if made == "preparation":
        (copy / "prepare.json").unlink()
        (copy / ".prepare").mkdir()
        assert "copy: an unfinished preparation without its weights; " in tonnage_here("plan", copy).stderr


OF_PACKAGES_MADE_ELSEWHERE = {"estimator", "credit_permille", "calibration", "device_bytes"}
"""Such a plan says nothing of what is served."""
NOT_OFFERED = {
    "plan": set(),
    "fit": OF_PACKAGES_MADE_ELSEWHERE,
    "flags": OF_PACKAGES_MADE_ELSEWHERE,
    "serve": OF_PACKAGES_MADE_ELSEWHERE | {"convert", "draft_bytes"},
}
"""What is started is served as it is stored, and with a draft that is there."""


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_every_option_that_changes_a_plan_is_offered_wherever_one_is_made(name: str):
    of_a_plan = set(inspect.signature(plan_request).parameters) - {"credit_record", "ranks"} | {"calibration"}
    offered = {parameter.name for parameter in get_command(app).commands[name].params}
    assert of_a_plan - offered == NOT_OFFERED[name]


DENSE = "tests/data/configs/Qwen__Qwen3-8B.json"
ONLY_CONVERTED = ("--gpu", "rtx-5080", "--profile", "c1-p1024", "--context", "1024", "--engine", "vllm", "--eager")


def test_a_plan_that_fits_only_converted_has_a_command_for_what_is_converted(tonnage_here):
    assert tonnage_here("flags", DENSE, *ONLY_CONVERTED).returncode == 3
    done = tonnage_here("flags", DENSE, *ONLY_CONVERTED, "--convert", "mxfp8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm serve Qwen__Qwen3-8B-mxfp8 ")
    prepared = "tonnage prepare Qwen__Qwen3-8B --layout hf --convert mxfp8 -o Qwen__Qwen3-8B-mxfp8"
    assert f"Qwen__Qwen3-8B-mxfp8 stands in for what `{prepared}` writes; --model says where it is" in done.stderr
    named = tonnage_here("flags", DENSE, *ONLY_CONVERTED, "--convert", "mxfp8", "--model", "/models/qwen")
    assert named.stdout.startswith("vllm serve /models/qwen ")
    assert "stands in" not in named.stderr


def test_a_command_that_prepares_for_sglang_states_the_conversion_as_sglang_reads_it(tonnage_here):
    words = ("--engine", "sglang", "--gpu", "h100", *SERVED, "--convert", "mxfp8-experts", "--model", "m")
    assert tonnage_here("flags", DENSE, *words).returncode == 0
    notes = tonnage_here("flags", DENSE, *words[:-2]).stderr
    assert "--layout hf --convert mxfp8-experts --quant-style mxfp8 -o Qwen__Qwen3-8B-mxfp8-experts" in notes


def test_a_command_starts_vllm_with_the_share_that_was_planned(tonnage_here):
    words = ("flags", DENSE, "--engine", "vllm", "--gpu", "h100", *SERVED, "--utilization", "0.5", "--model", "m")
    found = printed(tonnage_here, *words)["words"]
    assert found[found.index("--gpu-memory-utilization") + 1] == "0.5"
    whole = printed(tonnage_here, *words[:-4], "--model", "m")["words"]
    given = [int(one[one.index("--kv-cache-memory-bytes") + 1]) for one in (found, whole)]
    assert given[0] < given[1] - 30 * 2**30


def test_memory_of_a_draft_that_is_not_named_is_left_and_said(tonnage_here):
    words = ("flags", DENSE, "--engine", "vllm", "--gpu", "h100", *SERVED, "--model", "m")
    plain, left = printed(tonnage_here, *words), printed(tonnage_here, *words, "--draft-bytes", "1GiB")
    given = [int(one["words"][one["words"].index("--kv-cache-memory-bytes") + 1]) for one in (plain, left)]
    assert given[0] - given[1] >= 2**30
    assert "1,073,741,824 bytes are left for a draft, which the command does not name; --draft does" in left["notes"]
    assert "--speculative-config" not in left["words"]
