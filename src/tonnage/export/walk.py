"""What stands in a package's directory: files with sizes, and what must not be there. No link is followed.

What keeps a package in a repository is not of it: at the top git's own names, which the stock verifier leaves out too,
and what huggingface_hub notes of a download. Nothing else is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from tonnage.errors import Problem
from tonnage.export.manifest import is_package_path

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DEEPEST = 64
IGNORED = (".cache/huggingface", ".git", ".gitattributes", ".github", ".gitignore")
"""Relative paths of files or directories that are not looked at; a link of such a name is refused as any other."""

_FILE_MISSING = "missing"
_FILE_FOREIGN = "not of this package"
_DIRECTORY_FOREIGN = "directory that is not of this package"
_GROUPED = {
    _FILE_MISSING: ("file", "files", _FILE_MISSING),
    _FILE_FOREIGN: ("file", "files", _FILE_FOREIGN),
    _DIRECTORY_FOREIGN: ("directory", "directories", _FILE_FOREIGN),
}
"""Problems that are shown together: one, several, and what of them."""
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What was found below a directory.

    Attributes:
        files: Bytes of every regular file, by relative path with ``/``.
        folders: Relative paths of all directories.
        ignored: Those of :data:`IGNORED` that are there.
        problems: What is neither, or cannot be listed.
    """

    files: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def walk_tree(root: int, *, closed: Collection[str] = ()) -> Tree:
    """Return everything below an open directory.

    Args:
        root: Its descriptor.
        closed: Relative paths of directories that are not looked into.
    """
    tree = Tree()
    _walk(root, "", tree, closed)
    return tree


def _walk(folder: int, prefix: str, tree: Tree, closed: Collection[str]) -> None:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = prefix + entry.name
        if not is_package_path(path):
            tree.problems.append(Problem(where=path, what="not a name a package may have", found=repr(entry.name)))
        elif path in IGNORED and (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            tree.ignored.append(path)
        elif entry.is_file(follow_symlinks=False):
            tree.files[path] = entry.stat(follow_symlinks=False).st_size
        elif entry.is_dir(follow_symlinks=False):
            tree.folders.add(path)
            if path not in closed:
                _enter(folder, entry.name, path, tree, closed)
        else:
            tree.problems.append(_special(path, entry.stat(follow_symlinks=False).st_mode))


def _enter(folder: int, name: str, path: str, tree: Tree, closed: Collection[str]) -> None:
    if path.count("/") >= _DEEPEST:
        tree.problems.append(Problem(where=path, what="directories nest too deeply", expected=f"at most {_DEEPEST}"))
        return
    try:
        inner = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
    except OSError as error:
        tree.problems.append(Problem(where=path, what="directory cannot be read", found=error.strerror))
        return
    try:
        _walk(inner, f"{path}/", tree, closed)
    finally:
        os.close(inner)


def is_ignored(path: str) -> bool:
    """Whether a path is one that is not looked at, or below it.

    >>> is_ignored(".git/config"), is_ignored(".gitmodules")
    (True, False)
    """
    return any(path == name or path.startswith(f"{name}/") for name in IGNORED)


def tree_problems(tree: Tree, expected: Iterable[str], closed: Collection[str] = ()) -> Iterator[Problem]:
    """Yield what is missing and what is too much, file by file; see :func:`grouped`.

    Args:
        tree: What was found.
        expected: Paths of the files that must be there, and no others.
        closed: Directories that may be there and were not looked into.
    """
    wanted = set(expected)
    kept = (*wanted, *closed, *tree.ignored)
    holding = {path.rsplit("/", depth)[0] for path in kept for depth in range(1, path.count("/") + 1)}
    used = {path.rsplit("/", depth)[0] for path in tree.files for depth in range(1, path.count("/") + 1)}
    yield from tree.problems
    refused = {problem.where for problem in tree.problems}
    hidden = tuple(f"{where}/" for where in refused)
    missing = [path for path in wanted - tree.files.keys() - refused if not path.startswith(hidden)]
    yield from (Problem(where=path, what=_FILE_MISSING) for path in sorted(missing))
    yield from (Problem(where=path, what=_FILE_FOREIGN) for path in sorted(tree.files.keys() - wanted))
    foreign = tree.folders - holding - used - set(closed)
    yield from (Problem(where=path, what=_DIRECTORY_FOREIGN) for path in sorted(foreign))


def grouped(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield problems for people: what is missing and what is too much on one line each, which counts and names.

    >>> [str(one) for one in grouped([Problem(where=path, what="missing") for path in ("a", "b")])]
    ['2 files missing: a, b']
    """
    for what, found in groupby(problems, key=lambda problem: problem.what):
        if what in _GROUPED:
            yield _together(what, [problem.where for problem in found])
        else:
            yield from found


def _together(what: str, paths: list[str]) -> Problem:
    one, several, said = _GROUPED[what]
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    where = f"{len(paths)} {one if len(paths) == 1 else several} {said}"
    return Problem(where=where, what=", ".join(paths[:_MOST_NAMED]) + more)


def _special(path: str, mode: int) -> Problem:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    found = kinds.get(stat.S_IFMT(mode), "a device")
    return Problem(where=path, what="not a regular file", expected="files and directories only", found=found)


@contextmanager
def opened(root: int, path: str) -> Iterator[tuple[int, int]]:
    """Open a regular file below an open directory and yield descriptor and size; no part of the path may be a link.

    Looked at before opening: a pipe or a device is never opened.

    Raises:
        OSError: It cannot be opened, or a link is in the way.
    """
    *folders, name = path.split("/")
    folder = os.dup(root)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        _check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        status = os.fstat(descriptor)
        _check_regular(status.st_mode)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(0, "not a regular file")
