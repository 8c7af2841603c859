"""What is answered under which path: by which answer of a worker, and how it is described to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from tonnage.ui.bodies import FitBody, FlagsBody, ObserveBody, PlanBody, RegionsBody

Method = Literal["GET", "POST"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A path that a worker answers.

    Attributes:
        method: Of HTTP. A GET is asked with its query, a POST with its body, which is JSON.
        path: Of the address.
        name: Of the answer, in :data:`tonnage.ui.answers.ANSWERS` or :func:`tonnage.ui.pages.page_answers`.
        body: What is posted, where it is described.
        title: What it does, where it is described; routes of the page itself are not.
    """

    method: Method
    path: str
    name: str
    body: type[Struct] | None = None
    title: str = ""


API = (
    Answered(method="POST", path="/api/plan", name="plan", body=PlanBody, title="What every rank will hold"),
    Answered(method="POST", path="/api/fit", name="fit", body=FitBody, title="What context and how many requests fit"),
    Answered(
        method="POST", path="/api/regions", name="regions", body=RegionsBody, title="Which profiles fit, as a grid"
    ),
    Answered(method="POST", path="/api/flags", name="flags", body=FlagsBody, title="The launch command of a plan"),
    Answered(method="POST", path="/api/observe", name="observe", body=ObserveBody, title="An engine log beside a plan"),
    Answered(method="POST", path="/api/report", name="report", body=PlanBody, title="A plan as one HTML file"),
    Answered(method="GET", path="/api/checkpoints", name="checkpoints", title="The checkpoints that are served"),
    Answered(method="GET", path="/api/gpus", name="gpus", title="The GPUs that are known"),
    Answered(method="GET", path="/api/models", name="models", title="The model families that are known"),
)
"""The interface for programs, in the order it is described."""

PAGES = (
    Answered(method="GET", path="/", name="page"),
    Answered(method="GET", path="/report", name="page-report"),
    Answered(method="POST", path="/view", name="view"),
    Answered(method="POST", path="/view/suggestions", name="view-suggestions"),
    Answered(method="POST", path="/view/log", name="view-log"),
)
"""The page and its parts."""
