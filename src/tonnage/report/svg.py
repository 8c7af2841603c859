"""What the pictures are drawn with: colours that differ in lightness, patterns over them, positions, safe text.

A page sets ``color-scheme`` on its root; the colours follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from tonnage.report.bars import LABELS

PICTURE_STYLE = """
.tn-ranks{
--tn-ink:light-dark(#1b1f24,#e8eaed);--tn-soft:light-dark(#5a626c,#a3abb5);--tn-paper:light-dark(#fff,#15181c);
--tn-edge:light-dark(#c9ced5,#3a414a);--tn-over:light-dark(#b3152f,#ff7a8a);--tn-free:light-dark(#f2f4f7,#1e2329);
--tn-experts:light-dark(#1f4e85,#4d8fd6);--tn-weights:light-dark(#7fb2e5,#9cc9f5);
--tn-engine:light-dark(#6d5aa8,#8f7cd0);--tn-draft:light-dark(#d98bb9,#e8a5cb);
--tn-runtime:light-dark(#b8560f,#d9752b);--tn-workspace:light-dark(#f0bb4b,#f3cb72);
--tn-reserve:light-dark(#7c848e,#7c848e);--tn-margin:light-dark(#e3e6ea,#39404a);
--tn-cache:light-dark(#0b7a66,#2fa58d);--tn-given:light-dark(#a5dccf,#7ccdbb);
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-size:13px;font-variant-numeric:tabular-nums;display:block;max-width:100%;height:auto}
.tn-ranks text{fill:var(--tn-ink)}
.tn-ranks .tn-name{font-weight:600}
.tn-ranks .tn-soft{fill:var(--tn-soft)}
.tn-ranks .tn-short{fill:var(--tn-over);font-weight:600}
.tn-ranks .tn-halo{paint-order:stroke;stroke:var(--tn-paper);stroke-width:5px;stroke-linejoin:round}
.tn-ranks .tn-in{font-size:11.5px;fill:light-dark(#fff,#0d1117)}
.tn-ranks .tn-free{fill:var(--tn-free)}
.tn-ranks .tn-frame{fill:none;stroke:var(--tn-edge)}
.tn-ranks .tn-axis{stroke:var(--tn-edge);stroke-width:1}
.tn-ranks .tn-supply{stroke:var(--tn-ink);stroke-width:2}
.tn-ranks .tn-supply-guide{stroke:var(--tn-soft);stroke-width:1;stroke-dasharray:2 3}
.tn-ranks .tn-join{stroke:var(--tn-paper);stroke-width:1}
.tn-ranks .tn-loading{fill:var(--tn-over);stroke:var(--tn-paper);stroke-width:1}
.tn-ranks .tn-over{fill:none;stroke:var(--tn-over);stroke-width:2.5}
.tn-ranks .tn-mark{fill:none;stroke:#fff;stroke-opacity:.55;stroke-width:1.2}
.tn-ranks .tn-mark.tn-on-light{stroke:#14181d;stroke-opacity:.4}
.tn-ranks .tn-mark.tn-of-margin{stroke:var(--tn-soft);stroke-opacity:.9}
.tn-ranks .tn-line{fill:none;stroke:var(--tn-soft);stroke-width:1.6}
.tn-ranks .tn-line.tn-planned{stroke:var(--tn-cache);stroke-width:3}
.tn-ranks .tn-point{fill:var(--tn-cache);stroke:var(--tn-paper);stroke-width:2}
.tn-ranks .tn-beyond{fill:var(--tn-over);fill-opacity:.08}
@media print{.tn-ranks{color-scheme:light;-webkit-print-color-adjust:exact;print-color-adjust:exact}}
""" + "".join(f".tn-ranks .tn-{kind}{{fill:var(--tn-{kind})}}\n" for kind in LABELS)
MARKS = {
    "weights": "M0 6L6 0",
    "engine": "M1.5 3h1.2M4.5 6h1.2M4.5 0h1.2",
    "draft": "M0 3H6",
    "workspace": "M3 0V6",
    "reserve": "M0 0L6 6M0 6L6 0",
    "margin": "M0 0L6 6",
    "given": "M0 6L6 0M0 3H6",
}
"""What is drawn over a colour, per tile of 6 pixels, so that no two kinds differ by their colour alone."""
ON_LIGHT = frozenset({"weights", "draft", "workspace", "margin", "given"})
HUNDREDTHS = 100
"""Positions across are hundredths of a pixel, as integers."""
LETTER = 7
"""Pixels a letter takes on average; texts are placed by it."""


def patterns(prefix: str) -> Iterator[str]:
    """Yield the pattern of every kind that has one; their ids begin with a prefix."""
    for kind, path in MARKS.items():
        mark = f"tn-mark{' tn-on-light' if kind in ON_LIGHT else ''}{' tn-of-margin' if kind == 'margin' else ''}"
        yield (
            f'<pattern id="{prefix}-{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<path class="{mark}" d="{path}"/></pattern>'
        )


def anchor(x: int, words: str, width: int) -> str:
    """Return where a text at a position begins so that it stays in the picture: ``start``, ``middle`` or ``end``."""
    half = HUNDREDTHS * len(words) * LETTER // 2
    return "start" if x < half else "end" if x + half > width * HUNDREDTHS else "middle"


def px(hundredths: int) -> str:
    """Return a position in pixels.

    >>> px(1205), px(1200)
    ('12.05', '12')
    """
    whole, rest = divmod(hundredths, HUNDREDTHS)
    return f"{whole}.{rest:02}" if rest else str(whole)


def safe(text: str) -> str:
    """Return text that is nothing but text in an element and in an attribute."""
    return escape(text, {'"': "&quot;"})
