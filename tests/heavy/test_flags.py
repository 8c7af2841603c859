"""vLLM's own parser reads the commands as they are meant."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest
from vllm.config.cache import CacheDType
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tonnage.flags.command import serve_command
from tonnage.flags.values import DraftPlan, ServePlan
from tonnage.flags.vllm import METHODS, QUANTIZATIONS
from tonnage.memory.cache_dtypes import KV_DTYPES
from tonnage.topology import Topology

pytestmark = pytest.mark.heavy

PLAN = ServePlan(
    engine="vllm", release="0.32.0", model="org/model", topology=Topology(tp=8), context_tokens=131_072, concurrency=4,
    prefill_chunk_tokens=3072,
)  # fmt: skip


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    return parser


def engine_args(parser: FlexibleArgumentParser, serve: ServePlan) -> AsyncEngineArgs:
    """What ``vllm serve`` makes of the words; the model is a directory, since nothing is looked up."""
    args = parsed(parser, replace(serve, model=str(Path(__file__).parent)))
    args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args)


def parsed(parser: FlexibleArgumentParser, serve: ServePlan) -> argparse.Namespace:
    return parser.parse_args(list(serve_command(serve).words[1:]))


def test_every_flag_arrives_where_it_belongs(parser: FlexibleArgumentParser) -> None:
    serve = replace(
        PLAN, topology=Topology(tp=8, ep=8, pp=2, dcp=4), kv_dtype="fp8", kv_bytes=20 << 30, fraction=Fraction("0.9417"),
        page_tokens=64, quantization="compressed-tensors",
        draft=DraftPlan(method="eagle3", tokens=3, model="org/it's a draft"),
    )  # fmt: skip
    engine = engine_args(parser, serve)
    meant = {
        "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "enable_expert_parallel": True,
        "decode_context_parallel_size": 4, "max_model_len": 131_072, "max_num_seqs": 4, "max_num_batched_tokens": 3072,
        "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.9417, "kv_cache_memory_bytes": 20 << 30, "block_size": 64,
        "quantization": "compressed-tensors", "enforce_eager": False,
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, "model": "org/it's a draft"},
    }  # fmt: skip
    assert {name: getattr(engine, name) for name in meant} == meant


def test_eager_arrives(parser: FlexibleArgumentParser) -> None:
    engine = engine_args(parser, replace(PLAN, eager=True))
    assert engine.enforce_eager
    assert engine.gpu_memory_utilization == 0.92


def test_hostile_names_arrive_as_they_are(parser: FlexibleArgumentParser) -> None:
    for name in ("a b", "$(x)", "it's", 'a"b', "é 模型", "a=b", "k.v=1", "[1]"):
        assert parsed(parser, replace(PLAN, model=name)).model_tag == name


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_kv_dtypes_are_vllms(parser: FlexibleArgumentParser, dtype: str) -> None:
    engine = engine_args(parser, replace(PLAN, kv_dtype=dtype))
    assert engine.kv_cache_dtype == dtype
    assert dtype in get_args(CacheDType)


def test_draft_methods_and_quantizations_are_vllms() -> None:
    assert set(METHODS.values()) <= set(literals(SpeculativeMethod))
    assert set(QUANTIZATIONS) <= set(QUANTIZATION_METHODS)


def literals(kind: object) -> list[object]:
    """The values of a Literal, nested ones included."""
    return [value for part in get_args(kind) for value in (literals(part) or [part])]


def test_vllm_refuses_steps_smaller_than_the_number_of_sequences_too() -> None:
    limits = {"max_model_len": 4096, "is_encoder_decoder": False}
    SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=256, **limits)
    with pytest.raises(ValueError, match="must be greater than or equal to max_num_seqs"):
        SchedulerConfig(max_num_batched_tokens=255, max_num_seqs=256, **limits)
