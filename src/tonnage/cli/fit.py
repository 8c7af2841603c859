"""``tonnage fit``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from tonnage.cli.options import (
    Context,
    ConvertTo,
    Draft,
    DraftBytes,
    DraftTokens,
    Eager,
    EngineVersion,
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
    Utilization,
    emit,
    emit_json,
    note,
)
from tonnage.cli.plan import DOES_NOT_FIT


def fit(
    source: Source,
    profile: ProfileName = "c1-p4096",
    context: Context = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Only this tensor-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Only this expert-parallel size.")] = None,
    pp: PpOfCut = None,
    dcp: Annotated[int, typer.Option("--dcp", help="Decode-context-parallel size, where it divides TP.")] = 1,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=1024, help="GPUs there are; 8, or those of --tp and --pp.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"] | None,
        typer.Option(
            "--engine",
            help="Whose rules. By default vllm, as for serve: what fits depends on who serves it; of a package those "
            "it is cut by.",
        ),
    ] = None,
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    utilization: Utilization = None,
    reserve: Reserve = "0",
    kv_dtype: KvDtype = None,
    kv_bytes: KvBytes = None,
    engine_version: EngineVersion = None,
    eager: Eager = False,
    draft: Draft = None,
    draft_bytes: DraftBytes = "0",
    draft_method: Method = None,
    draft_tokens: DraftTokens = None,
    convert: ConvertTo = "none",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say what context and how many requests fit.

    Without --context that of the model itself is asked for.

    Example: tonnage fit config.json --gpu h100 --gpus 2 --profile c4-p4096 --context 4096
    """
    from tonnage.cli.cut import open_cut
    from tonnage.cli.opening import Opening
    from tonnage.fit import asked_ways
    from tonnage.plan_notes import beyond_context
    from tonnage.plan_options import gpus_there, plan_request
    from tonnage.report.documents import fit_document

    opening, cut = Opening(offline=offline), open_cut(source)
    cut.check_convert(convert)
    sizes, engine = cut.sizes(tp=tp, ep=ep, pp=pp), cut.engine(engine, "vllm")
    if cut.served is not None:
        tp, ep = sizes[:2]
    there = gpus_there(tp=tp, pp=sizes[2], gpus=gpus)
    request = plan_request(
        tp=sizes[0], ep=sizes[1], pp=sizes[2], dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=free,
        utilization=utilization, reserve=reserve, profile=profile, context=context, kv_dtype=kv_dtype,
        kv_bytes=kv_bytes, engine_version=engine_version, eager=eager, draft=opening.draft(draft, draft_method),
        draft_bytes=draft_bytes, draft_method=draft_method, draft_tokens=draft_tokens, convert=convert,
        ranks=tp * sizes[2] if tp is not None else there,
    )  # fmt: skip
    checkpoint = cut.checkpoint or opening.checkpoint(source)
    found = asked_ways(checkpoint, request, tp=tp, ep=ep, gpus=there)
    document = fit_document(checkpoint, request, found)
    if as_json:
        emit_json(opening.document(document))
    else:
        _emit_table(checkpoint.name, checkpoint.family, engine, document["ways"])
    for text in beyond_context(checkpoint.assignment, request) if found else ():
        note(f"note: {text}")
    if not any(row["fits"] for row in document["ways"]):
        raise typer.Exit(DOES_NOT_FIT)


def _emit_table(name: str, family: str, engine: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Group
    from rich.text import Text

    from tonnage.report.tables import add_row, new_table, render
    from tonnage.units import gib

    if not rows:
        emit(f"{name} ({family}) · {engine}: no way to share it over so few GPUs")
        return
    served = rows[0]["cache"]
    title = f"{name} ({family}) · {engine} · {served['concurrency']} x {served['context_tokens']:,} tokens asked for"
    table = new_table("tp", "ep", "fits", "spare GiB", "longest context", "most requests", "room for tokens")
    for row in rows:
        spare, room = gib(row["spare_bytes"]), row["cache"]["capacity_tokens"]
        add_row(
            table, str(row["tp"]), str(row["ep"]), "yes" if row["fits"] else "no", spare,
            f"{row['longest_context']:,}", f"{row['most_concurrency']:,}", "" if room is None else f"{room:,}",
        )  # fmt: skip
    emit(render(Group(Text(title, style="bold"), table)))
