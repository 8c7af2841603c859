"""``tonnage explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.options import Json, emit, emit_json

CONTRADICTED = 5


def explain(
    plan: Annotated[
        Path, typer.Option("--plan", metavar="PLAN", help="Output of `tonnage plan --json`, or plan.json of a package.")
    ],
    measured: Annotated[
        Path, typer.Option("--measured", metavar="RECORD", help="A record of `tonnage measure`, or a report of ranks.")
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Which rank; by default the one that holds most.")
    ] = None,
    with_draft: Annotated[
        bool, typer.Option("--with-draft", help="The measured ranks hold the draft that the plan counts beside them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say where planned and measured bytes of a rank differ.

    Line by line, the largest difference first.

    Exits with 5 if a rank holds more than was planned at most.

    Example: tonnage explain --plan plan.json --measured measured.json
    """
    from tonnage.checkpoint.io import read_given
    from tonnage.explain import explain as explain_rank
    from tonnage.explain import explain_document, read_planned
    from tonnage.explain import with_draft as drafted
    from tonnage.measure.io import read_measurement_file
    from tonnage.measure.record import MeasurementError
    from tonnage.saved_plan import PLAN_LIMIT_BYTES

    raw = read_given(plan, limit_bytes=PLAN_LIMIT_BYTES, kind=MeasurementError)
    planned = read_planned(raw, plan.name)
    if with_draft:
        planned = drafted(planned)
    explanation = explain_rank(planned, read_measurement_file(measured), rank=rank)
    if as_json:
        emit_json(explain_document(explanation))
    else:
        from tonnage.report.measured import explain_table
        from tonnage.report.tables import render

        emit(render(explain_table(explanation)))
    if explanation.below:
        raise typer.Exit(CONTRADICTED)
