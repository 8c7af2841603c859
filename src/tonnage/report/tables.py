"""Tables for people. GiB is 2**30 and labelled so; every line shows its basis and where to check it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tonnage.errors import one_line
from tonnage.plan import LOWER_SHARE
from tonnage.report.changes import changes, signed_size
from tonnage.report.documents import cache_document, plan_document
from tonnage.report.saved import read_saved
from tonnage.report.terminal import RankBars, plain_text
from tonnage.units import MIB, counted, gib, ranges, unit_for

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tonnage.api import Checkpoint, PlanRequest
    from tonnage.inspection import Inspection, Sum
    from tonnage.memory.supply import Gpu
    from tonnage.plan import Plan, RankLedger
    from tonnage.saved_plan import SavedPlan

_NUMBERS = ("files", "bytes", "GiB", "MiB", "tensors", "nominal GB", "planned", "bound", "measured", "difference")
"""What the heads of columns of numbers end with."""
_GAP = 2


def render(table: RenderableType, *, width: int | None = None, plain: bool = False) -> str:
    """Return a table as text: as wide as the terminal, or 110 columns where there is none; no line ends with blanks.

    Args:
        table: One part, or a group of them.
        width: In columns.
        plain: No colours, and ASCII alone; where the output can hold nothing else it is ASCII anyway.
    """
    console = Console(width=width, no_color=None, color_system=None if plain else "auto")
    if not console.is_terminal and width is None:
        console = Console(width=110, color_system=None)
    columns, in_ascii = console.width, plain or console.options.ascii_only
    with console.capture() as capture:
        for part in table.renderables if isinstance(table, Group) else (table,):
            console.width = max(columns, _least_width(part)) if isinstance(part, Table) else columns
            drawn = replace(part, plain=in_ascii) if isinstance(part, RankBars) else part
            console.print(drawn, soft_wrap=isinstance(part, Text))
    text = "\n".join(line.rstrip(" ") for line in capture.get().split("\n"))
    return plain_text(text) if in_ascii else text


def _least_width(table: Table) -> int:
    """Return the width below which numbers and names would be cut off: rather let the terminal wrap them."""
    texts = [(column.header, *(column.cells if column.no_wrap else ())) for column in table.columns]
    return sum(max(len(str(text)) for text in found) + _GAP for found in texts) - _GAP


def plan_table(
    checkpoint: Checkpoint,
    request: PlanRequest,
    plan: Plan,
    suggestions: Sequence[str],
    *,
    before: SavedPlan | None = None,
    options: Sequence[str] = (),
) -> RenderableType:
    """Return the ledger of the binding rank, every rank as a bar, what changed since a plan before, and the verdict."""
    saved = read_saved(plan_document(checkpoint, request, plan, suggestions, options=options))
    named = saved.checkpoint
    title = f"{named.name} ({named.family}) · {saved.topology.words} · {request.engine} · {request.estimator}"
    parts: list[RenderableType] = [Text(title, style="bold"), _ledger(plan.ranks[plan.binding_rank], plan.kv_bytes)]
    if len(plan.ranks) > 1:
        parts.append(Text(_spread(plan)))
    parts += _cache(plan)
    parts += [_remarks(plan, kind) for kind in dict.fromkeys(remark.kind for remark in plan.remarks)]
    parts += [Text(note, style="dim") for note in (*saved.notes, *saved.pessimism)]
    if before is not None:
        parts += _changed(before, saved)
    parts += [RankBars(plan=saved), _verdict(plan, suggestions)]
    return Group(*parts)


def _changed(before: SavedPlan, after: SavedPlan) -> list[RenderableType]:
    """Say what changed since a plan before: in words, what was asked, and line by line at the bounds."""
    found = changes(before, after)
    parts: list[RenderableType] = [Text("changed: " + " ".join(found.words), style="bold")]
    parts += [Text(f"  {fact.name}: {fact.before} -> {fact.after}") for fact in found.facts]
    if found.lines:
        table = new_table("at its bound:", "before bytes", "now bytes", "difference", "")
        for line in found.lines:
            sizes = ("none" if size is None else f"{size:,}" for size in (line.before, line.after))
            add_row(table, line.component, *sizes, f"{line.difference:+,}", signed_size(line.difference))
        parts.append(table)
    return parts


def inspect_table(checkpoint: Checkpoint, inspection: Inspection) -> RenderableType:
    """Return totals and the sums by role, storage format and dtype."""
    source = _read_of(checkpoint)
    total = inspection.total
    unit, short = unit_for(total.nbytes)
    credit = (
        f"counted projections {inspection.projection_bytes:,} bytes · latent pair {inspection.latent_bytes:,} bytes"
    )
    parts: list[RenderableType] = [
        Text(one_line(f"{checkpoint.name} ({checkpoint.family}), from {source}"), style="bold"),
        Text(f"tensors {total.tensors:,} · payload {total.nbytes:,} bytes ({short(total.nbytes)} {unit})"),
        _sums("role", inspection.by_role),
        _sums("storage format", inspection.by_format),
        _sums("dtype", inspection.by_dtype),
        Text(f"{credit} · convertible to MXFP8 {inspection.convertible_bytes:,} bytes"),
    ]
    parts += [Text(one_line(note), style="dim") for note in inspection.notes]
    if checkpoint.headers is not None:
        parts.append(Text("nothing missing, nothing unexpected, nothing misshapen"))
    return Group(*parts)


def _read_of(checkpoint: Checkpoint) -> str:
    if checkpoint.headers is None:
        return "config alone"
    shards = checkpoint.headers.shards
    return shards[0].shard_file if checkpoint.source is None else counted(len(shards), "shard file")


def families_table(families: Mapping[str, Mapping[str, object]]) -> RenderableType:
    """Return the known model families."""
    table = new_table("family", "model_type", "models")
    for name, facts in families.items():
        types = facts["model_types"]
        add_row(table, name, ", ".join(types) if isinstance(types, list) else "", str(facts.get("title", "")))
    return table


def gpus_table(rows: Sequence[tuple[Gpu, int, str]]) -> RenderableType:
    """Return the known GPUs with what a process can use and how that is known."""
    table = new_table("name", "GPU", "nominal GB", "usable GiB", "basis")
    for gpu, nbytes, basis in rows:
        add_row(table, gpu.slug, gpu.name, str(gpu.nominal_gb), gib(nbytes, digits=2), basis)
    return table


def _ledger(ledger: RankLedger, kv_bytes: int | None) -> Table:
    unit, short = unit_for(ledger.fixed_bytes)
    table = new_table(f"rank {ledger.rank}", "bytes", unit, "basis", "source")
    for line in ledger.lines:
        add_row(table, line.component, f"{line.nbytes:,}", short(line.nbytes), line.basis, line.source)
        if line.bound_nbytes > line.nbytes:
            add_row(table, "  bound", f"{line.bound_nbytes:,}", short(line.bound_nbytes), "", "")
    table.add_section()
    bounded = any(line.bound_nbytes > line.nbytes for line in ledger.lines)
    weights = "weights, padding and engine lines" + (", as expected" if bounded else "")
    fixed = "all lines above" + (" at their bounds" if bounded else "")
    fixed += ", of transient ones the largest" if sum(line.transient for line in ledger.lines) > 1 else ""
    add_row(table, "weights", f"{ledger.weights_bytes:,}", short(ledger.weights_bytes), "", weights)
    add_row(table, "fixed", f"{ledger.fixed_bytes:,}", short(ledger.fixed_bytes), "", fixed)
    if ledger.service is not None:
        served = f"{ledger.service.concurrency} x {ledger.service.context_tokens:,} tokens"
        basis, layout = ledger.service.cache_basis
        source = f"{served}; {layout}" if layout else served
        add_row(table, "cache", f"{ledger.cache_bytes:,}", short(ledger.cache_bytes), basis, source)
        if kv_bytes is not None:
            add_row(table, "  given", f"{kv_bytes:,}", short(kv_bytes), "exact", "--kv-bytes")
    return table


def _cache(plan: Plan) -> list[Text]:
    """Say what a token takes, and how many there is room for."""
    facts = cache_document(plan)
    if facts["bytes_per_token_per_rank"] is None:
        return []
    text = f"cache: {facts['bytes_per_token_per_rank']:,} bytes per token and rank"
    if facts["state_bytes_per_request"]:
        text += f", {facts['state_bytes_per_request']:,} bytes of state per request and rank"
    counts = [
        f"{facts[key]:,} tokens{how}, expected {facts[f'expected_{key}']:,}"
        for key, how in (
            ("shared_capacity_tokens", f" beside the states of {counted(facts['concurrency'], 'request')}"),
            ("capacity_tokens", " in requests of that length"),
        )
        if facts[key] is not None
    ]
    return [Text("; room for ".join([text, *counts]))]


def _remarks(plan: Plan, kind: str) -> RenderableType:
    """Return the remarks of one kind that matter, and the sum of those that do not."""
    unit, text = unit_for(plan.ranks[plan.binding_rank].fixed_bytes)
    least, small = (MIB, 0) if unit == "GiB" else (MIB // 16, 0)
    table = new_table(kind, unit, "why")
    for remark in plan.remarks:
        if remark.kind == kind and remark.nbytes >= least:
            add_row(table, remark.role, text(remark.nbytes), remark.why)
        elif remark.kind == kind:
            small += remark.nbytes
    if small:
        add_row(table, "others", text(small), f"{small:,} bytes in small pieces, listed by --json")
    return table


def _spread(plan: Plan) -> str:
    """Say how the ranks differ."""
    by_size: dict[int, list[int]] = {}
    for ledger in plan.ranks:
        by_size.setdefault(ledger.fixed_bytes, []).append(ledger.rank)
    if len(by_size) == 1:
        return f"all {len(plan.ranks)} ranks hold the same"
    unit, text = unit_for(max(by_size))
    return " · ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {size:,} bytes ({text(size)} {unit})"
        for size, ranks in sorted(by_size.items(), reverse=True)
    )


def _verdict(plan: Plan, suggestions: Sequence[str]) -> Text:
    spare = plan.spare_bytes(plan.binding_rank)
    supply = ""
    if plan.supply is not None and spare is not None:
        unit, short = unit_for(plan.supply.nbytes)
        supply = f"supply {short(plan.supply.nbytes)} {unit} ({plan.supply.basis}: {plan.supply.source})"
        if plan.fits:
            alone = "weights alone" if plan.kv_bytes is None else "weights and --kv-bytes alone"
            beside = "" if plan.ranks[plan.binding_rank].service else f"; {alone}: no cache is planned"
            verdict = f"FITS: spare {short(spare)} {unit} on rank {plan.binding_rank}, {supply}{beside}"
            return Text(verdict, style="bold green")
    if plan.fits is None:
        return Text("no --gpu or --supply given, so no verdict")
    text = Text("REFUSED: " + "\n".join(plan.reasons), style="bold red")
    if supply:
        text.append(f"\n{supply}", style="not bold")
    if way := ways_out(plan, suggestions):
        text.append(f"\n{way}", style="not bold")
    return text


def ways_out(plan: Plan, suggestions: Sequence[str]) -> str:
    """Return what would make a refused plan fit, as one line; empty where its reasons say it, or no supply is known."""
    if suggestions:
        return "would fit with: " + ", or ".join(suggestions)
    if plan.supply is None or any(LOWER_SHARE in reason for reason in plan.reasons):
        return ""
    return "no single change that was tried fits; tonnage fit tries every way to share it"


def _sums(title: str, rows: Sequence[tuple[str, Sum]]) -> Table:
    unit, text = unit_for(sum(total.nbytes for _, total in rows))
    table = new_table(title, "tensors", "bytes", unit)
    for name, total in rows:
        add_row(table, name, f"{total.tensors:,}", f"{total.nbytes:,}", text(total.nbytes))
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: nothing in it is markup, or a word to the terminal, whoever wrote it."""
    table.add_row(*(Text(one_line(cell)) for cell in cells))


def new_table(*columns: str, whole: Collection[str] = ()) -> Table:
    """Return an empty table; columns of numbers are aligned to the right.

    Args:
        columns: Their heads.
        whole: Those whose texts are never broken, as numbers are not.
    """
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        number = column == "rank" or column.endswith(_NUMBERS)
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(column, justify=justify, no_wrap=number or column in whole, overflow="fold")
    return table
