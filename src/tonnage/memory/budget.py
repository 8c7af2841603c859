"""The share of a GPU that vLLM asks for: what it comes to, the highest with which a worker starts, how flags write it.

Source:
    vLLM 0.32.0 ``v1/worker/utils.py`` request_memory. The engine multiplies in double precision, which can differ by a
    byte.
"""

from __future__ import annotations

from fractions import Fraction

DEFAULT_UTILIZATION = Fraction(92, 100)
"""vLLM 0.24 to 0.33, ``config/cache.py``."""
UTILIZATION_DIGITS = 4


def requested_bytes(total_bytes: int, utilization: Fraction) -> int:
    """Return what a utilization asks for of the total the allocator sees, rounded up as the engine does."""
    return -(-total_bytes * utilization.numerator // utilization.denominator)


def highest_utilization(total_bytes: int, free_bytes: int) -> Fraction:
    """Return the highest utilization, to four digits, with which a worker starts: it asks for no more than is free.

    Args:
        total_bytes: Total the allocator sees.
        free_bytes: Free at the first snapshot: context and communicators are there, weights are not.
    """
    return floor_utilization(Fraction(free_bytes, total_bytes))


def floor_utilization(value: Fraction) -> Fraction:
    """Return a fraction of a GPU rounded down to the four digits that are passed on."""
    scale = 10**UTILIZATION_DIGITS
    return Fraction(value.numerator * scale // value.denominator, scale)


def utilization_text(value: Fraction) -> str:
    """Return a fraction of a GPU as a flag takes it: ``0.92``, ``0.9417``; rounded down."""
    digits = floor_utilization(value) * 10**UTILIZATION_DIGITS
    whole, rest = divmod(digits.numerator, 10**UTILIZATION_DIGITS)
    return f"{whole}.{rest:0{UTILIZATION_DIGITS}d}".rstrip("0").removesuffix(".")
