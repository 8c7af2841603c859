"""Safetensors files out of parts of ranks, and the small files beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tonnage.checkpoint.io import read_bytes
from tonnage.compare.windows import stored_bits, windows
from tonnage.errors import Problem
from tonnage.formats.dtypes import payload_bytes
from tonnage.prepare.io import NewFile, PrepareError, own_tag, sync_directory, write_whole, writing
from tonnage.prepare.jobs import OutputFile, OutputTensor
from tonnage.prepare.layout import SIDE_FILE_BYTES, alignment, choose_side_files, header_bytes, plain_metadata

if TYPE_CHECKING:
    from tonnage.compare.model import Model
    from tonnage.compare.wholes import Whole

FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor that is written: a whole, tensors of one rank behind each other, or bytes.

    Attributes:
        name: As written.
        dtype: As safetensors spells it.
        shape: Of what is written.
        whole: Put together from all ranks.
        rank: Whose tensors ``sources`` are.
        sources: Their names.
        content: Bytes, where no tensor is the source.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: Whole | None = None
    rank: int = 0
    sources: tuple[str, ...] = ()
    content: bytes = b""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return payload_bytes(self.dtype, self.shape)


def packed(entries: Iterable[Entry], file_bytes: int, *, sort: bool) -> Iterator[list[Entry]]:
    """Yield the tensors of every file; sorted so that each begins at a multiple of its element, where sizes do not."""
    file: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if file and nbytes + entry.nbytes > file_bytes:
            yield _in_order(file, sort=sort)
            file, nbytes = [], 0
        file.append(entry)
        nbytes += entry.nbytes
    if file:
        yield _in_order(file, sort=sort)


def _in_order(file: list[Entry], *, sort: bool) -> list[Entry]:
    return sorted(file, key=lambda entry: -alignment(entry.dtype)) if sort else file


def make_empty(output: Path) -> None:
    """Create the output directory.

    Raises:
        PrepareError: Something is in it, or it cannot be created.
    """
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        there = next(output.iterdir(), None)
    if there is not None:
        raise PrepareError(Problem(where=str(output), what="not empty", expected="a new directory", found=there.name))


def write_file(path: Path, entries: list[Entry], model: Model) -> None:
    """Write a safetensors file; it has its name when it is whole and on the disk.

    Raises:
        PrepareError: It cannot be written.
    """
    tensors, begin = [], 0
    for entry in entries:
        tensors.append(OutputTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, begin=begin))
        begin += entry.nbytes
    metadata = tuple(plain_metadata().items())
    header = header_bytes(OutputFile(rank=0, path=path.name, tensors=tuple(tensors), metadata=metadata))
    file = NewFile(path, len(header) + begin, tag=own_tag())
    try:
        file.write(memoryview(header))
        for entry in entries:
            for piece in _pieces(entry, model):
                file.write(piece)
        file.sync()
        file.publish()
    finally:
        file.close()


def _pieces(entry: Entry, model: Model) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; those of a rank straight from its mapped file."""
    if entry.whole is not None:
        for window in windows(entry.shape):
            yield stored_bits(entry.whole, model.views, window).view(np.uint8).reshape(-1).data
    for name in entry.sources:
        array = model.views[entry.rank][name]
        if array.size:
            yield np.atleast_1d(array).view(np.uint8).reshape(-1).data
    yield memoryview(entry.content)


def side_files(model: Model, *, without: frozenset[str]) -> dict[str, bytes]:
    """Return the small files that come along.

    Raises:
        ConfigError: One cannot be read.
    """
    sizes = {path.name: path.stat().st_size for path in sorted(model.root.iterdir()) if path.is_file()}
    names = [name for name in choose_side_files(sizes) if name not in without]
    return {name: read_bytes(model.root / name, limit_bytes=SIDE_FILE_BYTES) for name in names}


def write_documents(output: Path, documents: Mapping[str, bytes]) -> None:
    """Write small files in their order, and wait until all names are on the disk.

    Raises:
        PrepareError: One cannot be written.
    """
    for name, content in documents.items():
        write_whole(output / name, content)
    sync_directory(output)
