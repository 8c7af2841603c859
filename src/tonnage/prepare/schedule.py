"""Placement and headers to everything a preparation does: which bytes of which file go where, before one is read.

Every stored tensor is looked up among the placed modules, every cut is checked, and what the ranks take together is
held against the placement. Only then is there a schedule. Its jobs are made when they are asked for, from the headers,
so that memory does not grow with the number of takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Generic, Literal, TypeVar, overload

from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.errors import CheckpointError, PlacementError, Problem, UnknownFormatError, raise_if_any
from tonnage.formats.quantized import value_scales
from tonnage.placement import Placement
from tonnage.prepare.finder import Finder
from tonnage.prepare.hf import CONFIG_FILE, HF_QUANT_FILE, QuantStyle, config_bytes, scale_suffix
from tonnage.prepare.jobs import ScaleRule, Schedule, WholeFile
from tonnage.prepare.layout import rank_directory
from tonnage.prepare.shard_jobs import ShardJobs, Taken, cut_into_spans
from tonnage.prepare.slots import SLOTS_FILE, SlotJobs, slot_jobs
from tonnage.sources.model import INDEX_FILE
from tonnage.topology import Engine

MOST_JOB_BYTES = 4 << 30
LEAST_JOB_BYTES = 256 << 20
JOBS_AT_LEAST = 8
"""A checkpoint is cut into at least this many jobs, so that the workers share it, unless they became small."""
OutputLayout = Literal["tp", "hf"]
"""One directory per rank, or an unsharded standard checkpoint."""
AS_STORED: Engine = "split"
"""The engine by whose rules one rank holds the tensors of the checkpoint, and nothing else."""

_T = TypeVar("_T")


class Made(Sequence[_T], Generic[_T]):
    """Values that are made when they are asked for, and not kept."""

    def __init__(self, makers: Sequence[Callable[[], _T]]) -> None:
        """Take what makes each of them."""
        self._makers = tuple(makers)

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, place: int) -> _T: ...
    @overload
    def __getitem__(self, place: slice) -> Made[_T]: ...
    def __getitem__(self, place: int | slice) -> _T | Made[_T]:
        return Made(self._makers[place]) if isinstance(place, slice) else self._makers[place]()


def make_schedule(  # noqa: PLR0913 - all that a preparation can be asked for
    placement: Placement,
    shards: Sequence[ShardHeader],
    *,
    layout: OutputLayout = "tp",
    ranks: Collection[int] | None = None,
    scale_rule: ScaleRule = "rceil",
    quant_style: QuantStyle = "compressed-tensors",
    side_files: Sequence[str] = (),
    job_bytes: int | None = None,
) -> Schedule:
    """Return what is to be done.

    Args:
        placement: What every rank holds; made from these headers.
        shards: Headers of all shard files, and of the layer files of a container.
        layout: Where it goes.
        ranks: Global ranks to prepare; all if not given. Names of files do not depend on it.
        scale_rule: Of converted tensors.
        quant_style: How the config of layout ``hf`` states the conversion.
        side_files: Files of the checkpoint that come along, see :func:`tonnage.prepare.layout.choose_side_files`.
        job_bytes: Source bytes of a job; by default an eighth of the checkpoint, at least 256 MiB and at most 4 GiB.
            A larger tensor is a job of its own.

    Raises:
        PlacementError: A tensor cannot be cut as the ranks hold it, the layout does not suit the topology, or a rank is
            none of it.
        CheckpointError: A tensor was not placed, or a placed one is missing.
        UnknownFormatError: The config of layout ``hf`` cannot state how tensors are stored, or scales are of a dtype
            that engines convert by value.
    """
    topology = placement.topology
    raise_if_any(PlacementError, _request_problems(placement, layout, ranks))
    raise_if_any(UnknownFormatError, value_scales("checkpoint", _stored(placement)))
    chosen = tuple(range(topology.world_size)) if ranks is None else tuple(sorted(set(ranks)))
    slots = slot_jobs(placement, shards)
    beside = frozenset(layer.file for layer in slots.container.manifest.layers) if slots else frozenset()
    finder, taken = Finder(placement), Taken(topology.tp)
    whole = [shard for shard in shards if shard.shard_file not in beside]
    spans = cut_into_spans(finder, whole, taken, job_bytes or _job_bytes(whole))
    _check_bytes(placement, taken)
    shard_jobs = ShardJobs(
        finder=finder,
        topology=topology,
        spans=spans,
        ranks=frozenset(chosen),
        sharded=layout == "tp",
        scale_rule=scale_rule,
        scale_suffix=scale_suffix(quant_style if layout == "hf" else "compressed-tensors"),
    )
    jobs = [partial(shard_jobs.job, n) for n, span in enumerate(spans) if not span.ranks.isdisjoint(chosen)]
    files = [partial(_index, shard_jobs, rank) for rank in chosen]
    if slots and layout == "tp":
        jobs += [partial(slots.job, n, len(spans) + n, chosen) for n in slots.positions(chosen)]
        files += [partial(_slots_document, slots, rank) for rank in chosen]
    along = _along(placement, side_files, beside, layout, quant_style)
    return Schedule(jobs=Made(jobs), files=Made([*along, *files]), ranks=chosen, scale_rule=scale_rule)


def _along(
    placement: Placement, side_files: Sequence[str], beside: Collection[str], layout: OutputLayout, style: QuantStyle
) -> Iterator[Callable[[], WholeFile]]:
    """Yield what comes along: side files, a container that stays whole, and a config that states the conversion."""
    container = placement.assignment.container
    manifest = {container.manifest.dialect.manifest_name} if container else set()
    config = config_bytes(placement.assignment, style) if layout == "hf" else None
    names = {*side_files, *beside, *manifest} if layout == "hf" else {*side_files} - manifest
    if config is not None:
        names -= {CONFIG_FILE, HF_QUANT_FILE}
        yield partial(WholeFile, path=CONFIG_FILE, content=config)
    for name in sorted(names):
        yield partial(WholeFile, path=name, source=name)


def _job_bytes(shards: Sequence[ShardHeader]) -> int:
    """Return the source bytes of a job: of the checkpoint alone, so that every machine writes the same files."""
    eighth = sum(shard.payload_bytes for shard in shards) // JOBS_AT_LEAST
    return min(max(eighth, LEAST_JOB_BYTES), MOST_JOB_BYTES)


def _index(jobs: ShardJobs, rank: int) -> WholeFile:
    return WholeFile(path=jobs.directory(rank) + INDEX_FILE, content=jobs.index(rank))


def _slots_document(jobs: SlotJobs, rank: int) -> WholeFile:
    return WholeFile(path=f"{rank_directory(jobs.topology, rank)}/{SLOTS_FILE}", content=jobs.document(rank))


def _request_problems(placement: Placement, layout: OutputLayout, ranks: Collection[int] | None) -> Iterator[Problem]:
    world = placement.topology.world_size
    for rank in sorted(set(ranks or ())):
        if not 0 <= rank < world:
            yield Problem(where="--ranks", what="no such rank", expected=f"0..{world - 1}", found=str(rank))
    if ranks is not None and not ranks:
        yield Problem(where="--ranks", what="no rank is prepared", expected="at least one")
    if layout == "hf" and world > 1:
        expected, found = "--tp 1 --pp 1", f"--tp {placement.topology.tp} --pp {placement.topology.pp}"
        yield Problem(where="--layout hf", what="is one unsharded checkpoint", expected=expected, found=found)
    if layout == "hf" and placement.engine.name != AS_STORED:
        what = "has the shapes of the checkpoint, as every engine loads it"
        yield Problem(where="--layout hf", what=what, expected=f"engine {AS_STORED}", found=placement.engine.name)


def _stored(placement: Placement) -> Iterator[tuple[str, str]]:
    """Yield the name, for all layers, and the dtype of every kind of tensor."""
    for entry in placement.assignment.entries:
        yield from ((entry.module.rule.pattern + tensor.suffix, tensor.dtype) for tensor in entry.stored)


def _check_bytes(placement: Placement, taken: Taken) -> None:
    """Hold the sum of all takes against the placement: planned bytes are written bytes.

    Raises:
        CheckpointError: They differ: the headers are not those that were placed.
    """
    tp = placement.topology.tp
    for rank in range(placement.topology.world_size):
        planned = placement.file_bytes(*divmod(rank, tp))
        if taken.rank_bytes(rank) != planned:
            what = f"rank {rank} does not take what is planned: these are not the headers that were placed"
            found = f"{taken.rank_bytes(rank)} bytes"
            raise CheckpointError(Problem(where="prepare", what=what, expected=f"{planned} bytes", found=found))
