"""The activation peak: hand-worked addends, which of them binds, and how a placement becomes a shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import LLAMA
from tonnage.api import checkpoint_from_config, open_checkpoint
from tonnage.engines import engine
from tonnage.memory.workspace import activation_peak
from tonnage.memory.workspace_experts import Backend, expert_backend, expert_workspace, widest_workspace
from tonnage.memory.workspace_shape import EncoderShape, GpuClass, ModelShape, RoutedShape, Serving
from tonnage.model_shape import model_shape
from tonnage.placement import place
from tonnage.topology import Topology

MIB = 1 << 20
LLAMA_8B = ModelShape(
    hidden_size=4096, vocab_size=128256, layers=32, dtype_bytes=2, mlp_width=3 * 14336, mixer_width=6144
)
QWEN_30B_EXPERTS = RoutedShape(
    top_k=8, local_experts=128, hidden_size=2048, width=768, up_width=1536, fmt="plain", stack_bytes=0
)
H100 = Serving(max_seqs=1024, batched_tokens=8192, context_tokens=8192)


def placed(config: Path, tp: int = 1, ep: int = 1) -> ModelShape:
    assignment = open_checkpoint(config).assignment
    return model_shape(place(assignment, Topology(tp=tp, ep=ep), engine("vllm")))


def test_logits_of_many_sequences_bind_on_llama_8b():
    # hidden state 8192 x 4096 x 2; 58 MiB; logits 1024 x 128256 x 14.5
    peak = activation_peak(LLAMA_8B, H100)
    assert peak.nbytes == 67_108_864 + 60_817_408 + 1_904_345_088
    assert peak.binding == "logits"
    assert peak.most == peak.nbytes


def test_forward_pass_binds_where_few_sequences_are_served():
    # 8192 x (43008 + 2 x 4096) x 2
    peak = activation_peak(LLAMA_8B, replace(H100, max_seqs=4))
    assert peak.nbytes == 67_108_864 + 60_817_408 + 838_860_800
    assert peak.binding == "forward pass"


def test_stage_without_a_head_holds_no_logits_but_its_neighbours_states():
    peak = activation_peak(replace(LLAMA_8B, logits=False), H100, pp=2)
    assert peak.nbytes == 3 * 67_108_864 + 60_817_408 + 838_860_800


def test_four_byte_activations_cost_what_they_hold_more():
    wide = activation_peak(replace(LLAMA_8B, dtype_bytes=4), H100)
    narrow = activation_peak(LLAMA_8B, H100)
    assert wide.nbytes - narrow.nbytes == 67_108_864 + 1024 * 128256 * 2


def test_verification_rows_are_in_the_bound_alone():
    plain, drafted = (activation_peak(LLAMA_8B, replace(H100, max_seqs=512, draft_tokens=s)) for s in (0, 3))
    more = 1536 * 128256
    assert drafted.nbytes == plain.nbytes
    assert drafted.most - plain.most == more * 2 + 3 * (more * 4)


def test_latent_context_is_72_mib_of_gathered_latents():
    shape = replace(LLAMA_8B, latent_width=576, latent_up_width=4096)
    assert activation_peak(shape, H100).nbytes - activation_peak(LLAMA_8B, H100).nbytes == 72 * MIB
    # their keys and values are made while nothing else is: 65536 x 32768 x 2
    wide = activation_peak(replace(shape, latent_up_width=32768), H100)
    assert wide.nbytes == activation_peak(shape, H100).nbytes
    assert max(part.most for part in wide.passing) == 1 << 32


@pytest.mark.parametrize(("context", "contexts"), [(262_144, 5), (262_145, 2)])
def test_indexer_gathers_several_contexts(context: int, contexts: int):
    serving = replace(H100, context_tokens=context)
    shape = replace(LLAMA_8B, latent_width=576, index_width=128)
    more = activation_peak(shape, serving).nbytes - activation_peak(LLAMA_8B, serving).nbytes
    assert more == contexts * context * 576 * 2 + contexts * context * 8 * 132 + 512 * MIB


def test_pooled_index_keys_take_their_share():
    serving = replace(H100, context_tokens=1 << 20)
    shape = replace(LLAMA_8B, latent_width=576, index_width=128)
    pooled = replace(shape, index_pool=4)
    assert (
        activation_peak(shape, serving).nbytes - activation_peak(pooled, serving).nbytes
        == 2 * (1 << 20) * 8 * 132 * 3 // 4
    )


def test_experts_and_sparse_context_share_their_scratch():
    serving = replace(H100, context_tokens=1 << 18)
    sparse = replace(LLAMA_8B, latent_width=576, index_width=128)
    both = replace(sparse, routed=QWEN_30B_EXPERTS)
    assert activation_peak(both, serving).nbytes == activation_peak(sparse, serving).nbytes


# tokens 8192, top-k 8: 65536 rows; worked by hand from the table of workspaces
EXPERTS: dict[str, tuple[RoutedShape, Backend, int]] = {
    "triton": (QWEN_30B_EXPERTS, "triton", 65536 * (2048 + 2048) * 2),
    "triton wide": (replace(QWEN_30B_EXPERTS, width=7168, up_width=14336), "triton", 65536 * (7168 + 14336) * 2),
    "marlin": (QWEN_30B_EXPERTS, "marlin", 65536 * (2048 + 2048) * 2),
    "cutlass fp4": (QWEN_30B_EXPERTS, "cutlass-fp4", (65536 * (3072 + 1536) + 8192 * 2048) * 2),
    # 65536 + 128 x 127 = 81792 rows are whole blocks of 128
    "deep gemm": (QWEN_30B_EXPERTS, "deep-gemm", 81792 * 2048 + (81792 * 2048 + 8192 * 2048) * 2),
    "library": (QWEN_30B_EXPERTS, "library", 8192 * 2048 * 2),
}


@pytest.mark.parametrize(("routed", "backend", "nbytes"), EXPERTS.values(), ids=EXPERTS)
def test_scratch_of_experts(routed: RoutedShape, backend: Backend, nbytes: int):
    assert expert_workspace(routed, 8192, 2, backend) == nbytes


@pytest.mark.parametrize(
    ("fmt", "gpu", "backend"),
    [
        ("plain", None, "triton"), ("fp8_e4m3_block128x128", "hopper", "deep-gemm"), ("fp8_e4m3_block128x128", "sm120", "triton"),
        ("fp8_e4m3_tensor", None, "triton"), ("int4_pack_g32", None, "marlin"), ("awq4_g128", None, "marlin"),
        ("mxfp4_e2m1", "hopper", "library"), ("mxfp4_e2m1", "a100", "marlin"), ("nvfp4_e2m1", None, "library"),
        ("nvfp4_e2m1", "hopper", "marlin"), ("exl3_v1", "sm120", "library"),
    ],
)  # fmt: skip
def test_kernels_follow_the_storage_format_and_the_gpu(fmt: str, gpu: GpuClass | None, backend: Backend):
    assert expert_backend(fmt, gpu) == backend
    routed = replace(QWEN_30B_EXPERTS, fmt=fmt)
    assert widest_workspace(routed, 8192, 2) >= expert_workspace(routed, 8192, 2, backend)


def test_images_cost_their_outputs_and_the_encoder_may_bind():
    tower = EncoderShape(hidden_size=1152, width=4304, patches_per_token=4, item_tokens=16384)
    serving = Serving(max_seqs=4, batched_tokens=3072, context_tokens=8192)
    plain, seeing = (activation_peak(replace(LLAMA_8B, encoder=e), serving) for e in (None, tower))
    assert seeing.binding == "encoder forward pass"
    assert seeing.nbytes == 3072 * 4096 * 2 + 58 * MIB + 2 * 16384 * 4096 * 2 + 65536 * (4304 + 4 * 1152) * 2
    assert activation_peak(replace(LLAMA_8B, encoder=tower), replace(serving, vision=False)) == plain


def test_a_draft_that_reads_hidden_states_keeps_them():
    tapped = activation_peak(LLAMA_8B, replace(H100, tapped_layers=3))
    assert tapped.nbytes - activation_peak(LLAMA_8B, H100).nbytes == 4 * 67_108_864


shapes = st.builds(
    ModelShape,
    hidden_size=st.integers(1, 20000), vocab_size=st.integers(1, 300000), layers=st.integers(1, 200),
    dtype_bytes=st.sampled_from([2, 4]), mlp_width=st.integers(0, 200000), mixer_width=st.integers(0, 50000),
    routed=st.none() | st.just(QWEN_30B_EXPERTS), latent_width=st.sampled_from([0, 576]),
    index_width=st.sampled_from([0, 128]), logits=st.booleans(),
)  # fmt: skip
servings = st.builds(
    Serving, max_seqs=st.integers(1, 4096), batched_tokens=st.integers(1, 65536), context_tokens=st.integers(1, 1 << 21),
    draft_tokens=st.integers(0, 8),
)  # fmt: skip


@given(shape=shapes, serving=servings, more=st.integers(1, 1000))
def test_a_larger_step_or_batch_never_takes_less(shape: ModelShape, serving: Serving, more: int):
    peak = activation_peak(shape, serving)
    assert 0 < peak.nbytes <= peak.most
    for larger in (
        replace(serving, batched_tokens=serving.batched_tokens + more),
        replace(serving, max_seqs=serving.max_seqs + more),
    ):
        assert activation_peak(shape, larger).nbytes >= peak.nbytes
        assert activation_peak(shape, larger).most >= peak.most


def test_shape_of_llama_8b_over_four_ranks(configs: Path):
    shape = placed(configs / "meta-llama__Llama-3.1-8B-Instruct.json", tp=4)
    assert (shape.hidden_size, shape.vocab_size, shape.layers, shape.kind) == (4096, 128256, 32, "dense")
    assert shape.mlp_width == 3 * 14336 // 4
    assert shape.mixer_width == (4096 + 2 * 1024) // 4
    # gate and up: 2 x 3584 x 4096 x 2 bytes; the embedding is the largest stored tensor
    assert (shape.module_bytes, shape.tensor_bytes) == (2 * 3584 * 4096 * 2, 128256 * 4096 * 2)
    assert not shape.repacked


def test_shape_of_experts_cut_and_whole(configs: Path):
    cut, whole = (placed(configs / "Qwen__Qwen3-30B-A3B.json", tp=4, ep=ep).routed for ep in (1, 4))
    assert cut == RoutedShape(
        top_k=8, local_experts=128, hidden_size=2048, width=192, up_width=384, fmt="plain",
        stack_bytes=128 * 384 * 2048 * 2,
    )  # fmt: skip
    assert whole == replace(cut, local_experts=32, width=768, up_width=1536)


def test_shape_of_kimi_k3(configs: Path):
    shape = placed(configs / "moonshotai__Kimi-K3.json", tp=8)
    assert (shape.kind, shape.layers, shape.latent_width) == ("hybrid+vision", 93, 576)
    assert shape.latent_up_width == 96 * (128 + 128) // 8
    routed = shape.routed
    assert routed is not None
    assert (routed.top_k, routed.local_experts, routed.hidden_size, routed.width) == (16, 896, 3584, 384)


def test_shape_of_a_compressed_indexer(configs: Path):
    shape = placed(configs / "deepseek-ai__DeepSeek-V4-Flash.json", tp=2)
    assert (shape.kind, shape.index_width, shape.index_pool) == ("sparse", 128, 4)


def test_stages_share_the_layers_and_the_last_has_the_head():
    assignment = checkpoint_from_config(LLAMA, name="two layers").assignment
    placement = place(assignment, Topology(pp=2), engine("vllm"))
    first, last = (model_shape(placement, pp_rank=rank) for rank in (0, 1))
    assert (first.layers, first.logits, last.layers, last.logits) == (1, False, 1, True)
    assert first.vocab_size == 320


def test_what_no_model_and_no_server_is_is_refused():
    with pytest.raises(ValueError, match="0 layers"):
        replace(LLAMA_8B, layers=0)
    with pytest.raises(ValueError, match="0 sequences"):
        replace(H100, max_seqs=0)
