"""``tonnage report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.options import here
from tonnage.cli.reports import Against, Force, read_saved_file, write_report


def report(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="Output of `tonnage plan --json`, or plan.json of a package.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", parser=here, metavar="PATH", help="The HTML file to write.")
    ],
    against: Against = None,
    force: Force = False,
) -> None:
    """Write a saved plan as one HTML file.

    Bars, ledger, what changed and where it comes from; needs no network to be read.

    Example: tonnage report plan.json -o report.html
    """
    before = None if against is None else read_saved_file(against)
    write_report(output, read_saved_file(plan), before, force=force)
