"""``tonnage flags``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    open_draft,
)
from tonnage.cli.plan import DOES_NOT_FIT

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
    from tonnage.launch import check_judged, is_lone_config, launch, served_name
    from tonnage.plan_options import plan_request

    request = plan_request(
        tp=tp, ep=ep, pp=pp, dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=free, reserve=reserve,
        profile=profile, context=context, kv_dtype=kv_dtype, kv_bytes=kv_bytes, engine_version=engine_version,
        eager=eager, draft=open_draft(draft, draft_method), draft_method=draft_method, draft_tokens=draft_tokens,
    )  # fmt: skip
    check_judged(request)
    plan = plan_checkpoint(open_checkpoint(source), request)
    if not plan.fits:
        for reason in plan.reasons:
            note(f"does not fit: {reason}")
        raise typer.Exit(DOES_NOT_FIT)
    if model is None and is_lone_config(source):
        note(f"note: {Path(source).name} is no checkpoint; --model says what to serve, {Path(source).stem} stands in")
    serve, command = launch(
        plan,
        request,
        model=served_name(source) if model is None else model,
        draft_model=draft,
        quantization=quantization,
    )
    _print(serve, command, as_json=as_json)


def _print(serve: ServePlan, command: ServeCommand, *, as_json: bool) -> None:
    """Print files and command on stdout, notes on stderr."""
    if as_json:
        from tonnage.report.documents import flags_document

        emit_json(flags_document(serve, command))
        return
    for text in command.notes:
        note(f"note: {text}")
    for file in command.files:
        emit("\n".join((f"# {file.name}", *file.lines)))
        emit("")
    emit(command.shell)
