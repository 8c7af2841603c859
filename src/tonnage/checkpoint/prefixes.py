"""The first bytes of shard files, to the end of their headers: in turn from a disk, at once from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end
from tonnage.errors import CheckpointError, Problem
from tonnage.sources.model import Source, SourceFile, is_plain_file_name

MOST_SHARDS = 20_000
MOST_BYTES = 2 << 30
"""Of a checkpoint elsewhere: shard files, and bytes of headers. The largest one known has 75 MB of them."""

_ROOM = 256 << 20


class Prefix(NamedTuple):
    """What was read of one shard file."""

    raw: bytes
    file_bytes: int


def read_prefixes(source: Source, names: Sequence[str]) -> Iterator[tuple[str, Prefix | CheckpointError]]:
    """Yield for every file, in order, its first bytes to the end of its header, or why it has to be refused.

    Raises:
        SourceError: A server cannot be reached, or answers wrong.
        CheckpointError: There is too much of it.
    """
    if source.transfer is None:
        for name in names:
            try:
                yield name, _read_prefix(source, name)
            except CheckpointError as error:
                yield name, error
        return
    yield from _read_at_once(source, names)


def _read_prefix(source: Source, name: str) -> Prefix:
    with _opened(source, name) as file:
        nbytes = file.facts.nbytes
        return Prefix(file.read(_header_end(file), 0), nbytes)


@contextmanager
def _opened(source: Source, name: str) -> Iterator[SourceFile]:
    if not is_plain_file_name(name):
        raise CheckpointError(Problem(where=name, what="shard file name", expected="printable characters"))
    with source.opened(name) as file:
        yield file


def _header_end(file: SourceFile) -> int:
    nbytes = file.facts.nbytes
    return header_end(file.read(min(PREFIX_BYTES, nbytes), 0), file_bytes=nbytes, where=file.facts.name)


def _read_at_once(source: Source, names: Sequence[str]) -> Iterator[tuple[str, Prefix | CheckpointError]]:
    """Ask for all lengths, then for all headers: what is to come is known before most of it is asked for."""
    from tonnage.sources.parallel import TimeLimit, in_order  # noqa: PLC0415 - a plan from the disk starts without

    if len(names) > MOST_SHARDS:
        expected = f"at most {MOST_SHARDS}"
        raise CheckpointError(
            Problem(where=source.address, what="shard files", expected=expected, found=str(len(names)))
        )

    def length(name: str) -> int | CheckpointError:
        try:
            with _opened(source, name) as file:
                return _header_end(file)
        except CheckpointError as error:
            return error

    def prefix(name: str) -> Prefix | CheckpointError:
        nbytes = lengths[name]
        if isinstance(nbytes, CheckpointError):
            return nbytes
        try:
            with _opened(source, name) as file:
                return Prefix(file.read(nbytes, 0), file.facts.nbytes)
        except CheckpointError as error:
            return error

    limit = TimeLimit(source.address, source.planning_seconds)
    lengths = dict(zip(names, in_order(length, names, threads=source.parallel, limit=limit), strict=True))
    weights = [one if isinstance(one, int) else 0 for one in lengths.values()]
    if sum(weights) > MOST_BYTES:
        expected, found_bytes = f"at most {MOST_BYTES} bytes", f"{sum(weights)} bytes"
        raise CheckpointError(
            Problem(where=source.address, what="headers too large", expected=expected, found=found_bytes)
        )
    if source.transfer is not None:
        source.transfer.expect(sum(weights))
    found = in_order(prefix, names, threads=source.parallel, weights=weights, room=_ROOM, limit=limit)
    yield from zip(names, found, strict=True)
