"""The state of the page: what its form holds, as the query of its address and as the request of a plan.

Names are those of the command line's options; every value is text as it was typed, and what is not in an address has
its default. Text that cannot be read stays in the state, so that the form shows what its problem is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from tonnage.errors import Problem, UnitError, one_line, raise_if_any
from tonnage.units import parse_tokens

LONGEST_VALUE = 4096
LONGEST_QUERY = 8192
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
_COUNT_OF_TOKENS = re.compile(r"[0-9]{1,9}[km]?", re.ASCII | re.IGNORECASE)
_PROFILE = re.compile(r"c([0-9]+)-p([0-9]+)", re.ASCII)
_COUNTS = ("tp", "ep", "dcp", "pp", "concurrency", "draft_tokens")
_TOKENS = ("prefill", "context")
_PLAIN = (
    "gpu", "engine", "supply", "utilization", "reserve", "kv_dtype", "kv_bytes", "engine_version", "draft_method",
    "draft_bytes", "convert",
)  # fmt: skip
_CHECKED = ("", "on")
CONFIG_NAME = "config.json"
SOURCES = ("directory", "hub", "config")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the form of the page holds.

    Attributes:
        source: Where the checkpoint is: a listed directory, a hub, or a config the page holds itself.
        checkpoint: The listed directory.
        hub: A model of the hub, ``organisation/name``.
        concurrency: First half of ``--profile``.
        prefill: Second half of ``--profile``.
        eager: ``on`` for no CUDA graphs.
    """

    source: str = "directory"
    checkpoint: str = ""
    hub: str = ""
    gpu: str = "rtx-pro-6000"
    engine: str = "vllm"
    tp: str = "1"
    ep: str = "1"
    dcp: str = "1"
    pp: str = "1"
    concurrency: str = "4"
    prefill: str = "4096"
    context: str = "32768"
    kv_dtype: str = "auto"
    draft: str = ""
    draft_hub: str = ""
    draft_method: str = ""
    draft_tokens: str = ""
    draft_bytes: str = ""
    convert: str = "none"
    supply: str = ""
    reserve: str = ""
    utilization: str = ""
    kv_bytes: str = ""
    engine_version: str = ""
    eager: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """What an address says.

    Attributes:
        plan: What is planned.
        against: What it is held against, if a plan was pinned.
        problems: What of the address cannot be used; nothing is planned where there are any.
    """

    plan: State
    against: State | None = None
    problems: tuple[Problem, ...] = ()


DEFAULTS = State()
NAMES = tuple(field.name for field in fields(State))


def parse_query(query: str) -> PageState:
    """Return what the query of an address says; what it should not say is among the problems.

    >>> parse_query("tp=8&a=tp%3D4").against.tp
    '4'
    >>> str(parse_query("tp=8&rank=1").problems[0])
    'address: no setting of this page; found rank'
    """
    if len(query) > LONGEST_QUERY:
        long = Problem(
            where="address", what="too long", expected=f"{LONGEST_QUERY} characters at most", found=str(len(query))
        )
        return PageState(plan=DEFAULTS, problems=(long,))
    pairs = parse_qsl(query, keep_blank_values=True)
    inner = [value for name, value in pairs if name == "a"]
    plan, problems = _parse(((name, value) for name, value in pairs if name != "a"))
    against, others = _parse(parse_qsl(inner[0], keep_blank_values=True)) if inner else (None, [])
    if len(inner) > 1:
        problems.append(Problem(where="address", what="given twice", found="a"))
    problems += [replace(problem, where=f"address, plan A, {problem.where}") for problem in others]
    return PageState(plan=plan, against=against, problems=tuple(problems))


def _parse(pairs: Iterable[tuple[str, str]]) -> tuple[State, list[Problem]]:
    """Return the state of pairs, and what is wrong with them; the first of several values counts."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for name, value in pairs:
        if name not in NAMES:
            problems.append(Problem(where="address", what="no setting of this page", found=one_line(name)))
        elif name in values:
            problems.append(Problem(where=option(name), what="given twice", found=one_line(value)))
        else:
            values[name] = value[:LONGEST_VALUE].strip()
            problems += _misread(name, value)
    return replace(DEFAULTS, **values), problems


def _misread(name: str, value: str) -> list[Problem]:
    expected = None
    if len(value) > LONGEST_VALUE:
        expected = f"{LONGEST_VALUE} characters at most"
    elif name in _COUNTS and not _COUNT.fullmatch(value.strip()) and value.strip():
        expected = "a whole number"
    elif name in _TOKENS and not _COUNT_OF_TOKENS.fullmatch(value.strip()) and value.strip():
        expected = "a whole number, or such as 32k"
    elif name == "source" and value not in SOURCES:
        expected = ", ".join(SOURCES)
    elif name == "eager" and value not in _CHECKED:
        expected = "on, or nothing"
    if expected is None:
        return []
    return [Problem(where=option(name), what="cannot be read", expected=expected, found=one_line(value[:64]))]


def query_of(page: PageState) -> str:
    """Return the shortest query that says a state; :func:`parse_query` undoes it."""
    return urlencode(said(page))


def said(page: PageState) -> dict[str, str]:
    """Return what an address has to say of a state: what is not as it would be without."""
    pairs = {name: value for name, value in asdict(page.plan).items() if value != getattr(DEFAULTS, name)}
    return pairs if page.against is None else {**pairs, "a": query_of(PageState(plan=page.against))}


def option(name: str) -> str:
    """Return what problems call a setting: the option of the command line.

    >>> option("kv_dtype"), option("prefill"), option("checkpoint")
    ('--kv-dtype', '--profile', 'checkpoint')
    """
    if name in ("source", "checkpoint", "hub"):
        return "checkpoint"
    if name == "draft_hub":
        return "--draft"
    return "--profile" if name in ("concurrency", "prefill") else f"--{name.replace('_', '-')}"


def fields_of(where: str) -> tuple[str, ...]:
    """Return the settings a problem concerns, by its options or its place in a request; none for anything else.

    >>> fields_of("--tp, --pp"), fields_of("--profile"), fields_of("draft.path"), fields_of("config.json")
    (('tp', 'pp'), ('concurrency', 'prefill'), ('draft',), ())
    """
    words = {f"--{word.strip().removeprefix('--').partition('.')[0].replace('_', '-')}" for word in where.split(",")}
    if "--checkpoint" in words:
        return ("checkpoint",)
    return tuple(name for name in NAMES if name not in ("source", "hub", "draft_hub") and option(name) in words)


def request_of(state: State, config: str | None = None) -> dict[str, Any]:
    """Return the request of a plan, as ``POST /api/plan`` takes it.

    Args:
        state: What the form holds.
        config: The text of a config.json, where that is the source.

    Raises:
        UnitError: A checkpoint is not chosen, half a profile is missing, or the context is none.
    """
    raise_if_any(UnitError, _missing(state, config))
    request: dict[str, Any] = {"checkpoint": _checkpoint(state, config)}
    request |= {name: int(getattr(state, name)) for name in ("tp", "ep", "dcp", "pp") if getattr(state, name)}
    if state.context:
        request["context"] = parse_tokens(state.context, where="--context")
    if state.concurrency:
        request["profile"] = f"c{state.concurrency}-p{state.prefill}"
    request |= {name: getattr(state, name) for name in _PLAIN if getattr(state, name) not in ("", "auto", "none")}
    if state.draft or state.draft_hub:
        request["draft"] = {"path": state.draft} if state.draft else {"hub": state.draft_hub}
    if state.draft_tokens:
        request["draft_tokens"] = int(state.draft_tokens)
    if state.eager:
        request["eager"] = True
    return request


def is_chosen(state: State, config: str | None = None) -> bool:
    """Whether it is said what is planned."""
    return bool({"directory": state.checkpoint, "hub": state.hub, "config": config}.get(state.source))


def _missing(state: State, config: str | None) -> Iterator[Problem]:
    if not is_chosen(state, config):
        yield Problem(where="checkpoint", what="none is chosen yet")
    if state.draft and state.draft_hub:
        yield Problem(where="--draft", what="both given", expected="a directory, or a model of the hub")
    if bool(state.concurrency) != bool(state.prefill):
        yield Problem(where="--profile", what="half of it is missing", expected="requests and prefill chunk")


def _checkpoint(state: State, config: str | None) -> dict[str, Any]:
    if state.source == "hub":
        return {"hub": state.hub}
    return {"config": config, "name": CONFIG_NAME} if state.source == "config" else {"path": state.checkpoint}


def suggested(state: State, words: str) -> State:
    """Return the state that a suggestion of a plan leads to.

    >>> suggested(State(ep="1"), "--tp 12 with --convert mxfp8").convert
    'mxfp8'
    >>> suggested(State(), "--profile c3-p4096").concurrency
    '3'

    Raises:
        ValueError: The words are not those of a suggestion.
    """
    if words == "no draft":
        return replace(state, draft="", draft_hub="", draft_method="", draft_tokens="", draft_bytes="")
    said = words.replace(" with ", " ").split()
    changes: dict[str, str] = {}
    for name, value in zip(said[::2], said[1::2], strict=True):
        profile = _PROFILE.fullmatch(value) if name == "--profile" else None
        if profile is not None:
            changes |= {"concurrency": profile[1], "prefill": profile[2]}
        else:
            changes[_setting(name)] = value
    if "tp" in changes:  # as the suggestion was tried
        changes = {"ep": changes["tp"] if int(state.ep or 1) > 1 else "1", "dcp": "1"} | changes
    return replace(state, **changes)


def _setting(name: str) -> str:
    setting = name.removeprefix("--").replace("-", "_")
    if setting not in NAMES:
        raise ValueError(f"no setting {name}")
    return setting
