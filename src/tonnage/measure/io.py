"""Measuring packages: headers and small documents are read, never the weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tonnage.api import read_config
from tonnage.checkpoint.io import CheckpointHeaders, digest_headers, read_bytes, read_checkpoint_headers
from tonnage.errors import CheckpointError, Problem, TonnageError, one_line, raise_if_any
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackageError, Parallel
from tonnage.measure.classes import class_sums
from tonnage.measure.packages import Comparison, MeasuredPackage, Origin, compare
from tonnage.measure.places import Places, check_no_link, find_places, root_of
from tonnage.measure.record import (
    MEASUREMENT_LIMIT_BYTES,
    MeasuredRank,
    Measurement,
    MeasurementError,
    read_measurement,
)
from tonnage.measure.statement import FileSize, Statement, contradictions, package_statement, preparation_statement
from tonnage.measure.topology import decide_topology, expected_ranks, misplaced
from tonnage.prepare.documents import MANIFEST, PROVENANCE, SIGNATURE, STATE, SUMMARY
from tonnage.prepare.io import PrepareError
from tonnage.prepare.layout import rank_directory
from tonnage.prepare.output_dir import is_package
from tonnage.prepare.reader import layer_files
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES
from tonnage.recipes.blueprint import Blueprint, blueprint_of
from tonnage.topology import Topology
from tonnage.units import ranges

_CONFIG = "config.json"
_DEEPEST = 3
"""Directories between the files of a rank and the preparation they belong to."""


def read_measurement_file(path: Path) -> Measurement:
    """Return the measurement a file holds.

    Raises:
        MeasurementError: There is no such file, it is too large, or it is no measurement.
    """
    raw = read_bytes(path, limit_bytes=MEASUREMENT_LIMIT_BYTES, kind=MeasurementError)
    return read_measurement(raw, path.name)


def measure_packages(paths: Sequence[Path]) -> Comparison:
    """Return what packages of one checkpoint hold, and where they differ.

    Raises:
        TonnageError: A directory cannot be measured, is given twice, or they do not belong together.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        known = seen.setdefault(root_of(path), path)
        if known is not path:
            raise MeasurementError(Problem(where=one_line(str(path)), what="given twice", found=one_line(str(known))))
    return compare([measure_package(path) for path in paths])


def measure_package(path: Path) -> MeasuredPackage:
    """Return what one directory holds: a package, a preparation, the ranks of another tool, or a checkpoint.

    Raises:
        MeasurementError: It holds no ranks, not all that should be here, or files of other ranks than their place says.
        TonnageError: A header or a document of it is wrong; every problem is named.
    """
    root = root_of(path)
    where = one_line(root.name or str(root))
    if not root.is_dir():
        what, expected = "no such directory", "a package, a prepared directory, or one with ranks"
        raise MeasurementError(Problem(where=one_line(str(path)), what=what, expected=expected))
    statement = _statement(root, where)
    for file in statement.files if statement else ():
        check_no_link(root / file, f"{where}/{file}")
    places = find_places(root, where=where)
    headers = _read_ranks(root, places, where)
    topology, notes = decide_topology(places.topology, headers, statement, where=where)
    names = {rank: _relative(directory, root, where) for rank, directory in places.directories.items()}
    due = expected_ranks(topology, statement, headers)
    raise_if_any(MeasurementError, misplaced(headers, topology, names, due, where=where))
    if statement is not None:
        elsewhere = frozenset(_folder(topology, rank) for rank in set(statement.ranks) - set(due))
        found = _files(root, places, headers)
        raise_if_any(MeasurementError, contradictions(statement, found, elsewhere, where=where))
    blueprint, unknown = _blueprint(root, places, where)
    ranks = tuple(_measured(rank, headers[rank], blueprint) for rank in headers)
    digest = statement.digest if statement else _digest(places, headers)
    stated = statement.origin if statement else Origin()
    family = blueprint.recipe.family if blueprint else stated.family
    return MeasuredPackage(
        name=where if statement is None or statement.name is None else statement.name,
        path_name=where,
        kind=statement.kind if statement else "checkpoint" if places.whole else "ranks",
        digest=digest,
        digest_of=statement.digest_of if statement else "headers",
        date=statement.date if statement else None,
        topology=topology,
        checkpoint=replace(stated, family=family),
        convert=statement.convert if statement else None,
        ranks=ranks,
        notes=(*notes, *_notes(headers, names), *unknown, *_partly(topology, due, where)),
    )


def _statement(root: Path, where: str) -> Statement | None:
    """Return what the directory says of itself; ``None`` if that is nothing.

    Raises:
        MeasurementError: It says that it is not finished.
    """
    for name in (MANIFEST, PROVENANCE, SUMMARY):
        check_no_link(root / name, f"{where}/{name}")
    if is_package(root):
        manifest = read_bytes(root / MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
        return package_statement(
            manifest, read_bytes(root / PROVENANCE, limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
        )
    if os.path.lexists(root / SUMMARY):
        return preparation_statement(read_bytes(root / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES, kind=PrepareError))
    if os.path.lexists(root / MANIFEST):
        raise MeasurementError(Problem(where=where, what="package is not finished", expected=SIGNATURE, found=MANIFEST))
    for above in (root, *root.parents[:_DEEPEST]):
        if os.path.lexists(above / STATE) and not os.path.lexists(above / SUMMARY):
            what, found = "preparation is not complete", f"only {STATE}"
            raise MeasurementError(Problem(where=one_line(above.name), what=what, expected=SUMMARY, found=found))
    return None


def _read_ranks(root: Path, places: Places, where: str) -> dict[int, CheckpointHeaders]:
    """Return the headers of every rank; problems of all of them at once, named by the path in the directory."""
    headers: dict[int, CheckpointHeaders] = {}
    problems: list[Problem] = []
    for rank, directory in places.directories.items():
        try:
            headers[rank] = read_checkpoint_headers(directory, also=layer_files(directory))
        except CheckpointError as error:
            below = _relative(directory, root, where)
            named = ((below if p.where == str(directory) else f"{below}/{p.where}", p) for p in error.problems)
            problems += [replace(problem, where=name) for name, problem in named]
    raise_if_any(CheckpointError, problems)
    return headers


def _relative(directory: Path, root: Path, where: str) -> str:
    """Return a directory's name for refusals, beginning with that of the package."""
    return where if directory == root else f"{where}/{directory.relative_to(root).as_posix()}"


def _files(root: Path, places: Places, headers: dict[int, CheckpointHeaders]) -> dict[str, FileSize]:
    """Return the safetensors files that count, by path in the package."""
    return {
        (places.directories[rank] / shard.shard_file).relative_to(root).as_posix(): FileSize(
            payload_bytes=shard.payload_bytes, file_bytes=shard.file_bytes
        )
        for rank in headers
        for shard in headers[rank].shards
    }


def _measured(rank: int, headers: CheckpointHeaders, blueprint: Blueprint | None) -> MeasuredRank:
    return MeasuredRank(
        rank=rank,
        payload_bytes=headers.payload_bytes,
        file_bytes=sum(shard.file_bytes for shard in headers.shards),
        tensors=headers.tensor_count,
        by_class=class_sums(headers.shards, blueprint),
    )


def _blueprint(root: Path, places: Places, where: str) -> tuple[Blueprint | None, tuple[str, ...]]:
    """Return what the family of the config stores, and a note if no classes follow from the config."""
    first = next(iter(places.directories.values()))
    directory = next((one for one in (root, first) if os.path.lexists(one / _CONFIG)), None)
    if directory is None:
        return None, (f"{where}: no {_CONFIG}, so all classes are unknown",)
    if not places.whole:
        check_no_link(directory / _CONFIG, f"{_relative(directory, root, where)}/{_CONFIG}")
    try:
        return blueprint_of(read_config(directory)), ()
    except TonnageError as error:
        return None, (f"all classes are unknown: {error.problems[0]}",)


def _digest(places: Places, headers: dict[int, CheckpointHeaders]) -> str:
    """Return the SHA-256 over the checkpoint digests of all ranks in order, each as its hex text."""
    digests = [digest_headers(directory, headers[rank]) for rank, directory in places.directories.items()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _folder(topology: Parallel, rank: int) -> str:
    return rank_directory(Topology(tp=topology.tp, ep=topology.ep, pp=topology.pp), rank)


def _partly(topology: Parallel, here: Sequence[int], where: str) -> tuple[str, ...]:
    """Return a note on the ranks that are not here."""
    absent = sorted(set(range(topology.world_size)) - set(here))
    return (f"{where}: ranks {ranges(absent)} are not here and not measured",) if absent else ()


def _notes(headers: dict[int, CheckpointHeaders], names: dict[int, str]) -> tuple[str, ...]:
    return tuple(f"{names[rank]}/{note}" for rank, found in headers.items() for note in found.notes)
