"""Recipes: every shipped one loads and gives what is published; a wrong one is refused with file and key."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tonnage.api import Checkpoint, checkpoint_from_config
from tonnage.engines import ENGINES, engine
from tonnage.errors import ConfigError, PlacementError, RecipeError, TonnageError, UnknownFamilyError
from tonnage.formats.dtypes import DTYPE_BITS
from tonnage.inspection import counted_bytes, inspect_assignment
from tonnage.placement import place
from tonnage.recipes.loader import families, family_of, load_recipe, parse_recipe
from tonnage.recipes.schema import ROLES
from tonnage.topology import Topology

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "configs"
TOMLS = sorted(
    f.name
    for f in resources.files("tonnage.recipes").iterdir()
    if f.name.endswith(".toml") and f.name != "families.toml"
)


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


@cache
def checkpoint(name: str) -> Checkpoint:
    return checkpoint_from_config(load(name), name=name)


def elements(opened: Checkpoint) -> Counter[str]:
    """Elements by dtype, as a Hugging Face model page counts parameters."""
    counts: Counter[str] = Counter()
    for entry in opened.assignment.entries:
        for tensor in entry.stored:
            counts[tensor.dtype] += entry.instances * prod(tensor.shape)
    return counts


# --- shipped recipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_name", TOMLS)
def test_shipped_recipe_loads_and_says_where_it_comes_from(file_name: str) -> None:
    text = (resources.files("tonnage.recipes") / file_name).read_text()
    recipe = parse_recipe(file_name.removesuffix(".toml"), text)
    assert recipe.source
    assert sum(len(section.rules) for section in recipe.sections) > 0


@pytest.mark.parametrize("family", families())
def test_family_loads_and_has_a_title(family: str) -> None:
    recipe = load_recipe(family)
    assert recipe.family == family
    assert families()[family]["title"]
    assert {rule.role for section in recipe.sections for rule in section.rules} <= set(ROLES)


def test_every_shipped_recipe_is_reached_from_a_family() -> None:
    reached = {section.name for family in families() for section in load_recipe(family).sections}
    unused = {name.removesuffix(".toml") for name in TOMLS} - reached
    only_includes = {str(facts.get("recipe", name)) for name, facts in families().items()}
    assert unused <= only_includes


def test_model_type_belongs_to_one_family() -> None:
    types = Counter(model_type for facts in families().values() for model_type in facts["model_types"])
    assert max(types.values()) == 1


def test_family_answers_to_its_model_type_first_then_to_its_architecture() -> None:
    assert family_of("llama") == "llama"
    assert family_of("unheard_of", ("LlamaForCausalLM",)) == "llama"
    assert family_of("qwen3", ("LlamaForCausalLM",)) == "qwen3"


def test_unknown_family_is_refused_with_what_to_add() -> None:
    with pytest.raises(UnknownFamilyError) as caught:
        family_of("step3p7", ("Step3ForCausalLM",))
    line = str(caught.value)
    assert "CONTRIBUTING.md says how to add one" in line
    assert "step3p7" in line
    assert line.startswith("config.json: no recipe for this model family")


@pytest.mark.parametrize("family", families())
def test_every_rule_that_is_never_cut_gives_its_reason(family: str) -> None:
    silent = [
        f"{section.name}: {rule.pattern}"
        for section in load_recipe(family).sections
        for rule in section.rules
        if rule.split == "replicated" and not rule.why
    ]
    assert not silent


# --- wrong recipes -----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, list[str]]] = {
    "not TOML": ("[module", ["mine: not TOML"]),
    "unknown section": ("[modules]\n", ["recipe mine: unknown key", "found modules"]),
    "unknown key": ('[module]\n"a" = { role = "norm", shape = ["1"], splits = "row" }', ["recipe mine: a: unknown key", "found splits"]),
    "no reason": ('[module]\n"a" = { role = "router", shape = ["1"] }', ["recipe mine: a: not cut, and no reason given"]),
    "no role": ('[module]\n"a" = { shape = ["1"] }', ["recipe mine: a: unknown role", "found None"]),
    "unknown role": ('[module]\n"a" = { role = "magic", shape = ["1"] }', ["recipe mine: a: unknown role", "found magic"]),
    "unknown split": ('[module]\n"a" = { role = "norm", shape = ["1"], split = "diagonal" }', ["recipe mine: a: unknown split", "column, row, vocab, replicated", "found diagonal"]),
    "unknown stage": ('[module]\n"a" = { role = "norm", shape = ["1"], stage = "middle" }', ["recipe mine: a: unknown stage", "found middle"]),
    "unknown credit": ('[module]\n"a" = { role = "norm", shape = ["1"], credit = "all" }', ["recipe mine: a: unknown credit", "found all"]),
    "unknown index": ('[module]\n"a.{layer}" = { role = "norm", shape = ["1"] }', ["recipe mine: a.{layer}: unknown index", "found layer"]),
    "shape and out": ('[module]\n"a" = { role = "norm", shape = ["1"], out = "1", in = "1" }', ["recipe mine: a: wrong facts", "either shape, or out and in"]),
    "out alone": ('[module]\n"a" = { role = "norm", out = "1" }', ["recipe mine: a: wrong facts"]),
    "units of another number": ('[module]\n"a" = { role = "norm", out = ["1", "2"], in = "1", split = "column", units = ["1"] }', ["recipe mine: a: units do not match parts"]),
    "bad expression": ('[module]\n"a" = { role = "norm", shape = ["hidden_size +"] }', ["mine: a: `hidden_size +`: not an expression"]),
    "expression that calls": ('[module]\n"a" = { role = "norm", shape = ["open(1)"] }', ["mine: a: `open(1)`: unknown function"]),
    "bad condition": ('[module]\n"a" = { role = "norm", shape = ["1"], when = "x ** 2" }', ["mine: a: `x ** 2`: operator not allowed"]),
    "bad let": ('[let]\nx = "__import__"\n[module]\n"a" = { role = "norm", shape = ["1"] }', ["mine: let.x: `__import__`: name not allowed"]),
    "bad index": ('[index]\nlayer = "]"\n', ["mine: index.layer: `]`: not an expression"]),
    "index with a stop": ('[index]\nlayer = { start = "1", stop = "2" }\n', ["recipe mine: index.layer: unknown key", "found stop"]),
    "bad refusal": ('[refuse]\n"(" = "brackets"\n[module]\n"a" = { role = "norm", shape = ["1"] }', ["mine: refuse: `(`: not an expression"]),
    "engine rule with an unknown key": ('[vllm]\n"a" = { absent = "True" }', ["recipe mine: vllm: a: unknown key", "found absent"]),
    "engine rule with an unknown split": ('[vllm]\n"a" = { split = "diagonal" }', ["recipe mine: vllm: a: unknown split", "found diagonal"]),
    "engine rule with an unknown dtype": ('[vllm]\n"a" = { dtype = "float" }', ["recipe mine: vllm: a: unknown dtype", "found float"]),
    "fused rule with an unknown key": ('[vllm.fused.qkv]\nrows = "16"\nwhy = "x"', ["recipe mine: vllm.fused.qkv: unknown key", "found rows"]),
    "include with an unknown key": ('[[include]]\nrecipe = "llama"\nonly = "x"', ["recipe mine: include llama: unknown key", "found only"]),
    "include with an unknown role": ('[[include]]\nrecipe = "llama"\nrole = "magic"', ["recipe mine: include llama: unknown role", "found magic"]),
    "include without a recipe": ('[[include]]\nwhen = "True"', ["recipe mine: include", "recipe"]),
    "include of nothing": ('[[include]]\nrecipe = "no_such_recipe"', ["recipe mine: include no_such_recipe", "no such recipe"]),
    "include that leaves the package": ('[[include]]\nrecipe = "../../secrets"', ["recipe mine: include ../../secrets", "no such recipe"]),
    "include of itself": ('[[include]]\nrecipe = "mine"', ["recipe mine: include mine", "no such recipe"]),
    "module is no table": ('[module]\n"a" = 1', ["recipe mine: a: not a table"]),
    "modules are no table": ("module = 1", ["recipe mine: module: not a table"]),
    "engine rule is no table": ('[vllm]\n"a" = "absent"', ["recipe mine: vllm: a: not a table"]),
    "index without a count": ('[index]\nlayer = { start = "1" }\n', ["recipe mine: index.layer: missing key", "count"]),
    "fused rule without rows": ('[vllm.fused.qkv]\nwhy = "x"', ["recipe mine: vllm.fused.qkv: missing key", "rows_multiple"]),
    "shape is no list": ('[module]\n"a" = { role = "norm", shape = 7 }', ["recipe mine: a: shape: not a list"]),
    "a flag that is a text": ('[module]\n"a" = { role = "norm", shape = ["1"], quantizes = "no" }', ["recipe mine: a: quantizes", "true or false"]),
    "a reason that is a number": ('[module]\n"a" = { role = "norm", shape = ["1"], why = 3 }', ["recipe mine: a: why", "a text"]),
    "unknown dtype": ('[module]\n"a" = { role = "norm", shape = ["1"], dtype = "float32" }', ["recipe mine: a: unknown dtype", "found float32"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_recipe_is_refused_with_file_and_key(text: str, parts: list[str]) -> None:
    if "why" not in text:
        text = text.replace('role = "norm"', 'role = "norm", why = "small"')
    with pytest.raises(RecipeError) as caught:
        parse_recipe("mine", 'source = "made up"\n' + text)
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line, line


def test_recipe_that_does_not_describe_a_checkpoint_says_what_is_missing() -> None:
    config = {**load("MiniMaxAI__MiniMax-M2.5"), "hidden_size": None}
    with pytest.raises(RecipeError) as caught:
        checkpoint_from_config(config, name="x")
    assert "hidden_size" in str(caught.value)


# --- Kimi K3 and K3.1 against their tensor tables ----------------------------------------------------------------------

KIMI = {
    "Kimi-K3": ("kimi_k3_tensors.json", 497_220, 1_560_860_324_864),
    "Kimi-K3.1-Pro": ("kimi_k31_pro_tensors.json", 497_340, 1_561_217_377_280),
}


@pytest.mark.parametrize(("config", "facts"), KIMI.items(), ids=KIMI)
def test_kimi_blueprint_equals_its_tensor_table(config: str, facts: tuple[str, int, int]) -> None:
    table = json.loads((DATA / facts[0]).read_text())
    expected = {}
    sets = {
        name: list(range(ends[0], ends[1] + 1)) if len(ends) == 2 else ends
        for name, ends in table["layer_sets"].items()
    }
    for row in table["tensors"]:
        layers = [None] if row["layers"] is None else sets[row["layers"]]
        for layer in layers:
            name = row["name"] if layer is None else row["name"].replace("{l}", str(layer)).replace("{b}", str(layer))
            key = name.replace("{i}", "{e}")
            count = table["experts_per_layer"] if row["per_expert"] else 1
            expected[key] = (row["dtype"], tuple(row["shape"]), count)
    found = {}
    for entry in checkpoint(config).assignment.entries:
        for stored in entry.stored:
            for first in entry.first or (None,):
                indices = (() if first is None else (first,)) + (("{e}",) if entry.module.rest else ())
                name = entry.module.name(*indices) + stored.suffix  # type: ignore[arg-type]
                found[name] = (stored.dtype, stored.shape, entry.copies)
    assert found == expected


@pytest.mark.parametrize(("config", "facts"), KIMI.items(), ids=KIMI)
def test_kimi_totals(config: str, facts: tuple[str, int, int]) -> None:
    assignment = checkpoint(config).assignment
    assert (assignment.tensors, assignment.payload_bytes) == facts[1:]
    assert counted_bytes(assignment) == (95_626_985_472, 9_453_961_216)
    by_hand = sum(
        entry.instances * prod(t.shape) * DTYPE_BITS[t.dtype] // 8 for entry in assignment.entries for t in entry.stored
    )
    assert by_hand == facts[2]


def test_kimi_k3_config_with_and_without_transformers_fields_is_the_same_model() -> None:
    assert checkpoint("Kimi-K3").assignment.payload_bytes == checkpoint("moonshotai__Kimi-K3").assignment.payload_bytes


# --- published counts --------------------------------------------------------------------------------------------------

# Parameters as the Hugging Face page of each model counts them out of its safetensors headers (elements of all stored
# tensors; packed codes and scales are elements too), unless a comment says otherwise.
PARAMETERS = {
    "meta-llama__Llama-2-7b-hf": 6_738_415_616,
    "meta-llama__Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama__Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama__Meta-Llama-3.1-405B": 405_853_388_800,
    "codellama__CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "01-ai__Yi-34B": 34_388_917_248,
    "mistralai__Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai__Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai__Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen__Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen__Qwen3-8B": 8_190_735_360,
    "Qwen__Qwen3-30B-A3B": 30_532_122_624,
    "Qwen__Qwen3-235B-A22B": 235_093_634_560,
    "Qwen__Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen__Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen__Qwen3.5-27B": 27_781_427_952,
    "Qwen__Qwen3.5-397B-A17B": 403_397_928_944,
    "deepseek-ai__DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai__DeepSeek-V3": 684_531_386_000,
    "deepseek-ai__DeepSeek-V3.2": 685_396_921_376,
    "zai-org__GLM-5": 753_864_139_008,
    "MiniMaxAI__MiniMax-M2.5": 228_703_644_928,
    "google__gemma-4-26B-A4B": 25_805_936_206,
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,  # as llama.cpp reports it, too
    # 1,026,470,731,056 with the 61 tables of 56 rotary frequencies its files carry; they are optional here.
    "moonshotai__Kimi-K2-Instruct": 1_026_470_731_056 - 61 * 56,
}


@pytest.mark.parametrize(("config", "parameters"), PARAMETERS.items(), ids=PARAMETERS)
def test_parameters_are_those_published(config: str, parameters: int) -> None:
    assert elements(checkpoint(config)).total() == parameters


def test_deepseek_v3_by_dtype_is_as_published() -> None:
    counts = {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600}
    assert elements(checkpoint("deepseek-ai__DeepSeek-V3")) == counts


# metadata.total_size of the published model.safetensors.index.json, and the number of tensors it maps.
TOTAL_SIZES = {
    "openai__gpt-oss-20b": (459, 13_761_264_768),
    "openai__gpt-oss-120b": (687, 65_248_815_744),
    "deepseek-ai__DeepSeek-V4-Flash": (69_187, 159_609_485_896),
    "moonshotai__Kimi-K2.5": (208_550, 595_148_192_736),
    "moonshotai__Kimi-K3": (497_220, 1_560_860_324_864),
    # 139,644 tensors and 1,029,173,256,720 bytes with 61 tables of 56 rotary frequencies in BF16.
    "moonshotai__Kimi-K2-Instruct": (139_644 - 61, 1_029_173_256_720 - 61 * 112),
}


@pytest.mark.parametrize(("config", "facts"), TOTAL_SIZES.items(), ids=TOTAL_SIZES)
def test_tensors_and_bytes_are_those_of_the_published_index(config: str, facts: tuple[int, int]) -> None:
    assignment = checkpoint(config).assignment
    assert (assignment.tensors, assignment.payload_bytes) == facts


def test_llama_4_with_its_vision_fields_is_as_published() -> None:
    """The config at hand leaves out vision_config; with the published one Scout has 108,641,793,536 parameters."""
    config = load("meta-llama__Llama-4-Scout-17B-16E-Instruct")
    config["vision_config"] = {
        "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632, "num_attention_heads": 16, "patch_size": 14,
        "num_hidden_layers": 34, "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
    }  # fmt: skip
    assert elements(checkpoint_from_config(config, name="x")).total() == 108_641_793_536


# --- every config at hand ----------------------------------------------------------------------------------------------

# Configs that are parts of one, as collected: they name no family, or lack what a recipe needs.
PARTIAL = {
    "Qwen__Qwen3-Coder-Next": ConfigError,
    "Qwen__Qwen3.5-9B": ConfigError,
    "Qwen__Qwen3.8-27B": ConfigError,
    "google__gemma-3-12b-it": ConfigError,
    "zai-org__GLM-5.3-Flash": ConfigError,
}
NO_RECIPE = {"stepfun-ai__Step-3.7-Flash", "stepfun-ai__Step-3.7-Flash-FP8"}
ALL = sorted(path.stem for path in CONFIGS.glob("*.json"))
WHOLE = [name for name in ALL if name not in PARTIAL and name not in NO_RECIPE]


def test_the_lists_of_configs_that_are_refused_hold_nothing_else() -> None:
    assert PARTIAL.keys() | NO_RECIPE <= set(ALL)
    assert len(WHOLE) >= 87


@pytest.mark.parametrize("name", WHOLE)
def test_config_gives_a_checkpoint_whose_sums_agree(name: str) -> None:
    assignment = checkpoint(name).assignment
    inspection = inspect_assignment(assignment)
    for rows in (inspection.by_role, inspection.by_dtype, inspection.by_format):
        assert sum(row.nbytes for _, row in rows) == assignment.payload_bytes == inspection.total.nbytes
        assert sum(row.tensors for _, row in rows) == assignment.tensors
    assert inspection.projection_bytes + inspection.latent_bytes <= assignment.payload_bytes


@pytest.mark.parametrize(("name", "kind"), PARTIAL.items(), ids=PARTIAL)
def test_part_of_a_config_is_refused_because_it_names_no_family(name: str, kind: type[TonnageError]) -> None:
    with pytest.raises(kind, match="neither model_type nor architectures"):
        checkpoint(name)


@pytest.mark.parametrize("name", sorted(NO_RECIPE))
def test_config_without_recipe_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UnknownFamilyError, match="step3p7"):
        checkpoint(name)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("engine_name", sorted(ENGINES))
def test_what_is_held_whole_on_two_ranks_has_a_reason(name: str, engine_name: str) -> None:
    try:
        placement = place(checkpoint(name).assignment, Topology(tp=2), engine(engine_name))
    except PlacementError as error:
        if error.problems:  # an engine may refuse a format at tp 2; tests of engines say when
            return
        raise
    silent = [
        placed.entry.module.rule.pattern
        for placed in placement.placed
        if placed.how in ("replicated", "absent") and not placed.why
    ]
    assert not silent
