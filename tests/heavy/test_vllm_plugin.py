"""Engines that read packages rank by rank hold and say what they do with the checkpoint the packages were made of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import small_models
from gemma270m import write_gemma
from smollm2 import Weights

import tonnage
from packages import call_scales, run
from samples import write_key

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
SMOLLM2_BYTES = {"bf16": 269_030_016, "mxfp8": 166_179_456, "bf16 tp3": 89_723_520, "mxfp8 tp3": 55_440_000}
CACHE_SCALES = {"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point"}
"""What vLLM adds to every attention layer of a quantised model: scalars, which no checkpoint here has."""
TP2 = {"tensor_parallel_size": 2}
EP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}

Answers = Mapping[str, Any]


class Shelf:
    """Checkpoints and what is prepared of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.private, self.public = write_key(folder)
        self.smollm2 = folder / "smollm2"
        self.smollm2.mkdir()
        Weights().write_checkpoint(self.smollm2)

    def model(self, name: str, config: dict[str, Any], storage: Any = "config") -> Path:
        folder = self.folder / name
        return folder if folder.exists() else small_models.write_model(config, folder, storage)

    def gemma(self) -> Path:
        folder = self.folder / "gemma270m"
        return folder if folder.exists() else write_gemma(folder)

    def prepared(self, source: Path, *words: object) -> Path:
        name = "-".join([source.name, *(str(word).strip("-") for word in words)])
        folder = self.folder / name
        if not folder.exists():
            run("prepare", source, "-o", folder, "--workers", 1, "--engine", "vllm", *words)
        return folder

    def standard(self, source: Path, *words: object) -> Path:
        """Return a standard checkpoint: of no engine, whatever the option says."""
        return self.prepared(source, "--layout", "hf", *words)

    def package(self, source: Path, *words: object) -> Path:
        folder = self.prepared(source, *words)
        if not (folder / "model.sig").exists():
            run("export", folder, "--key", self.private, "--date", "2026-01-31")
        return folder

    def copy(self, source: Path, name: str) -> Path:
        return Path(shutil.copytree(source, self.folder / name))

    @property
    def trusted(self) -> dict[str, Any]:
        return {"model_loader_extra_config": {"public_key": str(self.public)}}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


def ask(script: str, output: Path, jobs: Mapping[str, Any]) -> tuple[Answers, str]:
    """Let one process do all jobs; return answers by name, and what was logged."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "stubs"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # reports are asked for with a function
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    words = [sys.executable, HERE / script, output, *map(json.dumps, jobs.values())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-8000:]
    return dict(zip(jobs, json.loads(output.read_text()), strict=True)), done.stdout + done.stderr


# --- whole engines ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(shelf: Shelf) -> tuple[Answers, str]:
    gemma = shelf.model("gemma3", small_models.GEMMA3)
    experts = shelf.model("qwen3-moe", small_models.QWEN3_MOE)
    latent = shelf.model("deepseek-v3", small_models.DEEPSEEK_V3)
    coded = shelf.model("mxfp8-moe", small_models.QWEN3_MOE, "mxfp8")
    jobs = {
        "smollm2": {"model": shelf.smollm2},
        "smollm2 package": {"model": shelf.package(shelf.smollm2, "--tp", 1), **shelf.trusted, **FORMAT},
        "mxfp8 hf": {"model": shelf.standard(shelf.smollm2, "--convert", "mxfp8")},
        "mxfp8 package": {"model": shelf.package(shelf.smollm2, "--tp", 1, "--convert", "mxfp8"), **FORMAT},
        "experts mxfp8 hf": {"model": shelf.standard(experts, "--convert", "mxfp8")},
        "experts mxfp8 modelopt": {"model": shelf.standard(experts, "--convert", "mxfp8", "--quant-style", "modelopt")},
        "mxfp8 modelopt": {"model": shelf.standard(shelf.smollm2, "--convert", "mxfp8", "--quant-style", "modelopt")},
        "gemma-270m tp2": {"model": shelf.gemma(), **TP2},
        "gemma-270m tp2 package": {"model": shelf.package(shelf.gemma(), "--tp", 2), **TP2, **FORMAT},
        "gemma tp2": {"model": gemma, **TP2},
        "gemma tp2 package": {"model": shelf.prepared(gemma, "--tp", 2), **TP2, **FORMAT},
        "experts tp2": {"model": experts, **TP2},
        "experts tp2 package": {"model": shelf.prepared(experts, "--tp", 2), **TP2, **FORMAT},
        "experts ep2": {"model": experts, **EP2},
        "experts ep2 package": {"model": shelf.prepared(experts, "--tp", 2, "--ep", 2), **EP2, **FORMAT},
        "latent tp2": {"model": latent, **TP2},
        "latent tp2 package": {"model": shelf.package(latent, "--tp", 2), **TP2, **FORMAT, **shelf.trusted},
        "mxfp8 experts": {"model": small_models.decoded(coded, shelf.folder / "mxfp8-moe-decoded")},
        "mxfp8 experts package": {"model": shelf.prepared(coded, "--tp", 1), **FORMAT},
        "converted experts hf": {"model": shelf.standard(experts, "--convert", "mxfp8-experts")},
        "converted experts package": {
            "model": shelf.package(experts, "--tp", 1, "--convert", "mxfp8-experts"),
            **FORMAT,
        },
    }
    asked = {name: {**job, "model": str(job["model"])} for name, job in jobs.items()}
    return ask("engines.py", shelf.folder / "engines.json", asked)


FORMAT = {"load_format": "tonnage"}
PAIRS = {
    "smollm2 package": "smollm2",
    "mxfp8 package": "mxfp8 hf",
    "gemma-270m tp2 package": "gemma-270m tp2",
    "gemma tp2 package": "gemma tp2",
    "experts tp2 package": "experts tp2",
    "experts ep2 package": "experts ep2",
    "latent tp2 package": "latent tp2",
    "mxfp8 experts package": "mxfp8 experts",
    "converted experts package": "converted experts hf",
}


@pytest.mark.parametrize(("package", "default"), PAIRS.items(), ids=list(PAIRS))
def test_tokens_of_a_package_are_those_of_default_loading(engines: tuple[Answers, str], package: str, default: str):
    found, expected = (engines[0][name] for name in (package, default))

    assert "refused" not in found, found
    assert found["tokens"] == expected["tokens"]
    assert [len(tokens) for tokens in expected["tokens"]] == [32] * 8
    assert len({tuple(tokens) for tokens in expected["tokens"]}) == 8
    assert sum(len(set(tokens)) for tokens in expected["tokens"]) > 8 * 4  # a broken model says one thing


@pytest.mark.parametrize("package", PAIRS)
def test_a_worker_reads_the_planned_bytes_of_its_rank_alone(engines: tuple[Answers, str], package: str):
    reports = engines[0][package]["reports"]

    assert len(reports) == (2 if "p2" in package else 1)
    assert [Path(report["directory"]).name for report in reports] == [f"rank-{rank}" for rank in range(len(reports))]
    for report in reports:
        assert report["read_bytes"] == report["planned_bytes"] == report["held_bytes"] - sum(report["extra"].values())
        assert report["verified"] == (package in {"smollm2 package", "latent tp2 package"})


def test_bytes_of_smollm2_are_the_known_numbers(engines: tuple[Answers, str]):
    for package, kind in (("smollm2 package", "bf16"), ("mxfp8 package", "mxfp8")):
        (report,) = engines[0][package]["reports"]
        assert report["read_bytes"] == SMOLLM2_BYTES[kind]


def test_experts_spread_whole_say_what_cut_experts_say(engines: tuple[Answers, str]):
    """Sums are made in another order, so that it may differ late; an expert in a wrong place differs at once."""
    answers, _ = engines
    pairs = zip(answers["experts ep2"]["tokens"], answers["experts tp2"]["tokens"], strict=True)
    assert sum(found[:4] == expected[:4] for found, expected in pairs) >= 6


@pytest.mark.parametrize("of", ["mxfp8", "experts mxfp8"])
def test_the_form_of_modelopt_says_what_that_of_compressed_tensors_says(engines: tuple[Answers, str], of: str):
    """Output heads, routers and experts stay as they are in both."""
    found, expected = (engines[0][f"{of} {form}"] for form in ("modelopt", "hf"))
    assert "refused" not in found, found
    assert found["tokens"] == expected["tokens"]


def test_conversion_keeps_most_answers(engines: tuple[Answers, str]):
    answers, _ = engines
    first = [(a[0], b[0]) for a, b in zip(answers["mxfp8 hf"]["tokens"], answers["smollm2"]["tokens"], strict=True)]
    assert sum(a == b for a, b in first) >= 6


def test_emulation_is_logged_as_emulation(engines: tuple[Answers, str]):
    _, log = engines
    for what in ("linear layers", "experts"):
        assert f"EMULATION of MXFP8 {what} on this CPU" in log
    assert f"read {SMOLLM2_BYTES['mxfp8']} bytes in 482 tensors, planned {SMOLLM2_BYTES['mxfp8']}" in log


# --- what every rank holds --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contents(shelf: Shelf) -> Answers:
    sources = {
        "smollm2": shelf.smollm2,
        "gemma": shelf.model("gemma3", small_models.GEMMA3),
        "biases": shelf.model("qwen2", small_models.QWEN2),
        "few words": shelf.model("few-words", small_models.FEW_WORDS),
        "experts": shelf.model("qwen3-moe", small_models.QWEN3_MOE),
        "latent": shelf.model("deepseek-v3", small_models.DEEPSEEK_V3),
        "gemma-270m": shelf.gemma(),
        "float32": shelf.model("float32", small_models.FLOAT32),
        "glm": shelf.model("glm4-moe", small_models.GLM4_MOE),
        "fp8": shelf.model("fp8", small_models.FP8_CHANNEL),
        "int4": shelf.model("int4", small_models.INT4_GROUP),
        "mxfp8 experts": shelf.model("mxfp8-moe", small_models.QWEN3_MOE, "mxfp8"),
    }
    jobs = {}
    for name, (source, topology, convert) in CONTENTS.items():
        words = [word for size, value in topology.items() for word in (f"--{size}", 2 if size == "ep" else value)]
        words += ["--convert", convert] if convert else []
        package = shelf.prepared(sources[source], *words)
        checkpoint = shelf.standard(sources[source], "--convert", convert) if convert else sources[source]
        jobs[name] = {"package": str(package), "checkpoint": str(checkpoint), "topology": topology}
    jobs["smollm2 tp1"]["times"] = 5
    jobs |= refused_jobs(shelf)
    answers, _ = ask("rank_contents.py", shelf.folder / "contents.json", jobs)
    return answers


CONTENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "smollm2 tp1": ("smollm2", {"tp": 1}, ""),
    "smollm2 tp3": ("smollm2", {"tp": 3}, ""),
    "smollm2 mxfp8 tp1": ("smollm2", {"tp": 1}, "mxfp8"),
    "smollm2 mxfp8 tp3": ("smollm2", {"tp": 3}, "mxfp8"),
    "gemma-270m": ("gemma-270m", {"tp": 2}, ""),
    "one kv head, tp4": ("gemma", {"tp": 4}, ""),
    "one kv head, mxfp8": ("gemma", {"tp": 2}, "mxfp8"),
    "biases, two ranks per kv head": ("biases", {"tp": 4}, ""),
    "padding alone on the last rank": ("few words", {"tp": 4}, ""),
    "biases, two stages": ("biases", {"tp": 2, "pp": 2}, ""),
    "experts mxfp8 tp2": ("experts", {"tp": 2}, "mxfp8"),
    "experts mxfp8 ep2": ("experts", {"tp": 2, "ep": True}, "mxfp8"),
    "experts converted, tp2": ("experts", {"tp": 2}, "mxfp8-experts"),
    "experts converted, ep2": ("experts", {"tp": 2, "ep": True}, "mxfp8-experts"),
    "latent ep2": ("latent", {"tp": 2, "ep": True}, ""),
    "latent mxfp8": ("latent", {"tp": 2}, "mxfp8"),
    "float32 held in bfloat16": ("float32", {"tp": 2}, ""),
    "routers held in float32": ("glm", {"tp": 2}, ""),
    "routers held in float32, ep2": ("glm", {"tp": 2, "ep": True}, ""),
    "fp8 per channel": ("fp8", {"tp": 2}, ""),
    "int4 in groups": ("int4", {"tp": 2}, ""),
    "experts that are mxfp8, tp2": ("mxfp8 experts", {"tp": 2}, ""),
    "experts that are mxfp8, ep2": ("mxfp8 experts", {"tp": 2, "ep": True}, ""),
}
"""Source, topology, and how it is converted, if it is; then vLLM loads the converted checkpoint in layout hf."""


@pytest.mark.parametrize("name", CONTENTS)
def test_every_parameter_of_every_rank_is_the_one_of_default_loading(contents: Answers, name: str):
    topology = CONTENTS[name][1]
    ranks = contents[name]

    assert len(ranks) == topology["tp"] * topology.get("pp", 1)
    assert [rank["different"] for rank in ranks] == [[] for _ in ranks]
    for number, rank in enumerate(ranks):
        report = rank["report"]
        assert report["read_bytes"] == report["planned_bytes"]
        assert {parameter.rpartition(".")[2] for parameter in report["extra"]} <= CACHE_SCALES
        assert held_as_planned(Path(report["directory"]), number) == report["held_bytes"] - sum(
            report["extra"].values()
        )
        if CONTENTS[name][0] not in CONVERTED_WHILE_LOADING:
            assert report["read_bytes"] == report["held_bytes"] - sum(report["extra"].values())


CONVERTED_WHILE_LOADING = {"fp8", "int4", "float32", "glm"}
"""Read as stored, and held in another dtype or once for a fused module."""


def held_as_planned(rank_directory: Path, rank: int) -> int:
    """Return what the plan of a preparation or package says a rank holds of its files."""
    root = rank_directory.parents[2]
    package = root / "plan.json"
    plan = json.loads(package.read_text() if package.exists() else (root / "prepare.json").read_text())
    planned = plan.get("plan", plan)["ranks"][rank]
    added = sum(line["nbytes"] for line in planned["lines"] if line["component"].startswith("engine."))
    return planned["weights_bytes"] - added


@pytest.mark.parametrize(("name", "kind"), [("smollm2 tp3", "bf16 tp3"), ("smollm2 mxfp8 tp3", "mxfp8 tp3")])
def test_bytes_of_a_third_are_the_known_numbers(contents: Answers, name: str, kind: str):
    assert [rank["report"]["read_bytes"] for rank in contents[name]] == [SMOLLM2_BYTES[kind]] * 3


def test_seconds_to_load_are_printed(contents: Answers, record_property: Callable[[str, object], None]):
    for name in ("smollm2 tp1", "smollm2 tp3", "smollm2 mxfp8 tp3"):
        ours, theirs = (min(rank["seconds"][side] for rank in contents[name]) for side in (0, 1))
        record_property("figures", f"{name}: plug-in {ours:.3f} s, default {theirs:.3f} s")
        assert min(ours, theirs) > 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused_jobs(shelf: Shelf) -> dict[str, Any]:
    """Return one job for every package nobody should load."""
    llama, moe = shelf.model("qwen2", small_models.QWEN2), shelf.model("qwen3-moe", small_models.QWEN3_MOE)
    package = shelf.package(llama, "--tp", 2)
    coded = shelf.prepared(shelf.model("mxfp8-moe", small_models.QWEN3_MOE, "mxfp8"), "--tp", 2)
    rank = "weights/tp2/rank-1"

    without_rank = shelf.copy(package, "without-rank")
    shutil.rmtree(without_rank / rank)

    without_file = shelf.copy(package, "without-file")
    next((without_file / rank).glob("*.safetensors")).unlink()

    tampered = shelf.copy(package, "tampered")
    weights = next((tampered / rank).glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)

    unsigned = shelf.copy(package, "unsigned")
    (unsigned / "model.sig").unlink()

    interrupted = shelf.copy(shelf.prepared(llama, "--tp", 2, "--hash", "sha256"), "interrupted")
    (interrupted / "prepare.json").unlink()

    tp2, stranger = {"topology": {"tp": 2}}, write_key(shelf.folder, "stranger")[1]
    trusting = {"model_loader_extra_config": {"public_key": str(stranger)}}
    jobs = {
        "as it should be": {"package": package, **tp2, "options": shelf.trusted},
        "wrong tp": {"package": package, "topology": {"tp": 4}},
        "wrong ep": {"package": shelf.prepared(moe, "--tp", 2), "topology": {"tp": 2, "ep": True}},
        "missing rank": {"package": without_rank, **tp2},
        "missing file": {"package": without_file, **tp2},
        "tampered": {"package": tampered, **tp2, "options": shelf.trusted},
        "unsigned": {"package": unsigned, **tp2, "options": shelf.trusted},
        "another key": {"package": package, **tp2, "options": trusting},
        "interrupted": {"package": interrupted, **tp2},
        "layout hf": {"package": shelf.standard(llama), **tp2},
        "value scales": {"package": value_scales(coded, shelf.folder / "value-scales"), **tp2},
        "unknown option": {"package": package, **tp2, "options": {"model_loader_extra_config": {"key": "a"}}},
    }
    return {name: {**job, "package": str(job["package"])} for name, job in jobs.items()}


def value_scales(source: Path, foreign: Path) -> Path:
    """Copy what is MXFP8, with its scales in the dtype named after what they are, and not the one that is read.

    As another program may have prepared it: what is on record of the files is true.
    """
    shutil.copytree(source, foreign)
    sizes = {}
    for file in foreign.rglob("*.safetensors"):
        call_scales(file)
        sizes[file.relative_to(foreign).as_posix()] = file.stat().st_size
    if (record := foreign / "prepare.json").exists():
        summary = json.loads(record.read_text())
        for written in (written for rank in summary["ranks"] for written in rank["files"]):
            written["file_bytes"] = sizes.get(written["path"], written["file_bytes"])
        record.write_text(json.dumps(summary))
    return foreign


REFUSED = {
    "wrong tp": "cut for another topology; expected weights/tp4; found tp2",
    "wrong ep": "cut for another topology; expected weights/tp2-ep2; found tp2",
    "missing rank": "rank is missing; expected weights/tp2/rank-1; found rank-0",
    "missing file": "model-00001-of-00001.safetensors: file is missing",
    "tampered": "weights/tp2/rank-1/model-00001-of-00001.safetensors: ",
    "unsigned": "model.sig",
    "another key": "model.sig",
    "interrupted": "preparation is not complete",
    "layout hf": "holds no weights by rank",
    "value scales": "q_proj.weight_scale: scale of MXFP8 that engines convert by value, without an error; expected U8",
    "unknown option": "model_loader_extra_config: no such option; expected public_key; found key",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_before_a_model_is_allocated(contents: Answers, name: str):
    assert REFUSED[name] in contents[name]["refused"]
    assert contents[name]["allocated"] is False


def test_what_is_not_refused_is_allocated(contents: Answers):
    """The refusals above are of packages that differ from this one in one thing each."""
    assert contents["as it should be"] == {"refused": "allocated", "allocated": True}


def test_scales_that_are_read_by_value_are_noted_and_never_made_a_package_of(shelf: Shelf):
    """Of one that is signed all the same, ``verify`` says so: tests/test_verify.py."""
    foreign = value_scales(shelf.model("mxfp8-moe", small_models.QWEN3_MOE, "mxfp8"), shelf.folder / "foreign")
    assert "scales stored as F8_E8M0, which engines convert by value" in command("inspect", foreign).stdout

    said = "q_proj.weight_scale: scale of MXFP8 that engines convert by value, without an error; expected U8"
    for words in (
        ("prepare", foreign, "--tp", 2, "-o", shelf.folder / "none"),
        ("export", shelf.folder / "value-scales", "--key", shelf.private),
    ):
        refused = command(*words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr


def test_scales_are_written_as_bytes(shelf: Shelf):
    package = shelf.prepared(shelf.smollm2, "--tp", 3, "--convert", "mxfp8")
    for rank in range(3):
        dtypes = {tensor.dtype for name, tensor in tonnage.open_rank(package, rank).tensors.items() if "_scale" in name}
        assert dtypes == {"U8"}


def command(*words: object) -> subprocess.CompletedProcess[str]:
    tonnage_command = Path(sys.executable).with_name("tonnage")
    return subprocess.run([tonnage_command, *map(str, words)], capture_output=True, text=True, check=False)
