"""``tonnage plan``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tonnage.cli.options import Ep, Json, Pp, Source, Tp, emit, emit_json

DOES_NOT_FIT = 3
_SIZE = "such as 94.010GiB"


def plan(
    source: Source,
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    dcp: Annotated[int, typer.Option("--dcp", help="Decode-context-parallel size; moves no weights.")] = 1,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"],
        typer.Option("--engine", help="Whose placement rules; split cuts everything that can be cut, as prepare does."),
    ] = "split",
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU out of `tonnage gpus`.")] = None,
    supply: Annotated[str | None, typer.Option("--supply", help=f"Usable memory of one GPU, {_SIZE}.")] = None,
    reserve: Annotated[
        str, typer.Option("--reserve", help=f"Memory held per rank for everything that is not planned, {_SIZE}.")
    ] = "0",
    profile: Annotated[
        str | None, typer.Option("--profile", help="What is to be served: cC-pP, concurrency and prefill chunk.")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Longest context in tokens.")] = None,
    kv_dtype: Annotated[
        Literal["auto", "bf16", "fp8", "nvfp4", "int8", "int4"] | None,
        typer.Option("--kv-dtype", help="Dtype of the KV cache."),
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="A draft checkpoint, placed like the target.")] = None,
    draft_bytes: Annotated[
        str, typer.Option("--draft-bytes", help=f"Or only its bytes, cut evenly, {_SIZE} or 5373504512.")
    ] = "0",
    convert: Annotated[
        Literal["none", "mxfp8"], typer.Option("--convert", help="What preparation does to BF16 projections.")
    ] = "none",
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
    from tonnage.api import PlanRequest, open_checkpoint, plan_checkpoint, suggest
    from tonnage.calibrations.io import find_record, known_records
    from tonnage.errors import Problem, UnitError
    from tonnage.memory.supply import find_gpu, parse_supply, supply_bytes
    from tonnage.profile import parse_profile
    from tonnage.report.documents import plan_document
    from tonnage.units import parse_size

    if gpu is not None and supply is not None:
        raise UnitError(Problem(where="--gpu, --supply", what="both given", expected="one of them"))
    given = parse_supply(supply) if supply is not None else supply_bytes(find_gpu(gpu)) if gpu is not None else None
    by_record = estimator == "credit" and credit_permille is None and calibration is None
    served = parse_profile(profile, context_tokens=context, kv_dtype=kv_dtype)
    request = PlanRequest(
        tp=tp,
        ep=ep,
        pp=pp,
        dcp=dcp,
        engine=engine,
        supply=given,
        reserve_bytes=parse_size(reserve, where="--reserve"),
        convert=convert,
        estimator=estimator,
        credit_permille=credit_permille,
        credit_record=find_record(calibration) if calibration is not None else None,
        credit_records=tuple(found.record for found in known_records()) if by_record else (),
        device_bytes=device_bytes,
        draft=open_checkpoint(draft) if draft is not None else None,
        draft_bytes=parse_size(draft_bytes, where="--draft-bytes"),
    )
    checkpoint = open_checkpoint(source)
    result = plan_checkpoint(checkpoint, request)
    suggestions = suggest(checkpoint, request) if result.fits is False else ()
    if as_json:
        emit_json(plan_document(checkpoint, request, result, served, suggestions))
    else:
        from tonnage.report.tables import plan_table, render

        emit(render(plan_table(checkpoint, request, result, suggestions)))
    if result.fits is False:
        raise typer.Exit(DOES_NOT_FIT)
