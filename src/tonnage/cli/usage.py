"""Words of a command that cannot be read are refused like any other input: one line, where, what, expected, found.

The library of the command line says in several lines what it cannot read. Here that becomes a :class:`Problem`, with
the nearest name that there is, also for those who type the names that engines have for the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from tonnage.errors import Problem, UsageError

_UNREADABLE: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of all that the library refuses; it has no public name in every release."""

OURS = {
    "--model": "SOURCE",
    "--model-path": "SOURCE",
    "--revision": "SOURCE as hf:ORG/NAME@REVISION",
    "--max-model-len": "--context",
    "--context-length": "--context",
    "--max-seq-len": "--context",
    "--max-num-seqs": "--profile cC-pP",
    "--max-running-requests": "--profile cC-pP",
    "--concurrency": "--profile cC-pP",
    "--max-num-batched-tokens": "--profile cC-pP",
    "--chunked-prefill-size": "--profile cC-pP",
    "--gpu-memory-utilization": "--utilization",
    "--mem-fraction-static": "--supply SIZE, of which `tonnage flags` makes it",
    "--tensor-parallel-size": "--tp",
    "--tp-size": "--tp",
    "--gpus": "--tp",
    "--num-gpus": "--tp",
    "--data-parallel-size": "--tp and --pp of one replica",
    "--dp-size": "--tp and --pp of one replica",
    "--dp": "--tp and --pp of one replica",
    "--pipeline-parallel-size": "--pp",
    "--pp-size": "--pp",
    "--expert-parallel-size": "--ep",
    "--ep-size": "--ep",
    "--enable-expert-parallel": "--ep",
    "--decode-context-parallel-size": "--dcp",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-bytes",
    "--dtype": "SOURCE of that dtype",
    "--quantization": "SOURCE that is quantized so, or --convert",
    "--enforce-eager": "--eager",
    "--disable-cuda-graph": "--eager",
    "--speculative-config": "--draft",
    "--speculative-draft-model-path": "--draft",
    "--speculative-algorithm": "--draft-method",
    "--speculative-num-draft-tokens": "--draft-tokens",
    "--served-model-name": "--name",
}
"""Options of vLLM and SGLang, and what stands for them in a command that has it."""

_VALUES = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"Input should be (?P<expected>.+?)(, .*)?",
        r"(Value error, )?(?P<found>'.*'|\".*\"|-?\d+) is not (?P<expected>(one of|a valid|in the range) .+?)\.?",
    )
)
"""How releases of the library word a value that they do not take."""
_TOO_MANY = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)


class Words(TyperGroup):
    """A group of commands that refuses in one line."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        """Read the words before the command."""
        with _refused():
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of the command, and run it."""
        with _refused():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named first.

        Raises:
            UsageError: There is none of this name.
        """
        if self.get_command(ctx, args[0]) is None:
            expected = _nearest(args[0], self.list_commands(ctx)) or f"a command out of `{_called(ctx)} -h`"
            raise UsageError(Problem(where=args[0] or "''", what=f"no command of {_called(ctx)}", expected=expected))
        return super().resolve_command(ctx, args)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no word at all: help, and the library's own way out
            raise
        raise UsageError(_problem(error)) from None


def _problem(error: Any) -> Problem:
    """Return what the library says as a problem; what is not known here in the library's own words."""
    context = getattr(error, "ctx", None)
    called, usage = ("tonnage", None) if context is None else (_called(context), _usage(context))
    name, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if name is not None and hasattr(error, "possibilities"):
        return Problem(where=name, what=f"no option of {called}", expected=_option(name, context) or usage)
    if name is not None:
        return Problem(where=name, what="takes no value" if "not take" in error.message else "needs a value")
    if param is None:
        found = _TOO_MANY.fullmatch(error.message)
        what = "too many words" if found else _said(error)
        return Problem(where=called, what=what, expected=usage, found=found and found[1])
    is_option = param.param_type_name == "option"
    where = max(param.opts, key=len) if is_option else param.metavar or param.name
    if type(error).__name__ == "MissingParameter":
        expected = f"{where} {param.metavar or param.name.upper()}" if is_option else usage
        return Problem(where=where, what="missing", expected=expected)
    return _bad_value(where, error)


def _bad_value(where: str, error: Any) -> Problem:
    found = next((match for pattern in _VALUES if (match := pattern.fullmatch(error.message))), None)
    if found is None:
        return Problem(where=where, what=_said(error))
    value = found.groupdict().get("found")
    if value is None and hasattr(error.__cause__, "errors"):
        value = repr(error.__cause__.errors()[0]["input"])
    return Problem(where=where, what="cannot be used", expected=found["expected"], found=value)


def _option(name: str, context: Any) -> str | None:
    """Return the option of this command that is meant, if one is near."""
    if context is None:
        return None
    if any(name in param.opts for command in _commands(context) for param in command.params):
        return "it behind the command"
    params = context.command.get_params(context)
    options = [option for param in params for option in param.opts if option.startswith("-")]
    metavars = [param.metavar for param in params if param.metavar]
    ours = _of_engine(name, {*options, *metavars}, alike=1)
    if ours:
        return ours
    near = _nearest(name, options) or _of_engine(name, {*options, *metavars}, alike=0.8)
    if any(metavar.startswith("[--") for metavar in metavars):
        return f"{f'{near}, or ' if near else ''}-- before what is for the engine"
    return near


def _of_engine(name: str, has: Iterable[str], *, alike: float) -> str | None:
    """Return what stands here for an option of an engine that is spelled so, or for 1 > ``alike`` much like it."""
    theirs = get_close_matches(name.replace("_", "-"), OURS, n=1, cutoff=alike)
    ours = OURS[theirs[0]] if theirs else ""
    return ours if ours.partition(" ")[0] in has else None


def _commands(context: Any) -> Iterable[Any]:
    return getattr(context.command, "commands", {}).values()


def _nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the names that are near; their dashes, which all have, make none of them nearer."""
    bare = {name.lstrip("-"): name for name in sorted(known)}
    return " or ".join(bare[name] for name in get_close_matches(word.lstrip("-"), bare, n=3)) or None


def _called(context: Any) -> str:
    """Return the words that call a command, however the process was started."""
    names: list[str] = [] if context.parent is None else [_called(context.parent), context.info_name]
    return " ".join(names) or "tonnage"


def _usage(context: Any) -> str:
    called = _called(context)
    return f"{called} {' '.join(context.command.collect_usage_pieces(context))}; see {called} -h"


def _said(error: Any) -> str:
    text: str = error.message.rstrip(".")
    return text[:1].lower() + text[1:]
