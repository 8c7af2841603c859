"""Plans against what vLLM's own classes allocate, for topologies that the planner was not built against."""

import json
import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from vllm_classes import Rank, Refused, parameter_bytes

from tonnage import PlanRequest, plan_checkpoint
from tonnage.api import checkpoint_from_config
from tonnage.errors import PlacementError

pytestmark = pytest.mark.heavy

DATA = Path(__file__).parent.parent / "data"
SEED = 20_261_130
TOPOLOGIES_PER_CONFIG = 3
TP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
PP_SIZES = (1, 2, 3, 4)
REGENERATED_ROWS = 12
REFUSED = "refused"

Row = tuple[str, Rank]


def oracle_rows() -> tuple[tuple[Row, int], ...]:
    """Return the committed rows whose config is taken as it stands."""
    document = json.loads((DATA / "vllm_oracle.json").read_text())
    return tuple(
        ((row["config"], Rank(tp=row["tp"], ep=row["ep"], pp=row["pp"], rank=row["rank"])), row["params_bytes"])
        for row in document["first"] + document["more"]
        if row["quant"] == "config"
    )


@lru_cache(maxsize=4)
def read_config(name: str) -> Mapping[str, Any]:
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def new_topologies(name: str, known: set[tuple[int, bool, int]], chance: random.Random) -> list[Row]:
    """Return ranks of topologies that divide the attention heads and are not in the committed rows."""
    config = read_config(name)
    text = config.get("text_config", config)
    spreads = (False, True) if any("expert" in field for field in text) else (False,)
    candidates = [
        (tp, ep, pp)
        for tp in TP_SIZES
        for ep in spreads[: 1 + (tp > 1)]
        for pp in PP_SIZES
        if text["num_attention_heads"] % tp == 0 and tp * pp > 1 and (tp, ep, pp) not in known
    ]
    chosen = chance.sample(candidates, min(TOPOLOGIES_PER_CONFIG, len(candidates)))
    return [(name, Rank(tp=tp, ep=ep, pp=pp, rank=chance.randrange(tp * pp))) for tp, ep, pp in chosen]


def new_rows() -> list[Row]:
    """Return rows for every config vLLM can build; the same ones every time."""
    chance = random.Random(SEED)  # noqa: S311 - a draw that can be repeated
    known: dict[str, set[tuple[int, bool, int]]] = {}
    for (name, where), _ in oracle_rows():
        known.setdefault(name, set()).add((where.tp, where.ep, where.pp))
    return [row for name in sorted(known) for row in new_topologies(name, known[name], chance)]


ROWS = new_rows()
KNOWN_ROWS = random.Random(SEED).sample(oracle_rows(), REGENERATED_ROWS)  # noqa: S311 - same


def row_id(row: Row) -> str:
    name, where = row
    return f"{name} tp={where.tp}{' ep' if where.ep else ''} pp={where.pp} rank={where.rank}"


@lru_cache(maxsize=None)
def allocated(row: Row) -> int | str:
    name, where = row
    try:
        return parameter_bytes(read_config(name), where)
    except Refused:
        return REFUSED


def planned(row: Row) -> int | str:
    name, where = row
    request = PlanRequest(tp=where.tp, ep=where.tp if where.ep else 1, pp=where.pp, engine="vllm")
    try:
        return plan_checkpoint(checkpoint_from_config(read_config(name), name=name), request).ranks[where.rank].weights_bytes
    except PlacementError:
        return REFUSED


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_plan_equals_vllm_at_a_new_topology(row: Row):
    assert planned(row) == allocated(row)


@pytest.mark.parametrize("name", sorted({name for name, _ in ROWS}))
def test_vllm_builds_every_config_somewhere(name: str):
    """A refusal above is then one of the topology, and not of this machine."""
    assert any(allocated(row) != REFUSED for row in ROWS if row[0] == name)


@pytest.mark.parametrize(("row", "nbytes"), KNOWN_ROWS, ids=[row_id(row) for row, _ in KNOWN_ROWS])
def test_committed_row_is_what_vllm_allocates(row: Row, nbytes: int):
    assert allocated(row) == nbytes


REFUSALS = {
    "attention heads": ("meta-llama__Llama-3.1-8B-Instruct", Rank(tp=3)),
    "vocabulary": ("01-ai__Yi-34B", Rank(tp=7)),
    "KV heads": ("MiniMaxAI__MiniMax-M2.5", Rank(tp=6)),
    "groups of Mamba": ("nvidia__Nemotron-H-56B-Base-8K", Rank(tp=16)),
    "heads of linear attention": ("Qwen__Qwen3.5-27B", Rank(tp=6)),
    "latent of experts": ("moonshotai__Kimi-K3", Rank(tp=3)),
    "vision": ("meta-llama__Llama-4-Maverick-17B-128E-Instruct", Rank(tp=5)),
    "groups of output projections": ("deepseek-ai__DeepSeek-V4-Flash", Rank(tp=16)),
    "scale blocks of experts": ("Qwen__Qwen3-30B-A3B-FP8", Rank(tp=16)),
}


@pytest.mark.parametrize("row", REFUSALS.values(), ids=REFUSALS)
def test_what_vllm_refuses_is_refused(row: Row):
    assert (planned(row), allocated(row)) == (REFUSED, REFUSED)
