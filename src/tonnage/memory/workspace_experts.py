"""The scratch of routed experts, by the kernels that run them.

Source:
    vLLM 0.33.0 ``model_executor/layers/fused_moe``: ``workspace_shapes`` of each class of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tonnage.memory.workspace_shape import GpuClass, RoutedShape

Backend = Literal["triton", "marlin", "cutlass-fp4", "deep-gemm", "library"]
"""``library``: kernels that account only for their output: FlashInfer, those of MXFP4, those of EXL3."""

DEEP_GEMM_ROWS = 128


def expert_backend(fmt: str, gpu: GpuClass | None = None) -> Backend:
    """Return the kernels vLLM takes for experts of a storage format on a GPU, where no flag says otherwise.

    FP8 in blocks has kernels of its own on data centre GPUs from Hopper on; Marlin runs FP4 where the GPU has none.
    """
    if fmt.startswith("fp8_e4m3_block"):
        return "deep-gemm" if gpu in (None, "hopper", "blackwell-dc") else "triton"
    if fmt.startswith(("int", "gptq", "awq")):
        return "marlin"
    if fmt.startswith("mxfp4"):
        return "marlin" if gpu in ("a100", "ampere-ada") else "library"
    if fmt.startswith(("nvfp4", "mxfp8")):
        return "marlin" if gpu in ("a100", "ampere-ada", "hopper") else "library"
    return "library" if fmt.startswith("exl3") else "triton"


def expert_workspace(routed: RoutedShape, tokens: int, dtype_bytes: int, backend: Backend) -> int:
    """Return the bytes of one step's scratch on one rank.

    Args:
        routed: The experts.
        tokens: Tokens of the step.
        dtype_bytes: Bytes of an activation element.
        backend: The kernels.
    """
    hidden, rows = routed.hidden_size, tokens * routed.top_k
    narrow, wide = max(routed.width, hidden), max(routed.up_width, hidden)
    output = tokens * hidden
    if backend == "library":
        return output * dtype_bytes
    if backend == "cutlass-fp4":
        return (rows * (max(2 * routed.up_width, hidden) + routed.up_width) + output) * dtype_bytes
    if backend == "deep-gemm":
        padded = _rounded(rows + routed.local_experts * (DEEP_GEMM_ROWS - 1), DEEP_GEMM_ROWS)
        return padded * narrow + (padded * wide + output) * dtype_bytes
    return rows * (narrow + wide) * dtype_bytes


def widest_workspace(routed: RoutedShape, tokens: int, dtype_bytes: int) -> int:
    """Return the largest scratch of all kernels that can run these experts."""
    output = tokens * routed.hidden_size * dtype_bytes
    return output + max(expert_workspace(routed, tokens, dtype_bytes, backend) for backend in _backends(routed.fmt))


def _backends(fmt: str) -> tuple[Backend, ...]:
    if fmt.startswith("exl3"):
        return ("library",)
    if fmt.startswith("fp8"):
        return ("triton", "marlin", "deep-gemm")
    return ("triton", "marlin", "cutlass-fp4") if fmt.startswith("nvfp4") else ("triton", "marlin")


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
