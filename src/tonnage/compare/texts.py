"""What models are asked: a text in the public domain, and prompts, one to a line."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from tonnage.checkpoint.io import read_bytes
from tonnage.compare.wholes import CompareError
from tonnage.errors import Problem

TEXT_TITLE = "Abraham Lincoln, Second Inaugural Address, 4 March 1865"
"""A speech of a president of the United States, whose author died in 1865: in the public domain everywhere."""

PROMPTS_LIMIT_BYTES = 1 << 20
MOST_PROMPTS = 1000


def shipped_text() -> str:
    """Return the text perplexity is measured on."""
    return _shipped("second_inaugural.txt")


def shipped_prompts() -> tuple[str, ...]:
    """Return the prompts that are answered when no others are given."""
    return parse_prompts(_shipped("prompts.txt").encode(), where="prompts.txt")


def text_digest() -> str:
    """Return the SHA-256 of the text, so that figures are compared with those on the same text alone."""
    return hashlib.sha256(shipped_text().encode()).hexdigest()


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file.

    Raises:
        CompareError: It cannot be read, is too large, not UTF-8, or holds no prompt or too many.
    """
    raw = read_bytes(path, limit_bytes=PROMPTS_LIMIT_BYTES, kind=CompareError)
    return parse_prompts(raw, where=path.name)


def parse_prompts(raw: bytes, *, where: str) -> tuple[str, ...]:
    """Return the lines of a file that are not blank.

    Raises:
        CompareError: It is not UTF-8, or holds no prompt or too many.
    """
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise CompareError(Problem(where=where, what="prompts are no UTF-8", found=f"byte {error.start}")) from error
    prompts = tuple(line for line in lines if line.strip())
    if not 0 < len(prompts) <= MOST_PROMPTS:
        expected = f"1 to {MOST_PROMPTS}, one to a line"
        raise CompareError(Problem(where=where, what="prompts", expected=expected, found=str(len(prompts))))
    return prompts


def _shipped(name: str) -> str:
    return (files("tonnage.compare") / name).read_text(encoding="utf-8")
