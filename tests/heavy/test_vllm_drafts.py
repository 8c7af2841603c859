"""Plans of drafts against what vLLM's own classes allocate for them, at topologies the planner was not built against."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_classes import Rank
from vllm_drafts import draft_bytes

from tonnage.api import checkpoint_from_config
from tonnage.draft import DraftMethod, draft_of, place_draft
from tonnage.draft_weights import draft_weights
from tonnage.engines import engine
from tonnage.placement import place
from tonnage.topology import Topology

pytestmark = pytest.mark.heavy

DATA = Path(__file__).parent.parent / "data"
TARGETS = (
    "Qwen__Qwen3.5-27B",
    "Qwen__Qwen3.5-35B-A3B",
    "XiaomiMiMo__MiMo-7B-Base",
    "deepseek-ai__DeepSeek-V3",
    "nvidia__DeepSeek-V3.2-NVFP4",
    "nvidia__GLM-5.1-NVFP4",
    "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
    "nvidia__Qwen3.5-122B-A10B-NVFP4",
    "zai-org__GLM-4.6",
    "zai-org__GLM-5-FP8",
)
"""One of every family with MTP layers, and of every method they are quantised by."""
RANKS = {"tp=1": Rank(), "tp=2 pp=2": Rank(tp=2, pp=2, rank=3), "tp=4": Rank(tp=4, rank=2)}
WHOLE_EXPERTS = Rank(tp=4, ep=True, rank=1)
EAGLE3 = ("meta-llama__Llama-3.1-8B-Instruct", "llama3-8B-eagle3")
DFLASH = ("Qwen__Qwen3.5-27B", "z-lab__Qwen3.8-27B-DFlash2")


def read(part: str, name: str) -> dict[str, Any]:
    return json.loads((DATA / part / f"{name}.json").read_text())


def planned(target: Mapping[str, Any], where: Rank, method: DraftMethod, draft: Mapping[str, Any] | None = None) -> int:
    """Return the weights of the draft on the rank: without its ends, and without the copies made after loading."""
    kept = checkpoint_from_config(target, name="target").assignment
    own = draft and checkpoint_from_config(draft, name="draft", draft_method=method).assignment
    topology = Topology(tp=where.tp, ep=where.tp if where.ep else 1, pp=where.pp)
    asked = draft_of(method, 1, target=kept, checkpoint=own or None)
    placed = place_draft(asked, place(kept, topology, engine("vllm")))
    terms = draft_weights(placed, tp_rank=where.rank % where.tp)
    (weights,) = (term.nbytes for term in terms if term.component == "draft.weights")
    return weights


@pytest.mark.parametrize("where", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("name", TARGETS)
def test_layers_of_multi_token_prediction_equal_vllms(name: str, where: Rank):
    config = read("configs", name)
    assert planned(config, where, "mtp") == draft_bytes(config, where, "mtp")


@pytest.mark.parametrize("name", [name for name in TARGETS if "27B" not in name and "7B" not in name])
def test_whole_experts_of_multi_token_prediction_equal_vllms(name: str):
    config = read("configs", name)
    assert planned(config, WHOLE_EXPERTS, "mtp") == draft_bytes(config, WHOLE_EXPERTS, "mtp")


@pytest.mark.parametrize("where", RANKS.values(), ids=RANKS)
def test_eagle3_head_equals_vllms(where: Rank):
    target, draft = (read(part, name) for part, name in zip(("configs", "drafts"), EAGLE3, strict=True))
    assert planned(target, where, "eagle3", draft) == draft_bytes(target, where, "eagle3", draft)


@pytest.mark.parametrize("where", [Rank(), Rank(tp=2, rank=1), Rank(tp=8, rank=7)], ids=lambda where: f"tp={where.tp}")
def test_dflash_draft_equals_vllms(where: Rank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # the only one that runs such drafts
    target, draft = (read(part, name) for part, name in zip(("configs", "drafts"), DFLASH, strict=True))
    draft["use_sliding_window"] = True  # transformers drops the window without it
    assert planned(target, where, "dflash", draft) == draft_bytes(target, where, "dflash", draft)
