"""From lines to an observation: the last start in a log, its ranks, and the figure of each that counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tonnage.observe.exllamav3 import EXLLAMAV3
from tonnage.observe.figures import FIGURES, SETTINGS, Reading, worst_of
from tonnage.observe.ledger import Entry, entries
from tonnage.observe.lines import EngineLog, readings
from tonnage.observe.ranks import Rank, rank_of
from tonnage.observe.sglang import SGLANG
from tonnage.observe.vllm import VLLM

ENGINES = (VLLM, SGLANG, EXLLAMAV3)

MARKERS = tuple(dict.fromkeys(marker.encode() for engine in ENGINES for marker in (*engine.markers, *engine.starts)))
"""Every line that matters holds one of these."""

MOST_RANKS = 1024
MOST_READINGS = 64
"""Of one figure of one rank; beyond it only the worst one is kept."""

_OTHERS = Rank(process="others")
_SET = frozenset(SETTINGS)
_NONE: frozenset[str] = frozenset()

Figures = dict[str, Reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """What one rank said.

    Attributes:
        rank: Who.
        figures: The reading that counts of each figure, in report order.
        ledger: What holds the memory of this rank, as far as its figures say.
    """

    rank: Rank
    figures: Figures
    ledger: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a log says of its last start.

    Attributes:
        engine: Whose log it is.
        starts: How many starts the log holds.
        settings: Version, model and what the engine was told.
        figures: The worst of all ranks, figure by figure.
        ranks: Every rank that said something, sorted.
        refusals: Why the engine did not start, each once.
        notes: What was odd and did not stop it.
    """

    engine: str
    starts: int
    settings: Figures
    figures: Figures
    ranks: tuple[RankObservation, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Start:
    """The start being read; what ranks said is kept by rank, and its names by their place on DP as well."""

    engine: EngineLog
    seen: dict[Rank, dict[str, list[Reading]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    names_at: dict[int | None, set[str]] = field(default_factory=dict)

    def measured(self, rank: Rank, *names: str) -> bool:
        """Whether the rank, or one it encloses, said one of these figures; any at all if none is given."""
        said = self._said(rank)
        return not said.isdisjoint(names) if names else not said <= _SET

    def _said(self, rank: Rank) -> AbstractSet[str]:
        """Return what a rank said and all that it encloses, as :meth:`Rank.encloses` has it."""
        if not rank.is_engine:
            return self.seen.get(rank, {}).keys()
        place = rank.place("DP")
        return self.names if place is None else self.names_at.get(place, _NONE) | self.names_at.get(None, _NONE)

    def keep(self, rank: Rank, reading: Reading) -> None:
        """Keep a reading, in bounded memory."""
        if rank not in self.seen and len(self.seen) >= MOST_RANKS:
            rank = _OTHERS
        several = self.seen.setdefault(rank, {}).setdefault(reading.name, [])
        if not several:
            self.names.add(reading.name)
            self.names_at.setdefault(rank.place("DP"), set()).add(reading.name)
        if len(several) < MOST_READINGS:
            several.append(reading)
        else:
            several[-1] = worst_of((several[-1], reading))


class LogReader:
    """Reads the lines of one log, one after the other, in bounded memory."""

    def __init__(self) -> None:
        self._start: _Start | None = None
        self._starts = 0
        self._order = 0

    def feed(self, line: str) -> None:
        """Take one line. Lines without a marker say nothing and need not be fed."""
        for engine in ENGINES:
            opens = any(text in line for text in engine.starts)
            found = readings(line, engine.patterns)
            if opens or found:
                self._take(engine, line, found, opens=opens)

    def finish(self) -> Observation | None:
        """Return what the last start said; nothing if no line of an engine was seen."""
        return None if self._start is None else _observation(self._start, self._starts)

    def _take(self, engine: EngineLog, line: str, found: tuple[Reading, ...], *, opens: bool) -> None:
        rank = rank_of(line)
        start = self._start
        text, after = engine.again
        if (
            start is None
            or start.engine is not engine
            or (opens and start.measured(rank))
            or (text in line and start.measured(rank, *after))
        ):
            start = self._start = _Start(engine=engine)
            self._starts += 1
        for reading in found:
            self._order += 1
            of = rank if reading.device is None else Rank(coordinates=(("GPU", reading.device),))
            start.keep(of, replace(reading, order=self._order))


def _observation(start: _Start, starts: int) -> Observation:
    settings: dict[str, list[Reading]] = defaultdict(list)
    measured: dict[Rank, Figures] = {}
    for rank, seen in start.seen.items():
        settled = start.engine.settle({name: tuple(several) for name, several in seen.items()})
        for name, several in settled.items():
            if name in SETTINGS:
                settings[name] += several
        measured[rank] = {
            name: worst_of(settled[name]) for name in FIGURES if name in settled and name not in (*SETTINGS, "refusal")
        }
    ranks = tuple(
        RankObservation(rank=rank, figures=figures, ledger=entries(start.engine.name, figures))
        for rank, figures in sorted(_shared(measured).items())
    )
    refusals, notes = _refused(start)
    if not refusals and not any(measured.values()):
        notes = (*notes, "the last start in this log says no figure yet")
    return Observation(
        engine=start.engine.name,
        starts=starts,
        settings={name: worst_of(settings[name]) for name in SETTINGS if settings[name]},
        figures=_worst(measured),
        ranks=ranks,
        refusals=refusals,
        notes=notes,
    )


def _shared(measured: dict[Rank, Figures]) -> dict[Rank, Figures]:
    """Give every worker what its engine said for all; an engine counts as a rank only where no worker spoke."""
    engines = {rank: figures for rank, figures in measured.items() if rank.is_engine and figures}
    workers = {rank: figures for rank, figures in measured.items() if not rank.is_engine and _holds_bytes(figures)}
    if not workers:
        return engines
    result: dict[Rank, Figures] = {}
    for rank, figures in workers.items():
        whole = [said for engine, said in sorted(engines.items()) if engine.encloses(rank)]
        merged = {name: reading for said in whole for name, reading in said.items()} | figures
        result[rank] = {name: merged[name] for name in FIGURES if name in merged}
    return result


def _holds_bytes(figures: Figures) -> bool:
    return any(FIGURES[name].kind == "bytes" for name in figures)


def _worst(measured: dict[Rank, Figures]) -> Figures:
    """Return of each figure the worst that any rank said."""
    every = {name: [figures[name] for figures in measured.values() if name in figures] for name in FIGURES}
    return {name: worst_of(several) for name, several in every.items() if several}


def _refused(start: _Start) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tell refusals from warnings: an engine that got its cache afterwards was not refused."""
    last = max(
        (
            reading.order
            for seen in start.seen.values()
            for name in start.engine.ready
            for reading in seen.get(name, ())
        ),
        default=0,
    )
    said = sorted((r.order, r.text) for seen in start.seen.values() for r in seen.get("refusal", ()))
    refusals = tuple(dict.fromkeys(text for order, text in said if order > last))
    notes = tuple(dict.fromkeys(f"warned and started: {text}" for order, text in said if order <= last))
    return refusals, notes
