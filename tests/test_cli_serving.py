"""``plan`` of a profile, ``fit`` and ``flags``: output, JSON and exit codes; in this process, to be fast."""

from __future__ import annotations

import json

import pytest

DENSE = "tests/data/configs/Qwen__Qwen3-8B.json"
MTP = "tests/data/configs/Qwen__Qwen3.5-27B.json"
EAGLE = ("tests/data/configs/meta-llama__Llama-3.1-8B-Instruct.json", "tests/data/drafts/llama3-8B-eagle3.json")
SERVED = ("--profile", "c4-p8192", "--context", "32768")


@pytest.fixture
def tonnage(tonnage_here):
    return tonnage_here


def test_plan_of_a_profile_names_every_reason_and_the_room(tonnage):
    done = tonnage("plan", DENSE, "--engine", "vllm", *SERVED, "--gpu", "H100 80GB", "--engine-version", "0.33.0")
    assert done.returncode == 0, done.stderr
    for word in ("engine.rotary", "runtime.context", "runtime.graphs", "workspace.activation", "4 x 32,768 tokens",
                 "cache: 147,456 bytes per token and rank; room for", "FITS: spare"):  # fmt: skip
        assert word in done.stdout


def test_plan_json_gives_the_cache_and_what_every_rank_needs(tonnage):
    done = tonnage("plan", DENSE, "--engine", "vllm", "--tp", "2", *SERVED, "--supply", "60GiB", "--json")
    plan = json.loads(done.stdout)
    assert (done.returncode, plan["fits"], plan["reasons"]) == (0, True, [])
    assert plan["cache"]["bytes_per_token_per_rank"] == 73_728
    assert plan["cache"]["concurrency"] == 4
    assert plan["cache"]["capacity_tokens"] <= plan["cache"]["expected_capacity_tokens"]
    for rank in plan["ranks"]:
        assert rank["cache_bytes"] == (4 * 32768 // 16 + 1) * 16 * 73_728
        assert rank["spare_bytes"] == 60 * 2**30 - rank["fixed_bytes"] - rank["cache_bytes"]
        assert rank["expected_bytes"] <= rank["fixed_bytes"]
        assert rank["loading_bytes"] >= rank["weights_bytes"]


def test_asked_cache_is_the_one_judged(tonnage):
    words = ("plan", DENSE, "--engine", "vllm", *SERVED, "--json")
    enough = tonnage(*words, "--supply", "60GiB", "--kv-bytes", "30GiB")
    assert enough.returncode == 0
    assert json.loads(enough.stdout)["cache"]["given_bytes"] == 30 * 2**30
    assert json.loads(enough.stdout)["cache"]["capacity_tokens"] == 30 * 2**30 // (16 * 147_456) * 16
    short = tonnage(*words, "--kv-bytes", "2GiB")
    assert (short.returncode, json.loads(short.stdout)["fits"]) == (3, False)
    assert "needs 18.002 GiB > 2.000 GiB (--kv-bytes)" in json.loads(short.stdout)["reasons"][0]


def test_share_of_a_gpu_is_beside_the_context_and_may_not_be_free(tonnage):
    words = ("plan", DENSE, "--engine", "vllm", *SERVED, "--gpu", "h100", "--utilization")
    share = tonnage(*words, "0.9", "--json")
    plan = json.loads(share.stdout)
    assert share.returncode == 0
    assert plan["supply_bytes"] == -(-81_090 * 2**20 * 9 // 10)
    assert not any(line["component"] == "runtime.context" for line in plan["ranks"][0]["lines"])
    whole = tonnage(*words, "1.0")
    assert whole.returncode == 3
    assert "REFUSED: the engine may not start" in whole.stdout
    assert "no single change" not in whole.stdout
    most = whole.stdout.split("at most --utilization ")[1].split()[0]
    assert tonnage(*words, most).returncode == 0
    assert tonnage(*words, f"{float(most) + 0.0001:.4f}").returncode == 3


def test_notes_on_a_gpu_are_of_what_was_said_of_it(tonnage):
    words = ("plan", DENSE, "--engine", "split", *SERVED, "--json")
    notes = [json.loads(tonnage(*words, *more).stdout)["notes"] for more in ((), ("--gpu", "h100"))]
    assert [[note for note in found if "vLLM's rules" in note] for found in notes] == [
        ["served by vLLM's rules; without --gpu, buffers are those measured on SM 12.0 (docs/k31-ranks.md)"],
        ["served by vLLM's rules"],
    ]
    both = json.loads(tonnage(*words, "--gpu", "h100", "--supply", "20GiB").stdout)
    assert both["supply_bytes"] == 20 << 30
    assert "the size is that of --supply; --gpu says which kind of GPU it is" in both["notes"]
    assert not any("--supply" in note for found in notes for note in found)


def test_plan_without_a_release_says_where_releases_differ(tonnage):
    share = ("plan", DENSE, "--engine", "vllm", *SERVED, "--gpu", "h100", "--utilization", "0.9", "--json")
    note = "without --engine-version graphs are inside of --utilization, as from vLLM 0.21 on"
    assert note in json.loads(tonnage(*share).stdout)["notes"]
    for more in (("--engine-version", "0.32.0"), ("--eager",)):
        assert note not in json.loads(tonnage(*share, *more).stdout)["notes"]


def test_cache_of_deepseek_v4_without_a_release_is_that_of_the_release_that_takes_most(tonnage):
    config = "tests/data/configs/deepseek-ai__DeepSeek-V4-Flash.json"
    words = ("plan", config, "--engine", "vllm", "--tp", "8", "--profile", "c4-p4096", "--context", "8192", "--json")
    plans = {
        release: json.loads(tonnage(*words, *(("--engine-version", release) if release else ())).stdout)["ranks"][0]
        for release in ("", "0.25.1", "0.32.0")
    }
    cache = {release: rank["cache_bytes"] for release, rank in plans.items()}
    assert cache[""] == cache["0.25.1"] > cache["0.32.0"]


def test_share_is_vllms(tonnage):
    done = tonnage("plan", DENSE, "--engine", "sglang", *SERVED, "--gpu", "h100", "--utilization", "0.9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tonnage: --utilization: the share that vLLM is started with")


def test_plan_that_fits_serving_but_not_loading_says_so_and_is_refused(tonnage):
    words = ("plan", "tests/data/configs/deepseek-ai__DeepSeek-V3.json", "--engine", "vllm", "--profile", "c1-p512",
             "--context", "512", "--eager")  # fmt: skip
    rank = json.loads(tonnage(*words, "--json").stdout)["ranks"][0]
    serving = rank["fixed_bytes"] + rank["cache_bytes"]
    done = tonnage(*words, "--supply", str(serving))
    assert rank["loading_bytes"] > serving
    assert done.returncode == 3
    assert "REFUSED: fits serving, does not fit while loading" in done.stdout


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((MTP, "--draft-method", "mtp", "--draft-tokens", "3"), {"draft.weights", "draft.graphs", "draft.buffers"}),
        ((EAGLE[0], "--draft", EAGLE[1], "--draft-tokens", "3"), {"draft.weights", "draft.head", "workspace.draft"}),
        ((DENSE, "--draft-method", "ngram", "--draft-tokens", "3"), set()),
    ],
)
def test_draft_is_its_own_lines(tonnage, words, lines):
    plain = json.loads(tonnage("plan", words[0], "--engine", "vllm", *SERVED, "--json").stdout)["ranks"][0]
    done = tonnage("plan", *words, "--engine", "vllm", *SERVED, "--json")
    assert done.returncode == 0, done.stderr
    rank = json.loads(done.stdout)["ranks"][0]
    assert lines <= {line["component"] for line in rank["lines"]}
    assert rank["weights_bytes"] == plain["weights_bytes"]
    assert rank["fixed_bytes"] > plain["fixed_bytes"]
    assert (rank["cache_bytes"] > plain["cache_bytes"]) is bool(lines)


def test_what_changes_nothing_without_a_profile_is_said(tonnage):
    done = tonnage("plan", DENSE, "--engine", "vllm", "--draft-method", "ngram", "--eager", "--json")
    assert "--draft-method, --eager change nothing" in " ".join(json.loads(done.stdout)["notes"])


def test_a_cache_that_is_given_is_held_without_a_profile_and_said_to_be(tonnage):
    words = ("plan", DENSE, "--engine", "split", "--kv-bytes", "4GiB")
    assert "--kv-bytes changes nothing: nothing is said" in tonnage(*words).stdout
    plan = json.loads(tonnage(*words, "--supply", "24GiB", "--json").stdout)
    assert plan["ranks"][0]["spare_bytes"] == (20 << 30) - plan["ranks"][0]["fixed_bytes"]
    said = tonnage(*words, "--supply", "24GiB").stdout
    assert "--kv-bytes is held as given, whatever it is enough for: nothing is said of what is served" in said
    assert "change" not in said
    assert said.rstrip().endswith("; weights and --kv-bytes alone: no cache is planned")
    assert tonnage(*words, "--supply", "16GiB").returncode == 3


def test_fit_is_a_table_of_ways(tonnage):
    done = tonnage("fit", DENSE, "--gpu", "rtx-3090", "--gpus", "4", "--profile", "c2-p2048", "--context", "16384")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["1", "1", "yes"], ["2", "1", "yes"], ["4", "1", "yes"]]
    assert "longest context" in done.stdout.splitlines()[1]


def test_fit_json_agrees_with_plan(tonnage):
    options = ("--engine", "sglang", "--supply", "24GiB", "--profile", "c2-p2048", "--context", "16384")
    done = tonnage("fit", DENSE, *options, "--gpus", "2", "--json")
    found = json.loads(done.stdout)
    assert found["schema"] == "tonnage.fit/1"
    for way in found["ways"]:
        plan = json.loads(tonnage("plan", DENSE, *options, "--tp", way["tp"], "--json").stdout)
        rank = plan["ranks"][plan["binding_rank"]]
        assert (way["fits"], way["spare_bytes"], way["cache"]) == (plan["fits"], rank["spare_bytes"], plan["cache"])
    assert found["best"] == max(found["ways"], key=lambda way: way["longest_context"])


def test_fit_where_nothing_fits_exits_3(tonnage):
    assert tonnage("fit", DENSE, "--supply", "2GiB", "--gpus", "2").returncode == 3
    asked = tonnage("fit", DENSE, "--gpus", "2")
    assert (asked.returncode, asked.stdout) == (2, "")


@pytest.mark.parametrize(
    ("engine", "starts", "words"),
    [
        ("vllm", "vllm serve", ("--kv-cache-memory-bytes", "--max-num-seqs 4", "--max-model-len 32768")),
        ("sglang", "python", ("--max-total-tokens", "--mem-fraction-static", "--context-length 32768")),
        ("exllamav3", "python", ()),
    ],
)
def test_flags_print_the_command_of_a_plan_that_fits(tonnage, engine, starts, words):
    done = tonnage("flags", DENSE, "--engine", engine, *SERVED, "--gpu", "h100", "--model", "Qwen/Qwen3-8B")
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    assert command.startswith(starts)
    assert all(word in command for word in words)


def test_a_quantization_of_plain_weights_is_said_not_to_be_planned(tonnage):
    words = ("--engine", "vllm", *SERVED, "--gpu", "h100", "--model", "org/name", "--quantization", "fp8")
    said = "note: planned as stored: what --quantization fp8 makes of plain weights is not counted\n"
    plain = tonnage("flags", DENSE, *words)
    assert (plain.returncode, plain.stderr) == (0, said)
    assert plain.stdout.rstrip().endswith("--quantization fp8")
    stored = tonnage("flags", "tests/data/configs/Qwen__Qwen3-30B-A3B-FP8.json", *words)
    assert (stored.returncode, stored.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ((), ("--profile", "--context", "--gpu, --supply, --free")),
        (("--gpu", "h100"), ("--profile", "--context")),
        (("--gpu", "h100", "--profile", "c4-p4096"), ("--context",)),
    ],
)
def test_flags_want_to_know_what_is_to_be_served_and_where_and_say_so_at_once(tonnage, words, missing):
    lines = {
        "--profile": "tonnage: --profile: an engine is told what it is to serve; expected such as c4-p4096",
        "--context": "tonnage: --context: an engine is told what it is to serve; expected such as 32k",
        "--gpu, --supply, --free": "tonnage: --gpu, --supply, --free: a plan is judged first; expected one of them",
    }
    done = tonnage("flags", DENSE, "--engine", "vllm", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [lines[option] for option in missing]


@pytest.mark.parametrize("given", [("--profile", "c4-p4096"), ("--context", "8k")])
def test_half_of_what_is_to_be_served_is_no_plan_of_weights_that_fits(tonnage, given):
    done = tonnage("plan", DENSE, "--gpu", "l4", *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tonnage: {given[0]}: alone plans no cache with --engine split; expected ")


def test_a_context_beyond_the_models_own_is_said_by_whatever_serves_it(tonnage):
    said = "note: the context is beyond the 40,960 tokens of the config: engines refuse it by default\n"
    words = (DENSE, "--engine", "vllm", "--gpu", "h200", "--profile", "c1-p4096", "--context")
    for command in (("fit",), ("flags", "--model", "m")):
        assert said in tonnage(command[0], *words, "128k", *command[1:]).stderr
        assert said not in tonnage(command[0], *words, "40960", *command[1:]).stderr


def test_flags_of_a_plan_that_does_not_fit_are_none(tonnage):
    done = tonnage("flags", DENSE, "--engine", "vllm", *SERVED, "--supply", "20GiB")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("does not fit: rank 0 needs ")


def test_flags_give_the_cache_what_the_plan_has_left(tonnage):
    words = (DENSE, "--engine", "vllm", *SERVED, "--supply", "60GiB")
    flags = json.loads(tonnage("flags", *words, "--model", "m", "--json").stdout)
    rank = json.loads(tonnage("plan", *words, "--json").stdout)["ranks"][0]
    given = flags["words"][flags["words"].index("--kv-cache-memory-bytes") + 1]
    assert int(given) == 60 * 2**30 - rank["fixed_bytes"]


def test_options_that_cannot_be_read_are_all_named_at_once(tonnage):
    done = tonnage("plan", DENSE, "--engine", "sglang", "--gpu", "h1", "--reserve", "6", "--profile", "c4",
                   "--utilization", "0.9", "--kv-bytes", "1", "--engine-version", "x", "--draft-bytes", "many")  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "--utilization", "--gpu", "--profile", "--reserve", "--draft-bytes", "--kv-bytes", "--engine-version",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        (("--profile", "c2-p4k", "--context", "8k"), ("--profile", "c2-p4096", "--context", "8192")),
        (("--profile", "C2-P1M", "--context", "1M"), ("--profile", "c2-p1048576", "--context", "1048576")),
    ],
)
def test_tokens_may_be_counted_in_thousands_of_1024(tonnage, typed, plain):
    words = ("plan", DENSE, "--engine", "vllm", "--gpu", "h100")
    plans = [json.loads(tonnage(*words, *asked, "--json").stdout) for asked in (typed, plain)]
    assert plans[0]["ranks"] == plans[1]["ranks"]
    assert plans[0]["profile"] == plans[1]["profile"]


@pytest.mark.parametrize("command", ["plan", "fit", "flags", "serve", "export"])
def test_every_command_takes_a_context_in_thousands_and_refuses_none(tonnage, tmp_path, command):
    source = tmp_path if command in ("serve", "export") else DENSE
    for text in ("0", "0k", "8kk", "-1", "8.5k", "", "1e3"):
        done = tonnage(
            command,
            source,
            f"--context={text}",
            *(("--engine", "vllm", "--profile", "c1-p1") if command == "flags" else ()),
        )
        assert done.returncode == 2
        assert (
            "--context: not a number of tokens; expected a whole number such as 32768, 32k or 1M (k is 1,024)"
            in done.stderr
        )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "exllamav3"])
def test_an_unknown_kv_dtype_lists_every_known_one_once(tonnage, engine):
    done = tonnage("plan", DENSE, "--engine", engine, "--kv-dtype", "fp3", "--context", "64")
    assert done.returncode == 2
    listed = done.stderr.partition("expected ")[2].partition("; found")[0].casefold().split(", ")
    assert len(listed) > 3
    assert sorted(set(listed)) == sorted(listed)


def test_sums_say_what_they_are_sums_of(tonnage):
    served = tonnage("plan", DENSE, "--engine", "vllm", *SERVED).stdout
    assert "weights, padding and engine lines, as expected" in served
    assert "all lines above at their bounds" in served
    weights = tonnage("plan", DENSE).stdout.splitlines()
    (fixed,) = (line for line in weights if line.startswith("fixed "))
    assert fixed.endswith("all lines above")
