"""The checkpoints that are served: those in the directories of the command line, and nothing a link leads out to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tonnage.checkpoint.io import JSON_LIMIT_BYTES
from tonnage.errors import CheckpointError, NotServedError, Problem, raise_if_any

CHECKPOINTS_SCHEMA = "tonnage.checkpoints/1"
CONFIG, _QUANT = "config.json", "hf_quant_config.json"
DEEPEST_FOLDER = 6
MOST_ENTRIES = 20_000
MOST_LISTED = 2_000
MOST_FILES = 4_096
MOST_SEARCHED_BYTES = 1 << 28
"""Of JSON files that may be configs, read to see whether they are."""
_OPENED = (".json", ".safetensors")
"""How names end of what is opened of a checkpoint."""
_SAYS_A_MODEL = (b'"model_type"', b'"architectures"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint that is served.

    Attributes:
        path: As a request names it.
        kind: ``directory``, or ``config`` for a config file alone.
        weights: Whether shard files lie beside the config.
    """

    path: str
    kind: str
    weights: bool


def checkpoints_document(directories: Sequence[str], *, hub: bool) -> dict[str, Any]:
    """Return what is served, as a document."""
    found, complete = list_checkpoints(directories)
    return {
        "schema": CHECKPOINTS_SCHEMA,
        "directories": list(directories),
        "hub": hub,
        "checkpoints": [{"path": one.path, "kind": one.kind, "weights": one.weights} for one in found],
        "complete": complete,
    }


def check_directories(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return directories as they are served.

    Raises:
        CheckpointError: One of them is none, or has a name that no page can hold.
    """
    directories = tuple(str(path) for path in paths)
    problems = [
        Problem(where=directory, what="cannot be served", expected="a directory with a printable name")
        if os.path.lexists(directory)
        else Problem(where=directory, what="no such directory", expected="one with checkpoints or configs")
        for directory in directories
        if not directory.isprintable() or not Path(directory).is_dir()
    ]
    raise_if_any(CheckpointError, problems)
    return directories


def list_checkpoints(directories: Sequence[str]) -> tuple[tuple[Listed, ...], bool]:
    """Return the checkpoints in directories, in order of paths, and whether these are all.

    Directories that are links are not entered, nor are hidden ones. What has a name that no address can hold is left
    out, and then these are not all.
    """
    walk = _Walk(real=tuple(map(os.path.realpath, directories)))
    found: list[Listed] = []
    for directory in directories:
        for one in walk.listed(Path(directory), 0):
            if len(found) == MOST_LISTED:
                return tuple(found), False
            if one.path == one.path.strip():
                found.append(one)
            else:
                walk.complete = False
    return tuple(found), walk.complete


@dataclass(slots=True, kw_only=True)
class _Walk:
    """How far a walk through directories may go on."""

    real: tuple[str, ...]
    entries: int = 0
    searched_bytes: int = 0
    complete: bool = True

    def listed(self, folder: Path, depth: int) -> Iterator[Listed]:
        entries = self._entries(folder)
        files = [entry for entry in entries if entry.name.endswith(_OPENED) and self._is_file(entry)]
        if any(entry.name == CONFIG for entry in files):
            weights = any(entry.name.endswith(".safetensors") for entry in files)
            yield Listed(path=str(folder), kind="directory", weights=weights)
        else:
            for entry in files:
                if entry.name.endswith(".json") and self._is_config(entry):
                    yield Listed(path=entry.path, kind="config", weights=False)
        below = [one for one in entries if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")]
        if below and depth == DEEPEST_FOLDER:
            self.complete = False
            return
        for entry in below:
            yield from self.listed(Path(entry.path), depth + 1)

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return what a directory holds, in order of names; less where it cannot be read, or is beyond the bound."""
        found: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self.entries == MOST_ENTRIES:
                    self.complete = False
                    break
                self.entries += 1
                if entry.name.isprintable():
                    found.append(entry)
                else:
                    self.complete = False
        return sorted(found, key=lambda entry: entry.name)

    def _is_file(self, entry: os.DirEntry[str]) -> bool:
        with suppress(OSError):
            return entry.is_file() and (not entry.is_symlink() or _within(os.path.realpath(entry.path), self.real))
        return False

    def _is_config(self, entry: os.DirEntry[str]) -> bool:
        """Whether a JSON file says what kind of model it is the config of; no more of them is read than the bound."""
        with suppress(OSError):
            size = entry.stat().st_size
            if size > JSON_LIMIT_BYTES:
                return False
            self.searched_bytes += size
            if self.searched_bytes > MOST_SEARCHED_BYTES:
                self.complete = False
                return False
            raw = Path(entry.path).read_bytes()
            return any(word in raw for word in _SAYS_A_MODEL)
        return False


def served_path(text: str, directories: Sequence[str]) -> Path:
    """Return the path of a checkpoint that a request names.

    Raises:
        NotServedError: It is not in the directories, or a link in it leads out of them. Whether there is such a file
            elsewhere is not said.
    """
    path = Path(text)
    below = [path.relative_to(directory).parts for directory in directories if path.is_relative_to(directory)]
    if not text.isprintable() or not any(".." not in parts for parts in below):
        raise _not_served(text)
    real = tuple(map(os.path.realpath, directories))
    if not os.path.lexists(path) or not _within(os.path.realpath(path), real):
        raise _not_served(text)
    if not path.is_dir() and path.suffix != ".json":
        raise _not_served(text)
    for name, leads_to in _links(path):
        if not _within(leads_to, real):
            what = "a link that leads out of the directories that are served"
            raise NotServedError(Problem(where=text, what=what, found=name))
    return path


def state_of(path: Path) -> tuple[object, ...]:
    """Return what changes when a checkpoint does: names, sizes and times of its files."""
    return tuple(_states(_opened_files(path)))


def _states(files: Iterable[Path]) -> Iterator[tuple[object, ...]]:
    for file in files:
        with suppress(OSError):
            status = file.stat()
            yield file.name, status.st_size, status.st_mtime_ns, status.st_ino


def _links(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the links among the files that are opened with a checkpoint, and where they lead."""
    for file in _opened_files(path):
        if file.is_symlink():
            yield file.name, os.path.realpath(file)


def _opened_files(path: Path) -> tuple[Path, ...]:
    """Return the files that are opened with a checkpoint; more than there are, for a config alone."""
    if path.is_dir():
        return tuple(Path(entry.path) for entry in _files(path) if entry.name.endswith(_OPENED))
    return (path, path.with_name(_QUANT)) if path.name == CONFIG else (path,)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a directory.

    Raises:
        NotServedError: It is more than any checkpoint.
    """
    with os.scandir(folder) as entries:
        found = [entry for _, entry in zip(range(MOST_FILES + 1), entries, strict=False)]
    if len(found) > MOST_FILES:
        what = f"more than {MOST_FILES} files"
        raise NotServedError(Problem(where=str(folder), what=what, expected="a checkpoint"))
    return sorted(found, key=lambda entry: entry.name)


def _within(real: str, directories: Sequence[str]) -> bool:
    return any(PurePath(real).is_relative_to(directory) for directory in directories)


def _not_served(text: str) -> NotServedError:
    expected = "a path that /api/checkpoints lists"
    return NotServedError(Problem(where=text, what="no checkpoint that is served", expected=expected))
