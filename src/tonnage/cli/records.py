"""Records are written whole or not at all, and never over something else."""

from __future__ import annotations

from pathlib import Path

from tonnage.errors import Problem
from tonnage.prepare.io import PrepareError, write_whole, writing


def write_record(path: Path, content: bytes, *, force: bool) -> None:
    """Write a small file under its final name when it is on the disk; what is there already may only be the same.

    Raises:
        PrepareError: Something else is there, or the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists() and not (path.is_file() and path.read_bytes() == content)
    if there and not force:
        raise PrepareError(Problem(where=str(path), what="something else is there already; --force writes over it"))
    write_whole(path, content)
