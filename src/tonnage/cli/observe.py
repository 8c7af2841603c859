"""``tonnage observe``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli.options import Json, emit, emit_json, note

CONTRADICTED = 5


def observe(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A start-up log of vLLM, SGLang or TabbyAPI; - is stdin.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="What `tonnage plan --json` printed for it.")] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the figures as a record to fit calibrations to; a new file.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU out of `tonnage gpus`, for the record: logs do not say it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what an engine log says it holds, beside a plan.

    Example: tonnage observe serve.log --plan plan.json
    """
    from tonnage.memory.supply import find_gpu
    from tonnage.observe.io import observe_log
    from tonnage.report.observation import excesses, observation_record, observe_document

    slug = None if gpu is None else find_gpu(gpu).slug
    observed = observe_log(log, plan, gpu=slug)
    if save is not None:
        save_record(save, observation_record(observed, gpu=slug))
    if as_json:
        emit_json(observe_document(observed, gpu=slug))
        for line in excesses(observed):
            note(f"tonnage: {line}")
    else:
        from tonnage.report.observation import observation_table
        from tonnage.report.tables import render

        emit(render(observation_table(observed)))
    if observed.exceeds:
        raise typer.Exit(CONTRADICTED)


def check_new(path: Path) -> None:
    """Refuse to write a record where something is: it is somebody's measurement.

    Raises:
        ObservationError: Something is there.
    """
    from tonnage.errors import ObservationError, Problem

    if path.exists() or path.is_symlink():
        raise ObservationError(Problem(where=str(path), what="already there", expected="a new file"))


def save_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record whole, or not at all, and over nothing.

    Raises:
        TonnageError: Something is there, or it cannot be written.
    """
    from tonnage.cli.records import write_records

    check_new(path)
    content = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    write_records([path], content.encode(), force=False)
