"""Runs of an index: the members of one shard, written like those of the shard before but for two words.

See ``index`` for what this is for. A run is only kept after its text was compared with the names of the skeleton, and
only answers for a shard of the same skeleton none of whose tensors has been named yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tonnage.checkpoint.skeletons import PLACEHOLDER

if TYPE_CHECKING:
    from tonnage.checkpoint.headers import Header
    from tonnage.checkpoint.index import IndexText
    from tonnage.checkpoint.skeletons import ShardHeader

_WS = rb"[ \t\r\n]*"
_FIRST = re.compile(
    rb"(?P<lead>" + _WS + rb'"(?P<prefix>[^"\\]*?\.layers\.))(?P<number>0|[1-9][0-9]{0,5})\.[^"\\]*'
    rb'(?P<middle>"' + _WS + rb":" + _WS + rb'")(?P<file>[ !#-\[\]-~]*)"'  # ASCII without quote and backslash
)
_FIRST_BYTES = 4096


class Untouched(Protocol):
    """Who knows which shards the index has not named yet."""

    def untouched(self, shard_file: str) -> ShardHeader | None:
        """Return a shard no member has named yet."""

    def complete(self, shard: ShardHeader) -> None:
        """Take every tensor of an untouched shard as named once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """What a writer puts around the words: white space and name before the number, colon and quotes between."""

    lead: bytes
    prefix: bytes
    middle: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Members in the order written: what follows the number in each, up to the file name."""

    style: _Style
    parts: tuple[bytes, ...]
    fixed_bytes: int

    def is_written(self, text: bytes, number: bytes, shard_file: bytes) -> bool:
        """Say whether a text is these members with a layer number and a file name, up to the last quote."""
        lead = self.style.lead + number
        between = shard_file + b'",' + lead
        return (
            text.startswith(lead)
            and text.endswith(shard_file + b'"')
            and text.startswith(between.join(self.parts), len(lead))
        )

    def nbytes(self, number: bytes, shard_file: bytes) -> int:
        """Return the length of these members with a layer number and a file name, up to the last quote."""
        around = len(self.style.lead) + len(number) + len(shard_file) + len(b'",')
        return self.fixed_bytes + around * len(self.parts) - len(b",")


class Runs:
    """The runs seen so far, by skeleton and style."""

    def __init__(self) -> None:
        """Begin with none."""
        self._runs: dict[tuple[Header, _Style], _Run] = {}

    def match(self, text: IndexText, begin: int, end: int, account: Untouched) -> int | None:
        """Complete a shard if all its members follow at ``begin``, and return the place after; None if not so."""
        first = _FIRST.match(text[begin : min(begin + _FIRST_BYTES, end)])
        if first is None:
            return None
        number, shard_file = first["number"], first["file"]
        shard = account.untouched(shard_file.decode("ascii"))
        if shard is None or shard.layer != int(number):
            return None
        style = _Style(lead=first["lead"], prefix=first["prefix"], middle=first["middle"])
        run = self._runs.get((shard.skeleton, style))
        if run is None:
            run = _learn(text, begin, style, number, shard)
            if run is None:
                return None
            self._runs[shard.skeleton, style] = run
        after = begin + run.nbytes(number, shard_file)
        if after > end or not run.is_written(text[begin:after], number, shard_file):
            return None
        account.complete(shard)
        return after


def _learn(text: IndexText, begin: int, style: _Style, number: bytes, shard: ShardHeader) -> _Run | None:
    """Return the run at ``begin`` if its parts are exactly the names of the skeleton, each once.

    Names of a skeleton hold neither quotes nor backslashes, so a part equal to one is spelled as JSON spells it. A name
    that holds the number twice never equals a part, as the second stays written out: such shards are decoded.
    """
    shard_file = shard.shard_file.encode()
    names = {tensor.name.encode() for tensor in shard.skeleton.tensors}
    growth = len(number) - len(PLACEHOLDER)
    around = len(style.lead) - len(style.prefix) + len(style.middle) + len(shard_file) + len(b'",')
    nbytes = sum(map(len, names)) + (growth + around) * len(names) - len(b",")
    lead = style.lead + number
    body = text[begin + len(lead) : begin + nbytes]
    tail = shard_file + b'"'
    if not body.endswith(tail):
        return None
    parts = tuple(body[: -len(tail)].split(tail + b"," + lead))
    cut = len(style.middle)
    named = {style.prefix + PLACEHOLDER.encode() + part[:-cut] for part in parts}
    if len(parts) != len(names) or named != names or any(part[-cut:] != style.middle for part in parts):
        return None
    return _Run(style=style, parts=parts, fixed_bytes=sum(map(len, parts)))
