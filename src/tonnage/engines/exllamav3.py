"""exllamav3 (TabbyAPI): components of 128 channels, heads or whole experts, shared out by the memory each GPU has left.

Layer by layer every component has a number of units: KV heads of attention, key heads of linear attention, 128 channels
of an MLP, whole experts, 128 rows of the head. Every rank gets an equal number of them, and the ranks that hold least
so far get one more if they do not divide; a rank may get none. GPUs are taken to have equal free memory; with unequal
memory, or ``gpu_split``, the shares follow the memory instead.

Inferred: vision towers are held by the first GPU; which rank holds a latent attention layer follows from the shares of
the layers before. Not modelled: the copy of a tied embedding that serves as the head, FP8 blocks turned into FP16.

Source:
    exllamav3 1.6.5 as to units and what is replicated. How units are shared out: turboderp-org/exllamav3
    ``model/model_tp_alloc.py`` at 01b52187 and ``util/misc.py`` ``ratio_split`` at 0e43d8c2, without its overheads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from tonnage.engines.model import Deal, EngineModel, Extra, How, Local
from tonnage.errors import PlacementError, Problem
from tonnage.formats.quantized import EXL3_GRAIN

if TYPE_CHECKING:
    from tonnage.assignment import Assigned, Assignment
    from tonnage.recipes.modules import Run, Stored
    from tonnage.recipes.schema import Rule
    from tonnage.topology import Topology

ONE_GPU_ROLES = frozenset({"vision", "projector", "audio"})
HEAD_ROLES = frozenset({"attention", "recurrent", "indexer", "norm"})
_DRAFT = "drafts and MTP parts are loaded as models of their own"
_ONE_GPU = "vision runs on one GPU"
_EMBEDDING = "every GPU looks tokens up in its own copy"
_LATENT = "latent attention and its indexer run whole on one GPU, layer by layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One entry in a component: its position in the assignment, and how the component is cut for it."""

    number: int
    how: How
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """Modules of one layer that are shared out together, in so many units."""

    units: int
    parts: tuple[_Part, ...]
    why: str = ""


_Key = tuple[tuple[int, ...], int, How, str]
"""Counts, step, how and why: layers with equal ones are dealt together."""


def _deal(assignment: Assignment, topology: Topology) -> Mapping[int, tuple[Deal, ...]]:
    """Return for every entry what each rank gets, layers with equal shares together.

    Raises:
        PlacementError: Heads cannot be grouped into whole blocks of 128 channels.
    """
    entries = assignment.entries
    held = [0] * topology.tp
    dealt: dict[int, dict[_Key, list[int]]] = {}
    for layer, numbers in _layers(entries):
        for component in _components(entries, numbers):
            size = sum(entries[p.number].copies * entries[p.number].instance_bytes for p in component.parts)
            counts = _share(component.units, held)
            for rank, count in enumerate(counts):
                held[rank] += size * count // component.units
            for part in component.parts:
                key = (counts, part.step, part.how, component.why)
                dealt.setdefault(part.number, {}).setdefault(key, []).extend([] if layer is None else [layer])
    return {
        number: tuple(_cut(entry, dealt[number])) if number in dealt else (_whole(entry, topology.tp),)
        for number, entry in enumerate(entries)
    }


def _share(units: int, held: list[int]) -> tuple[int, ...]:
    """Share units out: equal parts, and one more for the ranks that hold least so far, the first of equals.

    >>> _share(8, [0, 0, 0]), _share(112, [30, 30, 20])
    ((3, 3, 2), (37, 37, 38))
    """
    base, spare = divmod(units, len(held))
    more = sorted(range(len(held)), key=lambda rank: held[rank])[:spare]
    return tuple(base + (rank in more) for rank in range(len(held)))


def _cut(entry: Assigned, groups: Mapping[_Key, list[int]]) -> Iterator[Deal]:
    for (counts, step, how, why), first in groups.items():
        yield Deal(how=how, first=tuple(first) if entry.first else (), counts=counts, step=step, why=why)


def _whole(entry: Assigned, tp: int) -> Deal:
    """Return the deal of an entry that is in no component."""
    rule = entry.module.rule
    if rule.role == "mtp":
        return Deal(how="absent", first=entry.first, why=_DRAFT)
    if rule.role in ONE_GPU_ROLES:
        return Deal(how="one rank", first=entry.first, counts=(1, *([0] * (tp - 1))), why=_ONE_GPU)
    return Deal(how="replicated", first=entry.first, why=_EMBEDDING if rule.role == "embedding" else rule.why)


def _layers(entries: tuple[Assigned, ...]) -> Iterator[tuple[int | None, list[int]]]:
    """Yield every decoder layer with its entries, then those outside the layers."""
    by_layer: dict[int, list[int]] = {}
    outside: list[int] = []
    for number, entry in enumerate(entries):
        if entry.module.rule.role in ONE_GPU_ROLES or entry.module.rule.role in ("mtp", "embedding"):
            continue
        if entry.module.layered:
            for layer in entry.first:
                by_layer.setdefault(layer, []).append(number)
        else:
            outside.append(number)
    yield from sorted(by_layer.items())
    yield None, outside


def _components(entries: tuple[Assigned, ...], numbers: list[int]) -> Iterator[_Component]:
    """Yield the components of one layer: attention, routed experts, then what is cut by channels."""
    blocks: dict[str, list[int]] = {}
    routed: list[int] = []
    channels: dict[tuple[str, int], list[int]] = {}
    for number in numbers:
        rule = entries[number].module.rule
        if rule.is_routed:
            routed.append(number)
        elif rule.role in HEAD_ROLES:
            blocks.setdefault(_block(rule), []).append(number)
        elif rule.split != "replicated":
            channels.setdefault((rule.pattern.rpartition(".")[0], _axis(entries[number])[0].units), []).append(number)
    for block in blocks.values():
        yield from _attention([(number, entries[number]) for number in block])
    if routed:
        experts = entries[routed[0]].module.stack or entries[routed[0]].module.experts
        yield _Component(units=experts, parts=tuple(_Part(number=n, how="whole experts") for n in routed))
    for members in channels.values():
        runs = _axis(entries[members[0]])
        yield _Component(
            units=-(-runs[0].size // EXL3_GRAIN),
            parts=tuple(_Part(number=n, how="split", step=EXL3_GRAIN * _channel(entries[n])) for n in members),
        )


def _attention(members: list[tuple[int, Assigned]]) -> Iterator[_Component]:
    """Yield the component of one attention or recurrent block: by heads, or whole where it has a latent."""
    rules = [entry.module.rule for _, entry in members]
    if any(rule.role == "attention" and rule.is_linear and rule.split == "replicated" for rule in rules):
        yield _Component(units=1, parts=tuple(_Part(number=n, how="one rank") for n, _ in members), why=_LATENT)
        return
    cut = [(n, entry) for n, entry in members if entry.module.rule.split != "replicated"]
    if cut:
        units = _head_units([entry for _, entry in cut])
        yield _Component(units=units, parts=tuple(_Part(number=n, how="split") for n, _ in cut))


def _head_units(entries: Iterable[Assigned]) -> int:
    """Return the units of a block of heads: those all its modules have, grouped until projections are whole blocks.

    Fused parts of one value per head (a recurrence's time step) never are; they are held whole instead. In a checkpoint
    that is not quantised it is the projections that could be which must be whole blocks: small ones stay plain always.

    Raises:
        PlacementError: An odd number of groups is left that are no whole blocks of 128 channels.
    """
    axes = [(entry, run) for entry in entries for run in _axis(entry)]
    heads = units = gcd(*(run.units for _, run in axes))
    for entry, run in axes:
        if not (entry.module.rule.convert or entry.fmt.pads_to > 1):
            continue
        while run.size > run.units and run.size // units % EXL3_GRAIN:
            if units % 2:
                raise PlacementError(
                    Problem(
                        where="--engine exllamav3",
                        tensor=entry.module.rule.pattern,
                        what=f"{run.size} elements in {heads} heads make no whole blocks of {EXL3_GRAIN} channels",
                        expected="heads that can be grouped by two until they do",
                        found=f"{units} groups of {run.size // units}",
                    )
                )
            units //= 2
    return units


def _axis(entry: Assigned) -> tuple[Run, ...]:
    module, on_in = entry.module, entry.module.rule.split == "row"
    if not module.rule.is_linear:
        return module.shape[-1 if on_in else 0]
    return module.in_ if on_in else module.out


def _channel(entry: Assigned) -> int:
    """Return the elements of one channel: more than one where parts are interleaved."""
    run = _axis(entry)[0]
    return run.size // run.units


def _block(rule: Rule) -> str:
    """Return the part of a layer a module is in: ``self_attn``, ``linear_attn``."""
    return rule.pattern.partition("{layer}.")[2].partition(".")[0]


def _check(assignment: Assignment, topology: Topology) -> tuple[Problem, ...]:
    """Refuse what exllamav3 cannot load, or cannot do together."""
    problems = []
    where = "--engine exllamav3"
    if assignment.container is not None:
        problems.append(Problem(where=where, what="does not read an exl3-v1 container", expected="vllm or split"))
    if topology.tp > 1 and topology.pp > 1:
        found = f"--tp {topology.tp} --pp {topology.pp}"
        problems.append(
            Problem(where=where, what="splits by tensors or by layers", expected="one of --tp, --pp", found=found)
        )
    if topology.dcp > 1:
        problems.append(
            Problem(where=where, what="does not split the cache by tokens", expected="--dcp 1", found=str(topology.dcp))
        )
    foreign = {
        entry.fmt.name: entry for entry in assignment.entries if not (entry.fmt.is_plain or entry.fmt.pads_to > 1)
    }
    problems += [
        Problem(
            where=where,
            tensor=entry.module.rule.pattern,
            what="storage format is not loaded",
            expected="EXL3 or unquantised",
            found=name,
        )
        for name, entry in sorted(foreign.items())
    ]
    return tuple(problems)


def _held_shape(_entry: Assigned, _stored: Stored, _local: Local, _topology: Topology) -> None:
    return None


def _extras(_assignment: Assignment, _topology: Topology) -> tuple[Extra, ...]:
    return ()


EXLLAMAV3 = EngineModel(
    name="exllamav3",
    uneven=True,
    vocab_rows=lambda vocab, _tp: vocab,
    held_shape=_held_shape,
    extras=_extras,
    deal=_deal,
    check=_check,
)
