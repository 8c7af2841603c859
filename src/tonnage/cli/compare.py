"""``tonnage compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.options import Json, emit, emit_json, json_text, note
from tonnage.cli.records import write_records


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, package or prepared directory: the reference.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same model in another form.")],
    end_to_end: Annotated[
        bool,
        typer.Option("--end-to-end", help="Also run both on the CPU (extra torch): perplexity, divergence, agreement."),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="End to end with these prompts, one to a line.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="RECORD", help="Write the document, for `export --compare`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over another file of that name.")] = False,
    as_json: Json = False,
) -> None:
    """Say how far two forms of one model are apart.

    Example: tonnage compare checkpoint prepared --json
    """
    from tonnage.prepare.compiler_room import check_compiler_room

    check_compiler_room()
    from tonnage.compare.comparison import compare_models, comparison_document
    from tonnage.compare.model import open_model
    from tonnage.compare.texts import read_prompts, shipped_prompts

    asked = read_prompts(prompts) if prompts is not None else shipped_prompts()
    answers = None
    with open_model(a) as one, open_model(b) as other:
        comparison = compare_models(one, other)
        if end_to_end or prompts is not None:
            from tonnage.compare.end_to_end import compare_answers

            answers = compare_answers(one, other, asked, note)
    document = comparison_document(comparison, answers)
    if save is not None:
        write_records([save], f"{json_text(document)}\n".encode(), force=force)
    if as_json:
        emit_json(document)
    else:
        from tonnage.report.compared import comparison_table
        from tonnage.report.tables import render

        emit(render(comparison_table(comparison, answers)))
