"""The interface for programs: every route, every refusal, and that its answers are those of the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.main import get_command
from typer.testing import CliRunner

from samples import LLAMA, PATIENCE
from tonnage.cli import app as command
from tonnage.errors import TonnageError, one_line
from tonnage.ui import checkpoints, shelf
from tonnage.ui.app import make_app
from tonnage.ui.bodies import Address, FitBody, FlagsBody, PlanBody
from tonnage.ui.examples import EXAMPLES
from tonnage.ui.openapi import DOCUMENTS, openapi_document
from tonnage.ui.routes import API
from tonnage.ui.settings import Settings

SMALL = {**LLAMA, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
LOGS = Path(__file__).parent / "data" / "logs"
XSS = (Path(__file__).parent / "data" / "xss.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory of checkpoints with links and lies in it, and what lies outside."""
    home = tmp_path_factory.mktemp("ui")
    for name in ("models/small", "models/deep/er", "models/.hidden", "outside", "models/linked"):
        (home / name).mkdir(parents=True)
    for name in ("models/small", "models/deep/er", "models/.hidden", "outside"):
        (home / name / "config.json").write_text(json.dumps(SMALL))
    (home / "models" / "lone.json").write_text(json.dumps(SMALL))
    (home / "models" / "notes.json").write_text('{"no": "model"}')
    (home / "models" / "broken.json").write_text('{"model_type": "llama",')
    (home / "models" / "linked" / "config.json").symlink_to(home / "outside" / "config.json")
    snapshot, blobs = home / "models" / "hub" / "snapshots" / "f00", home / "models" / "hub" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text(json.dumps(SMALL))
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (home / "models" / "within.json").symlink_to(home / "models" / "lone.json")
    (home / "models" / "away").symlink_to(home / "outside")
    os.mkfifo(home / "models" / "pipe.json")
    return home


@pytest.fixture(scope="module")
def client(place):
    settings = Settings(directories=(str(place / "models"),), workers=1, seconds=PATIENCE)
    with TestClient(make_app(settings), base_url="http://localhost:8765") as found:
        yield found


def printed(*words: object) -> dict[str, Any]:
    """What the command prints."""
    done = CliRunner().invoke(command, [*map(str, words), "--json"])
    assert done.exit_code in (0, 3), done.output
    return json.loads(done.stdout)


def problems(answer) -> list[dict[str, Any]]:
    document = answer.json()
    assert document["schema"] == "tonnage.error/1"
    assert answer.headers["content-type"] == "application/json"
    return document["problems"]


@pytest.mark.parametrize("route", API, ids=lambda route: route.name)
def test_every_route_answers_its_example(client, route):
    answer = client.request(route.method, route.path, json=EXAMPLES.get(route.name))
    assert answer.status_code == 200, answer.text
    if route.name in DOCUMENTS:
        schema, keys = DOCUMENTS[route.name]
        document = answer.json()
        assert document["schema"] == schema
        assert set(keys) <= set(document)
    else:
        assert answer.headers["content-disposition"] == 'attachment; filename="small-llama.html"'
        assert answer.text.startswith("<!doctype html>")


ASKED = {
    "weights alone": ({"tp": 2}, ("--tp", 2)),
    "served": (
        {"tp": 2, "engine": "vllm", "gpu": "h100", "profile": "c4-p1024", "context": 2048, "kv_dtype": "fp8"},
        ("--tp", 2, "--engine", "vllm", "--gpu", "h100", "--profile", "c4-p1024", "--context", 2048, "--kv-dtype", "fp8"),
    ),
    "does not fit": (
        {"engine": "sglang", "supply": "5MiB", "profile": "c1-p512", "context": 64, "suggestions": True},
        ("--engine", "sglang", "--supply", "5MiB", "--profile", "c1-p512", "--context", 64),
    ),
    "share of a GPU": (
        {"engine": "vllm", "gpu": "h100", "utilization": "0.9", "context": 64, "eager": True, "engine_version": "0.20.0",
         "reserve": "1GiB", "kv_bytes": "1GiB"},
        ("--engine", "vllm", "--gpu", "h100", "--utilization", "0.9", "--context", 64, "--eager", "--engine-version",
         "0.20.0", "--reserve", "1GiB", "--kv-bytes", "1GiB"),
    ),
    "conversion, whole experts on none": ({"convert": "mxfp8", "ep": 2, "tp": 2}, ("--convert", "mxfp8", "--ep", 2, "--tp", 2)),
    "credit": (
        {"estimator": "credit", "credit_permille": 300, "supply": "4MiB", "draft_bytes": "2MiB", "device_bytes": 9000000},
        ("--estimator", "credit", "--credit-permille", 300, "--supply", "4MiB", "--draft-bytes", "2MiB", "--device-bytes", 9000000),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "words"), ASKED.values(), ids=ASKED)
def test_plan_is_what_the_command_prints(client, place, body, words):
    path = place / "models" / "small"
    answer = client.post("/api/plan", json={"checkpoint": {"path": str(path)}, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json() == printed("plan", path, *words)


def test_plan_with_a_draft_is_what_the_command_prints(client, place):
    path, draft = place / "models" / "small", place / "models" / "lone.json"
    body = {"checkpoint": {"path": str(path)}, "draft": {"path": str(draft)}, "engine": "vllm", "context": 64,
            "draft_method": "draft-model", "draft_tokens": 3}  # fmt: skip
    words = (
        "--draft",
        draft,
        "--draft-method",
        "draft-model",
        "--draft-tokens",
        3,
        "--engine",
        "vllm",
        "--context",
        64,
    )
    assert client.post("/api/plan", json=body).json() == printed("plan", path, *words)


def test_suggestions_are_looked_for_where_they_are_asked_for(client):
    body = {**EXAMPLES["plan"], "supply": "5.3GiB", "gpu": None}
    assert client.post("/api/plan", json=body).json()["suggestions"] == []
    found = client.post("/api/plan", json={**body, "suggestions": True}).json()
    assert found["fits"] is False
    assert "--context 3520" in found["suggestions"]


def test_fit_is_what_the_command_prints(client, place):
    path = place / "models" / "small"
    body = {"checkpoint": {"path": str(path)}, "gpu": "h100", "gpus": 2, "profile": "c4-p1024", "context": 1024}
    words = ("--gpu", "h100", "--gpus", 2, "--profile", "c4-p1024", "--context", 1024)
    assert client.post("/api/fit", json=body).json() == printed("fit", path, *words)
    assert client.post("/api/fit", json={**body, "tp": 2}).json() == printed("fit", path, *words, "--tp", 2)


def test_flags_are_what_the_command_prints(client, place):
    path = place / "models" / "small"
    body = {"checkpoint": {"path": str(path)}, "engine": "vllm", "gpu": "h100", "profile": "c4-p1024", "context": 1024}
    words = ("--engine", "vllm", "--gpu", "h100", "--profile", "c4-p1024", "--context", 1024)
    assert client.post("/api/flags", json=body).json() == printed("flags", path, *words)
    hub = client.post("/api/flags", json={**body, "model": "org/name", "quantization": "fp8"})
    assert hub.json() == printed("flags", path, *words, "--model", "org/name", "--quantization", "fp8")


def test_flags_of_everything_a_plan_depends_on_are_what_the_command_prints(client, place):
    path = place / "models" / "small"
    body = {"checkpoint": {"path": str(path)}, "engine": "vllm", "gpu": "h100", "profile": "c4-p1024", "context": 1024,
            "convert": "mxfp8", "utilization": "0.5", "draft_bytes": "1GiB"}  # fmt: skip
    words = ("--engine", "vllm", "--gpu", "h100", "--profile", "c4-p1024", "--context", 1024, "--convert", "mxfp8",
             "--utilization", "0.5", "--draft-bytes", "1GiB")  # fmt: skip
    found = client.post("/api/flags", json=body).json()
    assert found == printed("flags", path, *words)
    assert f"tonnage prepare {path} --layout hf --convert mxfp8 -o small-mxfp8" in found["notes"][0]


def test_flags_of_a_plan_that_does_not_fit_are_refused_with_its_reasons(client):
    answer = client.post("/api/flags", json={**EXAMPLES["flags"], "supply": "1GiB", "gpu": None})
    assert answer.status_code == 422
    assert problems(answer)[0]["what"].startswith("does not fit: rank 0")


def test_observe_is_what_the_command_prints(client):
    log = LOGS / "vllm_0_27_tp1.log"
    text = log.read_bytes().decode()
    assert client.post("/api/observe", json={"log": text, "gpu": "h100"}).json() == printed(
        "observe", log, "--gpu", "h100"
    )


def test_observe_holds_a_log_against_an_answer_of_plan(client, tmp_path):
    log, saved = LOGS / "vllm_0_27_tp1.log", tmp_path / "plan.json"
    plan = client.post("/api/plan", json={**EXAMPLES["plan"], "tp": 1, "gpu": "rtx-5090"}).json()
    saved.write_text(json.dumps(plan))
    text = log.read_bytes().decode()
    refused = client.post("/api/observe", json={"log": text, "plan": plan, "gpu": "h100"})
    assert [problem["what"] for problem in problems(refused)] == [
        "the log is of another GPU than the plan", "the log is of another model than the plan",
    ]  # fmt: skip
    log = tmp_path / "serve.log"
    log.write_text(text := text.replace("Mixed-30B", "small-llama"))
    answer = client.post("/api/observe", json={"log": text, "plan": plan}).json()
    done = CliRunner().invoke(command, ["observe", str(log), "--plan", str(saved), "--json"])
    assert done.exit_code == 5  # it holds more
    assert answer == json.loads(done.stdout)


@pytest.mark.parametrize("name", ["gpus", "models"])
def test_tables_are_what_the_command_prints(client, name):
    assert client.get(f"/api/{name}").json() == printed(name)


def test_a_config_that_is_sent_is_planned_like_its_file(client, place):
    path = place / "models" / "lone.json"
    by_path, by_text, by_object = (
        client.post("/api/plan", json={"checkpoint": checkpoint, "tp": 2}).json()
        for checkpoint in (
            {"path": str(path)},
            {"config": path.read_text(), "name": "lone"},
            {"config": SMALL, "name": "lone"},
        )
    )
    assert by_path == by_text
    assert {**by_object, "checkpoint": by_path["checkpoint"]} == by_path


def test_a_checkpoint_that_changes_is_read_again(client, place):
    path = place / "models" / "changing.json"
    path.write_text(json.dumps(SMALL))
    body = {"checkpoint": {"path": str(path)}}
    before = client.post("/api/plan", json=body).json()["ranks"][0]["weights_bytes"]
    path.write_text(json.dumps({**SMALL, "num_hidden_layers": 4}))
    after = client.post("/api/plan", json=body).json()["ranks"][0]["weights_bytes"]
    path.unlink()
    assert after > before
    assert client.post("/api/plan", json=body).status_code == 404


def test_checkpoints_are_listed_without_what_links_lead_out_to(client, place):
    document = client.get("/api/checkpoints").json()
    models = place / "models"
    assert document["complete"] is True
    assert [(one["path"], one["kind"], one["weights"]) for one in document["checkpoints"]] == [
        (str(models / "broken.json"), "config", False),
        (str(models / "lone.json"), "config", False),
        (str(models / "within.json"), "config", False),
        (str(models / "deep" / "er"), "directory", False),
        (str(models / "hub" / "snapshots" / "f00"), "directory", False),
        (str(models / "small"), "directory", False),
    ]


NAMES = ("line\nend", "\x1b[31mred", "\u202ereversed", "space after ", "caf\udce9", "<b>bold", "a'b\"c", "long" * 60)


def test_every_name_that_is_listed_can_be_planned_by_a_request_and_by_the_page(tmp_path):
    deep = Path("/".join(["deep" * 40] * 4))
    for name in (*NAMES, deep):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL))
    settings = Settings(directories=(str(tmp_path),), workers=1, seconds=PATIENCE)
    with TestClient(make_app(settings), base_url="http://localhost") as client:
        document = client.get("/api/checkpoints").json()
        paths = [one["path"] for one in document["checkpoints"]]
        for path in paths:
            assert client.post("/api/plan", json={"checkpoint": {"path": path}}).status_code == 200
            assert '<h1 id="headline">Fits' in client.get("/", params={"checkpoint": path}).text
        page = client.get("/").text
    assert document["complete"] is False
    assert {Path(path).name for path in paths} == {*NAMES[5:], deep.name}
    assert "Not all that is there is listed" in page
    assert not any(mark in page for mark in ("\x1b", "\u202e", "<b>bold"))


def test_a_search_for_configs_reads_so_much_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MOST_SEARCHED_BYTES", 3 * len(json.dumps(SMALL)))
    for number in range(5):
        (tmp_path / f"{number}.json").write_text(json.dumps(SMALL))
    found, complete = checkpoints.list_checkpoints([str(tmp_path)])
    assert ([Path(one.path).name for one in found], complete) == (["0.json", "1.json", "2.json"], False)


@pytest.mark.parametrize("after", ["a link out", "another file"])
def test_what_is_changed_while_it_is_read_is_refused(tmp_path, monkeypatch, after):
    served, outside = tmp_path / "served", tmp_path / "outside.json"
    served.mkdir()
    config = served / "config.json"
    for path in (config, outside):
        path.write_text(json.dumps(SMALL))
    real = shelf.open_checkpoint

    def swapped(path, draft_method):
        opened = real(path, draft_method=draft_method)
        config.unlink()
        config.symlink_to(outside) if after == "a link out" else config.write_text(json.dumps(SMALL) + " ")
        return opened

    monkeypatch.setattr(shelf, "open_checkpoint", swapped)
    with pytest.raises(TonnageError, match="changed while it was read" if after == "another file" else "leads out"):
        shelf.Shelf(Settings(directories=(str(served),))).open(Address(path=str(served)))


def test_a_log_may_be_full_of_brackets_and_commas(client):
    line = (
        "\x1b[32mINFO\x1b[0m 01-02 03:04:05 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 4.2 seconds\n"
    )
    log = line + "\x1b[32m[0,1],\x1b[0m\n" * 120_000
    answer = client.post("/api/observe", json={"log": log})
    assert answer.status_code == 200, answer.text[:200]
    many = client.post("/api/observe", json={"log": line, "plan": {"ranks": [[]] * 100_001}})
    assert (many.status_code, problems(many)[0]["what"]) == (400, "too many values")


def test_every_listed_checkpoint_that_is_whole_is_planned(client):
    for one in client.get("/api/checkpoints").json()["checkpoints"]:
        answer = client.post("/api/plan", json={"checkpoint": {"path": one["path"]}})
        assert answer.status_code == (422 if one["path"].endswith("broken.json") else 200)


PATHS = {
    "outside": "{home}/outside",
    "absolute": "/etc/passwd",
    "up": "{home}/models/../outside",
    "up and down": "{home}/models/small/../../models/small",
    "a link to a directory": "{home}/models/away",
    "through a link to a directory": "{home}/models/away/config.json",
    "a link inside": "{home}/models/linked",
    "that link": "{home}/models/linked/config.json",
    "a neighbour's name": "{home}/models2",
    "a beginning": "{home}/model",
    "missing": "{home}/models/missing",
    "no config": "{home}/models/deep/er/config.toml",
    "NUL": "{home}/models/small\x00",
    "line end": "{home}/models/small\n",
    "relative": "models/small",
    "relative up": "../outside",
    "tilde": "~",
    "a URL": "file://{home}/models/small",
    "a remote source": "hf:org/name",
    "a store": "s3://bucket/key",
    "surrogate": "{home}/models/\ud800",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_path_that_is_not_served_is_not_found(client, place, path):
    body = json.dumps({"checkpoint": {"path": path.format(home=place)}})
    answer = client.post("/api/plan", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (400 if "\ud800" in path else 404)  # half a surrogate pair is no text
    assert (
        "config" not in answer.text.replace("api/checkpoints", "")
        or path.format(home=place) in answer.json()["problems"][0]["where"]
    )


def test_what_is_no_checkpoint_inside_is_refused_by_name(client, place):
    models = place / "models"
    named = {
        "notes.json": "neither model_type nor architectures",
        "pipe.json": "not a regular file",
        "": "no config.json here",
    }
    for name, what in named.items():
        answer = client.post("/api/plan", json={"checkpoint": {"path": str(models / name)}})
        assert answer.status_code == 422
        assert problems(answer)[0]["what"] == what


REFUSED = {
    "no checkpoint": ({}, 422, "body", "required field `checkpoint`"),
    "no address": ({"checkpoint": {}}, 400, "checkpoint", "not one address"),
    "two addresses": ({"checkpoint": {"path": "x", "hub": "y"}}, 400, "checkpoint", "not one address"),
    "the hub": ({"checkpoint": {"hub": "org/name"}}, 422, "org/name", "hub sources are not enabled"),
    "unknown field": ({"tensor_parallel": 2}, 422, "body", "unknown field `tensor_parallel`"),
    "unknown field inside": ({"checkpoint": {"path": "x", "revision": "main"}}, 422, "checkpoint", "unknown field `revision`"),
    "text for a number": ({"tp": "2"}, 422, "tp", "Expected `int`, got `str`"),
    "a fraction": ({"tp": 1.5}, 422, "tp", "Expected `int`, got `float`"),
    "true for a number": ({"tp": True}, 422, "tp", "Expected `int`, got `bool`"),
    "no ranks": ({"tp": 0}, 422, "tp", "Expected `int` >= 1"),
    "too many ranks": ({"tp": 1024, "pp": 1024}, 422, "--tp, --pp", "ranks"),
    "negative": ({"context": -1}, 422, "context", "Expected `int` >= 1"),
    "huge": ({"context": 10**300}, 422, "context", "Expected `int` <= 9007199254740991"),
    "engine": ({"engine": "llama.cpp"}, 422, "engine", "Invalid enum value 'llama.cpp'"),
    "GPU": ({"gpu": "tpu"}, 422, "--gpu", "GPU is not in the table"),
    "size": ({"supply": "94"}, 422, "--supply", "not a size"),
    "two supplies": ({"supply": "1GiB", "free": "all"}, 422, "--supply, --free", "both given"),
    "profile": ({"profile": "fast"}, 422, "--profile", "not a profile"),
    "KV dtype": ({"engine": "vllm", "kv_dtype": "int3", "context": 64}, 422, "--kv-dtype", "no KV dtype"),
    "record": ({"estimator": "credit", "calibration": "/etc/passwd"}, 422, "/etc/passwd", "no such calibration record"),
    "calibration of a path": ({"estimator": "credit", "calibration": "x.json"}, 422, "x.json", "no such calibration record"),
    "credit of exact": ({"credit_permille": 3}, 422, "--credit-permille, --calibration, --device-bytes", "not used by the exact estimator"),
    "topology": ({"tp": 3}, 422, "--tp 3 --engine split", "tensor-parallel sizes that work: 1, 2, 4"),
    "family": ({"checkpoint": {"config": {"model_type": "nobody"}}}, 422, "config", "no recipe for this model family"),
    "config of the wrong kind": ({"checkpoint": {"config": [1]}}, 422, "checkpoint.config", "Expected `str | object`"),
    "text that is no config": ({"checkpoint": {"config": "{"}}, 422, "config", "not JSON"),
    "text that lies twice": ({"checkpoint": {"config": '{"model_type": "llama", "model_type": "opt"}'}}, 422, "config", "duplicate key model_type"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "status", "where", "what"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_field_or_option(client, place, more, status, where, what):
    body = {"checkpoint": {"path": str(place / "models" / "small")}, **more} if more else {}
    answer = client.post("/api/plan", json=body)
    assert (answer.status_code, problems(answer)[0]["where"]) == (status, where)
    assert what in problems(answer)[0]["what"]


BODIES = {
    "empty": (b"", 400),
    "no JSON": (b"checkpoint=x", 400),
    "an array": (b"[]", 400),
    "a number": (b"1", 400),
    "null": (b"null", 400),
    "two values": (b"{} {}", 400),
    "not UTF-8": (b'{"checkpoint": "\xff"}', 400),
    "UTF-16": ('{"checkpoint": {}}'.encode("utf-16"), 400),
    "a duplicate key": (b'{"tp": 1, "tp": 2, "checkpoint": {"path": "x"}}', 400),
    "a duplicate key inside": (b'{"checkpoint": {"path": "x", "path": "y"}}', 400),
    "NaN": (b'{"checkpoint": {"config": {"a": NaN}}}', 400),
    "Infinity": (b'{"context": -Infinity}', 400),
    "out of range": (b'{"context": 1e999}', 400),
    "a long number": (b'{"context": ' + b"9" * 5000 + b"}", 400),
    "deep": (b'{"checkpoint": {"config": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}}", 400),
    "very deep": (b"[" * 200_000, 400),
    "many objects": (b'{"checkpoint": {"config": {"a": [' + b"{}," * 200_000 + b"{}]}}}", 400),
    "half a surrogate": (b'{"checkpoint": {"path": "\\ud800"}}', 400),
    "minus zero": (b'{"checkpoint": {"path": "x"}, "context": -0}', 422),
    "a large config": (b'{"checkpoint": {"config": "' + b" " * (9 << 20) + b'"}}', 422),
    "layers": (json.dumps({"checkpoint": {"config": {**SMALL, "num_hidden_layers": 10**9}}}).encode(), 422),
    "sizes": (json.dumps({"checkpoint": {"config": {**SMALL, "vocab_size": 10**300}}}).encode(), 422),
}  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BODIES.values(), ids=BODIES)
def test_a_hostile_body_is_refused(client, body, status):
    answer = client.post("/api/plan", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, bool(problems(answer))) == (status, True)
    assert "Traceback" not in answer.text


def test_names_from_input_stay_text(client):
    for text in XSS:
        body = {"checkpoint": {"config": {**SMALL, "model_type": text, "architectures": [text]}, "name": text}}
        refused = client.post("/api/plan", json=body)
        named = client.post("/api/plan", json={"checkpoint": {"config": SMALL, "name": text[:200]}})
        assert (refused.status_code, named.status_code) == (422, 200)
        assert named.json()["checkpoint"]["name"] == one_line(text[:200])
        for answer in (refused, named):
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
        page = client.post("/api/report", json={"checkpoint": {"config": SMALL, "name": text[:200]}})
        assert "<" not in text or text[:200] not in page.text
        assert re.fullmatch(r'attachment; filename="[\w.-]+\.html"', page.headers["content-disposition"], re.ASCII)


BODIES_OF_COMMANDS = {"plan": PlanBody, "fit": FitBody, "flags": FlagsBody}
OF_THE_TERMINAL = {"offline", "source", "as_json", "html", "against", "force", "plain", "typed"}
OF_HTTP = {"checkpoint", "suggestions", "growth"}


@pytest.mark.parametrize("name", BODIES_OF_COMMANDS)
def test_every_option_of_a_command_is_a_field_and_every_field_an_option(name):
    options = {parameter.name for parameter in get_command(command).commands[name].params} - OF_THE_TERMINAL
    assert options == set(BODIES_OF_COMMANDS[name].__struct_fields__) - OF_HTTP


def test_regions_hold_the_plan_of_every_point(client):
    document = client.post("/api/regions", json={**EXAMPLES["regions"], "steps": 2}).json()
    assert document["contexts"][:4] == [1024, 1536, 2048, 3072]
    assert (document["contexts"][-1], document["concurrencies"]) == (131072, [1, 2, 4, 8, 16])
    for row, column in ((0, 0), (2, 5), (4, len(document["contexts"]) - 1)):
        requests, tokens = document["concurrencies"][row], document["contexts"][column]
        plan = client.post(
            "/api/plan", json={**EXAMPLES["plan"], "profile": f"c{requests}-p4096", "context": tokens}
        ).json()
        rank = plan["ranks"][plan["binding_rank"]]
        expected = {"fits": plan["fits"], "spare_bytes": rank["spare_bytes"], "cache_bytes": rank["cache_bytes"]}
        assert document["cells"][row][column] == expected


def test_regions_need_a_supply_and_an_end(client):
    no_supply = client.post("/api/regions", json={**EXAMPLES["regions"], "gpu": None})
    assert problems(no_supply)[0]["where"] == "--gpu, --supply"
    endless = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    body = {**EXAMPLES["regions"], "checkpoint": {"config": endless}, "context": None}
    assert problems(client.post("/api/regions", json=body))[0]["where"] == "most_context"
    bounded = client.post("/api/regions", json={**body, "most_context": 512}).json()
    assert bounded["contexts"] == [512]


def test_description_is_served_and_whole(client):
    served = client.get("/api/openapi.json").json()
    assert served == openapi_document()
    text = json.dumps(served)
    for reference in text.split('"$ref": "#/components/schemas/')[1:]:
        assert reference.partition('"')[0] in served["components"]["schemas"]
    for route in API:
        operation = served["paths"][route.path][route.method.lower()]
        expected = {200, 403, 500, 503, 504} | ({400, 404, 408, 413, 415, 422} if route.method == "POST" else set())
        assert set(map(int, operation["responses"])) == expected
        if route.method == "POST":
            (example,) = operation["requestBody"]["content"]["application/json"]["examples"].values()
            assert example["value"] == EXAMPLES[route.name]


def test_what_is_not_there_and_what_is_not_allowed(client):
    assert (client.get("/api/nothing").status_code, client.get("/api/plan").status_code) == (404, 405)
    assert problems(client.get("/api/nothing"))[0]["what"] == "Not Found"
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404
    assert client.delete("/api/gpus").status_code == 405
