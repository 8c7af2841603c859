"""Writing what vLLM's ``sharded_state`` loader reads, from ranks prepared by its rules; no byte of a weight changes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonnage.checkpoint.io import read_bytes, read_json
from tonnage.compare.model import CONFIG, Model, open_model
from tonnage.errors import PlacementError, Problem, TonnageError
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES
from tonnage.prepare.documents import PLAN, SUMMARY
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES
from tonnage.rank_names.exl3 import SCHEMA
from tonnage.rank_names.files import FILE_BYTES, Entry, make_empty, packed, side_files, write_documents, write_file
from tonnage.rank_names.fused import CACHE_SCALES, fused_tensors, layers_of

_ONE = struct.pack("<f", 1.0)


def write_vllm_sharded(prepared: Path, output: Path, *, file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Write ``model-rank-R-part-P.safetensors`` of every rank and return what was written.

    config.json is written last: a directory without it is not complete.

    Args:
        prepared: A prepared directory or package, made with ``--engine vllm``, all ranks in it, unquantised.
        output: Must not exist, or be empty.
        file_bytes: Most payload bytes of a file; a larger tensor is a file of its own.

    Raises:
        PlacementError: It was not made for vLLM, or names of the family's fused modules are not known.
        PrepareError: The output is not empty or cannot be written.
        TonnageError: A file of the preparation is wrong.
    """
    with open_model(prepared) as model:
        _check_plan(model)
        entries = {rank: list(_entries(model, rank)) for rank in sorted(model.views)}
        make_empty(output)
        count = 0
        for rank, tensors in entries.items():
            for part, file in enumerate(packed(tensors, file_bytes, sort=True)):
                write_file(output / f"model-rank-{rank}-part-{part}.safetensors", file, model)
                count += 1
        config = read_bytes(model.root / CONFIG)
        write_documents(output, {**side_files(model, without=frozenset({CONFIG})), CONFIG: config})
    return {
        "schema": SCHEMA,
        "style": "vllm-sharded",
        "source": model.name,
        "tp": len(entries),
        "files": count,
        "tensors": sum(map(len, entries.values())),
        "payload_bytes": sum(entry.nbytes for tensors in entries.values() for entry in tensors),
    }


def _check_plan(model: Model) -> None:
    """Refuse what was cut by other rules than vLLM's, or over pipeline stages, or not for all ranks.

    Raises:
        PlacementError: As said.
    """
    plan = _plan(model)
    topology = plan.get("topology")
    sizes = topology if isinstance(topology, dict) else {}
    found = {"engine": plan.get("engine"), "pp": sizes.get("pp"), "ranks": sorted(model.views)}
    expected = {"engine": "vllm", "pp": 1, "ranks": list(range(int(sizes.get("tp", 0))))}
    if found != expected:
        what = "not all ranks of a preparation for vLLM"
        raise PlacementError(Problem(where=model.name, what=what, expected=str(expected), found=str(found)))


def _plan(model: Model) -> dict[str, object]:
    """Return the plan a preparation or package was made for."""
    if (model.root / SUMMARY).exists():
        summary = read_json(model.root / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES)
        plan = summary.get("plan")
        return plan if isinstance(plan, dict) else {}
    try:
        return read_json(model.root / PLAN, limit_bytes=MANIFEST_LIMIT_BYTES)
    except TonnageError as error:
        expected = f"{SUMMARY}, or {PLAN} of a package"
        raise PlacementError(
            Problem(where=model.name, what="no plan says for which engine", expected=expected)
        ) from error


def _entries(model: Model, rank: int) -> Iterator[Entry]:
    held = model.views[rank].tensors
    tensors = fused_tensors(held, model_type=str(model.fields.get("model_type")), where=model.name)
    for one in tensors:
        yield Entry(name=one.name, dtype=one.dtype, shape=one.shape, rank=rank, sources=one.sources)
    for prefix in layers_of(tensors):
        for scale in CACHE_SCALES:
            yield Entry(name=f"{prefix}self_attn.attn.{scale}", dtype="F32", shape=(), content=_ONE)
