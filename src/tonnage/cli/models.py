"""``tonnage models``."""

from __future__ import annotations

from tonnage.cli.options import Json, emit, emit_json


def models(as_json: Json = False) -> None:
    """List the model families there is a recipe for.

    Example: tonnage models
    """
    from tonnage.recipes.loader import families, load_recipe

    if as_json:
        rows = [
            {
                "family": name,
                "model_types": facts["model_types"],
                "title": facts.get("title", ""),
                "source": load_recipe(name).source,
            }
            for name, facts in families().items()
        ]
        emit_json({"schema": "tonnage.models/1", "families": rows})
        return
    from tonnage.report.tables import families_table, render

    emit(render(families_table(families())))
