"""Whether the files of a package fit together: every header is of the rank its directory says, the parts make wholes.

Digests say that nothing was changed since it was signed; here it is checked that what was signed makes sense. Pure: it
takes validated headers. Files of one name are compared across the ranks of a pipeline stage; files of one layer each
share their skeletons, so that such a comparison is made once for all layers that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from tonnage.checkpoint.headers import Header
from tonnage.checkpoint.index import check_index
from tonnage.checkpoint.shared_names import check_distinct
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, TonnageError
from tonnage.export.manifest import Manifest, PackagedFile
from tonnage.formats.quantized import value_scales
from tonnage.prepare.layout import rank_directory, rank_metadata
from tonnage.prepare.reader import Cut, cuts_of, is_layer_file
from tonnage.prepare.slots import SCHEMA, SLOTS_FILE
from tonnage.sources.model import INDEX_FILE, SUFFIX
from tonnage.topology import Topology

_SAID = ("tonnage_format", "rank", "tp_size", "tp_rank", "ep_size", "pp_size", "pp_rank")
_EVEN = frozenset({"vllm", "sglang"})
"""Engines that give every rank a part of everything, unless experts are whole."""
_MOST_SHOWN = 8

Shards = Mapping[str, ShardHeader]
"""Headers by plain file name."""


def topology_of(manifest: Manifest) -> Topology:
    """Return the topology of a manifest.

    Raises:
        PlacementError: There is no such topology.
    """
    sizes = manifest.topology
    return Topology(tp=sizes.tp, ep=sizes.ep, pp=sizes.pp)


def place_problems(manifest: Manifest, topology: Topology) -> Iterator[Problem]:
    """Yield files that do not lie where files of their rank lie."""
    for file in manifest.files:
        folder = file.path.rpartition("/")[0]
        owner = None if manifest.layout == "hf" else file.rank
        expected = "" if owner is None else rank_directory(topology, owner)
        if folder != expected:
            whose = "all ranks" if file.rank is None else f"rank {file.rank}"
            yield Problem(where=file.path, what=f"not where files of {whose} lie", expected=expected or "at the top")
        elif owner is None and manifest.layout == "tp" and file.path.endswith(SUFFIX):
            yield Problem(where=file.path, what="weights of no rank", expected="in the directory of a rank")


def header_problems(
    file: PackagedFile, shard: ShardHeader, manifest: Manifest, topology: Topology
) -> Iterator[Problem]:
    """Yield where a header does not agree with the manifest: whose it is, how many tensors, how many bytes."""
    metadata = shard.skeleton.metadata
    if manifest.layout == "tp" and file.rank is not None:
        wanted = rank_metadata(topology, file.rank)
        for key in _SAID:
            if metadata.get(key) != wanted[key]:
                what, found = f"header of rank {file.rank} says {key}", metadata.get(key, "nothing")
                yield Problem(where=file.path, what=what, expected=wanted[key], found=found)
    yield from scale_problems(file.path, shard)
    if file.rank is not None and (file.tensors, file.payload_bytes) != (len(shard), shard.payload_bytes):
        yield Problem(
            where=file.path,
            what="header and manifest",
            expected=f"{file.tensors} tensors of {file.payload_bytes} bytes",
            found=f"{len(shard)} of {shard.payload_bytes}",
        )


def scale_problems(path: str, shard: ShardHeader) -> Iterator[Problem]:
    """Yield scales of a file that engines load without an error and wrong."""
    scales = (entry for entry in shard.skeleton.tensors if entry.dtype == "F8_E8M0")
    yield from value_scales(path, ((shard.real_name(entry.name), entry.dtype) for entry in scales))


# --- one rank ---------------------------------------------------------------------------------------------------------


def directory_problems(folder: str, shards: Shards, index: bytes | None, slots: bytes | None) -> Iterator[Problem]:
    """Yield where the files of a directory do not agree with each other.

    Args:
        folder: Relative path of a rank's directory with a ``/`` at its end; nothing for an unsharded checkpoint.
        shards: Headers of its safetensors files.
        index: Its index, if it has one.
        slots: Its document of slots, if it has one.
    """
    layers = {name: shard for name, shard in shards.items() if is_layer_file(name)}
    plain = {name: shard for name, shard in shards.items() if name not in layers}
    found: list[Problem] = []
    if index is not None:
        findings = check_index(index, plain)
        found += findings.problems
        found += (Problem(where=name, what="not in the index") for name in sorted(plain.keys() - findings.named))
    elif plain:
        found.append(Problem(where=INDEX_FILE, what="no index of the weights"))
    found += check_distinct(list(plain.values()))
    if slots is not None:
        found += _slots_problems(slots, layers)
    elif layers and folder:
        found.append(Problem(where=SLOTS_FILE, what="no document of the slots"))
    yield from (replace(problem, where=folder + problem.where) for problem in found)


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _SlotLayer(msgspec.Struct, frozen=True):
    file: str
    first_slot: _Count
    slot_count: _Count
    payload_bytes: _Count


class _Slots(msgspec.Struct, frozen=True):
    schema: Literal["tonnage.slots/1"]
    rank: _Count
    tp_size: _Count
    tp_rank: _Count
    pp_size: _Count
    pp_rank: _Count
    layers: dict[str, _SlotLayer]


def _slots_problems(raw: bytes, layers: Shards) -> Iterator[Problem]:
    """Yield where a document of slots and the headers of the layer files beside it differ."""
    try:
        document = msgspec.convert(parse_object(raw, where=SLOTS_FILE, kind=TonnageError), type=_Slots)
    except TonnageError as error:
        yield from error.problems
        return
    except msgspec.ValidationError as error:
        yield Problem(where=SLOTS_FILE, what="not a document of slots", expected=SCHEMA, found=str(error))
        return
    listed = {layer.file: layer for layer in document.layers.values()}
    for name in sorted(listed.keys() ^ layers.keys()):
        what = "lists a layer file that is not here" if name in listed else "does not list a layer file"
        yield Problem(where=SLOTS_FILE, what=what, found=name)
    ours = {key: str(getattr(document, key)) for key in _SAID if key in _Slots.__struct_fields__}
    for name in sorted(listed.keys() & layers.keys()):
        said = {**ours, "first_slot": str(listed[name].first_slot), "slot_count": str(listed[name].slot_count)}
        metadata = layers[name].skeleton.metadata
        found = {key: metadata.get(key, "nothing") for key in said}
        if said != found:
            yield Problem(where=name, what=f"slots are not as in {SLOTS_FILE}", expected=str(said), found=str(found))
        if listed[name].payload_bytes != layers[name].payload_bytes:
            expected, held = str(listed[name].payload_bytes), str(layers[name].payload_bytes)
            yield Problem(where=name, what=f"payload bytes are not as in {SLOTS_FILE}", expected=expected, found=held)


# --- ranks of one stage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor on one rank."""

    dtype: str
    shape: tuple[int, ...]
    cut: Cut | None


def stage_problems(stage: Mapping[int, Shards], topology: Topology, *, engine: str) -> Iterator[Problem]:
    """Yield tensors whose parts on the ranks of a stage do not make a whole.

    Every rank must hold a part, except of whole experts and, by engines that share out unequally, of what there are too
    few of. An element may be held by one rank, by an aligned group of ranks, or by all that hold any of the tensor.

    Args:
        stage: Headers of every rank of the stage, by global rank.
        topology: Whose stage it is.
        engine: By whose rules it was cut.

    Raises:
        CheckpointError: The metadata of a file is not what ``prepare`` writes.
    """
    everywhere = engine in _EVEN and topology.ep == 1
    known: set[tuple[Header | None, ...]] = set()
    for name in sorted({name for shards in stage.values() for name in shards}):
        files = {rank: shards.get(name) for rank, shards in stage.items()}
        key = tuple(None if file is None else file.skeleton for file in files.values())
        one_layer = len({file.layer for file in files.values() if file is not None}) == 1
        if not one_layer or key not in known:
            yield from _file_problems(name, files, everywhere=everywhere)
        if one_layer:
            known.add(key)


def _file_problems(name: str, files: Mapping[int, ShardHeader | None], *, everywhere: bool) -> Iterator[Problem]:
    held: dict[str, dict[int, _Held]] = {}
    for rank, file in files.items():
        if file is not None:
            for entry, cut in zip(file.skeleton.tensors, cuts_of(file), strict=True):
                held.setdefault(file.real_name(entry.name), {})[rank] = _Held(entry.dtype, entry.shape, cut)
    known: dict[tuple[tuple[int, _Held], ...], str] = {}
    for tensor, ranks in held.items():
        key = tuple(ranks.items())
        if key not in known:
            known[key] = _fault(ranks, len(files), everywhere=everywhere)
        if known[key]:
            yield Problem(where=name, tensor=tensor, what=known[key], found=_shown(ranks))


def _fault(ranks: Mapping[int, _Held], tp: int, *, everywhere: bool) -> str:
    """Return why the parts of a tensor do not make a whole; nothing if they do."""
    parts = list(ranks.values())
    if len(ranks) < tp and everywhere:
        return f"held by {len(ranks)} of {tp} ranks"
    if len({part.dtype for part in parts}) > 1:
        return "not of one dtype on all ranks"
    cuts = {rank: part.cut for rank, part in ranks.items() if part.cut is not None}
    if not cuts:
        return "" if len({part.shape for part in parts}) == 1 else "whole, and not of one shape on all ranks"
    if len({(axis, whole) for axis, _, whole in cuts.values()}) > 1:
        return "not cut along one axis of one shape on all ranks"
    axis, _, whole = next(iter(cuts.values()))
    if any(part.cut is None and part.shape != whole for part in parts):
        return "whole on one rank, and not of the shape it is cut from on another"
    edges = {rank: part.cut[1] if part.cut else ((0, whole[axis]),) for rank, part in ranks.items()}
    return _cover(edges, whole[axis], tp)


def _cover(ranges: Mapping[int, tuple[tuple[int, int], ...]], size: int, tp: int) -> str:
    """Return why ranges of ranks do not cover an axis as they should; nothing if they do."""
    changes: dict[int, list[tuple[bool, int]]] = {0: [], size: []}
    for rank, found in ranges.items():
        for begin, end in found:
            changes.setdefault(begin, []).append((True, rank))
            changes.setdefault(end, []).append((False, rank))
    holders: set[int] = set()
    holding = {rank for rank, found in ranges.items() if found}
    for edge in sorted(changes)[:-1]:
        for _, rank in (change for change in changes[edge] if not change[0]):
            holders.discard(rank)
        for _, rank in (change for change in changes[edge] if change[0]):
            if rank in holders:
                return f"rank {rank} holds index {edge} twice"
            holders.add(rank)
        if not holders:
            return f"no rank holds index {edge} of {size}"
        if not _may_share(holders, holding, tp):
            return f"index {edge} is held by ranks {sorted(holders)[:_MOST_SHOWN]}, no group that holds copies"
    return ""


def _may_share(holders: set[int], holding: set[int], tp: int) -> bool:
    count, first = len(holders), min(holders)
    aligned = tp % count == 0 and first % count == 0 and max(holders) == first + count - 1
    return count == 1 or aligned or holders == holding


def _shown(ranks: Mapping[int, _Held]) -> str:
    shown = [
        f"rank {rank} {part.dtype} {list(part.shape)}" + (f" of {part.cut[0]}: {part.cut[1]}" if part.cut else "")
        for rank, part in list(ranks.items())[:_MOST_SHOWN]
    ]
    return "; ".join(shown)
