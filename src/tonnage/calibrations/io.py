"""Where calibration records lie: shipped with tonnage, of the user, of the project; read in that order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tonnage.calibrations.credit_records import CreditRecord, parse_record
from tonnage.checkpoint.io import read_bytes
from tonnage.errors import CreditError, Problem

RECORD_LIMIT_BYTES = 16 << 20
MOST_RECORDS = 10_000
_FOLDER = "calibrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A record and the file it was read from."""

    record: CreditRecord
    path: str


def shipped_records() -> Iterator[Found]:
    """Yield the records that come with tonnage."""
    folder = resources.files("tonnage.calibrations") / "credit"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            yield Found(record=parse_record(file.read_bytes(), where=file.name), path=f"shipped: {file.name}")


def user_directory() -> Path:
    """Return where a user's own records lie: ``$XDG_DATA_HOME/tonnage/calibrations``, else in the home directory.

    Raises:
        CreditError: There is neither.
    """
    base = os.environ.get("XDG_DATA_HOME")
    if not base:
        home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() has no answer where this one stays as it is
        if home == "~":
            raise CreditError(Problem(where="HOME", what="no home directory", expected="HOME or XDG_DATA_HOME"))
        base = f"{home}/.local/share"
    return Path(base) / "tonnage" / _FOLDER


def project_directory() -> Path:
    """Return where a project's records lie: ``.tonnage/calibrations`` in the working directory."""
    return Path(".tonnage") / _FOLDER


def records_at(path: Path) -> Iterator[Found]:
    """Yield the record of a file, or those of a directory in order of file names.

    Raises:
        CreditError: There is nothing, or a file is no record.
    """
    files = [path] if path.is_file() else _listed(path)
    if not 0 < len(files) <= MOST_RECORDS:
        expected, found = f"1 to {MOST_RECORDS} of them", str(len(files))
        raise CreditError(Problem(where=str(path), what="calibration records", expected=expected, found=found))
    for file in files:
        raw = read_bytes(file, limit_bytes=RECORD_LIMIT_BYTES, kind=CreditError)
        yield Found(record=parse_record(raw, where=str(file)), path=str(file))


def _listed(directory: Path) -> list[Path]:
    """Return the files of a directory that may be records; none where there is no such directory.

    Raises:
        CreditError: It cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return sorted(directory / entry.name for entry in entries if entry.name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CreditError(Problem(where=str(directory), what="cannot be read", found=error.strerror)) from error


def known_records(further: Iterable[Path] = ()) -> tuple[Found, ...]:
    """Return all records: shipped, of the user, of the project, of further places; of one name the last one counts.

    Raises:
        CreditError: A file is no record.
    """
    found = [*shipped_records()]
    for path in (user_directory(), project_directory(), *further):
        if _listed(path):
            found += records_at(path)
    return tuple({one.record.id: one for one in found}.values())


def find_record(name: str) -> CreditRecord:
    """Return the record of a name, or of a file.

    Raises:
        CreditError: There is no such record, or more than one.
    """
    found = find_records(name)
    if len(found) != 1:
        raise CreditError(Problem(where=name, what="not one record", found=f"{len(found)} records"))
    return found[0].record


def find_records(name: str) -> tuple[Found, ...]:
    """Return the record of a file, of a name, or those of a directory.

    Raises:
        CreditError: There is no such record, or a file is none.
    """
    path = Path(name)
    if name.endswith(".json"):
        return tuple(records_at(path))
    known = {found.record.id: found for found in known_records()}
    if name in known:
        return (known[name],)
    if not os.path.lexists(path):
        raise CreditError(Problem(where=name, what="no such calibration record", expected=", ".join(known)))
    return tuple(records_at(path))
