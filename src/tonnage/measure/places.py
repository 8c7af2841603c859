"""Where a directory keeps the files of every rank, whoever cut it. Links among them are refused, not followed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import Problem, one_line
from tonnage.export.manifest import Parallel
from tonnage.export.moving import resolved
from tonnage.measure.record import MeasurementError
from tonnage.topology import MOST_RANKS

WEIGHTS = "weights"
_SUFFIX = ".safetensors"
_TOPOLOGY = re.compile(r"tp([1-9][0-9]{0,3})(?:-ep([1-9][0-9]{0,3}))?(?:-pp([1-9][0-9]{0,3}))?")
_RANK = re.compile(r"rank[-_]?([0-9]{1,7})")
_DIRECTORY = "a package, a prepared directory, or one with ranks"
_EXPECTED = "weights/tpN/rank-R, rank-R, or safetensors files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of the ranks.

    Attributes:
        topology: What the name of the directory around them says; ``None`` if it says nothing.
        directories: By rank, ascending.
        whole: The directory itself is an unsharded checkpoint, rank 0 of 1.
    """

    topology: Parallel | None
    directories: dict[int, Path]
    whole: bool = False


def find_places(root: Path, *, where: str) -> Places:
    """Return where the ranks of a directory are.

    Args:
        root: The directory.
        where: Its name for refusals.

    Raises:
        MeasurementError: There are none, those of several topologies, a rank twice, or a link in their place.
    """
    groups = list(_groups(root, where))
    whole = any(entry.name.endswith(_SUFFIX) for entry in _entries(root, where))
    if whole and not groups:
        return Places(topology=Parallel(tp=1), directories={0: root}, whole=True)
    if len(groups) != 1 or whole:
        shown = [directory.relative_to(root).as_posix() for directory, _ in groups] + [f"*{_SUFFIX}"] * whole
        what = "ranks of several topologies" if groups else "no ranks to measure"
        raise _refusal(where, what, _EXPECTED, ", ".join(shown) or "none")
    directory, ranks = groups[0]
    for path in ranks.values():
        _check_files(path, f"{where}/{path.relative_to(root).as_posix()}")
    return Places(topology=_topology(directory.name), directories=dict(sorted(ranks.items())))


def root_of(path: Path) -> Path:
    """Return the absolute path of a directory, without links on the way to it.

    Raises:
        MeasurementError: Links lead back to themselves, a name is too long, or the way to it cannot be looked at.
    """
    where = one_line(str(path))
    try:
        return resolved(path)
    except OSError as error:
        what = "no such directory" if isinstance(error, FileNotFoundError) else "cannot be used"
        raise _refusal(where, what, _DIRECTORY, error.strerror) from error


def check_no_link(path: Path, where: str) -> None:
    """Refuse a link in the place of a file or directory of a package.

    Raises:
        MeasurementError: It is one, or cannot be looked at.
    """
    try:
        is_link = path.is_symlink()
    except OSError as error:
        raise _refusal(where, "cannot be used", "a file or directory", error.strerror) from error
    if is_link:
        raise _refusal(where, "a link, which is not followed", "a file or directory of its own", "a link")


def _groups(root: Path, where: str) -> Iterator[tuple[Path, dict[int, Path]]]:
    """Yield directories that hold ranks: the root, ``weights``, and those named by a topology in either."""
    bases = [root]
    if os.path.lexists(root / WEIGHTS):
        check_no_link(root / WEIGHTS, f"{where}/{WEIGHTS}")
        bases += [root / WEIGHTS] if (root / WEIGHTS).is_dir() else []
    for base in bases:
        below = where if base == root else f"{where}/{WEIGHTS}"
        named = [base / entry.name for entry in _entries(base, below) if _topology(entry.name)]
        for directory in (base, *named):
            shown = below if directory == base else f"{below}/{directory.name}"
            if directory != base:
                check_no_link(directory, shown)
            ranks = _ranks(directory, shown)
            if ranks:
                yield directory, ranks


def _ranks(directory: Path, where: str) -> dict[int, Path]:
    ranks: dict[int, Path] = {}
    for entry in _entries(directory, where):
        match = _RANK.fullmatch(entry.name)
        if match is None:
            continue
        number, path = int(match[1]), directory / entry.name
        check_no_link(path, f"{where}/{entry.name}")
        if not entry.is_dir(follow_symlinks=False):
            raise _refusal(f"{where}/{entry.name}", "not a directory of a rank", "a directory", "something else")
        if number in ranks:
            raise _refusal(where, f"rank {number} twice", "one directory", f"{ranks[number].name}, {entry.name}")
        ranks[number] = path
    return ranks


def _check_files(directory: Path, where: str) -> None:
    """Refuse links among the files of a rank, and files that are further down where nothing would look for them."""
    for entry in _entries(directory, where):
        check_no_link(directory / entry.name, f"{where}/{entry.name}")
        if entry.is_dir(follow_symlinks=False):
            raise _refusal(f"{where}/{entry.name}", "a directory inside a rank", "files alone", "a directory")


def _entries(directory: Path, where: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise _refusal(where, "cannot be listed", "a directory", error.strerror) from error


def _topology(name: str) -> Parallel | None:
    """Return what the name of a directory says of the ranks in it."""
    match = _TOPOLOGY.fullmatch(name)
    if match is None:
        return None
    tp, ep, pp = (int(size or 1) for size in match.groups())
    return Parallel(tp=tp, ep=ep, pp=pp) if max(tp, ep, pp) <= MOST_RANKS else None


def _refusal(where: str, what: str, expected: str, found: str | None) -> MeasurementError:
    return MeasurementError(Problem(where=where, what=what, expected=expected, found=found))
