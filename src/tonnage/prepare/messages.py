"""What a run and its workers say to each other over a socket of their own: plain values, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import Problem
from tonnage.prepare.io import Hash
from tonnage.prepare.jobs import ScaleRule, SourceFile, WholeFile, Work, jobs_of
from tonnage.sources.model import FileFacts

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
        address: Of the checkpoint, for :func:`tonnage.sources.addresses.open_source`.
        output: The output directory.
        scale_rule: For converted tensors.
        keep_nonfinite: Convert NaN and infinity instead of refusing them.
        hash: Which digests.
        window_bytes: Most that is read at once.
        epoch: What the output directory says while the run is on, where tasks may outlive it; see
            :func:`tonnage.prepare.output_dir.check_epoch`.
    """

    address: str
    output: Path
    scale_rule: ScaleRule = "rceil"
    keep_nonfinite: bool = False
    hash: Hash = "blake3"
    window_bytes: int = WINDOW_BYTES
    epoch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One job or several, a file that comes along whole, or a source file whose digest is taken.

    Attributes:
        number: As :attr:`tonnage.prepare.survey.TaskSize.number`.
        work: What is done.
        source: The source file as planned; ``None`` if the content is at hand.
        headers: First bytes of every output of the jobs, in their order.
        attempt: Tells this attempt at it from others, where one may outlive its run.
        state: Of the source file, see :func:`tonnage.prepare.io.source_states`; empty where another machine reads it.
    """

    number: int
    work: Work
    source: FileFacts | None
    headers: tuple[bytes, ...] = ()
    attempt: str | None = None
    state: str = ""

    @property
    def tag(self) -> str:
        """What the temporary names of its files say."""
        return f"job-{self.number}" + (f"-{self.attempt}" if self.attempt else "")

    @property
    def paths(self) -> tuple[str, ...]:
        """Its files, relative to the output directory."""
        if isinstance(self.work, WholeFile):
            return (self.work.path,)
        return tuple(output.path for job in jobs_of(self.work) for output in job.outputs)

    @property
    def title(self) -> str:
        """Number and file, as messages name it."""
        if isinstance(self.work, WholeFile):
            return f"job {self.number} ({self.work.path})"
        name = self.work.name if isinstance(self.work, SourceFile) else jobs_of(self.work)[0].source_file
        return f"job {self.number} ({name})"


@dataclass(frozen=True, slots=True)
class Progress:
    """So many more payload bytes are written, or read for the digest of a source file; less, if an attempt is lost."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The task cannot be done."""

    problems: tuple[Problem, ...]
