"""What goes between the server and its workers: questions, answers, and refusals as documents."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from tonnage.errors import Problem, one_line

ERROR_SCHEMA = "tonnage.error/1"
JSON, HTML = "application/json", "text/html; charset=utf-8"
OK, BAD_REQUEST, NOT_FOUND, UNPROCESSABLE = 200, 400, 404, 422
MOST_PROBLEMS = 40
READY = b"+"
"""What a worker says first."""
LENGTH_BYTES = 4
"""Every message on a pipe begins with its length, big-endian."""


class Question(Struct, array_like=True, frozen=True):
    """What a worker is asked: the name of an answer, and the body of the request."""

    name: str
    body: bytes


class Answer(Struct, array_like=True, frozen=True):
    """What is sent back.

    Attributes:
        status: Of HTTP.
        media: Type of the content.
        content: The body.
        filename: Name of what is to be saved; empty for what is shown.
    """

    status: int
    media: str
    content: bytes
    filename: str = ""


def refusal(status: int, *problems: Problem) -> Answer:
    """Return problems as an answer; those beyond the first 40 are counted."""
    rows = [
        {name: _shown(getattr(problem, name)) for name in ("where", "what", "tensor", "expected", "found")}
        for problem in problems[:MOST_PROBLEMS]
    ]
    document = {"schema": ERROR_SCHEMA, "problems": rows, "more": max(len(problems) - MOST_PROBLEMS, 0)}
    return Answer(status, JSON, msgspec.json.encode(document))


def _shown(text: str | None) -> str | None:
    return None if text is None else one_line(text)
