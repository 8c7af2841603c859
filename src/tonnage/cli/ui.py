"""``tonnage ui``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.options import emit, note

_MOST_WORKERS = 4


def ui(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIRECTORY]...", help="Where checkpoints and configs may be read; nothing else is."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 is any that is free.")] = 8765,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name it is reached by, where --host is not this machine; repeatable."),
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Let it read configs and headers from the hub.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=64, help="Processes that plan; by default the cores, up to 4.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser.")] = False,
) -> None:
    """Show the planner as a page, until interrupted.

    On this machine alone. The page begins with engine vllm, as serve does. The same address answers programs, with the
    defaults of the commands: see /api/openapi.json.

    Example: tonnage ui models --no-browser
    """
    if sys.stderr.isatty():  # what serves takes seconds to import and to start
        note("starting; the address follows")
    from tonnage.ui.checkpoints import check_directories
    from tonnage.ui.serve import address_of, is_loopback, listen, open_browser, run, served_hosts
    from tonnage.ui.settings import Settings

    settings = Settings(
        directories=check_directories(directories or ()),
        hosts=served_hosts(host, tuple(allow_host or ())),
        hub=hub,
        workers=workers or min(os.cpu_count() or 1, _MOST_WORKERS),
    )
    listening = listen(host, port)
    address = address_of(listening, settings.hosts)
    if not is_loopback(host):
        note(f"warning: whoever reaches {address} reads the configs in these directories and makes this machine plan")

    def started() -> None:
        emit(address)
        if not no_browser:
            open_browser(address)

    run(settings, listening, started)
