"""The same question to both: how many bytes does this rank hold? Or is the topology refused?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_classes import Rank, Refused, parameter_bytes

from tonnage import PlanRequest, plan_checkpoint
from tonnage.api import checkpoint_from_config
from tonnage.errors import PlacementError

REFUSED = "refused"
Answer = int | str


def allocated(config: Mapping[str, Any], where: Rank) -> Answer:
    """Return what vLLM's classes allocate."""
    try:
        return parameter_bytes(config, where)
    except Refused:
        return REFUSED


def planned(config: Mapping[str, Any], where: Rank) -> Answer:
    """Return what the plan says."""
    request = PlanRequest(tp=where.tp, ep=where.tp if where.ep else 1, pp=where.pp, engine="vllm")
    checkpoint = checkpoint_from_config(config, name="config.json")
    try:
        return plan_checkpoint(checkpoint, request).ranks[where.rank].weights_bytes
    except PlacementError:
        return REFUSED


def assert_same(config: Mapping[str, Any], where: Rank) -> None:
    """Assert equal bytes, or that both refuse.

    A plan is of all ranks, so a refused one needs one rank that vLLM refuses, in whichever pipeline stage.
    """
    plan = planned(config, where)
    if plan != REFUSED:
        assert plan == allocated(config, where)
        return
    stages = (replace(where, rank=stage * where.tp + where.rank % where.tp) for stage in range(where.pp))
    assert REFUSED in (allocated(config, rank) for rank in stages)
