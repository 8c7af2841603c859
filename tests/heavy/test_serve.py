"""``tonnage serve`` starts a real engine on this CPU, which answers over HTTP as the plug-in does without a server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, TOKENS
from smollm2 import Weights

from packages import run
from samples import PATIENCE, kept_port, write_key

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
TONNAGE = Path(sys.executable).with_name("tonnage")
BF16_BYTES = 269_030_016
MXFP8_BYTES = 166_179_456
CACHE_SCALES = 540
"""What vLLM adds to the attention layers of a quantised model."""
CAPITAL = "The capital of France is"
HOSTILE = "torch.py", "vllm.py", "sitecustomize.py", "modeling_evil.py"


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A package with its tokenizer, and its keys."""

    folder: Path
    private: Path
    public: Path

    def package(self, *words: object) -> Path:
        """Return a package of SmolLM2 for one rank."""
        folder = self.folder / "-".join(["package", *(str(word).strip("-") for word in words)])
        if not folder.exists():
            run("prepare", self.folder / "smollm2", "-o", folder, "--workers", 1, "--engine", "vllm", *words)
            run("export", folder, "--key", self.private, "--date", "2026-01-31")
        return folder

    def words(self, package: Path, port: int, *words: object) -> list[str]:
        usual = ("--key", self.public, "--profile", "c8-p512", "--context", "256", "--eager", "--port", port)
        return list(map(str, (TONNAGE, "serve", package, *usual, *words)))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tmp_path_factory.mktemp("serve")
    private, public = write_key(folder)
    weights, source = Weights(), folder / "smollm2"
    source.mkdir()
    weights.write_checkpoint(source)
    weights.write_tokenizer(source)
    return Shelf(folder=folder, private=private, public=public)


def environment() -> dict[str, str]:
    """Return that of a user; what stands in for missing libraries is found."""
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    paths = [str(HERE / "stubs"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(kw_only=True)
class Server:
    """One that runs, and what it wrote."""

    port: int
    run: Path
    evil: Path
    process: subprocess.Popen[str]
    said: list[str]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self.raw(method, path, body))

    def raw(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        assert answer.status == 200, text
        return text

    def complete(self, prompt: str | list[int], **options: Any) -> Any:
        asked = {"model": "llama-tp1-20260131", "prompt": prompt, "temperature": 0, **options}
        return self.ask("POST", "/v1/completions", asked)["choices"][0]


@pytest.fixture(scope="module")
def server(shelf: Shelf) -> Iterator[Server]:
    """A server that was started in a directory full of modules nobody should import."""
    evil = shelf.folder / "evil"
    evil.mkdir()
    for name in HOSTILE:
        (evil / name).write_text(f"open({str(evil / 'executed')!r}, 'a').write({name!r})\n")
    folder = shelf.folder / "run"
    with kept_port() as port, subprocess.Popen(
        shelf.words(shelf.package(), port, "--run", folder),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=evil, env=environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("serving "):
                    break
            assert process.poll() is None, "".join(said)
            yield Server(port=port, run=folder, evil=evil, process=process, said=said)
        finally:
            process.terminate()


def test_the_package_answers_under_its_name(server: Server):
    (model,) = server.ask("GET", "/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("llama-tp1-20260131", 256)
    assert server.complete(CAPITAL, max_tokens=2)["text"] == " Paris."


def test_a_stream_says_what_an_answer_says(server: Server):
    whole = server.complete(CAPITAL, max_tokens=16)["text"]
    asked = {"model": "llama-tp1-20260131", "prompt": CAPITAL, "temperature": 0, "max_tokens": 16, "stream": True}
    events = [line[len("data: ") :] for line in server.raw("POST", "/v1/completions", asked).splitlines() if line]

    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert len(parts) > 8
    assert "".join(parts) == whole


def test_tokens_over_http_are_those_of_the_plug_in_without_a_server(server: Server, shelf: Shelf):
    options = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    over_http = [server.complete(prompt, **options)["token_ids"] for prompt in PROMPTS]
    output = shelf.folder / "tokens.json"
    jobs = [{"model": str(shelf.package()), "load_format": "tonnage"}]
    own = {**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    words = [sys.executable, HERE / "engines.py", output, *map(json.dumps, jobs)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=own)

    assert done.returncode == 0, done.stderr[-4000:]
    assert over_http == json.loads(output.read_text())[0]["tokens"]
    assert len({tuple(tokens) for tokens in over_http}) == len(PROMPTS)


def test_it_ends_with_a_record_and_a_table_and_nothing_left_running(server: Server):
    """The last test of the server: it is ended."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.stdout is not None
    rest = server.process.stdout.read()
    assert server.process.wait(PATIENCE) == 0, rest

    table, record = "".join(server.said), json.loads((server.run / "observation.json").read_text())
    assert "within every bound" in table
    assert table.count(f"{BF16_BYTES:,}") == 3  # read, held, and beside the plan
    assert (record["weights_bytes_per_rank"], record["engine_version"], record["device"]) == (
        BF16_BYTES,
        "0.32.0",
        "cpu",
    )
    assert record["kv_tokens"] >= 8 * 256
    assert "verified" in (server.run / "engine.log").read_text()
    assert not (server.evil / "executed").exists()
    assert not [folder for folder in Path("/proc").glob("[0-9]*") if is_of(folder, str(server.port))]


def is_of(folder: Path, word: str) -> bool:
    """Whether a process was started with a word."""
    try:
        return word in (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return False


def test_a_converted_package_holds_what_was_planned(shelf: Shelf, port: int):
    words = shelf.words(shelf.package("--convert", "mxfp8"), port, "--check", "--json", "--run", shelf.folder / "mx")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = found["observation"]["figures"]
    assert figures["weights_read"]["nbytes"] == MXFP8_BYTES
    assert figures["weights_held"]["nbytes"] == MXFP8_BYTES + CACHE_SCALES
    (row,) = [row for row in found["observation"]["comparisons"] if row["component"] == "weights"]
    assert not row["exceeds"]
    assert row["planned_nbytes"] >= BF16_BYTES
    assert "EMULATION of MXFP8" in (shelf.folder / "mx" / "engine.log").read_text()


def test_refused_before_the_engine_starts(shelf: Shelf, port: int):
    small = subprocess.run(
        shelf.words(shelf.package(), port, "--supply", "100MiB"), capture_output=True, text=True, check=False
    )
    assert (small.returncode, "REFUSED: rank 0 needs" in small.stdout, "starting" in small.stderr) == (3, True, False)

    tampered = Path(shutil.copytree(shelf.package(), shelf.folder / "tampered"))
    weights = next((tampered / "weights" / "tp1" / "rank-0").glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    done = subprocess.run(shelf.words(tampered, port), capture_output=True, text=True, check=False)
    assert (done.returncode, weights.name in done.stderr, "starting" in done.stderr) == (4, True, False)
