"""``tonnage calibrations``: the records of what was fitted to measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json, emit, emit_json

if TYPE_CHECKING:
    from tonnage.calibrations.io import Found

CONTRADICTED = 5
SCHEMA = "tonnage.calibrations/1"
calibrations = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Records = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECORD]...", help="Names, files or directories of records; by default all known ones."),
]


@calibrations.callback()
def _main() -> None:
    """List, show and check the calibrations: shipped, the user's own, the project's.

    Example: tonnage calibrations list
    """


@calibrations.command("list")
def list_records(records: Records = None, as_json: Json = False) -> None:
    """List the records, each with its credit, its evidence and the headroom over it.

    Example: tonnage calibrations list
    """
    rows = [_row(found) for found in _found(records)]
    if as_json:
        emit_json({"schema": SCHEMA, "records": rows})
        return
    from rich.table import Table
    from rich.text import Text

    from tonnage.report.tables import render

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("record", "tp", "permille", "packages", "headroom_bytes", "date", "path"):
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        headroom = "" if row["headroom_bytes"] is None else f"{row['headroom_bytes']:,}"
        cells = (row["id"], row["tp"], row["permille"], row["packages"], headroom, row["date"], row["path"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    emit(render(table))


@calibrations.command("show")
def show_record(
    name: Annotated[str, typer.Argument(metavar="RECORD", help="Name of a record, or a file.")],
) -> None:
    """Print one record with all that follows from it.

    Example: tonnage calibrations show kimi-k3.1-pro-exl3-2bit-tp8-475
    """
    from tonnage.calibrations.credit_records import record_document
    from tonnage.calibrations.io import find_record

    emit_json(record_document(find_record(name)))


@calibrations.command("check")
def check_records(
    records: Records = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", help="Further measurements of the same checkpoint and TP size; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute every record again; exit 5 if an estimate lies under a measurement.

    Example: tonnage calibrations check
    """
    from tonnage.calibrate import evidence_for
    from tonnage.calibrations.credit_records import contradictions
    from tonnage.measure.io import read_measurement_file

    measurements = [read_measurement_file(path) for path in measured or ()]
    rows = []
    for found in _found(records):
        further = evidence_for(found.record, measurements, named=bool(records))
        problems = contradictions(found.record, further)
        rows.append({**_row(found), "problems": [str(problem) for problem in problems]})
    holds = not any(row["problems"] for row in rows)
    if as_json:
        emit_json({"schema": SCHEMA, "holds": holds, "records": rows})
    else:
        for row in rows:
            evidence = f"{row['packages']} packages" if row["packages"] else "assumed, no evidence"
            emit(f"{row['id']}: {'CONTRADICTED' if row['problems'] else 'holds'} ({evidence})")
            for problem in row["problems"]:
                emit(f"  {problem}")
    if not holds:
        raise typer.Exit(CONTRADICTED)


def _found(names: list[str] | None) -> tuple[Found, ...]:
    from tonnage.calibrations.io import find_records, known_records

    return tuple(found for name in names for found in find_records(name)) if names else known_records()


def _row(found: Found) -> dict[str, Any]:
    record, choice = found.record, found.record.choice
    return {
        "id": record.id,
        "checkpoint": record.checkpoint.name,
        "family": record.checkpoint.family,
        "tp": record.tp,
        "permille": record.permille,
        "date": record.date,
        "packages": sum(evidence.packages for evidence in record.evidence),
        "estimate_bytes": None if choice is None else choice.estimate_bytes,
        "headroom_bytes": None if choice is None else choice.headroom_bytes,
        "path": found.path,
    }
