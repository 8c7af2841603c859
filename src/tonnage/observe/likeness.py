"""Whether a log is of what was planned: a figure beside a plan of something else says nothing of either."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tonnage.errors import Problem
from tonnage.observe.compare import Comparison, topology_mismatch
from tonnage.observe.reader import Observation
from tonnage.observe.record import row
from tonnage.saved_plan import SavedPlan

_PART = re.compile(r"/|__")
_OTHER_GPU = 20
"""Totals that differ by more than a twentieth are those of different GPUs; drivers and reserves take less."""
_OTHER_MODEL = 10
"""Weights that differ by more than a tenth are those of different models; bounds of one model are nearer."""


def mismatches(observation: Observation, plan: SavedPlan, *, where: str) -> Iterator[Problem]:
    """Yield in what the engine and the sizes differ, as far as a log says them."""
    if plan.engine not in ("", "split", observation.engine):
        yield _problem(where, "engine", plan.engine, observation.engine)
        return
    sizes = topology_mismatch(observation, plan)
    if sizes is not None:
        axis, planned, found = sizes
        yield _problem(where, axis, planned, found)


def other_service(
    observation: Observation,
    plan: SavedPlan,
    comparisons: tuple[Comparison, ...],
    *,
    where: str,
    gpu: str | None = None,
    gpu_bytes: int | None = None,
) -> Iterator[Problem]:
    """Yield in what concurrency, GPU and model differ, as far as log and plan say them.

    A checkpoint may be called anything, so that a name alone makes no other model: its weights are other ones, too.

    Args:
        observation: Of the log.
        plan: What it is held against.
        comparisons: Of both.
        where: The log.
        gpu: Name of the GPU the log is of, where somebody says it.
        gpu_bytes: What an allocator sees of the GPU that was planned for, if it is one of the table.
    """
    said = row(observation)
    concurrency = plan.profile.concurrency
    if None not in (concurrency, said["max_num_seqs"]) and concurrency != said["max_num_seqs"]:
        yield _problem(where, "concurrency", concurrency, said["max_num_seqs"])
    planned_gpu = plan.supply.gpu if plan.supply else None
    total = observation.figures["total"].quantity if "total" in observation.figures else None
    if None not in (gpu, planned_gpu) and gpu != planned_gpu:
        yield _problem(where, "GPU", planned_gpu, gpu)
    elif gpu_bytes and total is not None and abs(total.nbytes - gpu_bytes) * _OTHER_GPU > gpu_bytes:
        yield _problem(where, "GPU", f"{planned_gpu}, {gpu_bytes} bytes", f"{total.nbytes} bytes in all")
    weights = [one for one in comparisons if one.what == "weights"]
    other = any(abs(one.measured.nbytes - one.planned_nbytes) * _OTHER_MODEL > one.planned_nbytes for one in weights)
    if other and names_differ(observation, plan):
        worst = max(weights, key=lambda one: abs(one.measured.nbytes - one.planned_nbytes))
        planned = f"{plan.checkpoint.name}, weights of {worst.planned_nbytes} bytes"
        yield _problem(where, "model", planned, f"{said['model_id']}, {worst.measured.nbytes} bytes")


def names_differ(observation: Observation, plan: SavedPlan) -> bool:
    """Whether log and plan name a model, and not the same one; of a path or a repository its last part counts."""
    found = row(observation)["model_id"]
    return bool(found and plan.checkpoint.name) and _last(str(found)) != _last(plan.checkpoint.name)


def _last(name: str) -> str:
    return _PART.split(name.rstrip("/").casefold())[-1]


def _problem(where: str, what: str, expected: object, found: object) -> Problem:
    return Problem(
        where=where, what=f"the log is of another {what} than the plan", expected=str(expected), found=str(found)
    )
