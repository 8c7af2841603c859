"""What a rank holds beside weights and cache: rules worked by hand, and the terms an engine gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.calibrations.term_records import shipped_terms
from tonnage.memory.runtime import graph_estimate_term, load_terms, runtime_terms, serving_of
from tonnage.memory.runtime_rules import buffer_bytes, capture_sizes, context_bytes, graph_bytes, library_bytes
from tonnage.memory.runtime_sglang import decode_sizes, prefill_sizes
from tonnage.memory.supply import gpu_table
from tonnage.memory.term import Term
from tonnage.memory.workspace import activation_peak
from tonnage.memory.workspace_shape import (
    Deployment,
    GpuClass,
    ModelShape,
    RoutedShape,
    Serving,
    gpu_class,
    parse_release,
)
from tonnage.profile import Profile
from tonnage.topology import Engine, Topology

MIB, GIB = 1 << 20, 1 << 30
SHAPE = ModelShape(
    hidden_size=5120, vocab_size=248320, layers=64, dtype_bytes=2, mlp_width=52224, mixer_width=16480,
    layer_bytes=800 * MIB, module_bytes=340 * MIB, module_elements=89_128_960, tensor_bytes=2400 * MIB,
)  # fmt: skip
EXPERTS = RoutedShape(
    top_k=8, local_experts=128, hidden_size=5120, width=768, up_width=1536, fmt="nvfp4_e2m1", stack_bytes=500 * MIB
)
SERVING = Serving(max_seqs=1024, batched_tokens=8192, context_tokens=32768)
VLLM = Deployment(engine="vllm", release=(0, 33), gpu_class="hopper", topology=Topology())


def terms(shape: ModelShape = SHAPE, serving: Serving = SERVING, deployment: Deployment = VLLM) -> dict[str, Term]:
    found = runtime_terms(shape, serving, deployment, shipped_terms(deployment.engine))
    assert len({term.component for term in found}) == len(found)
    return {term.component: term for term in found}


def test_default_captures_are_the_logged_51_and_83_sizes():
    assert len(capture_sizes(SERVING, "hopper")) == 51
    assert capture_sizes(SERVING, "hopper")[-1] == 512
    assert len(capture_sizes(SERVING, "blackwell-dc")) == 83
    assert len(capture_sizes(replace(SERVING, largest_capture=1024), "hopper")) == 83
    assert capture_sizes(replace(SERVING, max_seqs=4), "hopper") == (1, 2, 4, 8)
    assert capture_sizes(replace(SERVING, max_seqs=4, draft_tokens=7), None)[-1] == 64
    assert capture_sizes(replace(SERVING, batched_tokens=16), None) == (1, 2, 4, 8, 16)


def test_sglang_captures_its_own_sizes():
    assert decode_sizes(32) == (1, 2, 4, 8, 12, 16, 24, 32)
    assert decode_sizes(600)[-4:] == (496, 512, 544, 576)
    assert prefill_sizes(64) == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert prefill_sizes(5000)[-2:] == (4096, 4608)


def test_graphs_by_rule():
    # 40 sizes from 64 and 295 tokens of smaller ones, in all 2855 / 64 x 64 layers x 380 KiB; 512 tokens x 758 KiB
    sizes = capture_sizes(SERVING, "hopper")
    assert graph_bytes(SHAPE, SERVING, sizes) == (41 * 64 + 231) * 380 * 1024 + 512 * 758 * 1024
    assert graph_bytes(SHAPE, SERVING, sizes, "amd") == 2 * graph_bytes(SHAPE, SERVING, sizes)
    assert graph_bytes(SHAPE, replace(SERVING, eager=True), sizes) == 0


def test_buffers_are_statistics_masks_tables_and_inputs():
    # statistics 1024 x 248320 x 4 + 1024 x 7760 x 4; masks 1024 x 7760 x 4; tables 2 x 1024 x 2048 x 4; inputs 8192 x 21
    kept = 31_784_960 + 16_777_216 + 172_032
    assert buffer_bytes(SHAPE, SERVING, statistics=False) == kept
    assert buffer_bytes(SHAPE, SERVING, statistics=True) == kept + 1_017_118_720 + 31_784_960
    headless = replace(SHAPE, logits=False)
    assert buffer_bytes(headless, SERVING, statistics=True) == 16_777_216 + 172_032
    drafted = replace(SERVING, draft_tokens=3, sampled_draft=True)
    more = buffer_bytes(SHAPE, drafted, statistics=False) - kept
    assert more == 3 * 31_784_960 + 1024 * 3 * 248320 * 2


def test_baseline_grows_with_communicators_experts_and_all_to_all():
    assert context_bytes(Topology(), routed=True) == 512 * MIB
    assert context_bytes(Topology(tp=2), routed=False) == 1536 * MIB
    assert context_bytes(Topology(pp=2), routed=True) == 2048 * MIB
    assert context_bytes(Topology(tp=8, ep=8), routed=True) == 3072 * MIB


def test_late_communication_is_of_linked_gpus_and_older_releases():
    def held(gpu: GpuClass | None, release: tuple[int, int] | None, tp: int) -> tuple[int, int]:
        return library_bytes(replace(VLLM, gpu_class=gpu, release=release, topology=Topology(tp=tp)))

    assert held("hopper", (0, 19), 1) == (256 * MIB, 256 * MIB)
    assert held("hopper", (0, 19), 2) == (2150 * MIB, 2150 * MIB)
    assert held("hopper", (0, 27), 2) == (256 * MIB, 256 * MIB)
    assert held("sm120", (0, 19), 2) == (512 * MIB, 512 * MIB)
    assert held(None, None, 1) == (256 * MIB, 700 * MIB)


@pytest.mark.parametrize("engine", ["vllm", "split", "sglang", "exllamav3"])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("gpu", [None, "hopper", "sm120", "amd"])
def test_every_term_says_what_it_is_and_where_it_is_from(engine: Engine, tp: int, gpu: GpuClass | None):
    deployment = Deployment(engine=engine, gpu_class=gpu, topology=Topology(tp=tp))
    found = terms(replace(SHAPE, routed=EXPERTS), SERVING, deployment)
    assert [name for name, term in found.items() if term.transient] == ["workspace.activation"]
    assert {"runtime.context", "workspace.activation"} <= found.keys()
    for term in found.values():
        assert term.source
        assert 0 <= term.nbytes <= term.bound_nbytes < 64 * GIB


def test_newer_releases_keep_statistics_and_unknown_ones_may():
    new, old, unknown = (
        terms(deployment=replace(VLLM, release=release))["runtime.buffers"] for release in ((0, 33), (0, 19), None)
    )
    assert new.nbytes == new.bound_nbytes == unknown.bound_nbytes
    assert old.nbytes == old.bound_nbytes == unknown.nbytes
    assert new.nbytes - old.nbytes == 1_017_118_720 + 31_784_960


def test_a_topology_without_an_engine_takes_vllms_rules_and_says_so():
    engine, none = (terms(deployment=replace(VLLM, engine=engine)) for engine in ("vllm", "split"))
    assert engine.keys() - none.keys() == {"runtime.slack"}
    for name, term in none.items():
        assert term == replace(engine[name], source=f"as vLLM: {engine[name].source}")


def test_eager_serving_has_no_graphs():
    for engine in ("vllm", "sglang"):
        graphs = terms(serving=replace(SERVING, eager=True), deployment=replace(VLLM, engine=engine))["runtime.graphs"]
        assert (graphs.bound_nbytes, graphs.basis) == (0, "exact")


def test_limits_nobody_stated_double_the_bound():
    stated = terms()["workspace.activation"]
    assumed = terms(serving=replace(SERVING, assumed=("concurrency",)))["workspace.activation"]
    assert assumed.bound_nbytes == 2 * activation_peak(SHAPE, SERVING).nbytes > stated.bound_nbytes
    assert "(concurrency by default)" in assumed.source


def test_engine_without_logs_gets_twice_the_rule():
    term = terms(deployment=replace(VLLM, engine="exllamav3", release=None))["workspace.activation"]
    assert term.basis == "assumed"
    assert term.bound_nbytes == 2 * term.nbytes
    assert "no log of exllamav3" in term.source


def test_sglang_holds_memory_for_images_and_sound_on_every_rank_of_a_model_that_reads_them():
    sglang = replace(VLLM, engine="sglang", release=None)
    assert "runtime.multimodal" not in terms(deployment=sglang)
    held = terms(replace(SHAPE, multimodal=True), deployment=sglang)["runtime.multimodal"]
    assert (held.nbytes, held.bound_nbytes, held.transient) == (1124 * MIB, 1124 * MIB, False)
    assert "runtime.multimodal" not in terms(replace(SHAPE, multimodal=True))


@pytest.mark.parametrize(("topology", "mib"), [(Topology(), 256), (Topology(tp=2), 512), (Topology(pp=3), 512)])
def test_exllamav3_keeps_more_free_on_gpus_that_share_a_model(topology: Topology, mib: int):
    slack = terms(deployment=replace(VLLM, engine="exllamav3", release=None, topology=topology))["runtime.slack"]
    assert (slack.nbytes, slack.bound_nbytes) == (0, mib * MIB)


def test_graph_estimate_is_a_term_of_its_own():
    estimate = graph_estimate_term(SHAPE, SERVING, replace(VLLM, release=(0, 19)), shipped_terms("vllm"))
    assert estimate.component == "runtime.graph-estimate"
    assert 0 < estimate.nbytes < estimate.bound_nbytes


def test_loading_holds_one_repacked_weight_and_one_stored_tensor():
    repack, buffer = load_terms(replace(SHAPE, repacked=True, routed=EXPERTS), VLLM)
    assert (repack.nbytes, repack.bound_nbytes, repack.transient) == (500 * MIB, 800 * MIB, True)
    assert (buffer.nbytes, buffer.bound_nbytes, buffer.transient) == (0, 2400 * MIB, True)
    assert load_terms(SHAPE, VLLM)[0].bound_nbytes == 0


LIMITS: dict[str, tuple[Engine, GpuClass, int, int, tuple[int, int]]] = {
    "B200": ("vllm", "blackwell-dc", 178, 1, (16384, 1024)),
    "H100": ("vllm", "hopper", 79, 1, (8192, 1024)),
    "A100": ("vllm", "a100", 79, 1, (2048, 256)),
    "GB10": ("vllm", "gb10", 119, 1, (2048, 256)),
    "4090": ("vllm", "ampere-ada", 23, 1, (2048, 256)),
    "RTX PRO 6000": ("vllm", "sm120", 94, 1, (8192, 1024)),
    "small SGLang": ("sglang", "other", 15, 1, (2048, 8)),
    "4090 SGLang": ("sglang", "ampere-ada", 23, 1, (4096, 48)),
    "four 4090 SGLang": ("sglang", "ampere-ada", 23, 4, (4096, 160)),
    "two 48 GB SGLang": ("sglang", "ampere-ada", 47, 2, (4096, 32)),
    "H200 SGLang": ("sglang", "hopper", 139, 8, (8192, 512)),
    "B200 SGLang": ("sglang", "blackwell-dc", 178, 8, (16384, 512)),
    "TabbyAPI": ("exllamav3", "ampere-ada", 23, 1, (2048, 4)),
}


@pytest.mark.parametrize(("engine", "gpu", "total_gib", "tp", "limits"), LIMITS.values(), ids=LIMITS)
def test_limits_nobody_states_are_the_engines(
    engine: Engine, gpu: GpuClass, total_gib: int, tp: int, limits: tuple[int, int]
):
    deployment = Deployment(engine=engine, gpu_class=gpu, topology=Topology(tp=tp))
    serving = serving_of(Profile(), deployment, total_bytes=total_gib * GIB, context_tokens=4096)
    assert (serving.batched_tokens, serving.max_seqs) == limits
    assert serving.assumed == ("prefill chunk", "concurrency")
    stated = Profile(concurrency=4, prefill_chunk_tokens=3072, context_tokens=262144)
    serving = serving_of(stated, deployment, total_bytes=None, context_tokens=4096)
    assert (serving.max_seqs, serving.batched_tokens, serving.context_tokens, serving.assumed) == (4, 3072, 262144, ())


def test_every_gpu_of_the_table_has_a_class():
    classes = {gpu.slug: gpu_class(gpu) for gpu in gpu_table().gpus}
    expected = {"h100": "hopper", "b300": "blackwell-dc", "rtx-5090": "sm120", "gb10": "gb10", "mi300x": "amd",
                "l4": "ampere-ada", "a100-80gb": "a100", "v100-32gb": "other"}  # fmt: skip
    assert expected.items() <= classes.items()


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.27.1", (0, 27)), ("v0.33.0rc1", (0, 33)), ("0.20.2rc1.dev249 (fork image)", (0, 20)), ("0.28", (0, 28)),
        ("0.0.0+frontier", None), ("0.2x (<=0.26)", None), ("V0, Nov-2024", None), ("Oct-2026 build", None), (None, None),
    ],
)  # fmt: skip
def test_release_of_a_version(text: str | None, release: tuple[int, int] | None):
    assert parse_release(text) == release
