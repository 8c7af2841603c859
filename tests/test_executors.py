"""Who does the tasks of a preparation, and what a task may still do whose run is over."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samples import file_contents, rehearse
from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.prepare.documents import SUMMARY
from tonnage.prepare.executor_ray import RayCluster
from tonnage.prepare.executors import Event, Run
from tonnage.prepare.io import NewFile, PrepareError
from tonnage.prepare.journal import JobRecord
from tonnage.prepare.messages import Progress, Refused, Setup, Task
from tonnage.prepare.output_dir import (
    EPOCH_FILE,
    JOURNAL_FILE,
    begin_epoch,
    check_epoch,
    end_epoch,
    find_partials,
    read_epoch,
    remove_partials,
)
from tonnage.prepare.preparation import Preparation
from tonnage.prepare.ray_connection import host_and_port
from tonnage.prepare.request import PrepareOptions, prepare_placement
from tonnage.prepare.run import Standing, run_preparation
from tonnage.prepare.worker import answer_task, run_task


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("executors") / "source"
    rehearse(path)
    return path


def preparation_of(source: Path, output: Path, **options: Any) -> Preparation:
    checkpoint = open_checkpoint(str(source))
    plan = plan_checkpoint(checkpoint, PlanRequest(tp=2))
    assert plan.placement is not None
    assert checkpoint.headers is not None
    return prepare_placement(
        plan.placement,
        source,
        output,
        PrepareOptions(**{"workers": 1, "job_bytes": 150_000} | options),
        headers=checkpoint.headers,
        digest=checkpoint.digest,
    )


def contents(output: Path) -> dict[str, bytes]:
    """Every file; the summary without its times."""
    found = file_contents(output)
    document = json.loads(found[SUMMARY])
    del document["seconds"], document["worker_seconds"]
    return found | {SUMMARY: json.dumps(document).encode()}


def here(preparation: Preparation, *, lose: int = 0) -> Callable[[Preparation, int], Any]:
    """Return an executor that does tasks in this process, last first; one is lost so many times after it was done."""

    @contextmanager
    def executor(_: Preparation, lock: int) -> Iterator[Run]:
        assert lock >= 0
        setup = replace(preparation.setup, epoch=begin_epoch(preparation.setup.output))

        def run(tasks: Iterable[Task]) -> Iterator[Event]:
            for number, task in enumerate(reversed(list(tasks))):
                for attempt in range(lose + 1 if number == 0 else 1):
                    said: list[Progress | JobRecord | Refused] = []
                    answer_task(replace(task, attempt=f"{attempt:016x}"), setup, said.append)
                    *progress, record = said
                    yield from (one for one in progress if isinstance(one, Progress))
                    if number == 0 and attempt < lose:
                        yield Progress(-sum(one.nbytes for one in progress if isinstance(one, Progress)))
                assert isinstance(record, JobRecord)
                yield task, record

        yield run
        end_epoch(preparation.setup.output)

    return executor


@pytest.fixture(scope="module")
def locally(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("local") / "out"
    run_preparation(preparation_of(source, output), lambda _: None)
    return contents(output)


def test_any_executor_gives_the_same_files(source: Path, locally: dict[str, bytes], tmp_path: Path) -> None:
    preparation, seen = preparation_of(source, tmp_path / "out"), list[Standing]()
    run_preparation(preparation, seen.append, executor=here(preparation, lose=2))
    assert contents(tmp_path / "out") == locally
    assert seen[-1].done_bytes == seen[-1].total_bytes == preparation.survey.progress_bytes
    assert (seen[-1].tasks_done, seen[-1].tasks) == (len(preparation.survey.tasks),) * 2


def begun(source: Path, output: Path) -> tuple[Setup, list[Task]]:
    """Return what a task of a run is given; the run ends here, without a word to its tasks."""
    preparation, given = preparation_of(source, output), list[Task]()

    @contextmanager
    def executor(_: Preparation, lock: int) -> Iterator[Run]:  # noqa: ARG001 - as executors are called
        epochs.append(begin_epoch(output))

        def run(tasks: Iterable[Task]) -> Iterator[Event]:
            given.extend(tasks)
            raise KeyboardInterrupt
            yield

        yield run

    epochs: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_preparation(preparation, lambda _: None, executor=executor)
    assert read_epoch(output) == epochs[0]
    return replace(preparation.setup, epoch=epochs[0]), [replace(task, attempt="0" * 16) for task in given]


def test_a_task_of_a_run_that_is_over_writes_nothing(source: Path, locally: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "out"
    setup, tasks = begun(source, output)
    run_preparation(preparation_of(source, output), lambda _: None)
    for task in tasks:
        with pytest.raises(PrepareError, match="the run that began this task is over"):
            run_task(task, setup, lambda _: None)
    assert contents(output) == locally


def test_a_task_whose_run_ends_while_it_writes_gives_nothing_its_name(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    setup, tasks = begun(source, output)
    task = max(tasks, key=lambda task: sum(map(len, task.headers)))
    before = file_contents(output)

    def end_the_run(_: int) -> None:
        if read_epoch(output) == setup.epoch:
            assert find_partials(output, task.paths)
            begin_epoch(output)
            remove_partials(output, task.paths)

    with pytest.raises(PrepareError, match="the run that began this task is over"):
        run_task(task, setup, end_the_run)
    found = file_contents(output)
    assert found.keys() == before.keys()
    assert all(found[path] == raw for path, raw in before.items() if path != EPOCH_FILE)


def test_a_file_that_asked_in_time_has_nothing_left_to_rename(tmp_path: Path) -> None:
    """The run after it removes what is unfinished before it looks around; another attempt's file stays its own."""
    first = NewFile(tmp_path / "a", 1, tag="job-3-0123456789abcdef")
    first.write(memoryview(b"1"))
    first.sync()
    remove_partials(tmp_path, {"a"})
    second = NewFile(tmp_path / "a", 2, tag="job-3-fedcba9876543210")
    with pytest.raises(PrepareError, match="cannot be written"):
        first.publish()
    first.close()
    second.write(memoryview(b"22"))
    second.sync()
    second.publish()
    second.close()
    assert file_contents(tmp_path) == {"a": b"22"}


def test_a_local_run_ends_the_epoch_before_it_looks_around(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    begun(source, output)
    assert (output / JOURNAL_FILE).exists()
    seen: list[bool] = []
    run_preparation(preparation_of(source, output), lambda _: seen.append((output / EPOCH_FILE).exists()))
    assert seen
    assert not any(seen)
    assert not (output / ".prepare").exists()


def test_an_epoch_is_that_of_one_run(tmp_path: Path) -> None:
    first = begin_epoch(tmp_path)
    check_epoch(tmp_path, first)
    second = begin_epoch(tmp_path)
    assert first != second
    with pytest.raises(PrepareError, match=f"expected {first}; found {second}"):
        check_epoch(tmp_path, first)
    end_epoch(tmp_path)
    end_epoch(tmp_path)
    with pytest.raises(PrepareError, match=f"expected {second}; found none"):
        check_epoch(tmp_path, second)
    (tmp_path / EPOCH_FILE).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text(second)
    assert read_epoch(tmp_path) is None


def test_nothing_is_begun_without_a_cluster(source: Path, tmp_path: Path) -> None:
    """Where Ray is not installed, or nobody is at the address."""
    preparation = preparation_of(source, tmp_path / "out")
    with pytest.raises(PrepareError, match=r"ray is not installed|no Ray cluster to be part of"):
        run_preparation(preparation, lambda _: None, executor=RayCluster(address="127.0.0.1:1"))
    with pytest.raises(PrepareError, match=r"ray is not installed|a client is no part of its cluster"):
        run_preparation(preparation, lambda _: None, executor=RayCluster(address="ray://head:10001"))
    assert not (tmp_path / "out").exists()


def test_the_local_executor_imports_no_ray(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tonnage.cli import main\n"
        "try: main()\n"
        "finally: assert not [name for name in sys.modules if name.split('.')[0] == 'ray']; print('none')"
    )
    words = ("prepare", source, "-o", tmp_path / "out", "--workers", "1")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "none"), done.stderr
    assert (tmp_path / "out" / SUMMARY).exists()


def test_options_of_a_cluster_need_one(tonnage: Any, source: Path, tmp_path: Path) -> None:
    done = tonnage("prepare", source, "-o", tmp_path / "out", "--address", "head:6379")
    line = "tonnage: --address, --node-resource: belong to a cluster; expected --executor ray\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_dry_run_says_what_a_task_needs(tonnage: Any, source: Path, tmp_path: Path) -> None:
    words = ("prepare", source, "--tp", 2, "-o", tmp_path / "out", "--dry-run", "--executor", "ray")
    found = json.loads(tonnage(*words, "--json").stdout)
    assert (found["workers"], found["peak_memory_bytes"]) == (0, 0)
    assert found["task_memory_bytes"] == preparation_of(source, tmp_path / "out").task_memory_bytes


def test_an_address_of_a_cluster_is_a_host_and_a_port_or_what_ray_knows() -> None:
    assert host_and_port("10.0.0.1:6379") == ("10.0.0.1", 6379)
    assert host_and_port("[::1]:65535") == ("::1", 65535)
    assert [host_and_port(text) for text in ("auto", "local", ":1", "head:\u0661", "head:")] == [None] * 5
    for port in ("65536", "9" * 5000):
        with pytest.raises(PrepareError, match="--address: no port; expected at most 65535"):
            host_and_port(f"head:{port}")
