"""A plan as one file for people: HTML that needs no network, with its pictures, its ledger and where it comes from.

Made from plan documents alone. Whatever they say is text: the template escapes it, the pictures do, and the content
security policy lets nothing run but the one script that sorts tables, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tonnage.report.bars import Bar, bars, kind_of, size_words
from tonnage.report.changes import changes, signed_size
from tonnage.report.growth import draw_growth, growth_of, growth_words
from tonnage.report.picture import PICTURE_STYLE, draw_ranks
from tonnage.report.saved import read_saved
from tonnage.saved_plan import SavedPlan, SavedRank, SavedRemark
from tonnage.units import unit_for

if TYPE_CHECKING:
    from jinja2 import Template

_WIDE, _NARROW = 992, 326
_SHARE = 120
"""Pixels the longest line of a ledger has."""
_NUMERICS = {
    "neutral": "No weight is changed: the planned bytes are those of the checkpoint.",
    "converted": "Preparation converts the modules below; all others keep the bytes of the checkpoint.",
    "unknown": "The conversion is not known tensor by tensor: only how much it saves.",
}


def report_html(document: Mapping[str, Any], against: Mapping[str, Any] | None = None) -> str:
    """Return a plan as one HTML file.

    Args:
        document: ``tonnage.plan/1``, as ``plan --json`` prints it.
        against: Another of them: what changed since it is shown as well.

    Raises:
        ObservationError: One of them is no plan, or contradicts itself.
        ModuleNotFoundError: jinja2 is not installed; it comes with ``tonnage[html]``.
    """
    before = None if against is None else read_saved(against, where="the plan to compare with")
    return plan_page(read_saved(document), before)


def plan_page(plan: SavedPlan, before: SavedPlan | None = None) -> str:
    """Return the same of plans that were read."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2, which only this needs

    style, script = PICTURE_STYLE + _file("report.css"), _file("report.js")
    own = f"style-src {_hashed(style)}; script-src {_hashed(script)}"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    pictures = {"wide": draw_ranks(plan, width=_WIDE), "narrow": draw_ranks(plan, width=_NARROW, prefix="narrow")}
    return _template().render(
        policy=policy,
        style=Markup(style),  # noqa: S704 - both are files of this package
        script=Markup(script),  # noqa: S704 - same
        pictures={name: Markup(text) for name, text in pictures.items()},  # noqa: S704 - drawn here, their text escaped
        growth=_growth(plan),
        title=f"{plan.checkpoint.name}: {_verdict(plan)['word'].lower()}",
        version=plan.tonnage_version,
        plan=plan,
        before=before,
        changes=changes(before, plan) if before else None,
        verdict=_verdict(plan),
        tags=tuple(_tags(plan)),
        figures=tuple(_figures(plan)),
        groups=[_group(plan, bar) for bar in bars(plan)],
        unplanned=tuple(_unplanned(plan)),
        remarks=_remarks(plan),
        numerics={"words": _NUMERICS.get(plan.numerics.kind, plan.numerics.kind)},
        provenance=tuple(_provenance(plan)),
        calibrations=tuple(_calibrations(plan)),
        size=size_words,
        signed=signed_size,
    )


def _file(name: str) -> str:
    return resources.files("tonnage.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - of the extra

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_file("report.html"))


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _verdict(plan: SavedPlan) -> dict[str, str]:
    """Return the verdict in words."""
    binding = plan.binding
    needs = size_words(plan.needed_bytes(binding))
    fullest = f"Rank {binding.rank}, the fullest," if len(plan.ranks) > 1 else "It"
    if plan.fits is None:
        sentence = f"Nobody said what a GPU supplies. {fullest} needs {needs} at most."
        return {"state": "none", "sign": "?", "word": "No verdict", "sentence": sentence}
    if plan.supply_bytes is None or binding.spare_bytes is None:
        sentence = f"{fullest} needs {needs} at most."
    elif binding.spare_bytes < 0:
        has, short = size_words(plan.supply_bytes), size_words(-binding.spare_bytes)
        sentence = f"{fullest} needs {needs} at most. One GPU supplies {has}: that is {short} too little."
    else:
        held = "Every rank holds it. " if plan.fits else ""
        leaves = f"of {size_words(plan.supply_bytes)} at most and leaves {size_words(binding.spare_bytes)}"
        sentence = f"{held}{fullest} needs {needs} {leaves}."
    if plan.fits:
        return {"state": "good", "sign": "✓", "word": "Fits", "sentence": sentence}
    return {"state": "bad", "sign": "✕", "word": "Refused", "sentence": sentence}


def _tags(plan: SavedPlan) -> Iterator[str]:
    yield from (plan.checkpoint.family, plan.topology.words, plan.engine, f"{plan.estimator} estimate")
    if plan.profile.name:
        yield plan.profile.name
    if plan.cache.context_tokens:
        yield f"{plan.cache.context_tokens:,} tokens of context"
    if plan.profile.kv_dtype:
        yield f"KV {plan.profile.kv_dtype}"
    if plan.numerics.kind == "converted":
        yield "converted"


def _figures(plan: SavedPlan) -> Iterator[dict[str, str]]:
    """Yield the figures people look for first."""
    rank = plan.binding
    needed = plan.needed_bytes(rank)
    yield _figure("Needs at most", needed)
    yield _figure("Expected", needed - rank.fixed_bytes + rank.expected_bytes)
    if plan.supply_bytes is not None:
        yield _figure("One GPU supplies", plan.supply_bytes)
    if rank.spare_bytes is not None:
        yield _figure("Spare" if rank.spare_bytes >= 0 else "Short by", abs(rank.spare_bytes))
    yield _figure("Weights of a rank", rank.weights_bytes)
    tokens = plan.cache.capacity_tokens
    if tokens is not None:
        expected = plan.cache.expected_capacity_tokens
        exact = f"expected {expected:,}" if expected is not None else ""
        yield {"name": "Cache has room for", "number": f"{tokens:,}", "unit": "tokens", "exact": exact}
    elif rank.cache_bytes:
        yield _figure("Cache", rank.cache_bytes)


def _figure(name: str, nbytes: int) -> dict[str, str]:
    unit, text = unit_for(nbytes)
    return {"name": name, "number": text(nbytes), "unit": unit, "exact": f"{nbytes:,} bytes"}


def _group(plan: SavedPlan, bar: Bar) -> dict[str, Any]:
    """Return the ledger of ranks that hold the same: its rows, and its totals."""
    rank = plan.ranks[bar.ranks[0]]
    unit, _ = unit_for(rank.fixed_bytes)
    _, text = unit_for(rank.fixed_bytes)
    longest = max((line.bound_nbytes for line in rank.lines), default=0) or 1
    rows = [
        {
            "component": line.component,
            "kind": kind_of(line),
            "transient": line.transient,
            "nbytes": line.nbytes,
            "size": f"{text(line.nbytes)} {unit}",
            "bound": line.bound_nbytes,
            "bound_size": f"{text(line.bound_nbytes)} {unit}",
            "share": line.nbytes * _SHARE // longest,
            "bound_share": line.bound_nbytes * _SHARE // longest,
            "basis": line.basis,
            "source": line.source,
        }
        for line in rank.lines
    ]
    return {"name": bar.name, "needed": bar.needed_bytes, "rows": rows, "totals": list(_totals(plan, rank))}


def _totals(plan: SavedPlan, rank: SavedRank) -> Iterator[dict[str, Any]]:
    def total(
        name: str, nbytes: int, remark: str = "", *, expected: int | None = None, strong: bool = False
    ) -> dict[str, Any]:
        return {"name": name, "nbytes": nbytes, "expected": expected, "remark": remark, "strong": strong}

    cache, needed = plan.cache, plan.needed_bytes(rank)
    yield total("weights", rank.weights_bytes, "with padding and what the engine adds to them")
    yield total("all lines", rank.fixed_bytes, expected=rank.expected_bytes)
    if rank.cache_bytes or cache.given_bytes is not None:
        served = (
            f"{cache.concurrency:,} x {cache.context_tokens:,} tokens"
            if cache.concurrency and cache.context_tokens
            else ""
        )
        known = "; ".join(text for text in (served, cache.basis or "", cache.source or "") if text)
        yield total("cache of the profile", rank.cache_bytes, known)
    if cache.given_bytes is not None:
        yield total("cache given", cache.given_bytes, "--kv-bytes")
    yield total("needs", needed, expected=needed - rank.fixed_bytes + rank.expected_bytes, strong=True)
    if plan.supply_bytes is not None and rank.spare_bytes is not None:
        source = f"{plan.supply.basis}: {plan.supply.source}" if plan.supply else ""
        yield total("supply", plan.supply_bytes, source)
        spare = rank.spare_bytes
        yield total("spare" if spare >= 0 else "short by", abs(spare), strong=True)
    if rank.loading_bytes:
        yield total("most while loading", rank.loading_bytes, "before there is a cache")


def _unplanned(plan: SavedPlan) -> Iterator[str]:
    """Yield what no rank has a line of."""
    begins = {line.component.partition(".")[0] for rank in plan.ranks for line in rank.lines}
    if not any(plan.needed_bytes(rank) > rank.fixed_bytes for rank in plan.ranks) and plan.cache.concurrency is None:
        yield "KV cache and recurrent states"
    if "workspace" not in begins:
        yield "activations"
    if "runtime" not in begins:
        yield "libraries, communication buffers and CUDA graphs"
    if not any(line.component == "runtime.context" for rank in plan.ranks for line in rank.lines):
        yield "the context of the process, which the supply must be without"


def _remarks(plan: SavedPlan) -> list[tuple[str, list[SavedRemark]]]:
    kinds: dict[str, list[SavedRemark]] = {}
    for remark in plan.remarks:
        kinds.setdefault(remark.kind, []).append(remark)
    return list(kinds.items())


def _provenance(plan: SavedPlan) -> Iterator[tuple[str, str]]:
    yield "checkpoint", plan.checkpoint.name
    yield "digest (SHA-256)", plan.checkpoint.digest
    yield "family", plan.checkpoint.family
    yield "engine's rules", plan.engine
    yield "estimator", plan.estimator
    yield "ranks", f"{len(plan.ranks):,} ({plan.topology.words})"
    if plan.supply is not None and plan.supply_bytes is not None:
        yield "supply", f"{plan.supply_bytes:,} bytes, {plan.supply.basis}: {plan.supply.source}"
    if plan.options:
        yield "options", " ".join(plan.options)
    yield "planned by", f"tonnage {plan.tonnage_version}" if plan.tonnage_version else "a version not written down"
    yield "made from", plan.schema


def _calibrations(plan: SavedPlan) -> Iterator[tuple[str, str]]:
    """Yield the calibrated lines and their evidence, each once."""
    lines = (line for rank in plan.ranks for line in rank.lines if line.basis == "calibrated")
    yield from dict.fromkeys((line.component, line.source) for line in lines)


def _growth(plan: SavedPlan) -> dict[str, Any] | None:
    """Return how the cache grows: in words, drawn, and every point of it."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2

    growth = growth_of(plan)
    if growth is None:
        return None
    unit, text = unit_for(growth.nbytes[growth.planned])
    states = {True: "yes", False: "no", None: ""}
    rows = [
        {
            "concurrency": many,
            "cells": [
                {
                    "nbytes": growth.nbytes[many, tokens],
                    "size": text(growth.nbytes[many, tokens]),
                    "state": states[growth.fits(many, tokens)],
                    "planned": (many, tokens) == growth.planned,
                }
                for tokens in growth.contexts
            ],
        }
        for many in growth.concurrencies
    ]
    return {
        "words": growth_words(growth),
        "wide": Markup(draw_growth(growth, width=_WIDE, prefix="growth")),  # noqa: S704 - drawn here
        "narrow": Markup(draw_growth(growth, width=_NARROW, prefix="narrow-growth")),  # noqa: S704 - same
        "unit": unit,
        "rank": growth.rank,
        "judged": growth.room is not None,
        "contexts": growth.contexts,
        "rows": rows,
    }
