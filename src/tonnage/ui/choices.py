"""What the form of the page offers to choose from, as pairs of value and words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_args

from tonnage.memory.cache_dtypes import KV_CHOICES
from tonnage.ui.bodies import AnyEngine, Method
from tonnage.units import gib

Pairs = tuple[tuple[str, str], ...]
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "exllamav3": "ExLlamaV3", "split": "Prepared ranks (split)"}
LABELS = {
    "source": "Source", "checkpoint": "Checkpoint", "hub": "Model of the hub", "config": "config.json", "gpu": "GPU",
    "engine": "Engine", "tp": "Tensor", "ep": "Expert", "dcp": "Decode ctx", "pp": "Pipeline",
    "concurrency": "Requests at once", "prefill": "Prefill chunk", "context": "Context, tokens", "kv_dtype": "KV cache",
    "convert": "Conversion", "draft": "Draft checkpoint", "draft_hub": "or one of the hub", "draft_method": "Method",
    "draft_tokens": "Tokens per step", "draft_bytes": "or only its bytes", "reserve": "Reserve per GPU",
    "utilization": "Utilization", "supply": "Supply per GPU", "kv_bytes": "Cache per GPU",
    "engine_version": "Engine release", "eager": "No CUDA graphs",
}  # fmt: skip
"""What the form calls its settings."""
_CONVERTS: Pairs = (
    ("none", "As it is stored"),
    ("mxfp8", "BF16 projections to MXFP8"),
    ("mxfp8-experts", "Routed experts as well"),
)


def choices(checkpoints: Mapping[str, Any], gpus: Mapping[str, Any]) -> dict[str, Pairs]:
    """Return the options of every choice, by the name of its setting.

    Args:
        checkpoints: The answer of ``/api/checkpoints``.
        gpus: The answer of ``/api/gpus``.
    """
    listed = _checkpoints(checkpoints["checkpoints"])
    return {
        "checkpoint": (("", "Choose one" if listed else "None is served: tonnage ui DIRECTORY"), *listed),
        "draft": (("", "None"), *listed),
        "gpu": (("", "None"), *((gpu["name"], _gpu(gpu)) for gpu in gpus["gpus"])),
        "engine": tuple((name, _ENGINES.get(name, name)) for name in get_args(AnyEngine)),
        "kv_dtype": tuple((name, name) for name in KV_CHOICES),
        "draft_method": (("", "As the draft is made for"), *((name, name) for name in get_args(Method))),
        "convert": _CONVERTS,
    }


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"{gpu['title']} · {gib(gpu['supply_bytes'], digits=1)} GiB"


def _checkpoints(found: Sequence[Mapping[str, Any]]) -> Pairs:
    """Return paths and the shortest ends of them that tell them apart, at most their last two names."""
    names = Counter(PurePath(one["path"]).name for one in found)
    pairs = []
    for one in found:
        path = PurePath(one["path"])
        name = path.name if names[path.name] == 1 else "/".join(path.parts[-2:])
        pairs.append((one["path"], name.removesuffix(".json") + ("" if one["weights"] else " (config)")))
    return tuple(pairs)
