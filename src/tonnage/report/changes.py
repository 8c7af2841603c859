"""What changed between two plans: in words, then line by line of the rank that needs most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.report.bars import size_words
from tonnage.saved_plan import SavedPlan, SavedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something of the question or the answer that is not what it was."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """A line of the ledger in both plans; ``None`` where one does not have it.

    Attributes:
        component: Its name; lines of one name are taken together.
        before: Bytes at the bound.
        after: The same now.
    """

    component: str
    before: int | None
    after: int | None

    @property
    def difference(self) -> int:
        """What there is more of, in bytes."""
        return (self.after or 0) - (self.before or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One plan against another.

    Attributes:
        words: The verdict then and now, and what the fullest rank needs more or less.
        facts: What was asked and answered otherwise.
        lines: Of the fullest rank of each, those that differ, the largest difference first.
        same: How many lines do not differ.
        ranks: The two ranks that are compared.
    """

    words: tuple[str, ...]
    facts: tuple[Fact, ...]
    lines: tuple[LineChange, ...]
    same: int
    ranks: tuple[int, int]


def changes(before: SavedPlan, after: SavedPlan) -> Changes:
    """Return what is different in a plan that is looked at against one from before."""
    ledgers = [_by_component(plan, plan.binding) for plan in (before, after)]
    lines = [
        LineChange(component=name, before=ledgers[0].get(name), after=ledgers[1].get(name))
        for name in dict.fromkeys((*ledgers[0], *ledgers[1]))
    ]
    changed = [line for line in lines if line.before != line.after]
    return Changes(
        words=tuple(_words(before, after)),
        facts=tuple(fact for fact in _facts(before, after) if fact.before != fact.after),
        lines=tuple(sorted(changed, key=lambda line: (-abs(line.difference), line.component))),
        same=len(lines) - len(changed),
        ranks=(before.binding_rank, after.binding_rank),
    )


def verdict(plan: SavedPlan) -> str:
    """Return the verdict in a word or two."""
    return {True: "fits", False: "is refused", None: "has no verdict"}[plan.fits]


def signed_size(nbytes: int) -> str:
    """Return a difference with its sign and unit: ``+1.000 GiB``."""
    return f"{'-' if nbytes < 0 else '+'}{size_words(abs(nbytes))}" if nbytes else "0"


def _by_component(plan: SavedPlan, rank: SavedRank) -> dict[str, int]:
    """Return the bound of every line by component, and the cache; of transient lines each its own."""
    found: dict[str, int] = {}
    for line in rank.lines:
        found[line.component] = found.get(line.component, 0) + line.bound_nbytes
    cache = plan.needed_bytes(rank) - rank.fixed_bytes
    return {**found, "cache": cache} if cache else found


def _words(before: SavedPlan, after: SavedPlan) -> Iterator[str]:
    if before.fits == after.fits:
        yield f"It {verdict(after)}, as before." if after.fits is not None else "Neither has a verdict."
    else:
        yield f"It {verdict(after)}; before it {_past(before)}."
    needs = [plan.needed_bytes(plan.binding) for plan in (before, after)]
    more = needs[1] - needs[0]
    if more:
        than = f"{size_words(abs(more))} {'more' if more > 0 else 'less'}"
        yield f"The fullest rank needs {than}: {size_words(needs[1])}, was {size_words(needs[0])}."
    else:
        yield f"The fullest rank needs the same: {size_words(needs[1])}."
    spares = before.binding.spare_bytes, after.binding.spare_bytes
    if spares[0] is not None and spares[1] is not None and spares[0] != spares[1]:
        yield f"It leaves {_left(spares[1])}, was {_left(spares[0])}."


def _past(plan: SavedPlan) -> str:
    return {True: "did fit", False: "was refused", None: "had no verdict"}[plan.fits]


def _left(spare: int) -> str:
    return f"{size_words(spare)} spare" if spare >= 0 else f"{size_words(-spare)} too little"


def _facts(before: SavedPlan, after: SavedPlan) -> Iterator[Fact]:
    for name, old, new in (
        ("checkpoint", before.checkpoint.name, after.checkpoint.name),
        ("digest", before.checkpoint.digest, after.checkpoint.digest),
        ("family", before.checkpoint.family, after.checkpoint.family),
        ("engine", before.engine, after.engine),
        ("estimator", before.estimator, after.estimator),
        ("ranks", before.topology.words, after.topology.words),
        ("supply", _size(before.supply_bytes), _size(after.supply_bytes)),
        ("supply from", _source(before), _source(after)),
        ("requests", _count(before.cache.concurrency), _count(after.cache.concurrency)),
        ("context", _count(before.cache.context_tokens), _count(after.cache.context_tokens)),
        ("prefill chunk", _count(before.profile.prefill_chunk_tokens), _count(after.profile.prefill_chunk_tokens)),
        ("KV dtype", before.profile.kv_dtype or "-", after.profile.kv_dtype or "-"),
        ("cache given", _size(before.cache.given_bytes), _size(after.cache.given_bytes)),
        ("numerics", before.numerics.kind, after.numerics.kind),
        ("room in tokens", _count(before.cache.capacity_tokens), _count(after.cache.capacity_tokens)),
        ("verdict", verdict(before), verdict(after)),
        ("tonnage", before.tonnage_version or "-", after.tonnage_version or "-"),
        ("options", " ".join(before.options) or "-", " ".join(after.options) or "-"),
    ):
        yield Fact(name=name, before=old, after=new)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else size_words(nbytes)


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _source(plan: SavedPlan) -> str:
    return "-" if plan.supply is None else plan.supply.source
