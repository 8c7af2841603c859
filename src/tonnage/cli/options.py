"""Options that mean the same in every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A checkpoint directory, or a config.json (planned from its recipe alone)."),
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel size.")]
Ep = Annotated[int, typer.Option("--ep", help="Expert-parallel size: 1, or the tensor-parallel size.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline-parallel size.")]
Json = Annotated[bool, typer.Option("--json", help="Print a versioned JSON document instead of a table.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Directory to write; must not exist, or be empty.")]


def emit(text: str) -> None:
    """Print a result on stdout."""
    typer.echo(text.rstrip("\n"))


def emit_json(document: dict[str, Any]) -> None:
    """Print a document on stdout."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Print progress or a warning on stderr."""
    typer.echo(text, err=True)
