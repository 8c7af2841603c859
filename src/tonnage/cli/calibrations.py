"""``tonnage calibrations``: the records of what was fitted to measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.fit_terms import fit_terms
from tonnage.cli.options import Json, emit, emit_json
from tonnage.cli.usage import Words
from tonnage.errors import CreditError, Problem, one_line
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.calibrations.io import Found

CONTRADICTED = 5
SCHEMA = "tonnage.calibrations/1"
calibrations = typer.Typer(cls=Words, no_args_is_help=True, rich_markup_mode=None)
Records = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECORD]...", help="Names, files or directories of records; by default all known ones."),
]


@calibrations.callback()
def _main() -> None:
    """List, show and check the calibrations.

    Those shipped, the user's own, the project's.

    Example: tonnage calibrations list
    """


@calibrations.command("list")
def list_records(records: Records = None, as_json: Json = False) -> None:
    """List the records: credit, evidence, headroom over it.

    Example: tonnage calibrations list
    """
    listed = _found(records)
    rows = [_row(found) for found in listed]
    if as_json:
        emit_json({"schema": SCHEMA, "records": rows})
        return
    replaced = {identifier for found in listed for identifier in found.record.supersedes}
    for row in rows:
        headroom = "none" if row["headroom_bytes"] is None else f"{row['headroom_bytes']:,} bytes"
        evidence = f"fitted to {_counted(row['packages'])}" if row["packages"] else "assumed"
        state = "; superseded" if row["id"] in replaced else ""
        emit(f"{one_line(row['id'])} ({one_line(row['path'])})")
        emit(f"  {one_line(row['checkpoint'])} ({one_line(row['family'])}), TP {row['tp']}, {row['date']}{state}")
        emit(f"  {row['permille']} permille, {evidence}, headroom {headroom}")


@calibrations.command("show")
def show_record(
    name: Annotated[str, typer.Argument(metavar="RECORD", help="Name of a record, or a file.")],
    as_json: Json = True,  # noqa: ARG001 - a record is shown as it is written
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
    """Compute every record again.

    Exits with 5 if an estimate lies under a measurement.

    Example: tonnage calibrations check
    """
    from tonnage.calibrate import evidence_for, without_record
    from tonnage.calibrations.credit_records import contradictions
    from tonnage.measure.io import read_measurement_file

    measurements = [read_measurement_file(path) for path in measured or ()]
    known = _found(records)
    if unused := without_record([found.record for found in known], measurements, named=bool(records)):
        what = "measured of another checkpoint or TP size than any of the records; name the record it is meant for"
        raise CreditError(*(Problem(where=source, what=what) for source in unused))
    rows = []
    for found in known:
        further = tuple(evidence_for(found.record, measurements, named=bool(records)))
        problems = contradictions(found.record, further)
        packages = sum(evidence.packages for evidence in (*found.record.evidence, *further))
        rows.append({**_row(found), "packages": packages, "problems": [str(problem) for problem in problems]})
    holds = not any(row["problems"] for row in rows)
    terms = [] if records else _term_rows()
    if as_json:
        emit_json({"schema": SCHEMA, "holds": holds, "records": rows, "terms": terms})
    else:
        for row in rows:
            evidence = _counted(row["packages"]) if row["packages"] else "assumed, no evidence"
            emit(f"{row['id']}: {'CONTRADICTED' if row['problems'] else 'holds'} ({evidence})")
            for problem in row["problems"]:
                emit(f"  {problem}")
        for row in terms:
            emit(f"terms of {row['engine']}: hold ({row['records']} records, {row['figures']} logged figures)")
    if not holds:
        raise typer.Exit(CONTRADICTED)


def _term_rows() -> list[dict[str, Any]]:
    """Return the shipped files of runtime terms; reading one computes every bound against its evidence again."""
    from tonnage.calibrations.term_records import shipped_file

    files = {engine: shipped_file(engine) for engine in ("vllm", "sglang", "split")}
    return [
        {"engine": engine, "records": len(file.records), "figures": len(file.evidence)}
        for engine, file in files.items()
        if file is not None
    ]


def _counted(packages: int) -> str:
    return counted(packages, "package")


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


calibrations.command("fit-terms")(fit_terms)
