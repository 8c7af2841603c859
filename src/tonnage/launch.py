"""The launch command of a plan that fits."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from tonnage.draft import method_of
from tonnage.errors import Problem, UnitError
from tonnage.flags.command import serve_command
from tonnage.flags.from_plan import serve_plan
from tonnage.flags.values import DraftPlan
from tonnage.memory.supply import supply_bytes

if TYPE_CHECKING:
    from tonnage.api import PlanRequest
    from tonnage.flags.values import ServeCommand, ServePlan
    from tonnage.plan import Plan

CONFIG = "config.json"


def check_judged(request: PlanRequest) -> None:
    """Refuse a request that no plan can be judged by.

    Raises:
        UnitError: Nobody says what a GPU supplies.
    """
    if request.supply is None:
        raise UnitError(Problem(where="--gpu, --supply, --free", what="a plan is judged first", expected="one of them"))


def launch(
    plan: Plan, request: PlanRequest, *, model: str, draft_model: str | None, quantization: str | None
) -> tuple[ServePlan, ServeCommand]:
    """Return what an engine is to serve, and its command.

    Args:
        plan: A plan that fits.
        request: What it was made for.
        model: Path or hub name that the engine opens.
        draft_model: The same of the draft, if there is one.
        quantization: What the engine is told where the config does not say it.

    Raises:
        FlagsError: The engine has no command for it.
    """
    serve = serve_plan(
        plan,
        request.profile,
        model=model,
        release=request.version,
        gpu_bytes=supply_bytes(request.gpu).nbytes if request.gpu and request.context_held else None,
        draft=draft_plan(request, draft_model),
        quantization=quantization,
        eager=request.eager,
    )
    return serve, serve_command(serve)


def draft_plan(request: PlanRequest, model: str | None) -> DraftPlan | None:
    """Return how a command drafts tokens, with the draft as the engine opens it; ``None`` where nothing does."""
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
