"""Which sizes the ranks of a directory are cut for, and whether every rank is there and in its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tonnage.checkpoint.io import CheckpointHeaders
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.errors import Problem
from tonnage.export.manifest import Parallel
from tonnage.measure.record import MeasurementError
from tonnage.measure.statement import Statement
from tonnage.topology import MOST_RANKS

_MOST_DIGITS = 4
_MOST_NAMED = 20


def decide_topology(
    named: Parallel | None, headers: Mapping[int, CheckpointHeaders], statement: Statement | None, *, where: str
) -> tuple[Parallel, tuple[str, ...]]:
    """Return the sizes: as a document says, else the name of the directory, else the first header, else by counting.

    Args:
        named: What the name of the directory says.
        headers: Of every rank.
        statement: Of the directory.
        where: Its name.

    Returns:
        The sizes, and a note where they were only counted.

    Raises:
        MeasurementError: Document and name differ, or there are more ranks than can be.
    """
    if statement is not None and named is not None and named != statement.topology:
        what = f"another topology than {statement.digest_of} says"
        raise MeasurementError(Problem(where=where, what=what, expected=statement.topology.words, found=named.words))
    stated = statement.topology if statement else named or _in_metadata(headers)
    if stated is not None:
        return stated, ()
    ranks = max(headers) + 1
    if ranks > MOST_RANKS:
        expected = f"less than {MOST_RANKS}"
        raise MeasurementError(
            Problem(where=where, what="a rank beyond reason", expected=expected, found=str(ranks - 1))
        )
    return Parallel(tp=ranks), (f"{where}: nothing says for how many ranks it is cut, {ranks} are counted",)


def expected_ranks(topology: Parallel, statement: Statement | None, present: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that must be here: those a document states, else all of the topology.

    A package may state the ranks of several hosts, each of which keeps its own (:mod:`tonnage.export.joining`): what is
    here of those is measured.
    """
    if statement is None or statement.layout != "tp":
        return tuple(range(topology.world_size))
    if statement.kind == "package" and not set(present).isdisjoint(statement.ranks):
        return tuple(rank for rank in statement.ranks if rank in present)
    return statement.ranks


def misplaced(
    headers: Mapping[int, CheckpointHeaders],
    topology: Parallel,
    names: Mapping[int, str],
    expected: Sequence[int],
    *,
    where: str,
) -> Iterator[Problem]:
    """Yield ranks that are missing or beyond the topology, and files whose metadata is that of another rank.

    Args:
        headers: Of every rank.
        topology: Sizes they are cut for.
        names: Directory of every rank.
        expected: Ranks that must be here.
        where: Name of the package.
    """
    missing = [rank for rank in expected if rank not in headers]
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        shown = ", ".join(map(str, missing[:_MOST_NAMED])) + more
        what = f"rank{'s' if len(missing) > 1 else ''} {shown} missing"
        wanted, found = f"{len(expected)} ranks ({topology.words})", f"{len(headers)}"
        yield Problem(where=where, what=what, expected=wanted, found=found)
    for rank, found_headers in headers.items():
        if rank >= topology.world_size:
            wanted = f"less than {topology.world_size} ({topology.words})"
            yield Problem(where=names[rank], what="a rank beyond the topology", expected=wanted, found=str(rank))
            continue
        for shard in found_headers.shards:
            yield from _of_another(shard, rank, topology, names[rank])


def _of_another(shard: ShardHeader, rank: int, topology: Parallel, where: str) -> Iterator[Problem]:
    pp_rank, tp_rank = divmod(rank, topology.tp)
    expected = {
        "rank": rank,
        "tp_size": topology.tp,
        "tp_rank": tp_rank,
        "ep_size": topology.ep,
        "pp_size": topology.pp,
        "pp_rank": pp_rank,
    }
    for key, value in expected.items():
        found = shard.skeleton.metadata.get(key, str(value))
        if found != str(value):
            what = f"its metadata has another {key} than its place"
            yield Problem(where=f"{where}/{shard.shard_file}", what=what, expected=str(value), found=found)


def _in_metadata(headers: Mapping[int, CheckpointHeaders]) -> Parallel | None:
    """Return the sizes the first header states; all others are held against them."""
    metadata = next((shard.skeleton.metadata for one in headers.values() for shard in one.shards), {})
    sizes = [metadata.get(key, "1") for key in ("tp_size", "ep_size", "pp_size")]
    if "tp_size" not in metadata or not all(map(_is_size, sizes)):
        return None
    tp, ep, pp = map(int, sizes)
    return Parallel(tp=tp, ep=ep, pp=pp)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and 1 <= int(text) <= MOST_RANKS
