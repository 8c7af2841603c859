"""``tonnage calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json, Offline, Source, emit, emit_json, here, note
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.api import Checkpoint, PlanRequest
    from tonnage.calibrate import Fitting
    from tonnage.calibrations.credit_records import CreditRecord
    from tonnage.measure.record import Measurement


def calibrate(
    source: Source,
    measured: Annotated[
        list[Path], typer.Option("--measured", help="A record of `tonnage measure`, or a report of ranks; repeatable.")
    ],
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel size; by default as measured.")] = None,
    step_permille: Annotated[
        int, typer.Option("--step-permille", min=1, max=1000, help="The credit is a multiple of it.")
    ] = 5,
    device_bytes: Annotated[
        int | None, typer.Option("--device-bytes", min=1, help="Bytes of all ranks before the credit, draft included.")
    ] = None,
    draft_bytes: Annotated[
        str, typer.Option("--draft-bytes", help="Bytes of a draft that the measured ranks hold as well.")
    ] = "0",
    before: Annotated[
        str | None, typer.Option("--before", help="Record to compare with; by default the one a plan would use.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the record.")] = None,
    not_measured: Annotated[
        list[str] | None, typer.Option("--not-measured", help="What else the evidence does not cover; repeatable.")
    ] = None,
    date: Annotated[
        str | None, typer.Option("--date", help="Date of the record, YYYY-MM-DD; today by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", parser=here, metavar="PATH", help="File to write the record to.")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the record among the user's own.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over another record of that file.")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Fit the credit to measured packages.

    The largest that no measured rank contradicts, with its evidence.

    Example: tonnage calibrate ./Kimi-K3.1-EXL3 --tp 8 --measured measured.json -o kimi-k3.1-tp8.json
    """
    from dataclasses import replace

    from tonnage.api import PlanRequest
    from tonnage.calibrate import calibrate as fit
    from tonnage.calibrate import calibrate_document
    from tonnage.calibrations.credit_records import record_bytes
    from tonnage.calibrations.io import user_directory
    from tonnage.cli.opening import Opening
    from tonnage.cli.records import write_records
    from tonnage.measure.io import read_measurement_file
    from tonnage.units import parse_size

    measurements = [read_measurement_file(path) for path in measured]
    opening = Opening(offline=offline)
    checkpoint = opening.checkpoint(source)
    request = PlanRequest(
        tp=tp or _measured_tp(measurements),
        estimator="credit",
        device_bytes=device_bytes,
        draft_bytes=parse_size(draft_bytes, where="--draft-bytes"),
    )
    fitting = _fitting(checkpoint, request, step_permille, date)
    record = fit(fitting, measurements, name=name, not_measured=not_measured or ())
    earlier = _earlier(checkpoint, request, before, record)
    if earlier is not None and earlier.tp == record.tp:
        record = replace(record, supersedes=(earlier.id,))
    document = calibrate_document(record, earlier)
    written = [path for path in (output, user_directory() / f"{record.id}.json" if save else None) if path is not None]
    write_records(written, record_bytes(record), force=force)
    if as_json:
        emit_json(opening.document(document))
    else:
        _emit_table(document)
    for path in written:
        note(f"record {record.id} written to {path}")


def _measured_tp(measurements: list[Measurement]) -> int:
    from tonnage.errors import Problem, UnitError

    sizes = {measurement.tp for measurement in measurements} - {None}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(size for size in sizes if size))) or "none in the records"
        raise UnitError(Problem(where="--tp", what="needed", expected="one TP size", found=found))
    return sizes.pop() or 1


def _fitting(checkpoint: Checkpoint, request: PlanRequest, step: int, date: str | None) -> Fitting:
    from tonnage.calibrate import Fitting
    from tonnage.cli.dates import date_of
    from tonnage.credit_plan import credit_inputs

    inputs = credit_inputs(checkpoint, request)
    stored = inputs.device_bytes - request.draft_bytes if request.device_bytes else checkpoint.assignment.payload_bytes
    return Fitting(
        name=checkpoint.name,
        family=checkpoint.family,
        digest=checkpoint.digest if checkpoint.headers is not None else None,
        stored_bytes=stored,
        inputs=inputs,
        draft_bytes=request.draft_bytes,
        step_permille=step,
        date=date_of(date),
    )


def _earlier(
    checkpoint: Checkpoint, request: PlanRequest, before: str | None, record: CreditRecord
) -> CreditRecord | None:
    """Return the record to compare with: the one named, or another that a plan would take as calibrated."""
    from tonnage.calibrations.credit_records import choose_record
    from tonnage.calibrations.io import find_record, known_records
    from tonnage.credit_plan import subject_of

    if before is not None:
        return find_record(before)
    others = [found.record for found in known_records() if found.record.id != record.id]
    chosen = choose_record(others, subject_of(checkpoint, request))
    return chosen.record if chosen is not None and chosen.basis == "calibrated" else None


def _emit_table(document: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from tonnage.report.tables import render
    from tonnage.units import MIB, gib

    before = document["before"]
    rows = [
        ("per rank before credit", f"{document['per_rank_before_credit_bytes']:,} B", ""),
        ("largest measured rank", f"{document['largest_rank_bytes']:,} B", _evidence(document["evidence"])),
        ("bound", f"{document['bound_bytes']:,} B", f"{document['bound_percent']} % of the counted bytes"),
        ("chosen", f"{document['chosen_permille']}", f"permille, in steps of {document['step_permille']}"),
        ("savings", f"{document['savings_bytes']:,} B", "over all ranks"),
        ("estimate", f"{document['estimate_bytes']:,} B", f"per rank, {gib(document['estimate_bytes'])} GiB"),
        (
            "headroom",
            f"{document['headroom_bytes']:,} B",
            f"{document['headroom_bytes'] / MIB:.1f} MiB above the largest rank",
        ),
        ("ideal", f"{document['ideal_savings_bytes']:,} B", f"{document['ideal_fraction']:.1%}".replace("%", " %")),
    ]
    if before is not None:
        above = before["pessimism_bytes"]
        more = f"{abs(above):,} B {'above' if above >= 0 else 'BELOW'} the largest rank"
        rows.append((f"before: {before['permille']} permille", f"{before['estimate_bytes']:,} B", more))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    emit(render(table))
    emit("not measured: " + "; ".join(document["not_measured"]))


def _evidence(evidence: list[dict[str, Any]]) -> str:
    packages = sum(one["packages"] for one in evidence)
    return f"of {counted(packages, 'package')}"
