"""What a run and its workers say to each other over a socket of their own: plain values, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import Problem
from tonnage.prepare.io import FileFacts, Hash
from tonnage.prepare.jobs import Job, ScaleRule, WholeFile, Work

WINDOW_BYTES = 2 << 20
"""Read, hashed and written while it is still in the cache of a core; larger windows were slower."""

GONE_STATUS = 1
"""Of a worker without a run, or one the system gives nothing."""

BUG_STATUS = 70
"""Of a worker that ended with a traceback nobody foresaw; EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What holds for all tasks; the first message to a worker.

    Attributes:
        source: The checkpoint directory.
        output: The output directory.
        scale_rule: For converted tensors.
        keep_nonfinite: Convert NaN and infinity instead of refusing them.
        hash: Which digests.
        window_bytes: Most that is read at once.
    """

    source: Path
    output: Path
    scale_rule: ScaleRule = "rceil"
    keep_nonfinite: bool = False
    hash: Hash = "blake3"
    window_bytes: int = WINDOW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job, a file that comes along whole, or a source file whose digest is taken.

    Attributes:
        number: As :attr:`tonnage.prepare.survey.TaskSize.number`.
        work: What is done.
        source: The source file as planned; ``None`` if the content is at hand.
        headers: First bytes of every output of a job.
    """

    number: int
    work: Work
    source: FileFacts | None
    headers: tuple[bytes, ...] = ()

    @property
    def title(self) -> str:
        """Number and file, as messages name it."""
        if isinstance(self.work, Job):
            return f"job {self.number} ({self.work.source_file})"
        return f"job {self.number} ({self.work.path if isinstance(self.work, WholeFile) else self.work.name})"


@dataclass(frozen=True, slots=True)
class Progress:
    """So many more payload bytes are written, or read for the digest of a source file."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The task cannot be done."""

    problems: tuple[Problem, ...]
