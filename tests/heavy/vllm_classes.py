"""What vLLM's own model classes allocate on one rank: built from a config alone, without weights, GPU or process groups.

Real are the model class, its parallel layers, the padding of vocabularies, the replication of KV heads, the spread of
experts and what every quantisation method creates. What is only pretended is in :mod:`vllm_pretences`. The bytes are those
at load, before a kernel repacks anything; buffers (rotary tables) are not counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm_pretences
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

MAX_MODEL_LEN = 4096
ARCHITECTURES = {"MiniMaxM3ForCausalLM": "MiniMaxM3SparseForCausalLM"}
"""Architectures that vLLM has under another name than the config."""

vllm_pretences.install()


class Refused(Exception):  # noqa: N818 - says what vLLM did
    """Vllm does not build this model for this topology."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a topology.

    Attributes:
        tp: Tensor-parallel size.
        ep: Whether experts spread whole over the tensor-parallel ranks.
        pp: Pipeline-parallel size.
        rank: Global rank, ``pp_rank * tp + tp_rank``.
    """

    tp: int = 1
    ep: bool = False
    pp: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter as allocated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def parameter_bytes(config: Mapping[str, Any], where: Rank) -> int:
    """Return the bytes of all parameters of one rank.

    Args:
        config: config.json; may carry hf_quant_config.json under ``_hf_quant_config``.
        where: The rank.

    Raises:
        Refused: vLLM does not build it.
    """
    return sum(parameter.nbytes for parameter in parameters(config, where))


def parameters(config: Mapping[str, Any], where: Rank) -> tuple[Parameter, ...]:
    """Return every parameter of one rank, tied ones once; to find the one that differs."""
    model = _build(config, where)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            nbytes=parameter.numel() * parameter.element_size(),
        )
        for name, parameter in model.named_parameters()
    )


def _build(config: Mapping[str, Any], where: Rank) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), config)
        try:
            engine = engine_config(folder, config, where)
            return build_rank(engine, where)
        except (ArithmeticError, AssertionError, ValueError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config without a reference to code of the checkpoint, so that none is wanted."""
    fields = {name: value for name, value in config.items() if not name.startswith("_")}
    fields["architectures"] = [ARCHITECTURES.get(name, name) for name in fields["architectures"]]
    for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        part.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(fields))
    if "_hf_quant_config" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(config["_hf_quant_config"]))


def engine_config(
    folder: str, config: Mapping[str, Any], where: Rank, speculative: dict[str, Any] | None = None
) -> VllmConfig:
    """Return what vLLM makes of a directory with this config, and of a draft beside it."""
    longest = config.get("text_config", config).get("max_position_embeddings") or MAX_MODEL_LEN
    return EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=where.tp,
        pipeline_parallel_size=where.pp,
        enable_expert_parallel=where.ep,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=min(MAX_MODEL_LEN, longest),
        enable_prefix_caching=False,
        speculative_config=speculative,
    ).create_engine_config()


def build_rank(engine: VllmConfig, where: Rank, model_config: ModelConfig | None = None) -> torch.nn.Module:
    """Build one rank's model on the meta device; that of another config, such as a draft's, where one is given."""
    vllm_pretences.pretend_world(tp=where.tp, pp=where.pp, rank=where.rank)
    engine.parallel_config.rank = where.rank
    dtype = engine.model_config.dtype
    with set_current_vllm_config(engine), set_default_torch_dtype(dtype), torch.device("meta"):
        return initialize_model(vllm_config=engine, model_config=model_config or engine.model_config)
