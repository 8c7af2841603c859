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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import httpx2
import pytest

from samples import LLAMA, PATIENCE, ask, served, until
from tonnage.errors import UnitError
from tonnage.ui.serve import address_of, is_loopback, listen, served_hosts

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(find_spec("plotly").origin).parent / "package_data" / "plotly.min.js"
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


def endpoint(address: str) -> tuple[str, int]:
    return "127.0.0.1", int(address.rsplit(":", 1)[1].strip("/"))


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def sockets_of(process: subprocess.Popen[str]) -> int:
    found = 0
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += link.readlink().name.startswith("socket:")
    return found


def test_somebody_at_a_terminal_is_told_that_it_is_starting_before_it_can_say_where():
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", "from tonnage.cli import main; main()", "ui", "/nowhere"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    first, second, *_ = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    assert (done.returncode, done.stdout, first) == (2, b"", "starting; the address follows")
    assert "/nowhere: no such directory" in second


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_every_worker_and_without_a_word(place, number):
    with served(place, "models") as (address, process):
        listed = ask("GET", f"{address}api/checkpoints").json()["checkpoints"]
        assert listed == [{"path": "models/small", "kind": "directory", "weights": False}]
        workers = workers_of(process)
        assert len(workers) == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "", "")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


HASTY = {
    "refused": b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "nothing there": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
}


def test_clients_that_hang_up_before_they_are_answered_do_not_end_it(place):
    with served(place, "models") as (address, process):
        for sent in HASTY.values():
            for _ in range(100):
                with socket.create_connection(endpoint(address)) as client:
                    client.sendall(sent)
        until(lambda: ask("GET", f"{address}api/gpus").status_code != 503)  # busy with what was asked
        assert ask("GET", f"{address}api/gpus").status_code == 200
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "", "")


SILENT = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "half of the next": b"GET /static/mark.svg HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
}


def answers(address: str) -> bool:
    """Whether it answers at once; a client that is held up for longer than it has is cut off as any other."""
    try:
        return bool(ask("GET", f"{address}api/gpus").status_code == 200)
    except httpx2.TransportError:
        return False


def test_a_connection_that_asks_nothing_does_not_keep_its_place(place):
    with served(place, "models", less=["HEAD_SECONDS = 0.5"]) as (address, _), ExitStack() as silent:
        clients = [silent.enter_context(socket.create_connection(endpoint(address), timeout=PATIENCE)) for _ in SILENT]
        for client, sent in zip(clients, SILENT.values(), strict=True):
            client.sendall(sent)
        for client in clients:
            with suppress(ConnectionResetError):  # what it sent came too late
                while client.recv(1 << 16):
                    continue
        until(lambda: answers(address))


def test_more_connections_than_may_be_are_asked_to_come_back(place):
    with served(place, "models", less=["MOST_CONNECTIONS = 2", f"HEAD_SECONDS = {PATIENCE}"]) as (address, process):
        free = sockets_of(process)
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(socket.create_connection(endpoint(address), timeout=PATIENCE))
            until(lambda: sockets_of(process) == free + 2)
            answer = ask("GET", f"{address}api/gpus")
        until(lambda: sockets_of(process) == free)
        assert ask("GET", f"{address}api/gpus").status_code == 200
    assert (answer.status_code, answer.json()["problems"][0]["what"]) == (503, "too many connections")
    assert (answer.headers["retry-after"], answer.headers["x-content-type-options"]) == ("1", "nosniff")


def test_connections_that_nothing_is_left_for_are_hung_up_on_without_a_word(place):
    with served(place, before=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")) as (address, process):
        with ExitStack() as held:
            for _ in range(100):
                client = held.enter_context(socket.create_connection(endpoint(address), timeout=20))
                client.sendall(b"GET /static/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert httpx2.get(f"{address}api/gpus").status_code == 200
        process.terminate()
        assert (process.wait(timeout=20), process.stderr.read()) == (0, "")


def test_an_answer_that_nobody_takes_does_not_keep_its_place(place):
    with served(place, "models", less=["REQUEST_SECONDS = 1"]) as (address, process), socket.socket() as client:
        free = sockets_of(process)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(endpoint(address))
        client.sendall(b"GET /static/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
        taken = 0
        with suppress(ConnectionResetError):
            client.recv(1, socket.MSG_PEEK)  # it was let in, whether it was answered in time or not
            until(lambda: sockets_of(process) == free)
            while part := client.recv(1 << 16):
                taken += len(part)
    assert taken < 4 * len(SCRIPT.read_bytes())


def test_it_ends_in_one_line_although_somebody_waits_for_an_answer(place):
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4096}
    asked = {
        "checkpoint": {"config": config}, "engine": "vllm", "gpu": "h100", "context": 1024, "profile": "c1-p1024",
        "most_context": 1 << 50, "most_concurrency": 4096, "steps": 4,
    }  # fmt: skip
    with served(place, "models", less=["_SHUTDOWN_SECONDS = 0"]) as (address, process), ThreadPoolExecutor(1) as pool:
        (worker,) = workers_of(process)
        before = cpu_ticks(worker)
        waiting = pool.submit(ask, "POST", f"{address}api/regions", json=asked)
        until(lambda: cpu_ticks(worker) > before + 10)  # of the hundreds that it takes
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0
        said = "Cancel 1 running task(s), timeout graceful shutdown exceeded\n"
        assert (process.stdout.read(), process.stderr.read()) == ("", said)
        assert (waiting.result().status_code, waiting.result().json()["problems"][0]["what"]) == (503, "it ends")


def test_two_servers_do_not_share_a_port():
    first = listen("127.0.0.1", 0)
    with first, pytest.raises(UnitError, match="--port: cannot be used"):
        listen("127.0.0.1", first.getsockname()[1])


def test_workers_end_with_a_server_that_is_killed(place):
    with served(place, "models") as (_, process):
        (worker,) = workers_of(process)
        process.kill()
        process.wait()
        with suppress(ProcessLookupError), DefaultSelector() as ended:
            watched = os.pidfd_open(worker)
            ended.register(watched, EVENT_READ)
            assert ended.select(timeout=PATIENCE)
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
    "no directory": (("nowhere",), "nowhere: no such directory; expected one with checkpoints or configs"),
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
            answer = ask("GET", f"http://127.0.0.1:{port}/api/gpus", headers={"Host": host})
            assert answer.status_code == status
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert err.startswith(f"warning: whoever reaches http://planner.example:{port}/ ")


def test_names_it_answers_to():
    assert served_hosts("127.0.0.1", ()) == ("127.0.0.1", "localhost", "[::1]")
    assert served_hosts(EVERYWHERE, ("a",))[-1] == "a"
    assert served_hosts("127.0.0.2", ("fd00::1",)) == ("127.0.0.1", "localhost", "[::1]", "127.0.0.2", "[fd00::1]")
    assert [is_loopback(host) for host in ("::1", "127.9.9.9", "::", "10.0.0.1", "example")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("name", ["a.example:80", "*", "http://a.example/", "", "a b", "-a", "[::1", "a\n"])
def test_a_name_that_no_request_can_have_is_refused(name):
    with pytest.raises(UnitError, match="--allow-host: no name; expected a name or an address, without scheme"):
        served_hosts("127.0.0.1", ("a.example", name))


@pytest.mark.parametrize(
    ("host", "allowed", "named"),
    [("127.0.0.1", (), "127.0.0.1"), ("127.0.0.2", (), "127.0.0.2"), (EVERYWHERE, ("a.example",), "a.example")],
)
def test_the_address_it_prints_is_one_it_answers_to(host, allowed, named):
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]
        assert address_of(listening, served_hosts(host, allowed)) == f"http://{named}:{port}/"


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
        process.communicate(timeout=PATIENCE)


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
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "WorkerEndedError" in done.stderr
