"""What is to be served: concurrency, prefill chunk, context and KV dtype, written ``c4-p4096``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonnage.errors import Problem, UnitError
from tonnage.units import parse_tokens

_NAME = re.compile(r"c(?P<c>[1-9]\d{0,6})-p(?P<p>[1-9]\d{0,8}[km]?)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A serving profile; ``None`` where it was not asked for.

    Attributes:
        name: As written.
        concurrency: Requests served at once.
        prefill_chunk_tokens: Tokens of one prefill step.
        context_tokens: Longest context.
        kv_dtype: Dtype of the KV cache.
    """

    name: str | None = None
    concurrency: int | None = None
    prefill_chunk_tokens: int | None = None
    context_tokens: int | None = None
    kv_dtype: str | None = None


def parse_profile(text: str | None, *, context_tokens: int | None = None, kv_dtype: str | None = None) -> Profile:
    """Return a profile from ``c4-p4096``, or ``c4-p4k``: its name is the former then.

    Raises:
        UnitError: The text is no profile name.
    """
    if text is None:
        return Profile(context_tokens=context_tokens, kv_dtype=kv_dtype)
    match = _NAME.fullmatch(text.lower())
    if match is None:
        raise UnitError(
            Problem(where="--profile", what="not a profile", expected="cC-pP such as c4-p4096", found=repr(text))
        )
    tokens = parse_tokens(match["p"], where="--profile")
    return Profile(
        name=f"c{match['c']}-p{tokens}",
        concurrency=int(match["c"]),
        prefill_chunk_tokens=tokens,
        context_tokens=context_tokens,
        kv_dtype=kv_dtype,
    )
