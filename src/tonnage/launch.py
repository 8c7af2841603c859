"""The launch command of a plan that fits."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from tonnage.draft import method_of
from tonnage.errors import FlagsError, Problem, UnitError, raise_if_any
from tonnage.flags.command import serve_command
from tonnage.flags.from_plan import serve_plan
from tonnage.flags.values import DraftPlan
from tonnage.memory.supply import supply_bytes
from tonnage.plan_notes import beyond_context
from tonnage.supply_options import read_share

if TYPE_CHECKING:
    from tonnage.api import PlanRequest
    from tonnage.flags.values import Layout, ServeCommand, ServePlan
    from tonnage.plan import Plan

CONFIG = "config.json"
_STYLES = {"vllm": "", "sglang": " --quant-style mxfp8"}
"""How an engine is told of a conversion: docs/standard-checkpoint.md."""


def check_judged(request: PlanRequest) -> None:
    """Refuse a request that no plan can be judged by, or no engine started for.

    Raises:
        UnitError: Nobody says what a GPU supplies, or what is to be served.
    """
    profile = request.profile
    said = (
        ("--profile", profile.concurrency, "such as c4-p4096"),
        ("--context", profile.context_tokens, "such as 32k"),
    )
    problems = [
        Problem(where=option, what="an engine is told what it is to serve", expected=expected)
        for option, value, expected in said
        if not value
    ]
    if request.supply is None:
        judged = "a plan is judged first"
        problems.append(Problem(where="--gpu, --supply, --free", what=judged, expected="one of them"))
    raise_if_any(UnitError, problems)


def launch(  # noqa: PLR0913 - what a plan does not know of a command
    plan: Plan,
    request: PlanRequest,
    *,
    source: str,
    opened: str,
    model: str | None,
    draft_model: str | None,
    quantization: str | None,
    utilization: str | None = None,
    layout: Layout = "hf",
) -> tuple[ServePlan, ServeCommand]:
    """Return what an engine is to serve, and its command.

    Args:
        plan: A plan that fits.
        request: What it was made for.
        source: The checkpoint that was planned, as ``tonnage prepare`` takes it.
        opened: What the engine opens of it: a path or a hub name.
        model: What it opens instead, if that is said. Of what is converted in the plan a name stands in.
        draft_model: The same of the draft, if there is one.
        quantization: What the engine is told where the config does not say it.
        utilization: The share of the GPU that vLLM is started with, if it is said.
        layout: Of what is opened.

    Raises:
        FlagsError: The engine has no command for it, or does not read what a conversion makes.
    """
    assert plan.placement is not None  # the exact estimator has one
    notes = [*beyond_context(plan.placement.assignment, request)]
    if is_converted(plan):
        opened, words = converted(request, source)
        if model is None:
            notes.append(f"{opened} stands in for what `{words}` writes; --model says where it is")
    if quantization and all(entry.fmt.is_plain for entry in plan.placement.assignment.entries):
        notes.append(f"planned as stored: what --quantization {quantization} makes of plain weights is not counted")
    if request.draft_bytes:
        notes.append(
            f"{request.draft_bytes:,} bytes are left for a draft, which the command does not name; --draft does"
        )
    serve = serve_plan(
        plan,
        request.profile,
        model=opened if model is None else model,
        release=request.version,
        gpu_bytes=supply_bytes(request.gpu).nbytes if request.gpu and request.context_held else None,
        draft=draft_plan(request, draft_model),
        quantization=quantization,
        eager=request.eager,
        layout=layout,
        utilization=read_share(utilization),
    )
    command = serve_command(serve)
    return serve, replace(command, notes=(*notes, *command.notes))


def is_converted(plan: Plan) -> bool:
    """Whether a plan is of weights that are to be converted first."""
    assert plan.placement is not None  # the exact estimator has one
    return any(entry.converted_from for entry in plan.placement.assignment.entries)


def converted(request: PlanRequest, source: str) -> tuple[str, str]:
    """Return a name for a checkpoint once it is converted, and the command that writes it for its engine.

    Raises:
        FlagsError: The engine reads none.
    """
    style = _STYLES.get(request.engine)
    if style is None:
        expected = " or ".join(f"--engine {engine}" for engine in _STYLES)
        what = f"{request.engine} reads no checkpoint that --convert makes"
        raise FlagsError(Problem(where="--convert", what=what, expected=expected, found=request.convert))
    name = f"{PurePath(source).name}-{request.convert}"
    words = f"--layout hf --convert {request.convert}{style} -o {shlex.quote(name)}"
    return name, f"tonnage prepare {shlex.quote(source)} {words}"


def draft_plan(request: PlanRequest, model: str | None) -> DraftPlan | None:
    """Return how a command drafts tokens, with the draft as the engine opens it; ``None`` where it names none."""
    if request.draft_bytes:
        return None
    method = request.draft_method or (method_of(request.draft.assignment) if request.draft else None)
    return None if method is None else DraftPlan(method=method, tokens=request.draft_tokens or 1, model=model)


def served_name(source: str) -> str:
    """Return what an engine opens for a checkpoint: its directory; of a lone config only a name."""
    path = PurePath(source)
    if path.suffix != ".json":
        return source
    return str(path.parent) if path.name == CONFIG else path.stem


def is_lone_config(source: str) -> bool:
    """Whether a config is no part of a checkpoint, so that no engine can open it."""
    path = PurePath(source)
    return path.suffix == ".json" and path.name != CONFIG
