"""Plan documents that options name, and the report that is written of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import note

if TYPE_CHECKING:
    from tonnage.saved_plan import SavedPlan

Against = Annotated[
    Path | None,
    typer.Option("--against", metavar="PLAN", help="Output of `tonnage plan --json`: say what changed since."),
]
Force = Annotated[bool, typer.Option("--force", help="Write over another file of that name.")]
_UNTYPED = frozenset({"source", "as_json", "html", "against", "plain", "force"})
"""Parameters that say nothing about what is planned."""


def typed_options(context: typer.Context) -> tuple[str, ...]:
    """Return the options that were typed, in the order of ``--help``; of a path its last part."""
    found = []
    for parameter in context.command.params:
        name = parameter.name
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _UNTYPED:
            continue
        value, option = context.params[name], parameter.opts[-1]
        if name in ("draft", "calibration"):
            value = Path(value).name
        found.append(option if value is True else f"{option} {value}")
    return tuple(found)


def read_saved_file(path: Path) -> SavedPlan:
    """Return a plan that was saved.

    Raises:
        ObservationError: The file is none, or cannot be read.
    """
    from tonnage.checkpoint.io import read_given
    from tonnage.checkpoint.strict_json import parse_object
    from tonnage.errors import ObservationError
    from tonnage.report.saved import read_saved
    from tonnage.saved_plan import PLAN_LIMIT_BYTES

    raw = read_given(path, limit_bytes=PLAN_LIMIT_BYTES, kind=ObservationError)
    document = parse_object(raw, where=path.name, kind=ObservationError)
    return read_saved(document, where=path.name)


def write_report(path: Path, plan: SavedPlan, before: SavedPlan | None, *, force: bool) -> None:
    """Write a plan as one HTML file, whole or not at all, and say where.

    Raises:
        PrepareError: Something else is there, or it cannot be written.
    """
    from tonnage.cli.records import write_records
    from tonnage.errors import one_line
    from tonnage.report.page import plan_page

    write_records([path], plan_page(plan, before).encode(), force=force)
    note(f"report: {one_line(str(path))}")
