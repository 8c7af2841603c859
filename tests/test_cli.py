"""The command line end to end, in processes of its own: output, exit codes, one line per refusal."""

from __future__ import annotations

import json
import shlex

import pytest

K3 = "tests/data/configs/moonshotai__Kimi-K3.json"
K31 = "src/tonnage/synth/kimi_k31.json"
SEED_OPTIONS = ("--tp", "8", "--estimator", "credit", "--device-bytes", "802341903064", "--profile", "c4-p4096",
                "--context", "262144", "--supply", "94.010GiB", "--reserve", "4.894GiB")  # fmt: skip
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory, tonnage):
    """A small complete checkpoint."""
    home = tmp_path_factory.mktemp("small")
    (home / "config.json").write_text(json.dumps(SMALL))
    done = tonnage("synth", home / "config.json", "-o", home / "checkpoint", "--scale-down")
    assert done.returncode == 0, done.stderr
    return home / "checkpoint"


def test_every_help_ends_with_an_example_that_runs(tonnage, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text(json.dumps(SMALL))
    listed = tonnage("--help").stdout.split("Commands:")[1].split()
    for command in ("inspect", "plan", "models", "gpus", "synth", "demo"):
        assert command in listed
        text = " ".join(tonnage(command, "--help").stdout.split())
        example = text.split("Example: tonnage ")[1].split(" Arguments:")[0].split(" Options:")[0]
        done = tonnage(*shlex.split(example), cwd=tmp_path)
        assert done.returncode == 0, (example, done.stderr)
        if command == "demo":
            *_, flipped, _, last = done.stdout.splitlines()
            assert flipped == "(exit code 4, as expected)"
            assert last.startswith("demo: done, all ten steps ended as expected")
            assert done.stdout.count("\n$ tonnage ") == 10


def test_commands_are_listed_as_they_follow_each_other_each_on_one_line(tonnage):
    lines = [line.split(maxsplit=1) for line in tonnage("-h").stdout.split("Commands:\n")[1].splitlines()]
    assert [name for name, _ in lines] == [
        "inspect", "plan", "report", "fit", "flags", "synth", "prepare", "export", "export-names", "join", "verify", "fetch", "serve",
        "measure", "explain", "compare", "calibrate", "calibrations", "observe", "ui", "models", "gpus", "demo",
    ]  # fmt: skip
    assert not [text for _, text in lines if len(text) > 60 or text.endswith("...")]


def test_seed_case_with_the_old_credit_is_refused(tonnage):
    done = tonnage("plan", K31, *SEED_OPTIONS, "--credit-permille", "375")
    assert done.returncode == 3
    assert "94.055 GiB fixed > supply 94.010 GiB" in done.stdout
    assert "95,736,363,867" in done.stdout


def test_seed_case_with_the_new_credit_fits(tonnage):
    done = tonnage("plan", K31, *SEED_OPTIONS, "--credit-permille", "475", "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["fits"] is True
    assert [rank["weights_bytes"] for rank in plan["ranks"]] == [94_541_026_549] * 8
    assert plan["supply_bytes"] == 100_942_468_874
    assert plan["profile"]["name"] == "c4-p4096"
    assert plan["ranks"][0]["spare_bytes"] == 100_942_468_874 - 94_541_026_549 - 5_254_892_486


def test_seed_case_is_refused_with_the_old_record_and_fits_with_the_new(tonnage):
    old = tonnage("plan", K31, *SEED_OPTIONS, "--calibration", "kimi-k3.1-pro-exl3-2bit-tp8-375")
    assert old.returncode == 3
    assert "94.055 GiB fixed > supply 94.010 GiB, short by 0.045 GiB" in old.stdout
    new = tonnage("plan", K31, *SEED_OPTIONS, "--json")
    assert new.returncode == 0
    line = json.loads(new.stdout)["ranks"][0]["lines"][0]
    assert (line["nbytes"], line["basis"]) == (94_541_026_549, "calibrated")
    assert "kimi-k3.1-pro-exl3-2bit-tp8-475" in line["source"]


def test_credit_of_a_family_without_any_record_is_refused(tonnage, small):
    done = tonnage("plan", small, "--tp", "2", "--estimator", "credit")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "--credit-permille" in done.stderr


@pytest.mark.parametrize(
    ("options", "per_rank"),
    [
        (("--tp", "8"), 205_955_238_384),
        (("--tp", "16"), 139_316_459_384),
        (("--tp", "16", "--ep", "16"), 109_181_958_008),
    ],
)
def test_kimi_k3_under_vllm(tonnage, options, per_rank):
    done = tonnage("plan", K3, "--engine", "vllm", *options, "--json")
    assert done.returncode == 0
    assert {rank["weights_bytes"] for rank in json.loads(done.stdout)["ranks"]} == {per_rank}


def test_full_size_rehearsals_are_inspected_to_the_published_totals(tonnage, tmp_path):
    for words, tensors, payload in (
        ((K3,), 497_220, 1_560_860_324_864),
        ((K31, "--experts", "exl3-v1"), 2_748 + 92 * 6, 796_967_966_208),
    ):
        directory = tmp_path / str(payload)
        assert tonnage("synth", *words, "-o", directory).returncode == 0
        seen = json.loads(tonnage("inspect", directory, "--json").stdout)
        assert seen["source"] == "headers"
        assert (seen["tensors"], seen["payload_bytes"]) == (tensors, payload)
        assert seen["counted_projection_bytes"] == 95_626_985_472
        assert seen["latent_pair_bytes"] == 9_453_961_216
        from_headers = json.loads(tonnage("plan", directory, "--tp", "8", "--json").stdout)
        assert from_headers["checkpoint"]["family"] == "kimi_k3"


def test_refused_plan_says_what_would_fit(tonnage):
    done = tonnage("plan", K3, "--tp", "16", "--engine", "split", "--supply", "90GiB", "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 3
    assert plan["fits"] is False
    assert plan["reasons"][0].startswith("rank 0 needs ")
    assert plan["suggestions"] == ["--convert mxfp8", "--pp 2", "--tp 24"]


def test_tp_that_cannot_work_names_tensor_axis_divisor_and_the_sizes_that_do(tonnage):
    done = tonnage("plan", "tests/data/configs/Qwen__Qwen2.5-7B-Instruct.json", "--tp", "8", "--engine", "vllm")
    assert done.returncode == 2
    assert "self_attn.q_proj" in done.stderr
    assert "28 units" in done.stderr
    assert "sizes that work: 1, 2, 4" in done.stderr


UNUSABLE = {
    "no such directory": (("inspect", "nowhere"), "nowhere"),
    "no such config": (("plan", "nowhere.json"), "nowhere.json"),
    "no address on the hub": (("plan", "hf:org/name/more"), "hf:organisation/name"),
    "a page of the hub": (("plan", "https://huggingface.co/org/name"), "hf:org/name"),
    "in the clear": (("plan", "http://example.com/m"), "http without TLS"),
    "no bucket": (("inspect", "s3://"), "s3://bucket/prefix"),
    "unknown family": (("plan", "tests/data/configs/stepfun-ai__Step-3.7-Flash.json"), "step3p7"),
    "no model type": (("plan", "tests/data/configs/Qwen__Qwen3.5-9B.json"), "model_type"),
    "unknown gpu": (("plan", K3, "--gpu", "rtx-9090"), "rtx-9090"),
    "supply without sense": (("plan", K3, "--supply", "lots"), "'lots'"),
    "supply and free": (("plan", K3, "--free", "all", "--supply", "80GiB"), "both given"),
    "no release": (("plan", K3, "--engine-version", "garbage"), "--engine-version: no release"),
    "a share of nothing": (("plan", K3, "--utilization", "0.9"), "a share of what is not said"),
    "a share beyond the whole": (("plan", K3, "--gpu", "h100", "--utilization", "1.1"), "at most 1"),
    "profile without sense": (("plan", K3, "--profile", "big"), "'big'"),
    "ep is no divisor": (("plan", K3, "--tp", "8", "--ep", "3"), "--ep"),
    "tp of nothing": (("plan", K3, "--tp", "0"), "--tp"),
    "tp beyond reason": (("plan", K3, "--tp", "1000000"), "--tp"),
    "an address to write to": (("synth", K3, "-o", "s3://bucket/m"), "s3://bucket/m: not on this machine"),
    "another to write to": (("prepare", K3, "-o", "hf:org/name"), "hf:org/name: not on this machine"),
    "bits without sense": (("synth", K3, "-o", "unused", "--storage", "exl3", "--bits", "9"), "bits"),
}


@pytest.mark.parametrize(("words", "named"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_input_is_refused_in_one_line_with_exit_code_2(tonnage, words, named):
    done = tonnage(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_gguf_files_are_refused_by_what_they_are(tonnage, tmp_path):
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    for source in (tmp_path / "m.GGUF", tmp_path):
        done = tonnage("plan", source)
        expected = "the safetensors checkpoint they were made of, or its config.json"
        line = f"tonnage: {source}: GGUF files are not read; expected {expected}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_truncated_shard_names_file_and_bytes(tonnage, small, tmp_path):
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    whole = (small / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    done = tonnage("inspect", tmp_path)
    assert done.returncode == 2
    assert "model.safetensors" in done.stderr
    assert f"expected {len(whole)} bytes" in done.stderr or str(len(whole)) in done.stderr
    assert str(len(whole) - 1000) in done.stderr


def test_header_that_claims_two_to_the_sixty_costs_nothing(tonnage, small, tmp_path):
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    done = tonnage("inspect", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_small_checkpoint_plans_the_same_from_headers_and_from_config(tonnage, small):
    for engine in ("vllm", "sglang", "split"):
        plans = [
            json.loads(tonnage("plan", source, "--tp", "2", "--engine", engine, "--json").stdout)
            for source in (small, small / "config.json")
        ]
        assert plans[0]["ranks"] == plans[1]["ranks"]


def test_json_documents_are_versioned(tonnage, small):
    for words, schema in (
        (("plan", small), "tonnage.plan/1"),
        (("inspect", small), "tonnage.inspect/1"),
        (("models",), "tonnage.models/1"),
        (("gpus",), "tonnage.gpus/1"),
    ):
        assert json.loads(tonnage(*words, "--json").stdout)["schema"] == schema


def test_closed_pipe_is_no_traceback(small):
    import subprocess
    import sys
    from pathlib import Path

    command = shlex.join([str(Path(sys.executable).with_name("tonnage")), "plan", str(small), "--json"])
    done = subprocess.run(["bash", "-c", f"{command} | head -c 1"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
