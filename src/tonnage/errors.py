"""Everything tonnage refuses, as one tree of exceptions.

::

    TonnageError                 exit code 2 unless stated
    ├── UsageError               the words of a command cannot be read
    ├── UnitError                a size or number on the command line cannot be read
    ├── SourceError              where files lie cannot be reached, or answers wrong
    ├── CheckpointError          headers, index or files of a checkpoint are wrong
    ├── ConfigError              config.json, hf_quant_config.json or a manifest is wrong
    ├── RecipeError              a recipe is wrong, or an expression in it cannot be evaluated
    ├── UnknownFamilyError       no recipe answers to this model type
    ├── UnknownFormatError       a dtype or storage format has no rule here
    ├── UnknownGpuError          a GPU name is not in the table
    ├── DriverError              the driver of this machine's GPUs cannot be asked
    ├── PlacementError           a topology cannot work for these tensors
    ├── CreditError              a credit cannot be used or is outside its evidence
    ├── FlagsError               an engine has no command for what is to be served
    ├── ObservationError         a log or what it is compared with cannot be used
    ├── RequestError             a request over HTTP cannot be read
    └── NotServedError           a checkpoint is not among those that are served over HTTP

A refusal carries every problem found, each on one line: where, what, expected, found. An answer that was asked for
(a plan that does not fit) is a value, never an exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fact that is not as it must be.

    Attributes:
        where: File, option or recipe the fact is in.
        what: The rule that is broken, in a few words.
        tensor: Name of the tensor concerned, if one is.
        expected: What would have been accepted.
        found: What was there.
    """

    where: str
    what: str
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        """Return the problem as one printable line."""
        line = self.where if self.tensor is None else f"{self.where}: {self.tensor}"
        line = f"{line}: {self.what}"
        if self.expected is not None:
            line += f"; expected {self.expected}"
        if self.found is not None:
            line += f"; found {self.found}"
        return one_line(without_secrets(line))


class TonnageError(Exception):
    """Base of all refusals; holds the problems, prints one per line."""

    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        """Keep the problems in the order they were found."""
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        """Return the problems, one per line; those beyond the first 40 are counted."""
        lines = [str(problem) for problem in self.problems[:_MOST_LINES]]
        if len(self.problems) > _MOST_LINES:
            lines.append(f"and {len(self.problems) - _MOST_LINES} more problems")
        return "\n".join(lines)


class UsageError(TonnageError):
    """The words of a command cannot be read."""


class UnitError(TonnageError):
    """A size or count cannot be read."""


class SourceError(TonnageError):
    """Where files lie cannot be reached, or answers wrong."""


class CheckpointError(TonnageError):
    """Headers, index or files of a checkpoint are wrong."""


class ConfigError(TonnageError):
    """A configuration file or manifest is wrong."""


class RecipeError(TonnageError):
    """A recipe is wrong, or cannot be evaluated for this config."""


class UnknownFamilyError(TonnageError):
    """No recipe answers to this model type."""


class UnknownFormatError(TonnageError):
    """A dtype or storage format has no rule here."""


class UnknownGpuError(TonnageError):
    """A GPU name is not in the table."""


class DriverError(TonnageError):
    """The driver of this machine's GPUs cannot be asked."""


class PlacementError(TonnageError):
    """A topology cannot work for these tensors."""


class CreditError(TonnageError):
    """A conversion credit cannot be used."""


class FlagsError(TonnageError):
    """An engine has no command for what is to be served."""


class ObservationError(TonnageError):
    """A log, or the plan it is compared with, cannot be used."""


class RequestError(TonnageError):
    """A request over HTTP cannot be read."""


class NotServedError(TonnageError):
    """A checkpoint is not among those that are served over HTTP."""


def raise_if_any(kind: type[TonnageError], problems: Iterable[Problem]) -> None:
    """Raise ``kind`` with all problems if there is at least one."""
    found = tuple(problems)
    if found:
        raise kind(*found)


_CREDENTIALS = re.compile(r"\b((?:https?|s3|gs):/*|hf:(?=[^/@\s]*:))[^/?#\s]*@", re.IGNORECASE)
_QUERY = re.compile(r"\b((?:https?|s3|gs):/*[^?#\s]*[?#])\S+?(?=[:;,]?(?:\s|$))", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Hide what addresses in a text should not have held: users, passwords, and what signs a query.

    >>> without_secrets("https://me:secret@host/x: not a URL")
    'https://***@host/x: not a URL'
    """
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))


_MOST_LINES = 40
_LONGEST_LINE = 400


def one_line(text: str) -> str:
    """Make text from a stranger's file printable on one line: control characters escaped, length bounded."""
    shown = text[: _LONGEST_LINE + 1]
    printable = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown
    )
    return printable if len(printable) <= _LONGEST_LINE else printable[: _LONGEST_LINE - 3] + "..."
