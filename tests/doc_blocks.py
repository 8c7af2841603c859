"""Command blocks of the pages: found, run in a scratch directory, and their shown output compared or written anew.

The line above a fence says what becomes of it::

    <!-- run in SESSION with FIXTURE, FIXTURE -->    run; blocks of one session of a page share a directory
    <!-- not run: REASON -->                         it needs what a test has not got
    <!-- run by PATH -->                             another test of this repository reads the page and runs it

``python tests/doc_blocks.py`` writes what the commands print now into the pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

from exl3_samples import rehearse_exl3
from samples import LLAMA, prepare_small, rehearse, write_key
from tonnage.cli import main

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = frozenset({"bash", "console", "python", "sh", "shell"})
MARK = re.compile(
    r"<!-- (?:run in (?P<session>\w+)(?: with (?P<fixtures>[\w, -]+))?|not run: (?P<reason>.+)|run by (?P<by>\S+)) -->"
)
FENCE = re.compile(r"^ *```(\w*)$")
VARYING = re.compile(r"\b[0-9a-f]{40,}\b|\b[\d.]+ s\b|\b[\d,.]+ [MG]B/s")
"""What no two runs print alike: digests of what has a new key, and seconds."""
_BYTES = re.compile(r"\b\d{1,3}(?:,\d{3})+\b")
_SIGNATURE_SLACK = 12
NO_SHELL = re.compile(r"[^|<>&;$`*~()]*")
DATE = "1796000000"
"""2026-11-30, of names with a date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page, relative to the repository.
        line: Number of its first line, counted from one.
        language: Word behind the fence.
        lines: What stands between the fences.
        mark: What the line above says of it.
    """

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    mark: re.Match[str] | None

    @property
    def fixtures(self) -> tuple[str, ...]:
        """Names of what its session begins with."""
        named = self.mark["fixtures"] if self.mark else None
        return tuple(re.split(r",\s*", named)) if named else ()


def pages() -> tuple[Path, ...]:
    """Return every page that has commands."""
    return tuple(sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))))


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that hold commands."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        end = number
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            if fence[1] in LANGUAGES:
                above = lines[number - 1].strip() if number else ""
                yield Block(
                    page=page.relative_to(ROOT).as_posix(),
                    line=number + 2,
                    language=fence[1],
                    lines=tuple(lines[number + 1 : end]),
                    mark=MARK.fullmatch(above),
                )
        number = end + 1


@dataclass(slots=True)
class Session:
    """A scratch directory in which blocks are run one after the other."""

    folder: Path
    status: int = 0
    made: set[str] = field(default_factory=set)

    def run(self, block: Block) -> tuple[str, ...]:
        """Run a block and return it with the output its commands have now.

        Output is only shown where the page shows it, in blocks of language ``console``.
        """
        for fixture in block.fixtures:
            if fixture not in self.made:
                FIXTURES[fixture](self.folder)
                self.made.add(fixture)
        with contextlib.chdir(self.folder), mock.patch.dict(os.environ, _environment(self.folder)):
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile("\n".join(block.lines), block.page, "exec"), {"__name__": "__main__"})  # noqa: S102
                return block.lines
            return tuple(self._lines(block))

    def _lines(self, block: Block) -> Iterator[str]:
        steps = list(_steps(block))
        for at, (shown, command, expected) in enumerate(steps):
            printed = self._execute(command)
            asked = at + 1 < len(steps) and steps[at + 1][1] == "echo $?"
            if self.status and not asked:
                raise AssertionError(f"{block.page}:{block.line}: {command}: {self.status}\n" + "\n".join(printed))
            yield from shown
            if block.language == "console":
                yield from expected if alike(command, expected, printed) else printed

    def _execute(self, command: str) -> list[str]:
        if not command:
            return []
        if command == "echo $?":
            printed, self.status = f"{self.status}\n", 0
        elif command.startswith("tonnage ") and NO_SHELL.fullmatch(command):
            ended = run_words(*shlex.split(command)[1:])
            printed, self.status = ended.out + (ended.err if ended.status else ""), ended.status
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-eu", "-c", command],
                env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            printed, self.status = done.stdout + (done.stderr if done.returncode else ""), done.returncode
        return [line.rstrip() for line in printed.splitlines()]


def _environment(folder: Path) -> dict[str, str]:
    """Keep what a user of this machine has away, and let the date be one."""
    return {"HOME": str(folder), "XDG_DATA_HOME": str(folder / ".data"), "SOURCE_DATE_EPOCH": DATE}


def _steps(block: Block) -> Iterator[tuple[list[str], str, list[str]]]:
    """Yield lines as they stand, the command they are, and what the page shows as its output."""
    shown: list[str] = []
    expected: list[str] = []
    command = ""
    prompt = "$ " if block.language == "console" else ""
    for line in block.lines:
        continued = command.endswith("\\")
        if continued or line.startswith(prompt):
            if command and not continued:
                yield shown, command, expected
                shown, command, expected = [], "", []
            text = line if continued else line.removeprefix(prompt)
            shown.append(line)
            command = command[:-1] * continued + re.sub(r"(^|\s+)#.*$", "", text).strip()
        else:
            expected.append(line)
    yield shown, command, expected


def alike(command: str, expected: list[str], printed: list[str]) -> bool:
    """Say whether what is shown and what was printed differ in nothing but what no two runs print alike.

    Signatures are of several lengths, so that what commands say of signed files differs by a few bytes.
    """
    slack = _SIGNATURE_SLACK if command.startswith(("tonnage export ", "tonnage verify ")) else 0
    sides = [[VARYING.sub("~", line) for line in lines] for lines in (expected, printed)]
    shown, now = ([_BYTES.sub("N", line) for line in lines] for lines in sides)
    if shown != now:
        return False
    before, after = ([int(n.replace(",", "")) for line in lines for n in _BYTES.findall(line)] for lines in sides)
    return all(abs(one - other) <= slack for one, other in zip(before, after, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command said, and its exit code."""

    status: int
    out: str
    err: str


def run_words(*words: object) -> Done:
    """Run the command here, where everything is imported."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("tonnage.cli.signal.signal"),
        mock.patch.object(sys, "argv", ["tonnage", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            status = 0
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return Done(status=status, out=out.getvalue(), err=err.getvalue())


def run_page(page: Path, scratch: Path) -> str:
    """Run all blocks of a page that are to be run; return the page with the output they have now."""
    lines = page.read_text().splitlines()
    sessions: dict[str, Session] = {}
    written = []
    for block in blocks(page):
        if block.mark is not None and block.mark["session"] is not None:
            name = block.mark["session"]
            if name not in sessions:
                (scratch / name).mkdir()
                sessions[name] = Session(folder=scratch / name)
            written.append((block, sessions[name].run(block)))
    for block, now in reversed(written):
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = now
    return "\n".join(lines) + "\n"


# --- what sessions begin with ---------------------------------------------------------------------------------------


@cache
def _kept() -> Path:
    """Return a directory for what is made once and copied; it lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="tonnage-pages-")
    _kept_folders.append(folder)
    return Path(folder.name)


_kept_folders: list[tempfile.TemporaryDirectory[str]] = []


def _clone(folder: Path) -> None:
    """The repository's own configs and logs."""
    for name in ("src", "tests"):
        (folder / name).symlink_to(ROOT / name)


def _checkpoint(folder: Path) -> None:
    """A small Llama in BF16."""
    _copy(folder / "checkpoint", write_llama)


def write_llama(path: Path, **fields: object) -> None:
    """Write a small Llama with random weights and a tokenizer's file."""
    rehearse(path, {**LLAMA, **fields})
    (path / "tokenizer.json").write_text("{}")


def _copy(path: Path, make: Callable[[Path], object]) -> None:
    kept = _kept() / path.name
    if not kept.exists():
        make(kept)
    shutil.copytree(kept, path)


def _prepared(folder: Path) -> None:
    """The same, prepared for two ranks, its projections converted."""
    _copy(folder / "prepared", lambda path: prepare_small(_kept() / "source", path))


FIXTURES: dict[str, Callable[[Path], None]] = {
    "checkpoint": _checkpoint,
    "clone": _clone,
    "exl3": lambda folder: rehearse_exl3(folder / "GLM-5.2-EXL3") and None,
    "key": lambda folder: write_key(folder) and None,
    "prepared": _prepared,
    "qwen": lambda folder: write_llama(folder / "Qwen3-8B", model_type="qwen3", head_dim=64),
}


if __name__ == "__main__":
    for changed in pages():
        with tempfile.TemporaryDirectory(prefix="tonnage-pages-") as place:
            changed.write_text(run_page(changed, Path(place)))
