"""Buffers for the tokens of a step that vLLM's classes make with the model: its log counts them as weights.

They are no parameters, no checkpoint has them, and they grow with the tokens of a step (``--max-num-batched-tokens``).
Those of DeepSeek-V4's compressed records are made after loading, so that the log does not count them: they are here for
who says how long a context may be.

Source:
    vLLM 0.32.0 ``models/qwen3_vl.py`` (deepstack_input_embeds), ``models/gemma4_mm.py`` (per_layer_embeddings),
    ``models/deepseek_v2.py``, ``models/deepseek_v4`` and ``models/minimax_m3`` (topk_indices_buffer);
    ``models/deepseek_v4/sparse_mla.py`` (c128a_global_decode_buffer, c128a_prefill_buffer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.logged.rotary import inner_object, number, text_fields
from tonnage.memory.term import Term
from tonnage.recipes.modules import TOWER_ROLES
from tonnage.units import round_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.placement import Placement

COMPONENT = "engine.step_buffers"
ACTIVATION_BYTES = 2
INDEX_BYTES = 4
TOKENS_ALIGNED = 4
"""Tokens are rounded up to so many where indices are kept by head."""
RECORD_TOKENS, RECORDS_ALIGNED = 128, 128
"""Tokens of a record of which every one is listed for every token of a step, and what they are rounded up to."""


def step_buffers(placement: Placement, *, pp_rank: int, step_tokens: int, context_tokens: int = 0) -> Iterator[Term]:
    """Yield the line of one rank; none where the model's class makes no such buffer, or the engine is not vLLM.

    Args:
        placement: Of the model, or of a draft.
        pp_rank: Pipeline stage.
        step_tokens: Most tokens of a step.
        context_tokens: Longest context; 0 for what is made with the model alone.
    """
    if placement.engine.name != "vllm":
        return
    parts = [
        *_towers(placement, pp_rank, step_tokens),
        *_indices(placement, step_tokens),
        *_records(placement, step_tokens, context_tokens),
    ]
    nbytes = sum(part for part, _ in parts)
    if nbytes:
        rules = ", ".join(rule for _, rule in parts)
        source = f"{step_tokens} tokens of a step: {rules}"
        yield Term(component=COMPONENT, nbytes=nbytes, bound_nbytes=nbytes, basis="modelled", source=source)


def _towers(placement: Placement, pp_rank: int, tokens: int) -> Iterator[tuple[int, str]]:
    """Yield what a tower adds to layers of the language model, kept for every token."""
    here = [placed for placed in placement.placed if placed.entry.module.rule.role in TOWER_ROLES]
    if not any(placement.multiplicity(placed, pp_rank) for placed in here):
        return
    config = placement.assignment.blueprint.config
    text = text_fields(config)
    taps = inner_object(config.fields, "vision_config").get("deepstack_visual_indexes")
    hidden, layers = number(text, "hidden_size") or 0, number(text, "num_hidden_layers") or 0
    if isinstance(taps, list) and taps:
        yield len(taps) * tokens * hidden * ACTIVATION_BYTES, f"{len(taps)} x {hidden} of deepstack x 2 bytes"
    width = number(text, "hidden_size_per_layer_input")
    if width:
        yield layers * tokens * width * ACTIVATION_BYTES, f"{layers} x {width} of per-layer embeddings x 2 bytes"


def _indices(placement: Placement, tokens: int) -> Iterator[tuple[int, str]]:
    """Yield what sparse attention selects for every token, one buffer for all layers."""
    text = text_fields(placement.assignment.blueprint.config)
    selected = number(text, "index_topk")
    if selected:
        yield tokens * selected * INDEX_BYTES, f"{selected} selected x 4 bytes"
    sparse = inner_object(text, "sparse_attention_config")
    heads, blocks = number(sparse, "sparse_num_index_heads"), number(sparse, "sparse_topk_blocks")
    if heads and blocks:
        here = max(heads // placement.topology.tp, 1)
        yield (
            round_up(tokens, TOKENS_ALIGNED) * here * blocks * INDEX_BYTES,
            f"{here} heads x {blocks} blocks selected x 4 bytes",
        )


def _records(placement: Placement, tokens: int, context_tokens: int) -> Iterator[tuple[int, str]]:
    """Yield where the records of a whole context are, for every token: once for prefill, once for decoding."""
    ratios = text_fields(placement.assignment.blueprint.config).get("compress_ratios")
    if context_tokens and isinstance(ratios, list) and RECORD_TOKENS in ratios:
        records = round_up(-(-context_tokens // RECORD_TOKENS), RECORDS_ALIGNED)
        yield 2 * tokens * records * INDEX_BYTES, f"2 x {records} records of {RECORD_TOKENS} tokens x 4 bytes"
