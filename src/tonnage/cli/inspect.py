"""``tonnage inspect``."""

from __future__ import annotations

from tonnage.cli.options import Json, Source, emit, emit_json


def inspect(source: Source, as_json: Json = False) -> None:
    """Say what a checkpoint holds by role, format and dtype.

    What is missing, unexpected or misshapen is named.

    Example: tonnage inspect ./Llama-3.1-8B
    """
    from tonnage.api import open_checkpoint
    from tonnage.inspection import inspect_assignment
    from tonnage.report.documents import inspect_document

    checkpoint = open_checkpoint(source)
    inspection = inspect_assignment(checkpoint.assignment)
    if as_json:
        emit_json(inspect_document(checkpoint, inspection))
        return
    from tonnage.report.tables import inspect_table, render

    emit(render(inspect_table(checkpoint, inspection)))
