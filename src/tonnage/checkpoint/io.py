"""Reading a checkpoint: headers and small JSON files, never the weights.

Of any file never more is read than a length that was checked against the size of the file.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import Findings
from tonnage.checkpoint.index import IndexFindings, check_index
from tonnage.checkpoint.prefixes import read_prefixes
from tonnage.checkpoint.shared_names import check_distinct
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import CheckpointError, ConfigError, Problem, TonnageError, raise_if_any
from tonnage.sources.local import LocalSource
from tonnage.sources.model import INDEX_FILE, SUFFIX, is_plain_file_name, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tonnage.sources.model import Source, SourceFile

JSON_LIMIT_BYTES = 8 << 20
INDEX_LIMIT_BYTES = 192 << 20
_LARGEST_KEPT_BLOCK = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeaders:
    """The validated headers of all shard files of one checkpoint.

    Attributes:
        shards: Sorted by file name. Files of one layer each share their ``skeleton``.
        notes: What is odd but harmless: files beside the index, a wrong ``total_size``.
    """

    shards: tuple[ShardHeader, ...]
    notes: tuple[Problem, ...]

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(shard.payload_bytes for shard in self.shards)

    @property
    def tensor_count(self) -> int:
        """Return the number of tensors."""
        return sum(map(len, self.shards))


def read_checkpoint_headers(source: Source | Path, *, also: Sequence[str] = ()) -> CheckpointHeaders:
    """Return the headers of a checkpoint, checked one by one, against each other and against the index.

    With ``model.safetensors.index.json`` the shard files are those it names; without, all ``*.safetensors`` files.

    Args:
        source: Where its safetensors files are; a directory if it is a path.
        also: Shard files that belong to the checkpoint although the index does not name them, such as the
            ``exl3-layer-*.safetensors`` of a manifest. Each must be there; their tensors have the same names in every
            file.

    Raises:
        CheckpointError: With all problems of all files.
        SourceError: A server cannot be reached, or answers wrong.
    """
    source = as_source(source)
    _keep_freed_blocks()
    present = _list_shard_files(source, also)
    readable, refused = _read_all(source, present)
    index = _check_index_file(source, readable, refused)
    counted = set(present) if index is None else set(index.named) | (set(also) & set(present))
    shards = tuple(shard for name, shard in readable.items() if name in counted)
    problems = [problem for name in present if name in (counted or present) for problem in refused.get(name, ())]
    problems += _absent(also, present)
    problems += index.problems if index else ()
    problems += check_distinct([shard for shard in shards if shard.shard_file not in also])
    if not counted and not problems:
        problems.append(Problem(where=source.address, what="no shard files", expected=f"*{SUFFIX}", found="none"))
    raise_if_any(CheckpointError, problems)
    notes = [Problem(where=name, what="not named by the index, not counted") for name in present if name not in counted]
    return CheckpointHeaders(shards=shards, notes=(*notes, *(index.notes if index else ())))


def digest_headers(source: Source | Path, headers: CheckpointHeaders) -> str:
    """Return the checkpoint digest: SHA-256 over every shard's name, size and raw header, in order of file names.

    Of each shard: the UTF-8 name preceded by its length, the file size (both as 8 bytes, little-endian), then the file
    from its first byte to the end of its header. Weights are not covered.

    Raises:
        CheckpointError: A file cannot be read any more or has another size than when its header was checked.
    """
    source = as_source(source)
    digest = hashlib.sha256()
    for shard in headers.shards:
        name = shard.shard_file.encode()
        with source.opened(shard.shard_file) as file:
            file_bytes = file.facts.nbytes
            prefix = file.read(shard.data_begin, 0)
        if file_bytes != shard.file_bytes:
            expected, found = f"{shard.file_bytes} bytes", f"{file_bytes} bytes"
            raise CheckpointError(
                Problem(where=shard.shard_file, what="changed while it was read", expected=expected, found=found)
            )
        digest.update(len(name).to_bytes(8, "little") + name + file_bytes.to_bytes(8, "little"))
        digest.update(prefix)
    return digest.hexdigest()


def begin_digest(source: Source | Path, headers: CheckpointHeaders) -> Callable[[], str]:
    """Begin ``digest_headers`` beside other work and return what waits for it: reading and hashing need no interpreter.

    The returned call raises as ``digest_headers``.
    """
    result: list[str] = []
    failure: list[TonnageError] = []

    def run() -> None:
        try:
            result.append(digest_headers(source, headers))
        except TonnageError as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="digest", daemon=True)
    thread.start()

    def wait() -> str:
        thread.join()
        if failure:
            raise failure[0]
        return result[0]

    return wait


def read_bytes(path: Path, *, limit_bytes: int = JSON_LIMIT_BYTES, kind: type[TonnageError] = ConfigError) -> bytes:
    """Return a small regular file whole.

    Raises:
        TonnageError: As ``kind``: no such file, not a regular file, larger than the limit, or unreadable.
    """
    return read_file(LocalSource(path.parent), path.name, limit_bytes=limit_bytes, kind=kind)


def read_given(path: Path, *, limit_bytes: int, kind: type[TonnageError]) -> bytes:
    """Return a small regular file whole; a refusal names it as it was given: the name of a descriptor says little.

    Raises:
        TonnageError: As :func:`read_bytes`.
    """
    try:
        return read_bytes(path, limit_bytes=limit_bytes, kind=kind)
    except kind as error:
        raise kind(*(replace(problem, where=str(path)) for problem in error.problems)) from error


def read_json(
    path: Path, *, limit_bytes: int = JSON_LIMIT_BYTES, kind: type[TonnageError] = ConfigError
) -> dict[str, object]:
    """Return a small JSON file that holds one object: UTF-8, no duplicate keys, no NaN, bounded size and depth.

    Raises:
        TonnageError: As ``kind``, one line per problem, named by the file name.
    """
    return parse_object(read_bytes(path, limit_bytes=limit_bytes, kind=kind), where=path.name, kind=kind)


def _keep_freed_blocks() -> None:
    """Make the allocator keep blocks of a header's size when they are freed, instead of returning them each time.

    glibc raises its threshold for separate mappings to the largest one freed. The block is never touched, so it costs
    nothing; without it two thirds of the time of a large checkpoint is page faults.
    """
    bytes(_LARGEST_KEPT_BLOCK)


def as_source(source: Source | Path) -> Source:
    """Return a source, of a path that of its directory."""
    return LocalSource(source) if isinstance(source, Path) else source


def _list_shard_files(source: Source, also: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all shard files; those a manifest names may be known to nobody else."""
    names = {name for name in source.names() if name.endswith(SUFFIX)}
    names.update(name for name in also if name not in names and is_plain_file_name(name) and source.has(name))
    return tuple(sorted(names))


def _read_all(source: Source, names: Sequence[str]) -> tuple[dict[str, ShardHeader], dict[str, tuple[Problem, ...]]]:
    """Return the headers of all files, and the problems of those that were refused."""
    reader = HeaderReader()
    readable: dict[str, ShardHeader] = {}
    refused: dict[str, tuple[Problem, ...]] = {}
    for name, prefix in read_prefixes(source, names):
        try:
            if isinstance(prefix, CheckpointError):
                raise prefix
            readable[name] = reader.read(prefix.raw, shard_file=name, file_bytes=prefix.file_bytes)
        except CheckpointError as error:
            refused[name] = error.problems
    return readable, refused


def _check_index_file(
    source: Source, readable: dict[str, ShardHeader], refused: dict[str, tuple[Problem, ...]]
) -> IndexFindings | None:
    """Return what the index says; None if there is none. An index that cannot be read is a finding."""
    if not source.has(INDEX_FILE):
        return None
    try:
        with source.opened(INDEX_FILE) as file:
            file_bytes = file.facts.nbytes
            if file_bytes <= INDEX_LIMIT_BYTES:
                return _compare_index(source, file, readable, refused)
    except CheckpointError as error:
        return IndexFindings(named=frozenset(), problems=error.problems, notes=())
    findings = Findings(INDEX_FILE)
    findings.add("file too large", expected=f"at most {INDEX_LIMIT_BYTES} bytes", found=f"{file_bytes} bytes")
    return IndexFindings(named=frozenset(), problems=findings.problems, notes=())


def _compare_index(
    source: Source, file: SourceFile, readable: dict[str, ShardHeader], refused: dict[str, tuple[Problem, ...]]
) -> IndexFindings:
    """Compare an index with the headers: on the disk as it is asked for, from elsewhere whole, or by pieces."""
    nbytes = file.facts.nbytes
    if source.transfer is None:
        return check_index(_FileText(file), readable, unreadable=refused)
    from tonnage.checkpoint.index_sample import (  # noqa: PLC0415 - a plan from the disk starts without
        WORTH_BYTES,
        check_sample,
        sample_places,
    )
    from tonnage.sources.parallel import in_order  # noqa: PLC0415 - as above

    if nbytes > WORTH_BYTES and not refused and not file.at_hand(nbytes, 0):
        places = sample_places(nbytes)
        pieces = in_order(lambda place: file.read(len(place), place.start), places, threads=source.parallel)
        findings = check_sample(nbytes, dict(zip(places, pieces, strict=True)), readable)
        if findings is not None:
            return findings
    return check_index(file.read(nbytes, 0), readable, unreadable=refused)


def _absent(also: Sequence[str], present: Sequence[str]) -> list[Problem]:
    return [
        Problem(where=name, what="shard file is missing", expected=f"a {SUFFIX} file in the directory", found="none")
        for name in also
        if name not in present
    ]


@dataclass(frozen=True, slots=True)
class _FileText:
    """An index file, read where it is asked for, so that it is never in memory as a whole."""

    file: SourceFile

    def __len__(self) -> int:
        return self.file.facts.nbytes

    def __getitem__(self, place: slice) -> bytes:
        begin, end, _ = place.indices(self.file.facts.nbytes)
        return self.file.read(max(end - begin, 0), begin)
