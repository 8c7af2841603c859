"""Records are written whole or not at all, and never over something else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from tonnage.errors import Problem
from tonnage.prepare.io import PrepareError, write_whole, writing


def write_records(paths: Iterable[Path], content: bytes, *, force: bool) -> None:
    """Write a small file to some places, under its final name when it is on the disk; all are looked at first.

    Raises:
        PrepareError: Something else is at one of them, or it cannot be written. What is no file is never written over.
    """
    targets = tuple(paths)
    for path in targets:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            there = os.path.lexists(path) and not _holds(path, content)
            if there and not (path.is_symlink() or path.is_file()):
                raise PrepareError(Problem(where=str(path), what="not a file, and not written over"))
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if there and not force:
            raise PrepareError(Problem(where=str(path), what="something else is there already; --force writes over it"))
    for path in targets:
        write_whole(path, content)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
