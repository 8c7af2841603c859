"""What an engine is to placement: a few facts and functions, one file per engine beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.blueprint import Stored
    from tonnage.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The logical extents of one rank's part of a module, before storage."""

    out: int
    in_: int
    experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Bytes an engine holds beyond what it loads from the checkpoint.

    Attributes:
        component: Ledger line.
        nbytes: Bytes for one value of the first index, on every tensor-parallel rank.
        first: Layers that have it; empty for once per stage of ``stage``.
        why: The reason.
        source: Where the rule is stated.
    """

    component: str
    nbytes: int
    first: tuple[int, ...]
    why: str
    source: str


def _as_stored(_entry: Assigned, _stored: Stored) -> tuple[str, str] | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """How one engine places weights.

    Attributes:
        name: As on the command line.
        uneven: Axes that do not divide are cut into unequal parts.
        vocab_rows: ``(vocabulary, tp) -> rows`` after padding.
        held_shape: Shape the engine keeps for a stored tensor whose plain slice it cannot keep, or ``None`` to keep
            the plain slice; with the reason.
        extras: What it holds beyond the checkpoint.
        held_dtype: Dtype the engine keeps a stored tensor in where it is another, with the reason.
        check: Refusals of its own, before anything is placed.
    """

    name: str
    uneven: bool
    vocab_rows: Callable[[int, int], int]
    held_shape: Callable[[Assigned, Stored, Local, Topology], tuple[tuple[int, ...], str] | None]
    extras: Callable[[Assignment, Topology], Sequence[Extra]]
    held_dtype: Callable[[Assigned, Stored], tuple[str, str] | None] = _as_stored
