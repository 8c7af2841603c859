"""What is served or planned: a package, a prepared directory or a checkpoint, opened as something to be planned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from tonnage.api import Checkpoint, open_checkpoint, read_config
from tonnage.checkpoint.io import CheckpointHeaders, read_bytes
from tonnage.checkpoint.strict_json import MOST_PROBLEMS
from tonnage.errors import CheckpointError, FlagsError, Problem, UnitError, one_line, raise_if_any
from tonnage.export.agreement import read_package_plan, read_provenance
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackageError, Parallel, parse_manifest
from tonnage.export.provenance import read_origin
from tonnage.matching import assign_headers
from tonnage.plan import Plan
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, STATE, SUMMARY
from tonnage.prepare.layout import rank_directory
from tonnage.prepare.output_dir import is_package
from tonnage.prepare.reader import TensorView, layer_files, open_rank
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES, read_summary
from tonnage.recipes.blueprint import blueprint_of
from tonnage.saved_plan import SavedPlan, SavedProfile, read_plan_document
from tonnage.serve.parts import whole_tensors
from tonnage.topology import Topology

Kind = Literal["package", "prepared directory", "checkpoint"]
_WEIGHTS = "weights."
_OF_THE_CUT = ("--tp", "--ep", "--pp", "--convert")
"""Options that suggestions for another preparation begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is to be served.

    Attributes:
        kind: What its directory is.
        directory: Absolute.
        name: Of the package, else of the directory.
        checkpoint: Its tensors, whole.
        layout: ``tp``: one directory per rank.
        topology: What it is cut for; ``None`` for a standard checkpoint, which any topology can load.
        engine: By whose rules it was cut; empty where nothing is cut.
        recorded: The plan it was made by, if that is on record.
    """

    kind: Kind
    directory: Path
    name: str
    checkpoint: Checkpoint
    layout: Literal["tp", "hf"] = "hf"
    topology: Parallel | None = None
    engine: str = ""
    recorded: SavedPlan | None = None

    @property
    def profile(self) -> SavedProfile:
        """What it was made to serve, as far as its plan says so."""
        return self.recorded.profile if self.recorded else SavedProfile()

    def check(self, engine: str) -> None:
        """Refuse what is cut by other rules than those of the engine.

        Raises:
            FlagsError: Its ranks would be other parts than the engine expects.
        """
        if self.layout == "tp" and self.topology is not None and self.topology.world_size > 1 and self.engine != engine:
            what, expected = "cut by the rules of another engine", f"prepare --engine {engine}"
            raise FlagsError(Problem(where=self.name, what=what, expected=expected, found=self.engine))

    def sizes(self, *, tp: int | None, ep: int | None, pp: int | None) -> Topology:
        """Return the parallel sizes: those it is cut for, else as asked.

        Raises:
            UnitError: Others are asked for than it is cut for; every one is named.
            PlacementError: There is no such topology.
        """
        cut = self.topology
        if cut is None:
            return Topology(tp=1 if tp is None else tp, ep=1 if ep is None else ep, pp=1 if pp is None else pp)
        asked = (("--tp", tp, cut.tp), ("--ep", ep, cut.ep), ("--pp", pp, cut.pp))
        raise_if_any(
            UnitError,
            (
                Problem(where=option, what="cut for another topology", expected=cut.words, found=str(size))
                for option, size, own in asked
                if size is not None and size != own
            ),
        )
        return Topology(tp=cut.tp, ep=cut.ep, pp=cut.pp)

    def suggested(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """Return what would fit; what another cut or conversion would, says that it must be prepared for that."""
        if self.layout == "hf":
            return found
        return tuple(f"{words} (prepared anew)" if words.startswith(_OF_THE_CUT) else words for words in found)

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan of other weights than those on record: bytes of every rank, padding aside.

        Raises:
            CheckpointError: Naming the ranks that differ.
        """
        if self.recorded is None or self.layout != "tp" or plan.placement is None:
            return
        planned = {
            ledger.rank: sum(line.nbytes for line in ledger.lines if line.component.startswith(_WEIGHTS))
            for ledger in plan.ranks
        }
        raise_if_any(CheckpointError, _differences(self.name, planned, self.recorded))


def open_served(path: str | Path) -> Served:
    """Return what a directory holds; whether it is what was signed is for :mod:`tonnage.export.verify` to say.

    Raises:
        TonnageError: It is nothing that can be served, or a file of it is wrong.
    """
    directory = Path(path)
    if not directory.is_dir():
        expected = "a package, a prepared directory or a checkpoint on this machine"
        raise CheckpointError(Problem(where=str(path), what="no such directory", expected=expected))
    directory = directory.absolute()
    if is_package(directory):
        return _package(directory)
    if os.path.lexists(directory / SUMMARY):
        return _prepared(directory)
    if os.path.lexists(directory / STATE):
        raise CheckpointError(Problem(where=str(path), what="preparation is not complete", expected=SUMMARY))
    checkpoint = open_checkpoint(directory)
    return Served(
        kind="checkpoint",
        directory=directory,
        name=one_line(directory.resolve().name),
        checkpoint=checkpoint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What a package or a preparation says of itself; of its files those of ranks, path and bytes."""

    kind: Kind
    name: str
    layout: str
    topology: Parallel
    engine: str
    digest: str
    ranks: tuple[int, ...]
    files: tuple[tuple[str, int], ...]
    recorded: SavedPlan | None


def _package(directory: Path) -> Served:
    manifest = parse_manifest(read_bytes(directory / MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError))
    provenance = read_provenance(
        read_bytes(directory / PROVENANCE, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
    )
    plan = read_package_plan(read_bytes(directory / PLAN, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError))
    record = _Record(
        kind="package",
        name=manifest.name,
        layout=manifest.layout,
        topology=manifest.topology,
        engine=provenance.options.engine,
        digest=provenance.source.digest,
        ranks=manifest.ranks,
        files=tuple((file.path, file.nbytes) for file in manifest.files if file.rank is not None),
        recorded=plan,
    )
    return _served(directory, record)


def _prepared(directory: Path) -> Served:
    raw = read_bytes(directory / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES, kind=CheckpointError)
    summary = read_summary(raw, where=SUMMARY)
    identity = summary.identity
    record = _Record(
        kind="prepared directory",
        name=one_line(directory.resolve().name),
        layout=identity.layout,
        topology=read_origin(identity, where=SUMMARY).topology,
        engine=identity.engine,
        digest=identity.checkpoint,
        ranks=identity.ranks,
        files=tuple((file.path, file.file_bytes) for rank in summary.ranks for file in rank.files),
        recorded=None if summary.plan is None else read_plan_document(summary.plan, where=SUMMARY, kind=PackageError),
    )
    return _served(directory, record)


def _served(directory: Path, record: _Record) -> Served:
    if record.layout == "hf":
        checkpoint, topology = open_checkpoint(directory), None
    else:
        checkpoint, topology = _of_ranks(directory, record), record.topology
    return Served(
        kind=record.kind,
        directory=directory,
        name=record.name,
        checkpoint=checkpoint,
        layout="hf" if record.layout == "hf" else "tp",
        topology=topology,
        engine=record.engine,
        recorded=record.recorded,
    )


def _of_ranks(directory: Path, record: _Record) -> Checkpoint:
    """Return the checkpoint that ranks are parts of.

    Raises:
        CheckpointError: Ranks are missing, or a header of one is wrong.
        FlagsError: Its experts are in a container.
    """
    sizes = record.topology
    missing = sorted(set(range(sizes.world_size)) - set(record.ranks))
    if missing:
        found = f"all but {', '.join(map(str, missing[:10]))}"
        raise CheckpointError(Problem(where=record.name, what="ranks are missing", expected=sizes.words, found=found))
    topology = Topology(tp=sizes.tp, ep=sizes.ep, pp=sizes.pp)
    raise_if_any(CheckpointError, islice(_lost(directory, topology, record), MOST_PROBLEMS))
    config = read_config(directory)
    shard = whole_tensors(_tensors(directory, topology))
    assignment = assign_headers(blueprint_of(config), (shard,))
    note = f"a {record.kind}, cut for {sizes.words} by the rules of {record.engine}: bytes are as its ranks store them"
    assignment = replace(assignment, notes=(note, *assignment.notes))
    headers = CheckpointHeaders(shards=(shard,), notes=())
    return Checkpoint(name=record.name, digest=record.digest, assignment=assignment, headers=headers)


def _lost(directory: Path, topology: Topology, record: _Record) -> Iterator[Problem]:
    """Yield files that are not as they were written, of ranks that are here: others may be on other hosts."""
    folders = {rank_directory(topology, rank) for rank in range(topology.world_size)}
    here = {folder for folder in folders if (directory / folder).is_dir()}
    for path, nbytes in record.files:
        folder, _, name = path.rpartition("/")
        if folder in here:
            try:
                found = (directory / folder / name).stat().st_size
            except OSError as error:
                yield Problem(where=path, what="cannot be read", expected=f"{nbytes} bytes", found=error.strerror)
                continue
            if found != nbytes:
                yield Problem(
                    where=path, what="another size than on record", expected=f"{nbytes} bytes", found=f"{found} bytes"
                )


def _tensors(directory: Path, topology: Topology) -> Iterator[TensorView]:
    """Yield the tensors of the fewest ranks with a part of each: one per stage, all of it where experts are whole."""
    step = topology.tp if topology.ep == 1 else 1
    for rank in range(0, topology.world_size, step):
        folder = directory / rank_directory(topology, rank)
        if found := layer_files(folder):
            what = "experts in an exl3-v1 container, whose slots are not put together again"
            expected = "its source; `tonnage measure` for what its ranks hold"
            raise FlagsError(Problem(where=f"{folder.name}/{found[0]}", what=what, expected=expected))
        with open_rank(folder, rank) as view:
            yield from view.tensors.values()


def _differences(name: str, planned: Mapping[int, int], recorded: SavedPlan) -> Iterator[Problem]:
    before = {rank.rank: rank.role_bytes for rank in recorded.ranks if rank.lines}
    for rank, nbytes in before.items():
        if planned.get(rank) != nbytes:
            what = f"weights of rank {rank} are not those of the plan on record"
            yield Problem(where=name, what=what, expected=f"{nbytes} bytes", found=f"{planned.get(rank)} bytes")
