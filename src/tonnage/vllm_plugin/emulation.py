"""MXFP8 on a CPU, for which vLLM has no kernels: weights become BF16 after loading, and what follows is a BF16 model.

It proves bytes, names and layout of a package without a GPU. It says nothing of the numerics of a GPU's kernels, and
the model takes twice the memory. For linear layers vLLM has such a kernel, which is only not offered on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel, register_linear_kernel
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as mxfp8_experts,
)
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform

logger = init_logger("vllm.tonnage")
_NOTICE = "tonnage: EMULATION of MXFP8 %s on this CPU: weights become BF16 after loading; not the numerics of a GPU"
_StoredMethod = mxfp8_experts.CompressedTensorsW8A8Mxfp8MoEMethod


class EmulatedLinear(EmulationMxfp8LinearKernel):  # type: ignore[misc]
    """vLLM's own emulation, which says so."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Turn the weight of one layer into BF16."""
        logger.warning_once(_NOTICE, "linear layers")
        super().process_weights_after_loading(layer)


class EmulatedExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts that are allocated and loaded as MXFP8, and computed as BF16."""

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """Allocate codes and scales as vLLM's method for GPUs does."""
        _StoredMethod.create_weights(self, layer, *sizes, **attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Turn the weights of one layer into BF16, its scales into nothing."""
        logger.warning_once(_NOTICE, "experts")
        for name in ("w13_weight", "w2_weight"):
            codes, scales = getattr(layer, name), getattr(layer, f"{name}_scale")
            replace_parameter(layer, name, dequant_mxfp8_to_bf16(codes.data, scales.data))
            delattr(layer, f"{name}_scale")
        super().process_weights_after_loading(layer)


def register_emulation() -> None:
    """Offer both on a CPU, once; on any other device do nothing."""
    if not current_platform.is_cpu() or mxfp8_experts.CompressedTensorsW8A8Mxfp8MoEMethod is EmulatedExperts:
        return
    register_linear_kernel(EmulatedLinear, PlatformEnum.CPU, "mxfp8")
    mxfp8_experts.CompressedTensorsW8A8Mxfp8MoEMethod = EmulatedExperts
