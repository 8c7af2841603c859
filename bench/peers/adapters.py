"""What each peer says of the cases: run by ``peers.py`` in the environment where the peer is installed.

One JSON object per line on stdin: a case, with the directory of its checkpoint (config.json, whole safetensors headers
over sparse files). One per line on stdout: ``weights``, ``cache`` and ``fits`` as far as the peer says them, bytes per
rank, or ``error``. A peer that asks a hub is given the same facts from the directory; its arithmetic is not touched.
One that knows no parallelism gets its figure divided by the ranks, which is the best it could have said.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
MOST_SECONDS = 30
HELD = ("weights.", "padding.", "engine.")
Case = dict[str, Any]
Answer = dict[str, Any]


def headers(directory: str) -> dict[str, Any]:
    """Return the tensors of all files of a checkpoint, as their headers state them."""
    tensors: dict[str, Any] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            tensors |= json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return tensors


def config_of(case: Case) -> dict[str, Any]:
    """Return config.json."""
    found: dict[str, Any] = json.loads((Path(case["directory"]) / "config.json").read_text())
    return found


def elements(tensors: dict[str, Any]) -> dict[str, int]:
    """Return the number of elements by dtype, as the hub reports them."""
    counted: Counter[str] = Counter()
    for tensor in tensors.values():
        counted[tensor["dtype"]] += prod(tensor["shape"])
    return dict(counted)


def ranks(case: Case) -> int:
    """Return among how many GPUs a model is shared."""
    return int(case["tp"] * case["pp"])


def stored_bytes(directory: str) -> int:
    """Return the size of all weight files."""
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


# --- one function per peer --------------------------------------------------------------------------------------------


def tonnage(case: Case) -> Answer:
    """The planner of this project, from config.json (and hf_quant_config.json, where there is one) alone."""
    from tonnage import PlanRequest, plan_checkpoint
    from tonnage.api import checkpoint_from_config
    from tonnage.memory.supply import Supply, find_gpu
    from tonnage.profile import Profile

    beside = Path(case["directory"]) / "hf_quant_config.json"
    hf_quant = json.loads(beside.read_text()) if beside.exists() else None
    checkpoint = checkpoint_from_config(config_of(case), name=case["model"], hf_quant=hf_quant)
    total, share = case.get("gpu_bytes"), case.get("utilization")
    supply = None
    if total:
        nbytes = int(total * share) if share else total
        supply = Supply(nbytes=nbytes, basis="exact", source="case", whole_bytes=total)
    request = PlanRequest(
        engine=case["engine"],
        version=case.get("version"),
        tp=case["tp"],
        pp=case["pp"],
        dcp=case["dcp"],
        gpu=find_gpu(case["gpu"]) if case.get("gpu") else None,
        supply=supply,
        context_held=False,
        profile=Profile(
            concurrency=1,
            prefill_chunk_tokens=case.get("max_batched_tokens"),
            context_tokens=case["tokens"] or 8192,
            kv_dtype=case.get("kv_dtype"),
        ),
    )
    plan = plan_checkpoint(checkpoint, request)
    assert plan.placement is not None
    placed = [plan.placement.rank_bytes(stage, rank) for stage in range(case["pp"]) for rank in range(case["tp"])]
    held = [[line.bound_nbytes for line in rank.lines if line.component.startswith(HELD)] for rank in plan.ranks]
    return {
        "weights": max(rank.weights_bytes for rank in plan.ranks),
        "bound": max(map(sum, held)),
        "parameters": max(placed),
        "cache": max(rank.cache_bytes for rank in plan.ranks),
        "fits": plan.fits,
    }


def hf_mem(case: Case) -> Answer:
    """hf-mem: bytes of the headers; cache with ``--experimental``."""
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size, resolve_kv_cache_dtype
    from hf_mem.safetensors.metadata import parse_safetensors_metadata

    metadata = parse_safetensors_metadata({"Transformer": headers(case["directory"])})
    config = config_of(case)
    config = config.get("text_config", config) | {
        key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in config
    }
    answer: Answer = {"weights": metadata.bytes_count // ranks(case)}
    if case["tokens"]:
        asked = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.get(case.get("kv_dtype") or "")
        dtype = resolve_kv_cache_dtype(config=config, kv_cache_dtype=asked, metadata=metadata, model_id=case["model"])
        cache = compute_safetensors_kv_cache_size(config=config, cache_dtype=dtype, max_model_len=case["tokens"])
        answer["cache"] = cache // ranks(case)
    return answer


def vramscout(case: Case) -> Answer:
    """VRAMScout, with the parameters and bytes the hub would state."""
    from vramscout import modern_core, modern_v06, modern_v07

    count = sum(elements(headers(case["directory"])).values())
    size = stored_bytes(case["directory"])
    modern_core._hub_metadata = modern_v06._selected_hub_metadata = lambda *_: (count, size)
    total = case.get("gpu_bytes") or 4096 * GIB
    plan = modern_v07.plan_modern(
        case["directory"],
        context=case["tokens"] or 8192,
        kv_dtype="fp8" if "fp8" in (case.get("kv_dtype") or "") else "auto",
        tp=case["tp"],
        dcp=case["dcp"],
        vram_gib=total / GIB,
        prefill_chunk=case.get("max_batched_tokens") or 8192,
        engine="vllm",
        gpu_memory_utilization=case.get("utilization"),
    )
    beside = {"Model weights / rank", "CUDA / runtime", "Prefill scratch", "Safety reserve"}
    cache = sum(gib for name, gib in plan.parts_gib.items() if name not in beside)
    answer: Answer = {"weights": int(plan.parts_gib["Model weights / rank"] * GIB) // case["pp"]}
    if case["tokens"]:
        answer["cache"] = int(cache * GIB) // case["pp"]
    if case.get("gpu_bytes"):
        answer["fits"] = bool(plan.fits)
    return answer


def llm_d_planner(case: Case) -> Answer:
    """llm-d-planner's capacity formulas, with the elements by dtype the hub would state."""
    from planner import capacity_planner as peer
    from transformers import AutoConfig

    counted = elements(headers(case["directory"]))
    peer.get_safetensors_metadata_from_hf = lambda *_, **__: SimpleNamespace(parameter_count=counted)
    config = AutoConfig.from_pretrained(case["directory"])
    tp, pp = case["tp"], case["pp"]
    answer: Answer = {"weights": int(peer.per_gpu_model_memory_required("m", config, tp, pp) * GIB)}
    if case["tokens"]:
        needed = peer.kv_cache_req("m", config, case["tokens"])
        answer["cache"] = int(needed * GIB) // (tp * pp)
        if case.get("gpu_bytes"):
            left = peer.allocatable_kv_cache_memory(
                "m",
                config,
                case["gpu_bytes"] / GIB,
                case.get("utilization") or 0.9,
                tp,
                pp,
                max_model_len=case["tokens"],
            )
            answer["fits"] = bool(left >= needed)
    return answer


def accelerate(case: Case) -> Answer:
    """``accelerate estimate-memory``: the model is built without data and its parameters are counted."""
    return {"weights": _built_bytes(case["directory"]) // ranks(case)}


@cache
def _built_bytes(directory: str) -> int:
    """Build a model without data, once: it takes seconds."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(directory)
    with init_empty_weights():
        model = AutoModel.from_config(config, torch_dtype=torch.bfloat16)
    total, _ = calculate_maximum_sizes(model)
    return int(total)


def vramcalc(case: Case) -> Answer:
    """Vramcalc, in mode inference."""
    from vramcalc import estimate

    found = estimate(config_of(case), mode="inference", dtype="bf16", batch=1, seq_len=case["tokens"] or 8192)
    answer: Answer = {"weights": found.weights // ranks(case)}
    if case["tokens"]:
        answer["cache"] = found.kv_cache // ranks(case)
    if case.get("gpu_bytes") and ranks(case) == 1:
        answer["fits"] = bool(found.fits(case["gpu_bytes"] / 1e9).ok)
    return answer


def modelinfo(case: Case) -> Answer:
    """modelinfo-cli, of the headers."""
    from modelinfo.calculator import calculate_footprint

    found = calculate_footprint(headers(case["directory"]), context_length=case["tokens"], config=config_of(case))
    answer: Answer = {"weights": int(found["base_memory_bytes"]) // ranks(case)}
    if case["tokens"]:
        answer["cache"] = int(found["kv_cache_bytes"]) // ranks(case)
    return answer


def hf_vram_calc(case: Case) -> Answer:
    """hf-vram-calc, with the dtype it takes from the config."""
    from hf_vram_calc import ConfigManager, VRAMCalculator

    config, count = _counted(case["model"], case["directory"])
    dtype = config.recommended_dtype or "bf16"
    peer = VRAMCalculator(ConfigManager(None))
    answer: Answer = {"weights": int(peer.calculate_model_memory(count, dtype) * GIB) // ranks(case)}
    if case["tokens"]:
        cache = peer.calculate_kv_cache_memory(config, dtype, 1, case["tokens"])
        answer["cache"] = int(cache * GIB) // ranks(case)
    return answer


@cache
def _counted(model: str, directory: str) -> tuple[Any, int]:
    """Return hf-vram-calc's config and parameters; it builds the model, once."""
    from hf_vram_calc import ConfigParser
    from hf_vram_calc.calculator import ParameterCalculator

    config = ConfigParser.load_and_parse_config(model, directory)
    return config, ParameterCalculator.calculate_transformer_params(config)


PEERS: dict[str, Callable[[Case], Answer]] = {
    "tonnage": tonnage,
    "hf-mem": hf_mem,
    "vramscout": vramscout,
    "llm-d-planner": llm_d_planner,
    "accelerate": accelerate,
    "vramcalc": vramcalc,
    "modelinfo-cli": modelinfo,
    "hf-vram-calc": hf_vram_calc,
}


class TooLateError(BaseException):
    """No answer in time; no peer's own ``except Exception`` takes it for a failure to be worked around."""


def _too_late(*_: object) -> None:
    raise TooLateError(f"no answer in {MOST_SECONDS} s")


def main() -> int:
    """Answer every case; what a peer prints is kept off stdout."""
    signal.signal(signal.SIGALRM, _too_late)
    say = PEERS[sys.argv[1]]
    asked, sys.stdin = sys.stdin.readlines(), io.StringIO()  # transformers asks a terminal before it runs code
    for line in asked:
        case = json.loads(line)
        begin = time.perf_counter()
        signal.alarm(MOST_SECONDS)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                answer = say(case)
            except (Exception, TooLateError) as error:  # noqa: BLE001 - whatever a peer fails with is its answer
                answer = {"error": f"{type(error).__name__}: {error}"[:200]}
            signal.alarm(0)
        print(json.dumps({"id": case["id"], "seconds": time.perf_counter() - begin, **answer}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
