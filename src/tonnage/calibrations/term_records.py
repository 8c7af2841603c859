"""The term records shipped with the package, read once; the maintainers' command writes them anew."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from tonnage.memory.terms import TermFile

if TYPE_CHECKING:
    from tonnage.memory.terms import TermRecord


@cache
def shipped_file(engine: str) -> TermFile | None:
    """Return the shipped file of an engine, its records checked against their evidence; ``None`` if there is none."""
    for file in resources.files("tonnage.calibrations").joinpath("terms").iterdir():
        if file.name == f"{engine}.json":
            return read_terms(file.read_bytes())
    return None


def shipped_terms(engine: str) -> tuple[TermRecord, ...]:
    """Return the shipped records of an engine; for a topology without one (``split``) those of vLLM behind its own."""
    files = (shipped_file(name) for name in (engine, *(("vllm",) if engine == "split" else ())))
    return tuple(record for file in files if file is not None for record in file.records)


def read_terms(raw: bytes) -> TermFile:
    """Return a file of records.

    Raises:
        msgspec.ValidationError: It is no such file, or a bound is under its evidence.
    """
    return msgspec.json.decode(raw, type=TermFile)


def write_terms(file: TermFile) -> bytes:
    """Return the bytes of a file: one line per record and per figure."""
    lines = ['{"schema": "' + file.schema + '",']
    for name, items in (("evidence", file.evidence), ("records", file.records)):
        rows = (",\n".join(msgspec.json.encode(item).decode() for item in items),)
        lines += [f'"{name}": [', *rows, "]" if name == "records" else "],"]
    return ("\n".join(lines) + "}\n").encode()
