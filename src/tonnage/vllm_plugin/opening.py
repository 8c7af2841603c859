"""One rank's files, found and checked before any weight is read: the right cut, complete, and verified if asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.checkpoint.io import read_bytes
from tonnage.errors import Problem, TonnageError, raise_if_any
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, parse_manifest
from tonnage.export.signature import PublicKey
from tonnage.export.verify import VerifyRequest, verify_package
from tonnage.formats.quantized import value_scales
from tonnage.prepare.documents import MANIFEST, SUMMARY
from tonnage.prepare.layout import rank_directory
from tonnage.prepare.output_dir import JOURNAL_FILE, is_package
from tonnage.prepare.reader import RankView, layer_files, open_rank
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES, read_summary
from tonnage.topology import Topology

_KEY = "public_key"
_OPTIONS = "model_loader_extra_config"


class LoadError(TonnageError):
    """An engine is not given these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """One rank's tensors, and what its directory was recorded to hold.

    Attributes:
        view: The tensors, mapped when they are asked for.
        planned_bytes: Weight bytes of this rank, as planned and recorded.
        verified: Whether the files were verified against a signature just now.
    """

    view: RankView
    planned_bytes: int
    verified: bool


def public_key_of(options: Mapping[str, Any]) -> Path | None:
    """Return the key a package must be signed with; ``None`` if it need not be.

    Raises:
        LoadError: There are other options, or the key is no path.
    """
    problems = [
        Problem(where=_OPTIONS, what="no such option", expected=_KEY, found=str(name))
        for name in options.keys() - {_KEY}
    ]
    key = options.get(_KEY)
    if key is not None and not (isinstance(key, str) and key):
        problems.append(Problem(where=_OPTIONS, what=_KEY, expected="the path of a PEM file", found=repr(key)))
    raise_if_any(LoadError, problems)
    return None if key is None else Path(key)


def open_rank_files(directory: Path, topology: Topology, rank: int, *, public_key: Path | None = None) -> RankFiles:
    """Return one rank's tensors.

    Args:
        directory: A package, or what ``prepare`` wrote.
        topology: What the engine runs as.
        rank: Global rank in it.
        public_key: Who must have signed it: the files of all ranks and of this one are hashed.

    Raises:
        LoadError: It is cut for another topology, or a file of the rank is missing, a link, or of another size.
        VerifyError: It is not the package that was signed.
        CheckpointError: A header is wrong, or the preparation is not complete.
    """
    if not directory.is_dir():
        raise LoadError(Problem(where=str(directory), what="no such directory", expected="a package on this machine"))
    folder = rank_directory(topology, rank)
    raise_if_any(LoadError, _cut_problems(directory, folder))
    raise_if_any(LoadError, _link_problems(directory, folder))
    if public_key is not None:
        verify_package(directory, PublicKey(path=public_key), VerifyRequest(ranks=(rank,), tp=topology.tp)).check()
    recorded = _recorded(directory, folder)
    raise_if_any(LoadError, _file_problems(directory, folder, {path: size for path, (size, _) in recorded.items()}))
    view = open_rank(directory / folder, rank)
    raise_if_any(LoadError, _tensor_problems(view, folder))
    planned = sum(payload for _, payload in recorded.values())
    if view.payload_bytes != planned:
        found = f"{view.payload_bytes} bytes"
        raise LoadError(
            Problem(where=folder, what="other weights than planned", expected=f"{planned} bytes", found=found)
        )
    return RankFiles(view=view, planned_bytes=planned, verified=public_key is not None)


def _cut_problems(directory: Path, folder: str) -> Iterator[Problem]:
    """Yield why there is no such rank."""
    cut, _, _ = folder.rpartition("/")
    present = sorted(path.name for path in (directory / "weights").glob("tp*") if path.is_dir())
    if not present:
        what = "holds no weights by rank; what `prepare --layout hf` writes is loaded without this load format"
        yield Problem(where=str(directory), what=what, expected=cut, found="no directory weights/tpN")
    elif not (directory / cut).is_dir():
        yield Problem(where=str(directory), what="cut for another topology", expected=cut, found=", ".join(present))
    elif not (directory / folder).is_dir():
        ranks = sorted(path.name for path in (directory / cut).glob("rank-*"))
        yield Problem(where=str(directory), what="rank is missing", expected=folder, found=", ".join(ranks) or "none")


def _link_problems(directory: Path, folder: str) -> Iterator[Problem]:
    """Yield links on the way to the files of a rank, and in their places: verified or not, none is followed."""
    ways = [*reversed(Path(folder).parents[:-1]), Path(folder)]
    places = [*ways, *(Path(folder) / entry.name for entry in sorted((directory / folder).iterdir()))]
    for place in places:
        if (directory / place).is_symlink():
            yield Problem(where=place.as_posix(), what="a link", expected="what was written there itself")


def _recorded(directory: Path, folder: str) -> dict[str, tuple[int, int]]:
    """Return size and payload of every recorded file of a rank's directory, by path.

    Raises:
        LoadError: Nothing is recorded: the preparation is not complete, or nothing is recorded of this rank.
        PrepareError: What is there is no record.
        PackageError: Same.
    """
    found: Iterator[tuple[str, int, int]]
    if is_package(directory):
        raw = read_bytes(directory / MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES, kind=LoadError)
        found = ((file.path, file.nbytes, file.payload_bytes) for file in parse_manifest(raw).files)
    elif os.path.lexists(directory / SUMMARY) and not os.path.lexists(directory / JOURNAL_FILE):
        raw = read_bytes(directory / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES, kind=LoadError)
        found = ((file.path, file.file_bytes, file.payload_bytes) for file in read_summary(raw, where=SUMMARY).written)
    else:
        what, expected = "preparation is not complete", f"{SUMMARY}, or a signed package"
        raise LoadError(Problem(where=str(directory), what=what, expected=expected, found="neither"))
    recorded = {path: (nbytes, payload) for path, nbytes, payload in found if path.startswith(f"{folder}/")}
    if not recorded:
        raise LoadError(Problem(where=folder, what="nothing is recorded of this rank"))
    return recorded


def _file_problems(directory: Path, folder: str, sizes: Mapping[str, int]) -> Iterator[Problem]:
    present = {f"{folder}/{path.name}": path.lstat() for path in (directory / folder).iterdir()}
    for path, size in sizes.items():
        if path not in present:
            yield Problem(where=path, what="file is missing", expected=f"{size} bytes", found="no such file")
        elif present[path].st_size != size:
            found = f"{present[path].st_size} bytes"
            yield Problem(where=path, what="not as it was written", expected=f"{size} bytes", found=found)
    for path in sorted(present.keys() - sizes.keys()):
        yield Problem(where=path, what="not of this package")


def _tensor_problems(view: RankView, folder: str) -> Iterator[Problem]:
    """Yield what vLLM would load without an error and compute nonsense with, or cannot load at all."""
    if layers := layer_files(view.directory):
        yield Problem(where=f"{folder}/{layers[0]}", what="experts in an exl3-v1 container, which vLLM does not load")
    yield from value_scales(folder, ((name, tensor.dtype) for name, tensor in view.tensors.items()))
