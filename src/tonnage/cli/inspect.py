"""``tonnage inspect``."""

from __future__ import annotations

from tonnage.cli.options import Json, Offline, Source, emit, emit_json


def inspect(source: Source, offline: Offline = False, as_json: Json = False) -> None:
    """Say what a checkpoint holds by role, format and dtype.

    What is missing, unexpected or misshapen is named.

    Example: tonnage inspect ./Llama-3.1-8B
    """
    from tonnage.cli.cut import open_cut
    from tonnage.cli.opening import Opening
    from tonnage.inspection import inspect_assignment
    from tonnage.report.documents import inspect_document

    opening = Opening(offline=offline)
    checkpoint = open_cut(source).checkpoint or opening.checkpoint(source)
    inspection = inspect_assignment(checkpoint.assignment)
    if as_json:
        emit_json(opening.document(inspect_document(checkpoint, inspection)))
        return
    from tonnage.report.tables import inspect_table, render

    emit(render(inspect_table(checkpoint, inspection)))
