"""``tonnage gpus``."""

from __future__ import annotations

from tonnage.cli.options import Json, emit, emit_json


def gpus(as_json: Json = False) -> None:
    """List the GPUs that are known, and what of each can be used.

    With how that is known.

    Example: tonnage gpus
    """
    from tonnage.memory.supply import gpu_table, supply_bytes

    rows = [(gpu, supply_bytes(gpu)) for gpu in gpu_table().gpus]
    if as_json:
        emit_json(
            {
                "schema": "tonnage.gpus/1",
                "gpus": [
                    {"name": gpu.slug, "title": gpu.name, "aliases": list(gpu.aliases), "nominal_gb": gpu.nominal_gb,
                     "supply_bytes": supply.nbytes, "basis": supply.basis, "source": supply.source}
                    for gpu, supply in rows
                ],
            }
        )  # fmt: skip
        return
    from tonnage.report.tables import gpus_table, render

    emit(render(gpus_table([(gpu, supply.nbytes, supply.basis) for gpu, supply in rows])))
