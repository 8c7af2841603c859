"""From the body of a request to its plan: read strictly, opened, and planned with what is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct

from tonnage.api import Checkpoint, PlanRequest
from tonnage.calibrations.credit_records import CreditRecord
from tonnage.calibrations.io import known_records
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import CreditError, PlacementError, Problem, RequestError
from tonnage.plan_options import plan_request
from tonnage.report.documents import plan_document
from tonnage.suggestions import suggest
from tonnage.topology import MOST_RANKS
from tonnage.ui.bodies import Address, Options, PlanBody
from tonnage.ui.shelf import Key, Shelf

_NOT_OPTIONS = frozenset(
    {"checkpoint", "draft", "calibration", "growth", "suggestions", "most_context", "most_concurrency", "steps", "gpus",
     "model", "quantization"}
)  # fmt: skip
"""Fields that are no argument of a plan request as they stand."""

_IN_ORDER = (
    "tp", "ep", "pp", "dcp", "engine", "gpu", "supply", "free", "reserve", "profile", "context", "kv_dtype", "kv_bytes",
    "engine_version", "utilization", "eager", "draft", "draft_method", "draft_tokens", "draft_bytes", "convert",
    "estimator", "credit_permille", "calibration", "device_bytes",
)  # fmt: skip
"""Options of a plan, in the order of ``tonnage plan --help``."""

Body = TypeVar("Body", bound=Struct)


def read_body(body: bytes, kind: type[Body]) -> Body:
    """Return a body as what it must be.

    Raises:
        RequestError: It is not strict JSON.
        msgspec.ValidationError: A field is unknown, missing or of another kind.
    """
    return msgspec.convert(parse_object(body, where="body", kind=RequestError), type=kind, strict=True)


def asked(shelf: Shelf, body: Options, **more: Any) -> tuple[Key, Checkpoint, PlanRequest]:
    """Return the checkpoint and the request that a body asks for."""
    named = {name: getattr(body, name) for name in body.__struct_fields__ if name not in _NOT_OPTIONS}
    named |= more
    if (named["tp"] or 1) * body.pp > MOST_RANKS:
        found = str((named["tp"] or 1) * body.pp)
        raise PlacementError(Problem(where="--tp, --pp", what="ranks", expected=f"at most {MOST_RANKS}", found=found))
    draft = None if body.draft is None else shelf.open(body.draft, body.draft_method or "")[1]
    request = plan_request(**named, draft=draft, credit_record=_record(getattr(body, "calibration", None)))
    return *shelf.open(body.checkpoint), request


def _record(name: str | None) -> CreditRecord | None:
    """Return a calibration record by its name; no file is opened by one.

    Raises:
        CreditError: There is none of this name.
    """
    if name is None:
        return None
    known = {found.record.id: found.record for found in known_records()}
    if name not in known:
        raise CreditError(Problem(where=name, what="no such calibration record", expected=", ".join(known)))
    return known[name]


def planned(shelf: Shelf, body: PlanBody) -> dict[str, Any]:
    """Return the document of the plan that a body asks for.

    Raises:
        TonnageError: The question cannot be answered; every problem is named.
    """
    key, checkpoint, request = asked(shelf, body)
    plan = shelf.plan(key, checkpoint, request)
    suggestions = suggest(checkpoint, request) if body.suggestions and plan.fits is False else ()
    return plan_document(checkpoint, request, plan, suggestions, options=tuple(given_options(body)), growth=body.growth)


def given_options(body: PlanBody) -> Iterator[str]:
    """Yield what is not left to its default, as the options that say the same; of a path its last part."""
    defaults = dict(
        zip(body.__struct_fields__[-len(body.__struct_defaults__) :], body.__struct_defaults__, strict=True)
    )
    for name in _IN_ORDER:
        value, option = getattr(body, name), f"--{name.replace('_', '-')}"
        if value == defaults[name]:
            continue
        shown = name_of(value) if isinstance(value, Address) else value
        yield option if shown is True else f"{option} {shown}"


def name_of(address: Address) -> str:
    """Return what a checkpoint is called: the last part of its path, its repository, or its name."""
    if address.path is not UNSET:
        return PurePath(address.path).name
    named = address.name if address.hub is UNSET else address.hub
    return "config" if named is UNSET else named
