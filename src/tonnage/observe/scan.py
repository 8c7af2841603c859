"""Finding the lines that matter in a block of a log, without looking at the others.

A block is searched once per marker; only lines with a marker are cut out, cleaned and read. Carriage returns end lines
too, as progress bars write them; colours are removed before anything is searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LONGEST_LINE = 1 << 16
"""Bytes of a line that are read; what follows is not."""

_COLOURS = re.compile(rb"\x1b\[[0-9;:?]{0,40}[@-~]|\x1b\][^\x07\x1b\n]{0,300}(?:\x07|\x1b\\)|\x1b[()][0-9A-B]")


def lines_with(block: bytes, markers: Sequence[bytes]) -> Iterator[str]:
    """Yield the lines of a block that hold a marker, in order, as text.

    Args:
        block: Whole lines. Bytes that are no UTF-8 become U+FFFD.
        markers: Texts without line ends.
    """
    if b"\r" in block:
        block = block.replace(b"\r", b"\n")
    if b"\x1b" in block:
        block = _COLOURS.sub(b"", block)
    ends: dict[int, int] = {}
    for marker in markers:
        at = block.find(marker)
        while at >= 0:
            begin = block.rfind(b"\n", 0, at) + 1
            end = ends.get(begin)
            if end is None:
                end = block.find(b"\n", at)
                end = ends[begin] = len(block) if end < 0 else end
            at = block.find(marker, end)
    for begin in sorted(ends):
        yield block[begin : min(ends[begin], begin + LONGEST_LINE)].decode("utf-8", "replace")
