"""Where a finished package is moved to: by one rename, over nothing, and into no other package."""

from __future__ import annotations

import os
from pathlib import Path

from tonnage.errors import Problem, one_line
from tonnage.export.manifest import PackageError
from tonnage.prepare.documents import STATE, SUMMARY
from tonnage.prepare.io import sync_directory, writing
from tonnage.prepare.output_dir import is_package


def resolved(path: Path) -> Path:
    """Return the absolute path of what is there, without links on the way: it holds wherever we are.

    Raises:
        OSError: Nothing is there, or links lead back to themselves.
    """
    return Path(os.path.realpath(path, strict=True))


def goal_of(directory: Path, into: Path, name: str) -> Path:
    """Return where a package is moved to, on the same file system; nothing may be there but itself.

    Args:
        directory: Where it is, resolved.
        into: The directory it goes into.
        name: Its name there.

    Raises:
        PackageError: As said, or the directory is in a package or preparation, which would be none any more.
    """
    if not into.is_dir():
        raise PackageError(Problem(where=str(into), what="no such directory", expected="where packages are kept"))
    parent = resolved(into)
    goal = parent / name
    if parent.is_relative_to(directory):
        raise PackageError(Problem(where=str(into), what="inside the package", expected="another directory"))
    for folder in (parent, *parent.parents):
        if is_package(folder) or any(os.path.lexists(folder / one) for one in (SUMMARY, STATE)):
            what, found = "inside a package or a preparation", one_line(str(folder))
            raise PackageError(Problem(where=str(into), what=what, expected="another directory", found=found))
    if os.path.lexists(goal) and goal != directory:
        raise PackageError(Problem(where=str(goal), what="exists already", expected="no such file"))
    if parent.stat().st_dev != directory.stat().st_dev:
        raise PackageError(Problem(where=str(into), what="on another file system", expected=f"that of {directory}"))
    return goal


def move(directory: Path, goal: Path) -> bool:
    """Give a package its place, and return whether it had another; both paths are resolved."""
    if goal == directory:
        return False
    with writing(goal):
        directory.rename(goal)
    for parent in {directory.parent, goal.parent}:
        sync_directory(parent)
    return True
