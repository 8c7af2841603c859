"""Tables of measurements: what every rank holds, of what, where packages differ, and where the plan of one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tonnage.errors import one_line
from tonnage.measure.record import largest_rank, smallest_rank
from tonnage.report.tables import add_row, new_table
from tonnage.units import ranges, unit_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from tonnage.explain import ExplainedLine, Explanation
    from tonnage.measure.packages import Comparison, MeasuredPackage
    from tonnage.measure.record import MeasuredRank

_MOST_DIFFERENCES = 20


def measure_table(comparison: Comparison) -> RenderableType:
    """Return the packages, whether they differ, the bytes of every rank, the classes of the largest, and how."""
    parts: list[RenderableType] = [Text(_title(package), style="bold") for package in comparison.packages]
    ranks = comparison.ranks
    if len(comparison.packages) > 1:
        parts.append(Text(_summary(comparison)))
    parts += [_ranks(ranks), _classes(largest_rank(ranks)), Text(_spread(ranks))]
    if comparison.differences:
        parts += _differences(comparison)
    parts += [Text(one_line(note), style="dim") for package in comparison.packages for note in package.notes]
    return Group(*parts)


def _title(package: MeasuredPackage) -> str:
    origin = package.checkpoint
    of = [f"of {origin.name}"] * (origin.name is not None) + [f"({origin.family})"] * (origin.family is not None)
    sizes = " ".join(
        f"{name}{size}"
        for name, size in (("tp", package.topology.tp), ("ep", package.topology.ep), ("pp", package.topology.pp))
        if size > 1 or name == "tp"
    )
    converted = [] if package.convert is None else [f"convert {package.convert}"]
    return one_line(" · ".join((" ".join((package.name, *of)), package.kind, sizes, *converted)))


def _ranks(ranks: Sequence[MeasuredRank]) -> Table:
    unit, short = unit_for(largest_rank(ranks).payload_bytes)
    table = new_table("rank", "payload bytes", unit, "file bytes", "tensors")
    for rank in ranks:
        cells = (f"{rank.payload_bytes:,}", short(rank.payload_bytes), f"{rank.file_bytes:,}", f"{rank.tensors:,}")
        add_row(table, str(rank.rank), *cells)
    return table


def _classes(rank: MeasuredRank) -> Table:
    unit, short = unit_for(rank.payload_bytes)
    table = new_table(f"rank {rank.rank} holds", "dtype", "bytes", unit, "tensors")
    for part in rank.by_class:
        add_row(table, part.tensor_class, part.dtype, f"{part.nbytes:,}", short(part.nbytes), f"{part.tensors:,}")
    return table


def _spread(ranks: Sequence[MeasuredRank]) -> str:
    largest, smallest = largest_rank(ranks), smallest_rank(ranks)
    spread = largest.payload_bytes - smallest.payload_bytes
    if not spread:
        return f"all {len(ranks)} ranks hold {largest.payload_bytes:,} bytes" if len(ranks) > 1 else "one rank"
    return (
        f"largest: rank {largest.rank}, {largest.payload_bytes:,} bytes · "
        f"smallest: rank {smallest.rank}, {smallest.payload_bytes:,} bytes · spread {spread:,} bytes"
    )


def _summary(comparison: Comparison) -> str:
    """Say whether packages differ, and of which the table below is."""
    count, found = len(comparison.packages), comparison.differences
    if not found:
        return f"{count} packages, identical: the same bytes per rank and class, shown once"
    ranks, classes = sorted({one.rank for one in found}), sorted({one.here.tensor_class for one in found})
    where = f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, {', '.join(classes)}"
    return f"{count} packages, they differ: {where}; of each rank the largest of all packages is shown"


def _differences(comparison: Comparison) -> list[RenderableType]:
    table = new_table("differs", "rank", "class", "dtype", "bytes", "first package bytes")
    for one in comparison.differences[:_MOST_DIFFERENCES]:
        facts = (str(one.rank), one.here.tensor_class, one.here.dtype, f"{one.here.nbytes:,}", f"{one.first.nbytes:,}")
        add_row(table, one_line(one.package), *facts)
    more = len(comparison.differences) - _MOST_DIFFERENCES
    return [table, *([Text(f"and {more} more differences, listed by --json")] if more > 0 else [])]


def explain_table(explanation: Explanation) -> RenderableType:
    """Return the lines of one rank, planned and measured, and the verdict; bounds where one is not what is planned."""
    plan, total = explanation.plan, explanation.total
    which = "a rank" if explanation.rank is None else f"rank {explanation.rank}"
    title = f"{plan.checkpoint.name} ({plan.checkpoint.family}) · {which} · {plan.engine} · {plan.estimator} · bytes"
    bounded = any(line.bound_bytes != line.planned_bytes for line in (*explanation.lines, total))
    bound = ("bound",) if bounded else ()
    table = new_table("line", "planned", *bound, "measured", "difference", "remark", whole=("line",))
    for line in explanation.lines:
        _add_line(table, line, bounded=bounded)
    table.add_section()
    _add_line(table, total, bounded=bounded)
    parts: list[RenderableType] = [Text(one_line(title), style="bold"), table]
    parts += [Text(one_line(note), style="dim") for note in explanation.notes]
    return Group(*parts, _verdict(explanation))


def _add_line(table: Table, line: ExplainedLine, *, bounded: bool) -> None:
    bound = (line.bound_bytes,) if bounded else ()
    numbers = (line.planned_bytes, *bound, line.measured_bytes)
    difference = (
        "" if line.difference_bytes is None else f"{line.difference_bytes:+,}" if line.difference_bytes else "0"
    )
    cells = ("" if number is None else f"{number:,}" for number in numbers)
    add_row(table, one_line(line.component), *cells, difference, line.remark)


def _verdict(explanation: Explanation) -> Text:
    difference = explanation.total.difference_bytes or 0
    if explanation.below:
        ranks = ", ".join(
            f"{'a rank without a number' if one.rank is None else f'rank {one.rank}'} by {one.nbytes:,} bytes"
            for one in explanation.below
        )
        return Text(f"CONTRADICTED: the plan is below what was measured: {ranks}", style="bold red")
    if not difference:
        return Text("the plan is equal to what was measured, to the byte", style="bold green")
    return Text(f"the plan is above what was measured, by {difference:,} bytes", style="bold green")
