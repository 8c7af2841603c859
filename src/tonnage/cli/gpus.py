"""``tonnage gpus``."""

from __future__ import annotations

from tonnage.cli.options import Json, emit, emit_json


def gpus(as_json: Json = False) -> None:
    """List the GPUs that are known, and what of each can be used.

    With how that is known.

    Example: tonnage gpus
    """
    if as_json:
        from tonnage.report.documents import gpus_document

        emit_json(gpus_document())
        return
    from tonnage.memory.supply import gpu_table, supply_bytes
    from tonnage.report.tables import gpus_table, render

    rows = [(gpu, supply_bytes(gpu)) for gpu in gpu_table().gpus]
    emit(render(gpus_table([(gpu, supply.nbytes, supply.basis) for gpu, supply in rows])))
