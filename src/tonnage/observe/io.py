"""Reading a log in blocks, and a plan document: the only module of this package that opens files."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tonnage.checkpoint.io import read_given
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import ObservationError, Problem, UnknownGpuError, raise_if_any
from tonnage.memory.supply import find_gpu, supply_bytes
from tonnage.observe.compare import Comparison, compare
from tonnage.observe.likeness import mismatches, names_differ, other_service
from tonnage.observe.reader import MARKERS, LogReader, Observation
from tonnage.observe.scan import LONGEST_LINE, lines_with
from tonnage.saved_plan import PLAN_LIMIT_BYTES, SavedPlan, check_ranks, read_plan_document

_BLOCK_BYTES = 1 << 20
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """Which bytes were read.

    Attributes:
        nbytes: How many.
        sha256: Their digest.
    """

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A log that was read, and a plan it was held against.

    Attributes:
        observation: What the log says.
        log: Which bytes it was.
        plan: The plan, if one was given.
        comparisons: Every measured figure the plan has lines for.
    """

    observation: Observation
    log: LogFile
    plan: SavedPlan | None = None
    comparisons: tuple[Comparison, ...] = ()

    @property
    def exceeds(self) -> bool:
        """Whether a measured figure is over the plan's bound for it."""
        return any(one.exceeds for one in self.comparisons)


def observe_log(path: str, plan_path: Path | None = None, *, gpu: str | None = None) -> Observed:
    """Return what a log says, beside a plan document if one is given.

    Args:
        path: The log.
        plan_path: The plan.
        gpu: Name of the GPU the log is of, where somebody says it.

    Raises:
        ObservationError: One of them cannot be used, or the log is of something else than the plan.
    """
    return _of_the_same(hold_against(path, None if plan_path is None else read_plan(plan_path)), path, gpu)


def hold_against(path: str, plan: SavedPlan | None) -> Observed:
    """Return what a log says, beside a plan if there is one.

    Raises:
        ObservationError: The log cannot be used, or the plan is for another engine or number of ranks.
    """
    observation, log = read_log(path)
    return _beside(observation, log, plan, path)


def observe_text(text: str, document: dict[str, object] | None = None, *, gpu: str | None = None) -> Observed:
    """Return what the text of a log says, beside a plan document if one is given.

    Args:
        text: The log.
        document: The plan.
        gpu: Name of the GPU the log is of, where somebody says it.

    Raises:
        ObservationError: As :func:`observe_log`.
    """
    plan = None if document is None else plan_of(document, where="plan")
    observation, log = _log_of(iter((text.encode("utf-8", "replace"),)), "log")
    return _of_the_same(_beside(observation, log, plan, "log"), "log", gpu)


def _beside(observation: Observation, log: LogFile, plan: SavedPlan | None, where: str) -> Observed:
    if plan is None:
        return Observed(observation=observation, log=log)
    raise_if_any(ObservationError, mismatches(observation, plan, where=where))
    return Observed(observation=observation, log=log, plan=plan, comparisons=compare(observation, plan))


def _of_the_same(observed: Observed, where: str, gpu: str | None) -> Observed:
    """Return a log beside a plan that somebody chose for it; noted if only their names differ.

    Raises:
        ObservationError: The log is of another concurrency, GPU or model.
    """
    observation, plan = observed.observation, observed.plan
    if plan is None:
        return observed
    gpu_bytes = None
    if plan.supply is not None and plan.supply.gpu is not None:
        with suppress(UnknownGpuError):  # a plan of a later version
            gpu_bytes = supply_bytes(find_gpu(plan.supply.gpu)).nbytes
    problems = other_service(observation, plan, observed.comparisons, where=where, gpu=gpu, gpu_bytes=gpu_bytes)
    raise_if_any(ObservationError, problems)
    if not names_differ(observation, plan):
        return observed
    note = f"the log calls the model {observation.settings['model'].text}, the plan {plan.checkpoint.name}"
    return replace(observed, observation=replace(observation, notes=(*observation.notes, note)))


def read_log(path: str) -> tuple[Observation, LogFile]:
    """Return what a log says, in memory that does not grow with it. ``-`` is standard input.

    Raises:
        ObservationError: The file cannot be read, or holds no line of a known engine.
    """
    with _opened(path) as descriptor:
        return _log_of(iter(lambda: _read(descriptor, path), b""), path)


def _read(descriptor: int, path: str) -> bytes:
    try:
        return os.read(descriptor, _BLOCK_BYTES)
    except OSError as error:
        raise ObservationError(Problem(where=path, what="cannot be read", found=error.strerror)) from error


def _log_of(blocks: Iterator[bytes], where: str) -> tuple[Observation, LogFile]:
    digest, nbytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes]:
        nonlocal nbytes
        for raw in blocks:
            digest.update(raw)
            nbytes += len(raw)
            yield raw

    observation = observe_blocks(counted())
    if observation is None:
        expected = "a start-up log of vLLM, SGLang or exllamav3"
        raise ObservationError(Problem(where=where, what="no line of a known engine", expected=expected))
    return observation, LogFile(nbytes=nbytes, sha256=digest.hexdigest())


def observe_blocks(blocks: Iterator[bytes]) -> Observation | None:
    """Return what a log says that comes in blocks of any size; nothing if no line of a known engine is in it."""
    reader = LogReader()
    for block in whole_lines(as_utf8(blocks)):
        for line in lines_with(block, MARKERS):
            reader.feed(line)
    return reader.finish()


def as_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks as UTF-8: a log that begins with a mark of UTF-16, as a Windows shell writes it, is converted."""
    first = b""
    while len(first) < len(codecs.BOM_UTF16_LE) and (more := next(blocks, b"")):
        first += more
    encoding = _UTF16.get(first[:2])
    if encoding is None:
        yield first
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first[2:]).encode("utf-8", "replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks cut at line ends; of a line longer than is read, only its beginning."""
    kept, skipping = b"", False
    for block in blocks:
        data = kept + block
        if skipping:
            end = _first_end(data)
            if end < 0:
                kept = b""
                continue
            data, skipping = data[end:], False
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        yield data[:end]
        kept = data[end:]
        if len(kept) > LONGEST_LINE:
            yield kept[:LONGEST_LINE]
            kept, skipping = b"", True
    yield kept


def _first_end(data: bytes) -> int:
    ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
    return min(ends, default=-1)


def read_plan(path: Path) -> SavedPlan:
    """Return a plan document.

    Raises:
        ObservationError: It cannot be read, or is no plan.
    """
    raw = read_given(path, limit_bytes=PLAN_LIMIT_BYTES, kind=ObservationError)
    return plan_of(parse_object(raw, where=str(path), kind=ObservationError), where=str(path))


def plan_of(document: Mapping[str, Any], *, where: str) -> SavedPlan:
    """Return a plan document that was parsed.

    Raises:
        ObservationError: It is no plan, a bound is below its value, or ranks are not those of its topology.
    """
    plan = read_plan_document(document, where=where, kind=ObservationError)
    check_ranks(plan, where=where, kind=ObservationError)
    return plan


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a log, or yield standard input; a pipe in the file system is not opened, as it may never speak."""
    if path == "-":
        yield sys.stdin.fileno()
        return
    try:
        regular = stat.S_ISREG(Path(path).stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY) if regular else -1
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise ObservationError(Problem(where=path, what="cannot be read", found=found)) from error
    if descriptor < 0:
        raise ObservationError(
            Problem(where=path, what="not a regular file", expected="a regular file, or - to read a pipe")
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)
