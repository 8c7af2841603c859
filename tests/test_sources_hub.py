"""Repositories of the hub, through its own client, against a hub on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import snapshot_download

from samples import PATIENCE, header_bytes_in, write_shards
from servers import COMMIT, Hub, Seen, hub, reply, siblings, unknown_hosts
from tonnage.api import open_checkpoint, read_config
from tonnage.errors import CheckpointError, SourceError
from tonnage.sources.addresses import open_source
from tonnage.sources.limits import Limits
from tonnage.synth.io import RehearsalOptions, write_rehearsal

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
LIMITS = Limits(
    attempts=3, connect_seconds=PATIENCE, answer_seconds=PATIENCE, total_seconds=PATIENCE, pause_seconds=0.01
)
OFFLINE = Limits(offline=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_shards(tmp_path_factory.mktemp("hub") / "name")
    (directory / "original").mkdir()
    (directory / "original" / "consolidated.safetensors").write_bytes(b"not ours")
    return directory


@pytest.fixture
def there(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(checkpoint) as running:
        use(running, tmp_path, monkeypatch)
        yield running


def use(running: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client in this process, and commands, talk to a hub, with caches of their own."""
    settings = {"HF_ENDPOINT": running.api.url, "HF_HOME": home / "hf", "XDG_CACHE_HOME": home / "cache"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    for name in ("http_proxy", "HTTP_PROXY", "HF_TOKEN", "TONNAGE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", running.api.url)
    template = running.api.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "hf" / "token"))


def refusal(address: str = "hf:org/name", limits: Limits = LIMITS) -> str:
    with pytest.raises(SourceError) as refused:
        open_checkpoint(address, limits=limits)
    assert len(refused.value.problems) == 1
    return str(refused.value)


def test_a_plan_is_that_of_the_directory_pinned_to_the_commit(there: Hub, checkpoint: Path) -> None:
    found, here = open_checkpoint("hf:org/name", limits=LIMITS), open_checkpoint(checkpoint)
    assert (found.name, found.digest, found.assignment.notes) == (here.name, here.digest, here.assignment.notes)
    assert found.source.address == f"hf:org/name@{COMMIT}"
    small = sum(path.stat().st_size for path in checkpoint.glob("*.json"))
    bodies = sum(seen.nbytes for seen in there.store.seen + there.api.of(f"/resolve/{COMMIT}/"))
    assert header_bytes_in(checkpoint) + small <= bodies <= header_bytes_in(checkpoint) + small + 3 * (8 + 5)
    assert {seen.path.split("/")[4] for seen in there.api.of("resolve")} == {COMMIT}
    assert (
        found.source.transfer.nbytes
        == there.api.nbytes - sum(s.nbytes for s in there.api.of("harness")) + there.store.nbytes
    )


@pytest.mark.usefixtures("there")
def test_facts_are_those_of_the_hub(checkpoint: Path) -> None:
    source = open_source("hf:org/name@main", limits=LIMITS)
    facts = source.list_files()[SHARD]
    assert (facts.nbytes, facts.sha256) == ((checkpoint / SHARD).stat().st_size, facts.version.removeprefix("oid "))
    assert source.has("original")
    assert "consolidated.safetensors" not in source.names()
    buffer = bytearray(900)
    with source.opened(SHARD) as file:
        file.read_into(memoryview(buffer), 100)
    assert bytes(buffer) == (checkpoint / SHARD).read_bytes()[100:1000]


def test_a_commit_that_is_kept_is_not_asked_for_again(there: Hub) -> None:
    first = open_checkpoint("hf:org/name", limits=LIMITS)
    for address, limits, asked in (
        (first.source.address, LIMITS, 0), ("hf:org/name", LIMITS, 1), ("hf:org/name", OFFLINE, 0),
    ):  # fmt: skip
        there.api.seen.clear()
        again = open_checkpoint(address, limits=limits)
        assert (again.digest, again.source.address) == (first.digest, first.source.address)
        assert len(there.api.of("/api/models")) == len([s for s in there.api.seen if "harness" not in s.path]) == asked
        assert again.source.transfer.kept_bytes > 0


@pytest.mark.parametrize(
    ("number", "asked", "line"),
    [
        (socket.EAI_NONAME, 1, "no such host, or no network; expected a network, or TONNAGE_OFFLINE=1 and "),
        (socket.EAI_AGAIN, 3, "given up after 3 attempts; expected an answer of http://127.0.0.1:"),
    ],
)
@pytest.mark.usefixtures("there")
def test_a_hub_whose_name_is_not_known_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, number: int, asked: int, line: str
) -> None:
    names = unknown_hosts(monkeypatch, number)
    assert refusal().startswith(f"hf:org/name@main: {line}")
    assert names == ["127.0.0.1"] * asked


def test_a_name_without_an_organisation_is_asked_for(there: Hub) -> None:
    assert refusal("hf:gpt2").startswith("hf:gpt2@main: no such repository, or a private one")
    assert [seen.path for seen in there.api.of("/api/models")] == ["/api/models/gpt2/revision/main?blobs=true"]


def test_offline_nothing_is_asked_for_and_that_is_said(there: Hub) -> None:
    line = "hf:org/name: offline, and not kept on this machine; expected what an earlier run fetched"
    assert refusal(limits=OFFLINE).startswith(line)
    assert there.api.seen == []


@pytest.mark.parametrize("offline", [False, True])
def test_a_snapshot_in_the_cache_of_the_hub_is_read_in_place(there: Hub, checkpoint: Path, offline: bool) -> None:
    snapshot_download("org/name", cache_dir=huggingface_hub.constants.HF_HUB_CACHE, endpoint=there.api.url)
    there.api.seen.clear()
    there.store.seen.clear()
    found = open_checkpoint("hf:org/name", limits=OFFLINE if offline else LIMITS)
    assert found.source.parallel == 1
    assert (found.name, found.source.address) == ("name", f"hf:org/name@{COMMIT}")
    assert found.digest == open_checkpoint(checkpoint).digest
    assert [s.path for s in there.api.of("resolve")] == there.store.seen == []


def test_a_snapshot_that_is_not_complete_is_left_alone(there: Hub, checkpoint: Path) -> None:
    cache = huggingface_hub.constants.HF_HUB_CACHE
    snapshot_download("org/name", cache_dir=cache, endpoint=there.api.url, allow_patterns=["*.json", "*-00001-*"])
    found = open_checkpoint("hf:org/name", limits=LIMITS)
    assert found.source.parallel > 1
    assert found.digest == open_checkpoint(checkpoint).digest


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    there: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.token = "hf_secret"  # noqa: S105 - of this test
    without = refusal()
    assert without.startswith(
        "hf:org/name@main: no such repository, or a private one; expected a repository of that name, or a token"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "no such repository, or a private one" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    there.api.seen.clear()
    assert open_checkpoint("hf:org/name", limits=LIMITS).digest == open_checkpoint(checkpoint).digest
    assert {seen.headers.get("authorization") for seen in there.api.of("org/name")} == {"Bearer hf_secret"}
    assert {seen.headers.get("authorization") for seen in there.store.seen} == {None}


def test_a_token_is_not_sent_in_the_clear(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.example.com")
    assert refusal().startswith("http://hub.example.com: http without TLS")
    assert there.api.seen == []


def api(word: str, status: int, body: bytes = b"", times: int = 10**9, **headers: str) -> Any:
    left = [times]

    def trick(handler: Any, seen: Seen) -> bool:
        if word not in seen.path or not left[0]:
            return False
        left[0] -= 1
        reply(handler, seen, status, body, **headers)
        return True

    return trick


def info(**changes: Any) -> bytes:
    fields = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 2, "blobId": "a"}]}
    return json.dumps(fields | changes).encode()


MODELS = "/api/models"
REFUSED = {
    "gated": (api(MODELS, 403, X_Error_Code="GatedRepo", X_Error_Message="Access to it is restricted."), "gated; expected its terms accepted on the hub"),
    "no revision": (api(MODELS, 404, X_Error_Code="RevisionNotFound"), "no such revision; expected a branch, tag or commit"),
    "refused": (api(MODELS, 400, b'{"error":"no\\u001b[2J"}'), "refused by the hub; expected its files; found status 400"),
    "down": (api(MODELS, 503), "given up after 3 attempts; expected an answer of http://127.0.0.1:"),
    "asked to wait": (api(MODELS, 429, Retry_After="3600"), "given up after 1 attempts"),
    "no JSON": (api(MODELS, 200, b"<html>"), "not the answer of a hub; expected what is in a repository"),
    "a list": (api(MODELS, 200, b"[]"), "not the answer of a hub"),
    "no commit": (api(MODELS, 200, info(sha="../../main")), "no commit; expected 40 hexadecimal digits; found ../../main"),
    "no size": (api(MODELS, 200, info(siblings=[{"rfilename": "config.json", "size": None, "blobId": "a"}])), "no size of config.json"),
    "size below nothing": (api(MODELS, 200, info(siblings=[{"rfilename": "config.json", "size": -1, "blobId": "a"}])), "no size of config.json; expected bytes; found -1"),
    **{f"the digest {digest!r}": (api(MODELS, 200, info(siblings=[{"rfilename": "a", "size": 9, "blobId": "a", "lfs": {"size": 9, "sha256": digest, "pointerSize": 1}}])), f"no digest of a; expected hexadecimal digits, 64 of a large file; found {digest!r}") for digest in (None, 5, "ab", "A" * 64, "\ud800", "\x1b[2J")},
    "no version": (api(MODELS, 200, info(siblings=[{"rfilename": "a", "size": 9, "blobId": "\ud800"}])), "no digest of a; expected hexadecimal digits, 64 of a large file; found '"),
    "no name": (api(MODELS, 200, info(siblings=[{"rfilename": 5, "size": 9, "blobId": "a"}])), "no name of a file; expected text; found 5"),
    "files without end": (api(MODELS, 200, info(siblings=[{"rfilename": f"f{n}", "size": 1, "blobId": "a"} for n in range(50_001)])), "files; expected at most 50000; found 50001"),
    "encoded": (api(MODELS, 200, b"\x1f\x8b", Content_Encoding="gzip"), "encoded, which nobody asked for; expected identity; found gzip"),
}  # fmt: skip


@pytest.mark.parametrize(("trick", "line"), REFUSED.values(), ids=REFUSED)
def test_a_hub_that_answers_wrong_is_refused_in_one_line(there: Hub, trick: Any, line: str) -> None:
    there.api.trick = trick
    found = refusal()
    assert found.startswith(f"hf:org/name@main: {line}")
    assert found.isprintable()


@pytest.mark.parametrize(
    "name", ["tokenizer\ud800.json", "tokenizer\x1b[2J.json", "tokenizer\\..\\x.json", "t" * 300, "", ".."]
)
def test_names_that_no_file_may_have_are_left_out(there: Hub, checkpoint: Path, name: str) -> None:
    listed = [*siblings(checkpoint, 64 << 10, blobs=True), {"rfilename": name, "size": 9, "blobId": "a"}]
    there.api.trick = api(MODELS, 200, info(siblings=listed))
    source = open_source("hf:org/name", limits=LIMITS)
    assert set(source.list_files()) == {path.name for path in checkpoint.iterdir() if path.is_file()}


@pytest.mark.parametrize("token", ["t\u20acsecret", "t\x01secret", "t\rsecret"])
@pytest.mark.usefixtures("there")
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    pinned = open_source("hf:org/name", limits=LIMITS).address
    monkeypatch.setattr("tonnage.sources.hub.get_token", lambda: token)
    for address in ("hf:org/name", pinned):
        assert refusal(address) == "the token of the hub: cannot be sent; expected letters and digits"


def test_an_endpoint_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@127.0.0.1:port")
    assert refusal().startswith("http://***@127.0.0.1:port: not a URL")


def test_an_answer_without_end_is_cut_off(there: Hub) -> None:
    def endless(handler: Any, seen: Seen) -> bool:
        if MODELS not in seen.path:
            return False
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        for _ in range(200):
            seen.nbytes += 1 << 20
            handler.wfile.write(piece)
        return True

    there.api.trick = endless
    assert "an answer without end; expected at most 67108864 bytes" in refusal()
    assert there.api.nbytes < 80 << 20


def test_a_hub_that_is_busy_is_asked_again(there: Hub, checkpoint: Path) -> None:
    there.api.trick = api("/api/models", 503, times=2)
    there.store.trick = api("/lfs/", 429, times=2, Retry_After="0")
    assert open_checkpoint("hf:org/name", limits=LIMITS).digest == open_checkpoint(checkpoint).digest


def test_a_place_that_has_expired_is_asked_for_again(there: Hub, checkpoint: Path) -> None:
    source = open_source("hf:org/name", limits=LIMITS)
    with source.opened(SHARD) as file:
        file.read(8, 0)
        there.store.trick = api("/lfs/", 403, b"expired", times=1)
        assert file.read(300, 0) == (checkpoint / SHARD).read_bytes()[:300]
    assert len(there.api.of("resolve")) == 2


def test_a_store_with_another_size_is_refused(there: Hub) -> None:
    there.store.trick = api(SHARD, 206, bytes(8), Content_Range="bytes 0-7/100")
    found = refusal()
    assert found.startswith(f"hf:org/name@{COMMIT}/{SHARD}: another size than stated; expected ")
    assert found.endswith("found 100 bytes")
    assert "secret" not in found


def test_what_the_hub_says_of_a_refusal_is_shown(there: Hub) -> None:
    there.api.trick = api("resolve", 403, X_Error_Message="Access to model org/name is restricted\x1b[2J")
    assert "not allowed; expected a token or key that may read it; found status 403: Access to model" in refusal()
    assert refusal().isprintable()


def test_names_that_lead_elsewhere_are_not_followed(there: Hub) -> None:
    one = {"size": 9, "blobId": "a"}
    names = ["config.json", "../x.safetensors", "a\nb.safetensors", "..", "sub/y.safetensors"]
    there.api.trick = api(MODELS, 200, info(siblings=[{"rfilename": name, **one} for name in names]))
    source = open_source("hf:org/name", limits=LIMITS)
    assert set(source.list_files()) == {"config.json"}
    assert source.names() == ("config.json", "sub")
    with pytest.raises(CheckpointError, match="cannot be read; expected a file; found no such file"):
        source.opened("../x.safetensors").__enter__()


def test_a_shard_the_index_names_and_nobody_has_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_shards(tmp_path / "name")
    (directory / SHARD).unlink()
    with pytest.raises(CheckpointError) as here:
        open_checkpoint(directory)
    with hub(directory) as running:
        use(running, tmp_path, monkeypatch)
        with pytest.raises(CheckpointError) as remote:
            open_checkpoint("hf:org/name", limits=LIMITS)
    assert str(remote.value) == str(here.value)


def test_a_package_is_no_checkpoint_there_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "package"
    (directory / "weights").mkdir(parents=True)
    for name in ("config.json", "manifest.json", "model.sig", "weights/0.safetensors"):
        (directory / name).write_text("{}")
    with hub(directory) as running:
        use(running, tmp_path, monkeypatch)
        with pytest.raises(CheckpointError, match=f"hf:org/name@{COMMIT}: a package, cut into ranks"):
            open_checkpoint("hf:org/name", limits=LIMITS)


def test_a_config_alone_is_planned_from_its_recipe(there: Hub, checkpoint: Path) -> None:
    found = open_checkpoint("hf:org/name@main/config.json", limits=LIMITS)
    assert (found.headers, found.digest) == (None, open_checkpoint(checkpoint / "config.json").digest)
    assert {seen.path.rpartition("/")[2] for seen in there.api.of("resolve")} <= {"config.json", "hf_quant_config.json"}
    assert there.store.seen == []


@pytest.mark.parametrize(
    "address",
    ["hf:", "hf:a/b/c", "hf:../x", "hf:org/name@", "hf:org/name@../x", "hf:org//name", "hf:org/na me", "hf:-x"],
)
def test_what_is_no_address_on_the_hub_is_refused_before_it_is_asked(there: Hub, address: str) -> None:
    assert "not an address on the hub; expected hf:organisation/name[@revision]" in refusal(address)
    assert there.api.seen == []


# ---- the command ---------------------------------------------------------------------------------------------------


def run(*words: object, **settings: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("tonnage")
    environment = dict(os.environ) | settings
    return subprocess.run(
        [command, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment
    )


@pytest.mark.usefixtures("there")
def test_every_command_that_plans_takes_an_address(checkpoint: Path) -> None:
    plan = run("plan", "hf:org/name", "--tp", 2, "--draft", "hf:org/name", "--draft-method", "draft-model", "--json")
    assert plan.returncode == 0, plan.stderr
    document = json.loads(plan.stdout)
    first, second = plan.stderr.splitlines()
    assert first.startswith(f"hf:org/name@{COMMIT}: ")
    assert first.endswith(" s")
    assert second.endswith("bytes kept of an earlier time")
    transfer = document.pop("transfer")
    assert set(transfer) == {"bytes", "requests", "kept_bytes", "seconds", "sources"}
    assert transfer["sources"] == [f"hf:org/name@{COMMIT}"] * 2
    assert transfer["requests"] >= 3
    local = run("plan", checkpoint, "--tp", 2, "--draft", checkpoint, "--draft-method", "draft-model", "--json")
    assert (document, local.stderr) == (json.loads(local.stdout), "")

    for words in (("inspect",), ("fit", "--gpu", "h100", "--tp", 1, "--profile", "c1-p512", "--context", 512)):
        done = run(words[0], "hf:org/name", *words[1:], "--offline", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["transfer"]["bytes"] == 0
    serve = run(
        "flags",
        "hf:org/name",
        "--engine",
        "vllm",
        "--gpu",
        "h100",
        "--profile",
        "c1-p512",
        "--context",
        512,
        "--offline",
    )
    assert serve.returncode == 0, serve.stderr
    assert "vllm serve org/name " in serve.stdout


def test_offline_by_option(there: Hub) -> None:
    done = run("inspect", "hf:org/name", "--offline")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tonnage: hf:org/name: offline, and not kept on this machine; expected ")
    assert there.api.seen == []


@pytest.mark.parametrize("name", ["TONNAGE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_by_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for value, offline in (("1", True), ("TRUE", True), ("0", False), ("", False)):
        monkeypatch.setenv(name, value)
        assert Limits.of_environment().offline is offline


def test_a_refusal_is_one_line_of_the_command(there: Hub) -> None:
    there.api.trick = api("resolve", 403)
    done = run("plan", "hf:org/name", "--tp", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tonnage: hf:org/name@{COMMIT}/config.json: not allowed; expected a token")
    assert done.stderr.count("\n") == 1


def test_a_plan_of_full_scale_fetches_headers_and_no_weights(
    tmp_path: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.5 TB of Kimi-K3 in 96 files, with an index nearly as large as all headers."""
    directory = tmp_path / "Kimi-K3"
    write_rehearsal(read_config(configs / "moonshotai__Kimi-K3.json"), directory, RehearsalOptions())
    headers = header_bytes_in(directory)
    with hub(directory, large=1 << 20) as running:
        use(running, tmp_path, monkeypatch)
        done = run("plan", "hf:org/name", "--tp", 8, "--engine", "vllm", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["ranks"][0]["weights_bytes"] == 205_955_238_384
        assert headers < running.nbytes < 1.2 * headers
        transfer = document["transfer"]
        assert transfer["bytes"] == running.nbytes - sum(seen.nbytes for seen in running.api.of("harness"))
        line = f"hf:org/name@{COMMIT}: {transfer['bytes']:,} bytes in {transfer['requests']} requests, "
        assert done.stderr.splitlines()[-1] == f"{line}{transfer['seconds']:.1f} s"
        for seen in running.store.of(".safetensors?"):
            path = directory / seen.path.removeprefix("/lfs/").partition("?")[0]
            with path.open("rb") as file:
                assert seen.range[1] <= 8 + int.from_bytes(file.read(8), "little"), seen
