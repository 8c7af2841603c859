"""The command for any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.errors import FlagsError, Problem, one_line
from tonnage.flags.sglang import sglang_command
from tonnage.flags.tabbyapi import tabbyapi_command
from tonnage.flags.vllm import vllm_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tonnage.flags.values import ServeCommand, ServePlan

_COMMANDS: dict[str, Callable[[ServePlan], ServeCommand]] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
    "exllamav3": tabbyapi_command,
}


def serve_command(serve: ServePlan) -> ServeCommand:
    """Return the command that serves a plan. Whether the plan fits is for the caller to know.

    Raises:
        FlagsError: The engine is no server, or has no command for this; all problems at once.
    """
    command = _COMMANDS.get(serve.engine)
    if command is None:
        raise FlagsError(
            Problem(where="--engine", what="no server", expected=", ".join(_COMMANDS), found=one_line(serve.engine))
        )
    return command(serve)
