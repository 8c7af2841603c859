"""Routed experts in an exl3-v1 container: one file per layer beside the shards, cut by slots instead of by tensors.

Every layer file is checked against the manifest's geometry: exactly its tensors, dtypes, shapes and metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.errors import CheckpointError, ConfigError, Problem, raise_if_any
from tonnage.formats.exl3_v1 import layer_metadata, layer_tensors, rank_layer_bytes
from tonnage.formats.exl3_v1_partition import fork_extents, partition_extents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tonnage.checkpoint.skeletons import ShardHeader
    from tonnage.formats.exl3_v1_manifest import SlotManifest
    from tonnage.recipes.blueprint import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A checked container.

    Attributes:
        manifest: Geometry and layers.
        row_strides: Bytes of one row of codes, per layer in the manifest's order.
    """

    manifest: SlotManifest
    row_strides: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose experts it stores, ascending."""
        return tuple(layer.index for layer in self.manifest.layers)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all layer files."""
        geometry = self.manifest.geometry
        return sum(
            tensor.nbytes for stride in self.row_strides for tensor in layer_tensors(geometry, row_stride_bytes=stride)
        )

    @property
    def tensors(self) -> int:
        """Tensors of all layer files."""
        geometry, strides = self.manifest.geometry, self.row_strides
        return sum(len(layer_tensors(geometry, row_stride_bytes=stride)) for stride in strides)


def check_container(manifest: SlotManifest, shards: Sequence[ShardHeader]) -> Container:
    """Return the container, every layer file held against the manifest.

    Raises:
        CheckpointError: A file is absent, or a tensor or metadata entry is not what the manifest declares.
    """
    by_name = {shard.shard_file: shard for shard in shards}
    problems: list[Problem] = []
    strides: list[int] = []
    for layer in manifest.layers:
        shard = by_name.get(layer.file)
        if shard is None:
            problems.append(Problem(where=layer.file, what="missing layer file of the manifest"))
            continue
        tensors = _declared_tensors(manifest, shard, problems)
        if tensors:
            strides.append(tensors[manifest.dialect.codes][1][1])
            problems += _tensor_problems(tensors, shard)
        problems += _metadata_problems(layer_metadata(manifest.geometry, layer.index, dialect=manifest.dialect), shard)
    raise_if_any(CheckpointError, problems)
    return Container(manifest=manifest, row_strides=tuple(strides))


def check_against(blueprint: Blueprint, container: Container) -> None:
    """Hold a container against the model: its layers have routed experts, of the number and widths it declares.

    Raises:
        CheckpointError: A layer or a number differs.
    """
    geometry, where = container.manifest.geometry, container.manifest.dialect.manifest_name
    declared = {"experts": geometry.num_experts, "input width": geometry.hidden_size}
    declared["intermediate width"] = geometry.intermediate_size
    problems: list[Problem] = []
    known: set[int] = set()
    for module in blueprint.modules:
        if module.rule.role != "expert":
            continue
        known.update(module.first)
        down = module.rule.split == "row"
        hidden, width = (module.out_size, module.in_size) if down else (module.in_size, module.out_size)
        model = {"experts": module.stack or module.experts, "input width": hidden, "intermediate width": width}
        problems += [
            Problem(where=where, tensor=module.rule.pattern, what=name, expected=str(number), found=str(declared[name]))
            for name, number in model.items()
            if number != declared[name]
        ]
    strange = sorted(set(container.layers) - known)
    if strange:
        found = ", ".join(map(str, strange[:20]))
        problems.append(Problem(where=where, what="layers without routed experts in the model", found=found))
    raise_if_any(CheckpointError, problems)


def slot_extents(container: Container, tp: int) -> tuple[tuple[range, ...], ...]:
    """Return for every layer the slots of every rank.

    With a barrier at half the slots the owners rotate from layer to layer, as the vLLM fork that serves such containers
    does it; otherwise the container's own partition is used on every layer.

    Raises:
        PlacementError: The ranks cannot share the slots.
    """
    geometry = container.manifest.geometry
    if tp == 1:
        return ((range(geometry.num_slots),),) * len(container.layers)
    if geometry.extent_barriers == (geometry.num_slots // 2,):
        return tuple(fork_extents(geometry, tp, position) for position in range(len(container.layers)))
    return (partition_extents(geometry, tp),) * len(container.layers)


def slot_bytes(container: Container, tp: int) -> tuple[tuple[int, ...], ...]:
    """Return for every layer the bytes of every rank."""
    geometry = container.manifest.geometry
    return tuple(
        tuple(rank_layer_bytes(geometry, len(slots), row_stride_bytes=stride) for slots in extents)
        for extents, stride in zip(slot_extents(container, tp), container.row_strides, strict=True)
    )


_Kind = tuple[str, tuple[int, ...]]


def _declared_tensors(manifest: SlotManifest, shard: ShardHeader, problems: list[Problem]) -> dict[str, _Kind]:
    """Return the tensors the geometry declares for a layer whose rows have the stride found; nothing if none can."""
    codes = manifest.dialect.codes
    shape = next((entry.shape for entry in shard.skeleton.tensors if entry.name == codes), ())
    stride = shape[1] if len(shape) == 2 else None
    try:
        tensors = layer_tensors(manifest.geometry, row_stride_bytes=stride, dialect=manifest.dialect)
    except ConfigError as error:
        problems += [
            Problem(where=shard.shard_file, tensor=codes, what=p.what, expected=p.expected, found=p.found)
            for p in error.problems
        ]
        return {}
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


def _tensor_problems(declared: dict[str, _Kind], shard: ShardHeader) -> Iterator[Problem]:
    found = {entry.name: (entry.dtype, entry.shape) for entry in shard.entries()}
    for name in sorted(declared.keys() | found.keys()):
        if declared.get(name) != found.get(name):
            yield Problem(
                where=shard.shard_file,
                tensor=name,
                what="not the tensor the manifest declares",
                expected=_shown(declared.get(name)),
                found=_shown(found.get(name)),
            )


def _metadata_problems(declared: dict[str, str], shard: ShardHeader) -> Iterator[Problem]:
    metadata = shard.skeleton.metadata
    for key, value in declared.items():
        if metadata.get(key) != value:
            found = str(metadata.get(key))
            yield Problem(where=shard.shard_file, what=f"metadata {key}", expected=value, found=found)


def _shown(kind: _Kind | None) -> str:
    return "no such tensor" if kind is None else f"{kind[0]} {list(kind[1])}"
