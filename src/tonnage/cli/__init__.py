"""The ``tonnage`` command: one module per command, each parses options, calls :mod:`tonnage.api` and renders.

Exit codes: 0 yes, 1 bug (a traceback), 2 unusable input, 3 does not fit, 4 verification failed, 5 a measurement
contradicts an estimate. Results on stdout, everything else on stderr.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from tonnage.cli.calibrate import calibrate
from tonnage.cli.calibrations import calibrations
from tonnage.cli.compare import compare
from tonnage.cli.demo import demo
from tonnage.cli.explain import explain
from tonnage.cli.export import export
from tonnage.cli.export_names import export_names
from tonnage.cli.fetch import fetch
from tonnage.cli.fit import fit
from tonnage.cli.flags import flags
from tonnage.cli.gpus import gpus
from tonnage.cli.inspect import inspect
from tonnage.cli.join import join
from tonnage.cli.measure import measure
from tonnage.cli.models import models
from tonnage.cli.observe import observe
from tonnage.cli.options import note
from tonnage.cli.plan import plan
from tonnage.cli.prepare import prepare
from tonnage.cli.report import report
from tonnage.cli.serve import serve
from tonnage.cli.synth import synth
from tonnage.cli.ui import ui
from tonnage.cli.usage import Words
from tonnage.cli.verify import verify
from tonnage.errors import TonnageError, one_line
from tonnage.version import __version__

_OF_EXTRAS = {
    **dict.fromkeys(
        (
            "OpenSSL",
            "blake3",
            "cryptography",
            "google",
            "llvmlite",
            "model_signing",
            "numba",
            "numpy",
            "rfc8785",
            "sigstore",
        ),
        "tonnage[prepare,sign]",
    ),
    **dict.fromkeys(("httpx2", "huggingface_hub"), "tonnage[hub]"),
    **dict.fromkeys(("jinja2", "markupsafe"), "tonnage[html]"),
    "obstore": "tonnage[store]",
    "ray": "tonnage[ray]",
    **dict.fromkeys(("plotly", "starlette", "uvicorn"), "tonnage[ui]"),
}
"""Modules that planning on this machine needs none of, and what installs them."""

_PRINTING = frozenset({"click", "rich", "typer"})
"""Libraries that write results."""

UNUSABLE_INPUT = 2
VERIFICATION_FAILED = 4

_ORDER = (
    "inspect", "plan", "report", "fit", "flags", "synth", "prepare", "export", "export-names", "join", "verify",
    "fetch", "serve", "measure", "explain", "compare", "calibrate", "calibrations", "observe", "ui", "models", "gpus",
    "demo",
)  # fmt: skip
"""As they follow each other in use, then what there is to know and to see."""


class _InOrder(Words):
    """Lists commands and groups of commands in one order."""

    def list_commands(self, ctx: object) -> list[str]:  # noqa: ARG002 - what it is called with
        return sorted(self.commands, key=_ORDER.index)


app = typer.Typer(
    name="tonnage",
    cls=_InOrder,
    help="To the byte, what every GPU will hold of a language model, before anything is downloaded or loaded. "
    "Refusals by message: docs/troubleshooting.md.",
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


COMMANDS = (
    inspect, plan, report, fit, flags, synth, prepare, export, export_names, join, verify, fetch, serve, measure,
    explain, compare, calibrate, observe, ui, models, gpus, demo,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)
app.add_typer(calibrations, name="calibrations")


_NOT_MAPPED = ("failed to map segment", "cannot map zero-fill pages", ": Cannot allocate memory")
"""What the loader of libraries says where there is no memory for one."""

_NO_MEMORY = "memory: not enough for this process"


def main() -> None:
    """Run the command; a refusal is printed on stderr, one line per problem, and exits with 2, or with its own status.

    So is a module of an extra that is not installed. A closed pipe ends the command as it ends any other; output that
    cannot be written is a refusal too, and so is a path that the system refuses, or memory, or a thread.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _open_streams()
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
        _refuse(f"{name} is not installed; it comes with `pip install '{_OF_EXTRAS[name]}'`")
    except (ImportError, MemoryError, SystemError) as error:  # the last by code in C that got no memory
        if isinstance(error, ImportError) and not any(words in str(error) for words in _NOT_MAPPED):
            raise
        _refuse(_NO_MEMORY)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        _refuse("threads: the system lets no more be started")
    except OSError as error:
        if _is_of_output(error):
            sys.stdout = None  # nothing is left to flush at exit
            _refuse(f"cannot write the output; found {error.strerror}")
        _refuse(_refused_by_the_system(error))


def _refused_by_the_system(error: OSError) -> str:
    """Return what to say of a path, or of memory, that the system refuses."""
    named = isinstance(error.filename, str | bytes)
    if error.errno == errno.ENOMEM and not named:
        return _NO_MEMORY
    where = one_line(os.fsdecode(error.filename)) if named else "a file"
    return f"{where}: cannot be used; found {error.strerror or error}"


def _open_streams() -> None:
    """Let what is closed lead nowhere: else the next file opened gets its number, and what is said goes into that."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8"))


def _is_of_output(error: OSError) -> bool:
    """Whether results could not be written: it was raised where they are, here or in the library that prints."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals["__name__"]
    return error.filename is None and (module == __name__ or module.partition(".")[0] in _PRINTING)


def status_of(error: TonnageError) -> int:
    """Return the exit code of a refusal."""
    from tonnage.export.verify import VerifyError

    return VERIFICATION_FAILED if isinstance(error, VerifyError) else UNUSABLE_INPUT


def _refuse(lines: str, status: int = UNUSABLE_INPUT) -> NoReturn:
    for line in lines.splitlines():
        note(f"tonnage: {line}")
    raise SystemExit(status) from None
