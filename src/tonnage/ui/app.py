"""The web application: bodies are read up to a limit, questions go to workers, answers are sent back as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tonnage.errors import Problem, UnitError
from tonnage.ui.assets import asset_routes, package
from tonnage.ui.guard import Guard, problem_response
from tonnage.ui.messages import Answer, Question
from tonnage.ui.openapi import openapi_document
from tonnage.ui.pool import BusyError, GoneError, Pool, TookTooLongError, UnansweredError, WorkerKilledError
from tonnage.ui.routes import API, PAGES, Answered
from tonnage.ui.settings import Settings

BODY_SECONDS = 10
RETRY_SECONDS = "1"
_DROPPED = 4
"""Times the longest body, up to which one that is too large is read to its end."""
MOST_HELD_BYTES = 256 << 20
"""Of all bodies that are here at once, read to their end or not."""
_CLOSE = {"Connection": "close"}
SLOW, TOO_LARGE, GONE, BUG, BUSY, TOOK_TOO_LONG = 408, 413, 499, 500, 503, 504


def make_app(settings: Settings) -> Starlette:
    """Return the application; its workers run for as long as it does. Where none can be, ``state.refused`` says why."""
    package("jinja2")  # which only workers import, and whose absence is better known before
    pool = Pool(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(pool.running())
            except OSError as error:
                problem = Problem(where="--workers", what="cannot be started", found=error.strerror or str(error))
                app.state.refused = UnitError(problem)
            yield

    description = msgspec.json.encode(openapi_document())

    async def described(_: Request) -> Response:
        return Response(description, media_type="application/json")

    answer = partial(_answer, pool, settings, _Held())
    answered = [Route(route.path, partial(answer, route), methods=[route.method]) for route in (*API, *PAGES)]
    app = Starlette(
        routes=[*answered, Route("/api/openapi.json", described), *asset_routes()],
        middleware=[Middleware(Guard, hosts=settings.hosts)],
        exception_handlers={HTTPException: _http_problem},
        lifespan=lifespan,
    )
    app.state.refused = None
    return app


class _Held:
    """How many bytes of bodies are here."""

    nbytes = 0


async def _answer(pool: Pool, settings: Settings, held: _Held, route: Answered, request: Request) -> Response:
    """Return what a worker answers."""
    read = bytearray()
    try:
        posted = route.method == "POST"
        if posted:
            await _read_body(request, settings.body_bytes, read, held)
        body = bytes(read) if posted else request.scope["query_string"]
        return _response(await pool.ask(Question(route.name, body), request.is_disconnected))
    except (UnansweredError, ClientDisconnect) as error:
        return _unanswered(error, settings)
    except asyncio.CancelledError:  # by the server alone, which has waited long enough for its end
        return problem_response(BUSY, Problem(where="server", what="it ends"), headers=_CLOSE)
    finally:
        held.nbytes -= len(read)


def _unanswered(error: UnansweredError | ClientDisconnect, settings: Settings) -> Response:
    """Return why there is no answer."""
    if isinstance(error, BodyTooLargeError):
        expected = f"at most {settings.body_bytes} bytes"
        return problem_response(TOO_LARGE, Problem(where="body", what="too large", expected=expected), headers=_CLOSE)
    if isinstance(error, BodyTooSlowError):
        expected = f"all of it within {BODY_SECONDS} s"
        return problem_response(SLOW, Problem(where="body", what="too slow", expected=expected), headers=_CLOSE)
    if isinstance(error, BusyError | WorkerKilledError):
        what = "too many requests wait" if isinstance(error, BusyError) else "what worked on it was killed"
        busy = Problem(where="server", what=what, expected="another try later")
        return problem_response(BUSY, busy, headers={**_CLOSE, "Retry-After": RETRY_SECONDS})
    if isinstance(error, TookTooLongError):
        expected = f"an answer within {settings.seconds:g} s"
        return problem_response(TOOK_TOO_LONG, Problem(where="server", what="cut off", expected=expected))
    if isinstance(error, GoneError | ClientDisconnect):
        return problem_response(GONE, Problem(where="request", what="given up by who asked"))
    ended = Problem(where="server", what="what worked on it ended; if that is a bug, the terminal says more")
    return problem_response(BUG, ended)


class BodyTooLargeError(UnansweredError):
    """A body is longer than is read."""


class BodyTooSlowError(UnansweredError):
    """A body does not arrive."""


async def _read_body(request: Request, most: int, read: bytearray, held: _Held) -> None:
    """Read the body of a request, kept no further than it may go and read no longer than it may take.

    What is too large is read on for a while, and dropped: who is still sending does not hear a refusal.
    """
    stated = request.headers.get("content-length", "0")
    length = int(stated[:20]) if stated.isdecimal() else 0
    if length > most * _DROPPED:
        raise BodyTooLargeError
    seen = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                seen += len(part)
                if max(seen, length) <= most:
                    if held.nbytes + len(part) > MOST_HELD_BYTES:
                        raise BusyError
                    read += part
                    held.nbytes += len(part)
                elif seen > most * _DROPPED:
                    break
    except TimeoutError as error:
        if max(seen, length) <= most:
            raise BodyTooSlowError from error
    if max(seen, length) > most:
        raise BodyTooLargeError


def _response(answer: Answer) -> Response:
    headers: Mapping[str, str] = {}
    if answer.filename:
        headers = {"Content-Disposition": f'attachment; filename="{answer.filename}"'}
    return Response(answer.content, status_code=answer.status, media_type=answer.media, headers=headers)


async def _http_problem(_: Request, error: Exception) -> Response:
    """Return what the router refuses as our own refusals."""
    assert isinstance(error, HTTPException)
    problem = Problem(where="request", what=error.detail)
    return problem_response(error.status_code, problem, headers=dict(error.headers or {}))
