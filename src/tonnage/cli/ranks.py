"""Ranks as they are named on the command line."""

from __future__ import annotations

_MOST_DIGITS = 9


def parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks that ``0-3,6`` names.

    Raises:
        UnitError: It names none, or one beyond reason.
    """
    from tonnage.errors import Problem, UnitError

    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = _parse_rank(first)
        end = _parse_rank(last) if dash else begin
        if begin is None or end is None or begin > end:
            expected = "ranks and ranges of ranks, such as 0-3 or 0,2"
            raise UnitError(Problem(where="--ranks", what="not a list of ranks", expected=expected, found=repr(text)))
        ranks.update(range(begin, end + 1))
    return tuple(sorted(ranks))


def _parse_rank(text: str) -> int | None:
    """Return a rank; ``None`` if it is none. Digits are counted first: Python refuses to read thousands of them."""
    from tonnage.topology import MOST_RANKS

    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) < MOST_RANKS):
        return None
    return int(text)
