"""The page and its parts, as workers answer for them: made of the answers of the interface and of nothing else.

A part is made anew for every change of the form, by the same templates that make the whole page without scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Meta, Struct

from tonnage.errors import Problem, RequestError, TonnageError
from tonnage.report.bars import size_words
from tonnage.report.changes import changes, signed_size
from tonnage.report.picture import WIDTH, draw_ranks, reach_of
from tonnage.report.saved import read_saved
from tonnage.ui.bodies import LOG_LIMIT_CHARACTERS, FlagsBody
from tonnage.ui.choices import LABELS, choices
from tonnage.ui.messages import BAD_REQUEST, HTML, OK, Answer, Question
from tonnage.ui.planned import read_body
from tonnage.ui.shelf import Shelf
from tonnage.ui.state import DEFAULTS, NAMES, PageState, State, is_chosen, parse_query, query_of, request_of
from tonnage.ui.view import Suggestion, View, empty_view, no_launch, plan_view, problem_view, suggestions
from tonnage.units import gib
from tonnage.version import __version__

NARROW = 400
"""Pixels each of two pictures has, at the least, where they stand side by side."""
GAP = 20

_FOLDED = {
    "draft": ("draft", "draft_hub", "draft_method", "draft_tokens", "draft_bytes"),
    "memory": ("reserve", "utilization", "supply", "kv_bytes", "engine_version", "eager"),
}
"""Settings of the folded parts of the form, which are open where one of them says something."""

Ask = Callable[[Shelf, Question], Answer]
Handler = Callable[[Shelf, bytes], Answer]


class ViewBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a part of the page is made for.

    Attributes:
        query: Of the address of the page.
        config: The text of the config.json it holds, likewise ``a_config`` of the pinned plan.
        width: Pixels a picture may take.
    """

    query: Annotated[str, Meta(max_length=1 << 14)] = ""
    config: str | None = None
    a_config: str | None = None
    width: Annotated[int, Meta(ge=240, le=1600)] = WIDTH


class LogBody(ViewBody, kw_only=True, forbid_unknown_fields=True):
    """The same with a log that is held against the plan."""

    log: Annotated[str, Meta(max_length=LOG_LIMIT_CHARACTERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Makes pages.

    Attributes:
        ask: Answers the questions of the interface.
        templates: What pages are made by.
    """

    ask: Ask
    templates: Environment

    def whole(self, shelf: Shelf, raw: bytes) -> Answer:
        """Return the whole page of an address."""
        page = parse_query(raw.decode("ascii", "replace"))
        shown = self._shown(shelf, page, ViewBody())
        text = self.templates.get_template("page.html").render(
            **shown,
            **self._form(shelf, page, shown["view"]),
            suggestions=self._suggestions(shelf, page, shown["view"]),
            version=__version__,
        )
        return Answer(BAD_REQUEST if page.problems else OK, HTML, text.encode())

    def view(self, shelf: Shelf, raw: bytes) -> Answer:
        """Return the part that is the plan; what would fit is looked for afterwards."""
        body = read_body(raw, ViewBody)
        shown = self._shown(shelf, parse_query(body.query), body)
        return self._part("plan.html", **shown, suggestions=None)

    def suggestions(self, shelf: Shelf, raw: bytes) -> Answer:
        """Return the part that says what would fit."""
        body = read_body(raw, ViewBody)
        page = parse_query(body.query)
        view = self._view(shelf, page.plan, body.config, page.problems)
        return self._part("suggestions.html", suggestions=self._suggestions(shelf, page, view))

    def log(self, shelf: Shelf, raw: bytes) -> Answer:
        """Return the part that holds a log against the plan."""
        body = read_body(raw, LogBody)
        page = parse_query(body.query)
        try:
            plan = self._document(shelf, "plan", request_of(page.plan, body.config))
            observed = self._document(shelf, "observe", {"log": body.log, "plan": plan})
        except TonnageError as error:
            return self._part("log.html", observed=None, problems=problem_view(error.problems, page.plan).problems)
        return self._part("log.html", observed=observed, problems=())

    def report(self, shelf: Shelf, raw: bytes) -> Answer:
        """Return the plan of an address as one file."""
        page = parse_query(raw.decode("ascii", "replace"))
        if page.problems:
            return self.whole(shelf, raw)
        return self.ask(shelf, Question("report", msgspec.json.encode(request_of(page.plan))))

    def _part(self, name: str, **values: Any) -> Answer:
        return Answer(OK, HTML, self.templates.get_template(name).render(**values).encode())

    def _shown(self, shelf: Shelf, page: PageState, body: ViewBody) -> dict[str, Any]:
        """Return what the templates of a plan are given."""
        view = self._view(shelf, page.plan, body.config, page.problems)
        held = page.against if not page.problems else None
        pinned = None if held is None else self._view(shelf, held, body.a_config, ())
        return {
            "view": view,
            "query": query_of(page),
            "malformed": bool(page.problems),
            "title": f"{view.headline} · {view.subject[0]}" if view.subject else f"tonnage: {view.headline}",
            "picture": _picture(view, width=body.width, name="ranks"),
            "launch": self._launch(shelf, page.plan, view),
            "compare": None if pinned is None else _compared(pinned, view, body.width),
        }

    def _view(self, shelf: Shelf, state: State, config: str | None, problems: tuple[Problem, ...]) -> View:
        if problems:
            return problem_view(problems, state)
        if not is_chosen(state, config):
            return empty_view()
        try:
            request = request_of(state, config)
            plan = read_saved(self._document(shelf, "plan", {**request, "growth": True}))
        except TonnageError as error:
            return problem_view(error.problems, state)
        return plan_view(plan, request, gpu=self._gpu_title(shelf, state))

    def _gpu_title(self, shelf: Shelf, state: State) -> str:
        """Return what to call the GPU that is asked for."""
        known = {gpu["name"]: gpu["title"] for gpu in self._document(shelf, "gpus")["gpus"]}
        return known[state.gpu] if state.gpu in known and not state.supply else "the GPU"

    def _suggestions(self, shelf: Shelf, page: PageState, view: View) -> tuple[Suggestion, ...] | None:
        """Return what would fit; ``None`` where nothing is refused."""
        if view.kind != "refused" or view.request is None:
            return None
        plan = self._document(shelf, "plan", {**view.request, "suggestions": True})
        return suggestions(page, plan["suggestions"])

    def _launch(self, shelf: Shelf, state: State, view: View) -> dict[str, Any] | None:
        """Return the launch command of a plan that fits, or in words why it has none."""
        if view.kind != "fits" or view.request is None:
            return None
        if (words := no_launch(state)) is not None:
            return {"words": words, "flags": None}
        asked = {name: value for name, value in view.request.items() if name in FlagsBody.__struct_fields__}
        try:
            found = self._document(shelf, "flags", asked)
        except TonnageError as error:
            problems = problem_view(error.problems, state).problems
            return {"words": " ".join(problem.sentence for problem in problems), "flags": None}
        return {"words": "Read it before you run it.", "flags": found}

    def _form(self, shelf: Shelf, page: PageState, view: View) -> dict[str, Any]:
        """Return what the template of the form is given."""
        state = asdict(page.plan)
        found = {
            name: [problem.sentence for problem in view.problems if name in problem.fields]
            for name in (*NAMES, "config")
        }
        checkpoints = self._document(shelf, "checkpoints")
        sizes = [int(text) if text.isdecimal() else 1 for text in (state["tp"], state["pp"])]
        return {
            "state": state,
            "found": found,
            "defaults": asdict(DEFAULTS),
            "labels": LABELS,
            "choices": choices(checkpoints, self._document(shelf, "gpus")),
            "all_listed": checkpoints["complete"],
            "asks_hub": checkpoints["hub"],
            "gpus": sizes[0] * sizes[1],
            "opened": {part: any(state[name] or found[name] for name in names) for part, names in _FOLDED.items()},
            "pinned": None if page.against is None else query_of(PageState(plan=page.against)),
        }

    def _document(self, shelf: Shelf, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a document of the interface.

        Raises:
            RequestError: It refuses; with its problems.
        """
        answer = self.ask(shelf, Question(name, b"" if body is None else msgspec.json.encode(body)))
        document: dict[str, Any] = msgspec.json.decode(answer.content)
        if answer.status != OK:
            raise RequestError(*(Problem(**problem) for problem in document["problems"]))
        return document


def page_answers(ask: Ask) -> Mapping[str, Handler]:
    """Return the answers that make pages, by the names that routes ask for them.

    Args:
        ask: Answers the questions of the interface.
    """
    templates = Environment(
        loader=PackageLoader("tonnage.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"gib": gib, "size": size_words, "signed": signed_size}
    pages = Pages(ask=ask, templates=templates)
    return {
        "page": pages.whole,
        "view": pages.view,
        "view-suggestions": pages.suggestions,
        "view-log": pages.log,
        "page-report": pages.report,
    }


def _picture(view: View, *, width: int, name: str, reach: int | None = None) -> Markup | None:
    """Return the ranks of a plan as SVG, whose texts are escaped where it is drawn."""
    if view.plan is None:
        return None
    return Markup(draw_ranks(view.plan, width=width, prefix=name, reach=reach))  # noqa: S704 - markup of our own


def _compared(pinned: View, view: View, width: int) -> dict[str, Any]:
    """Return what the template of two plans is given: both to one scale, and differences where both are plans."""
    half = width if width < NARROW * 2 else (width - GAP) // 2
    reach = max((reach_of(one.plan) for one in (pinned, view) if one.plan is not None), default=None)
    return {
        "sides": [
            (letter, name, one, _picture(one, width=half, name=f"side-{letter.lower()}", reach=reach))
            for letter, name, one in (("A", "pinned", pinned), ("B", "this plan", view))
        ],
        "changes": changes(pinned.plan, view.plan) if pinned.plan and view.plan else None,
    }
