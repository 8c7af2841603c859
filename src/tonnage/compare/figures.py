"""The error of one tensor: what of it differs, and by how much, summed over windows in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log10, prod, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.compare.windows import Views, stored_bits, values, windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tonnage.compare.pairs import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What sums up over windows and over tensors; elements that are not finite on both sides are in the counts alone.

    Attributes:
        elements: All of them.
        differing: Those of another value; a NaN is the value of another NaN.
        nonfinite: Those that are a NaN or an infinity on either side.
        squares: Sum of squares of the first.
        error_squares: Sum of squares of the differences.
        largest_error: Largest magnitude of a difference.
    """

    elements: int = 0
    differing: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    error_squares: float = 0.0
    largest_error: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of both together."""
        return Sums(
            elements=self.elements + other.elements,
            differing=self.differing + other.differing,
            nonfinite=self.nonfinite + other.nonfinite,
            squares=self.squares + other.squares,
            error_squares=self.error_squares + other.error_squares,
            largest_error=max(self.largest_error, other.largest_error),
        )

    @property
    def relative(self) -> float | None:
        """Frobenius norm of the differences over that of the first; ``None`` where all of the first is zero."""
        if not self.error_squares:
            return 0.0
        return sqrt(self.error_squares / self.squares) if self.squares else None

    @property
    def sqnr_db(self) -> float | None:
        """Signal to noise in dB; ``None`` without noise, or without a signal."""
        return 10 * log10(self.squares / self.error_squares) if self.squares and self.error_squares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """How one tensor differs.

    Attributes:
        name: As stored.
        shape: In elements.
        forms: How both sides store it.
        sums: Of its values; squares are left out where no bit differs. ``None`` where only bytes could be compared.
        differing_bytes: Bytes that differ, where only bytes could be compared.
    """

    name: str
    shape: tuple[int, ...]
    forms: tuple[str, str]
    sums: Sums | None = None
    differing_bytes: int = 0

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not (self.sums.differing if self.sums else self.differing_bytes)


def value_error(pair: tuple[Tensor, Tensor], views: tuple[Views, Views]) -> TensorError:
    """Return the error of the values of a tensor.

    Raises:
        CompareError: Two ranks hold different bits of one index.
    """
    a, b = pair
    total = Sums(elements=prod(a.shape))
    if a.form != b.form or any(_differing_bits(pair, views)):
        parts = (
            compare_values(values(a, views[0], window), values(b, views[1], window)) for window in windows(a.shape)
        )
        total = sum(parts, start=Sums())
    return TensorError(name=a.name, shape=a.shape, forms=(a.form, b.form), sums=total)


def byte_error(pair: tuple[Tensor, Tensor], views: tuple[Views, Views]) -> TensorError:
    """Return how many bytes of a tensor differ.

    Raises:
        CompareError: Two ranks hold different bits of one index.
    """
    a, b = pair
    differing = sum(_differing_bits(pair, views))
    return TensorError(name=a.name, shape=a.shape, forms=(a.form, b.form), differing_bytes=differing)


def _differing_bits(pair: tuple[Tensor, Tensor], views: tuple[Views, Views]) -> Iterator[int]:
    """Yield for every window how many stored bytes differ, scales included."""
    a, b = pair
    for one, other in ((a.stored, b.stored), (a.scales, b.scales)):
        if one is None or other is None:
            continue
        for window in windows(one.shape):
            here, there = stored_bits(one, views[0], window), stored_bits(other, views[1], window)
            yield int(np.count_nonzero(here.view(np.uint8) != there.view(np.uint8)))


def compare_values(a: NDArray[np.floating[Any]], b: NDArray[np.floating[Any]]) -> Sums:
    """Return the sums over two arrays of one shape.

    Source:
        Frobenius norms and signal to noise as usual; squares and sums in float64, added pairwise.
    """
    one, other = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(other)
    nonfinite = finite.size - int(np.count_nonzero(finite))
    differing = int(np.count_nonzero((one != other) & ~(np.isnan(one) & np.isnan(other))))
    if nonfinite:
        one, other = one[finite], other[finite]
    error = one - other
    return Sums(
        elements=finite.size,
        differing=differing,
        nonfinite=nonfinite,
        squares=float(np.sum(np.square(one))),
        error_squares=float(np.sum(np.square(error))),
        largest_error=float(np.max(np.abs(error), initial=0.0)),
    )
