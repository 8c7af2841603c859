"""What vLLM's own classes allocate for a draft on one rank, beside its target: embedding and head left aside.

Those two are made with every draft and dropped where the target's take their place, so they are no part of the answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm.config.vllm as engine_config
import vllm_classes
from vllm_classes import Rank

ENDS = ("embed_tokens", "lm_head", "shared_head.head", "model.embeddings")

engine_config.HAS_TRITON = True  # only asked for; nothing is run


def draft_bytes(config: Mapping[str, Any], where: Rank, method: str, draft: Mapping[str, Any] | None = None) -> int:
    """Return the bytes of a draft's parameters on one rank, without embedding and head.

    Args:
        config: config.json of the target.
        where: The rank.
        method: vLLM's name of the method.
        draft: config.json of the draft; ``None`` where its layers are the target's own.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
        vllm_classes.write_config(Path(folder), config)
        stated = {"method": method, "num_speculative_tokens": 1 if draft is None else 3}
        if draft is not None:
            vllm_classes.write_config(Path(beside), draft)
            stated["model"] = beside
        engine = vllm_classes.engine_config(folder, config, where, stated)
        model = vllm_classes.build_rank(engine, where, engine.speculative_config.draft_model_config)
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not any(end in name for end in ENDS)
    )
