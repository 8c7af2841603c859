"""Shard files cut into jobs: neighbouring tensors of one file, and one output file for every rank that takes any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.prepare.finder import Finder, Found
from tonnage.prepare.jobs import Job, ScaleRule, SourceTensor
from tonnage.prepare.layout import Packed, file_name, index_bytes, pack, plain_metadata, rank_directory, rank_metadata
from tonnage.prepare.takes import TensorParts
from tonnage.topology import Topology


@dataclass(frozen=True, slots=True)
class Span:
    """The tensors of a shard file from position ``begin`` to ``end``, and the ranks that take any of them."""

    shard: ShardHeader
    begin: int
    end: int
    ranks: frozenset[int]


class Taken:
    """Counts what every rank takes: parts of one kind are added up once."""

    def __init__(self, tp: int) -> None:
        """Begin with nothing taken."""
        self._tp = tp
        self._kinds: dict[tuple[int, tuple[int, ...], int], tuple[Found, frozenset[int]]] = {}
        self._counts: Counter[tuple[int, tuple[int, ...], int]] = Counter()

    def add(self, found: Found) -> frozenset[int]:
        """Count a tensor and return the ranks that take any of it."""
        key = (id(found.parts), found.pp_ranks, found.expert if found.parts.experts else 0)
        self._counts[key] += 1
        if key not in self._kinds:
            self._kinds[key] = found, frozenset(rank for rank, _ in found.taken(self._tp))
        return self._kinds[key][1]

    def rank_bytes(self, rank: int) -> int:
        """Return the bytes a rank takes of everything counted."""
        kinds = ((self._kinds[key], count) for key, count in self._counts.items())
        return sum(count * found.parts.nbytes(rank % self._tp) for (found, ranks), count in kinds if rank in ranks)


def cut_into_spans(finder: Finder, shards: Iterable[ShardHeader], taken: Taken, job_bytes: int) -> tuple[Span, ...]:
    """Return the spans of all shard files, every tensor in one of them; what is taken is counted on the way.

    Args:
        finder: Of the placement.
        shards: In the order their outputs are numbered.
        taken: What to count with.
        job_bytes: Most source bytes of a span; a larger tensor is one of its own.

    Raises:
        CheckpointError: A tensor was not placed.
    """
    return tuple(span for shard in shards for span in _spans_of(finder, shard, taken, job_bytes))


def _spans_of(finder: Finder, shard: ShardHeader, taken: Taken, job_bytes: int) -> Iterator[Span]:
    begin, nbytes = 0, 0
    ranks: frozenset[int] = frozenset()
    for found in finder.find(shard):
        if nbytes and nbytes + found.nbytes > job_bytes:
            yield Span(shard, begin, found.position, ranks)
            begin, nbytes, ranks = found.position, 0, frozenset()
        nbytes += found.nbytes
        ranks |= taken.add(found)
    if len(shard) > begin:
        yield Span(shard, begin, len(shard), ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJobs:
    """Makes the job of every span, and the index of every rank.

    Attributes:
        finder: Of the placement.
        topology: Over which ranks.
        spans: All of them, whoever takes anything.
        ranks: Those that are prepared.
        sharded: One directory per rank; otherwise the one rank's files stand at the top.
        scale_rule: Of converted tensors.
        scale_suffix: What their scales are called behind the name of the module.
    """

    finder: Finder
    topology: Topology
    spans: tuple[Span, ...]
    ranks: frozenset[int]
    sharded: bool
    scale_rule: ScaleRule
    scale_suffix: str = ".weight_scale"

    def job(self, number: int) -> Job:
        """Return the job of a span."""
        span = self.spans[number]
        return pack(
            number=number,
            source_file=span.shard.shard_file,
            tensors=self._packed(span),
            path=lambda rank: self.directory(rank) + self._file_name(number),
            metadata=self._metadata,
            scale_rule=self.scale_rule,
        )

    def directory(self, rank: int) -> str:
        """Return what goes before the names of a rank's files."""
        return f"{rank_directory(self.topology, rank)}/" if self.sharded else ""

    def index(self, rank: int) -> bytes:
        """Return a rank's index; the tensors of a container are in none."""
        pp_rank, tp_rank = divmod(rank, self.topology.tp)
        weight_map: dict[str, str] = {}
        total = 0
        for number, span in enumerate(self.spans):
            file = self._file_name(number)
            for found, name in self._found(span) if rank in span.ranks else ():
                if pp_rank in found.pp_ranks and found.parts.taken_by(tp_rank, found.expert):
                    weight_map.update((output, file) for output, _ in self._outputs(name, found.parts))
                    total += found.parts.nbytes(tp_rank)
        return index_bytes(weight_map, total)

    def _packed(self, span: Span) -> Iterator[Packed]:
        for found, name in self._found(span):
            taken = tuple((rank, parts) for rank, parts in found.taken(self.topology.tp) if rank in self.ranks)
            if taken:
                entry = span.shard.skeleton.tensors[found.position]
                source = SourceTensor(
                    file=span.shard.shard_file,
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    begin=span.shard.data_begin + entry.begin,
                )
                yield Packed(source=source, outputs=self._outputs(name, found.parts), taken=taken)

    def _found(self, span: Span) -> Iterator[tuple[Found, str]]:
        tensors = span.shard.skeleton.tensors
        for found in self.finder.find(span.shard, span.begin, span.end):
            yield found, span.shard.real_name(tensors[found.position].name)

    def _outputs(self, name: str, parts: TensorParts) -> tuple[tuple[str, str], ...]:
        """Return name and dtype of what is written for a tensor."""
        module = name.removesuffix(parts.suffix)
        suffixes = [suffix for suffix, _ in parts.outputs]
        if parts.convert:
            suffixes[1] = self.scale_suffix
        return tuple((module + suffix, dtype) for suffix, (_, dtype) in zip(suffixes, parts.outputs, strict=True))

    def _file_name(self, number: int) -> str:
        return file_name(number + 1, len(self.spans))

    def _metadata(self, rank: int) -> dict[str, str]:
        return rank_metadata(self.topology, rank) if self.sharded else plain_metadata()
