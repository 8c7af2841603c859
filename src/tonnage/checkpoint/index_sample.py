"""A large index elsewhere, compared with the headers without fetching it.

The index of a large checkpoint is nearly as large as all its headers, and says again what they say. Where its writer
put every member down alike, its size follows from the names and file names in the headers; pieces from all over it must
then be members that the headers have. What is not exactly so is fetched whole and compared name by name.

An index that has the right size and is wrong between the pieces is not found out here. No number depends on it:
tensors, their places and their bytes are always those of the headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonnage.checkpoint.header_check import Findings
from tonnage.checkpoint.index import Account, IndexFindings, layout
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.sources.model import INDEX_FILE

WORTH_BYTES = 1 << 20
"""Smaller ones are fetched whole."""

_PIECES = 16
_PIECE_BYTES = 4 << 10
_FIRST = re.compile(rb'(?P<first>[ \t\r\n]*)"[^"\\]*"(?P<middle>[ \t\r\n]*:[ \t\r\n]*)"[^"\\]*",(?P<lead>[ \t\r\n]*)"')


def sample_places(nbytes: int) -> tuple[range, ...]:
    """Return which bytes of an index are wanted: its beginning, its end, and pieces between."""
    last = nbytes - _PIECE_BYTES
    begins = {last * number // (_PIECES - 1) for number in range(_PIECES)}
    return tuple(range(begin, begin + _PIECE_BYTES) for begin in sorted(begins))


def check_sample(nbytes: int, pieces: Mapping[range, bytes], shards: Mapping[str, ShardHeader]) -> IndexFindings | None:
    """Return that an index agrees with the headers as far as can be told; ``None`` if it has to be read.

    Args:
        nbytes: Size of the index.
        pieces: Its bytes at the places of :func:`sample_places`.
        shards: Headers of all shard files, by file name; none was refused.
    """
    text = _Sampled(nbytes, pieces)
    found = layout(text)
    if found is None:
        return None
    begin, end, metadata = found
    first = _FIRST.match(text[begin:_PIECE_BYTES])
    while text[end - 1 : end].isspace():
        end -= 1
    if first is None:
        return None
    alike = _body_bytes(len(first["lead"]), len(first["middle"]), shards)
    if end - begin != alike + len(first["first"]) - len(first["lead"]):
        return None
    if not all(_agrees(piece, first["middle"], shards) for piece in pieces.values()):
        return None
    account = Account(shards, (), INDEX_FILE)
    for shard in shards.values():
        account.complete(shard)
    findings = account.close(metadata)
    notes = Findings(INDEX_FILE)
    notes.add(f"its size and {_PIECES} pieces agree with the headers; the rest was not fetched")
    return IndexFindings(named=findings.named, problems=findings.problems, notes=(*findings.notes, *notes.problems))


def _body_bytes(lead: int, middle: int, shards: Mapping[str, ShardHeader]) -> int:
    """Return the size of all members, each written alike, with commas between."""
    total = 0
    for shard in shards.values():
        names = sum(len(name.encode()) for name in shard.names())
        around = lead + middle + len('"":"",') - len(":") + len(shard.shard_file.encode())
        total += names + len(shard) * around
    return total - len(",")


def _agrees(piece: bytes, middle: bytes, shards: Mapping[str, ShardHeader]) -> bool:
    """Whether every member in a piece is one that the headers have, and there are some."""
    members = re.findall(rb'"([^"\\]*)"' + re.escape(middle) + rb'"([^"\\]*)"', piece)
    names: dict[str, set[str]] = {}
    for name, file in ((name.decode("utf-8", "replace"), file.decode("utf-8", "replace")) for name, file in members):
        if file in shards and file not in names:
            names[file] = set(shards[file].names())
        if name not in names.get(file, ()):
            return False
    return bool(members)


class _Sampled:
    """An index of which only some pieces are there; what lies between is none of anybody's words."""

    def __init__(self, nbytes: int, pieces: Mapping[range, bytes]) -> None:
        self._nbytes = nbytes
        self._pieces = pieces

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, place: slice) -> bytes:
        """Return the bytes asked for as far as they are at hand from the beginning of the range, or to its end."""
        begin, end, _ = place.indices(self._nbytes)
        for there, piece in self._pieces.items():
            if begin in there and end > begin:
                return piece[begin - there.start : end - there.start]
        return b""
