"""``tonnage prepare``."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.cli.interruption import interruptible, system_errors
from tonnage.cli.options import ConvertTo, Ep, Json, Pp, Tp, emit, emit_json, here, note
from tonnage.cli.progress import progress
from tonnage.cli.ranks import parse_ranks
from tonnage.units import MIB, counted, unit_for

if TYPE_CHECKING:
    from tonnage.api import PlanRequest
    from tonnage.prepare.executor_ray import RayCluster
    from tonnage.prepare.preparation import Preparation
    from tonnage.prepare.request import PrepareOptions
    from tonnage.prepare.run import Standing
    from tonnage.prepare.summary import Summary

_COLUMNS = ("rank", "planned_bytes", "written_bytes", "difference", "file_bytes", "files")


def prepare(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A checkpoint: a directory, hf:org/name, https://, s3://.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", parser=here, metavar="PATH", help="Directory to write: new, empty, or one to be resumed."
        ),
    ],
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"],
        typer.Option(
            "--engine",
            help="Whose placement rules. By default split: everything that can be cut is cut, and no engine need be "
            "chosen; vllm for what `tonnage serve` is to start.",
        ),
    ] = "split",
    convert: ConvertTo = "none",
    layout: Annotated[
        Literal["tp", "hf"], typer.Option("--layout", help="One directory per rank, or one standard checkpoint.")
    ] = "tp",
    quant_style: Annotated[
        Literal["compressed-tensors", "modelopt", "mxfp8"],
        typer.Option("--quant-style", help="How layout hf states the conversion; mxfp8 is for SGLang."),
    ] = "compressed-tensors",
    scale_rule: Annotated[
        Literal["rceil", "floor", "even", "compressed-tensors"],
        typer.Option("--scale-rule", help="How the largest value of a block becomes its scale."),
    ] = "rceil",
    nonfinite: Annotated[
        Literal["refuse", "keep"], typer.Option("--nonfinite", help="NaN and infinity in tensors to be converted.")
    ] = "refuse",
    hash_name: Annotated[
        Literal["blake3", "sha256"], typer.Option("--hash", help="Digests taken while writing.")
    ] = "blake3",
    source_digests: Annotated[
        bool,
        typer.Option(
            "--source-digests/--no-source-digests",
            help="Take the digest of every source file as well: prepare.json then names the bytes it was made of.",
        ),
    ] = True,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Write only these ranks, such as 0-3 or 0,2; all by default.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; one per core by default.")] = None,
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option("--executor", help="Processes of this machine, or the nodes of a Ray cluster it is one of."),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Of the Ray cluster; found by itself if not given."),
    ] = None,
    node_resource: Annotated[
        str | None,
        typer.Option("--node-resource", help="Only nodes with this Ray resource, such as node:10.0.0.7, which is one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, whatever was prepared here before.")] = False,
    as_json: Json = False,
) -> None:
    """Write the files of every rank, exactly as planned.

    Cut, converted if wanted, resumable after anything.

    Example: tonnage prepare ./Llama-3.1-8B --tp 2 --engine vllm --convert mxfp8 -o prepared --dry-run
    """
    from tonnage.api import PlanRequest
    from tonnage.prepare.pool import local_processes
    from tonnage.prepare.request import PrepareOptions
    from tonnage.prepare.run import run_preparation
    from tonnage.prepare.summary import summary_bytes

    options = PrepareOptions(
        layout=layout,
        quant_style=quant_style,
        scale_rule=scale_rule,
        nonfinite=nonfinite,
        hash=hash_name,
        source_digests=source_digests,
        ranks=parse_ranks(ranks),
        workers=workers,
    )
    cluster = _cluster(executor, address, node_resource, workers)
    with interruptible(), system_errors(output):
        request = PlanRequest(tp=tp, ep=ep, pp=pp, engine=engine, convert=convert)
        preparation = _preparation(source, output, request, options)
        if cluster is not None:
            preparation = replace(preparation, workers=0)
        if dry_run:
            _emit_dry_run(preparation, force=force, as_json=as_json)
            return
        begun: list[bool] = []
        # What Ray says of its nodes, it says on stdout.
        with progress() as show, nullcontext() if cluster is None else redirect_stdout(sys.stderr):

            def follow(standing: Standing) -> None:
                begun[:] = [True]
                show(standing)

            summary = run_preparation(preparation, follow, force=force, executor=cluster or local_processes)
    if as_json:
        emit_json(json.loads(summary_bytes(summary)))
    else:
        _emit_summary(preparation, summary)
    if not begun:
        note("nothing was written: it was prepared so before")
    _note_split(request, layout)


def _note_split(request: PlanRequest, layout: str) -> None:
    """Say of ranks that are cut by no engine's rules what that means for serving them."""
    if request.engine == "split" and layout == "tp" and request.topology.world_size > 1:
        note("note: cut by the rules of split, not of an engine; `tonnage serve` starts what --engine vllm cuts")


def _cluster(executor: str, address: str | None, node_resource: str | None, tasks: int | None) -> RayCluster | None:
    """Return the cluster that is to do the work; ``None`` for this machine."""
    from tonnage.errors import Problem, UnitError

    if executor == "ray":
        from tonnage.prepare.executor_ray import RayCluster

        return RayCluster(address=address, node_resource=node_resource, most_tasks=tasks)
    if address is not None or node_resource is not None:
        raise UnitError(
            Problem(where="--address, --node-resource", what="belong to a cluster", expected="--executor ray")
        )
    return None


def _preparation(source: str, output: Path, request: PlanRequest, options: PrepareOptions) -> Preparation:
    from tonnage.api import plan_checkpoint
    from tonnage.cli.opening import Opening
    from tonnage.errors import CheckpointError, Problem
    from tonnage.prepare.request import prepare_placement
    from tonnage.prepare.schedule import AS_STORED
    from tonnage.report.documents import plan_document

    if options.layout == "hf" and request.engine != AS_STORED:
        note(f"tonnage: --engine {request.engine} changes nothing: layout hf has the shapes of the checkpoint")
        request = replace(request, engine=AS_STORED)
    checkpoint = Opening().checkpoint(source)
    if checkpoint.headers is None or checkpoint.source is None:
        raise CheckpointError(Problem(where=source, what="no weights to prepare", expected="safetensors files"))
    plan = plan_checkpoint(checkpoint, request)
    assert plan.placement is not None  # the exact estimator has one
    return prepare_placement(
        plan.placement,
        checkpoint.source,
        output,
        options,
        headers=checkpoint.headers,
        digest=checkpoint.digest,
        plan=plan_document(checkpoint, request, plan, suggestions=()),
    )


# --- results ----------------------------------------------------------------------------------------------------------


def _emit_dry_run(preparation: Preparation, *, force: bool, as_json: bool) -> None:
    """Refuse what a run would refuse, another's files or no room for ours; else say what would be written."""
    from tonnage.prepare.checks import ASSUMED_BYTES_PER_SECOND, disk_free_bytes, disk_needed_bytes
    from tonnage.prepare.resume import check_output

    check_output(preparation, force=force)
    survey, output = preparation.survey, preparation.setup.output
    seconds = survey.written_bytes / ASSUMED_BYTES_PER_SECOND
    needed, free = disk_needed_bytes(survey.outputs), disk_free_bytes(output)
    rows = [
        {
            "rank": rank,
            "planned_bytes": planned,
            "payload_bytes": survey.payload_bytes(rank),
            "files": sum(one.rank == rank for one in survey.outputs),
        }
        for rank, planned in preparation.planned_bytes.items()
    ]
    if as_json:
        emit_json(
            {
                "schema": "tonnage.prepare-dry-run/1",
                "ranks": rows,
                "written_bytes": sum(one.file_bytes for one in survey.outputs),
                "disk_needed_bytes": needed,
                "disk_free_bytes": free,
                "workers": preparation.workers,
                "peak_memory_bytes": preparation.memory_bytes,
                "transfer_bytes": survey.transfer_bytes,
                "task_memory_bytes": preparation.task_memory_bytes,
                "expected_seconds": round(seconds, 1),
                "assumed_bytes_per_second": ASSUMED_BYTES_PER_SECOND,
            }
        )
    else:
        _emit_table(rows, ("rank", "planned_bytes", "payload_bytes", "files"))
        _emit_conversion(preparation)
        (unit, text), (unit_free, text_free) = unit_for(needed), unit_for(free)
        emit(f"disk: {text(needed)} {unit} needed, {text_free(free)} {unit_free} free")
        if survey.remote:
            unit, text = unit_for(survey.transfer_bytes)
            emit(f"network: {text(survey.transfer_bytes)} {unit} to be read{_read_why(preparation)}")
        if preparation.workers:
            emit(f"memory: at most {preparation.memory_bytes // MIB} MiB in {counted(preparation.workers, 'worker')}")
        else:
            emit(f"memory: at most {preparation.task_memory_bytes // MIB} MiB for every task on a node")
        emit(f"time: about {seconds:.0f} s, at an assumed {ASSUMED_BYTES_PER_SECOND // 10**6} MB/s written")
        emit("nothing was written (--dry-run)")


def _read_why(preparation: Preparation) -> str:
    """Say what is read of a source over the network besides what is written."""
    if any(task.jobs and task.digested_bytes is None for task in preparation.survey.tasks):
        return "; source files are not compared with the digests of their origin (--no-source-digests)"
    return ", every source file whole for its digest"


def _emit_summary(preparation: Preparation, summary: Summary) -> None:
    from tonnage.errors import one_line

    rows = [
        {
            "rank": rank.rank,
            "planned_bytes": rank.planned_bytes,
            "written_bytes": rank.payload_bytes,
            "difference": rank.payload_bytes - rank.planned_bytes,
            "file_bytes": rank.file_bytes,
            "files": len(rank.files),
        }
        for rank in summary.ranks
    ]
    _emit_table(rows, _COLUMNS)
    noisy = [tensor for tensor in summary.converted if tensor.sqnr_db is not None]
    if noisy:
        worst = min(noisy, key=lambda tensor: tensor.sqnr_db or 0)
        largest = f"{one_line(worst.tensor)}: SQNR {worst.sqnr_db:.2f} dB"
        emit(f"{counted(len(summary.converted), 'tensor')} converted; largest error in {largest}")
    _emit_conversion(preparation)
    total = sum(one.file_bytes for one in preparation.survey.outputs)
    unit, text = unit_for(total)
    where = one_line(str(preparation.setup.output))
    emit(f"{where}: {text(total)} {unit} in {summary.seconds:.1f} s; planned == written on every rank")


def _emit_conversion(preparation: Preparation) -> None:
    """Say what the conversion leaves as it is, as the plan does."""
    from tonnage.errors import one_line
    from tonnage.plan_notes import CONVERT_NOTE

    for text in (preparation.plan or {}).get("notes", ()):
        if text.startswith(CONVERT_NOTE):
            emit(one_line(text))


def _emit_table(rows: list[dict[str, int]], columns: tuple[str, ...]) -> None:
    from tonnage.report.tables import add_row, new_table, render

    table = new_table(*(column.replace("_", " ") for column in columns))
    for row in rows:
        add_row(table, *(f"{row[column]:,}" for column in columns))
    emit(render(table))
