"""The model loader: a rank's own files, mapped, through the model's own ``load_weights``."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import BaseModelLoader, DefaultModelLoader, register_model_loader

from tonnage.errors import Problem, UnknownFormatError
from tonnage.prepare.reader import RankView
from tonnage.topology import Topology
from tonnage.vllm_plugin.opening import LoadError, RankFiles, open_rank_files, public_key_of
from tonnage.vllm_plugin.slices import sliced
from tonnage.vllm_plugin.statement import missing_statement

logger = init_logger("vllm.tonnage")
_TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one worker read; the model keeps it as ``tonnage_report``.

    Attributes:
        directory: Of the rank.
        tensors: Given to the model.
        read_bytes: Of these.
        planned_bytes: Weight bytes of this rank, as planned.
        held_bytes: Of the model's parameters, before kernels repack them.
        extra: Bytes of parameters the files have nothing for, by name.
        seconds: Wall clock of reading.
        verified: Whether the files were verified first.
    """

    directory: str
    tensors: int
    read_bytes: int
    planned_bytes: int
    held_bytes: int
    extra: Mapping[str, int]
    seconds: float
    verified: bool


class TonnageLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads what ``tonnage prepare`` wrote for exactly this topology."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._public_key = public_key_of(load_config.model_loader_extra_config)
        self._files: RankFiles | None = None

    def download_model(self, model_config: ModelConfig) -> None:
        """Download nothing: packages are on this machine."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Return the model with this rank's weights; everything is checked before it is even allocated.

        Raises:
            TonnageError: These are not the weights for this rank.
        """
        self._files = self._open(vllm_config, model_config)
        _state_quantization(vllm_config, model_config, self._files.view)
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill a model that is allocated."""
        files = self._files or self._open(get_current_vllm_config(), model_config)
        begin = time.perf_counter()
        read: dict[str, int] = {}
        with files.view as view, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # nor is it written
            loaded = model.load_weights(_tensors(view, read))
        self._files = None
        report = _report(files, read, model, loaded, time.perf_counter() - begin)
        model.tonnage_report = report
        if loaded is not None:
            DefaultModelLoader.track_weights_loading(self, model, set(loaded), quantized=True)
        _log(report)

    def _open(self, vllm_config: VllmConfig, model_config: ModelConfig) -> RankFiles:
        topology = _topology(vllm_config, model_config)
        rank = get_pp_group().rank_in_group * topology.tp + get_tensor_model_parallel_rank()
        return open_rank_files(Path(model_config.model), topology, rank, public_key=self._public_key)


def register_loader(load_format: str) -> None:
    """Make vLLM know the load format."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known  # noqa: PLC0415, N811 - nowhere else used

    if known.get(load_format) is not TonnageLoader:  # registering twice is warned of
        register_model_loader(load_format)(TonnageLoader)


def _topology(vllm_config: VllmConfig, model_config: ModelConfig) -> Topology:
    """Return what the engine runs as.

    Raises:
        LoadError: Experts spread in a way that no preparation cuts for.
    """
    parallel = vllm_config.parallel_config
    experts = model_config.is_moe and parallel.enable_expert_parallel
    if model_config.is_moe:
        for name, usual in _OF_EXPERTS.items():
            if (found := getattr(parallel, name)) != usual:
                what = f"spreads experts in a way packages are not cut for: {name}"
                raise LoadError(Problem(where="vLLM", what=what, expected=str(usual), found=str(found)))
    return Topology(
        tp=parallel.tensor_parallel_size,
        ep=parallel.tensor_parallel_size if experts else 1,
        pp=parallel.pipeline_parallel_size,
    )


_OF_EXPERTS = {
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_eplb": False,
    "expert_placement_strategy": "linear",
}


def _state_quantization(vllm_config: VllmConfig, model_config: ModelConfig, view: RankView) -> None:
    """Tell vLLM what the config of a package leaves unsaid, before the model is allocated."""
    fields = model_config.hf_config.to_dict()
    statement = missing_statement(view.tensors, fields)
    if statement is None:
        return
    method = statement["quant_method"]
    if model_config.quantization not in {None, method}:
        what = "quantises what is MXFP8 already"
        raise LoadError(Problem(where="--quantization", what=what, expected="none", found=model_config.quantization))
    model_config.quantization = method
    vllm_config.quant_config = get_quantization_config(method).from_config(statement)
    logger.info("tonnage: config.json states no quantization; headers of %s do: MXFP8", view.directory)


def _tensors(view: RankView, read: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a rank under its name in the checkpoint, of the shape it has there; note its bytes."""
    for name, tensor in view.tensors.items():
        if tensor.dtype not in _TORCH:
            what, expected = "dtype torch does not have", ", ".join(_TORCH)
            problem = Problem(where=tensor.file, tensor=name, what=what, expected=expected, found=tensor.dtype)
            raise UnknownFormatError(problem)
        octets = torch.from_numpy(view[name].reshape(-1).view("u1"))
        read[name] = octets.numel()
        part = octets.view(_TORCH[tensor.dtype]).reshape(tensor.shape)
        yield name, part if tensor.cut is None else sliced(name, part, *tensor.cut)


def _report(
    files: RankFiles, read: Mapping[str, int], model: nn.Module, loaded: set[str] | None, seconds: float
) -> LoadReport:
    held = dict(model.named_parameters())
    extra = {name: _nbytes(held[name]) for name in held.keys() - loaded} if loaded is not None else {}
    return LoadReport(
        directory=str(files.view.directory),
        tensors=len(read),
        read_bytes=sum(read.values()),
        planned_bytes=files.planned_bytes,
        held_bytes=sum(map(_nbytes, held.values())),
        extra=dict(sorted(extra.items())),
        seconds=seconds,
        verified=files.verified,
    )


def _nbytes(parameter: torch.Tensor) -> int:
    return int(parameter.numel() * parameter.element_size())


def _log(report: LoadReport) -> None:
    extra = Counter(name.rpartition(".")[2] for name in report.extra)
    logger.info(
        "tonnage: %s: read %d bytes in %d tensors, planned %d, in %.2f s, %s; the model holds %d, of these %d in %s",
        report.directory,
        report.read_bytes,
        report.tensors,
        report.planned_bytes,
        report.seconds,
        "verified" if report.verified else "not verified",
        report.held_bytes,
        sum(report.extra.values()),
        ", ".join(f"{count} {name}" for name, count in extra.items()) or "nothing the files have not",
    )
