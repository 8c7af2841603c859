"""Ranks as bars in a terminal: one line of blocks per kind of rank, the supply a stroke that no bar may cross.

Drawn from a saved plan, like the pictures. Without Unicode the blocks are ASCII; without colour they differ by shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from tonnage.report.bars import Bar, PartKind, bars, size_words
from tonnage.saved_plan import SavedPlan
from tonnage.units import unit_for

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_Shade = Literal["weights", "beside", "margin", "cache", "spare"]
_SHADES: dict[PartKind, _Shade] = {
    "experts": "weights",
    "weights": "weights",
    "margin": "margin",
    "cache": "cache",
    "given": "cache",
}
_BLOCKS: dict[_Shade, str] = {"weights": "█", "beside": "▓", "margin": "▒", "cache": "░", "spare": "·"}
_LETTERS: dict[_Shade, str] = {"weights": "#", "beside": "+", "margin": "~", "cache": "o", "spare": "."}
_STYLES: dict[_Shade, str] = {
    "weights": "blue", "beside": "yellow", "margin": "magenta", "cache": "green", "spare": "bright_black",
}  # fmt: skip
_WORDS: dict[_Shade, str] = {
    "weights": "weights", "beside": "beside them", "margin": "up to the bounds", "cache": "cache", "spare": "spare",
}  # fmt: skip
_ONE_LINE = 72
"""Columns from which names, bars and figures are beside each other."""
_LEAST = 24
_MOST_BARS = 16
_IN_ASCII = str.maketrans({"·": "-", "…": "...", "×": "x", "–": "-", "—": "-"})  # noqa: RUF001 - what is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBars:
    """The bars of a plan, as wide as they are printed.

    Attributes:
        plan: What is drawn.
        plain: No Unicode, wherever it is printed.
    """

    plan: SavedPlan
    plain: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield a line per bar, then what the blocks mean."""
        plain = self.plain or options.ascii_only or console.is_dumb_terminal
        blocks, stroke = (_LETTERS, "|") if plain else (_BLOCKS, "│")
        width = max(options.max_width, _LEAST)
        every = bars(self.plan)
        shown = _fullest(every)
        names = [bar.name if len(bar.name) <= width // 4 else f"{bar.name[: width // 4 - 3]}..." for bar in shown]
        figures = [_figures(bar) for bar in shown]
        first, last = max(map(len, names)) + 2, max(map(len, figures)) + 2
        beside = width >= _ONE_LINE
        longest = max(*(bar.needed_bytes for bar in every), self.plan.supply_bytes or 0, 1)
        cells = _Cells(
            count=width - (first + last if beside else 0) - 1, longest=longest, supply=self.plan.supply_bytes
        )
        for name, bar, said in zip(names, shown, figures, strict=True):
            drawn = _drawn(bar, cells, blocks, stroke)
            style = "bold red" if (bar.spare_bytes or 0) < 0 else ""
            if beside:
                yield Text.assemble((name.ljust(first), "bold"), drawn, "  ", (said, style))
            else:
                yield from (Text.assemble((name, "bold"), "  ", (said, style)), drawn)
        if len(shown) < len(every):
            yield Text(f"and {len(every) - len(shown)} more kinds of ranks that need less")
        yield from _legend(shown, blocks, stroke, self.plan.supply_bytes, (first if beside else 0, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """How many cells there are for how many bytes, and where the supply is."""

    count: int
    longest: int
    supply: int | None

    def at(self, nbytes: int, *, up: bool = False) -> int:
        """Return the cell that so many bytes reach, cut down or up."""
        return -(-nbytes * self.count // self.longest) if up else nbytes * self.count // self.longest


def plain_text(text: str) -> str:
    r"""Return text as ASCII; what it has no letter for is escaped.

    >>> plain_text("a · é")
    'a - \\xe9'
    """
    return text.translate(_IN_ASCII).encode("ascii", "backslashreplace").decode()


def _fullest(every: Sequence[Bar]) -> Sequence[Bar]:
    """Return the bars to show, in order: all, or those that need most."""
    if len(every) <= _MOST_BARS:
        return every
    kept = sorted(every, key=lambda bar: -bar.needed_bytes)[:_MOST_BARS]
    return sorted(kept, key=lambda bar: bar.ranks)


def _figures(bar: Bar) -> str:
    unit, text = unit_for(bar.needed_bytes)
    if bar.spare_bytes is None:
        return f"{text(bar.needed_bytes)} {unit}"
    word = "spare" if bar.spare_bytes >= 0 else "short"
    return f"{text(bar.needed_bytes)} {unit}, {word} {size_words(abs(bar.spare_bytes))}"


def _drawn(bar: Bar, cells: _Cells, blocks: dict[_Shade, str], stroke: str) -> Text:
    """Return one bar. It is past the stroke of the supply by at least a cell exactly if it needs more."""
    supply = cells.supply
    over = supply is not None and bar.needed_bytes > supply
    end = cells.at(bar.needed_bytes, up=over)
    reached = [0]
    for part in bar.parts:
        reached.append(reached[-1] + part.nbytes)
    edges = [cells.at(nbytes) for nbytes in reached[:-1]] + [end]
    row: list[tuple[str, str]] = []
    for part, (begin, stop) in zip(bar.parts, pairwise(edges), strict=True):
        shade = _SHADES.get(part.kind, "beside")
        row += [(blocks[shade], _STYLES[shade])] * (stop - begin)
    if supply is not None:
        line = cells.at(supply)
        row += [(blocks["spare"], _STYLES["spare"])] * (line - len(row))
        row = [*row[:line], (stroke, "bold"), *((block, "red") for block, _ in row[line:])]
    row += [(" ", "")] * (cells.count + (supply is not None) - len(row))
    return Text.assemble(
        *(("".join(cell for cell, _ in run), style) for style, run in groupby(row, lambda cell: cell[1]))
    )


def _legend(
    shown: Sequence[Bar], blocks: dict[_Shade, str], stroke: str, supply: int | None, place: tuple[int, int]
) -> Iterator[Text]:
    """Yield what the blocks mean, broken between words of one block and the next only."""
    kinds = {_SHADES.get(part.kind, "beside") for bar in shown for part in bar.parts}
    if any((bar.spare_bytes or 0) > 0 for bar in shown):
        kinds.add("spare")
    words = [(f"{blocks[shade]} {_WORDS[shade]}", _STYLES[shade]) for shade in blocks if shade in kinds]
    if supply is not None:
        words.append((f"{stroke} supply {size_words(supply)}", "bold"))
    indent, width = place
    line = Text(" " * indent)
    for text, style in words:
        if len(line) > indent and len(line) + len(text) > width:
            yield line
            line = Text(" " * indent)
        line.append(text[0], style).append(f"{text[1:]}  ")
    yield line
