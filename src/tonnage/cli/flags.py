"""``tonnage flags``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from tonnage.cli.options import (
    Context,
    ConvertTo,
    Dcp,
    Draft,
    DraftBytes,
    DraftTokens,
    Eager,
    EngineVersion,
    EpOfCut,
    Free,
    GpuName,
    Json,
    KvBytes,
    KvDtype,
    Method,
    Offline,
    PpOfCut,
    ProfileName,
    Reserve,
    Source,
    SupplySize,
    TpOfCut,
    Utilization,
    emit,
    emit_json,
    note,
)
from tonnage.cli.plan import DOES_NOT_FIT
from tonnage.errors import one_line

if TYPE_CHECKING:
    from tonnage.cli.opening import Opening
    from tonnage.flags.values import ServeCommand, ServePlan
    from tonnage.plan import Plan


def flags(
    source: Source,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3"],
        typer.Option("--engine", help="Whose command; none is taken for granted."),
    ],
    profile: ProfileName = None,
    context: Context = None,
    tp: TpOfCut = None,
    ep: EpOfCut = None,
    pp: PpOfCut = None,
    dcp: Dcp = 1,
    model: Annotated[str | None, typer.Option("--model", help="Path or hub name to serve; by default SOURCE.")] = None,
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    utilization: Utilization = None,
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
    draft_bytes: DraftBytes = "0",
    convert: ConvertTo = "none",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Print the launch command of a plan that fits.

    Example: tonnage flags config.json --engine vllm --tp 2 --gpu h100 --profile c4-p4096 --context 4096
    """
    from tonnage.api import plan_checkpoint
    from tonnage.cli.cut import open_cut
    from tonnage.cli.opening import Opening
    from tonnage.launch import check_judged, launch, served_name
    from tonnage.plan_options import plan_request
    from tonnage.sources.addresses import is_remote
    from tonnage.suggestions import suggest

    opening, cut = Opening(offline=offline), open_cut(source)
    cut.check_convert(convert)
    tp, ep, pp = cut.sizes(tp=tp, ep=ep, pp=pp)
    profile, context = cut.profile(profile, context)
    request = plan_request(
        tp=tp, ep=ep, pp=pp, dcp=dcp, engine=cut.engine(engine, engine), gpu=gpu, supply=supply,
        free=free, utilization=utilization, reserve=reserve, profile=profile, context=context, kv_dtype=kv_dtype,
        kv_bytes=kv_bytes, engine_version=engine_version, eager=eager, draft=opening.draft(draft, draft_method),
        draft_bytes=draft_bytes, draft_method=draft_method, draft_tokens=draft_tokens, convert=convert,
    )  # fmt: skip
    check_judged(request)
    checkpoint = cut.checkpoint or opening.checkpoint(source)
    plan = plan_checkpoint(checkpoint, request)
    cut.check_plan(plan)
    if not plan.fits:
        _refuse(plan, cut.suggested(suggest(checkpoint, request)))
    serve, command = launch(
        plan,
        request,
        source=source if is_remote(source) else served_name(source),
        opened=_name_for_engine(source) if model is None else model,
        model=model,
        draft_model=draft and _name_for_engine(draft),
        quantization=quantization,
        utilization=utilization,
        layout="hf" if cut.served is None else cut.served.layout,
    )
    _print(serve, command, opening if as_json else None)


def _refuse(plan: Plan, suggestions: tuple[str, ...]) -> NoReturn:
    """Say why it does not fit, and what would.

    Raises:
        Exit: Always.
    """
    from tonnage.report.tables import ways_out

    for reason in plan.reasons:
        note(f"does not fit: {reason}")
    if way := ways_out(plan, suggestions):
        note(way)
    raise typer.Exit(DOES_NOT_FIT)


def _name_for_engine(source: str) -> str:
    """Return what an engine opens for SOURCE; what it cannot know is said."""
    from tonnage.launch import is_lone_config, served_name
    from tonnage.sources.addresses import is_remote

    if is_remote(source):
        return _name_elsewhere(source)
    if is_lone_config(source):
        note(f"note: {Path(source).name} is no checkpoint; --model says what to serve, {Path(source).stem} stands in")
    return served_name(source)


def _name_elsewhere(source: str) -> str:
    """Return what an engine opens for a source elsewhere: repositories of the hub, by their names."""
    scheme, _, rest = source.partition(":")
    repository, _, revision = rest.lstrip("/").partition("@")
    if scheme.lower() != "hf":
        note(f"note: --model says where {one_line(source)} is on the machines that serve it")
        return source
    if revision:
        note(f"note: the engine is not told the revision {one_line(revision)}; add it if it matters")
    return repository


def _print(serve: ServePlan, command: ServeCommand, opening: Opening | None) -> None:
    """Print files and command on stdout, notes on stderr; or all of it as JSON, with what the checkpoint cost."""
    if opening is not None:
        from tonnage.report.documents import flags_document

        emit_json(opening.document(flags_document(serve, command)))
        return
    for text in command.notes:
        note(f"note: {text}")
    for file in command.files:
        emit("\n".join((f"# {file.name}", *file.lines)))
        emit("")
    emit(command.shell)
