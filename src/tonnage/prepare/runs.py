"""In which order the bytes of a source file are read, and what that is over a network.

The steps of a job are in the order of its outputs: what is copied first, then what is converted, wide elements before
narrow ones. In the file they stand in another order, so that a job is a few ascending runs. Where the file is hashed as
well, one reading of all of it carries the digest and the longest run of every job; the other runs are read beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tonnage.prepare.jobs import Job, Step
from tonnage.prepare.windows import Span, pieces, step_spans

PIECE_BYTES = 8 << 20
"""Most of one request: long beside the time a server takes to answer."""
GAP_BYTES = 256 << 10
"""What nobody takes is read with its neighbours up to this: another request would take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps of a job that ascend in the source file.

    Attributes:
        job: Position of the job among those done together.
        steps: In order.
        carried: Served by the one reading of the whole file that is hashed.
    """

    job: int
    steps: tuple[Step, ...]
    carried: bool

    def spans(self, window_bytes: int) -> Iterator[Span]:
        """Yield the bytes of the file it reads, ascending."""
        for step in self.steps:
            yield from step_spans(step, window_bytes)


def runs_of(jobs: Sequence[Job], *, digest: bool) -> tuple[Run, ...]:
    """Return the runs of jobs of one file, in the order they are done.

    Args:
        jobs: Done one after the other.
        digest: Whether the whole file is read and hashed on the way.
    """
    runs: list[Run] = []
    reached = 0
    for position, job in enumerate(jobs):
        parts = _ascending(job.steps)
        longest = max(range(len(parts)), key=lambda part: _nbytes(parts[part]), default=0)
        for number, steps in enumerate(parts):
            carried = digest and number == longest and steps[0].source.begin >= reached
            if carried:
                reached = _end(steps[-1])
            runs.append(Run(job=position, steps=steps, carried=carried))
    return tuple(runs)


def requests(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield what is asked of a server for ascending spans: neighbours together, in pieces.

    >>> list(requests([(0, 10), (10, 20), (2000000, 2000008)]))
    [(0, 20), (2000000, 2000008)]
    """
    begin = end = 0
    for first, last in spans:
        if first >= last:
            continue
        if first > end + GAP_BYTES or begin == end:
            yield from pieces([(begin, end)], PIECE_BYTES)
            begin = first
        end = last
    yield from pieces([(begin, end)], PIECE_BYTES)


def requested_bytes(spans: Iterable[Span]) -> int:
    """Return the bytes that are asked of a server for ascending spans."""
    return sum(end - begin for begin, end in requests(spans))


def _ascending(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    parts: list[list[Step]] = []
    end = 0
    for step in steps:
        if not parts or step.source.begin < end:
            parts.append([])
        parts[-1].append(step)
        end = _end(step)
    return [tuple(part) for part in parts]


def _end(step: Step) -> int:
    return step.source.begin + step.source.nbytes


def _nbytes(steps: Iterable[Step]) -> int:
    return sum(step.source.nbytes for step in steps)
