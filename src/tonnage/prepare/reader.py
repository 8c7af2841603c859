"""What one rank's directory holds, without copying it: names, shapes, dtypes, and arrays over the mapped files.

Headers are validated whole before anything is mapped. numpy is imported when the first array is asked for; element
types it does not have come from ml_dtypes if that is installed, else as unsigned integers of their width.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tonnage.checkpoint.io import read_checkpoint_headers
from tonnage.errors import CheckpointError, Problem
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.formats.exl3_v1_names import DIALECTS
from tonnage.prepare.documents import STATE, SUMMARY
from tonnage.prepare.output_dir import is_package

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tonnage.checkpoint.skeletons import ShardHeader

_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
Cut = tuple[int, tuple[tuple[int, int], ...], tuple[int, ...]]
"""Axis, ranges on it, and shape of the whole tensor."""

_SLICES = msgspec.json.Decoder(tuple[int | Cut, ...])
_OF_RANK = ("tonnage_version", "tonnage_format", "rank", "tp_size", "tp_rank", "ep_size", "pp_size", "pp_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """One tensor of a rank.

    Attributes:
        file: Plain name of its file.
        name: As written there.
        dtype: As safetensors spells it.
        shape: Shape on this rank.
        begin: Offset of its first byte in the file.
        nbytes: Payload bytes.
        cut: Axis, ranges on it and shape of the whole tensor; ``None`` if this is the whole.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    cut: Cut | None = None


class RankView(Mapping[str, "NDArray[Any]"]):
    """The tensors of one rank by name; those of a container's layer files as ``FILE/NAME`` without ``.safetensors``.

    An array keeps its file mapped for as long as it lives, even after :meth:`close`.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorView], metadata: Mapping[str, str]) -> None:
        """Take validated tensors; files are mapped when needed."""
        self.directory = directory
        self.tensors = dict(tensors)
        self.metadata = dict(metadata)
        self._mapped: dict[str, memoryview] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a read-only array over the mapped file."""
        import numpy as np  # noqa: PLC0415 - headers can be read without

        tensor = self.tensors[name]
        dtype, shape = _array_type(tensor)
        if not tensor.nbytes:
            return np.empty(shape, dtype)
        octets = np.frombuffer(self._map(tensor.file), dtype=np.uint8, count=tensor.nbytes, offset=tensor.begin)
        array: NDArray[Any] = octets.view(dtype).reshape(shape)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def close(self) -> None:
        """Let go of the files; each is unmapped with the last array over it."""
        self._mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _map(self, file: str) -> memoryview:
        if file not in self._mapped:
            with (self.directory / file).open("rb") as stream:
                self._mapped[file] = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        return self._mapped[file]


def open_rank(path: str | Path, rank: int, *, tp: int | None = None) -> RankView:
    """Return the tensors of one rank of a prepared directory.

    Args:
        path: What ``prepare`` wrote, or a package made of it, the directory of one rank in it, or an unsharded
            checkpoint with the one rank 0.
        rank: Global rank.
        tp: Which tensor-parallel size, where several were prepared into one directory.

    Raises:
        CheckpointError: There is no such rank, or more than one, or a file of it is wrong.
    """
    directory = _rank_directory(Path(path), rank, tp)
    _check_complete(Path(path), directory)
    beside = layer_files(directory)
    headers = read_checkpoint_headers(directory, also=beside)
    tensors: dict[str, TensorView] = {}
    metadata: dict[str, str] = {}
    for shard in headers.shards:
        found = shard.skeleton.metadata
        if found.get("rank", "0") != str(rank):
            raise _refusal(shard.shard_file, "is of another rank", str(rank), found.get("rank", "0"))
        metadata |= {key: found[key] for key in _OF_RANK if key in found}
        prefix = f"{shard.shard_file.removesuffix('.safetensors')}/" if shard.shard_file in beside else ""
        tensors.update((prefix + view.name, view) for view in _views(shard))
    return RankView(directory, tensors, metadata)


def _rank_directory(path: Path, rank: int, tp: int | None) -> Path:
    """Return the one directory that holds a rank's files."""
    if _holds_tensors(path):
        return path
    name = "*" if tp is None else f"{tp}"
    found = sorted({*path.glob(f"weights/tp{name}/rank-{rank}"), *path.glob(f"weights/tp{name}-*/rank-{rank}")})
    if len(found) != 1:
        what = f"no directory of rank {rank}" if not found else f"rank {rank} is there in several topologies"
        shown = ", ".join(str(one.relative_to(path)) for one in found)
        raise _refusal(str(path), what, "weights/tpN/rank-R", shown or "none")
    return found[0]


def _check_complete(path: Path, directory: Path) -> None:
    """Refuse a preparation that was interrupted: ``prepare.json`` is written last, ``.prepare`` is gone by then.

    In a package the manifest and the signature stand for it.
    """
    for above in {path, directory, *directory.parents[:3]}:
        if (above / STATE).exists() and not (above / SUMMARY).exists():
            raise _refusal(str(above), "preparation is not complete", SUMMARY, f"only {STATE}")
    if directory != path and not (path / SUMMARY).exists() and not is_package(path):
        raise _refusal(str(path), "preparation is not complete", f"{SUMMARY}, or a signed package", "no such file")


def _holds_tensors(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


def layer_files(directory: Path) -> tuple[str, ...]:
    """Return the layer files of a container, which no index names."""
    return tuple(sorted(file.name for file in directory.glob("*.safetensors") if is_layer_file(file.name)))


def is_layer_file(name: str) -> bool:
    """Whether a safetensors file of this name is a layer of a container."""
    return name.startswith(tuple(dialect.layer_prefix for dialect in DIALECTS))


def _views(shard: ShardHeader) -> Iterator[TensorView]:
    cuts = cuts_of(shard)
    for entry, cut in zip(shard.entries(), cuts, strict=True):
        yield TensorView(
            file=shard.shard_file,
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=shard.data_begin + entry.begin,
            nbytes=entry.nbytes,
            cut=cut,
        )


def cuts_of(shard: ShardHeader) -> tuple[Cut | None, ...]:
    """Return what the metadata says of every tensor, in payload order.

    Raises:
        CheckpointError: It is not what ``prepare`` writes, or not of these tensors.
    """
    text = shard.skeleton.metadata.get("slices")
    if text is None:
        return (None,) * len(shard)
    try:
        cuts = _SLICES.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(shard.shard_file, "metadata slices", "axis, ranges and shape, or 0", str(error)) from error
    shapes = [entry.shape for entry in shard.skeleton.tensors]
    if len(cuts) != len(shapes):
        raise _refusal(shard.shard_file, "metadata slices", f"{len(shapes)} entries", str(len(cuts)))
    for cut, shape in zip(cuts, shapes, strict=True):
        if not isinstance(cut, int) and not _suits(cut, shape):
            raise _refusal(shard.shard_file, "metadata slices", f"a cut of {list(shape)}", str(cut))
    return tuple(None if isinstance(cut, int) else cut for cut in cuts)


def _suits(cut: Cut, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be this cut: zeros may stand behind what is taken."""
    axis, ranges, whole = cut
    if len(whole) != len(shape) or not 0 <= axis < len(shape):
        return False
    inside = all(0 <= begin < end <= whole[axis] for begin, end in ranges)
    taken = sum(end - begin for begin, end in ranges)
    return (
        inside
        and taken <= shape[axis]
        and all(a == b for i, (a, b) in enumerate(zip(whole, shape, strict=True)) if i != axis)
    )


def _array_type(tensor: TensorView) -> tuple[Any, tuple[int, ...]]:
    """Return numpy's element type and shape; elements smaller than a byte stay packed along the last axis."""
    bits = DTYPE_BITS[tensor.dtype]
    if tensor.dtype in _NUMPY:
        return _NUMPY[tensor.dtype], tensor.shape
    if bits % 8:
        whole = tensor.shape and tensor.shape[-1] * bits % 8 == 0
        return "u1", (*tensor.shape[:-1], tensor.shape[-1] * bits // 8) if whole else (tensor.nbytes,)
    try:
        types = import_module("ml_dtypes")
    except ImportError:
        return f"<u{bits // 8}", tensor.shape
    return getattr(types, _ML_DTYPES[tensor.dtype], f"<u{bits // 8}"), tensor.shape


def _refusal(where: str, what: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(Problem(where=where, what=what, expected=expected, found=found))
