"""``tonnage models``."""

from __future__ import annotations

from tonnage.cli.options import Json, emit, emit_json


def models(as_json: Json = False) -> None:
    """List the model families there is a recipe for.

    Example: tonnage models
    """
    if as_json:
        from tonnage.report.documents import models_document

        emit_json(models_document())
        return
    from tonnage.recipes.loader import families
    from tonnage.report.tables import families_table, render

    emit(render(families_table(families())))
