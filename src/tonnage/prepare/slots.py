"""An exl3-v1 container cut over ranks: for every layer and rank a file that is again a valid layer, for its slots.

A rank's layer file holds its rows of codes and rotations, its rows of pair rates, and the whole tensors. Its metadata
declares the intermediate width of those slots, so that it stands for itself, and beside it where they begin in the
whole. As the number of slots may differ from layer to layer, no manifest of the format can describe a rank; a document
of its own does. It states no digests: they are in the package's manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tonnage.checkpoint.headers import TensorEntry
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.container import Container, slot_extents
from tonnage.errors import PlacementError, Problem
from tonnage.formats.exl3_v1 import SLOT_CHANNELS, SLOTS_PER_PAIR, layer_metadata, rank_layer_bytes
from tonnage.formats.exl3_v1_manifest import manifest_document
from tonnage.placement import Placement
from tonnage.prepare.jobs import Job, SourceTensor
from tonnage.prepare.layout import Packed, pack, rank_directory, rank_metadata
from tonnage.prepare.takes import Part, range_part, whole_part
from tonnage.topology import Topology

SCHEMA = "tonnage.slots/1"
SLOTS_FILE = "tonnage-slots.json"
_RATES = ("rates_fc1", "rates_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotJobs:
    """Makes the job of every layer of a container, and the document of every rank.

    Attributes:
        container: The geometry.
        topology: Over which ranks.
        stages: Decoder layers of every pipeline stage.
        shards: Layer files in the manifest's order.
        extents: For every layer the slots of every tensor-parallel rank.
    """

    container: Container
    topology: Topology
    stages: tuple[range, ...]
    shards: tuple[ShardHeader, ...]
    extents: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        """Refuse slots that are no whole pairs of records, where rates are stored by pairs.

        Raises:
            PlacementError: A rank's run of slots begins or ends inside a pair.
        """
        if self.container.manifest.geometry.bits is None:
            edges = {edge for layer in self.extents for run in layer for edge in (run.start, run.stop)}
            inside = sorted(edge for edge in edges if edge % SLOTS_PER_PAIR)
            if inside:
                expected = f"multiples of {SLOTS_PER_PAIR} slots"
                what = "cut inside a pair that shares its rates"
                raise PlacementError(
                    Problem(where="prepare", tensor="rates", what=what, expected=expected, found=str(inside[:20]))
                )

    def positions(self, ranks: Collection[int]) -> Iterator[int]:
        """Yield the positions of the layers any of these ranks holds slots of."""
        stages = {rank // self.topology.tp for rank in ranks}
        for position, layer in enumerate(self.container.layers):
            if any(layer in self.stages[stage] for stage in stages):
                yield position

    def job(self, position: int, number: int, ranks: Collection[int]) -> Job:
        """Return the job of a layer file, for these ranks."""
        shard, layer = self.shards[position], self.container.layers[position]
        taking = [rank for rank in sorted(ranks) if layer in self.stages[rank // self.topology.tp]]
        dialect = self.container.manifest.dialect
        return pack(
            number=number,
            source_file=shard.shard_file,
            tensors=(self._packed(shard, entry, position, taking) for entry in shard.entries()),
            path=lambda rank: f"{rank_directory(self.topology, rank)}/{dialect.layer_file(layer)}",
            metadata=lambda rank: self._metadata(position, rank),
            scale_rule="rceil",
        )

    def document(self, rank: int) -> bytes:
        """Return what says which slots a rank holds, as JSON."""
        manifest = self.container.manifest
        digests = {layer.index: layer.sha256 for layer in manifest.layers}
        container = manifest_document(manifest.geometry, digests, dialect=manifest.dialect)
        del container["layers"]
        pp_rank, tp_rank = divmod(rank, self.topology.tp)
        layers = {
            str(layer.index): {
                "file": manifest.dialect.layer_file(layer.index),
                "first_slot": self.extents[position][tp_rank].start,
                "slot_count": len(self.extents[position][tp_rank]),
                "payload_bytes": rank_layer_bytes(
                    manifest.geometry,
                    len(self.extents[position][tp_rank]),
                    row_stride_bytes=self.container.row_strides[position],
                ),
                "source_file": layer.file,
                "source_sha256": layer.sha256,
            }
            for position, layer in enumerate(manifest.layers)
            if layer.index in self.stages[pp_rank]
        }
        document = {
            "schema": SCHEMA,
            "rank": rank,
            "tp_size": self.topology.tp,
            "tp_rank": tp_rank,
            "pp_size": self.topology.pp,
            "pp_rank": pp_rank,
            "container": container,
            "layers": layers,
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    def _packed(self, shard: ShardHeader, entry: TensorEntry, position: int, ranks: Sequence[int]) -> Packed:
        taken = tuple((rank, (self._part(entry, self._slots(position, rank)),)) for rank in ranks)
        source = SourceTensor(
            file=shard.shard_file,
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=shard.data_begin + entry.begin,
        )
        return Packed(source=source, outputs=((entry.name, entry.dtype),), taken=taken)

    def _part(self, entry: TensorEntry, slots: range) -> Part:
        if entry.name in (self.container.manifest.dialect.codes, "rotations"):
            return range_part(entry.shape, 0, slots.start, slots.stop)
        if entry.name in _RATES:
            return range_part(entry.shape, 0, slots.start // SLOTS_PER_PAIR, slots.stop // SLOTS_PER_PAIR)
        return whole_part(entry.shape)

    def _slots(self, position: int, rank: int) -> range:
        return self.extents[position][rank % self.topology.tp]

    def _metadata(self, position: int, rank: int) -> dict[str, str]:
        manifest, slots = self.container.manifest, self._slots(position, rank)
        return {
            **rank_metadata(self.topology, rank),
            **layer_metadata(manifest.geometry, self.container.layers[position], dialect=manifest.dialect),
            "intermediate_size": str(len(slots) * SLOT_CHANNELS),
            "full_intermediate_size": str(manifest.geometry.intermediate_size),
            "first_slot": str(slots.start),
            "slot_count": str(len(slots)),
        }


def slot_jobs(placement: Placement, shards: Sequence[ShardHeader]) -> SlotJobs | None:
    """Return the jobs of a placement's container; ``None`` if it has none.

    Args:
        placement: Whose container is cut.
        shards: Headers of its layer files, maybe among others.

    Raises:
        PlacementError: The ranks cannot share the slots.
    """
    container = placement.assignment.container
    if container is None:
        return None
    by_file = {shard.shard_file: shard for shard in shards}
    return SlotJobs(
        container=container,
        topology=placement.topology,
        stages=placement.stages,
        shards=tuple(by_file[layer.file] for layer in container.manifest.layers),
        extents=slot_extents(container, placement.topology.tp),
    )
