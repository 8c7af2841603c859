"""``tonnage measure``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.options import Json, emit, emit_json, here, note


def measure(
    packages: Annotated[
        list[Path],
        typer.Argument(
            metavar="PACKAGE...", help="Packages, prepared directories, or directories of ranks made by other tools."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", parser=here, metavar="PATH", help="Write the record to this file.")
    ] = None,
    date: Annotated[
        str | None, typer.Option("--date", help="Of the measurement, YYYY-MM-DD; today by default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over another file.")] = False,
    as_json: Json = False,
) -> None:
    """Say what every rank holds as stored, by class of tensors.

    Of several packages whether they are identical.

    Example: tonnage measure prepared --json -o measured.json
    """
    from tonnage.cli.dates import date_of
    from tonnage.measure.io import measure_packages
    from tonnage.measure.packages import measurement_document

    measured_on = date_of(date)
    comparison = measure_packages(packages)
    document = measurement_document(comparison, date=measured_on)
    if output is not None:
        from tonnage.cli.records import write_records
        from tonnage.measure.record import read_measurement

        content = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
        read_measurement(content, str(output))
        write_records([output], content, force=force)
    if as_json:
        emit_json(document)
    else:
        from tonnage.report.measured import measure_table
        from tonnage.report.tables import render

        emit(render(measure_table(comparison)))
    if output is not None:
        note(f"record written to {output}")
