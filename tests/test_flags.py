"""The command that serves a plan."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import FlagsError, UnknownFormatError
from tonnage.flags.command import serve_command
from tonnage.flags.tabbyapi import cache_mode
from tonnage.flags.values import DraftPlan, ServePlan, parse_version
from tonnage.topology import Topology

VLLM = ServePlan(
    engine="vllm",
    model="org/model",
    topology=Topology(tp=8),
    context_tokens=131_072,
    concurrency=4,
    prefill_chunk_tokens=3072,
)
SGLANG = replace(VLLM, engine="sglang", kv_tokens=600_000, fraction=Fraction("0.85"))
TABBY = replace(
    VLLM, engine="exllamav3", topology=Topology(), model="/srv/models/exl3", kv_tokens=524_288, kv_dtype="int8"
)

# Flags as the engines document them, each with the number of words it takes. vLLM: docs.vllm.ai, "vllm serve" of 0.32.
# SGLang: docs.sglang.io, "Server Arguments" of 0.5.23, long forms. The last of SGLang ended with 0.5.10.
DOCUMENTED = {
    "vllm": {
        "--tensor-parallel-size": 1, "--pipeline-parallel-size": 1, "--enable-expert-parallel": 0,
        "--decode-context-parallel-size": 1, "--max-model-len": 1, "--max-num-seqs": 1, "--max-num-batched-tokens": 1,
        "--kv-cache-dtype": 1, "--gpu-memory-utilization": 1, "--kv-cache-memory-bytes": 1,
        "--block-size": 1, "--quantization": 1, "--enforce-eager": 0,
        "--speculative-config": 1,
    },
    "sglang": {
        "--model-path": 1, "--tp-size": 1, "--pp-size": 1, "--ep-size": 1, "--dcp-size": 1, "--context-length": 1,
        "--max-running-requests": 1, "--chunked-prefill-size": 1, "--max-prefill-tokens": 1, "--kv-cache-dtype": 1,
        "--mem-fraction-static": 1, "--max-total-tokens": 1, "--max-mamba-cache-size": 1, "--page-size": 1, "--quantization": 1,
        "--cuda-graph-backend-decode": 1, "--cuda-graph-backend-prefill": 1,
        "--speculative-algorithm": 1, "--speculative-draft-model-path": 1, "--speculative-num-steps": 1,
        "--speculative-eagle-topk": 1, "--speculative-num-draft-tokens": 1,
        "--disable-cuda-graph": 0,
    },
}  # fmt: skip
# theroyallab/tabbyAPI, common/config_models.py.
TABBY_KEYS = {
    "model": {
        "model_dir", "model_name", "backend", "max_seq_len", "cache_size", "cache_mode", "tensor_parallel",
        "gpu_split_auto", "chunk_size", "max_batch_size",
    },
    "draft_model": {"draft_mode", "draft_model_dir", "draft_model_name", "draft_num_tokens"},
}  # fmt: skip
PROGRAM = {"vllm": 3, "sglang": 3}  # words before the first flag


def flags_of(serve: ServePlan) -> dict[str, str | None]:
    """The flags of a command with their values; unknown flags and stray words fail."""
    words = serve_command(serve).words[PROGRAM[serve.engine] :]
    found: dict[str, str | None] = {}
    while words:
        flag, *words = words
        assert flag not in found
        found[flag] = words.pop(0) if DOCUMENTED[serve.engine][flag] else None
    return found


def lines_of(serve: ServePlan) -> dict[str, dict[str, object]]:
    """The sections of config.yml, whose values are JSON."""
    (file,) = serve_command(serve).files
    sections: dict[str, dict[str, object]] = {}
    for line in file.lines:
        key, _, value = line.partition(":")
        if not line.startswith(" "):
            section = sections[key] = {}
            continue
        assert key.strip() in TABBY_KEYS[next(reversed(sections))]
        section[key.strip()] = json.loads(value)
    return sections


def problems(serve: ServePlan) -> list[str]:
    with pytest.raises(FlagsError) as caught:
        serve_command(serve)
    return str(caught.value).splitlines()


def test_vllm_command_word_by_word() -> None:
    serve = replace(VLLM, kv_dtype="fp8", fraction=Fraction("0.95"), kv_bytes=20 << 30)
    assert serve_command(serve).words == (
        "vllm", "serve", "org/model", "--tensor-parallel-size", "8", "--max-model-len", "131072", "--max-num-seqs", "4",
        "--max-num-batched-tokens", "3072", "--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.95",
        "--kv-cache-memory-bytes", "21474836480",
    )  # fmt: skip


def test_sglang_command_word_by_word() -> None:
    assert serve_command(SGLANG).words == (
        "python", "-m", "sglang.launch_server", "--model-path", "org/model", "--tp-size", "8", "--context-length",
        "131072", "--max-running-requests", "4", "--chunked-prefill-size", "3072", "--kv-cache-dtype", "auto",
        "--mem-fraction-static", "0.85", "--max-total-tokens", "600000",
    )  # fmt: skip


def test_tabbyapi_command_and_config_line_by_line() -> None:
    serve = replace(TABBY, draft=DraftPlan(method="draft-model", tokens=5, model="drafts/small"))
    command = serve_command(serve)
    assert command.words == ("python", "main.py", "--config", "config.yml")
    assert [(file.name, file.lines) for file in command.files] == [
        (
            "config.yml",
            (
                "model:",
                '  model_dir: "/srv/models"',
                '  model_name: "exl3"',
                '  backend: "exllamav3"',
                "  max_seq_len: 131072",
                "  cache_size: 524288",
                '  cache_mode: "8,8"',
                "  chunk_size: 3072",
                "  max_batch_size: 4",
                "draft_model:",
                '  draft_mode: "model"',
                '  draft_model_dir: "drafts"',
                '  draft_model_name: "small"',
                "  draft_num_tokens: 5",
            ),
        )
    ]


TOPOLOGIES = {
    "vllm": ("--pipeline-parallel-size", "2", "--enable-expert-parallel", None, "--decode-context-parallel-size", "4"),
    "sglang": ("--pp-size", "2", "--ep-size", "8", "--dcp-size", "4"),
}


@pytest.mark.parametrize("serve", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_parallel_sizes_of_one_are_not_written(serve: ServePlan) -> None:
    plain = flags_of(serve)
    spread = flags_of(replace(serve, topology=Topology(tp=8, ep=8, pp=2, dcp=4)))
    row = TOPOLOGIES[serve.engine]
    added = dict(zip(row[::2], row[1::2], strict=True))
    assert spread == plain | added
    assert not added.keys() & plain.keys()


def test_tabbyapi_cuts_tensors_or_layers() -> None:
    assert lines_of(replace(TABBY, topology=Topology(tp=2)))["model"]["tensor_parallel"] is True
    assert lines_of(replace(TABBY, topology=Topology(pp=3)))["model"]["gpu_split_auto"] is True
    assert problems(replace(TABBY, topology=Topology(tp=2, pp=2))) == [
        "topology: exllamav3 cuts tensors or layers; expected tp or pp alone; found tp 2, ep 1, pp 2, dcp 1",
    ]


GPU = {"total_bytes": 101_974_016_000, "free_bytes": 96_000_000_000}  # 0.94141... free


def test_utilization_is_what_is_free_at_most_and_says_so() -> None:
    lowered = replace(VLLM, fraction=Fraction("0.95"), **GPU)
    assert flags_of(lowered)["--gpu-memory-utilization"] == "0.9414"
    assert serve_command(lowered).notes == ("utilization lowered to 0.9414: no more is free",)
    assert flags_of(replace(VLLM, **GPU))["--gpu-memory-utilization"] == "0.92"
    assert serve_command(replace(VLLM, **GPU)).notes == ()


def test_utilization_stays_legal_beside_the_byte_flag() -> None:
    flags = flags_of(replace(VLLM, kv_bytes=1 << 30, fraction=Fraction(1), **GPU))
    assert (flags["--kv-cache-memory-bytes"], flags["--gpu-memory-utilization"]) == ("1073741824", "0.9414")


@given(total=st.integers(1 << 20, 1 << 40), free=st.integers(1, 1000), wanted=st.integers(1, 10_000))
def test_utilization_never_asks_for_more_than_wanted_or_free(total: int, free: int, wanted: int) -> None:
    free_bytes, fraction = max(total * free // 1000, total // 1000), Fraction(wanted, 10_000)
    serve = replace(VLLM, total_bytes=total, free_bytes=free_bytes, fraction=fraction)
    passed = Fraction(flags_of(serve)["--gpu-memory-utilization"])
    assert 0 < passed <= fraction
    assert total * passed <= free_bytes
    assert passed == fraction or total * (passed + Fraction(1, 10_000)) > free_bytes


def test_a_step_is_no_more_than_all_requests_hold() -> None:
    serve = replace(VLLM, context_tokens=512, concurrency=2, prefill_chunk_tokens=8192)
    assert flags_of(serve)["--max-num-batched-tokens"] == "1024"
    assert serve_command(serve).notes == ("prefill step lowered to 1024: all requests together hold no more",)


def test_vllm_refuses_steps_smaller_than_the_number_of_sequences() -> None:
    assert problems(replace(VLLM, concurrency=4096)) == [
        "prefill chunk: vLLM refuses steps of fewer tokens than sequences; expected at least 4096; found 3072"
    ]


KV_WORDS = {
    "vllm": {"auto": "auto", "bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8_per_token_head",
             "int4": "int4_per_token_head", "fp8_ds_mla": "fp8_ds_mla"},
    "sglang": {"auto": "auto", "bf16": "bfloat16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4", "mxfp8": "mxfp8"},
    "exllamav3": {"auto": "FP16", "bf16": "FP16", "int8": "8,8", "int4": "4,4", "Q6": "6,6", "5,3": "5,3"},
}  # fmt: skip


@pytest.mark.parametrize("serve", [VLLM, SGLANG, TABBY], ids=["vllm", "sglang", "tabbyapi"])
def test_a_precision_is_written_in_the_words_of_the_engine(serve: ServePlan) -> None:
    for precision, word in KV_WORDS[serve.engine].items():
        asked = replace(serve, kv_dtype=precision)
        if serve.engine == "exllamav3":
            assert lines_of(asked)["model"]["cache_mode"] == word
        else:
            assert flags_of(asked)["--kv-cache-dtype"] == word
    for unknown in ("fp6", "", "9,9", "int8 " + "x" * 9999):
        (line,) = problems(replace(serve, kv_dtype=unknown))
        assert "dtype" in line.lower()
        assert len(line) <= 400


def test_precisions_an_engine_does_not_have_are_refused_by_name() -> None:
    assert problems(replace(SGLANG, kv_dtype="int8"))[0].endswith("found int8")
    assert problems(replace(TABBY, kv_dtype="fp8"))[0].endswith("found fp8")
    for word in ("1,4", "8,9", "88", "4;4"):
        with pytest.raises(UnknownFormatError):
            cache_mode(word)


METHODS = {
    # method: vLLM's method, SGLang's algorithm with steps and verified tokens, TabbyAPI's mode, for 3 tokens
    "eagle": ("eagle", ("EAGLE", "3", "4"), None),
    "eagle3": ("eagle3", ("EAGLE3", "3", "4"), None),
    "mtp": ("mtp", ("NEXTN", "3", "4"), "mtp"),
    "dflash": ("dflash", ("DFLASH", None, "4"), "model"),
    "dflash2": ("dflash", ("DFLASH", None, "4"), "model"),
    "dspark": ("dspark", ("DSPARK", None, "4"), None),
    "draft-model": ("draft_model", ("STANDALONE", "3", "4"), "model"),
    "ngram": ("ngram", ("NGRAM", None, "4"), "ngram"),
    "suffix": ("suffix", None, None),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_is_written_in_the_words_of_the_engine(method: str) -> None:
    vllm, sglang, tabby = METHODS[method]
    model = None if method in ("mtp", "ngram", "suffix") else "drafts/d"
    draft = DraftPlan(method=method, tokens=3, model=model)
    config = json.loads(flags_of(replace(VLLM, draft=draft))["--speculative-config"])
    assert config == {"method": vllm, "num_speculative_tokens": 3} | ({"model": model} if model else {})
    if sglang is None:
        assert problems(replace(SGLANG, draft=draft))[0].startswith("draft method: unknown to the engine")
    else:
        flags = flags_of(replace(SGLANG, draft=draft))
        words = ("--speculative-algorithm", "--speculative-num-steps", "--speculative-num-draft-tokens")
        assert tuple(flags.get(word) for word in words) == sglang
        assert flags.get("--speculative-draft-model-path") == model
        assert flags.get("--speculative-eagle-topk") == ("1" if sglang[1] else None)
    if tabby is None:
        assert problems(replace(TABBY, draft=draft))[0].startswith("draft method: unknown to the engine")
    else:
        assert lines_of(replace(TABBY, draft=draft))["draft_model"]["draft_mode"] == tabby


def test_drafts_and_their_checkpoints_belong_together() -> None:
    assert problems(replace(VLLM, draft=DraftPlan(method="mtp", tokens=1, model="d"))) == [
        "draft model: mtp reads none; found d"
    ]
    assert problems(replace(SGLANG, draft=DraftPlan(method="eagle3", tokens=0))) == [
        f"draft tokens: out of range; expected 1..{1 << 40}; found 0",
        "draft model: eagle3 needs one",
    ]


PHASES = {"--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled"}
EAGER = {
    "vllm": (None, {"--enforce-eager": None}), "0.5.23": ("0.5.23", PHASES), "0.5.14": ("0.5.14.post1", PHASES),
    "0.5.10": ("v0.5.10", {"--disable-cuda-graph": None}), "0.5.9": ("0.5.9", {"--disable-cuda-graph": None}),
}  # fmt: skip


@pytest.mark.parametrize("row", EAGER.items(), ids=EAGER)
def test_flags_without_graphs_follow_the_release(row: tuple) -> None:
    name, (release, eager) = row
    serve = VLLM if name == "vllm" else replace(SGLANG, release=release)
    assert flags_of(replace(serve, eager=True)) == flags_of(serve) | eager


def test_releases_whose_graph_flags_nobody_read_are_refused_only_where_they_matter() -> None:
    serve = replace(SGLANG, release="0.5.12")
    assert flags_of(serve) == flags_of(SGLANG)
    assert problems(replace(serve, eager=True)) == [
        "CUDA graphs: flags of this SGLang release are not known; expected 0.5.10 or earlier, 0.5.14 or later; found 0.5.12"
    ]


@pytest.mark.parametrize(
    ("engine", "release", "oldest"),
    [("vllm", "0.26.1", "0.27"), ("vllm", "nightly", "0.27"), ("vllm", "", "0.27"), ("sglang", "0.5.8", "0.5.9"),
     ("sglang", "0.5", "0.5.9"), ("sglang", "0.5.9999999", "0.5.9"), ("vllm", "0.33" + "9" * 5000, "0.27")],
)  # fmt: skip
def test_releases_before_the_known_flags_are_refused(engine: str, release: str, oldest: str) -> None:
    serve = replace(VLLM if engine == "vllm" else SGLANG, release=release)
    assert f"no flags are known for it; expected {oldest} or later" in problems(serve)[0]


@pytest.mark.parametrize(
    ("text", "version"), [("0.27.0", (0, 27, 0)), ("v0.33", (0, 33)), ("0.32.1rc2+cu130", (0, 32, 1)), (None, (0, 33))]
)
def test_versions_are_read(text: str | None, version: tuple[int, ...]) -> None:
    assert parse_version(text, (0, 33), (0, 27), "vLLM") == version


def test_larger_prefill_steps_raise_the_limit_of_sglang() -> None:
    assert "--max-prefill-tokens" not in flags_of(replace(SGLANG, prefill_chunk_tokens=16_384))
    assert flags_of(replace(SGLANG, prefill_chunk_tokens=32_768))["--max-prefill-tokens"] == "32768"


def test_pages_and_quantization_are_passed_on() -> None:
    vllm = flags_of(replace(VLLM, page_tokens=64, quantization="compressed-tensors"))
    assert (vllm["--block-size"], vllm["--quantization"]) == ("64", "compressed-tensors")
    sglang = flags_of(replace(SGLANG, page_tokens=64, quantization="modelopt_fp4"))
    assert (sglang["--page-size"], sglang["--quantization"]) == ("64", "modelopt_fp4")
    for serve in (VLLM, SGLANG):
        assert problems(replace(serve, quantization="fp3"))[0].endswith("found fp3")
    assert problems(replace(TABBY, page_tokens=16)) == ["page tokens: fixed; expected 256; found 16"]


UNUSED = {
    "vllm": (VLLM, {"kv_tokens": 1000, "state_slots": 4}, "vLLM"),
    "sglang": (SGLANG, {"kv_bytes": 1000}, "SGLang"),
    "tabbyapi": (
        TABBY,
        {"fraction": Fraction(1, 2), "eager": True, "quantization": "fp8", "release": "1.0"},
        "TabbyAPI",
    ),
}


@pytest.mark.parametrize("row", UNUSED.values(), ids=UNUSED)
def test_what_an_engine_has_no_flag_for_is_refused_by_name(row: tuple) -> None:
    serve, stated, engine = row
    lines = problems(replace(serve, **stated))
    assert sorted(lines) == sorted(f"{name.replace('_', ' ')}: {engine} has no flag for it" for name in stated)


def test_the_cache_of_tabbyapi_is_whole_pages_and_holds_one_request() -> None:
    assert problems(replace(TABBY, prefill_chunk_tokens=1000, kv_tokens=131_000)) == [
        "prefill chunk: no whole pages; expected a multiple of 256; found 1000",
        "cache tokens: no whole pages; expected a multiple of 256; found 131000",
        "cache tokens: one request must fit; expected at least 131072; found 131000",
    ]
    assert "found None" in problems(replace(TABBY, kv_tokens=None))[0]


def test_all_problems_are_named_at_once() -> None:
    serve = replace(SGLANG, model="-x", concurrency=0, fraction=Fraction(2), layout="tp", free_bytes=2, total_bytes=1)
    assert problems(serve) == [
        "model: would be read as an option; expected ./-x; found -x",
        f"concurrency: out of range; expected 1..{1 << 40}; found 0",
        "memory fraction: out of range; expected 0.0001 to 1; found 2",
        "free memory: more than the GPU has; found 2",
        "layout: an engine reads standard checkpoints; expected prepared with --layout hf; found tp",
    ]
    assert problems(replace(SGLANG, fraction=Fraction(1))) == [
        "memory fraction: leaves nothing beside the pool; expected below 1; found 1"
    ]
    assert problems(replace(VLLM, total_bytes=1 << 30, free_bytes=100)) == [
        "free memory: less than a ten-thousandth of the GPU; found 100"
    ]


@pytest.mark.parametrize("engine", ["split", "trt-llm", ""])
def test_what_is_no_server_has_no_command(engine: str) -> None:
    assert problems(replace(VLLM, engine=engine)) == [
        f"--engine: no server; expected vllm, sglang, exllamav3; found {engine}"
    ]


HOSTILE = [
    "a b",
    "$(touch x)",
    "`id`",
    "a;b|c&d",
    "it's",
    '"',
    "a'b\"c",
    "*?[x]",
    "~root",
    "!!",
    "#x",
    "\\",
    "é 模型 😀",
    "a:b {c}",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_one_word(name: str) -> None:
    draft = DraftPlan(method="eagle3", tokens=1, model=f"d/{name}")
    for serve in (VLLM, SGLANG):
        command = serve_command(replace(serve, model=name, draft=draft))
        assert tuple(shlex.split(command.shell)) == command.words
        assert name in command.words
    assert json.loads(flags_of(replace(VLLM, draft=draft))["--speculative-config"])["model"] == f"d/{name}"
    keys = lines_of(replace(TABBY, model=f"dir/{name}"))["model"]
    assert (keys["model_dir"], keys["model_name"]) == ("dir", name)


def test_a_shell_reads_the_words_as_they_are() -> None:
    serve = replace(VLLM, model=" ".join(HOSTILE))
    shell = serve_command(serve).shell.replace("vllm serve", "printf '%s\\n'", 1)
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, check=True, text=True).stdout
    assert printed.splitlines() == list(serve_command(serve).words[2:])


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\x1b[31m", "--port", "-", "x" * 1025, "a\u202eb"])
def test_names_that_cannot_be_a_word_are_refused(name: str) -> None:
    for serve in (VLLM, SGLANG, TABBY):
        lines = problems(replace(serve, model=name))
        assert lines[0].startswith("model: ")
        assert all(line.isprintable() and len(line) <= 400 for line in lines)


@pytest.mark.parametrize("name", ["..", "models/..", "a/.", "/", "."])
def test_tabbyapi_reads_no_directory_without_a_name(name: str) -> None:
    assert any("expected DIR/NAME" in line for line in problems(replace(TABBY, model=name)))


@pytest.mark.parametrize(
    ("model", "parts"),
    [("m", ("models", "m")), ("/m", ("/", "m")), ("a/b/", ("a", "b")), ("a/b/c", ("a/b", "c"))],
)  # fmt: skip
def test_tabbyapi_gets_a_directory_and_a_name(model: str, parts: tuple[str, str]) -> None:
    keys = lines_of(replace(TABBY, model=model))["model"]
    assert (keys["model_dir"], keys["model_name"]) == parts
