"""How the cache grows with the context and with the number of requests: one line for every number of requests.

Drawn from the points in a saved plan, for the rank whose cache is largest, against the room its fixed lines leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.report.bars import size_words
from tonnage.report.svg import HUNDREDTHS, LETTER, anchor, px, safe
from tonnage.saved_plan import SavedPlan
from tonnage.units import GIB, MIB, counted

_TOP, _FOOT, _LEFT, _HEIGHT = 28, 44, 46, 300
_TICKS = 5
_APART = 15 * HUNDREDTHS
"""Between two names of lines, at least."""
_DASHES = ("2 4", "8 4", "", "10 3 2 3", "3 2")
"""How the line of every number of requests is drawn, so that none is known by its colour alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What is drawn.

    Attributes:
        rank: Whose cache.
        concurrencies: One line each, ascending.
        contexts: Where points are, ascending.
        nbytes: By concurrency and context.
        room: What the fixed lines leave, or what the cache is given; ``None`` if nobody says.
        planned: What is planned, concurrency and context.
    """

    rank: int
    concurrencies: tuple[int, ...]
    contexts: tuple[int, ...]
    nbytes: dict[tuple[int, int], int]
    room: int | None
    planned: tuple[int, int]

    def fits(self, concurrency: int, context: int) -> bool | None:
        """Whether a point has room; ``None`` if nobody says how much there is."""
        return None if self.room is None else self.nbytes[concurrency, context] <= self.room


def growth_of(plan: SavedPlan) -> Growth | None:
    """Return how the cache of a plan grows; ``None`` where nothing is served, or the plan does not say."""
    cache = plan.cache
    if not plan.cache_growth or cache.rank is None or cache.concurrency is None or cache.context_tokens is None:
        return None
    room = cache.given_bytes
    if room is None and plan.supply_bytes is not None:
        room = max(plan.supply_bytes - plan.ranks[cache.rank].fixed_bytes, 0)
    nbytes = {(point.concurrency, point.context_tokens): point.nbytes for point in plan.cache_growth}
    concurrencies, contexts = (tuple(sorted(set(values))) for values in zip(*nbytes, strict=True))
    planned = (cache.concurrency, cache.context_tokens)
    if len(nbytes) != len(concurrencies) * len(contexts) or planned not in nbytes:
        return None
    return Growth(
        rank=cache.rank, concurrencies=concurrencies, contexts=contexts, nbytes=nbytes, room=room, planned=planned
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where things are: both ways in hundredths of a pixel.

    Attributes:
        width: Of the picture, in pixels.
        longest: Context at the right edge.
        most: Bytes at the upper edge.
        right: Pixels the names of the lines take.
    """

    width: int
    longest: int
    most: int
    right: int

    def across(self, tokens: int) -> int:
        """Return where a context is."""
        return _LEFT * HUNDREDTHS + tokens * (self.width - _LEFT - self.right) * HUNDREDTHS // self.longest

    def down(self, nbytes: int) -> int:
        """Return where a size is; what is beyond the upper edge is there."""
        return (_TOP + _HEIGHT) * HUNDREDTHS - min(nbytes, self.most) * _HEIGHT * HUNDREDTHS // self.most


def draw_growth(growth: Growth, *, width: int, prefix: str) -> str:
    """Return the lines as SVG text.

    Args:
        growth: What is drawn.
        width: In pixels.
        prefix: Begins the ids in it.
    """
    planned = growth.nbytes[growth.planned]
    most = max(growth.room or 0, planned, 1)
    right = max(len(_requests(many)) for many in growth.concurrencies) * LETTER + 12
    frame = _Frame(width=width, longest=growth.contexts[-1], most=most + most // 5, right=right)
    height = _TOP + _HEIGHT + _FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tn-ranks tn-growth" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" aria-labelledby="{prefix}-title {prefix}-desc">'
    )
    words = f'<desc id="{prefix}-desc">{safe(growth_words(growth))} The table below has every point.</desc>'
    title = f'<title id="{prefix}-title">Cache of rank {growth.rank} by context and requests</title>'
    return "\n".join([head, title, words, *_scales(frame), *_room(frame, growth), *_lines(frame, growth), "</svg>"])


def growth_words(growth: Growth) -> str:
    """Say what is planned and what there is room for."""
    many, tokens = growth.planned
    needs = f"{_requests(many)} of {tokens:,} tokens need {size_words(growth.nbytes[growth.planned])} of cache"
    needs = needs if many > 1 else needs.replace(" need ", " needs ")
    room = "" if growth.room is None else f"; there is {_room_words(growth.room)}"
    return f"{needs} on rank {growth.rank}{room}."


def _room_words(room: int) -> str:
    return f"room for {size_words(room)}" if room else "no room"


def _requests(many: int) -> str:
    return counted(many, "request")


def _scales(frame: _Frame) -> Iterator[str]:
    unit, name = (GIB, "GiB") if frame.most >= GIB else (MIB, "MiB")
    edge, bottom = px(frame.across(frame.longest)), _TOP + _HEIGHT
    for at in range(0, frame.most + 1, _step(frame.most, unit)):
        y = px(frame.down(at))
        yield f'<line class="tn-axis" x1="{_LEFT}" x2="{edge}" y1="{y}" y2="{y}"/>'
        middle = px(frame.down(at) + 4 * HUNDREDTHS)
        yield f'<text class="tn-soft" x="{_LEFT - 6}" y="{middle}" text-anchor="end">{at // unit:,}</text>'
    yield f'<text class="tn-soft" x="1" y="13">{name}</text>'
    for number in range(_TICKS):
        tokens = frame.longest * number // (_TICKS - 1)
        x, words = frame.across(tokens), _tokens(tokens)
        yield f'<line class="tn-axis" x1="{px(x)}" x2="{px(x)}" y1="{bottom}" y2="{bottom + 5}"/>'
        place = f'x="{px(x)}" y="{bottom + 20}" text-anchor="{anchor(x, words, frame.width)}"'
        yield f'<text class="tn-soft" {place}>{words}</text>'
    yield f'<text class="tn-soft" x="{edge}" y="{bottom + 38}" text-anchor="end">tokens of context</text>'


def _tokens(tokens: int) -> str:
    """Return a number of tokens, of whole KiB as ``128K``."""
    return f"{tokens >> 10:,}K" if tokens and not tokens % 1024 else f"{tokens:,}"


def _step(most: int, unit: int) -> int:
    step = unit
    while True:
        for times in (1, 2, 5):
            if most <= step * times * _TICKS:
                return step * times
        step *= 10


def _room(frame: _Frame, growth: Growth) -> Iterator[str]:
    if growth.room is None:
        return
    y, edge = frame.down(growth.room), px(frame.across(frame.longest))
    words = _room_words(growth.room)
    top = px(_TOP * HUNDREDTHS)
    height = px(y - _TOP * HUNDREDTHS)
    span = px(frame.across(frame.longest) - _LEFT * HUNDREDTHS)
    yield f'<rect class="tn-beyond" x="{_LEFT}" y="{top}" width="{span}" height="{height}"/>'
    yield f'<line class="tn-supply" x1="{_LEFT}" x2="{edge}" y1="{px(y)}" y2="{px(y)}"/>'
    yield f'<text class="tn-name tn-halo" x="{_LEFT + 6}" y="{px(y - 7 * HUNDREDTHS)}">{words}</text>'


def _lines(frame: _Frame, growth: Growth) -> Iterator[str]:
    """Draw the line of every number of requests as far as it is in the picture, its name at its end, and the plan."""
    lowest = (_TOP + _HEIGHT) * HUNDREDTHS + _APART
    for number, many in enumerate(growth.concurrencies):
        points, name = _within(frame, growth, many), _requests(many)
        planned = " tn-planned" if many == growth.planned[0] else ""
        path = " ".join(f"{px(x)},{px(y)}" for x, y in points)
        dashes = "" if planned else f' stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        yield f'<polyline class="tn-line{planned}" points="{path}"{dashes}><title>{name}</title></polyline>'
        x, y = points[-1]
        if x < frame.across(frame.longest):
            shown = f"{many:,} x"
            place = f'x="{px(x)}" y="{px(y - 5 * HUNDREDTHS)}" text-anchor="{anchor(x, shown, frame.width)}"'
        else:
            shown, lowest = name, min(y, lowest - _APART)
            place = f'x="{px(x + 6 * HUNDREDTHS)}" y="{px(lowest + 4 * HUNDREDTHS)}"'
        yield f'<text class="tn-halo{" tn-name" if planned else ""}" {place}>{shown}</text>'
    x, y = frame.across(growth.planned[1]), frame.down(growth.nbytes[growth.planned])
    title = safe(growth_words(growth))
    yield f'<circle class="tn-point" cx="{px(x)}" cy="{px(y)}" r="6"><title>planned: {title}</title></circle>'


def _within(frame: _Frame, growth: Growth, many: int) -> list[tuple[int, int]]:
    """Return the points of a line up to where it leaves the picture."""
    points: list[tuple[int, int]] = []
    before = (0, 0)
    for tokens in growth.contexts:
        nbytes = growth.nbytes[many, tokens]
        if nbytes > frame.most:
            risen = max(nbytes - before[1], 1)
            leaves = before[0] + (tokens - before[0]) * (frame.most - before[1]) // risen
            points.append((frame.across(leaves), frame.down(frame.most)))
            break
        points.append((frame.across(tokens), frame.down(nbytes)))
        before = (tokens, nbytes)
    return points if len(points) > 1 else [(frame.across(0), frame.down(0)), *points]
