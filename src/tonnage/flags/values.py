"""What is to be served, as values, and the command that serves it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.errors import FlagsError, Problem, UnknownFormatError, one_line
from tonnage.memory.budget import floor_utilization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from fractions import Fraction

    from tonnage.draft import DraftMethod
    from tonnage.topology import Engine, Topology

Layout = Literal["hf", "tp"]
Version = tuple[int, ...]
WITHOUT_WEIGHTS: tuple[DraftMethod, ...] = ("mtp", "ngram", "suffix")
"""Methods that read no checkpoint of their own."""
MOST = 1 << 40
LONGEST_NAME = 1024
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)(?:[.+a-z-].{0,80})?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """How tokens are drafted.

    Attributes:
        method: Which method.
        tokens: Tokens proposed per step.
        model: Path or hub name of the draft; ``None`` for methods that read none.
    """

    method: DraftMethod
    tokens: int
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """What a command is wanted for: a plan's figures, nothing left to the engine that memory depends on.

    Attributes:
        engine: Which engine; exllamav3 is served by TabbyAPI.
        release: Its version; ``None`` for the newest known. TabbyAPI has none.
        model: Path or hub name.
        topology: Parallel sizes.
        context_tokens: Longest context.
        concurrency: Requests at once.
        prefill_chunk_tokens: Tokens of one prefill step.
        kv_dtype: A precision out of ``--kv-dtype``, or the engine's own word.
        kv_bytes: Cache in bytes: vLLM.
        kv_tokens: Cache in tokens: SGLang, TabbyAPI.
        fraction: Share of the GPU's total (vLLM) or of what is free before weights (SGLang).
        total_bytes: Total of the GPU, for the rules of the fraction.
        free_bytes: Free on it when the engine looks first, for the same.
        page_tokens: Tokens of a page, where the plan depends on it.
        state_slots: Slots of recurrent states: SGLang.
        draft: How tokens are drafted.
        layout: Of what is served: ``tp`` is read rank by rank, by the plug-in in vLLM.
        public_key: Who must have signed it; the plug-in verifies every rank. vLLM.
        quantization: What the engine is told, where its config does not say it.
        eager: No CUDA graphs.
    """

    engine: Engine
    release: str | None = None
    model: str
    topology: Topology
    context_tokens: int
    concurrency: int
    prefill_chunk_tokens: int
    kv_dtype: str = "auto"
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    fraction: Fraction | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    page_tokens: int | None = None
    state_slots: int | None = None
    draft: DraftPlan | None = None
    layout: Layout = "hf"
    public_key: str | None = None
    quantization: str | None = None
    eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A file the command reads: its name and lines."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """A command, word by word.

    Attributes:
        words: Program and arguments, as a process gets them.
        files: Files to write beside it first.
        notes: What was changed against the plan, and why.
    """

    words: tuple[str, ...]
    files: tuple[ConfigFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def shell(self) -> str:
        """The command for a POSIX shell, every word quoted that needs it."""
        return shlex.join(self.words)


def parse_version(text: str | None, newest: Version, oldest: Version, engine: str) -> Version:
    """Return the release a command is written for.

    Raises:
        FlagsError: It is no version, or older than what the flags are known for.
    """
    if text is None:
        return newest
    match = _VERSION.fullmatch(text.strip())
    version = tuple(int(part) for part in match.groups() if part is not None) if match else ()
    if version >= oldest:
        return version
    known = ".".join(map(str, oldest))
    raise FlagsError(
        Problem(where=f"{engine} release", what="no flags are known for it", expected=f"{known} or later", found=text)
    )


def common_problems(serve: ServePlan) -> Iterator[Problem]:
    """Yield what no engine could serve."""
    yield from _name_problems("model", serve.model)
    counts = {
        "context": serve.context_tokens, "concurrency": serve.concurrency, "prefill chunk": serve.prefill_chunk_tokens,
        "cache bytes": serve.kv_bytes, "cache tokens": serve.kv_tokens,
        "page tokens": serve.page_tokens, "GPU total": serve.total_bytes,
        "free memory": serve.free_bytes,
    }  # fmt: skip
    for name, count in counts.items():
        if count is not None and not 1 <= count <= MOST:
            yield Problem(where=name, what="out of range", expected=f"1..{MOST}", found=str(count))
    if serve.fraction is not None and not 0 < floor_utilization(serve.fraction) <= 1:
        found = str(serve.fraction)
        yield Problem(where="memory fraction", what="out of range", expected="0.0001 to 1", found=found)
    if (serve.total_bytes or MOST) < (serve.free_bytes or 0):
        yield Problem(where="free memory", what="more than the GPU has", found=str(serve.free_bytes))
    if serve.layout != "hf" and serve.engine != "vllm":
        yield Problem(
            where="layout", what="an engine reads standard checkpoints", expected="prepared with --layout hf",
            found=one_line(serve.layout),
        )  # fmt: skip
    if serve.public_key is not None and serve.layout != "tp":
        yield Problem(where="public key", what="only a load by ranks verifies what it reads", expected="layout tp")
    if serve.draft is not None:
        yield from _draft_problems(serve.draft)


def unused(serve: ServePlan, engine: str, *names: str) -> Iterator[Problem]:
    """Yield what is stated although the engine has no flag for it."""
    for name in names:
        if getattr(serve, name) not in (None, False):
            yield Problem(where=name.replace("_", " "), what=f"{engine} has no flag for it")


def kv_dtype_problems(serve: ServePlan, read: Callable[[str], object]) -> Iterator[Problem]:
    """Yield why the dtype of the cache is none an engine reads."""
    try:
        read(serve.kv_dtype)
    except UnknownFormatError as error:
        yield from error.problems


def choice_problem(where: str, found: str, known: tuple[str, ...] | frozenset[str]) -> Problem:
    """Return the refusal of a word an engine does not know."""
    return Problem(where=where, what="unknown to the engine", expected=", ".join(sorted(known)), found=one_line(found))


def _draft_problems(draft: DraftPlan) -> Iterator[Problem]:
    if not 1 <= draft.tokens <= MOST:
        yield Problem(where="draft tokens", what="out of range", expected=f"1..{MOST}", found=str(draft.tokens))
    if draft.model is not None:
        yield from _name_problems("draft model", draft.model)
        if draft.method in WITHOUT_WEIGHTS:
            yield Problem(where="draft model", what=f"{draft.method} reads none", found=one_line(draft.model))
    elif draft.method not in WITHOUT_WEIGHTS:
        yield Problem(where="draft model", what=f"{draft.method} needs one")


def _name_problems(where: str, name: str) -> Iterator[Problem]:
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        yield Problem(where=where, what="not a name", expected="printable text", found=repr(name[:LONGEST_NAME]))
    elif name.startswith("-"):
        yield Problem(where=where, what="would be read as an option", expected=f"./{name}", found=name)
