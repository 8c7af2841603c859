"""The ``tonnage`` command: one module per command, each parses options, calls :mod:`tonnage.api` and renders.

Exit codes: 0 yes, 1 bug (a traceback), 2 unusable input, 3 does not fit, 4 verification failed. Results on
stdout, everything else on stderr.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer

from tonnage.cli.calibrate import calibrate
from tonnage.cli.calibrations import calibrations
from tonnage.cli.demo import demo
from tonnage.cli.explain import explain
from tonnage.cli.export import export
from tonnage.cli.gpus import gpus
from tonnage.cli.inspect import inspect
from tonnage.cli.measure import measure
from tonnage.cli.models import models
from tonnage.cli.plan import plan
from tonnage.cli.prepare import prepare
from tonnage.cli.synth import synth
from tonnage.cli.verify import verify
from tonnage.errors import TonnageError
from tonnage.version import __version__

_OF_EXTRAS = frozenset({"blake3", "cryptography", "model_signing", "numba", "numpy", "OpenSSL", "rfc8785"})
"""Modules that planning needs none of."""

UNUSABLE_INPUT = 2
VERIFICATION_FAILED = 4

app = typer.Typer(
    name="tonnage",
    help="To the byte, what every GPU will hold of a language model, before anything is downloaded or loaded.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tonnage {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (inspect, plan, prepare, export, verify, measure, calibrate, explain, models, gpus, synth, demo):
    app.command()(command)
app.add_typer(calibrations, name="calibrations")


def main() -> None:
    """Run the command; a refusal is printed on stderr, one line per problem, and exits with 2, or with its own status.

    So is a module of an extra that is not installed. A closed pipe ends the command as it ends any other; output that
    cannot be written is a refusal too.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except TonnageError as error:
        _refuse(str(error), status_of(error))
    except ModuleNotFoundError as error:
        if (name := (error.name or "").partition(".")[0]) not in _OF_EXTRAS:
            raise
        _refuse(f"{name} is not installed; it comes with `pip install 'tonnage[prepare,sign]'`")
    except OSError as error:
        sys.stdout = None  # nothing is left to flush at exit
        _refuse(f"cannot write the output; found {error.strerror}")


def status_of(error: TonnageError) -> int:
    """Return the exit code of a refusal."""
    from tonnage.export.verify import VerifyError

    return VERIFICATION_FAILED if isinstance(error, VerifyError) else UNUSABLE_INPUT


def _refuse(lines: str, status: int = UNUSABLE_INPUT) -> NoReturn:
    for line in lines.splitlines():
        print(f"tonnage: {line}", file=sys.stderr)  # noqa: T201 - the command's own output
    raise SystemExit(status) from None
