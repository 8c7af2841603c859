"""``tonnage export-names``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tonnage.cli.options import Json, Output, emit, emit_json
from tonnage.units import counted


def export_names(
    prepared: Annotated[Path, typer.Argument(metavar="PREPARED", help="A prepared directory or package.")],
    output: Output,
    style: Annotated[
        Literal["exl3", "vllm-sharded"],
        typer.Option("--style", help="EXL3 experts named by rank, or the files of vLLM's sharded_state loader."),
    ],
    as_json: Json = False,
) -> None:
    """Write prepared ranks under the names of other loaders.

    Example: tonnage export-names prepared --style exl3 -o rank-sliced
    """
    from tonnage.rank_names.exl3 import write_rank_names
    from tonnage.rank_names.vllm_sharded import write_vllm_sharded

    write = write_rank_names if style == "exl3" else write_vllm_sharded
    document = write(prepared, output)
    if as_json:
        emit_json(document)
    else:
        emit(
            f"{output}: {counted(document['tensors'], 'tensor')} of {counted(document['tp'], 'rank')},"
            f" {document['payload_bytes']:,} bytes in {counted(document['files'], 'file')}"
        )
