"""``tonnage fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tonnage.cli.options import (
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
    Pp,
    Reserve,
    Source,
    SupplySize,
    Utilization,
    emit,
    emit_json,
)
from tonnage.cli.plan import DOES_NOT_FIT
from tonnage.errors import Problem, UnitError

if TYPE_CHECKING:
    from tonnage.fit import Fit

FIT_SCHEMA = "tonnage.fit/1"


def fit(
    source: Source,
    profile: Annotated[str, typer.Option("--profile", help="What is to be served: cC-pP.")] = "c1-p4096",
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Context; the model's own by default.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Only this tensor-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Only this expert-parallel size.")] = None,
    pp: Pp = 1,
    dcp: Annotated[int, typer.Option("--dcp", help="Decode-context-parallel size, where it divides TP.")] = 1,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=1024, help="GPUs there are; 8, or those of --tp and --pp.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"], typer.Option("--engine", help="Whose rules.")
    ] = "vllm",
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
    as_json: Json = False,
) -> None:
    """Say what context and how many requests fit.

    Example: tonnage fit config.json --gpu h100 --gpus 2 --profile c4-p4096 --context 4096
    """
    from tonnage.api import open_checkpoint
    from tonnage.cli.requests import plan_request
    from tonnage.fit import fit_checkpoint, ways

    there = gpus or ((tp or 1) * pp if tp is not None else 8)
    if (tp or 1) * pp > there:
        asked = f"{(tp or 1) * pp} ranks"
        raise UnitError(Problem(where="--tp, --pp", what="more ranks than GPUs", expected=str(there), found=asked))
    ranks = tp * pp if tp is not None else there
    request = plan_request(
        tp=tp or 1, ep=ep or 1, pp=pp, dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=free,
        utilization=utilization, reserve=reserve, profile=profile, context=context, kv_dtype=kv_dtype,
        kv_bytes=kv_bytes, engine_version=engine_version, eager=eager, draft=draft, draft_bytes=draft_bytes,
        draft_method=draft_method, draft_tokens=draft_tokens, convert=convert, ranks=ranks,
    )  # fmt: skip
    checkpoint = open_checkpoint(source)
    found = [fit_checkpoint(checkpoint, request)] if tp is not None else list(ways(checkpoint, request, gpus=there))
    found = [one for one in found if ep in (None, one.request.ep)]
    rows = [_row(one) for one in found]
    if as_json:
        best = max(rows, key=lambda row: (row["longest_context"], -row["tp"]), default=None)
        emit_json(
            {
                "schema": FIT_SCHEMA,
                "checkpoint": {"name": checkpoint.name, "digest": checkpoint.digest, "family": checkpoint.family},
                "engine": engine,
                "supply_bytes": request.supply.nbytes if request.supply else None,
                "ways": rows,
                "best": best,
            }
        )
    else:
        _emit_table(checkpoint.name, checkpoint.family, engine, rows)
    if not any(row["fits"] for row in rows):
        raise typer.Exit(DOES_NOT_FIT)


def _row(found: Fit) -> dict[str, Any]:
    from tonnage.report.documents import cache_document

    request, plan = found.request, found.plan
    return {
        "tp": request.tp,
        "ep": request.ep,
        "pp": request.pp,
        "dcp": request.dcp,
        "fits": plan.fits,
        "spare_bytes": plan.spare_bytes(plan.binding_rank),
        "fixed_bytes": plan.ranks[plan.binding_rank].fixed_bytes,
        "longest_context": found.longest_context,
        "most_concurrency": found.most_concurrency,
        "cache": cache_document(plan),
        "reasons": list(plan.reasons),
    }


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
