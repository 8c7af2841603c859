"""The picture of a plan: every rank a bar, every kind of memory a colour and a pattern, the supply a line.

SVG text from a plan document. Lengths are bytes: a segment of n bytes is n / scale of the width, cut down to hundredths
of a pixel, so that neighbours meet. All colours are in :data:`PICTURE_STYLE`, which a page includes once, and a picture
on its own carries itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tonnage.report.bars import LABELS, Bar, Part, bar_words, bars, size_words
from tonnage.report.saved import read_saved
from tonnage.report.svg import HUNDREDTHS, LETTER, MARKS, ON_LIGHT, anchor, patterns, px, safe
from tonnage.report.svg import PICTURE_STYLE as PICTURE_STYLE  # noqa: PLC0414 - pages take it from here
from tonnage.saved_plan import SavedPlan
from tonnage.units import GIB, MIB

WIDTH = 860
LEAST_WIDTH = 240
_BAR, _GAP, _TOP, _AXIS, _ROW, _SWATCH = 26, 16, 22, 34, 22, 14
_ONE_LINE = 480
_TICK_WIDTH = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where things are: whole pixels down, hundredths of a pixel across.

    Attributes:
        width: Of the picture, in pixels.
        longest: Bytes that are as long as the picture is wide.
        supply: Bytes of the line; ``None`` for none.
        prefix: Begins the ids in the picture.
    """

    width: int
    longest: int
    supply: int | None
    prefix: str

    @property
    def head(self) -> int:
        """Height of the words over a bar: one line, or two where it is narrow."""
        return 20 if self.width >= _ONE_LINE else 38

    @property
    def step(self) -> int:
        """From one bar to the next."""
        return self.head + _BAR + _GAP

    def across(self, nbytes: int) -> int:
        """Return how far from the left so many bytes reach, a pixel being left free at both edges."""
        return HUNDREDTHS + nbytes * (self.width - 2) * HUNDREDTHS // max(self.longest, 1)


def rank_picture(
    document: Mapping[str, Any], *, width: int = WIDTH, prefix: str = "ranks", standalone: bool = False
) -> str:
    """Return the ranks of a plan document as SVG text.

    Args:
        document: ``tonnage.plan/1``, as ``plan --json`` prints it.
        width: In pixels, at least 240; the text keeps its size, so that a narrow picture is for a narrow screen.
        prefix: Begins the ids in it; letters, digits and ``-``. Two pictures of one page need two.
        standalone: Carries its colours itself, for a file of its own; in a page that is done by :data:`PICTURE_STYLE`.

    Raises:
        ObservationError: The document is no plan, or contradicts itself.
    """
    return draw_ranks(read_saved(document), width=width, prefix=prefix, standalone=standalone)


def reach_of(plan: SavedPlan) -> int:
    """Return the bytes that a picture of a plan reaches to; two beside each other reach to the larger."""
    supply, found = plan.supply_bytes, bars(plan)
    loading = [bar.loading_bytes for bar in found if supply is not None and bar.loading_bytes > supply]
    return max([bar.needed_bytes for bar in found] + loading + [supply or 0])


def draw_ranks(
    plan: SavedPlan, *, width: int = WIDTH, prefix: str = "ranks", standalone: bool = False, reach: int | None = None
) -> str:
    """Return the same of a plan that was read, reaching to :func:`reach_of` it or further."""
    if width < LEAST_WIDTH:
        raise ValueError(f"a picture is at least {LEAST_WIDTH} pixels wide, not {width}")
    found = bars(plan)
    supply = plan.supply_bytes
    frame = _Frame(width=width, longest=max(reach_of(plan), reach or 0), supply=supply, prefix=prefix)
    body = [line for number, bar in enumerate(found) for line in _bar(frame, bar, _TOP + number * frame.step)]
    bottom = _TOP + len(found) * frame.step
    legend, height = _legend(frame, found, bottom + _AXIS)
    words = " ".join(bar_words(bar, supply) for bar in found)
    head = (
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="tn-ranks" role="img" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" aria-labelledby="{prefix}-title {prefix}-desc">'
        ),
        f'<title id="{prefix}-title">{safe(_title(plan))}</title><desc id="{prefix}-desc">{safe(words)}</desc>',
        f"<style>.tn-ranks{{color-scheme:light dark}}{PICTURE_STYLE}</style>" if standalone else "",
        f"<defs>{''.join(patterns(prefix))}</defs>",
    )
    return "\n".join([*filter(None, head), *_axis(frame, bottom), *body, *legend, "</svg>"])


def _title(plan: SavedPlan) -> str:
    verdict = {True: "fits", False: "refused", None: "no verdict"}[plan.fits]
    return f"{plan.checkpoint.name}: memory of every rank, {verdict}"


def _bar(frame: _Frame, bar: Bar, top: int) -> Iterator[str]:
    """Draw one bar: its words, segments from zero on, what is free, and the supply."""
    yield from _headline(frame, bar, top)
    y = top + frame.head
    if frame.supply is not None and bar.spare_bytes is not None and bar.spare_bytes > 0:
        title = f"spare: {size_words(bar.spare_bytes)} ({bar.spare_bytes:,} bytes)"
        yield _rect(frame, bar.needed_bytes, frame.supply, y, "tn-free", title)
    start = 0
    for part in bar.parts:
        yield from _segment(frame, part, start, y)
        start += part.nbytes
    for edge in _edges(frame, bar.parts):
        yield f'<line class="tn-join" x1="{px(edge)}" x2="{px(edge)}" y1="{y}" y2="{y + _BAR}"/>'
    if frame.supply is not None:
        if bar.needed_bytes > frame.supply:
            yield _rect(frame, frame.supply, bar.needed_bytes, y, "tn-over", "beyond the supply")
        if bar.loading_bytes > frame.supply:
            yield _loading(frame, bar, y)
        x = px(frame.across(frame.supply))
        yield f'<line class="tn-supply" x1="{x}" x2="{x}" y1="{y - 4}" y2="{y + _BAR + 4}"/>'


def _headline(frame: _Frame, bar: Bar, top: int) -> Iterator[str]:
    needs, y = size_words(bar.needed_bytes), top + 13
    if bar.spare_bytes is None:
        said, kind = needs, "tn-soft"
    elif bar.spare_bytes >= 0:
        said, kind = f"{needs} · spare {size_words(bar.spare_bytes)}", "tn-soft"
    else:
        said, kind = f"{needs} · ✕ short by {size_words(-bar.spare_bytes)}", "tn-short"
    two = frame.width < _ONE_LINE
    most = (frame.width - 2) // (LETTER + 1) - (0 if two else len(said) + 2)
    name = bar.name if len(bar.name) <= most else f"{bar.name[: max(most - 1, 8)]}…"
    yield f'<text class="tn-name tn-halo" x="1" y="{y}">{safe(name)}</text>'
    place = f'x="1" y="{y + 18}"' if two else f'x="{frame.width - 1}" y="{y}" text-anchor="end"'
    yield f'<text class="{kind} tn-halo" {place}>{safe(said)}</text>'


def _segment(frame: _Frame, part: Part, start: int, y: int) -> Iterator[str]:
    """Draw one segment: its colour, its pattern, and its name where there is room."""
    end = start + part.nbytes
    light = " tn-on-light" if part.kind in ON_LIGHT else ""
    yield _rect(frame, start, end, y, f"tn-{part.kind}", _part_title(part))
    if part.kind in MARKS:
        left, right = frame.across(start), frame.across(end)
        place = f'x="{px(left)}" y="{y}" width="{px(right - left)}" height="{_BAR}"'
        yield f'<rect class="tn-pattern" {place} fill="url(#{frame.prefix}-{part.kind})" pointer-events="none"/>'
    room = (frame.across(end) - frame.across(start)) // HUNDREDTHS
    words = next((words for words in (f"{part.label} {size_words(part.nbytes)}", part.label)
                  if len(words) * LETTER + 12 <= room), None)  # fmt: skip
    if words is not None and part.kind not in MARKS:
        at = px(frame.across(start) + 8 * HUNDREDTHS)
        yield f'<text class="tn-in{light}" x="{at}" y="{y + 17}" pointer-events="none">{safe(words)}</text>'


def _part_title(part: Part) -> str:
    lines = [f"{part.label}: {size_words(part.nbytes)} ({part.nbytes:,} bytes)"]
    for line in part.lines:
        bound = f", at most {line.bound_nbytes:,}" if line.bound_nbytes > line.nbytes else ""
        lines.append(f"{line.component}: {line.nbytes:,} bytes{bound}")
    return "\n".join(lines)


def _rect(frame: _Frame, start: int, end: int, y: int, kind: str, title: str) -> str:
    left, right = frame.across(start), frame.across(end)
    place = f'x="{px(left)}" y="{y}" width="{px(right - left)}" height="{_BAR}"'
    return f'<rect class="{kind}" {place}><title>{safe(title)}</title></rect>'


def _edges(frame: _Frame, parts: Sequence[Part]) -> Iterator[int]:
    """Yield where two segments meet that are both wide enough to be told apart by a line."""
    start, least = 0, 3 * HUNDREDTHS
    widths = []
    for part in parts:
        widths.append(frame.across(start + part.nbytes) - frame.across(start))
        start += part.nbytes
    at = HUNDREDTHS
    for one, following in pairwise(widths):
        at += one
        if one > least and following > least:
            yield at


def _loading(frame: _Frame, bar: Bar, y: int) -> str:
    """Mark how far loading goes, where that is beyond the supply."""
    x = min(max(frame.across(bar.loading_bytes), 6 * HUNDREDTHS), (frame.width - 6) * HUNDREDTHS)
    left, right, middle = px(x - 5 * HUNDREDTHS), px(x + 5 * HUNDREDTHS), px(x)
    title = f"while loading: {size_words(bar.loading_bytes)} ({bar.loading_bytes:,} bytes), more than the supply"
    path = f"M{left} {y + 8}L{right} {y + 8}L{middle} {y + 18}Z"
    return f'<path class="tn-loading" d="{path}"><title>{safe(title)}</title></path>'


def _axis(frame: _Frame, bottom: int) -> Iterator[str]:
    """Draw the scale below the bars and the guide of the supply behind them."""
    y = bottom - _GAP + 10
    unit, name = (GIB, "GiB") if frame.longest >= GIB else (MIB, "MiB")
    yield f'<line class="tn-axis" x1="1" x2="{frame.width - 1}" y1="{y}" y2="{y}"/>'
    step = _tick_step(frame, unit)
    for tick in range(0, frame.longest + 1, step):
        x = frame.across(tick)
        words = f"{tick // unit:,}" + (f" {name}" if not tick else "")
        yield f'<line class="tn-axis" x1="{px(x)}" x2="{px(x)}" y1="{y}" y2="{y + 5}"/>'
        place = f'x="{px(x)}" y="{y + 19}" text-anchor="{anchor(x, words, frame.width)}"'
        yield f'<text class="tn-soft" {place}>{words}</text>'
    if frame.supply is not None:
        x = frame.across(frame.supply)
        words = f"supply {size_words(frame.supply)}"
        yield f'<text class="tn-name" x="{px(x)}" y="13" text-anchor="{anchor(x, words, frame.width)}">{words}</text>'
        yield f'<line class="tn-supply-guide" x1="{px(x)}" x2="{px(x)}" y1="18" y2="{y}"/>'


def _tick_step(frame: _Frame, unit: int) -> int:
    """Return the bytes between two ticks: 1, 2 or 5 times a power of ten of the unit, with room for labels."""
    most = max((frame.width - 2) // _TICK_WIDTH, 1)
    step = unit
    while True:
        for times in (1, 2, 5):
            if frame.longest <= step * times * most:
                return step * times
        step *= 10


def _legend(frame: _Frame, found: Sequence[Bar], top: int) -> tuple[list[str], int]:
    """Return what the colours mean, in as many rows as it takes, and the height of the picture below them."""
    known = {part.kind: part.label for bar in found for part in bar.parts}
    labels = {str(kind): known[kind] for kind in LABELS if kind in known}
    if any((bar.spare_bytes or 0) > 0 for bar in found):
        labels["free"] = "Spare"
    lines, x, y = [], 1, top
    for kind, label in labels.items():
        needed = _SWATCH + 6 + len(label) * LETTER + 16
        if x > 1 and x + needed > frame.width:
            x, y = 1, y + _ROW
        place = f'x="{x}" y="{y}" width="{_SWATCH}" height="{_SWATCH}"'
        lines.append(f'<rect class="tn-{kind}" {place}/>')
        if kind in MARKS:
            lines.append(f'<rect {place} fill="url(#{frame.prefix}-{kind})"/>')
        if kind == "free":
            lines.append(f'<rect class="tn-frame" {place}/>')
        lines.append(f'<text x="{x + _SWATCH + 6}" y="{y + 12}">{safe(label)}</text>')
        x += needed
    return lines, y + _ROW
