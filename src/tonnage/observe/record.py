"""The row of an observation: one flat set of facts, named as calibrations take them.

Names are those of tables of public logs: ``weights_gib_per_gpu``, ``kv_available_gib`` and so on, each the worst of all
ranks, as printed. What the log does not say is ``None``.
"""

from __future__ import annotations

from tonnage.observe.figures import Quantity, Reading, total
from tonnage.observe.ledger import SGLANG_CACHES
from tonnage.observe.reader import Figures, Observation
from tonnage.units import GIB

Value = int | str | Quantity | None
"""Counts and tokens are integers; decimals stay exact."""


def row(observation: Observation, *, gpu: str | None = None) -> dict[str, Value]:
    """Return the row.

    Args:
        observation: What the log says.
        gpu: Name of the GPU, which no log says.
    """
    settings, figures = observation.settings, observation.figures
    sizes = {axis: _count(settings, axis) for axis in ("tp", "pp", "dp")}
    return {
        "engine": observation.engine,
        "engine_version": _text(settings, "version"),
        "model_id": _text(settings, "model"),
        "dtype_or_quant": _text(settings, "quantization") or _text(settings, "dtype"),
        **sizes,
        "ep": _expert_parallel(settings, sizes),
        "gpu": gpu,
        "gpu_mem_gib": _quantity(figures, "total", "refused_total"),
        "gpu_memory_utilization": _quantity(figures, "utilization", "refused_utilization")
        or _quantity(settings, "gpu_memory_utilization"),
        "max_model_len": _count(figures, "auto_fit_to")
        or _count(settings, "max_model_len")
        or _count(figures, "refused_length", "concurrency_tokens", "context_tokens"),
        "max_num_seqs": _count(settings, "max_num_seqs") or _count(figures, "max_running"),
        "max_num_batched_tokens": _count(settings, "max_num_batched_tokens") or _count(figures, "prefill_chunk_tokens"),
        "kv_cache_dtype": _text(settings, "kv_cache_dtype"),
        "block_size": _count(figures, "attention_block_tokens") or _count(settings, "block_size"),
        "draft": _text(settings, "draft"),
        "weights_gib_per_gpu": _quantity(figures, "weights", "weights_summary"),
        "weights_bytes_per_rank": _count(figures, "weights_held"),
        "draft_weights_gib_per_gpu": _quantity(figures, "draft_weights"),
        "kv_available_gib": _quantity(figures, "kv_available", "kv_budget", "kv_reserved")
        or _pools(figures)
        or _in_gib(_quantity(figures, "kv_in_use")),
        "kv_tokens": _count(figures, "kv_tokens", "cache_size_tokens"),
        "max_concurrency": _quantity(figures, "max_concurrency"),
        "graph_gib": total(q for name in ("graphs", "draft_graphs") if (q := _quantity(figures, name)) is not None),
        "activation_gib": _quantity(figures, "activation_peak"),
        "non_torch_gib": _quantity(figures, "non_torch"),
        "consumed_gib": _quantity(figures, "consumed"),
        "graph_estimate_gib": _quantity(figures, "graphs_estimated"),
        "baseline_gib": _quantity(figures, "baseline", "init"),
        "kv_needed_gib": _quantity(figures, "kv_needed"),
        "kv_est_max_len": _count(figures, "kv_est_max_len"),
    }


def _text(figures: Figures, name: str) -> str | None:
    return figures[name].text if name in figures else None


def _quantity(figures: Figures, *names: str) -> Quantity | None:
    """Return the first of some figures that is there."""
    found: list[Reading] = [figures[name] for name in names if name in figures]
    return found[0].quantity if found else None


def _count(figures: Figures, *names: str) -> int | None:
    """Return the first of some counts; what an engine prints for "not set", -1, is none."""
    quantity = _quantity(figures, *names)
    return quantity.nbytes if quantity is not None and quantity.nbytes > 0 else None


def _expert_parallel(settings: Figures, sizes: dict[str, int | None]) -> int | None:
    """Return over how many ranks experts are cut: vLLM says only that they are, over tp x dp ranks."""
    said = _text(settings, "ep")
    if said is None:
        return None
    if said.isascii() and said.isdecimal():
        return int(said)
    return (sizes["tp"] or 1) * (sizes["dp"] or 1) if said == "True" else None


def _in_gib(quantity: Quantity | None) -> Quantity | None:
    """Return a figure that was printed as GiB, not one that was printed as bytes."""
    return quantity if quantity is not None and quantity.unit == GIB else None


def _pools(figures: Figures) -> Quantity | None:
    return total(q for name in SGLANG_CACHES if (q := _quantity(figures, name)) is not None)
