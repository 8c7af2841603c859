"""``tonnage prepare``."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.cli.options import Ep, Json, Pp, Tp, emit, emit_json, note
from tonnage.cli.progress import progress
from tonnage.units import MIB, unit_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tonnage.api import PlanRequest
    from tonnage.prepare.preparation import Preparation
    from tonnage.prepare.request import PrepareOptions
    from tonnage.prepare.summary import Summary

INTERRUPTED = 130
TERMINATED = 143
_MOST_DIGITS = 9
_COLUMNS = ("rank", "planned_bytes", "written_bytes", "difference", "file_bytes", "files")


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint directory.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory to write: new, empty, or one to be resumed.")
    ],
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    engine: Annotated[
        Literal["vllm", "sglang", "exllamav3", "split"],
        typer.Option("--engine", help="Whose placement rules; split cuts everything that can be cut."),
    ] = "split",
    convert: Annotated[
        Literal["none", "mxfp8"], typer.Option("--convert", help="What becomes of BF16 projections.")
    ] = "none",
    layout: Annotated[
        Literal["tp", "hf"], typer.Option("--layout", help="One directory per rank, or one standard checkpoint.")
    ] = "tp",
    quant_style: Annotated[
        Literal["compressed-tensors", "modelopt"],
        typer.Option("--quant-style", help="How the config of layout hf states the conversion."),
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, whatever was prepared here before.")] = False,
    as_json: Json = False,
) -> None:
    """Write the files of every rank, exactly as planned.

    Cut, converted if wanted, resumable after anything.

    Example: tonnage prepare ./Llama-3.1-8B --tp 2 --convert mxfp8 -o prepared --dry-run
    """
    from tonnage.api import PlanRequest
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
        ranks=_parse_ranks(ranks),
        workers=workers,
    )
    with _interruptible(), _system_errors(output):
        request = PlanRequest(tp=tp, ep=ep, pp=pp, engine=engine, convert=convert)
        preparation = _preparation(source, output, request, options)
        if dry_run:
            _emit_dry_run(preparation, force=force, as_json=as_json)
            return
        with progress() as show:
            summary = run_preparation(preparation, show, force=force)
    if as_json:
        emit_json(json.loads(summary_bytes(summary)))
    else:
        _emit_summary(preparation, summary)


def _preparation(source: str, output: Path, request: PlanRequest, options: PrepareOptions) -> Preparation:
    from tonnage.api import open_checkpoint, plan_checkpoint
    from tonnage.errors import CheckpointError, Problem
    from tonnage.prepare.request import prepare_placement
    from tonnage.report.documents import plan_document

    checkpoint = open_checkpoint(source)
    if checkpoint.headers is None:
        raise CheckpointError(Problem(where=source, what="no weights to prepare", expected="safetensors files"))
    plan = plan_checkpoint(checkpoint, request)
    assert plan.placement is not None  # the exact estimator has one
    return prepare_placement(
        plan.placement,
        Path(source),
        output,
        options,
        headers=checkpoint.headers,
        digest=checkpoint.digest,
        plan=plan_document(checkpoint, request, plan, suggestions=()),
    )


def _parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks that ``0-3,6`` names."""
    from tonnage.errors import Problem, UnitError

    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = _parse_rank(first)
        end = _parse_rank(last) if dash else begin
        if begin is None or end is None or begin > end:
            expected = "ranks and ranges of ranks, such as 0-3 or 0,2"
            raise UnitError(Problem(where="--ranks", what="not a list of ranks", expected=expected, found=repr(text)))
        ranks.update(range(begin, end + 1))
    return tuple(sorted(ranks))


def _parse_rank(text: str) -> int | None:
    """Return a rank; ``None`` if it is none. Digits are counted first: Python refuses to read thousands of them."""
    from tonnage.topology import MOST_RANKS

    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) < MOST_RANKS):
        return None
    return int(text)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end a preparation as Ctrl-C does: workers gone, nothing half-written under a final name."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        note("tonnage: interrupted; run the same command again to resume")
        raise typer.Exit(INTERRUPTED) from None
    except _TerminatedError:
        note("tonnage: terminated; run the same command again to resume")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _system_errors(output: Path) -> Iterator[None]:
    """Turn what the system refuses this process into one line; a file that was named is named again."""
    from tonnage.errors import Problem
    from tonnage.prepare.io import PrepareError

    try:
        yield
    except OSError as error:
        if error.filename is None:  # the output of the command
            raise
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(output)
        raise PrepareError(Problem(where=where, what="cannot be used", found=error.strerror)) from error
    except MemoryError as error:
        raise PrepareError(Problem(where="memory", what="not enough for this process")) from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise PrepareError(Problem(where="threads", what="the system lets no more be started")) from error


# --- results ----------------------------------------------------------------------------------------------------------


def _emit_dry_run(preparation: Preparation, *, force: bool, as_json: bool) -> None:
    """Say what would be written; refuse what a run would refuse: another's files, no room for ours."""
    from tonnage.prepare.checks import ASSUMED_BYTES_PER_SECOND, disk_free_bytes, disk_needed_bytes
    from tonnage.prepare.resume import check_output

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
                "expected_seconds": round(seconds, 1),
                "assumed_bytes_per_second": ASSUMED_BYTES_PER_SECOND,
            }
        )
    else:
        _emit_table(rows, ("rank", "planned_bytes", "payload_bytes", "files"))
        _emit_conversion(preparation)
        unit, text = unit_for(needed)
        emit(f"disk: {text(needed)} {unit} needed, {text(free)} {unit} free")
        emit(f"memory: at most {preparation.memory_bytes // MIB} MiB in {preparation.workers} workers")
        emit(f"time: about {seconds:.0f} s, at an assumed {ASSUMED_BYTES_PER_SECOND // 10**6} MB/s written")
        emit("nothing was written (--dry-run)")
    check_output(preparation, force=force)


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
        emit(f"{len(summary.converted)} tensors converted; largest error in {largest}")
    _emit_conversion(preparation)
    total = sum(one.file_bytes for one in preparation.survey.outputs)
    unit, text = unit_for(total)
    where = one_line(str(preparation.setup.output))
    emit(f"{where}: {text(total)} {unit} in {summary.seconds:.1f} s; planned == written on every rank")


def _emit_conversion(preparation: Preparation) -> None:
    """Say what the conversion leaves as it is, as the plan does."""
    from tonnage.api import CONVERT_NOTE
    from tonnage.errors import one_line

    for text in (preparation.plan or {}).get("notes", ()):
        if text.startswith(CONVERT_NOTE):
            emit(one_line(text))


def _emit_table(rows: list[dict[str, int]], columns: tuple[str, ...]) -> None:
    from tonnage.report.tables import add_row, new_table, render

    table = new_table(*(column.replace("_", " ") for column in columns))
    for row in rows:
        add_row(table, *(f"{row[column]:,}" for column in columns))
    emit(render(table))
