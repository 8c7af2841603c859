"""What an engine is to placement: a few facts and functions, one file per engine beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tonnage.assignment import Assigned, Assignment
    from tonnage.errors import Problem
    from tonnage.recipes.modules import Stored
    from tonnage.topology import Topology

How = Literal["split", "replicated", "whole experts", "one rank", "absent"]


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
        nbytes: Bytes for one value of the first index, per tensor-parallel rank.
        first: Layers that have it; empty for once per stage of ``stage``.
        why: The reason.
        source: Where the rule is stated.
        part_of: Section, pattern and suffix of the fused tensor they are rows of; ``None`` where they stand alone.
    """

    component: str
    nbytes: tuple[int, ...]
    first: tuple[int, ...]
    why: str
    source: str
    part_of: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """What an engine does with some layers of an entry, where its recipe line does not say it.

    Attributes:
        how: What becomes of it.
        first: Values of the first index it holds for; empty without one.
        counts: For every rank the units of the cut axis, or the whole experts, or 1 where it alone holds the module.
        step: Elements of a unit; 0 where every run of the axis is as many equal units.
        why: The reason, unless it is split plainly.
    """

    how: How
    first: tuple[int, ...]
    counts: tuple[int, ...] = ()
    step: int = 0
    why: str = ""


def _no_deals(_assignment: Assignment, _topology: Topology) -> Mapping[int, tuple[Deal, ...]]:
    return {}


def _no_refusals(_assignment: Assignment, _topology: Topology) -> tuple[Problem, ...]:
    return ()


def _as_stored(_entry: Assigned, _stored: Stored) -> tuple[str, str] | None:
    return None


def _no_copies(_entry: Assigned, _stored: Stored) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """How one engine places weights.

    Attributes:
        name: As on the command line.
        uneven: Axes that do not divide are cut into unequal parts, heads of attention and recurrence excepted.
        vocab_rows: ``(vocabulary, tp) -> rows`` after padding.
        held_shape: Shape the engine keeps for a stored tensor whose plain slice it cannot keep, or ``None`` to keep
            the plain slice; with the reason.
        extras: What it holds beyond the checkpoint.
        held_dtype: Dtype the engine keeps a stored tensor in where it is another, with the reason.
        copies: Whether the shape of :attr:`held_shape` is what copying the stored slice leaves: files have the slice.
        takes_over: Engines whose exceptions in a recipe hold for this one too, where it has none of its own.
        deal: How it deals entries out over the ranks, by their position in the assignment, where recipe lines are not
            followed; may raise :class:`~tonnage.errors.PlacementError`.
        check: Refusals of its own, before anything is placed.
    """

    name: str
    uneven: bool
    vocab_rows: Callable[[int, int], int]
    held_shape: Callable[[Assigned, Stored, Local, Topology], tuple[tuple[int, ...], str] | None]
    extras: Callable[[Assignment, Topology], Sequence[Extra]]
    held_dtype: Callable[[Assigned, Stored], tuple[str, str] | None] = _as_stored
    copies: Callable[[Assigned, Stored], bool] = _no_copies
    takes_over: tuple[str, ...] = ()
    deal: Callable[[Assignment, Topology], Mapping[int, tuple[Deal, ...]]] = _no_deals
    check: Callable[[Assignment, Topology], Sequence[Problem]] = _no_refusals
