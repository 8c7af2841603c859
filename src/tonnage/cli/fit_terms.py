"""``tonnage calibrations fit-terms``: for maintainers, from collected logs to the records the package ships."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json, emit, emit_json, here, note
from tonnage.errors import CheckpointError, ConfigError, PlacementError, Problem, TonnageError, one_line
from tonnage.units import counted

if TYPE_CHECKING:
    from tonnage.term_evidence import Logged, LogRow

MOST_LOG_BYTES = 1 << 26


def fit_terms(
    logs: Annotated[Path, typer.Argument(metavar="LOGS", help="Logs, one JSON object per line.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=here, metavar="PATH", help="Directory for one file of records per engine."
        ),
    ],
    configs: Annotated[
        Path | None, typer.Option(help="Directory of config.json files called ORG__NAME.json, for logs without one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the terms beside weights and cache to logged figures, and write the records with all their evidence.

    Logs whose model is unknown or whose topology has no rule are named and left out.

    Example: tonnage calibrations fit-terms logs.jsonl -o src/tonnage/calibrations/terms --configs configs
    """
    from tonnage.calibrations.term_records import write_terms
    from tonnage.cli.records import write_records
    from tonnage.fit_terms import fit_files
    from tonnage.memory.supply import gpu_table
    from tonnage.term_evidence import seen_in, seen_in_table

    used, left_out = read_logs(logs, configs)
    files = fit_files([*(one for log in used for one in seen_in(log)), *seen_in_table(gpu_table().gpus)])
    for name, file in files.items():
        write_records([output / f"{name}.json"], write_terms(file), force=True)
    counts = {name: len(file.records) for name, file in files.items()}
    if as_json:
        emit_json({"schema": "tonnage.fit-terms/1", "logs": len(used), "records": counts,
                   "left_out": [str(problem) for problem in left_out]})  # fmt: skip
        return
    for problem in left_out:
        note(f"left out: {problem}")
    emit(f"{counted(len(used), 'log')}; records: " + ", ".join(f"{count} of {name}" for name, count in counts.items()))


def read_logs(path: Path, configs: Path | None = None) -> tuple[list[Logged], list[Problem]]:
    """Return the logs of a file with their models, and why others are left out.

    Raises:
        CheckpointError: The file is no such list.
    """
    import msgspec

    from tonnage.checkpoint.io import read_bytes
    from tonnage.term_evidence import LogRow

    used: list[Logged] = []
    left_out: list[Problem] = []
    known: set[str] = set()
    for number, line in enumerate(
        read_bytes(path, limit_bytes=MOST_LOG_BYTES, kind=CheckpointError).splitlines(), start=1
    ):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=LogRow)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            found = one_line(str(error))
            raise CheckpointError(
                Problem(where=f"{path.name}:{number}", what="no log record", expected="one JSON object", found=found)
            ) from error
        if row.id in known:
            left_out.append(Problem(where=one_line(row.id), what="another log of this name came before"))
            continue
        known.add(row.id)
        try:
            used.append(with_model(row, configs))
        except TonnageError as error:
            left_out.append(Problem(where=one_line(row.id), what=str(error.problems[0])))
    return used, left_out


def with_model(row: LogRow, configs: Path | None) -> Logged:
    """Return a log with the shape of the rank it is about: the first, whose figures a log prints first.

    Raises:
        TonnageError: Its model, engine or topology is not known here.
    """
    from tonnage.api import checkpoint_from_config, open_checkpoint
    from tonnage.engines import engine
    from tonnage.model_shape import model_shape
    from tonnage.placement import place
    from tonnage.term_evidence import deployment_of, logged, refused

    refusal = refused(row)
    if refusal is not None:
        raise PlacementError(refusal)
    if row.shape is not None:
        return logged(row, row.shape)
    name = (row.model_id or "").replace("/", "__")
    if row.config is not None:
        checkpoint = checkpoint_from_config(row.config, name=row.model_id or row.id)
    elif configs is not None and name and (configs / f"{name}.json").parent == configs:
        checkpoint = open_checkpoint(configs / f"{name}.json")
    else:
        raise ConfigError(Problem(where=one_line(row.model_id or "no model id"), what="no config.json of this model"))
    deployment = deployment_of(row)
    placement = place(checkpoint.assignment, deployment.topology, engine(deployment.engine))
    dtype_bytes = 4 if (row.dtype_or_quant or "").startswith("float32") else 2
    return logged(row, model_shape(placement, dtype_bytes=dtype_bytes))
