"""Preparation on a real Ray cluster: the bytes of the local executor, whoever is lost on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samples import COMMAND, LLAMA, PATIENCE, file_contents, rehearse, until
from tonnage.checkpoint.io import read_checkpoint_headers
from tonnage.prepare.output_dir import EPOCH_FILE

ray = pytest.importorskip("ray")

LARGE: dict[str, Any] = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
                         "num_key_value_heads": 8, "num_hidden_layers": 14, "vocab_size": 8000}  # fmt: skip
"""0.5 GB in as many files as layers."""
STORE_BYTES = 80 << 20
TASK = b"ray::_do_task"
"""What a worker of Ray's calls itself while it is at a task of ours."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each, the second with a resource of its own."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    found.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={"second": 1})
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's kind of checkpoint: scaled down, random."""
    path = tmp_path_factory.mktemp("small") / "source"
    rehearse(path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a GB of random finite BF16, no two blocks alike."""
    path = tmp_path_factory.mktemp("large") / "source"
    rehearse(path, LARGE, scaled_down=False, sharded=True)
    random = np.random.default_rng(0)
    for shard in read_checkpoint_headers(path).shards:
        with (path / shard.shard_file).open("r+b") as file:
            file.seek(shard.data_begin)
            file.write((random.integers(0, 1 << 16, shard.payload_bytes // 2, np.uint16) & 0xBFFF).tobytes())
    return path


@pytest.fixture(scope="module")
def locally(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the local executor writes of the large one."""
    output = tmp_path_factory.mktemp("local") / "out"
    ended(start(large, output))
    return contents(output)


def start(source: Path, output: Path, *words: str, within: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*within, *COMMAND, "prepare", str(source), "--tp", "2", "-o", str(output), "--json", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def on(cluster: Any, *words: str) -> tuple[str, ...]:
    return ("--executor", "ray", "--address", cluster.address, *words)


def ended(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    """Wait for a run and return what it said, on stdout and stderr."""
    said = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == status, said[1]
    return said


def contents(output: Path) -> dict[str, bytes]:
    """Every file; the summary without its times."""
    found = file_contents(output)
    document = json.loads(found["prepare.json"])
    del document["seconds"], document["worker_seconds"]
    return found | {"prepare.json": json.dumps(document).encode()}


def at_tasks() -> list[int]:
    """Return the workers that are at a task, of clusters that were started here."""
    titles, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            titles[int(folder.name)] = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid > 0

    return [pid for pid, title in titles.items() if title.startswith(TASK) and is_ours(pid)]


def begun(output: Path) -> int:
    """Wait until a file is being written, and return a worker that is at a task."""
    until(lambda: any(output.glob("weights/*/*/.*.partial")))
    found: list[int] = []
    until(lambda: found.extend(at_tasks()) or found)
    return found[0]


@pytest.mark.parametrize("words", [("--convert", "mxfp8"), ("--ranks", "1")], ids=["converted", "one rank"])
def test_a_cluster_writes_the_bytes_of_the_local_executor(
    cluster: Any, small: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended(start(small, tmp_path / "local", *words))
    said, _ = ended(start(small, tmp_path / "ray", *words, *on(cluster)))
    assert json.loads(said)["schema"] == "tonnage.prepare/1"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_half_a_gigabyte_is_the_same_and_a_killed_worker_changes_nothing(
    cluster: Any, large: Path, locally: dict[str, bytes], tmp_path: Path
) -> None:
    run = start(large, tmp_path / "out", *on(cluster))
    os.kill(begun(tmp_path / "out"), signal.SIGKILL)
    _, said = ended(run)
    assert contents(tmp_path / "out") == locally
    last = [line for line in said.splitlines() if " MiB" in line][-1]
    done, total = last.partition(" MiB")[0].split(" of ")
    assert done == total  # what the lost attempt told of is counted once


def test_a_task_that_is_lost_every_time_is_refused_and_a_local_run_goes_on(
    cluster: Any, large: Path, locally: dict[str, bytes], tmp_path: Path
) -> None:
    run = start(large, tmp_path / "out", *on(cluster))
    begun(tmp_path / "out")
    while run.poll() is None:
        for process in at_tasks():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    _, said = ended(run, 2)
    assert "its worker was lost 3 times; run the same command again to resume" in said.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.partial"))
    ended(start(large, tmp_path / "out"))
    assert contents(tmp_path / "out") == locally


def test_tasks_of_a_killed_driver_give_nothing_a_name_in_the_run_after_it(
    cluster: Any, large: Path, locally: dict[str, bytes], tmp_path: Path
) -> None:
    """A worker is stopped, so that it outlives its driver, and goes on in the middle of the next run."""
    output = tmp_path / "out"
    run = start(large, output, *on(cluster))
    stopped = begun(output)
    os.kill(stopped, signal.SIGSTOP)
    run.kill()
    run.communicate()
    assert (output / EPOCH_FILE).exists()
    after = start(large, output)
    until(lambda: not (output / EPOCH_FILE).exists())
    with suppress(ProcessLookupError):  # Ray may have ended it by then
        os.kill(stopped, signal.SIGCONT)
    ended(after)
    until(lambda: not at_tasks())
    assert contents(output) == locally


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_ends_its_tasks(
    cluster: Any, large: Path, tmp_path: Path, number: int, status: int
) -> None:
    run = start(large, tmp_path / "out", *on(cluster))
    begun(tmp_path / "out")
    run.send_signal(number)
    _, said = ended(run, status)
    assert said.splitlines()[-1].endswith("run the same command again to resume")
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert not (tmp_path / "out" / EPOCH_FILE).exists()
    until(lambda: not at_tasks())
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_a_refusal_is_not_tried_again(cluster: Any, small: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(small, source)
    (shard,) = read_checkpoint_headers(source).shards
    entry = next(one for one in shard.entries() if one.name.endswith("up_proj.weight"))
    with (source / shard.shard_file).open("r+b") as file:
        file.seek(shard.data_begin + entry.begin)
        file.write(b"\x80\x7f")  # infinity
    _, said = ended(start(source, tmp_path / "out", "--convert", "mxfp8", *on(cluster)), 2)
    (refused,) = (line for line in said.splitlines() if line.startswith("tonnage: "))
    assert "a value that is not finite" in refused


def test_tasks_are_placed_on_nodes_with_the_resource(cluster: Any, small: Path, tmp_path: Path) -> None:
    _, said = ended(start(small, tmp_path / "none", *on(cluster, "--node-resource", "gold")), 2)
    assert "no node of the cluster can do the work" in said
    assert "and the resource gold" in said
    assert not (tmp_path / "none").exists()
    ended(start(small, tmp_path / "ray", *on(cluster, "--node-resource", "second")))
    ended(start(small, tmp_path / "local"))
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_node_with_another_version_is_refused_by_name(cluster: Any, small: Path, tmp_path: Path) -> None:
    (tmp_path / "path" / "tonnage").mkdir(parents=True)
    (tmp_path / "path" / "tonnage" / "__init__.py").touch()
    (tmp_path / "path" / "tonnage" / "version.py").write_text('__version__ = "0.0.0"\n')
    node = cluster.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, env_vars={"PYTHONPATH": str(tmp_path / "path")}
    )
    try:
        _, said = ended(start(small, tmp_path / "out", *on(cluster)), 2)
        assert f"({node.node_id[:8]}): another version of tonnage" in said
        assert "found 0.0.0" in said
        assert not (tmp_path / "out").exists()
    finally:
        cluster.remove_node(node)


def test_no_cluster_is_one_line(small: Path, tmp_path: Path) -> None:
    """Of ours: Ray would try for minutes, and say so in many."""
    _, said = ended(start(small, tmp_path / "out", "--executor", "ray", "--address", "127.0.0.1:1"), 2)
    assert said.startswith("tonnage: --address 127.0.0.1:1: no Ray cluster to be part of")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# --- two hosts --------------------------------------------------------------------------------------------------------

HEAD, OTHER = "tonnage-head", "tonnage-other"
ADDRESSES = {HEAD: "10.77.0.1", OTHER: "10.77.0.2"}
SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",  # of a machine that is only busy, no node is given up
}
"""Ray gives up a node in seconds; by default that takes about a minute."""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces are not permitted here: ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def pids(namespace: str) -> set[int]:
    return {int(pid) for pid in ip("netns", "pids", namespace).split()}


def remove_hosts() -> None:
    for name in ADDRESSES:
        if name in ip("netns", "list").split():
            for pid in pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "delete", name)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """Two raylets in network namespaces of their own, joined by one cable; the second sees another ``hidden``."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are not permitted here: no ip")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    command = Path(sys.executable).with_name("ray")
    session = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets in it have short paths
    running = []
    try:
        remove_hosts()
        for name in ADDRESSES:
            ip("netns", "add", name)
        ip("link", "add", "head", "netns", HEAD, "type", "veth", "peer", "name", "other", "netns", OTHER)
        for name, device in ((HEAD, "head"), (OTHER, "other")):
            ip("-n", name, "address", "add", f"{ADDRESSES[name]}/30", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        common = f"--num-cpus 1 --object-store-memory {STORE_BYTES} --disable-usage-stats --block"
        starts = {
            HEAD: f"{command} start --head --port 6379 --include-dashboard false --temp-dir {session} {common}",
            OTHER: f"mount -t tmpfs none {hidden} && {command} start --address {ADDRESSES[HEAD]}:6379 {common}",
        }
        for name, line in starts.items():
            words = ["ip", "netns", "exec", name, "sh", "-c", f"{line} --node-ip-address {ADDRESSES[name]}"]
            said = tmp_path / f"{name}.log"
            with said.open("wb") as log:
                running.append(subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | SOON))
            until(lambda said=said: "runtime started" in said.read_text() or running[-1].poll() is not None)
            assert running[-1].poll() is None, said.read_text()
        yield hidden
    finally:
        remove_hosts()
        for process in running:
            process.wait()
        shutil.rmtree(session, ignore_errors=True)


WITHIN = ("ip", "netns", "exec", HEAD)
ON_HOSTS = ("--executor", "ray", "--address", f"{ADDRESSES[HEAD]}:6379")


def test_a_host_that_is_cut_off_changes_nothing_and_what_it_does_not_see_is_said(
    hosts: Path, large: Path, locally: dict[str, bytes], tmp_path: Path
) -> None:
    """The cable is pulled while the second host writes: its task goes on there, and is done again on the first."""
    _, said = ended(start(large, hosts / "out", *ON_HOSTS, within=WITHIN), 2)
    assert f"node {ADDRESSES[OTHER]} (" in said
    assert "does not see the output directory" in said
    assert f"node {ADDRESSES[HEAD]} (" not in said
    assert not list(hosts.iterdir())

    run = start(large, tmp_path / "out", *ON_HOSTS, within=WITHIN)
    until(lambda: pids(OTHER) & set(at_tasks()) and any((tmp_path / "out").glob("weights/*/*/.*.partial")))
    ip("-n", OTHER, "link", "set", "other", "down")
    ended(run)
    assert contents(tmp_path / "out") == locally
