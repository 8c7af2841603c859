"""What vLLM has to be told so that its model classes can be built anywhere: every pretence, each with its reason.

None of them touches a size. Kernels are named, not run; groups have ranks, but nobody listens; tensors on torch's meta
device have shapes and dtypes, but no storage. :mod:`vllm_classes` builds the models.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
import vllm.distributed.parallel_state as parallel
import vllm.model_executor.kernels.linear as linear_kernels
import vllm.model_executor.layers.fused_moe.config as moe_config
import vllm.model_executor.layers.fused_moe.expert_map_manager as expert_maps
import vllm.model_executor.models.registry as model_registry
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, int_wna16, mxfp4, nvfp4, unquantized
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

EXPERT_KERNELS = {
    "select_unquantized_moe_backend": (unquantized, unquantized.UnquantizedMoeBackend.TRITON),
    "select_fp8_moe_backend": (fp8, fp8.Fp8MoeBackend.TRITON),
    "select_int8_moe_backend": (int8, int8.Int8MoeBackend.TRITON),
    "select_mxfp8_moe_backend": (fp8, fp8.Fp8MoeBackend.TRITON),
    "select_mxfp4_moe_backend": (mxfp4, mxfp4.Mxfp4MoeBackend.TRITON),
    "select_deepseek_v4_mxfp4_moe_backend": (mxfp4, mxfp4.Mxfp4MoeBackend.TRITON),
    "select_wna16_moe_backend": (int_wna16, int_wna16.WNA16MoEBackend.TRITON),
    "select_nvfp4_moe_backend": (nvfp4, nvfp4.NvFp4MoeBackend.FLASHINFER_CUTLASS),
}
"""The kernel assumed for routed experts: the one that holds weights as they are stored."""


def install() -> None:
    """Install every pretence; once per process."""
    _pretend_device()
    _pretend_kernels()
    _build_on_meta_device()
    _inspect_models_in_this_process()
    _register_configs()


def pretend_world(*, tp: int, pp: int, rank: int) -> None:
    """Give vLLM the process groups of one rank of ``tp * pp``; experts spread over the tensor-parallel group."""
    stage, tp_rank = divmod(rank, tp)
    tensor_group = range(stage * tp, (stage + 1) * tp)
    parallel._WORLD = _group("world", range(tp * pp), rank)
    parallel._TP = _group("tp", tensor_group, rank)
    parallel._EP = _group("ep", tensor_group, rank)
    parallel._PP = _group("pp", range(tp_rank, tp * pp, tp), rank)
    parallel._ETP = parallel._TP
    for name in ("_DCP", "_PCP", "_DP"):
        setattr(parallel, name, _group(name, (rank,), rank))
    parallel._NODE_COUNT = 1


def _group(name: str, ranks: Iterable[int], rank: int) -> parallel.GroupCoordinator:
    """Return a group that knows who is in it and can send nothing."""
    group = parallel.GroupCoordinator.__new__(parallel.GroupCoordinator)
    group.unique_name = f"pretended_{name}"
    group.ranks = list(ranks)
    group.group_ranks = [group.ranks]
    group.rank = rank
    group.world_size = len(group.ranks)
    group.rank_in_group = group.local_rank = group.ranks.index(rank)
    members, place = group.world_size, group.rank_in_group
    group.cpu_group = group.device_group = SimpleNamespace(
        size=lambda: members, rank=lambda: place, group_name=group.unique_name
    )
    group.device = torch.device("cpu")
    group.device_communicator = group.mq_broadcaster = None
    group.use_custom_op_call = True
    group.use_device_communicator = group.use_cpu_custom_send_recv = False
    group.destroy = lambda: None
    return group


# --- the device --------------------------------------------------------------------------------------------------------


class _Inert:
    """A CUDA stream or event that is created and never used."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass


def _pretend_device() -> None:
    """Quantisation methods ask how new the GPU is, sparse attention whether there is one, some models create streams."""
    platform = type(current_platform)
    platform.get_device_capability = classmethod(lambda _cls, *_args, **_options: DeviceCapability(10, 0))
    platform.num_compute_units = classmethod(lambda _cls, *_args, **_options: 148)
    platform.verify_quantization = classmethod(lambda _cls, _method: None)
    choose = platform.get_attn_backend_cls.__func__

    def attention(cls: type, *args: Any, **options: Any) -> str:
        try:
            return choose(cls, *args, **options)
        except NotImplementedError:
            return AttentionBackendEnum.CPU_MLA.get_path()

    platform.get_attn_backend_cls = classmethod(attention)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Inert)
        setattr(torch, name, _Inert)
    torch.cpu._is_avx512_bf16_supported = lambda: False  # a CPU with it keeps states in F32, a GPU does not


def _build_on_meta_device() -> None:
    """Vision towers move themselves while they are built, and the map of experts to ranks needs real values."""
    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        try:
            return move(self, *args, **options)
        except NotImplementedError:
            dtypes = [value for value in (*args, *options.values()) if isinstance(value, torch.dtype)]
            return move(self, dtype=dtypes[0]) if dtypes else self

    torch.nn.Module.to = to
    for name in ("__init__", "_calculate_expert_maps", "_init_routing_tables"):
        setattr(expert_maps.ExpertMapManager, name, _on_cpu(getattr(expert_maps.ExpertMapManager, name)))


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        with torch.device("cpu"):
            return method(*args, **options)

    return called


# --- kernels -----------------------------------------------------------------------------------------------------------


class _Kernel:
    """Stands for the kernel of a linear module: takes any call, says no to every question."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        asks = ("is_", "supports", "can_", "expects", "needs", "uses", "has_", "requires", "should")
        return (lambda *_args, **_options: False) if name.startswith(asks) else _Kernel()


def _pretend_kernels() -> None:
    """A CPU has hardly any kernel for quantised weights: take those of a GPU, wherever vLLM has already imported the choice."""
    for module in pkgutil.walk_packages(quantization.__path__, quantization.__name__ + "."):
        with contextlib.suppress(ImportError):  # methods that need a package of their own
            importlib.import_module(module.name)
    choices: dict[str, Callable[..., Any]] = {
        name: lambda *_args, **_options: _Kernel()
        for name in vars(linear_kernels)
        if name.startswith("init_") and name.endswith("_kernel")
    }
    choices["choose_mp_linear_kernel"] = lambda *_args, **_options: _Kernel
    choices |= {name: _always(module, backend) for name, (module, backend) in EXPERT_KERNELS.items()}
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        for name in choices.keys() & vars(module).keys():
            setattr(module, name, choices[name])
    check = moe_config.FusedMoEConfig.__post_init__

    def checked(self: moe_config.FusedMoEConfig) -> None:
        with contextlib.suppress(NotImplementedError):  # experts without a gate exist on GPUs only
            check(self)

    moe_config.FusedMoEConfig.__post_init__ = checked


def _always(module: ModuleType, backend: Any) -> Callable[..., Any]:
    kernels = module.backend_to_kernel_cls(backend)
    chosen = kernels[0] if isinstance(kernels, list) else kernels
    return lambda *_args, **_options: (backend, chosen)


# --- models and configs ------------------------------------------------------------------------------------------------


def _inspect_models_in_this_process() -> None:
    """Vllm looks at every class in a process of its own, to leave CUDA alone; that costs half a minute each."""
    model_registry._run_in_subprocess = lambda inspect: inspect()


class MiMoConfig(transformers.Qwen2Config):
    """MiMo's own code, which is not run, adds nothing that has a size."""

    model_type = "mimo"


class MiniMaxM3Config(transformers.PretrainedConfig):
    """The fields as they stand; one that shapes an activation has a default."""

    model_type = "minimax_m3"
    swiglu_beta = 1.0


class NemotronNasConfig(transformers.LlamaConfig):
    """Llama with a description of every block, which vLLM reads by attribute."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Iterable[dict[str, Any]] = (), **fields: Any) -> None:
        stated = {name: value for name, value in fields.items() if value is not None}
        super().__init__(**stated)
        self.block_configs = [_attributes(block) for block in block_configs]

    def to_dict(self) -> dict[str, Any]:
        """Return what can be written as JSON."""
        return {name: value for name, value in super().to_dict().items() if name != "block_configs"}


def _attributes(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    return SimpleNamespace(**{name: _attributes(value) for name, value in fields.items()})


def _register_configs() -> None:
    """These families are known to vLLM, but their config classes come with the checkpoint."""
    for kind in (MiMoConfig, MiniMaxM3Config, NemotronNasConfig):
        transformers.AutoConfig.register(kind.model_type, kind)
