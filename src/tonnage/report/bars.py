"""Ranks as bars: what of a saved plan adds up to what a rank needs, in the order it is drawn.

A bar is the expected bytes by kind, then what the bounds add to them, then the cache: together exactly what the verdict
compares with the supply. Ranks that hold the same are one bar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.report.saved import held_together
from tonnage.saved_plan import SavedLine, SavedPlan, SavedRank
from tonnage.units import MIB, ranges, unit_for

PartKind = Literal[
    "experts", "weights", "engine", "draft", "runtime", "workspace", "reserve", "margin", "cache", "given"
]
LABELS: dict[PartKind, str] = {
    "experts": "Experts",
    "weights": "Other weights",
    "engine": "Engine and padding",
    "draft": "Draft",
    "runtime": "Runtime",
    "workspace": "Activations",
    "reserve": "Reserve",
    "margin": "Up to the bounds",
    "cache": "Cache",
    "given": "Cache beyond the profile",
}
"""In the order they are drawn."""
_BEGINS: tuple[tuple[str, PartKind], ...] = (
    ("weights.expert", "experts"),
    ("weights.shared_expert", "experts"),
    ("weights.", "weights"),
    ("padding.", "engine"),
    ("engine.", "engine"),
    ("draft.", "draft"),
    ("runtime.", "runtime"),
    ("workspace.", "workspace"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One segment of a bar.

    Attributes:
        kind: What it is of.
        label: The same for people.
        nbytes: Its length.
        lines: Lines of the ledger that are in it.
    """

    kind: PartKind
    label: str
    nbytes: int
    lines: tuple[SavedLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Ranks that hold the same.

    Attributes:
        ranks: Their numbers, ascending.
        parts: Segments from zero on, none of them empty.
        spare_bytes: What is left of the supply; negative is short; ``None`` without one.
        loading_bytes: The most held while loading.
    """

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    spare_bytes: int | None
    loading_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Its length."""
        return sum(part.nbytes for part in self.parts)

    @property
    def name(self) -> str:
        """``rank 0``, ``ranks 0-3``."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranges(self.ranks)}"


def bars(plan: SavedPlan) -> tuple[Bar, ...]:
    """Return the bars of a plan, in order of their first ranks."""
    alike: dict[tuple[tuple[SavedLine, ...], int, int], list[SavedRank]] = {}
    for rank in plan.ranks:
        alike.setdefault((rank.lines, rank.cache_bytes, rank.loading_bytes), []).append(rank)
    return tuple(
        Bar(
            ranks=tuple(rank.rank for rank in ranks),
            parts=_parts(ranks[0], plan.cache.given_bytes),
            spare_bytes=ranks[0].spare_bytes,
            loading_bytes=ranks[0].loading_bytes,
        )
        for ranks in alike.values()
    )


def kind_of(line: SavedLine) -> PartKind:
    """Return which segment a line is in; of lines that are held one after the other, that of activations."""
    if line.transient:
        return "workspace"
    return next((kind for begin, kind in _BEGINS if line.component.startswith(begin)), "reserve")


def _parts(rank: SavedRank, given: int | None) -> tuple[Part, ...]:
    lines: dict[PartKind, list[SavedLine]] = {}
    for line in rank.lines:
        lines.setdefault(kind_of(line), []).append(line)
    sizes: dict[PartKind, int] = {
        kind: held_together([(line.transient, line.nbytes) for line in held]) for kind, held in lines.items()
    }
    cache = rank.cache_bytes if given is None else min(rank.cache_bytes, given)
    sizes |= {"margin": rank.fixed_bytes - rank.expected_bytes, "cache": cache, "given": (given or cache) - cache}
    labels = LABELS if "experts" in lines else {**LABELS, "weights": "Weights"}
    return tuple(
        Part(kind=kind, label=labels[kind], nbytes=sizes[kind], lines=tuple(lines.get(kind, ())))
        for kind in LABELS
        if sizes.get(kind)
    )


def size_words(nbytes: int) -> str:
    """Return a size with its unit: ``52.888 GiB``; below a MiB its bytes."""
    if nbytes < MIB:
        return f"{nbytes:,} bytes"
    unit, text = unit_for(nbytes)
    return f"{text(nbytes)} {unit}"


def bar_words(bar: Bar, supply_bytes: int | None) -> str:
    """Say in one sentence what a bar shows."""
    parts = ", ".join(f"{part.label.lower()} {size_words(part.nbytes)}" for part in bar.parts)
    verb = "need" if len(bar.ranks) > 1 else "needs"
    needs = f"{bar.name} {verb} {size_words(bar.needed_bytes)}"
    if supply_bytes is None or bar.spare_bytes is None:
        return f"{needs}: {parts}."
    left = (
        f"{size_words(bar.spare_bytes)} spare" if bar.spare_bytes >= 0 else f"short by {size_words(-bar.spare_bytes)}"
    )
    return f"{needs} of {size_words(supply_bytes)}, {left}: {parts}."
