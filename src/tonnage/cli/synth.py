"""``tonnage synth``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tonnage.cli.options import Json, Output, Source, emit, emit_json, note
from tonnage.units import counted


def synth(
    source: Source,
    output: Output,
    scale_down: Annotated[
        bool,
        typer.Option("--scale-down", help="A small model of the same family and tensor kinds, with random weights."),
    ] = False,
    storage: Annotated[
        Literal["config", "bf16", "mxfp8", "exl3"], typer.Option("--storage", help="How weights are stored.")
    ] = "config",
    experts: Annotated[
        Literal["same", "exl3", "exl3-v1"], typer.Option("--experts", help="How routed experts are stored.")
    ] = "same",
    bits: Annotated[str, typer.Option("--bits", help="Bits per weight of exl3 and exl3-v1, such as 2 or 2.5.")] = "2",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the random weights; equal seeds give equal bytes.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Write a rehearsal checkpoint.

    Exact headers over sparse files of full size, or with --scale-down a small model.

    Example: tonnage synth config.json -o rehearsal --scale-down
    """
    from tonnage.api import read_config
    from tonnage.synth.io import RehearsalOptions, write_rehearsal
    from tonnage.units import gib, parse_number

    options = RehearsalOptions(
        scaled_down=scale_down, storage=storage, experts=experts, bits=parse_number(bits, where="--bits"), seed=seed
    )
    rehearsal = write_rehearsal(read_config(source), output, options)
    layout = rehearsal.layout
    if as_json:
        emit_json(
            {
                "schema": "tonnage.synth/1",
                "directory": str(output),
                "files": len(layout.shards) + len(layout.slot_files),
                "tensors": layout.tensor_count,
                "payload_bytes": layout.payload_bytes,
                "file_bytes": rehearsal.file_bytes,
                "notes": list(rehearsal.notes),
            }
        )
        return
    emit(
        f"{output}: {counted(len(layout.shards) + len(layout.slot_files), 'file')}, "
        f"{counted(layout.tensor_count, 'tensor')}, "
        f"{layout.payload_bytes:,} payload bytes ({gib(layout.payload_bytes)} GiB)"
    )
    for text in rehearsal.notes:
        note(text)
