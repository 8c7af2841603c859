"""What a target is: one parser, what changes its inputs, and inputs to begin with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from fuzz.mutate import PART, Mutator
from tonnage.errors import TonnageError

T = TypeVar("T")

TESTS = Path(__file__).resolve().parent.parent
DATA = TESTS / "data"
SEEDS = Path(__file__).resolve().parent / "seeds"
CRASHES = TESTS / "hostile" / "fuzz"
"""Inputs that once broke something, one directory per target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser under attack.

    Attributes:
        run: Feeds it one input; may raise ``TonnageError``, and nothing else.
        mutate: Changes an input so that it still reaches the parser.
        seeds: Inputs to begin with.
        longest: Bytes of an input.
        extra: A module the target needs beyond a plain installation, or nothing.
    """

    run: Callable[[bytes], None]
    mutate: Mutator
    seeds: Callable[[], list[bytes]]
    longest: int = 1 << 15
    extra: str = ""

    @property
    def name(self) -> str:
        """Of the target, its seeds and its crashes."""
        return self.run.__name__

    def corpus(self) -> list[bytes]:
        """Return the seeds, then every input that once broke something."""
        return [*self.seeds(), *files(CRASHES / self.name)]


def files(place: Path, pattern: str = "*") -> list[bytes]:
    """Return the contents of the files of a directory, in order of names."""
    return [path.read_bytes() for path in sorted(place.glob(pattern)) if path.is_file()]


def parts(*contents: bytes) -> bytes:
    """Return an input of several files."""
    return PART.join(contents)


def each(read: Callable[[T], object], inputs: Iterable[T]) -> None:
    """Read one thing in several ways; a refusal of one is raised when all were tried.

    Raises:
        TonnageError: The last refusal.
    """
    refused: TonnageError | None = None
    for one in inputs:
        try:
            read(one)
        except TonnageError as error:
            refused = error
            str(error)
    if refused is not None:
        raise refused


def directory(contents: Mapping[str, bytes]) -> Path:
    """Return a directory of these files, at any depth, and no others; an empty one is left out."""
    place = _place() / "directory"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, raw in contents.items():
        if raw:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(raw)
    return place


def written(name: str, raw: bytes) -> Path:
    """Return a file with this content, for parsers that open it themselves."""
    path = _place() / name
    path.write_bytes(raw)
    return path


@cache
def _place() -> Path:
    return Path(mkdtemp(prefix="tonnage-fuzz-"))
