"""Drafts: published sizes, what every rank holds of them, what is shared, and what is refused; bytes worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.assignment import Assigned, Assignment, assign_blueprint
from tonnage.checkpoint.config import parse_config
from tonnage.draft import Draft, PlacedDraft, draft_of, method_of, place_draft
from tonnage.draft_terms import draft_terms
from tonnage.engines import engine
from tonnage.errors import ConfigError, PlacementError, TonnageError, UnknownFamilyError
from tonnage.memory.cache import Attention, Latent, State
from tonnage.memory.cache_vllm import VllmCache, vllm_cache
from tonnage.memory.cache_vllm_options import VllmCacheOptions
from tonnage.memory.term import Term
from tonnage.memory.workspace_shape import Deployment, Serving
from tonnage.placement import can_place, place
from tonnage.recipes.blueprint import blueprint_of
from tonnage.recipes.modules import stored_tensors
from tonnage.topology import Topology
from tonnage.units import GIB

DATA = Path(__file__).parent / "data"
K31_DRAFT = "RadixArk__Kimi-K3.1-Dflash2-Preview"
QWEN_DRAFT = "z-lab__Qwen3.8-27B-DFlash2"
LLAMA_HEAD = "llama3-8B-eagle3"
LLAMA = "meta-llama__Llama-3.1-8B-Instruct"
DEEPSEEK = "deepseek-ai__DeepSeek-V3"

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "dtype": "bfloat16",
}
"""config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, as far as it says something about sizes."""

KIMI_K25_HEAD: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "dtype": "bfloat16",
}
"""A latent EAGLE3 head of the widths of Kimi K2, with all its tokens."""


def fields(name: str) -> dict[str, Any]:
    folder = "drafts" if (DATA / "drafts" / f"{name}.json").exists() else "configs"
    loaded: dict[str, Any] = json.loads((DATA / folder / f"{name}.json").read_text())
    return loaded


def assigned(config: dict[str, Any], method: str = "") -> Assignment:
    return assign_blueprint(blueprint_of(parse_config(config, name="config"), draft_method=method))


@cache
def opened(name: str) -> Assignment:
    return assigned(fields(name))


def elements(assignment: Assignment) -> int:
    return sum(entry.instances * prod(tensor.shape) for entry in assignment.entries for tensor in entry.stored)


def placed_draft(
    draft: Draft, target: Assignment, *, tp: int = 1, ep: int = 1, pp: int = 1, name: str = "vllm"
) -> PlacedDraft:
    return place_draft(draft, place(target, Topology(tp=tp, ep=ep, pp=pp), engine(name)))


def terms(
    placed: PlacedDraft, *, rank: tuple[int, int] | None = None, serving: Serving | None = None, arch: str | None = None
) -> dict[str, Term]:
    topology = placed.target.topology
    pp_rank, tp_rank = rank or (topology.pp - 1, 0)
    found = draft_terms(
        placed,
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        serving=placed.draft.serving(serving or Serving(max_seqs=64, batched_tokens=8192, context_tokens=32768)),
        deployment=Deployment(engine=placed.target.engine.name, topology=topology),
        gpu_arch=arch,
    )
    assert len({term.component for term in found}) == len(found)
    return {term.component: term for term in found}


def with_embedding(head: Assignment) -> Assignment:
    """A checkpoint that stores the embedding its recipe says it may."""
    module = next(m for m in head.blueprint.modules if m.rule.role == "embedding")
    stored = stored_tensors(module, module.fmt, head.blueprint.config.dtype)
    entry = Assigned(module=module, fmt=module.fmt, stored=stored, first=module.first, copies=1)
    return replace(head, entries=(entry, *head.entries))


# --- published sizes -------------------------------------------------------------------------------------------------


def test_dflash2_draft_of_kimi_k31_has_its_published_parameters_and_bytes() -> None:
    assert elements(opened(K31_DRAFT)) == 2_784_811_008
    assert opened(K31_DRAFT).payload_bytes == 5_569_622_016


def test_parts_of_the_kimi_dflash2_draft_are_those_of_its_card() -> None:
    sums: dict[str, int] = {}
    for entry in opened(K31_DRAFT).entries:
        pattern = entry.module.rule.pattern
        part = next(
            (p for p in ("_conv", ".mlp.", "layers.", "candidate_selector") if p in pattern), "fc and two norms"
        )
        count = sum(prod(tensor.shape) for tensor in entry.stored)
        sums[part] = sums.get(part, 0) + count
    assert sums == {
        "layers.": 144_130_048,
        ".mlp.": 308_281_344,
        "_conv": 25_747_456,
        "fc and two norms": 308_295_680,
        "candidate_selector": 85_721_088,
    }


def test_dflash2_draft_of_qwen38_has_its_published_tensors_and_bytes() -> None:
    layer = 2 * 20_971_520 + 2 * 5_242_880 + 2 * 128 + 2 * 5120 + 3 * 89_128_960 + 2 * (20_480 + 6_553_600)
    rest = 25_600 * 5120 + 2 * 5120 + 2 * 248_320 * 256 + 256 * 5120
    assert opened(QWEN_DRAFT).tensors == 81
    assert opened(QWEN_DRAFT).payload_bytes == 2 * (5 * layer + rest) == 3_848_808_960


def test_eagle3_head_of_llama_has_its_published_size() -> None:
    attention = 32 * 128 * 8192 + 2 * 8 * 128 * 8192 + 4096 * 4096
    layer = attention + 3 * 4096 * 14336 + 3 * 4096
    assert opened(LLAMA_HEAD).payload_bytes == (
        2 * (layer + 4096 * 12288 + 4096 + 32000 * 4096) + 8 * 32000 + 128256
    ) == 849_763_584  # fmt: skip


def test_eagle_head_is_known_by_its_method_alone() -> None:
    config = {k: v for k, v in fields(LLAMA_HEAD).items() if k not in ("architectures", "draft_vocab_size")}
    config["architectures"] = ["LlamaForCausalLM"]
    head = assigned(config, "eagle")
    layer = 32 * 128 * 4096 * 2 + 2 * 8 * 128 * 4096 + 3 * 4096 * 14336 + 4096
    assert method_of(head) == "eagle"
    assert head.payload_bytes == 2 * (layer + 8192 * 4096)
    assert method_of(assigned(config)) == "draft-model"


# --- what a rank holds -----------------------------------------------------------------------------------------------


def test_kimi_dflash2_splits_attention_and_mlp_and_keeps_the_rest_whole() -> None:
    draft = draft_of(None, 7, target=opened("Kimi-K3.1-Pro"), checkpoint=opened(K31_DRAFT))
    cut = (1536 * 18432 + 512 * 24576 + 12288 * 7168 + 3 * 7168 * 14336) // 8
    whole = 7168 * 1536 + 7168 * 576 + 1536 + 512 + 2 * 7168 + 25_747_456
    held = terms(placed_draft(draft, opened("Kimi-K3.1-Pro"), tp=8))
    assert (draft.method, draft.tapped_layers) == ("dflash2", 6)
    assert held["draft.weights"].nbytes == 2 * (5 * (cut + whole) + 308_295_680 + 85_721_088) == 1_743_630_336
    assert held["draft.context_kv"].nbytes == 2 * 5 * 576 * 7168
    assert not {"draft.embedding", "draft.head"} & held.keys()


def test_dflash_keeps_its_key_and_value_projections_twice() -> None:
    draft = draft_of("dflash", 7, target=opened("Qwen__Qwen3.5-27B"), checkpoint=opened(QWEN_DRAFT))
    held = terms(placed_draft(draft, opened("Qwen__Qwen3.5-27B"), tp=2))
    assert held["draft.context_kv"].nbytes == 2 * 5 * 2 * (4 * 128) * 5120
    assert "draft.context_kv" not in terms(placed_draft(draft, opened("Qwen__Qwen3.5-27B"), tp=2, name="sglang"))


def test_dflash_has_an_embedding_of_masked_slots_under_vllm() -> None:
    draft = draft_of("dflash", 7, target=opened("Qwen__Qwen3.5-27B"), checkpoint=opened(QWEN_DRAFT))
    placed = placed_draft(draft, opened("Qwen__Qwen3.5-27B"), tp=1)
    assert placed.placement is not None
    weights = terms(placed)["draft.weights"].nbytes
    assert weights == placed.placement.module_bytes(0, 0) + 2 * 5120 == 3_848_819_200  # as vLLM 0.32.0's class has it


def test_router_of_nemotrons_mtp_layers_is_held_in_f32() -> None:
    target = opened("nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    placed = placed_draft(draft_of("mtp", 1, target=target), target, tp=8).placement
    assert placed is not None
    (gate,) = (p for p in placed.placed if p.entry.module.rule.pattern.endswith("mixer.gate"))
    assert gate.shares[7].held_bytes == 512 * 4096 * 4


def test_mtp_layer_of_a_modelopt_checkpoint_has_the_scalars_of_its_cache() -> None:
    target = opened("nvidia__GLM-5.1-NVFP4")
    placed = placed_draft(draft_of("mtp", 1, target=target), target, tp=8).placement
    assert placed is not None
    (scalars,) = placed.extras
    assert (scalars.component, scalars.first, scalars.nbytes[0]) == ("engine.kv_scales", (78,), 8)
    kept = place(target, Topology(tp=8), engine("vllm"))  # and the target has none for the layer that it leaves out
    (scalars,) = (extra for extra in kept.extras if extra.component == "engine.kv_scales")
    assert 78 not in scalars.first


EAGLE3 = {
    1: (2 * (33_554_432 + 2 * 8_388_608 + 16_777_216 + 176_160_768 + 50_331_648 + 16_384) + 256_000, 262_144_000),
    2: (2 * (16_777_216 + 2 * 4_194_304 + 8_388_608 + 88_080_384 + 50_331_648 + 16_384) + 256_000, 131_072_000),
}


@pytest.mark.parametrize(("tp", "weights", "head"), [(tp, *sizes) for tp, sizes in EAGLE3.items()])
def test_eagle3_head_of_llama_on_one_rank(tp: int, weights: int, head: int) -> None:
    draft = draft_of("eagle3", 3, target=opened(LLAMA), checkpoint=opened(LLAMA_HEAD))
    held = terms(placed_draft(draft, opened(LLAMA), tp=tp))
    assert (held["draft.weights"].nbytes, held["draft.head"].nbytes) == (weights, head)
    assert held["draft.weights"].bound_nbytes == weights
    assert draft.tapped_layers == 3
    assert "draft.embedding" not in held


def test_latent_eagle3_head_on_one_of_eight_ranks() -> None:
    target = opened("moonshotai__Kimi-K2-Instruct")
    draft = draft_of("eagle3", 3, target=target, checkpoint=assigned(KIMI_K25_HEAD))
    cut = (1536 * 12288 + 512 * 16384 + 8192 * 7168 + 3 * 7168 * 18432) // 8
    whole = 14336 * 1536 + 1536 + 14336 * 576 + 512 + 21504 * 7168 + 4 * 7168
    held = terms(placed_draft(draft, target, tp=8))
    assert held["draft.weights"].nbytes == 2 * (cut + whole) == 489_484_288
    assert held["draft.head"].nbytes == 163840 * 7168 * 2 // 8
    (kept,) = draft.caches
    assert (kept.kept, kept.draft) == (Latent(rank=512, rope_size=64), True)


def fp8(out: int, in_: int) -> int:
    return out * in_ + 4 * -(-out // 128) * -(-in_ // 128)


def test_mtp_layer_of_deepseek_v3_on_one_of_eight_ranks() -> None:
    attention = fp8(1536, 7168) + fp8(3072, 1536) + fp8(576, 7168) + fp8(4096, 512) + fp8(7168, 2048) + 2 * (1536 + 512)
    expert = 2 * fp8(256, 7168) + fp8(7168, 256)
    router = 256 * 7168 * 2 + 256 * 4
    joined = 7168 * 14336 * 2 + 5 * 7168 * 2
    draft = draft_of("mtp", 1, target=opened(DEEPSEEK))
    held = terms(placed_draft(draft, opened(DEEPSEEK), tp=8))
    assert held["draft.weights"].nbytes == attention + 257 * expert + router + joined == 1_661_047_968
    assert not {"draft.embedding", "draft.head"} & held.keys()
    assert [c.kept for c in draft.caches] == [Latent(rank=512, rope_size=64)]


def test_experts_of_an_mtp_layer_are_whole_under_expert_parallelism() -> None:
    draft = draft_of("mtp", 1, target=opened(DEEPSEEK))
    placed = placed_draft(draft, opened(DEEPSEEK), tp=8, ep=8)
    assert placed.placement is not None
    assert placed.placement.topology == Topology(tp=8, ep=8)
    routed = [p for p in placed.placement.placed if p.entry.module.rule.is_routed]
    assert {p.how for p in routed} == {"whole experts"}
    assert {share.copies for p in routed for share in p.shares} == {32}


def test_target_still_leaves_its_mtp_layers_out() -> None:
    target = place(opened(DEEPSEEK), Topology(tp=8), engine("vllm"))
    assert {p.how for p in target.placed if p.entry.module.rule.role == "mtp"} == {"absent"}


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_mtp_layer_of_qwen3_next_from_its_config_alone(tp: int, kv_heads: int) -> None:
    target = assigned(QWEN3_NEXT)
    draft = draft_of("mtp", 2, target=target)
    cut = 2048 * 4096 + 8192 * 2048 + 2048 * 4096 + 3 * 512 * 2048 + 512 * 3 * 512 * 2048
    whole = 512 * 2048 + 2048 + 5 * 2048 + 2 * 256
    held = terms(placed_draft(draft, target, tp=tp))
    assert held["draft.weights"].nbytes == 2 * (cut // tp + 2 * kv_heads * 256 * 2048 + whole)
    assert [c.kept for c in draft.caches] == [Attention(kv_heads=2, head_size=256, value_size=256)]


def test_plain_draft_model_is_held_whole_with_embedding_and_head() -> None:
    draft = draft_of(None, 4, target=opened("Qwen__Qwen3-8B"), checkpoint=opened("Qwen__Qwen3-0.6B"))
    held = terms(placed_draft(draft, opened("Qwen__Qwen3-8B"), tp=2))
    alone = place(opened("Qwen__Qwen3-0.6B"), Topology(tp=2), engine("vllm"))
    assert draft.method == "draft-model"
    assert held["draft.weights"].nbytes == alone.rank_bytes(0, 0)
    assert sum(len(c.layers) for c in draft.caches) == 28
    assert held["workspace.draft"].transient


def test_exllamav3_holds_a_draft_on_its_first_gpu() -> None:
    target = opened("Qwen__Qwen3.5-27B")
    placed = placed_draft(draft_of("mtp", 3, target=target), target, tp=2, name="exllamav3")
    assert terms(placed, rank=(0, 0))["draft.weights"].nbytes == 849_398_784
    assert terms(placed, rank=(0, 1)) == {}


def test_sglang_copies_the_up_projections_of_mtp_layers() -> None:
    placed = placed_draft(draft_of("mtp", 1, target=opened(DEEPSEEK)), opened(DEEPSEEK), tp=8, name="sglang")
    assert terms(placed)["draft.mla_absorbed"].nbytes == 2 * 4096 * 512


@given(tp=st.sampled_from((1, 2, 4, 8)), name=st.sampled_from((K31_DRAFT, QWEN_DRAFT, LLAMA_HEAD)))
def test_ranks_of_a_draft_hold_its_inventory_and_replicas(tp: int, name: str) -> None:
    assert can_place(opened(name), Topology(tp=tp), engine("split"))
    for placed in place(opened(name), Topology(tp=tp), engine("split")).placed:
        times = tp if placed.how == "replicated" else 1
        assert sum(share.slice_bytes for share in placed.shares) == times * placed.entry.instance_bytes


# --- what is shared --------------------------------------------------------------------------------------------------


def test_stored_copy_of_the_targets_embedding_is_expected_to_be_shared_and_bounded_by_itself() -> None:
    draft = draft_of("eagle3", 3, target=opened(LLAMA), checkpoint=with_embedding(opened(LLAMA_HEAD)))
    term = terms(placed_draft(draft, opened(LLAMA), tp=2))["draft.embedding"]
    assert (term.nbytes, term.bound_nbytes) == (0, 128256 * 4096 * 2 // 2)


def test_a_whole_model_of_another_vocabulary_is_no_draft() -> None:
    """As vLLM refuses it; heads may guess among fewer tokens."""
    other = assigned({**fields(LLAMA), "vocab_size": 64000})
    with pytest.raises(
        ConfigError, match="--draft: another vocabulary than the model's; expected 128256 tokens; found 64000"
    ):
        draft_of("draft-model", 3, target=opened(LLAMA), checkpoint=other)
    assert draft_of("draft-model", 3, target=other, checkpoint=other).assignment is other


def test_embedding_of_another_vocabulary_is_the_drafts_own() -> None:
    head = with_embedding(assigned({**fields(LLAMA_HEAD), "vocab_size": 64000}))
    draft = draft_of("eagle3", 3, target=opened(LLAMA), checkpoint=head)
    term = terms(placed_draft(draft, opened(LLAMA)))["draft.embedding"]
    assert term.nbytes == term.bound_nbytes == 64000 * 4096 * 2


def test_sglang_may_hold_an_embedding_until_the_targets_takes_its_place() -> None:
    draft = draft_of("eagle3", 3, target=opened(LLAMA), checkpoint=opened(LLAMA_HEAD))
    term = terms(placed_draft(draft, opened(LLAMA), name="sglang"))["draft.embedding"]
    assert (term.nbytes, term.bound_nbytes) == (0, 128256 * 4096 * 2)


def test_draft_stands_on_the_last_stage_with_the_embedding_that_stage_lacks() -> None:
    placed = placed_draft(draft_of("mtp", 1, target=opened(DEEPSEEK)), opened(DEEPSEEK), tp=8, pp=2)
    assert terms(placed, rank=(0, 0)) == {}
    held = terms(placed, rank=(1, 7))
    assert held["draft.weights"].nbytes == 1_661_047_968
    assert held["draft.embedding"].nbytes == 129280 * 7168 * 2 // 8


def test_draft_shares_an_embedding_every_stage_has() -> None:
    target = assigned(QWEN3_NEXT)
    assert "draft.embedding" not in terms(placed_draft(draft_of("mtp", 1, target=target), target, pp=2))


# --- buffers, graphs, activations ------------------------------------------------------------------------------------


def eagle3_of_llama(**how: Any) -> PlacedDraft:
    draft = draft_of("eagle3", 3, target=opened(LLAMA), checkpoint=opened(LLAMA_HEAD), **how)
    return placed_draft(draft, opened(LLAMA))


def test_eagle3_keeps_the_hidden_states_of_a_step() -> None:
    term = terms(eagle3_of_llama())["draft.buffers"]
    inputs = 12 * 8192 + 48 * 64 + 12 * 64 * 3
    hidden = 8192 * 4096 * 2
    assert (term.nbytes, term.bound_nbytes) == (inputs + hidden, inputs + 2 * hidden)


def test_dflash_keeps_positions_slots_and_samples_beside_the_hidden_states() -> None:
    draft = draft_of("dflash2", 7, target=opened("Qwen__Qwen3.5-27B"), checkpoint=opened(QWEN_DRAFT))
    serving = Serving(max_seqs=4, batched_tokens=3072, context_tokens=4096, cache_groups=5)
    term = terms(placed_draft(draft, opened("Qwen__Qwen3.5-27B")), serving=serving)["draft.buffers"]
    sampled = 4 * 7
    inputs = 12 * 3072 + 48 * 4 + 12 * sampled + 3072 * (8 + 8 * 5) + 28 * sampled + 5120 * 2
    assert term.nbytes == term.bound_nbytes == inputs + 12 * sampled * 16 + 3072 * 5120 * 2


def test_mtp_of_deepseek_v4_keeps_all_streams_of_the_hidden_state() -> None:
    target = opened("deepseek-ai__DeepSeek-V4-Flash")
    term = terms(placed_draft(draft_of("mtp", 2, target=target), target, tp=2))["draft.buffers"]
    streams, width = fields("deepseek-ai__DeepSeek-V4-Flash")["hc_mult"], 4096
    assert term.nbytes == 12 * 8192 + 48 * 64 + 12 * 64 * 2 + 8192 * streams * width * 2


def test_greedy_draft_keeps_no_probabilities() -> None:
    assert "draft.probabilities" not in terms(eagle3_of_llama())


def test_sampled_draft_keeps_probabilities_of_the_targets_tokens_in_the_dtype_of_the_head() -> None:
    assert terms(eagle3_of_llama(sampled=True))["draft.probabilities"].nbytes == 64 * 3 * 128256 * 2


def test_sampled_dflash2_keeps_probabilities_in_single_precision() -> None:
    target = opened("Kimi-K3.1-Pro")
    draft = draft_of("dflash2", 7, target=target, checkpoint=opened(K31_DRAFT), sampled=True)
    serving = Serving(max_seqs=4, batched_tokens=3072, context_tokens=4096)
    assert terms(placed_draft(draft, target, tp=8), serving=serving)["draft.probabilities"].nbytes == 4 * 7 * 163840 * 4


def test_eager_draft_has_no_graphs() -> None:
    serving = Serving(max_seqs=64, batched_tokens=8192, context_tokens=32768, eager=True)
    assert "draft.graphs" in terms(eagle3_of_llama())
    assert "draft.graphs" not in terms(eagle3_of_llama(), serving=serving)


def test_step_of_a_head_holds_the_tapped_states_twice_and_the_outputs_of_its_layer() -> None:
    term = terms(eagle3_of_llama())["workspace.draft"]
    outputs = 4096 + (4096 + 2 * 1024) + 4096 + 2 * 14336 + 4096
    assert term.transient
    assert term.nbytes == 8192 * (2 * 3 * 4096 + 4 * 4096 + outputs) * 2


def test_step_of_an_mtp_layer_is_no_larger_than_the_targets() -> None:
    assert "workspace.draft" not in terms(
        placed_draft(draft_of("mtp", 1, target=opened(DEEPSEEK)), opened(DEEPSEEK), tp=8)
    )


def test_serving_with_a_draft_has_rows_to_verify_and_states_to_hand_on() -> None:
    serving = Serving(max_seqs=64, batched_tokens=8192, context_tokens=32768, sampled_draft=True)
    drafted = eagle3_of_llama(sampled=True).draft.serving(serving)
    assert (drafted.draft_tokens, drafted.tapped_layers, drafted.sampled_draft) == (3, 3, False)


def test_ngram_drafting_holds_no_weights_and_may_keep_the_history_on_the_gpu() -> None:
    draft = draft_of("ngram", 4, target=opened(LLAMA))
    (term,) = terms(placed_draft(draft, opened(LLAMA), tp=2)).values()
    assert draft.caches == ()
    assert (term.nbytes, term.bound_nbytes) == (0, 64 * 32768 * 4)
    assert (
        terms(placed_draft(draft_of("suffix", 4, target=opened(LLAMA)), opened(LLAMA)))["draft.buffers"].bound_nbytes
        == 0
    )


# --- caches ----------------------------------------------------------------------------------------------------------


def cache_with(draft: Draft, target: Assignment, **options: Any) -> VllmCache:
    return vllm_cache(draft.with_caches(target.blueprint.caches), draft.cache_options(VllmCacheOptions(**options)))


@pytest.mark.parametrize(("dcp", "tokens"), [(2, 635_520), (4, 1_271_040)])
def test_mtp_layer_of_glm_51_is_one_of_the_79_whose_tokens_vllm_printed(dcp: int, tokens: int) -> None:
    """Start-up logs of lukealonso/GLM-5.1-NVFP4-MTP at TP8: 18.42 GiB, 3 draft tokens."""
    target = opened("zai-org__GLM-5.1")
    draft = draft_of("mtp", 3, target=target)
    cache = cache_with(draft, target, tp_size=8, dcp_size=dcp, kv_dtype="fp8_ds_mla")
    assert cache.bytes_per_token == -(-79 * (656 + 132) // dcp)
    found = cache.capacity_tokens(1842 * GIB // 100, 202_752)
    assert abs(found - tokens) * 1000 < tokens


QWEN_LOGS = {
    "3 tokens, 62.85 GiB": (3, 6285, 65_536, True, 1600, 1_417_216),
    "6 tokens, 9.80 GiB": (6, 980, 238_400, False, 1632, 262_523),
}


@pytest.mark.parametrize(
    ("drafted", "hundredths", "context", "prefixes", "block", "tokens"), QWEN_LOGS.values(), ids=QWEN_LOGS
)
def test_states_of_a_hybrid_have_a_slot_and_a_column_more_for_every_draft_token(
    drafted: int, hundredths: int, context: int, prefixes: bool, block: int, tokens: int
) -> None:
    """Start-up logs of malaiwah/Qwen3.8-27B-EXL3, whose widths are those of Qwen3.5-27B."""
    target = opened("Qwen__Qwen3.5-27B")
    draft = draft_of("mtp", drafted, target=target)
    cache = cache_with(draft, target, kv_dtype="fp8", prefix_caching=prefixes)
    assert cache.block_tokens == block
    assert cache.state_slots_per_request == 1 + drafted + prefixes
    assert cache.capacity_tokens(hundredths * GIB // 100, context) == tokens
    (state,) = {c.kept for c in target.blueprint.caches if isinstance(c.kept, State)}
    assert cache.state_bytes_per_slot == 48 * (48 * 128 * 128 * 4 + state.conv_channels * (3 + drafted) * 2)


def test_windows_and_plain_keys_of_dflash_are_kept_whole_by_every_rank_that_shares_tokens() -> None:
    latent = draft_of(None, 7, target=opened("Kimi-K3.1-Pro"), checkpoint=opened(K31_DRAFT))
    plain = draft_of(None, 7, target=opened("Qwen__Qwen3.5-27B"), checkpoint=opened(QWEN_DRAFT))
    config = fields(K31_DRAFT)
    open_config = {k: v for k, v in config.items() if k != "layer_types"}
    unbounded = draft_of(None, 7, target=opened("Kimi-K3.1-Pro"), checkpoint=assigned(open_config))
    head = draft_of(None, 3, target=opened(LLAMA), checkpoint=opened(LLAMA_HEAD))
    assert [d.replicated for d in (latent, plain, unbounded, head)] == [True, True, False, False]
    assert latent.caches[0].kept == Latent(rank=512, rope_size=64, window_tokens=1024)
    assert plain.caches[0].kept == Attention(kv_heads=8, head_size=128, value_size=128, window_tokens=2048)


def test_window_of_the_kimi_draft_fits_beside_shared_latents() -> None:
    target = opened("Kimi-K3.1-Pro")
    draft = draft_of(None, 7, target=target, checkpoint=opened(K31_DRAFT))
    cache = cache_with(draft, target, tp_size=8, dcp_size=8, kv_dtype="fp8", max_batched_tokens=3072)
    alone = vllm_cache(target.blueprint.caches, VllmCacheOptions(tp_size=8, dcp_size=8, kv_dtype="fp8", draft_tokens=7))
    assert len(cache.groups) == len(alone.groups) + 1
    with pytest.raises(PlacementError, match="window"):
        vllm_cache(draft.with_caches(target.blueprint.caches), VllmCacheOptions(tp_size=8, dcp_size=8, kv_dtype="fp8"))


def test_dtype_of_a_drafts_cache_is_its_own() -> None:
    draft = replace(draft_of("mtp", 1, target=opened(DEEPSEEK)), kv_dtype="bfloat16")
    assert draft.cache_options(VllmCacheOptions(kv_dtype="fp8")).draft_kv_dtype == "bfloat16"
    assert replace(draft, kv_dtype="").cache_options(VllmCacheOptions(draft_kv_dtype="fp8")).draft_kv_dtype == "fp8"


RECORDS = {"fp8_ds_mla": "fp8", "nvfp4_ds_mla": "nvfp4", "fp8": "", "auto": ""}


@pytest.mark.parametrize(("kv_dtype", "plain"), RECORDS.items())
def test_draft_without_an_indexer_has_no_records_of_sparse_kernels(kv_dtype: str, plain: str) -> None:
    latent = draft_of(None, 7, target=opened("Kimi-K3.1-Pro"), checkpoint=opened(K31_DRAFT))
    keys = draft_of(None, 3, target=opened(LLAMA), checkpoint=opened(LLAMA_HEAD))
    sparse = draft_of("mtp", 1, target=opened("zai-org__GLM-5.1"))
    found = [d.cache_options(VllmCacheOptions(kv_dtype=kv_dtype)).draft_kv_dtype for d in (latent, keys, sparse)]
    assert found == [plain, plain, ""]


# --- refusals --------------------------------------------------------------------------------------------------------

UNKNOWN: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unheard of": ({"architectures": ["Eagle9ForCausalLM"]}, "", ["no recipe for this kind of draft", "Eagle9ForCausalLM"]),
    "DSpark": ({"architectures": ["K3DSparkModel"]}, "", ["no recipe for this kind of draft", "K3DSparkModel"]),
    "DSpark by its method": ({"architectures": ["LlamaForCausalLM"]}, "dspark", ["no recipe for a draft of dspark"]),
    "trainer's name": ({"architectures": ["Eagle3Speculator"]}, "", ["Eagle3Speculator"]),
    "head as a whole model": ({}, "draft-model", ["no draft for draft-model", "but a head of eagle3"]),
    "head of fewer tokens as a whole model": ({"architectures": ["LlamaForCausalLM"]}, "draft-model", ["but a head of eagle3"]),
    "another method": ({}, "dflash", ["no draft for dflash", "but a head of eagle3"]),
    "fewer tokens, another family": ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "", ["no recipe for this kind of draft"]),
    "EAGLE for another family": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "eagle", ["no recipe for this kind of draft", "Qwen3ForCausalLM"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "method", "parts"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_kind_of_draft_is_refused_by_name(changes: dict[str, Any], method: str, parts: list[str]) -> None:
    with pytest.raises(UnknownFamilyError) as caught:
        assigned({**fields(LLAMA_HEAD), **changes}, method)
    assert all(part in str(caught.value) for part in parts)


NOT_DESCRIBED: dict[str, tuple[str, dict[str, Any], str]] = {
    "several layers": (LLAMA_HEAD, {"num_hidden_layers": 4}, "an EAGLE3 head of several layers"),
    "parallel EAGLE": (LLAMA_HEAD, {"pard_token": 5}, "drafts in parallel"),
    "no hidden states": (LLAMA_HEAD, {"eagle_config": {"use_aux_hidden_state": False}}, "reads no hidden states"),
    "experts": (QWEN_DRAFT, {"draft_ffn_type": "moe"}, "a DFlash draft with experts"),
    "its own head": (QWEN_DRAFT, {"has_own_lm_head": True}, "a head of its own"),
    "fewer tokens": (QWEN_DRAFT, {"draft_vocab_size": 32000}, "a head of its own"),
    "sinks": (QWEN_DRAFT, {"add_swa_attention_sink_bias": True}, "attention sinks"),
    "another attention": (QWEN_DRAFT, {"dflash_config": {"attention_mode": "nsa"}}, "unknown kind of attention"),
}


@pytest.mark.parametrize(("name", "changes", "part"), NOT_DESCRIBED.values(), ids=NOT_DESCRIBED)
def test_draft_its_recipe_does_not_describe_is_refused(name: str, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(TonnageError) as caught:
        assigned({**fields(name), **changes})
    assert part in str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"method": "mtp", "tokens": 0}, "out of range"),
    "too many tokens": ({"method": "mtp", "tokens": 1025}, "out of range"),
    "no checkpoint": (
        {"method": "eagle3", "tokens": 3},
        "eagle3 reads a draft checkpoint; expected a draft checkpoint (--draft)",
    ),
    "a checkpoint for MTP": ({"method": "mtp", "tokens": 3, "checkpoint": LLAMA_HEAD}, "mtp reads no draft checkpoint"),
    "no MTP layers": ({"method": None, "tokens": 3}, "no MTP layers in its config"),
    "no MTP layers in its files": (
        {"method": "mtp", "tokens": 3, "from_headers": True},
        "no MTP layers stored in its files",
    ),
    "another width": ({"method": None, "tokens": 3, "checkpoint": K31_DRAFT}, "made for a model of another width"),
}


@pytest.mark.parametrize(("how", "part"), REFUSED.values(), ids=REFUSED)
def test_draft_that_cannot_be_is_refused(how: dict[str, Any], part: str) -> None:
    checkpoint = opened(how["checkpoint"]) if "checkpoint" in how else None
    with pytest.raises(ConfigError) as caught:
        draft_of(**{**how, "target": opened(LLAMA), "checkpoint": checkpoint})
    assert part in str(caught.value)


def test_mtp_layers_of_qwen3_next_that_are_not_stored_are_refused() -> None:
    with pytest.raises(ConfigError, match="no MTP layers stored in its files"):
        draft_of("mtp", 1, target=assigned(QWEN3_NEXT), from_headers=True)


def test_draft_that_cannot_be_cut_says_that_it_is_the_draft() -> None:
    target = opened("Qwen__Qwen3.5-27B")
    narrow = assigned({**fields(QWEN_DRAFT), "num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(PlacementError) as caught:
        placed_draft(draft_of(None, 7, target=target, checkpoint=narrow), target, tp=4)
    assert all(problem.where.startswith("draft ") for problem in caught.value.problems)
