"""``tonnage plan``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tonnage.cli.options import (
    ConvertTo,
    Dcp,
    Draft,
    DraftBytes,
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
    Utilization,
    emit,
    emit_json,
)

DOES_NOT_FIT = 3


def plan(
    source: Source,
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    dcp: Dcp = 1,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"],
        typer.Option("--engine", help="Whose placement rules; split cuts everything that can be cut, as prepare does."),
    ] = "split",
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    reserve: Reserve = "0",
    profile: Annotated[
        str | None, typer.Option("--profile", help="What is to be served: cC-pP, concurrency and prefill chunk.")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Longest context in tokens.")] = None,
    kv_dtype: KvDtype = None,
    kv_bytes: KvBytes = None,
    engine_version: EngineVersion = None,
    utilization: Utilization = None,
    eager: Eager = False,
    draft: Draft = None,
    draft_method: Method = None,
    draft_tokens: DraftTokens = None,
    draft_bytes: DraftBytes = "0",
    convert: ConvertTo = "none",
    estimator: Annotated[
        Literal["exact", "credit"],
        typer.Option(
            "--estimator",
            help="exact: tensor by tensor. credit: a share of counted bytes, for packages made elsewhere.",
        ),
    ] = "exact",
    credit_permille: Annotated[
        int | None, typer.Option("--credit-permille", min=0, max=1000, help="The credit, in permille of counted bytes.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Record to take the credit from: a name of them, or a file.")
    ] = None,
    device_bytes: Annotated[
        int | None, typer.Option("--device-bytes", min=1, help="Bytes of all ranks before the credit, draft included.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what every rank will hold, and whether it fits.

    Example: tonnage plan config.json --tp 8 --engine vllm --gpu rtx-pro-6000 --reserve 6GiB
    """
    from dataclasses import replace

    from tonnage.api import open_checkpoint, plan_checkpoint
    from tonnage.calibrations.io import find_record, known_records
    from tonnage.cli.requests import plan_request

    by_record = estimator == "credit" and credit_permille is None and calibration is None
    request = plan_request(
        tp=tp, ep=ep, pp=pp, dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=free, utilization=utilization,
        reserve=reserve, profile=profile, context=context, kv_dtype=kv_dtype, kv_bytes=kv_bytes,
        engine_version=engine_version, eager=eager, draft=draft, draft_bytes=draft_bytes, draft_method=draft_method,
        draft_tokens=draft_tokens, convert=convert,
    )  # fmt: skip
    request = replace(
        request,
        estimator=estimator,
        credit_permille=credit_permille,
        credit_record=find_record(calibration) if calibration is not None else None,
        credit_records=tuple(found.record for found in known_records()) if by_record else (),
        device_bytes=device_bytes,
    )
    checkpoint = open_checkpoint(source)
    result = plan_checkpoint(checkpoint, request)
    suggestions: tuple[str, ...] = ()
    if result.fits is False:
        from tonnage.suggestions import suggest

        suggestions = suggest(checkpoint, request)
    if as_json:
        from tonnage.report.documents import plan_document

        emit_json(plan_document(checkpoint, request, result, suggestions))
    else:
        from tonnage.report.tables import plan_table, render

        emit(render(plan_table(checkpoint, request, result, suggestions)))
    if result.fits is False:
        raise typer.Exit(DOES_NOT_FIT)
