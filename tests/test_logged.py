"""What engines log as weights: lines worked out by hand, and figures of public start-up logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import LLAMA, load_script
from tonnage import PlanRequest, plan_checkpoint
from tonnage.api import checkpoint_from_config, open_checkpoint
from tonnage.checkpoint.config import parse_config
from tonnage.engines import engine as find_engine
from tonnage.errors import PlacementError
from tonnage.logged.allocator import block_surplus, held_tensors, most_surplus
from tonnage.logged.experts import BACKENDS, backend_of
from tonnage.logged.linears import Linear, added_bytes
from tonnage.logged.lines import gpu_class_of, logged_lines, release_of
from tonnage.logged.rotary import rotary_tables
from tonnage.logged.step_buffers import step_buffers
from tonnage.memory.term import Term
from tonnage.placement import Placement, place
from tonnage.profile import Profile
from tonnage.topology import Topology
from tonnage.units import MIB

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
GPT_OSS_20B = json.loads((CONFIGS / "openai__gpt-oss-20b.json").read_text())
DEEPSEEK_V3 = json.loads((CONFIGS / "deepseek-ai__DeepSeek-V3.json").read_text())


WORDS = st.sampled_from(["", "default", "yarn", "linear", "longrope", "proportional", "factor", "rope_type"])


def placed(fields: dict[str, Any], *, tp: int = 1, pp: int = 1, engine: str = "vllm") -> Placement:
    assignment = checkpoint_from_config(fields, name="config").assignment
    return place(assignment, Topology(tp=tp, pp=pp), find_engine(engine))


def by_component(placement: Placement, **options: Any) -> dict[str, Term]:
    return {term.component: term for term in logged_lines(placement, pp_rank=0, tp_rank=0, **options)}


def table_bytes(fields: dict[str, Any], **options: Any) -> int:
    return sum(table.nbytes for table in rotary_tables(parse_config(fields, name="config"), **options))


# --- figures of logs -------------------------------------------------------------------------------------------------


def test_logged_weights_are_within_one_percent_on_95_of_100_and_never_above_the_bound():
    script = load_script("weights_agreement")
    rows = list(script.rows())
    assert len(rows) >= 50
    assert [row.facts["id"] for row in rows if not row.bounded] == []
    for some in (rows, [row for row in rows if row.held_back]):
        assert 100 * sum(row.within for row in some) >= 95 * len(some)
    assert (ROOT / "docs" / "weights-agreement.md").read_text() == script.report(rows)


def test_bounds_hold_without_knowing_gpu_or_release():
    script = load_script("weights_agreement")
    logs = json.loads(script.LOGS.read_text())
    logs["rows"] = [{**facts, "gpu_arch": None, "version": None} for facts in logs["rows"]]
    below = [facts["id"] for facts in logs["rows"] if not script._row(facts, logs["configs"]).bounded]
    assert below == []


# --- rotary tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({"max_position_embeddings": 131072, "head_dim": 128}, 131072 * 128 * 2),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.5}}, 10240 * 64 * 2),
        (
            {
                "max_position_embeddings": 99,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
            },
            4096 * 64 * 2,
        ),
        ({"max_position_embeddings": 1000, "partial_rotary_factor": 0.5}, 1000 * 32 * 2),
        ({"max_position_embeddings": 1000, "dtype": "float32"}, 1000 * 64 * 4),
        ({"max_position_embeddings": 1000, "rope_parameters": {"mrope_section": [1, 2, 3]}}, 4000 * 64 * 2),
    ],
)
def test_rotary_table_has_the_positions_of_its_scaling(changes, nbytes):
    assert table_bytes({**LLAMA, **changes}) == nbytes


def test_rotary_tables_of_gemma3_are_one_scaled_and_one_local():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    assert table_bytes({"model_type": "gemma3", "text_config": text}) == (8 + 1) * 131072 * 128 * 2


def test_rotary_tables_are_wider_in_sglang_and_absent_without_rotation():
    plain = {**LLAMA, "max_position_embeddings": 1000}
    assert table_bytes(plain, engine="sglang") == 2 * table_bytes(plain)
    assert table_bytes({**plain, "model_type": "nemotron_h"}) == 0


@given(
    st.dictionaries(
        st.sampled_from(
            ["max_position_embeddings", "head_dim", "hidden_size", "rope_scaling", "rope_parameters", "text_config",
             "partial_rotary_factor", "rotary_dim", "qk_rope_head_dim", "kv_lora_rank", "compress_rope_theta"]
        ),
        st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "original_max_position_embeddings", "mrope_section", "full_attention"]),
            st.none() | st.integers() | st.floats() | WORDS | st.dictionaries(WORDS, st.integers()),
        ),
    )
)  # fmt: skip
def test_rotary_tables_of_any_config_have_a_size(fields):
    for table in rotary_tables(parse_config({"model_type": "llama", **fields}, name="config")):
        assert 0 <= table.nbytes <= table.most_bytes


# --- the allocator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "split", "unsplit"),
    [
        (1, 511, 511),
        (512, 0, 0),
        (MIB, 0, 0),
        (19 * MIB // 2, MIB // 2, MIB // 2),  # two of 9.5 MiB leave 1 MiB of 20, which the last keeps
        (15 * MIB + 1, MIB - 1, MIB - 1),
        (21 * MIB, MIB, MIB),
        (49 * MIB // 2, 0, 3 * MIB // 2),  # 1.5 MiB is split off, unless no block of 20 MiB may be
        (26 * MIB, 0, 0),
    ],
)
def test_blocks_are_rounded_as_the_allocator_does(nbytes, split, unsplit):
    assert block_surplus(nbytes, unsplit=False) == split
    assert block_surplus(nbytes, unsplit=True) == unsplit
    assert most_surplus(nbytes) >= unsplit or nbytes < 20 * MIB


def test_fused_parts_are_one_tensor_and_experts_of_a_layer_are_one():
    tensors = {tensor.name: tensor for tensor in held_tensors(placed(LLAMA), 0, 0)}
    qkv = tensors["model.layers.{layer}.self_attn.qkv_proj.weight"]
    assert (qkv.nbytes, qkv.count) == ((256 + 2 * 128) * 256 * 2, 2)
    assert tensors["model.layers.{layer}.mlp.gate_up_proj.weight"].nbytes == 2 * 512 * 256 * 2
    held = sum(tensor.nbytes * tensor.count for tensor in tensors.values())
    assert held == placed(LLAMA).module_bytes(0, 0)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "name",
    [
        "google__gemma-4-E4B-it",
        "Kimi-K3",
        "nvidia__Qwen3.6-35B-A3B-NVFP4",
        "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    ],
)
def test_tensors_of_a_stage_add_up_to_what_is_placed_on_it(name, engine):
    placement = placed(json.loads((CONFIGS / f"{name}.json").read_text()), pp=2, engine=engine)
    for stage in range(2):
        rows = sum(placement.extra_multiplicity(x, stage) * x.nbytes[0] for x in placement.extras if x.part_of)
        held = sum(tensor.nbytes * tensor.count for tensor in held_tensors(placement, stage, 0))
        assert held == placement.module_bytes(stage, 0) + rows


def test_rows_an_engine_builds_unused_are_in_the_tensor_they_widen():
    fields = json.loads((CONFIGS / "google__gemma-4-E4B-it.json").read_text())

    def rows(engine: str) -> dict[int, int]:
        name = "model.language_model.layers.{layer}.self_attn.qkv_proj.weight"
        return {
            t.nbytes // 2560 // 2: t.count for t in held_tensors(placed(fields, engine=engine), 0, 0) if t.name == name
        }

    # 8 heads and 2 x 2 of keys and values, of 256 in windows and 512 in every sixth of 42 layers; the last 18 read others'
    assert rows("vllm") == {12 * 256: 20, 12 * 512: 4, 8 * 256: 15, 8 * 512: 3}
    assert rows("sglang") == {12 * 256: 35, 12 * 512: 7}


def test_without_a_release_experts_have_the_bound_of_any():
    blackwell = placed({**GPT_OSS_20B, "intermediate_size": 2944})
    bounds = {
        release: by_component(blackwell, gpu_arch="10.0", engine_version=release)["engine.moe_padding"].bound_nbytes
        for release in ("0.18.1", "0.19.0", None)
    }
    assert bounds[None] == bounds["0.18.1"] > bounds["0.19.0"]


def test_qwen2_7b_holds_57_mib_in_blocks_beyond_its_tensors():
    fields = json.loads((CONFIGS / "Qwen__Qwen2.5-7B-Instruct.json").read_text())
    line = by_component(placed(fields), engine_version="0.19.0")["engine.allocator"]
    # gate_up 259 -> 260, down 129.5 -> 130, qkv 31.5 -> 32 MiB in 28 layers; embedding and head 1039.5 -> 1040
    assert 57 * MIB <= line.nbytes < 57 * MIB + MIB // 4


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "backend", "inner", "hidden"),
    [("8.0", None, 2944, 3072), ("9.0", "MARLIN", 2944, 3072), ("10.0", "FLASHINFER_CUTLASS_MXFP4_MXFP8", 2944, 2944),
     ("10.0", None, 2944, 3072), ("9.0", "b12x", 2880, 2880)],
)  # fmt: skip
def test_experts_of_gpt_oss_are_rounded_up_by_their_kernel(arch, backend, inner, hidden):
    line = by_component(placed(GPT_OSS_20B), gpu_arch=arch, moe_backend=backend).get("engine.moe_padding")
    per_expert = 3 * (inner * hidden - 2880 * 2880) * 17 // 32
    assert (line.nbytes if line else 0) == 24 * 32 * per_expert


def test_triton_widens_no_mxfp4_experts_but_those_of_gpt_oss():
    kimi = placed(json.loads((CONFIGS / "Kimi-K3.json").read_text()), tp=8)
    assert "engine.moe_padding" not in by_component(kimi, gpu_arch="12.0")  # 384 and 3584 suit Marlin
    assert "engine.moe_padding" in by_component(placed(GPT_OSS_20B), gpu_arch="12.0")


def test_fitted_kernels_are_not_called_modelled():
    assert by_component(placed(GPT_OSS_20B), gpu_arch="9.0")["engine.moe_padding"].basis == "calibrated"
    assert by_component(placed(GPT_OSS_20B), gpu_arch="8.0")["engine.moe_padding"].basis == "modelled"


def test_absorbed_copies_follow_a_quantised_kv_b_proj():
    line = by_component(placed(DEEPSEEK_V3, tp=8))["engine.mla_absorbed"]
    assert line.nbytes == line.bound_nbytes == 61 * 16 * (128 + 128) * 512 * 2
    plain = {key: value for key, value in DEEPSEEK_V3.items() if key != "quantization_config"}
    views = by_component(placed(plain, tp=8))["engine.mla_absorbed"]
    assert (views.nbytes, views.bound_nbytes) == (0, line.nbytes)


def linear(kind: str, rows: int, columns: int, bits: int, group: int, held: int = 0) -> Linear:
    return Linear(kind=kind, rows=rows, columns=columns, bits=bits, group=group, held_bytes=held, count=1)


@pytest.mark.parametrize(
    ("weight", "gpu_class", "engine", "added"),
    [
        (linear("nvfp4", 64, 96, 4, 16, held=64 * 48 + 64 * 6), "sm100", "vllm", 128 * 8 - 64 * 6),
        (linear("nvfp4", 64, 128, 4, 16, held=64 * 64 + 64 * 8), "sm90", "vllm", 0),
        (linear("mxfp8", 64, 160, 8, 32), "sm120", "vllm", 128 * 8 - 64 * 5),
        (linear("mxfp8", 64, 160, 8, 32), "sm120", "sglang", 128 * 8),
        (linear("fp8_block", 256, 512, 8, 128), "sm100", "vllm", 256 * 512 // 128),
        (linear("fp8_block", 256, 512, 8, 128), "sm80", "vllm", 256 * 4 * 2),
        (linear("fp8_block", 256, 512, 8, 128), "sm90", "vllm", 0),
        (linear("packed", 96, 128, 4, 128), "sm80", "vllm", 32 * 128 // 2 + 32 * 2),
    ],
)
def test_linears_are_kept_as_their_kernels_need_them(weight, gpu_class, engine, added):
    assert added_bytes(weight, gpu_class, engine=engine) == added


# --- every config ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*NVFP4.json"))[:6]] + ["Kimi-K3"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_known_gpu_never_has_a_bound_above_that_of_an_unknown_one(name, engine):
    placement = placed(json.loads((CONFIGS / f"{name}.json").read_text()), tp=8, engine=engine)
    unknown = sum(term.bound_nbytes for term in logged_lines(placement, pp_rank=0, tp_rank=0))
    for arch in ("8.0", "9.0", "10.0", "12.0"):
        terms = logged_lines(placement, pp_rank=0, tp_rank=0, gpu_arch=arch)
        assert sum(term.bound_nbytes for term in terms) <= unknown


def test_engines_that_log_no_such_figure_have_no_lines():
    assert logged_lines(placed(LLAMA, engine="split"), pp_rank=0, tp_rank=0) == ()


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_releases_and_gpu_classes_are_read_from_text():
    assert release_of("0.20.2rc1.dev249 (fork image)") == (0, 20, 2)
    assert release_of("V0, Nov-2024") is None
    assert release_of(None) is None
    found = {arch: gpu_class_of(arch) for arch in ("8.6", "8.9", "9.0", "10.3", "12.1", "gfx942", "xe2", None)}
    assert list(found.values()) == ["sm80", "sm89", "sm90", "sm100", "sm120", "amd", "", ""]


def test_an_unknown_kernel_is_refused_by_name():
    assert {backend_of(name) for name in BACKENDS} == BACKENDS
    with pytest.raises(PlacementError, match="cutlas5"):
        by_component(placed(LLAMA), moe_backend="cutlas5")


# --- buffers of a step -----------------------------------------------------------------------------------------------


def step_bytes(name: str, tokens: int, *, pp_rank: int = 0, context: int = 0, **options: Any) -> int:
    placement = placed(json.loads((CONFIGS / f"{name}.json").read_text()), **options)
    terms = step_buffers(placement, pp_rank=pp_rank, step_tokens=tokens, context_tokens=context)
    return sum(term.bound_nbytes for term in terms)


def test_records_of_a_context_are_listed_twice_for_every_token_of_a_step():
    selected = 8192 * 512 * 4
    flash = "deepseek-ai__DeepSeek-V4-Flash"
    assert step_bytes(flash, 8192) == selected
    assert step_bytes(flash, 8192, context=1_048_576) == selected + 2 * 8192 * 8192 * 4
    assert step_bytes(flash, 8192, context=16_385) == selected + 2 * 8192 * 256 * 4  # 129 records
    assert step_bytes("deepseek-ai__DeepSeek-V3.2", 8192, context=163_840) == 8192 * 2048 * 4


@pytest.mark.parametrize(
    ("name", "tokens", "nbytes"),
    [
        ("Qwen__Qwen3-VL-2B-Instruct", 2048, 3 * 2048 * 2048 * 2),  # three taps, hidden size 2048
        ("Qwen__Qwen3-VL-235B-A22B-Instruct", 8192, 3 * 8192 * 4096 * 2),
        ("google__gemma-4-E4B-it", 2048, 42 * 2048 * 256 * 2),  # 42 layers, 256 elements each
        ("deepseek-ai__DeepSeek-V3.2", 8192, 8192 * 2048 * 4),  # 2048 selected
        ("Qwen__Qwen3.5-27B", 8192, 0),  # its list of taps is empty
        ("deepseek-ai__DeepSeek-V3", 8192, 0),
    ],
)
def test_buffers_of_a_step_grow_with_its_tokens(name: str, tokens: int, nbytes: int):
    assert step_bytes(name, tokens) == nbytes
    assert step_bytes(name, 2 * tokens) == 2 * nbytes


def test_buffers_of_a_tower_are_on_its_stages_and_vllms_only():
    assert step_bytes("Qwen__Qwen3-VL-2B-Instruct", 2048, engine="sglang") == 0
    assert step_bytes("deepseek-ai__DeepSeek-V3.2", 2048, engine="sglang") == 0
    assert step_bytes("deepseek-ai__DeepSeek-V3.2", 2048, pp=2, pp_rank=1) == 2048 * 2048 * 4


def test_plans_hold_the_buffers_of_the_steps_they_are_asked_for():
    checkpoint = open_checkpoint(CONFIGS / "Qwen__Qwen3-VL-2B-Instruct.json")
    held = []
    for tokens in (2048, 65536):
        profile = Profile(prefill_chunk_tokens=tokens, context_tokens=2048)
        plan = plan_checkpoint(checkpoint, PlanRequest(engine="vllm", profile=profile))
        held.append([line.nbytes for line in plan.ranks[0].lines if line.component == "engine.step_buffers"])
    assert held == [[3 * 2048 * 2048 * 2], [3 * 65536 * 2048 * 2]]


def test_every_row_that_is_off_has_its_reason():
    script = load_script("weights_agreement")
    off = {row.facts["id"] for row in script.rows() if row.needs_reason}
    assert off == set(script.REASONS)
