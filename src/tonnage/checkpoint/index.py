"""``model.safetensors.index.json``: every tensor where the index says, and nothing besides.

The index of a large checkpoint is tens of megabytes of names the headers have already given, so it is compared rather
than decoded where that is exact:

* The members of ``weight_map`` are read in windows cut at commas. If every window, in braces, is an object of strings,
  then so is the whole: JSON has one reading. If one is not, the whole file is decoded instead.
* A run of members that spells each name of a skeleton once (``skeletons``) is kept with the layer number and the file
  name cut out. Where the next such shard begins, the run is filled in and compared with the bytes of the file. Equal
  bytes are equal members; anything else is decoded.

This module reads no file: it takes anything that has a length and gives bytes for a slice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from tonnage.checkpoint.header_check import Findings
from tonnage.checkpoint.index_runs import Runs
from tonnage.checkpoint.strict_json import Members, NotJsonError, kind_of, members, repeated
from tonnage.sources.model import INDEX_FILE, SUFFIX, is_plain_file_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from tonnage.checkpoint.skeletons import ShardHeader
    from tonnage.errors import Problem

_WEIGHT_MAP, _METADATA, _TOTAL = "weight_map", "metadata", "total_size"


class IndexText(Protocol):
    """The bytes of an index: ``bytes`` itself, a memory map, or a file read where it is asked for."""

    def __len__(self) -> int:
        """Return the size in bytes."""

    def __getitem__(self, place: slice, /) -> bytes:
        """Return some of the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFindings:
    """What an index says about the shard files beside it.

    Attributes:
        named: The shard files the index names; others do not belong to the checkpoint.
        problems: Why the checkpoint must be refused; empty if index and headers agree.
        notes: What is odd but harmless, such as a wrong ``total_size``.
    """

    named: frozenset[str]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]


def check_index(
    text: IndexText,
    shards: Mapping[str, ShardHeader],
    *,
    unreadable: Collection[str] = (),
    where: str = INDEX_FILE,
) -> IndexFindings:
    """Compare an index with the headers of the shard files present.

    Args:
        text: The index file.
        shards: Headers of the shard files in the directory, by file name.
        unreadable: Shard files that are there but were refused; their tensors are not compared.
        where: File name for the problems.

    Returns:
        The files named, and every disagreement (20 written out), except a tensor that stands in two named files:
        that is left to ``shared_names``, with or without an index.
    """
    account = Account(shards, unreadable, where)
    metadata = _read_in_windows(text, account)
    if metadata is None:
        account = Account(shards, unreadable, where)
        metadata = _read_whole(text[0 : len(text)], account)
    return account.close(metadata)


class Account:
    """Which tensors of which shard the index has not named yet."""

    def __init__(self, shards: Mapping[str, ShardHeader], unreadable: Collection[str], where: str) -> None:
        self.findings = Findings(where)
        self.runs = Runs()
        self._shards = shards
        self._unreadable = unreadable
        self._open: dict[str, set[str] | None] = {}  # None: nothing to compare with

    def untouched(self, shard_file: str) -> ShardHeader | None:
        """Return a shard no member has named yet."""
        return None if shard_file in self._open else self._shards.get(shard_file)

    def complete(self, shard: ShardHeader) -> None:
        """Take every tensor of an untouched shard as named once."""
        self._open[shard.shard_file] = set()

    def take(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Take members of ``weight_map``."""
        for name, shard_file in pairs:
            if shard_file not in self._open:
                self._open[shard_file] = self._names(shard_file)
            waiting = self._open[shard_file]
            if waiting is None:
                continue
            if name in waiting:
                waiting.remove(name)
            else:
                self._explain(name, shard_file)

    def close(self, metadata: Mapping[str, object]) -> IndexFindings:
        """Note what was not named, and return all findings."""
        for shard_file, waiting in sorted(self._open.items()):
            for name in sorted(waiting or ()):
                if not self.findings.full and any(owner in self._open for owner in self._owners(name, shard_file)):
                    continue
                self.findings.add(
                    "not in the index", tensor=name, expected=f"in {_WEIGHT_MAP}", found=f"in {shard_file}"
                )
        if not self._open and not self.findings.problems:
            self.findings.add(f"{_WEIGHT_MAP} is empty", expected="shard files", found="none")
        named = frozenset(name for name in self._open if name in self._shards or name in self._unreadable)
        notes = Findings(self.findings.where)
        total = metadata.get(_TOTAL)
        counted = sum(self._shards[name].payload_bytes for name in named if name in self._shards)
        if type(total) is int and total != counted and not self.findings.problems and named <= set(self._shards):
            what = f"{_METADATA}.{_TOTAL} differs from the headers"
            notes.add(what, expected=f"{counted} bytes", found=f"{total} bytes")
        return IndexFindings(named=named, problems=self.findings.problems, notes=notes.problems)

    def _owners(self, name: str, shard_file: str) -> Iterator[str]:
        """Yield the other shard files that hold a tensor."""
        for owner, shard in self._shards.items():
            if owner != shard_file and name in set(shard.names()):
                yield owner

    def _names(self, shard_file: str) -> set[str] | None:
        """Return the tensors of a shard named for the first time; None if it has none to compare."""
        if shard_file in self._shards:
            return set(self._shards[shard_file].names())
        if not is_plain_file_name(shard_file) or not shard_file.endswith(SUFFIX):
            expected = f"a plain file name ending in {SUFFIX}"
            self.findings.add("shard file name", expected=expected, found=repr(shard_file)[:120])
        elif shard_file not in self._unreadable:
            self.findings.add("shard file is missing", expected=f"{shard_file} beside the index", found="no such file")
        return None

    def _explain(self, name: str, shard_file: str) -> None:
        if self.findings.full:
            self.findings.add("not in its shard file")
        elif name in set(self._shards[shard_file].names()):
            self.findings.add("duplicate name", tensor=name, expected="one entry", found="another")
        else:
            found = next((f"in {owner}" for owner in self._owners(name, shard_file)), "in no shard file")
            self.findings.add("not where the index says", tensor=name, expected=f"in {shard_file}", found=found)


# ---- exact but fast: windows and runs --------------------------------------------------------------------------------

_WS = rb"[ \t\r\n]*"
_HEAD = re.compile(
    _WS + rb"\{" + _WS + rb'(?:"metadata"' + _WS + rb":" + _WS + rb"(\{[^{}\\]*\})" + _WS + rb"," + _WS + rb")?"
    rb'"weight_map"' + _WS + rb":" + _WS + rb"\{"
)
_TAIL = re.compile(rb"\}" + _WS + rb"\}" + _WS + rb"\Z")
_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 10
_FIRST_WINDOW, _LARGEST_WINDOW = 1 << 10, 1 << 18
_QUOTES_PER_MEMBER = 4
_MEMBER = re.compile(_WS + rb'"[^"\\]*"' + _WS + rb":" + _WS + rb'("[^"\\]*")')
_STRINGS = msgspec.json.Decoder(dict[str, str])


def layout(text: IndexText) -> tuple[int, int, Mapping[str, object]] | None:
    """Return where the members of ``weight_map`` begin and end, and the metadata; ``None`` where that is not plain."""
    head = _HEAD.match(text[0:_HEAD_BYTES])
    tail_begin = max(len(text) - _TAIL_BYTES, head.end() if head else 0)
    tail = _TAIL.search(text[tail_begin : len(text)])
    if head is None or tail is None:
        return None
    metadata: object = Members()
    if head[1] is not None:
        try:
            metadata = members(head[1])
        except NotJsonError:
            return None
    if not isinstance(metadata, Members) or repeated(metadata):
        return None
    return head.end(), tail_begin + tail.start(), dict(metadata)


def _read_in_windows(text: IndexText, account: Account) -> Mapping[str, object] | None:
    """Take all members; return the metadata, or None if the file is not laid out for windows."""
    found = layout(text)
    if found is None:
        return None
    begin, end, metadata = found
    return metadata if _take_members(text, begin, end, account) else None


def _take_members(text: IndexText, begin: int, end: int, account: Account) -> bool:
    """Take the members between two places; False if they are not plainly members separated by commas."""
    window = _FIRST_WINDOW
    while True:
        after = account.runs.match(text, begin, end, account)
        if after is None:
            piece, window = _window(text, begin, end, window)
            pairs = _pairs(piece)
            if not pairs:
                return False
            account.take(pairs.items())
            after = begin + len(piece)
        if after == end:
            return True
        if text[after : after + 1] != b",":
            return not text[after:end].strip(b" \t\r\n")
        begin = after + 1


def _window(text: IndexText, begin: int, end: int, nbytes: int) -> tuple[bytes, int]:
    """Return members from ``begin`` on, cut before a comma, and how many bytes to look at next time.

    The cut is after the last member with the file name of the first, so that a run of the next file can begin there.
    """
    piece = text[begin : min(begin + nbytes, end)]
    first = _MEMBER.match(piece)
    cut = piece.rfind(first[1] + b",") + len(first[1]) if first else 0
    whole = piece if begin + nbytes >= end else piece[: piece.rfind(b'",') + 1]
    if first and len(first[1]) <= cut < len(whole):
        return piece[:cut], _FIRST_WINDOW
    if not whole and nbytes < _LARGEST_WINDOW:
        return _window(text, begin, end, _LARGEST_WINDOW)
    return whole, min(2 * nbytes, _LARGEST_WINDOW)


def _pairs(piece: bytes) -> Mapping[str, str]:
    """Return the members of a piece; none if it is not members with string values, each name once and unescaped."""
    try:
        strings = _STRINGS.decode(b"{" + piece + b"}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return strings if b"\\" not in piece and piece.count(b'"') == _QUOTES_PER_MEMBER * len(strings) else {}


# ---- any legal JSON ------------------------------------------------------------------------------------------------


def _read_whole(raw: bytes, account: Account) -> Mapping[str, object]:
    """Take the members of an index that is laid out in an unusual way, or explain why it is none."""
    findings = account.findings
    try:
        document = members(raw)
    except NotJsonError as error:
        findings.add(error.what, expected=error.expected, found=error.found)
        return {}
    if not isinstance(document, Members):
        findings.add("not a JSON object", expected="an object", found=kind_of(document))
        return {}
    for key, count in repeated(document):
        findings.add(f"duplicate key {key}", expected="1", found=str(count))
    keys = dict(document)
    _take_weight_map(keys.get(_WEIGHT_MAP), account, present=_WEIGHT_MAP in keys)
    metadata = keys.get(_METADATA, Members())
    if not isinstance(metadata, Members):
        findings.add(_METADATA, expected="an object", found=kind_of(metadata))
        return {}
    for key, count in repeated(metadata):
        findings.add(f"duplicate key {_METADATA}.{key}", expected="1", found=str(count))
    return dict(metadata)


def _take_weight_map(value: object, account: Account, *, present: bool) -> None:
    findings = account.findings
    if not isinstance(value, Members):
        found = kind_of(value) if present else "no such key"
        findings.add(_WEIGHT_MAP, expected="an object of tensor names and file names", found=found)
        return
    for name, shard_file in value:
        if not isinstance(shard_file, str):
            findings.add(_WEIGHT_MAP, tensor=name, expected="a file name", found=kind_of(shard_file))
    account.take((name, shard_file) for name, shard_file in value if isinstance(shard_file, str))
