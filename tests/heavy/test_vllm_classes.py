"""Plans against what vLLM's own classes allocate, for topologies that the planner was not built against."""

import json
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from answers import REFUSED, allocated, assert_same, planned
from vllm_classes import Rank

pytestmark = pytest.mark.heavy

DATA = Path(__file__).parent.parent / "data"
SEED = 20_261_130
TOPOLOGIES_PER_CONFIG = 3
TP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
PP_SIZES = (1, 2, 3, 4)

Row = tuple[str, Rank]

CPU_CLASS = (
    "DeepSeek-V4 has a class of its own for CPUs, which does not pad shared experts to whole blocks as the one for GPUs"
)
NOT_REFUSED = {
    ("deepseek-ai__DeepSeek-V4-Pro", 16): CPU_CLASS,
    ("nvidia__DeepSeek-V4-Pro-NVFP4", 16): CPU_CLASS,
}
"""Config and tensor-parallel size that vLLM refuses and a plan does not. Once a plan does, the row fails until it is deleted."""

REFUSALS = {
    "attention heads": ("meta-llama__Llama-3.1-8B-Instruct", Rank(tp=3)),
    "vocabulary": ("01-ai__Yi-34B", Rank(tp=7)),
    "KV heads": ("MiniMaxAI__MiniMax-M2.5", Rank(tp=6)),
    "groups of Mamba": ("nvidia__Nemotron-H-56B-Base-8K", Rank(tp=16)),
    "heads of linear attention": ("Qwen__Qwen3.5-27B", Rank(tp=6)),
    "4096 channels in three": ("moonshotai__Kimi-K3", Rank(tp=3)),
    "vision": ("meta-llama__Llama-4-Maverick-17B-128E-Instruct", Rank(tp=5)),
    "groups of output projections": ("deepseek-ai__DeepSeek-V4-Flash", Rank(tp=16)),
    "keys of another stage": ("google__gemma-4-E4B-it", Rank(pp=3, rank=2)),
    "scale blocks of experts": ("Qwen__Qwen3-30B-A3B-FP8", Rank(tp=16)),
}


def oracle_rows() -> dict[str, list[tuple[Row, int]]]:
    """Return the committed rows whose config is taken as it stands, by config."""
    document = json.loads((DATA / "vllm_oracle.json").read_text())
    found: dict[str, list[tuple[Row, int]]] = {}
    for row in document["first"] + document["more"]:
        if row["quant"] == "config":
            where = Rank(tp=row["tp"], ep=row["ep"], pp=row["pp"], rank=row["rank"])
            found.setdefault(row["config"], []).append(((row["config"], where), row["params_bytes"]))
    return dict(sorted(found.items()))


def new_rows() -> Iterator[Row]:
    """Yield ranks of topologies that divide the attention heads and are not committed: the same ones every time."""
    chance = random.Random(SEED)
    for name, rows in oracle_rows().items():
        config = read_config(name)
        text = config.get("text_config", config)
        has_experts = any("experts" in field and count for field, count in text.items())
        known = {(where.tp, where.ep, where.pp) for (_, where), _ in rows}
        candidates = [
            (tp, ep, pp)
            for tp in TP_SIZES
            for ep in ((False, True) if has_experts and tp > 1 else (False,))
            for pp in PP_SIZES
            if text["num_attention_heads"] % tp == 0 and tp * pp > 1 and (tp, ep, pp) not in known
        ]
        for tp, ep, pp in chance.sample(candidates, TOPOLOGIES_PER_CONFIG):
            yield name, Rank(tp=tp, ep=ep, pp=pp, rank=chance.randrange(tp * pp))


def committed_rows() -> Iterator[tuple[Row, int]]:
    """Yield one committed row of every config: the same ones every time."""
    chance = random.Random(SEED)
    for rows in oracle_rows().values():
        yield chance.choice(rows)


@lru_cache(maxsize=4)
def read_config(name: str) -> Mapping[str, Any]:
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def row_id(row: Row) -> str:
    name, where = row
    return f"{name} tp={where.tp}{' ep' if where.ep else ''} pp={where.pp} rank={where.rank}"


def gap_marks(gap: str | None) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=gap, raises=AssertionError)] if gap else []


NEW_ROWS = [
    pytest.param(name, where, id=row_id((name, where)), marks=gap_marks(NOT_REFUSED.get((name, where.tp))))
    for name, where in new_rows()
]
COMMITTED_ROWS = [pytest.param(*row, nbytes, id=row_id(row)) for row, nbytes in committed_rows()]


@pytest.mark.parametrize(("name", "where"), NEW_ROWS)
def test_plan_equals_vllm_at_a_new_topology(name: str, where: Rank):
    assert_same(read_config(name), where)


@pytest.mark.parametrize(("name", "where", "nbytes"), COMMITTED_ROWS)
def test_committed_row_is_what_vllm_allocates(name: str, where: Rank, nbytes: int):
    """Every config is built here, so a refusal above is one of the topology and not of this machine."""
    assert allocated(read_config(name), where) == nbytes


@pytest.mark.parametrize(("name", "where"), REFUSALS.values(), ids=REFUSALS)
def test_what_vllm_refuses_is_refused(name: str, where: Rank):
    config = read_config(name)

    assert (planned(config, where), allocated(config, where)) == (REFUSED, REFUSED)


def test_expert_parallelism_without_experts_is_refused():
    assert_same(read_config("meta-llama__Llama-3.1-8B-Instruct"), Rank(tp=2, ep=True))


def test_rank_with_one_nvfp4_expert_more_equals_vllm():
    assert_same(read_config("nvidia__MiniMax-M2.5-NVFP4"), Rank(tp=24, ep=True, rank=12))
