"""From a placement and what the user wants to a preparation, ready to run or to be shown as a dry run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from tonnage.assignment import Assigned
from tonnage.checkpoint.io import CheckpointHeaders, as_source, digest_headers
from tonnage.errors import PlacementError, Problem
from tonnage.placement import Placement
from tonnage.prepare.hf import QuantStyle
from tonnage.prepare.io import Hash, PrepareError
from tonnage.prepare.jobs import ScaleRule
from tonnage.prepare.journal import Identity
from tonnage.prepare.layout import USUAL_SIDE_FILES, choose_side_files
from tonnage.prepare.messages import WINDOW_BYTES, Setup
from tonnage.prepare.preparation import Preparation, make_preparation
from tonnage.prepare.schedule import OutputLayout, make_schedule
from tonnage.prepare.takes import NOT_THE_SLICE
from tonnage.sources.addresses import is_remote
from tonnage.sources.model import FileFacts, Source
from tonnage.sources.parallel import in_order
from tonnage.topology import cut_words

if TYPE_CHECKING:
    from pathlib import Path


_UNLISTED = ("http:", "https:")
"""What the address of a source begins with that nothing lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """How a placement is written.

    Attributes:
        layout: One directory per rank, or an unsharded standard checkpoint.
        quant_style: How the config of layout ``hf`` states a conversion.
        scale_rule: Of converted tensors.
        nonfinite: Whether NaN and infinity are refused in converted tensors.
        hash: Which digests.
        source_digests: Whether the digest of every source file is taken; no written byte depends on it.
        ranks: Global ranks to write; all if not given.
        workers: Processes; one per core if not given.
        window_bytes: Most that a worker reads at once.
        job_bytes: Source bytes of a job; those of the schedule if not given.
    """

    layout: OutputLayout = "tp"
    quant_style: QuantStyle = "compressed-tensors"
    scale_rule: ScaleRule = "rceil"
    nonfinite: Literal["refuse", "keep"] = "refuse"
    hash: Hash = "blake3"
    source_digests: bool = True
    ranks: tuple[int, ...] | None = None
    workers: int | None = None
    window_bytes: int = WINDOW_BYTES
    job_bytes: int | None = None


def prepare_placement(  # noqa: PLR0913 - the values of all earlier stages
    placement: Placement,
    source: Source | Path,
    output: Path,
    options: PrepareOptions,
    *,
    headers: CheckpointHeaders,
    digest: str,
    plan: Mapping[str, Any] | None = None,
) -> Preparation:
    """Return the preparation of a placement; nothing is written.

    Args:
        placement: What every rank holds.
        source: The checkpoint; its directory if it is a path.
        output: Where it goes.
        options: How.
        headers: Those the placement was made from.
        digest: Of these headers.
        plan: The document of the plan of this placement, for the summary.

    Raises:
        PlacementError: A tensor cannot be cut as planned.
        CheckpointError: The headers are not those of the placement.
        PrepareError: The checkpoint changed, or the destination cannot be one.
    """
    source = as_source(source)
    if source.address.startswith(_UNLISTED):
        list(in_order(source.has, USUAL_SIDE_FILES, threads=source.parallel))  # what is found is listed then
    side_files = choose_side_files({name: facts.nbytes for name, facts in source.list_files().items()})
    schedule_of = partial(
        make_schedule,
        placement,
        headers.shards,
        layout=options.layout,
        scale_rule=options.scale_rule,
        quant_style=options.quant_style,
        side_files=side_files,
        job_bytes=options.job_bytes,
    )
    try:
        schedule = schedule_of(ranks=options.ranks)
    except PlacementError as error:
        raise PlacementError(*error.problems, *_other_engine(placement.engine.name, error.problems)) from error
    setup = Setup(
        address=source.address,
        output=output,
        scale_rule=options.scale_rule,
        keep_nonfinite=options.nonfinite == "keep",
        hash=options.hash,
        window_bytes=options.window_bytes,
    )
    topology = placement.topology

    def identity(sources: tuple[FileFacts, ...], schedule_digest: str) -> Identity:
        return Identity(
            checkpoint=digest,
            address=source.address if is_remote(source.address) else None,
            sources=sources,
            recipe=f"{placement.assignment.blueprint.recipe.family} {_recipes_digest()}",
            topology=cut_words(topology.tp, topology.ep, topology.pp),
            engine=placement.engine.name,
            convert=_conversion(placement.assignment.entries),
            scale_rule=options.scale_rule,
            nonfinite=options.nonfinite,
            layout=options.layout,
            quant_style=options.quant_style,
            hash=options.hash,
            ranks=schedule.ranks,
            schedule=schedule_digest,
        )

    planned = {rank: _planned_bytes(placement, rank, options.layout) for rank in schedule.ranks}
    preparation = make_preparation(
        schedule,
        source,
        setup,
        identity,
        planned_bytes=planned,
        side_files=side_files,
        source_digests=options.source_digests,
        workers=options.workers,
        plan=plan,
        whole=schedule_of() if len(schedule.ranks) < topology.world_size else None,
    )
    _check_unchanged(source, headers, digest)
    return preparation


def _conversion(entries: Sequence[Assigned]) -> str:
    """Return what is converted, in the words of the command."""
    roles = {entry.module.rule.role for entry in entries if entry.converted_from}
    return "none" if not roles else "mxfp8-experts" if "expert" in roles else "mxfp8"


def _other_engine(engine: str, problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield the way out where an engine makes something else of tensors while it loads."""
    if engine != "split" and any(problem.what.startswith(NOT_THE_SLICE) for problem in problems):
        what = "makes something else of these tensors while it loads; no file can hold that"
        yield Problem(where=f"--engine {engine}", what=what, expected="--engine split, which writes slices as stored")


def _planned_bytes(placement: Placement, rank: int, layout: OutputLayout) -> int:
    """Return the weight bytes of a rank. In layout ``hf`` the container comes along as it is, in no rank's files."""
    pp_rank, tp_rank = divmod(rank, placement.topology.tp)
    nbytes = placement.payload_bytes if layout == "tp" else placement.file_bytes
    return nbytes(pp_rank, tp_rank)


def _check_unchanged(source: Source, headers: CheckpointHeaders, digest: str) -> None:
    """Read the headers once more, now that size and version of every file are on record: they are those of the plan.

    What a remote source is asked for is of the version it was first found in, or refused: it need not be read again.

    Raises:
        CheckpointError: A file has another size, or cannot be read.
        PrepareError: A header changed.
    """
    found = digest if source.transfer is not None else digest_headers(source, headers)
    if found != digest:
        raise PrepareError(
            Problem(where=source.address, what="changed since it was planned", expected=digest, found=found)
        )


def _recipes_digest() -> str:
    """Return the digest of all recipes: they include each other."""
    digest = hashlib.sha256()
    for file in sorted(resources.files("tonnage.recipes").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
