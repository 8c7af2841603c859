"""What vLLM's own classes allocate for a draft on one rank, beside its target: embedding and head left aside.

Those two are made with every draft and dropped where the target's take their place, so they are no part of the answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm.config.vllm as engine_config
import vllm_classes
import vllm_pretences
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
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
        engine = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=where.tp,
            pipeline_parallel_size=where.pp,
            enable_expert_parallel=where.ep,
            distributed_executor_backend="mp",
            enforce_eager=True,
            max_model_len=vllm_classes.MAX_MODEL_LEN,
            enable_prefix_caching=False,
            speculative_config=stated,
        ).create_engine_config()
        vllm_pretences.pretend_world(tp=where.tp, pp=where.pp, rank=where.rank)
        engine.parallel_config.rank = where.rank
        model_config = engine.speculative_config.draft_model_config
        with set_current_vllm_config(engine), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(vllm_config=engine, model_config=model_config)
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not any(end in name for end in ENDS)
    )
