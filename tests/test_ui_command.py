"""``tonnage ui`` in processes of its own: it says where it is, ends cleanly, and refuses what it must not do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import httpx
import pytest

from samples import LLAMA, served
from tonnage.errors import UnitError
from tonnage.ui.serve import is_loopback, listen, served_hosts

ROOT = Path(__file__).resolve().parent.parent
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what must not be served without a word
CURL = [
    block
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    if "curl " in block
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    home = tmp_path_factory.mktemp("served")
    (home / "models" / "small").mkdir(parents=True)
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
    (home / "models" / "small" / "config.json").write_text(json.dumps(config))
    return home


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_every_worker_and_without_a_word(place, number):
    with served(place, "models") as (address, process):
        listed = httpx.get(f"{address}api/checkpoints").json()["checkpoints"]
        assert listed == [{"path": "models/small", "kind": "directory", "weights": False}]
        workers = workers_of(process)
        assert len(workers) == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_workers_end_with_a_server_that_is_killed(place):
    with served(place, "models") as (_, process):
        (worker,) = workers_of(process)
        process.kill()
        process.wait()
        with suppress(ProcessLookupError), DefaultSelector() as ended:
            watched = os.pidfd_open(worker)
            ended.register(watched, EVENT_READ)
            assert ended.select(timeout=20)
            os.close(watched)


def test_a_port_in_use_is_one_line(place, tonnage):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tonnage("ui", "--port", port, "--no-browser", cwd=place)
    line = f"tonnage: --port: cannot be used; expected another one, or 0 for any that is free; found {port}: Address already in use\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


REFUSED = {
    "no directory": (("nowhere",), "nowhere: cannot be served; expected a directory with a printable name"),
    "a file": (("models/small/config.json",), "models/small/config.json: cannot be served; expected a directory"),
    "open to others": (("--host", EVERYWHERE), "--host: others can reach it there; expected --allow-host NAME"),
    "no host": (("--host", "no.such.host.invalid", "--allow-host", "x"), "--host: no address; found no.such.host.invalid"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "line"), REFUSED.values(), ids=REFUSED)
def test_what_it_must_not_serve_is_one_line(place, tonnage, words, line):
    done = tonnage("ui", *words, "--port", "0", "--no-browser", cwd=place)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert line in done.stderr


def test_where_others_reach_it_a_warning_is_printed(place):
    with served(place, "models", "--host", EVERYWHERE, "--allow-host", "planner.example") as (address, process):
        port = address.rsplit(":", 1)[1].strip("/")
        for host, status in (("planner.example", 200), ("evil.example", 403)):
            answer = httpx.get(f"http://127.0.0.1:{port}/api/gpus", headers={"Host": host})
            assert answer.status_code == status
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert err.startswith("warning: whoever reaches http://0.0.0.0:")


def test_names_it_answers_to():
    assert served_hosts("127.0.0.1", ()) == ("127.0.0.1", "localhost", "[::1]")
    assert served_hosts(EVERYWHERE, ("a",))[-1] == "a"
    assert [is_loopback(host) for host in ("::1", "127.9.9.9", "::", "10.0.0.1", "example")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_host_that_is_no_address_is_refused():
    with pytest.raises(UnitError, match="--host: no address"):
        listen("a" * 300, 0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_of_the_documentation_answer(place):
    assert len(CURL) >= 6
    with served(place, "models") as (address, process):
        for block in CURL:
            script = block.replace("http://127.0.0.1:8765/", address)
            done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (script, done.stdout)
            assert json.loads(done.stdout)["schema"].startswith("tonnage.")
        process.terminate()
        process.communicate(timeout=20)


def test_workers_that_cannot_start_end_it_with_their_traceback(place):
    without = "import sys; from tonnage.ui import pool; pool.sys = type('', (), {'executable': 'false'}); "
    command = [
        sys.executable,
        "-c",
        f"{without}from tonnage.cli import main; main()",
        "ui",
        "--port",
        "0",
        "--no-browser",
    ]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "WorkerEndedError" in done.stderr
