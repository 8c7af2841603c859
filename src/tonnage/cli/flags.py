"""``tonnage flags``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tonnage.cli.options import (
    Dcp,
    Draft,
    DraftTokens,
    Eager,
    EngineVersion,
    Ep,
    Free,
    GpuName,
    Json,
    KvBytes,
    KvDtype,
    Method,
    Pp,
    Reserve,
    Source,
    SupplySize,
    Tp,
    emit,
    emit_json,
    note,
)
from tonnage.cli.plan import DOES_NOT_FIT
from tonnage.errors import Problem, UnitError

if TYPE_CHECKING:
    from tonnage.flags.values import ServeCommand, ServePlan


def flags(
    source: Source,
    engine: Annotated[Literal["vllm", "sglang", "exllamav3"], typer.Option("--engine", help="Whose command.")],
    profile: Annotated[str, typer.Option("--profile", help="What is to be served: cC-pP.")],
    context: Annotated[int, typer.Option("--context", min=1, help="Longest context in tokens.")],
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    dcp: Dcp = 1,
    model: Annotated[str | None, typer.Option("--model", help="Path or hub name to serve; by default SOURCE.")] = None,
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    reserve: Reserve = "0",
    kv_dtype: KvDtype = None,
    kv_bytes: KvBytes = None,
    engine_version: EngineVersion = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", help="What the engine is told where the config does not say it.")
    ] = None,
    eager: Eager = False,
    draft: Draft = None,
    draft_method: Method = None,
    draft_tokens: DraftTokens = None,
    as_json: Json = False,
) -> None:
    """Print the launch command of a plan that fits.

    Example: tonnage flags config.json --engine vllm --tp 2 --gpu h100 --profile c4-p4096 --context 4096
    """
    from tonnage.api import open_checkpoint, plan_checkpoint
    from tonnage.cli.requests import plan_request
    from tonnage.draft import method_of
    from tonnage.flags.command import serve_command
    from tonnage.flags.from_plan import serve_plan
    from tonnage.flags.values import DraftPlan
    from tonnage.memory.supply import supply_bytes

    request = plan_request(
        tp=tp, ep=ep, pp=pp, dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=free, reserve=reserve,
        profile=profile, context=context, kv_dtype=kv_dtype, kv_bytes=kv_bytes, engine_version=engine_version,
        eager=eager, draft=draft, draft_method=draft_method, draft_tokens=draft_tokens,
    )  # fmt: skip
    if request.supply is None:
        raise UnitError(Problem(where="--gpu, --supply, --free", what="a plan is judged first", expected="one of them"))
    plan = plan_checkpoint(open_checkpoint(source), request)
    if not plan.fits:
        for reason in plan.reasons:
            note(f"does not fit: {reason}")
        raise typer.Exit(DOES_NOT_FIT)
    method = draft_method or (method_of(request.draft.assignment) if request.draft else None)
    drafting = DraftPlan(method=method, tokens=draft_tokens or 1, model=draft) if method is not None else None
    serve = serve_plan(
        plan,
        request.profile,
        model=_served_name(source) if model is None else model,
        release=engine_version,
        gpu_bytes=supply_bytes(request.gpu).nbytes if request.gpu and request.context_held else None,
        draft=drafting,
        quantization=quantization,
        eager=eager,
    )
    _print(serve, serve_command(serve), as_json=as_json)


def _served_name(source: str) -> str:
    """Return what an engine opens for SOURCE: a directory; of a lone config only a name, which is said."""
    path = Path(source)
    if path.suffix != ".json":
        return source
    if path.name == "config.json":
        return str(path.parent)
    note(f"note: {path.name} is no checkpoint; --model says what to serve, {path.stem} stands in")
    return path.stem


def _print(serve: ServePlan, command: ServeCommand, *, as_json: bool) -> None:
    """Print files and command on stdout, notes on stderr."""
    if as_json:
        emit_json(command_document(serve, command))
        return
    for text in command.notes:
        note(f"note: {text}")
    for file in command.files:
        emit("\n".join((f"# {file.name}", *file.lines)))
        emit("")
    emit(command.shell)


def command_document(serve: ServePlan, command: ServeCommand) -> dict[str, Any]:
    """Return a command as its JSON document."""
    return {
        "schema": "tonnage.flags/1",
        "engine": serve.engine,
        "words": list(command.words),
        "shell": command.shell,
        "files": [{"name": file.name, "lines": list(file.lines)} for file in command.files],
        "notes": list(command.notes),
    }
