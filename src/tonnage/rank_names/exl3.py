"""Writing a rank-sliced EXL3 checkpoint from prepared ranks; no byte of a weight changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonnage.compare.model import CONFIG, Model, open_model
from tonnage.errors import PlacementError, Problem, one_line
from tonnage.prepare.layout import file_name, index_bytes
from tonnage.rank_names.files import FILE_BYTES, Entry, make_empty, packed, side_files, write_documents, write_file
from tonnage.rank_names.naming import RATES_FILE, RankNames, of_rank, rank_names
from tonnage.sources.model import INDEX_FILE

SCHEMA = "tonnage.export-names/1"
_STAYS_BEHIND = frozenset({CONFIG, "quantization_config.json"})
"""Written anew; and what names the tensors as they were."""

_QUANTIZATION = "quantization_config"


def write_rank_names(prepared: Path, output: Path, *, file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Write the checkpoint and return what was written, as ``tonnage.export-names/1``.

    config.json is written last: a directory without it is not complete.

    Args:
        prepared: A prepared directory or package of an EXL3 checkpoint, all ranks in it.
        output: Must not exist, or be empty.
        file_bytes: Most payload bytes of a file; a larger tensor is a file of its own.

    Raises:
        PlacementError: The ranks cannot be such a checkpoint.
        PrepareError: The output is not empty or cannot be written.
        TonnageError: A file of the preparation is wrong.
    """
    with open_model(prepared) as model:
        names = rank_names({rank: view.tensors for rank, view in model.views.items()}, where=model.name)
        config = _config(model, names)
        files = [*packed(_whole_entries(model, names), file_bytes, sort=True)]
        files += packed(_sliced_entries(model, names), file_bytes, sort=False)
        make_empty(output)
        weight_map: dict[str, str] = {}
        for number, entries in enumerate(files, start=1):
            name = file_name(number, len(files))
            weight_map.update((entry.name, name) for entry in entries)
            write_file(output / name, entries, model)
        total = sum(entry.nbytes for entries in files for entry in entries)
        documents = side_files(model, without=_STAYS_BEHIND)
        if names.is_mixed:
            documents[RATES_FILE] = (json.dumps(names.rates_document()) + "\n").encode()
        write_documents(output, {**documents, INDEX_FILE: index_bytes(weight_map, total), CONFIG: config})
    return {
        "schema": SCHEMA,
        "style": "exl3",
        "source": model.name,
        "tp": names.tp,
        "files": len(files),
        "tensors": len(weight_map),
        "sliced_tensors": len(names.sliced) * names.tp,
        "payload_bytes": total,
        "hybrid_tr3_tail": names.tail(),
    }


def _config(model: Model, names: RankNames) -> bytes:
    """Return config.json with the facts a loader needs.

    Raises:
        PlacementError: It does not state EXL3 at the top.
    """
    stated = model.fields.get(_QUANTIZATION)
    if not isinstance(stated, dict) or stated.get("quant_method") != "exl3":
        found = one_line(str(stated)) if stated else "nothing"
        what, expected = f"{_QUANTIZATION} of {CONFIG}", 'quant_method "exl3"'
        raise PlacementError(Problem(where=model.name, what=what, expected=expected, found=found))
    statement = {key: value for key, value in stated.items() if key != "tensor_storage"}
    fields = {**model.fields, _QUANTIZATION: statement, "hybrid_tr3_tail": names.tail()}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _whole_entries(model: Model, names: RankNames) -> Iterator[Entry]:
    sliced = frozenset(names.sliced)
    for _, tensor in sorted(model.tensors.items()):
        for whole in (tensor.stored, tensor.scales):
            if whole is not None and whole.name not in sliced:
                yield Entry(name=whole.name, dtype=whole.dtype, shape=whole.shape, whole=whole)


def _sliced_entries(model: Model, names: RankNames) -> Iterator[Entry]:
    """Yield the parts of every expert's projection, rank by rank."""
    by_module: dict[str, list[str]] = {}
    for name in names.sliced:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for parts in by_module.values():
        for rank in range(names.tp):
            for name in parts:
                view = model.views[rank].tensors[name]
                yield Entry(name=of_rank(name, rank), dtype=view.dtype, shape=view.shape, rank=rank, sources=(name,))
