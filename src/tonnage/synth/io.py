"""Writing a rehearsal checkpoint: a directory that looks in every header like the real one.

Sparse files have their full size and no blocks but those of the headers. Everything is written into a directory beside
the final one, which gets its name when all is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import CheckpointError, Problem
from tonnage.formats.exl3_v1_manifest import manifest_document
from tonnage.formats.exl3_v1_names import EXL3_V1
from tonnage.sources.model import INDEX_FILE
from tonnage.synth.layout import LaidFile, Layout, header_bytes, index_bytes, plan_layout
from tonnage.synth.shrink import scale_down
from tonnage.synth.storage import DEFAULT_BITS, Experts, Storage, store_as
from tonnage.synth.values import PIECE_BYTES, Values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from fractions import Fraction

    from tonnage.checkpoint.config import ModelConfig

DIGEST_LIMIT_BYTES = 2 << 30
"""A container up to this size gets true digests without being asked for."""

_ZEROS = bytes(PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalOptions:
    """What kind of rehearsal is wanted.

    Attributes:
        scaled_down: A small model of the same family and tensor kinds with random weights, instead of sparse files.
        storage: How everything is stored.
        experts: How routed experts are stored.
        bits: Bits per weight of EXL3 and exl3-v1.
        seed: Of the random weights; the same seed gives the same bytes.
        sharded: Whether to cut the checkpoint by layers; ``None`` cuts from 5 GB.
        true_digests: Whether a manifest states digests of whole layer files; ``None`` up to 2 GiB in all.
    """

    scaled_down: bool = False
    storage: Storage = "config"
    experts: Experts = "same"
    bits: Fraction = DEFAULT_BITS
    seed: int = 0
    sharded: bool | None = None
    true_digests: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was written.

    Attributes:
        layout: Every safetensors file.
        file_bytes: Logical size of the safetensors files.
        notes: What the reader must know.
    """

    layout: Layout
    file_bytes: int
    notes: tuple[str, ...] = ()


def write_rehearsal(config: ModelConfig, directory: Path, options: RehearsalOptions) -> Rehearsal:
    """Write a rehearsal checkpoint and say what was written.

    Args:
        config: The model.
        directory: Where it goes: a new or an empty directory.
        options: What kind of rehearsal.

    Raises:
        CheckpointError: The directory is in use, or a file cannot be written; nothing is left behind.
        TonnageError: The config has no recipe, or its model cannot be stored as wanted.
    """
    model = store_as(
        scale_down(config) if options.scaled_down else config,
        storage=options.storage,
        experts=options.experts,
        bits=options.bits,
    )
    layout = plan_layout(model.entries, geometry=model.geometry, sharded=options.sharded)
    container_bytes = sum(file.payload_bytes for file in layout.slot_files)
    whole = container_bytes <= DIGEST_LIMIT_BYTES if options.true_digests is None else options.true_digests
    values = Values(options.seed) if options.scaled_down else None
    with _new_directory(directory) as unfinished:
        _write_json(unfinished / "config.json", model.fields)
        if model.hf_quant is not None:
            _write_json(unfinished / "hf_quant_config.json", model.hf_quant)
        sizes = [_write_file(unfinished, file, values).file_bytes for file in layout.shards]
        if len(layout.shards) > 1:
            (unfinished / INDEX_FILE).write_bytes(index_bytes(layout))
        slots = [_write_file(unfinished, file, values, digest=True, whole=whole) for file in layout.slot_files]
        if layout.geometry is not None:
            digests = {file.layer: one.sha256 for file, one in zip(layout.slot_files, slots, strict=True)}
            document = manifest_document(layout.geometry, digests)
            _write_json(unfinished / EXL3_V1.manifest_name, document, sort_keys=True)
    notes = () if whole or not slots else (f"{EXL3_V1.manifest_name} states digests of headers, not of whole files",)
    return Rehearsal(layout=layout, file_bytes=sum(sizes) + sum(one.file_bytes for one in slots), notes=notes)


@dataclass(frozen=True, slots=True)
class _Written:
    file_bytes: int
    sha256: str


def _write_file(
    directory: Path, file: LaidFile, values: Values | None, *, digest: bool = False, whole: bool = True
) -> _Written:
    """Write one safetensors file: its header, then values, or nothing up to its full size.

    The digest is that of the whole file, or of its header alone.
    """
    tensors = file.tensors()
    header = header_bytes(tensors, file.metadata)
    file_bytes = len(header) + (tensors[-1].end if tensors else 0)
    hashed = hashlib.sha256(header)
    with (directory / file.name).open("xb") as stream:
        stream.write(header)
        if values is None:
            stream.truncate(file_bytes)
        else:
            for tensor in tensors:
                for piece in values.pieces(file.name, tensor):
                    stream.write(piece)
                    if digest and whole:
                        hashed.update(piece)
    if values is None and digest and whole:
        _hash_zeros(hashed, file_bytes - len(header))
    return _Written(file_bytes, hashed.hexdigest())


def _hash_zeros(hashed: Any, nbytes: int) -> None:
    for _ in range(nbytes // PIECE_BYTES):
        hashed.update(_ZEROS)
    hashed.update(_ZEROS[: nbytes % PIECE_BYTES])


def _write_json(path: Path, fields: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False, sort_keys=sort_keys)
    path.write_text(text + "\n", encoding="utf-8")


@contextmanager
def _new_directory(final: Path) -> Iterator[Path]:
    """Yield a directory beside the final one, and give it the final name if all went well; else remove it."""
    if os.path.lexists(final) and (not final.is_dir() or any(final.iterdir())):
        expected = "a new or an empty directory"
        raise CheckpointError(Problem(where=str(final), what="output is in use", expected=expected))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".unfinished", dir=final.parent))
        try:
            unfinished.chmod(0o755)  # the directory of a checkpoint, not of a secret
            yield unfinished
            unfinished.rename(final)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        what = "cannot be written"
        raise CheckpointError(Problem(where=str(final), what=what, found=error.strerror or str(error))) from error
