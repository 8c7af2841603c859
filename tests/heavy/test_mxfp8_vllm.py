"""A real model's projections, converted as vLLM converts them while loading, and measured a second time with torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from smollm2 import Weights
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch,
    dequant_mxfp8_to_bf16,
)

from tonnage.prepare.mxfp8 import Figures, decode, quantize

pytestmark = pytest.mark.heavy

PROJECTIONS = 30 * 7


@pytest.fixture(scope="module")
def projections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder: Path = tmp_path_factory.mktemp("SmolLM2-135M")
    Weights().write_checkpoint(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.endswith("_proj.weight")}  # noqa: SIM118 - no dict


def converted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Figures]:
    rows, columns = weight.shape
    codes, scales = np.empty((rows, columns), np.uint8), np.empty((rows, columns // 32), np.uint8)
    figures = quantize(weight.view(torch.uint16).numpy(), "BF16", codes, scales, threads=2)
    return torch.from_numpy(codes), torch.from_numpy(scales), figures


def test_codes_scales_and_figures_of_every_projection(projections: dict[str, torch.Tensor]):
    assert len(projections) == PROJECTIONS
    total, signal, noise = Figures(), 0.0, 0.0
    for name, weight in projections.items():
        codes, scales, figures = converted(weight)
        theirs, their_scales = _mxfp8_e4m3_quantize_torch(weight)
        assert torch.equal(codes, theirs.view(torch.uint8)), name
        assert torch.equal(scales, their_scales), name

        source = weight.double()
        value = theirs.double() * torch.exp2(their_scales.double() - 127).repeat_interleave(32, dim=1)
        error = source - value
        assert figures.errors is not None
        assert figures.errors.relative == pytest.approx((error.norm() / source.norm()).item(), rel=1e-6), name
        assert figures.errors.largest_error == error.abs().max().item(), name
        assert figures.largest == source.abs().max().item(), name
        total += figures
        signal += source.square().sum().item()
        noise += error.square().sum().item()
    assert total.errors is not None
    assert total.errors.sqnr_db == pytest.approx(10 * np.log10(signal / noise), rel=1e-6)
    assert 30 < total.errors.sqnr_db < 33
    assert (total.saturated_blocks, total.nonfinite_blocks) == (0, 0)


def test_decoded_as_vllm_decodes(projections: dict[str, torch.Tensor]):
    for name, weight in projections.items():
        codes, scales, _ = converted(weight)
        value = np.empty(codes.shape, np.uint16)
        decode(codes.numpy(), scales.numpy(), value)
        theirs = dequant_mxfp8_to_bf16(codes.view(torch.float8_e4m3fn), scales)
        assert torch.equal(torch.from_numpy(value).view(torch.bfloat16), theirs), name
