"""What holds a rank's memory, out of the figures of its log.

vLLM: B0 = total - free; other persistent memory = consumed - weights (what is outside of torch, to 0.26); the transient
is the activation peak, less the estimate of the graphs that is in it from 0.27 on; the residual is what nothing claims.
SGLang: cache = free after weights - free after the cache; the residual is what is free when it is ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.observe.figures import Quantity, Reading, total

SGLANG_CACHES = ("swa_pool", "pool", "draft_pool", "state_conv", "state_ssm", "state_intermediate", "state_conv_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a measured ledger.

    Attributes:
        component: What holds the memory, in the words of a plan.
        quantity: How much; negative where the engine's own figures say so.
        source: Out of which figures.
    """

    component: str
    quantity: Quantity
    source: str


def entries(engine: str, figures: Mapping[str, Reading]) -> tuple[Entry, ...]:
    """Return the ledger of one rank, in report order; an entry whose figures are not all there is left out."""
    known = {name: reading.quantity for name, reading in figures.items() if reading.quantity is not None}
    rows = _ROWS[engine](known)
    return tuple(Entry(component=name, quantity=q, source=source) for name, q, source in rows if q is not None)


_Row = tuple[str, Quantity | None, str]


def _less(whole: Quantity | None, *parts: Quantity | None) -> Quantity | None:
    """Return the whole without its parts; nothing if one is not known."""
    result = whole
    for part in parts:
        result = None if result is None or part is None else result - part
    return result


def _first(known: Mapping[str, Quantity], *names: str) -> tuple[Quantity | None, str]:
    """Return the first figure that is there, and its name."""
    return next(((known[name], name) for name in names if name in known), (None, ""))


def _vllm(known: Mapping[str, Quantity]) -> list[_Row]:
    consumed, peak = known.get("consumed"), known.get("activation_peak")
    weights, weights_of = _first(known, "weights", "weights_summary", "weights_held")
    graphs, graphs_of = _first(known, "graphs", "graphs_estimated")
    cache, cache_of = _first(known, "kv_in_use", "kv_reserved", "kv_budget")
    if consumed is None:
        other, other_of = known.get("non_torch"), "non_torch"
        persistent = None if weights is None or other is None else weights + other
        transient, transient_of = peak, "activation_peak"
    else:
        other, other_of, persistent = _less(consumed, weights), "consumed - weights", consumed
        estimate = known.get("graphs_estimated")
        transient = peak if estimate is None else _less(peak, estimate)
        transient_of = "activation_peak - graphs_estimated"
        if estimate is None:
            transient_of = "activation_peak, in which an estimate of the graphs is held"
    residual = _less(known.get("total"), known.get("baseline"), persistent, transient, graphs, cache)
    return [
        ("runtime.baseline", known.get("baseline"), "total - free"),
        ("weights", weights, weights_of),
        ("runtime.persistent", other, other_of),
        ("workspace.activation", transient, transient_of),
        ("graphs", graphs, graphs_of),
        ("cache", cache, cache_of),
        ("residual", residual, "total - all of the above"),
    ]


def _sglang(known: Mapping[str, Quantity]) -> list[_Row]:
    weights, draft = known.get("weights"), known.get("draft_weights")
    graphs = total(known[name] for name in ("graphs", "draft_graphs") if name in known)
    cache = _less(known.get("after_weights"), known.get("pool_end"))
    parts = [(name, known[name]) for name in SGLANG_CACHES if name in known]
    pools = total(part for _, part in parts)
    if cache is None:
        cache, cache_of = pools, "all pools"
    else:
        cache_of = "after_weights - pool_end"
    held = total(q for q in (weights, draft, cache, graphs) if q is not None)
    return [
        ("runtime.init", known.get("init"), "init"),
        ("weights", weights, "weights"),
        ("draft.weights", draft, "draft_weights"),
        ("cache", cache, cache_of),
        *((f"cache.{name}", part, name) for name, part in parts),
        ("graphs", graphs, "graphs + draft_graphs"),
        (
            "runtime.persistent",
            _less(known.get("before_weights"), held, known.get("available")),
            "before_weights - rest",
        ),
        ("residual", known.get("available"), "available"),
    ]


def _exllamav3(known: Mapping[str, Quantity]) -> list[_Row]:
    return [
        ("workspace.transient", known.get("transient"), "transient"),
        ("residual", known.get("free_after_load"), "free_after_load"),
    ]


_ROWS = {"vllm": _vllm, "sglang": _sglang, "exllamav3": _exllamav3}
