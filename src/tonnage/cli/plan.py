"""``tonnage plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
)
from tonnage.cli.reports import Against, Force, read_saved_file, typed_options, write_report

if TYPE_CHECKING:
    from tonnage.saved_plan import SavedPlan

DOES_NOT_FIT = 3


def plan(
    typed: typer.Context,
    source: Source,
    tp: TpOfCut = None,
    ep: EpOfCut = None,
    pp: PpOfCut = None,
    dcp: Dcp = 1,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"] | None,
        typer.Option(
            "--engine",
            help="Whose placement rules. By default split, as for prepare: everything that can be cut is cut, and no "
            "engine need be chosen; of a package those it is cut by.",
        ),
    ] = None,
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    reserve: Reserve = "0",
    profile: ProfileName = None,
    context: Context = None,
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
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report as well: one HTML file.")
    ] = None,
    against: Against = None,
    force: Force = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours, and ASCII alone.")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say what every rank will hold, and whether it fits.

    Example: tonnage plan config.json --tp 8 --engine vllm --gpu rtx-pro-6000 --reserve 6GiB
    """
    from tonnage.api import plan_checkpoint
    from tonnage.calibrations.io import find_record
    from tonnage.cli.cut import open_cut
    from tonnage.cli.opening import Opening
    from tonnage.plan_options import plan_request

    opening, cut = Opening(offline=offline), open_cut(source)
    cut.check_convert(convert)
    tp, ep, pp = cut.sizes(tp=tp, ep=ep, pp=pp)
    profile, context = cut.profile(profile, context)
    request = plan_request(
        tp=tp, ep=ep, pp=pp, dcp=dcp, engine=cut.engine(engine, "split"), gpu=gpu, supply=supply, free=free,
        utilization=utilization, reserve=reserve, profile=profile, context=context, kv_dtype=kv_dtype,
        kv_bytes=kv_bytes,
        engine_version=engine_version, eager=eager, draft=opening.draft(draft, draft_method), draft_bytes=draft_bytes,
        draft_method=draft_method, draft_tokens=draft_tokens, convert=convert, estimator=estimator,
        credit_permille=credit_permille, credit_record=find_record(calibration) if calibration is not None else None,
        device_bytes=device_bytes,
    )  # fmt: skip
    before = _before(against, shown=html is not None or not as_json)
    checkpoint = cut.checkpoint or opening.checkpoint(source)
    result = plan_checkpoint(checkpoint, request)
    cut.check_plan(result)
    suggestions: tuple[str, ...] = ()
    if result.fits is False:
        from tonnage.suggestions import suggest

        suggestions = cut.suggested(suggest(checkpoint, request))
    from tonnage.report.documents import plan_document
    from tonnage.report.saved import read_saved

    options, grows = typed_options(typed), as_json or html is not None
    document = plan_document(checkpoint, request, result, suggestions, options=options, growth=grows)
    if html is not None:
        write_report(html, read_saved(document), before, force=force)
    if as_json:
        emit_json(opening.document(document))
    else:
        from tonnage.report.tables import plan_table, render

        emit(render(plan_table(checkpoint, request, result, suggestions, before=before, options=options), plain=plain))
    if result.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _before(against: Path | None, *, shown: bool) -> SavedPlan | None:
    """Return the plan to compare with."""
    from tonnage.errors import ObservationError, Problem

    if against is None:
        return None
    if not shown:
        what, expected = "what changed is shown in the table and in the report", "--html, or no --json"
        raise ObservationError(Problem(where="--against", what=what, expected=expected))
    return read_saved_file(against)
