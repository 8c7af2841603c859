"""Answers to what is asked over HTTP: the bytes of a request in, a document out; no request is more than a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from tonnage.errors import (
    NotServedError,
    PlacementError,
    Problem,
    RequestError,
    TonnageError,
    UnitError,
)
from tonnage.fit import asked_ways, check_supplied
from tonnage.launch import check_judged, launch, served_name
from tonnage.memory.supply import find_gpu
from tonnage.observe.io import observe_text
from tonnage.plan_options import gpus_there
from tonnage.regions import find_regions
from tonnage.report.documents import (
    fit_document,
    flags_document,
    gpus_document,
    models_document,
    regions_document,
)
from tonnage.report.observation import observe_document
from tonnage.report.page import report_html
from tonnage.serving import model_context
from tonnage.ui.bodies import Address, FitBody, FlagsBody, ObserveBody, PlanBody, RegionsBody
from tonnage.ui.checkpoints import checkpoints_document
from tonnage.ui.messages import BAD_REQUEST, HTML, JSON, NOT_FOUND, OK, UNPROCESSABLE, Answer, Question, refusal
from tonnage.ui.planned import asked, name_of, planned, read_body
from tonnage.ui.shelf import Shelf

Handler = Callable[[Shelf, bytes], Answer]


def answer(shelf: Shelf, question: Question) -> Answer:
    """Return the answer of the interface to a question; a refusal is one, with every problem."""
    return answer_by(ANSWERS[question.name], shelf, question.body)


def answer_by(handler: Handler, shelf: Shelf, raw: bytes) -> Answer:
    """Return what a handler answers, or its refusal."""
    try:
        return handler(shelf, raw)
    except TonnageError as error:
        return refusal(_status_of(error), *error.problems)
    except msgspec.ValidationError as error:
        return refusal(UNPROCESSABLE, _invalid(error))
    except OSError as error:
        return refusal(UNPROCESSABLE, Problem(where="checkpoint", what="cannot be used", found=error.strerror))
    except (MemoryError, RecursionError):
        return refusal(UNPROCESSABLE, Problem(where="body", what="too large to be planned here"))


def _status_of(error: TonnageError) -> int:
    if isinstance(error, RequestError):
        return BAD_REQUEST
    return NOT_FOUND if isinstance(error, NotServedError) else UNPROCESSABLE


def _invalid(error: msgspec.ValidationError) -> Problem:
    """Return what a struct refuses, with the place in the words of the body."""
    what, _, place = str(error).partition(" - at `$")
    return Problem(where=place.strip("`.") or "body", what=what)


def _document(document: Mapping[str, Any]) -> Answer:
    return Answer(OK, JSON, msgspec.json.encode(document))


def _plan(shelf: Shelf, raw: bytes) -> Answer:
    return _document(planned(shelf, read_body(raw, PlanBody)))


def _fit(shelf: Shelf, raw: bytes) -> Answer:
    body = read_body(raw, FitBody)
    there = gpus_there(tp=body.tp, pp=body.pp, gpus=body.gpus)
    ranks = there if body.tp is None else body.tp * body.pp
    _, checkpoint, request = asked(shelf, body, tp=body.tp or 1, ep=body.ep or 1, ranks=ranks)
    return _document(
        fit_document(checkpoint, request, asked_ways(checkpoint, request, tp=body.tp, ep=body.ep, gpus=there))
    )


def _regions(shelf: Shelf, raw: bytes) -> Answer:
    body = read_body(raw, RegionsBody)
    key, checkpoint, request = asked(shelf, body)
    check_supplied(request)
    most = body.most_context or model_context(checkpoint.assignment) or body.context
    if not most:
        what = "the config does not say how long a context may be"
        raise UnitError(Problem(where="most_context", what=what, expected="tokens"))
    planner = shelf.planner(key, checkpoint, request)
    regions = find_regions(
        planner, request, most_context=most, most_concurrency=body.most_concurrency, steps=body.steps
    )
    here = replace(request, profile=replace(request.profile, context_tokens=body.context or most))
    return _document(regions_document(checkpoint, here, planner.plan_request(here), regions))


def _flags(shelf: Shelf, raw: bytes) -> Answer:
    body = read_body(raw, FlagsBody)
    key, checkpoint, request = asked(shelf, body)
    check_judged(request)
    plan = shelf.plan(key, checkpoint, request)
    if not plan.fits:
        raise PlacementError(*(Problem(where="plan", what=f"does not fit: {reason}") for reason in plan.reasons))
    serve, command = launch(
        plan,
        request,
        source=_source_name(body.checkpoint),
        opened=_opened_name(body.checkpoint),
        model=body.model,
        draft_model=None if body.draft is None else _opened_name(body.draft),
        quantization=body.quantization,
        utilization=body.utilization,
    )
    return _document(flags_document(serve, command))


def _opened_name(address: Address) -> str:
    """Return what an engine opens for an address; of a config that was sent, only a name."""
    return name_of(address) if address.path is UNSET else served_name(address.path)


def _source_name(address: Address) -> str:
    """Return what ``tonnage prepare`` takes for an address."""
    return _opened_name(address) if address.hub is UNSET else f"hf:{address.hub}"


def _observe(shelf: Shelf, raw: bytes) -> Answer:  # noqa: ARG001 - every answer is called alike
    body = read_body(raw, ObserveBody)
    gpu = None if body.gpu is None else find_gpu(body.gpu).slug
    return _document(observe_document(observe_text(body.log, body.plan, gpu=gpu), gpu=gpu))


def _report(shelf: Shelf, raw: bytes) -> Answer:
    document = planned(shelf, read_body(raw, PlanBody))
    name = re.sub(r"[^\w.-]+", "-", document["checkpoint"]["name"], flags=re.ASCII).strip("-.") or "plan"
    return Answer(OK, HTML, report_html(document).encode(), filename=f"{name}.html")


def _checkpoints(shelf: Shelf, raw: bytes) -> Answer:  # noqa: ARG001 - same
    return _document(checkpoints_document(shelf.settings.directories, hub=shelf.settings.hub))


def _gpus(shelf: Shelf, raw: bytes) -> Answer:  # noqa: ARG001 - same
    return _document(gpus_document())


def _models(shelf: Shelf, raw: bytes) -> Answer:  # noqa: ARG001 - same
    return _document(models_document())


ANSWERS: Mapping[str, Handler] = {
    "plan": _plan,
    "fit": _fit,
    "regions": _regions,
    "flags": _flags,
    "observe": _observe,
    "report": _report,
    "checkpoints": _checkpoints,
    "gpus": _gpus,
    "models": _models,
}
"""By the names that routes ask for them."""
