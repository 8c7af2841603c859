"""Workers: cut off when they take too long, replaced when they end, never more waiting than may."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from samples import LLAMA, PATIENCE
from tonnage.ui import app as application
from tonnage.ui.app import make_app
from tonnage.ui.examples import EXAMPLES
from tonnage.ui.messages import Question
from tonnage.ui.pool import BusyError, GoneError, Pool, TookTooLongError, WorkerEndedError, WorkerKilledError
from tonnage.ui.settings import Settings

GPUS = Question("gpus", b"")
PLAN = Question("plan", json.dumps(EXAMPLES["plan"]).encode())
SLOW = Question(
    "regions",
    json.dumps(
        {
            "checkpoint": {"config": {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4096}},
            "engine": "vllm", "gpu": "h100", "context": 1024, "profile": "c1-p1024", "most_context": 1 << 50,
            "most_concurrency": 4096, "steps": 4,
        }
    ).encode(),
)  # fmt: skip
"""Seconds of work: thousands of plans of thousands of layers."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a worker ended is known when the system says it, however busy the machine is."""
    monkeypatch.setattr("tonnage.ui.pool._ENDING_SECONDS", PATIENCE)


def with_pool(use, **settings: Any):
    """Run something with a pool, and return what it returns; no worker is left."""

    async def run():
        async with Pool(Settings(**{"workers": 1, "seconds": PATIENCE, **settings})).running() as pool:
            return await use(pool)

    before = children()
    found = asyncio.run(run())
    assert children() == before
    return found


def children() -> set[int]:
    """Processes of this one."""
    return {int(pid) for tasks in Path("/proc/self/task").iterdir() for pid in (tasks / "children").read_text().split()}


def test_a_question_that_takes_too_long_is_cut_off_and_its_worker_replaced():
    async def use(pool):
        first = children() - others
        with pytest.raises(TookTooLongError):
            await pool.ask(SLOW)
        while (await again(pool)) is None:  # the new one starts as fast as other work on the machine lets it
            continue
        return first, children() - others

    async def again(pool):
        with suppress(TookTooLongError):
            return await pool.ask(GPUS)

    others = children()
    first, second = with_pool(use, seconds=1.0)
    assert (len(first), len(second), first & second) == (1, 1, set())


def test_questions_beyond_those_that_may_wait_are_refused_at_once():
    async def use(pool):
        await pool.ask(GPUS)
        asked = [asyncio.create_task(pool.ask(PLAN)) for _ in range(5)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = with_pool(use, waiting=2)
    assert [type(one) for one in found if isinstance(one, Exception)] == [BusyError, BusyError]
    assert [one.status for one in found if not isinstance(one, Exception)] == [200, 200, 200]


def test_a_worker_that_ends_is_replaced(caplog):
    async def use(pool):
        await pool.ask(GPUS)
        asked = asyncio.create_task(pool.ask(SLOW))
        await asyncio.sleep(0.05)
        (pid,) = children() - others
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerKilledError):
            await asked
        return (await pool.ask(GPUS)).status

    others = children()
    assert with_pool(use) == 200
    assert not caplog.records


def test_a_worker_that_ended_while_nobody_asked_is_no_failure_of_the_next_question():
    async def use(pool):
        (process,) = pool._all
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        return (await pool.ask(GPUS)).status

    assert with_pool(use) == 200


def test_a_question_that_was_given_up_while_it_waited_is_not_asked():
    async def gone():
        return True

    async def use(pool):
        found = await asyncio.gather(*(pool.ask(SLOW, gone) for _ in range(8)), return_exceptions=True)
        return [type(one) for one in found], (await pool.ask(GPUS)).status

    assert with_pool(use) == ([GoneError] * 8, 200)


def test_a_question_nobody_waits_for_any_more_gives_no_answer_to_the_next():
    async def use(pool):
        asked = asyncio.create_task(pool.ask(SLOW))
        await asyncio.sleep(0.05)
        asked.cancel()
        return (await pool.ask(GPUS)).content

    assert json.loads(with_pool(use))["schema"] == "tonnage.gpus/1"


def test_a_bug_is_told_on_standard_error_and_not_to_who_asked(capfd):
    async def use(pool):
        with pytest.raises(WorkerEndedError):
            await pool.ask(Question("no such answer", b""))
        return (await pool.ask(GPUS)).status

    assert with_pool(use) == 200
    assert "KeyError: 'no such answer'" in capfd.readouterr().err


def test_a_worker_has_so_much_memory_and_no_more():
    body = {"checkpoint": {"config": {**LLAMA, "pad": [[0.5] * 9 for _ in range(90_000)]}}}

    async def use(pool):
        return await pool.ask(Question("plan", json.dumps(body).encode()))

    answer = with_pool(use, memory_bytes=80 << 20)
    assert answer.status == 422
    assert json.loads(answer.content)["problems"][0]["what"] == "too large to be planned here"


STATUSES = {
    BusyError(): 503,
    TookTooLongError(): 504,
    WorkerEndedError(): 500,
    WorkerKilledError(): 503,
    GoneError(): 499,
}


@pytest.mark.parametrize(("error", "status"), STATUSES.items(), ids=lambda one: type(one).__name__)
def test_no_answer_is_a_refusal_of_its_own(error, status, monkeypatch):
    async def ask(*_: object):
        raise error

    monkeypatch.setattr(Pool, "ask", ask)
    with TestClient(make_app(Settings(workers=1)), base_url="http://localhost") as client:
        answer = client.get("/api/gpus")
    assert (answer.status_code, answer.json()["schema"]) == (status, "tonnage.error/1")
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_body_that_is_too_large_is_refused_by_what_it_says_and_by_what_it_is():
    with TestClient(make_app(Settings(workers=1, body_bytes=1000)), base_url="http://localhost") as client:
        json_headers = {"Content-Type": "application/json"}
        stated = client.post("/api/plan", content=b" " * 1001, headers=json_headers)
        unstated = client.post("/api/plan", content=(b" " * 400 for _ in range(3)), headers=json_headers)
        lying = client.post("/api/plan", content=b"{}", headers={**json_headers, "Content-Length": "9" * 30})
        endless = client.post("/api/plan", content=(b" " * 900 for _ in range(1000)), headers=json_headers)
    assert [answer.status_code for answer in (stated, unstated, lying, endless)] == [413] * 4
    assert stated.headers["connection"] == "close"


def test_all_bodies_together_take_so_much_and_give_it_back(monkeypatch):
    body = json.dumps(EXAMPLES["plan"]).encode()
    monkeypatch.setattr(application, "MOST_HELD_BYTES", len(body))
    with TestClient(make_app(Settings(workers=1)), base_url="http://localhost") as client:
        answers = [
            client.post("/api/plan", content=content, headers={"Content-Type": "application/json"})
            for content in (body, b" " + body, (part for part in (body, b" ")), body)
        ]
    assert [answer.status_code for answer in answers] == [200, 503, 503, 200]
    assert {(answer.headers["retry-after"], answer.headers["connection"]) for answer in answers[1:3]} == {
        ("1", "close")
    }


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(application, "BODY_SECONDS", 0.05)

    async def post():
        sent = []

        async def receive():
            await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/api/plan", "raw_path": b"/api/plan", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "root_path": "",
            "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1), "http_version": "1.1",
        }  # fmt: skip
        await make_app(Settings(workers=1))(scope, receive, send)
        return sent

    assert asyncio.run(post())[0]["status"] == 408
