"""Systems that fail under a command: it ends right, or with one line and its exit code, and goes on the next time.

Every command runs in a process of its own. What the system does wrong is done by a ``sitecustomize`` in front of it, which
workers inherit. docs/faults.md says which test holds which fault for which command.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from samples import PATIENCE, ask, file_contents, kept_port, prepare_small, until, without_privilege, write_key
from servers import Seen, Server, web
from tonnage.export.io import alone

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-P", "-m", "tonnage"]
DOCUMENTS = frozenset({"manifest.json", "plan.json", "provenance.json", "model.sig"})
WRITING = ("prepare", "export", "fetch", "join")
SITE = """
import atexit, errno, os, random, signal, threading, time

FAULTS = os.environ["FAULTS"].split()
SIGNAL = os.environ.pop("SIGNAL", "").split()  # of this process alone
real = {name: getattr(os, name) for name in ("pread", "preadv", "read", "write", "fsync")}


def part(nbytes):
    return random.randint(1, max(nbytes // 2, 1)) if nbytes < 100_000 else nbytes // 2


def named(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")


if "short" in FAULTS:
    os.pread = lambda fd, nbytes, at: real["pread"](fd, part(nbytes), at)
    os.read = lambda fd, nbytes: real["read"](fd, part(nbytes))
    os.write = lambda fd, data: real["write"](fd, memoryview(data)[: part(len(data))])
    os.preadv = lambda fd, views, at: real["preadv"](fd, [views[0][: part(len(views[0]))]], at)
if "interrupted" in FAULTS:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
if "threads" in FAULTS:

    def start(_thread):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start
if "clock" in FAULTS:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + random.choice((-1, 1)) * 86400
    time.time_ns = lambda: now_ns() + random.choice((-1, 1)) * 86400 * 10**9
if "read" in FAULTS:

    def failing(name):
        def read(fd, *rest):
            if named(fd).endswith((".safetensors", "plan.json")) and not os.get_inheritable(fd):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real[name](fd, *rest)

        return read

    for name in ("pread", "preadv", "read"):
        setattr(os, name, failing(name))
if "processes" in FAULTS:
    import subprocess

    def refuse(*_words, **_how):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    subprocess.Popen.__init__, subprocess.Popen.__del__ = refuse, lambda _: None
if SIGNAL:
    number, left = map(int, SIGNAL)

    def signalled(fd):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        real["fsync"](fd)

    os.fsync = signalled
if "sync" in FAULTS:

    def fsync(fd):
        if named(fd).endswith(".partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real["fsync"](fd)

    os.fsync = fsync
"""


class Bench:
    """What the commands work on, and what they make of it where nothing goes wrong."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.private, self.public = write_key(folder)
        self.source, self.prepared = folder / "source", folder / "prepared"
        prepare_small(self.source, self.prepared, convert="none")
        self.package = Path(shutil.copytree(self.prepared, folder / "package"))
        done = self.run("export", self.words("export", self.package))
        assert done.returncode == 0, done.stderr
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)

    def words(self, command: str, out: Path, url: str = "") -> list[object]:
        return {
            "plan": [self.source, "--tp", 2, "--json"],
            "prepare": [self.source, "--tp", 2, "--workers", 1, "-o", out],
            "export": [out, "--key", self.private, "--profile", "c1-p512", "--date", "2026-11-30", "--name", "n"],
            "verify": [self.package, "--key", self.public],
            "fetch": [url, "--key", self.public, "-o", out],
            "ui": ["--port", 0, "--no-browser", "--workers", 1],
            "serve": [
                self.source,
                "--unsigned",
                "--device",
                "cpu",
                "--supply",
                "1GiB",
                "--profile",
                "c1-p64",
                "--context",
                64,
                "--port",
                self.port,
                "--run",
                out,
                "--engine-command",
                "false",
            ],
            "join": [self.package, "--part-key", self.public, "--key", self.private, "-o", out],
        }[command]

    def environment(self, *faults: str) -> dict[str, str]:
        path = [str(self.folder / "site")] if faults else []
        return {
            **os.environ,
            "FAULTS": " ".join(faults),
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def run(
        self, command: str, words: list[object], *faults: str, at: tuple[int, int] | None = None, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command under faults; ``at`` is a signal, and at which sync of a file or directory it comes."""
        more = {} if at is None else {"SIGNAL": " ".join(map(str, map(int, at)))}
        return subprocess.run(
            [*COMMAND, command, *map(str, words)], env={**self.environment(*faults), **more}, capture_output=True, text=True,
            check=False, timeout=PATIENCE, **how,
        )  # fmt: skip

    def begun(self, command: str, words: list[object]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, command, *map(str, words)], env=self.environment(), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def expected(self, command: str) -> dict[str, bytes]:
        """Return the files a command writes, and no others."""
        whole = self.prepared if command == "prepare" else self.package
        wanted = DOCUMENTS if command == "join" else None
        found = file_contents(whole).items()
        return {name: raw for name, raw in found if name != "prepare.json" and (wanted is None or name in wanted)}

    def written(self, out: Path) -> dict[str, bytes]:
        """Return the files that have a final name, notes of a run that is not over aside."""
        found = file_contents(out) if out.exists() else {}
        return {
            name: raw
            for name, raw in found.items()
            if not name.startswith(".prepare/") and not name.endswith(".partial") and name != "prepare.json"
        }


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_port() as port:
        yield Bench(tmp_path_factory.mktemp("faults"), port)


@pytest.fixture(scope="module")
def server(bench: Bench) -> Iterator[Server]:
    with web(bench.package) as running:
        yield running


@contextmanager
def tricked(server: Server, trick: Callable[[Any, Seen], bool]) -> Iterator[None]:
    server.trick = trick
    try:
        yield
    finally:
        server.trick = None


def destination(bench: Bench, command: str, folder: Path) -> Path:
    """Return where a command writes; an export is of what was prepared."""
    out = folder / "out"
    return Path(shutil.copytree(bench.prepared, out)) if command == "export" else out


def check_refused(done: subprocess.CompletedProcess[str], status: int = 2) -> None:
    """See that a run said in one line why it ended, progress aside."""
    assert done.returncode == status, done.stderr
    *before, last = done.stderr.splitlines()
    assert all(" jobs" in line or " requests, " in line for line in before), done.stderr
    assert last.startswith("tonnage: "), done.stderr


def check_goes_on(bench: Bench, command: str, out: Path, url: str) -> None:
    """See that nothing under a final name is another than it should be, and that the same command ends right."""
    assert bench.written(out).items() <= bench.expected(command).items()
    done = bench.run(command, bench.words(command, out, url))
    assert done.returncode == 0, done.stderr
    assert bench.written(out) == bench.expected(command)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("command", ["plan", "prepare", "export", "verify", "fetch", "join"])
def test_short_reads_and_writes_interruptions_and_steps_of_the_clock_change_nothing(
    bench: Bench, server: Server, tmp_path: Path, command: str
) -> None:
    out = destination(bench, command, tmp_path)
    words = bench.words(command, out, server.url)
    done = bench.run(command, words, "short", "interrupted", "clock")
    assert done.returncode == 0, done.stderr
    if command in WRITING:
        assert bench.written(out) == bench.expected(command)
    elif command == "plan":
        assert json.loads(done.stdout) == json.loads(bench.run(command, words).stdout)
    else:
        assert ": verified: " in done.stdout


@pytest.mark.parametrize(
    ("command", "status"), [("plan", 2), ("prepare", 2), ("export", 2), ("verify", 4), ("join", 4)]
)
def test_a_read_that_fails_is_one_line(bench: Bench, tmp_path: Path, command: str, status: int) -> None:
    out = destination(bench, command, tmp_path)
    done = bench.run(command, bench.words(command, out), "read")
    assert done.returncode == status, done.stderr
    assert "Input/output error" in done.stderr
    assert all(re.match(r"tonnage: |.* jobs", line) for line in done.stderr.splitlines()), done.stderr
    if command in WRITING:
        assert bench.written(out).items() <= bench.expected(command).items()


def test_a_read_that_fails_under_a_server_is_an_answer(bench: Bench) -> None:
    words = [*COMMAND, "ui", bench.source, "--port", "0", "--no-browser", "--workers", "1"]
    with subprocess.Popen(
        list(map(str, words)), env=bench.environment("read"), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            asked = {"checkpoint": {"path": str(bench.source)}, "tp": 2}
            for _ in range(2):
                answer = ask("POST", f"{address}api/plan", json=asked)
                assert (answer.status_code, answer.json()["schema"]) == (422, "tonnage.error/1")
                assert "Input/output error" in answer.json()["problems"][0]["found"]
        finally:
            server.kill()


@pytest.mark.parametrize("command", WRITING)
def test_a_disk_that_is_full_when_a_file_is_synced_is_one_line_and_gone_on_with(
    bench: Bench, server: Server, tmp_path: Path, command: str
) -> None:
    out = destination(bench, command, tmp_path)
    done = bench.run(command, bench.words(command, out, server.url), "sync")
    check_refused(done)
    assert "no space left for it; free some and run the same command again" in done.stderr
    check_goes_on(bench, command, out, server.url)


@pytest.mark.parametrize(
    ("command", "megabytes"), [("plan", 48), ("export", 60), ("verify", 60), ("fetch", 60), ("join", 60)]
)
def test_memory_that_does_not_do_is_one_line(
    bench: Bench, server: Server, tmp_path: Path, command: str, megabytes: int
) -> None:
    out, nbytes = destination(bench, command, tmp_path), megabytes << 20
    words = bench.words(command, out, server.url)
    done = bench.run(command, words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes)))
    if done.returncode:  # it does on some systems
        check_refused(done)
    if command in WRITING:
        assert bench.written(out).items() <= bench.expected(command).items()


@contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a control group whose processes may have so much memory, of version 2 or 1; skip where nobody lets us."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    root = Path("/sys/fs/cgroup")
    unified = [root / groups.get("", "/").lstrip("/"), (root / groups.get("", "/").lstrip("/")).parent]
    places = [(place, "memory.max") for place in unified if "memory" in _text(place / "cgroup.subtree_control").split()]
    if "memory" in groups:
        old = root / "memory" / groups["memory"].lstrip("/")
        places += [(place, "memory.limit_in_bytes") for place in (old, root / "memory")]
    for place, limit in places:
        group = place / f"tonnage-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(nbytes))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            yield group
        finally:
            _remove(group)
        return
    pytest.skip("no control group of memory can be made by this user")


def _remove(group: Path) -> None:
    """Remove a control group; a worker whose command was killed may take a moment to end."""
    end = time.monotonic() + 10
    while True:
        for pid in map(int, _text(group / "cgroup.procs").split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("command", "megabytes"),
    [("plan", 20), ("prepare", 38), ("export", 34), ("verify", 25), ("fetch", 45), ("join", 34)],
)
def test_a_control_group_without_memory_ends_it_and_the_next_run_goes_on(
    bench: Bench, server: Server, tmp_path: Path, command: str, megabytes: int
) -> None:
    """The kernel kills a process of it: a worker, which is one line, or the command, which cannot say anything."""
    out = destination(bench, command, tmp_path)
    words = bench.words(command, out, server.url)
    with memory_group(megabytes << 20) as group:
        done = bench.run(command, words, preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))
    assert done.returncode
    if done.returncode != -signal.SIGKILL:
        check_refused(done)
    if command in WRITING:
        check_goes_on(bench, command, out, server.url)


@pytest.mark.parametrize("command", WRITING)
def test_an_output_that_may_not_be_written_is_one_line(
    bench: Bench, server: Server, tmp_path: Path, command: str
) -> None:
    out = destination(bench, command, tmp_path)
    out.mkdir(exist_ok=True)
    out.chmod(0o555)
    try:
        done = bench.run(command, bench.words(command, out, server.url), preexec_fn=without_privilege)
    finally:
        out.chmod(0o755)
    check_refused(done)
    assert "Permission denied" in done.stderr
    assert file_contents(out) == (file_contents(bench.prepared) if command == "export" else {})


@pytest.mark.parametrize("command", ["plan", "prepare", "verify", "join"])
def test_a_file_that_may_not_be_read_is_named(bench: Bench, tmp_path: Path, command: str) -> None:
    directory = bench.package / "weights" / "tp2" / "rank-0" if command == "verify" else bench.source
    path = bench.package / "plan.json" if command == "join" else next(directory.glob("*.safetensors"))
    path.chmod(0)
    try:
        done = bench.run(command, bench.words(command, tmp_path / "out"), preexec_fn=without_privilege)
    finally:
        path.chmod(0o644)
    check_refused(done, 4 if command in {"verify", "join"} else 2)
    assert f"{path.name}: " in done.stderr
    assert "Permission denied" in done.stderr
    assert not (tmp_path / "out").exists()


class Stalled:
    """A server that says nothing any more of some weights, once it was asked for them."""

    def __init__(self, word: str = "rank-1") -> None:
        self._word = word
        self.requests: list[tuple[str, str]] = []
        self.asked, self.over = threading.Event(), threading.Event()

    def __call__(self, handler: Any, seen: Seen) -> bool:
        if self._word not in seen.path or "safetensors" not in seen.path:
            return False
        self.requests.append((seen.path, seen.headers.get("range", "")))
        self.asked.set()
        self.over.wait(PATIENCE)
        handler.close_connection = True
        return True


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process still has its own way with a signal: it has none for the second one."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "times", "status"),
    [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 143), (signal.SIGTERM, 2, -signal.SIGTERM)],
)
def test_a_fetch_that_is_ended_while_a_server_is_silent_ends_soon_and_goes_on(
    bench: Bench, server: Server, tmp_path: Path, number: signal.Signals, times: int, status: int
) -> None:
    out, stalled = tmp_path / "out", Stalled()
    with tricked(server, stalled):
        process = bench.begun("fetch", bench.words("fetch", out, server.url))
        assert stalled.asked.wait(PATIENCE)
        for _ in range(times):
            process.send_signal(number)
            until(lambda: not catches(process, number))
        _, said = process.communicate(timeout=PATIENCE)
        stalled.over.set()
    # Or it waited until the server was given up, and asked again.
    assert len(set(stalled.requests)) == len(stalled.requests), stalled.requests
    assert process.returncode == status
    line = {130: "tonnage: interrupted", 143: "tonnage: terminated"}.get(status, "")
    assert said.splitlines() == ([f"{line}; run the same command again to resume"] if line else [])
    if line:
        assert bench.written(out).items() <= bench.expected("fetch").items()
        assert not list(out.rglob("*.partial"))
    else:
        check_goes_on(bench, "fetch", out, server.url)


def test_of_two_fetches_into_one_directory_the_second_is_refused(bench: Bench, server: Server, tmp_path: Path) -> None:
    out, stalled = tmp_path / "out", Stalled()
    with tricked(server, stalled):
        process = bench.begun("fetch", bench.words("fetch", out, server.url))
        assert stalled.asked.wait(PATIENCE)
        check_refused(bench.run("fetch", bench.words("fetch", out, server.url)))
        server.trick = None
        stalled.over.set()
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert bench.written(out) == bench.expected("fetch")


@pytest.mark.parametrize(("command", "word"), [("verify", "rank-1"), ("plan", "model.")])
def test_a_command_that_writes_nothing_ends_without_a_word(bench: Bench, command: str, word: str) -> None:
    stalled = Stalled(word)
    with web(bench.package if command == "verify" else bench.source) as server, tricked(server, stalled):
        process = bench.begun(command, [server.url, *(["--key", bench.public] if command == "verify" else [])])
        assert stalled.asked.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
        stalled.over.set()
    assert (process.returncode, said) == (-signal.SIGINT, "")


STOPS = {
    "Ctrl-C": (signal.SIGINT, 130, "tonnage: interrupted; run the same command again to resume"),
    "SIGTERM": (signal.SIGTERM, 143, "tonnage: terminated; run the same command again to resume"),
}


@pytest.mark.parametrize("place", [1, 4])
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("command", WRITING)
def test_a_signal_while_files_get_their_names_is_one_line_and_gone_on_from(
    bench: Bench, server: Server, tmp_path: Path, command: str, stop: tuple[int, int, str], place: int
) -> None:
    out, (number, status, line) = destination(bench, command, tmp_path), stop
    done = bench.run(command, bench.words(command, out, server.url), "signal", at=(number, place))
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (status, [line]), done.stderr
    assert not list(out.rglob("*.partial"))
    check_goes_on(bench, command, out, server.url)


def test_joining_that_is_killed_anywhere_is_no_package_until_it_is_whole(bench: Bench, tmp_path: Path) -> None:
    for place in range(1, 100):
        out = tmp_path / f"out-{place}"
        done = bench.run("join", bench.words("join", out), "signal", at=(signal.SIGKILL, place))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        assert ("model.sig" in bench.written(out)) == (bench.written(out) == bench.expected("join"))
        check_goes_on(bench, "join", out, "")
    assert place > 2 * len(DOCUMENTS)


def test_of_two_joins_into_one_directory_the_second_is_refused(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with alone(out):
        check_refused(bench.run("join", bench.words("join", out)))
    assert bench.written(out) == {}
    check_goes_on(bench, "join", out, "")


@pytest.mark.parametrize("command", ["verify", "fetch"])
def test_a_thread_that_cannot_be_had_is_one_line(bench: Bench, server: Server, tmp_path: Path, command: str) -> None:
    done = bench.run(command, bench.words(command, tmp_path / "out", server.url), "threads")
    check_refused(done)
    assert done.stderr == "tonnage: threads: the system lets no more be started\n"


@pytest.mark.parametrize(
    ("command", "line"),
    [("serve", "tonnage: false: cannot be started"), ("ui", "tonnage: --workers: cannot be started")],
)
def test_an_engine_or_a_worker_that_cannot_be_started_is_one_line(
    bench: Bench, tmp_path: Path, command: str, line: str
) -> None:
    done = bench.run(command, bench.words(command, tmp_path / "out"), "processes")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"{line}; found Resource temporarily unavailable", done.stderr
    assert "Traceback" not in done.stderr


def test_without_any_place_to_write_a_plan_of_a_server_is_made(bench: Bench, tmp_path: Path) -> None:
    """Such as a container whose file systems are all read-only."""
    (tmp_path / "closed").mkdir(mode=0o555)
    closed = str(tmp_path / "closed")
    with web(bench.source.parent) as here:
        done = subprocess.run(
            [*COMMAND, "plan", f"{here.url}/source/", "--tp", "2", "--json"],
            env={**bench.environment(), "XDG_CACHE_HOME": closed, "TMPDIR": closed},
            cwd=closed, preexec_fn=without_privilege, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["transfer"]["bytes"] > 0


def test_every_test_that_the_page_names_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ")]
    named = [match for row in rows for match in re.findall(r"`(\w+)::(\w+)`", row)]
    assert len(named) >= 40
    for module, test in named:
        path = next((ROOT / "tests").rglob(f"{module}.py"))
        assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), (module, test)
