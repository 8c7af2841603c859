"""What one rank's model holds after loading, before kernels repack it: every rank of any topology in this one process.

vLLM's classes and loaders are real, the process groups are those of :mod:`vllm_pretences`: a rank is told who it is, and
nobody listens.

Run: python rank_contents.py OUTPUT JOB...
A job is a JSON object: ``package``, ``topology``, other ``options`` of an engine, and the ``checkpoint`` that vLLM loads by
itself to compare with. OUTPUT gets a JSON list: of every job a list of ranks, each with the names of the parameters that
are ``different``, the ``report`` of the plug-in and the ``seconds`` both took; or, where a package is ``refused``, why, and
whether a model was ``allocated`` before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_pretences import pretend_world

from tonnage import vllm_plugin
from tonnage.errors import TonnageError


def main(output: str, *jobs: str) -> None:
    """Do the jobs."""
    vllm_plugin.register()
    Path(output).write_text(json.dumps([_answer(json.loads(job)) for job in jobs]))


def _answer(job: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any]:
    topology = job["topology"]
    ranks = range(topology.get("tp", 1) * topology.get("pp", 1))
    package = engine_config(job["package"], load_format="tonnage", **topology, **job.get("options", {}))
    if "checkpoint" not in job:
        return _refusal(package, ranks[-1])
    default = engine_config(job["checkpoint"], **topology)
    return [_comparison(package, default, rank, job.get("times", 1)) for rank in ranks]


def _refusal(package: VllmConfig, rank: int) -> dict[str, Any]:
    with patch.object(base_loader, "initialize_model", side_effect=RuntimeError("allocated")) as allocate:
        try:
            load_rank(package, rank)
        except (TonnageError, RuntimeError) as error:
            return {"refused": str(error), "allocated": allocate.called}
    raise AssertionError(package.model_config.model)


def _comparison(package: VllmConfig, default: VllmConfig, rank: int, times: int) -> dict[str, Any]:
    """Compare one rank; what is done several times is so for the shortest time of each."""
    seconds = []
    for _ in range(times):
        found, expected = load_rank(package, rank), load_rank(default, rank)
        different = differences(found, expected)
        seconds.append((found.seconds, expected.seconds))
    ours, theirs = map(min, zip(*seconds, strict=True))
    return {"different": different, "report": asdict(found.report), "seconds": (ours, theirs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters of one rank's model by name, what the plug-in said of loading them, if it did, and how long it took."""

    tensors: Mapping[str, torch.Tensor]
    report: Any
    seconds: float


def engine_config(model: str, *, tp: int = 1, pp: int = 1, ep: bool = False, **options: Any) -> VllmConfig:
    """Return what vLLM makes of the options of an engine."""
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=ep,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=256,
        **options,
    ).create_engine_config()


def load_rank(engine: VllmConfig, rank: int) -> Held:
    """Return what a rank of this engine holds."""
    parallel = engine.parallel_config
    pretend_world(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size, rank=rank)
    parallel.rank = rank
    engine.compilation_config.static_forward_context.clear()
    loader = get_model_loader(engine.load_config)
    seconds = _timed(loader)
    with set_current_vllm_config(engine), set_default_torch_dtype(engine.model_config.dtype):
        model = _loaded(loader, engine)
    return Held(
        tensors=dict(model.named_parameters()), report=getattr(model, "tonnage_report", None), seconds=sum(seconds)
    )


def _timed(loader: BaseModelLoader) -> list[float]:
    """Return a list that gets the seconds the loader takes to fill a model."""
    seconds: list[float] = []
    load_weights = loader.load_weights

    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        load_weights(*arguments)
        seconds.append(time.perf_counter() - begin)

    loader.load_weights = timed
    return seconds


def _loaded(loader: BaseModelLoader, engine: VllmConfig) -> torch.nn.Module:
    """Load as engines do, without what follows: no kernel repacks, and there is no accelerator to tidy up."""
    unpacked = patch.object(base_loader, "process_weights_after_loading")
    with unpacked, patch.object(torch.accelerator, "empty_cache"):
        return loader.load_model(vllm_config=engine, model_config=engine.model_config)


def differences(found: Held, expected: Held) -> list[str]:
    """Return the names of parameters that differ in any bit, or that one side lacks."""
    names = found.tensors.keys() | expected.tensors.keys()
    return sorted(name for name in names if not _same(found.tensors.get(name), expected.tensors.get(name)))


def _same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.equal(_octets(found), _octets(expected))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.contiguous().reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    main(*sys.argv[1:])
