"""What the page says of a plan: the verdict in words, figures, suggestions and differences, made from its document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tonnage.errors import Problem, one_line
from tonnage.report.bars import Bar, bars, size_words
from tonnage.report.growth import growth_of, growth_words
from tonnage.saved_plan import SavedPlan
from tonnage.ui.choices import LABELS
from tonnage.ui.state import CONFIG_NAME, PageState, State, fields_of, query_of, said, suggested
from tonnage.units import counted, gib

Kind = Literal["fits", "refused", "open", "unusable", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProblem:
    """What is wrong.

    Attributes:
        subject: What the sentence is about: what the form calls its settings, or a file and a tensor of it.
        sentence: What is wrong with that.
        fields: The settings.
    """

    subject: str
    sentence: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change that would fit.

    Attributes:
        words: As the plan has it.
        shown: For people.
        query: Of the page with the change.
        settings: The same as the fields of a form.
    """

    words: str
    shown: str
    query: str
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the page shows of one state.

    Attributes:
        kind: Of verdict.
        headline: The verdict in a few words.
        sentence: The verdict in one sentence.
        problems: Why nothing could be planned.
        plan: The plan, where there is one.
        request: What ``POST /api/plan`` is asked to answer the same.
    """

    kind: Kind
    headline: str
    sentence: str
    problems: tuple[ShownProblem, ...] = ()
    plan: SavedPlan | None = None
    request: Mapping[str, Any] | None = None

    @property
    def says(self) -> str:
        """What a screen reader hears when the plan changes."""
        return f"{self.headline}. {self.sentence}"

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Ranks that hold the same, once."""
        return bars(self.plan) if self.plan is not None else ()

    @property
    def subject(self) -> tuple[str, ...]:
        """Name of the checkpoint, then how it is shared and served."""
        if self.plan is None:
            return ()
        plan, profile = self.plan, self.plan.profile
        served = f"{profile.context_tokens:,} tokens" if profile.context_tokens else ""
        words = (plan.checkpoint.name, plan.checkpoint.family, plan.topology.words, plan.engine, profile.name, served)
        return tuple(word for word in words if word)

    @property
    def figures(self) -> tuple[tuple[str, str, str], ...]:
        """Name, value and unit of what stands under the verdict."""
        return tuple(_figures(self.plan)) if self.plan is not None else ()

    @property
    def growth(self) -> dict[str, Any] | None:
        """What the chart of the cache is drawn from: points, the room there is, and what is planned."""
        found = growth_of(self.plan) if self.plan is not None else None
        if found is None:
            return None
        points = [(*point, nbytes) for point, nbytes in found.nbytes.items()]
        return {"growth": points, "room": found.room, "planned": found.planned}

    @property
    def growth_words(self) -> str:
        """The same in a sentence."""
        found = growth_of(self.plan) if self.plan is not None else None
        return "" if found is None else growth_words(found)


def plan_view(plan: SavedPlan, request: Mapping[str, Any], gpu: str) -> View:
    """Return what the page says of a plan.

    Args:
        plan: As the interface answered.
        request: What it was asked.
        gpu: What to call what supplies the memory.
    """
    rank, supply = plan.binding, plan.supply_bytes
    needs = plan.needed_bytes(rank)
    who = f"Rank {rank.rank}, which needs most," if len(bars(plan)) > 1 else "Every rank"
    need = f"{who if len(plan.ranks) > 1 else 'The GPU'} needs {size_words(needs)}"
    if supply is None or rank.spare_bytes is None:
        sentence = f"{need}. Choose a GPU, and there is a verdict as well."
        return View(kind="open", headline=f"{size_words(needs)} per GPU", sentence=sentence, plan=plan, request=request)
    sentence = f"{need}; {gpu} supplies {size_words(supply)}."
    if not plan.fits:
        short = f": short by {size_words(-rank.spare_bytes)}" if rank.spare_bytes < 0 else ""
        reasons = "" if short else f" {'; '.join(plan.reasons)}."
        return View(kind="refused", headline=f"Refused{short}", sentence=sentence + reasons, plan=plan, request=request)
    tokens = plan.cache.capacity_tokens
    room = f" There is room for {tokens:,} tokens in requests of that length." if tokens else ""
    headline = f"Fits: {size_words(rank.spare_bytes)} to spare"
    return View(kind="fits", headline=headline, sentence=sentence + room, plan=plan, request=request)


def problem_view(problems: Iterable[Problem], state: State, *, request: Mapping[str, Any] | None = None) -> View:
    """Return what the page says where nothing can be planned."""
    shown = tuple(_shown(problem, state) for problem in problems)
    return View(
        kind="unusable",
        headline="This cannot be planned",
        sentence="Every reason is named here, and at the setting it concerns.",
        problems=shown,
        request=request,
    )


def empty_view() -> View:
    """Return what the page says before a checkpoint is chosen."""
    return View(
        kind="empty",
        headline="Choose a model",
        sentence="Take a directory, name a model of the hub, or paste a config.json. The plan follows every change.",
    )


def no_launch(state: State) -> str | None:
    """Return why a plan that fits has no launch command; ``None`` if it may have one."""
    if state.engine == "split":
        return "Prepared ranks are launched by what they are prepared for: choose its engine."
    if not (state.concurrency and state.prefill and state.context):
        return "Say how many requests of which context are served, and there is a command."
    return None


def _shown(problem: Problem, state: State) -> ShownProblem:
    named = _concerned(problem.where, state)
    label = " and ".join(LABELS[name] for name in named) if fields_of(problem.where) else problem.where
    sentence = f"{problem.what[:1].upper()}{problem.what[1:]}"
    sentence += f"; expected {problem.expected}" if problem.expected is not None else ""
    sentence += f"; found {problem.found}" if problem.found is not None else ""
    subject = label if problem.tensor is None else f"{label}: {problem.tensor}"
    return ShownProblem(subject=one_line(subject), sentence=f"{one_line(sentence)}.", fields=named)


def _concerned(where: str, state: State) -> tuple[str, ...]:
    """Return the settings that a problem concerns; of a file of the checkpoint, what it is chosen by."""
    named = fields_of(where)
    chosen = {"directory": state.checkpoint, "hub": state.hub, "config": CONFIG_NAME}.get(state.source, "")
    if named == ("checkpoint",) or (not named and chosen and where.startswith(chosen)):
        return ({"hub": "hub", "config": "config"}.get(state.source, "checkpoint"),)
    return tuple("draft_hub" if name == "draft" and state.draft_hub else name for name in named)


def _figures(plan: SavedPlan) -> Iterator[tuple[str, str, str]]:
    rank, cache = plan.binding, plan.cache
    yield "Needed", gib(plan.needed_bytes(rank), digits=2), "GiB"
    if plan.supply_bytes is not None:
        yield "Supply", gib(plan.supply_bytes, digits=2), "GiB"
    yield "Weights", gib(rank.weights_bytes, digits=2), "GiB"
    if cache.concurrency and cache.context_tokens:
        yield f"Cache, {cache.concurrency:,} x {cache.context_tokens:,}", gib(rank.cache_bytes, digits=2), "GiB"
    if cache.bytes_per_token_per_rank:
        yield "Per token", f"{cache.bytes_per_token_per_rank:,}", "bytes"
    if cache.capacity_tokens:
        yield "Room for", f"{cache.capacity_tokens:,}", "tokens"


def suggestions(page: PageState, words: Sequence[str]) -> tuple[Suggestion, ...]:
    """Return what would fit, as changes of the page."""
    found = []
    for text in words:
        changed = PageState(plan=suggested(page.plan, text), against=page.against)
        settings = tuple(said(changed).items())
        found.append(Suggestion(words=text, shown=_suggested_words(text), query=query_of(changed), settings=settings))
    return tuple(found)


_SHOWN = {
    "--kv-dtype": "KV cache in {}", "--context": "context of {} tokens", "--pp": "{} pipeline stages",
    "--tp": "{} tensor-parallel ranks", "--ep": "whole experts on {} ranks", "--convert": "conversion to {}",
}  # fmt: skip


def _value_words(value: str) -> str:
    """Return a value as people write it.

    >>> _value_words("148480"), _value_words("fp8"), _value_words("mxfp8-experts")
    ('148,480', 'FP8', 'MXFP8, experts as well')
    """
    what, _, rest = value.partition("-")
    return f"{int(value):,}" if value.isdecimal() else what.upper() + (f", {rest} as well" if rest else "")


def _suggested_words(text: str) -> str:
    """Return a suggestion for people: ``--tp 12 with --convert mxfp8`` is two words of the table.

    >>> _suggested_words("--tp 12 with --convert mxfp8")
    '12 tensor-parallel ranks, conversion to MXFP8'
    >>> _suggested_words("--profile c3-p4096")
    '3 requests at once, prefill chunk of 4,096'
    """
    said = text.replace(" with ", " ").split()
    if not text.startswith("--"):
        return text
    shown = []
    for name, value in zip(said[::2], said[1::2], strict=True):
        if name == "--profile":
            concurrency, chunk = value[1:].split("-p")
            shown += [f"{counted(int(concurrency), 'request')} at once", f"prefill chunk of {int(chunk):,}"]
        else:
            shown.append(_SHOWN[name].format(_value_words(value)))
    return ", ".join(shown)
