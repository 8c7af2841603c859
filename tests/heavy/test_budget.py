"""vLLM's own arithmetic of what it asks for, and its own defaults, against ours."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
from vllm.v1.worker.utils import request_memory

from tonnage.memory.budget import highest_utilization, requested_bytes, utilization_text
from tonnage.memory.runtime_rules import vllm_limits
from tonnage.memory.supply import find_gpu, supply_bytes
from tonnage.memory.workspace_shape import gpu_class

pytestmark = pytest.mark.heavy

MIB = 1 << 20
TOTALS = [supply_bytes(find_gpu(slug)).nbytes for slug in ("rtx-pro-6000", "rtx-5090", "h100", "b300", "l4")]
SHARES = ["0.92", "0.9", "0.8637", "0.3333", "1", "0.0001", "0.9417"]


def asked(total: int, free: int, utilization: str) -> int | None:
    """What vLLM asks for; ``None`` where it refuses to start."""
    snapshot = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    try:
        return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=float(utilization)))
    except ValueError:
        return None


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("share", SHARES)
def test_vllm_asks_for_the_same_to_the_byte(total: int, share: str) -> None:
    assert abs(asked(total, total, share) - requested_bytes(total, Fraction(share))) <= 1


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("held_mib", [500, 3410, 12_345])
def test_vllm_starts_with_the_highest_utilization_and_not_with_a_digit_more(total: int, held_mib: int) -> None:
    free = total - held_mib * MIB
    highest = highest_utilization(total, free)
    assert asked(total, free, utilization_text(highest)) is not None
    assert asked(total, free, utilization_text(highest + Fraction(1, 10_000))) is None


@pytest.mark.parametrize("slug", ["rtx-pro-6000", "rtx-5090", "a100-80gb", "a100-40gb", "h100", "h200", "b200", "l4"])
def test_defaults_are_vllms(monkeypatch: pytest.MonkeyPatch, slug: str) -> None:
    gpu = find_gpu(slug)
    total = supply_bytes(gpu).nbytes
    platform = SimpleNamespace(
        get_device_total_memory=lambda: total,
        get_device_name=lambda: gpu.aliases[0],
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    server = UsageContext.OPENAI_API_SERVER
    assert vllm_limits(total, gpu_class(gpu)) == (tokens[server], seqs[server])
