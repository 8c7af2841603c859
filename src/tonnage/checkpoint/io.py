"""Reading a checkpoint directory: headers and small JSON files, never the weights.

The only module of this package that opens files. Only regular files directly inside the directory are opened (links to
files are followed, as in a Hugging Face cache), without blocking on pipes and devices, and never more of them is read
than a length that was checked against the size of the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import PREFIX_BYTES, Findings
from tonnage.checkpoint.headers import header_end
from tonnage.checkpoint.index import INDEX_FILE, SUFFIX, IndexFindings, check_index, is_plain_file_name
from tonnage.checkpoint.shared_names import check_distinct
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import CheckpointError, ConfigError, Problem, TonnageError, raise_if_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

JSON_LIMIT_BYTES = 8 << 20
INDEX_LIMIT_BYTES = 192 << 20
_LARGEST_KEPT_BLOCK = 16 << 20
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


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


def read_checkpoint_headers(directory: Path, *, also: Sequence[str] = ()) -> CheckpointHeaders:
    """Return the headers of a checkpoint directory, checked one by one, against each other and against the index.

    With ``model.safetensors.index.json`` the shard files are those it names; without, all ``*.safetensors`` files.

    Args:
        directory: A directory of safetensors files.
        also: Shard files that belong to the checkpoint although the index does not name them, such as the
            ``exl3-layer-*.safetensors`` of a manifest. Each must be there; their tensors have the same names in every
            file.

    Raises:
        CheckpointError: With all problems of all files.
    """
    _keep_freed_blocks()
    present = _list_shard_files(directory)
    readable, refused = _read_all(directory, present)
    index = _check_index_file(directory, readable, refused)
    counted = set(present) if index is None else set(index.named) | (set(also) & set(present))
    shards = tuple(shard for name, shard in readable.items() if name in counted)
    problems = [problem for name in present if name in (counted or present) for problem in refused.get(name, ())]
    problems += _absent(also, present)
    problems += index.problems if index else ()
    problems += check_distinct([shard for shard in shards if shard.shard_file not in also])
    if not counted and not problems:
        problems.append(Problem(where=str(directory), what="no shard files", expected=f"*{SUFFIX}", found="none"))
    raise_if_any(CheckpointError, problems)
    notes = [Problem(where=name, what="not named by the index, not counted") for name in present if name not in counted]
    return CheckpointHeaders(shards=shards, notes=(*notes, *(index.notes if index else ())))


def digest_headers(directory: Path, headers: CheckpointHeaders) -> str:
    """Return the checkpoint digest: SHA-256 over every shard's name, size and raw header, in order of file names.

    Of each shard: the UTF-8 name preceded by its length, the file size (both as 8 bytes, little-endian), then the file
    from its first byte to the end of its header. Weights are not covered.

    Raises:
        CheckpointError: A file cannot be read any more or has another size than when its header was checked.
    """
    digest = hashlib.sha256()
    for shard in headers.shards:
        name = shard.shard_file.encode()
        with _opened(directory, shard.shard_file) as (descriptor, file_bytes):
            prefix = _read_at(descriptor, shard.data_begin, 0, shard.shard_file)
        if file_bytes != shard.file_bytes:
            expected, found = f"{shard.file_bytes} bytes", f"{file_bytes} bytes"
            raise CheckpointError(
                Problem(where=shard.shard_file, what="changed while it was read", expected=expected, found=found)
            )
        digest.update(len(name).to_bytes(8, "little") + name + file_bytes.to_bytes(8, "little"))
        digest.update(prefix)
    return digest.hexdigest()


def begin_digest(directory: Path, headers: CheckpointHeaders) -> Callable[[], str]:
    """Begin ``digest_headers`` beside other work and return what waits for it: reading and hashing need no interpreter.

    The returned call raises as ``digest_headers``.
    """
    result: list[str] = []
    failure: list[TonnageError] = []

    def run() -> None:
        try:
            result.append(digest_headers(directory, headers))
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
    with _opened(path.parent, path.name, kind) as (descriptor, file_bytes):
        if file_bytes > limit_bytes:
            expected = f"at most {limit_bytes} bytes"
            raise kind(Problem(where=path.name, what="file too large", expected=expected, found=f"{file_bytes} bytes"))
        return _read_at(descriptor, file_bytes, 0, path.name, kind)


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


def _list_shard_files(directory: Path) -> tuple[str, ...]:
    try:
        names = sorted(path.name for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:
        what = "cannot list the checkpoint directory"
        raise CheckpointError(Problem(where=str(directory), what=what, found=error.strerror)) from error
    return tuple(names)


def _read_all(directory: Path, names: Sequence[str]) -> tuple[dict[str, ShardHeader], dict[str, tuple[Problem, ...]]]:
    """Return the headers of all files, and the problems of those that were refused."""
    reader = HeaderReader()
    readable: dict[str, ShardHeader] = {}
    refused: dict[str, tuple[Problem, ...]] = {}
    for name in names:
        try:
            readable[name] = _read_header(directory, name, reader)
        except CheckpointError as error:
            refused[name] = error.problems
    return readable, refused


def _read_header(directory: Path, name: str, reader: HeaderReader) -> ShardHeader:
    if not is_plain_file_name(name):
        raise CheckpointError(Problem(where=name, what="shard file name", expected="printable characters"))
    with _opened(directory, name) as (descriptor, file_bytes):
        start = _read_at(descriptor, min(PREFIX_BYTES, file_bytes), 0, name)
        data_begin = header_end(start, file_bytes=file_bytes, where=name)
        prefix = _read_at(descriptor, data_begin, 0, name)
    return reader.read(prefix, shard_file=name, file_bytes=file_bytes)


def _check_index_file(
    directory: Path, readable: dict[str, ShardHeader], refused: dict[str, tuple[Problem, ...]]
) -> IndexFindings | None:
    """Return what the index says; None if there is none. An index that cannot be read is a finding."""
    if not os.path.lexists(directory / INDEX_FILE):
        return None
    try:
        with _opened(directory, INDEX_FILE) as (descriptor, file_bytes):
            if file_bytes <= INDEX_LIMIT_BYTES:
                return check_index(_FileText(descriptor, file_bytes), readable, unreadable=refused)
    except CheckpointError as error:
        return IndexFindings(named=frozenset(), problems=error.problems, notes=())
    findings = Findings(INDEX_FILE)
    findings.add("file too large", expected=f"at most {INDEX_LIMIT_BYTES} bytes", found=f"{file_bytes} bytes")
    return IndexFindings(named=frozenset(), problems=findings.problems, notes=())


def _absent(also: Sequence[str], present: Sequence[str]) -> list[Problem]:
    return [
        Problem(where=name, what="shard file is missing", expected=f"a {SUFFIX} file in the directory", found="none")
        for name in also
        if name not in present
    ]


@dataclass(frozen=True, slots=True)
class _FileText:
    """An index file, read where it is asked for, so that it is never in memory as a whole."""

    descriptor: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, place: slice) -> bytes:
        begin, end, _ = place.indices(self.nbytes)
        return _read_at(self.descriptor, max(end - begin, 0), begin, INDEX_FILE)


@contextmanager
def _opened(directory: Path, name: str, kind: type[TonnageError] = CheckpointError) -> Iterator[tuple[int, int]]:
    """Open a regular file and yield its descriptor and size. Looked at before opening: a pipe is never opened."""
    path = directory / name
    try:
        _check_regular(path.stat().st_mode, name, kind)
        descriptor = os.open(path, _OPEN_FLAGS)
    except (OSError, ValueError) as error:
        raise kind(_unreadable(name, error)) from error
    try:
        status = os.fstat(descriptor)
        _check_regular(status.st_mode, name, kind)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _unreadable(name: str, error: OSError | ValueError) -> Problem:
    found = error.strerror if isinstance(error, OSError) else str(error)
    return Problem(where=name, what="cannot be read", expected="a readable regular file", found=found)


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _check_regular(mode: int, name: str, kind: type[TonnageError]) -> None:
    if not stat.S_ISREG(mode):
        found = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise kind(Problem(where=name, what="not a regular file", expected="a regular file", found=found))


def _read_at(descriptor: int, nbytes: int, offset: int, name: str, kind: type[TonnageError] = CheckpointError) -> bytes:
    """Return exactly so many bytes; a file that ends before is refused as truncated."""
    try:
        piece = os.pread(descriptor, nbytes, offset)
        while len(piece) < nbytes:
            more = os.pread(descriptor, nbytes - len(piece), offset + len(piece))
            if not more:
                expected, found = f"{offset + nbytes} bytes", f"{offset + len(piece)} bytes"
                raise kind(Problem(where=name, what="truncated while it was read", expected=expected, found=found))
            piece += more
    except OSError as error:
        raise kind(_unreadable(name, error)) from error
    return piece
