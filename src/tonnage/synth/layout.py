"""Which file of a checkpoint holds which tensors, in which order, at which offsets: its headers and its index.

A large checkpoint gets one shard file per decoder layer, one for the rest of the text part, and one for each further
part (vision tower, projector); a small one is a single file. Tensors stand in the order of the safetensors library:
wider dtypes first, then by name. The layer files of an exl3-v1 container stand beside the shards and are in no index.

Source:
    huggingface/safetensors 0.6, ``safetensors/src/tensor.rs`` (``prepare``). Shard map of one layer per file:
    moonshotai/Kimi-K3, ``model.safetensors.index.json``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.formats.exl3_v1 import SlotGeometry, layer_metadata, layer_tensors, uniform_row_bytes
from tonnage.formats.exl3_v1_names import EXL3_V1
from tonnage.recipes.modules import masked
from tonnage.synth.fills import Fill, fill_of, layer_fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tonnage.assignment import Assigned

SINGLE_FILE_BYTES = 5_000_000_000
"""A checkpoint below this is one file, unless asked otherwise: the shard limit of Hugging Face writers."""

_OTHER_PARTS = frozenset({"vision", "projector", "audio"})
_ALIGNMENT_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
_HEADER_MULTIPLE = 8
_PREFIX_BYTES = 8
_METADATA = {"format": "pt"}


class LaidTensor(NamedTuple):
    """A tensor in its place: first byte, and byte after the last, within the payload; and the kind of its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    fill: Fill


@dataclass(frozen=True, slots=True)
class Group:
    """The instances of a module for one value of its first index; ``None`` without one."""

    entry: Assigned
    first: int | None

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.entry.copies * self.entry.instance_bytes

    def names(self) -> Iterator[str]:
        """Yield the name of every instance."""
        module, firsts = self.entry.module, () if self.first is None else (self.first,)
        template = masked(module.rule.pattern).replace("#", "{}")
        extents = (self.entry.members,) if self.entry.members and module.rest else module.rest
        return (template.format(*firsts, *rest) for rest in product(*extents))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidFile:
    """One safetensors file: the groups of a shard, or one layer of a container.

    Attributes:
        name: Plain file name.
        groups: What a shard file holds.
        layer: Layer number of a container's file.
        geometry: Geometry of the container, for its files.
    """

    name: str
    groups: tuple[Group, ...] = ()
    layer: int = 0
    geometry: SlotGeometry | None = None

    @property
    def payload_bytes(self) -> int:
        """Payload bytes."""
        if self.geometry is not None:
            return sum(tensor.nbytes for tensor in layer_tensors(self.geometry))
        return sum(group.nbytes for group in self.groups)

    @property
    def tensor_count(self) -> int:
        """Number of tensors."""
        if self.geometry is not None:
            return len(layer_tensors(self.geometry))
        return sum(group.entry.copies * len(group.entry.stored) for group in self.groups)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Strings of the header."""
        return _METADATA if self.geometry is None else layer_metadata(self.geometry, self.layer)

    def tensors(self) -> tuple[LaidTensor, ...]:
        """Return the tensors in file order. Made anew at every call: half a million of them are not kept."""
        if self.geometry is None:
            return lay_out(_shard_tensors(self.groups))
        used = uniform_row_bytes(self.geometry)
        return lay_out(
            (t.name, t.dtype, t.shape, t.nbytes, layer_fill(t, row_bytes=used)) for t in layer_tensors(self.geometry)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All files of a checkpoint.

    Attributes:
        shards: Ordinary shard files.
        slot_files: Layer files of an exl3-v1 container.
        geometry: Its geometry.
    """

    shards: tuple[LaidFile, ...]
    slot_files: tuple[LaidFile, ...] = ()
    geometry: SlotGeometry | None = None

    @property
    def files(self) -> tuple[LaidFile, ...]:
        """All safetensors files."""
        return (*self.shards, *self.slot_files)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all files."""
        return sum(file.payload_bytes for file in self.files)

    @property
    def tensor_count(self) -> int:
        """Number of tensors in all files."""
        return sum(file.tensor_count for file in self.files)


def plan_layout(
    entries: Sequence[Assigned], *, geometry: SlotGeometry | None = None, sharded: bool | None = None
) -> Layout:
    """Return the files of a checkpoint.

    Args:
        entries: What the shard files hold.
        geometry: The exl3-v1 container beside them, if there is one.
        sharded: Whether to cut by layers; ``None`` cuts from 5 GB.
    """
    nbytes = sum(entry.nbytes for entry in entries)
    groups = [Group(entry, first) for entry in entries for first in (entry.first if entry.module.first else (None,))]
    cut = nbytes >= SINGLE_FILE_BYTES if sharded is None else sharded
    parts = _cut(groups) if cut else [groups]
    shards = tuple(
        LaidFile(name=_shard_name(number, len(parts)), groups=tuple(part)) for number, part in enumerate(parts, 1)
    )
    layers = geometry.moe_layer_indices if geometry else ()
    slot_files = tuple(LaidFile(name=EXL3_V1.layer_file(layer), layer=layer, geometry=geometry) for layer in layers)
    return Layout(shards=shards, slot_files=slot_files, geometry=geometry)


def header_bytes(tensors: Iterable[LaidTensor], metadata: Mapping[str, str]) -> bytes:
    """Return a file's first bytes: length, then compact JSON with the metadata first, padded to 8 with spaces."""
    document: dict[str, object] = {"__metadata__": metadata}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.begin, tensor.end),
        }
    text = msgspec.json.encode(document)
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def index_bytes(layout: Layout) -> bytes:
    """Return ``model.safetensors.index.json``: names sorted, indent 2, as Hugging Face writes it."""
    weight_map = {
        name: shard.name
        for shard in layout.shards
        for group in shard.groups
        for base in group.names()
        for name in (base + stored.suffix for stored in group.entry.stored)
    }
    total = sum(shard.payload_bytes for shard in layout.shards)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _cut(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups of every shard: layers ascending, the rest of the text part, then the other parts by name."""
    parts: dict[tuple[int, int, str], list[Group]] = defaultdict(list)
    for group in groups:
        module = group.entry.module
        if module.rule.role in _OTHER_PARTS:
            key = (2, 0, module.rule.pattern.partition(".")[0])
        elif module.layered and group.first is not None:
            key = (0, group.first, "")
        else:
            key = (1, 0, "")
        parts[key].append(group)
    return [parts[key] for key in sorted(parts)]


def _shard_name(number: int, of: int) -> str:
    return "model.safetensors" if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def _shard_tensors(groups: Iterable[Group]) -> Iterator[tuple[str, str, tuple[int, ...], int, Fill]]:
    for group in groups:
        kinds = [(t.suffix, t.dtype, t.shape, t.nbytes, fill_of(group.entry, t)) for t in group.entry.stored]
        for name in group.names():
            for suffix, dtype, shape, nbytes, fill in kinds:
                yield name + suffix, dtype, shape, nbytes, fill


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...], int, Fill]]) -> tuple[LaidTensor, ...]:
    """Return tensors in the library's order, one after the other."""
    by_name = sorted(tensors, key=itemgetter(0))
    laid, begin = [], 0
    for name, dtype, shape, nbytes, fill in sorted(by_name, key=lambda tensor: -_ALIGNMENT_RANK[tensor[1]]):
        laid.append(LaidTensor(name, dtype, shape, begin, begin + nbytes, fill))
        begin += nbytes
    return tuple(laid)
