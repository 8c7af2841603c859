"""What a log says, beside a plan where there is one: as documents, and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tonnage.observe.compare import Comparison
from tonnage.observe.figures import FIGURES, Quantity, Reading
from tonnage.observe.io import Observed
from tonnage.observe.ledger import Entry
from tonnage.observe.reader import Figures, Observation, RankObservation
from tonnage.observe.record import Value, row
from tonnage.report.tables import add_row, new_table
from tonnage.saved_plan import SavedPlan
from tonnage.units import counted, gib
from tonnage.version import __version__

OBSERVE_SCHEMA = "tonnage.observe/1"
OBSERVATION_SCHEMA = "tonnage.observation/1"


def observe_document(observed: Observed, *, gpu: str | None = None) -> dict[str, Any]:
    """Return ``observe --json``."""
    plan = observed.plan
    return {
        "schema": OBSERVE_SCHEMA,
        **_facts(observed, gpu),
        "plan": None
        if plan is None
        else {
            "engine": plan.engine,
            "topology": {"tp": plan.topology.tp, "pp": plan.topology.pp},
            "cache": {
                "bytes_per_token_per_rank": plan.cache.bytes_per_token_per_rank,
                "capacity_tokens": plan.cache.capacity_tokens,
            },
        },
        "comparisons": [_comparison(one) for one in observed.comparisons],
        "exceeds": observed.exceeds,
        "notes": list(observed.observation.notes),
    }


def observation_record(
    observed: Observed, *, gpu: str | None, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what ``observe --save`` writes, which calibrations are fitted to.

    Args:
        observed: What the log says.
        gpu: Name of the GPU, which no log says.
        config: config.json of the model, where it is at hand: terms are fitted to its shape.
    """
    record = {
        "schema": OBSERVATION_SCHEMA,
        "tonnage_version": __version__,
        "id": f"log-{observed.log.sha256[:16]}",
        "source": "a log read by tonnage observe",
        **_facts(observed, gpu),
    }
    return record if config is None else {**record, "config": dict(config)}


def observation_table(observed: Observed) -> RenderableType:
    """Return the figures, the ledger of the tightest rank beside the plan, what was refused, and the verdict."""
    observation, comparisons, plan = observed.observation, observed.comparisons, observed.plan
    parts: list[RenderableType] = [Text(_title(observation), style="bold")]
    if observation.starts > 1:
        parts.append(Text(f"{observation.starts} starts in this log; the last one counts", style="dim"))
    parts += [*_settings(observation), _figures(observation)]
    tightest = _tightest(observation.ranks)
    if tightest is not None and tightest.ledger:
        parts.append(_ledger(tightest, comparisons))
    if plan is not None:
        parts += _capacity(observation, plan)
    parts += [Text(f"refused: {reason}", style="bold red") for reason in observation.refusals]
    parts += [Text(note, style="dim") for note in observation.notes]
    if plan is not None:
        parts.append(_verdict(observed))
    return Group(*parts)


def excesses(observed: Observed) -> tuple[str, ...]:
    """Return one line per measurement that exceeds its bound."""
    return tuple(
        f"rank {one.rank}: {one.what}: measured {gib(one.measured.nbytes)} GiB, bound {gib(one.bound_nbytes)} GiB"
        for one in observed.comparisons
        if one.exceeds
    )


def _facts(observed: Observed, gpu: str | None) -> dict[str, Any]:
    observation, log = observed.observation, observed.log
    return {
        **{name: _value(value) for name, value in row(observation, gpu=gpu).items()},
        "log": {"nbytes": log.nbytes, "sha256": log.sha256},
        "starts": observation.starts,
        "figures": _figure_values(observation.figures),
        "ranks": [
            {
                "rank": one.rank.label,
                "figures": _figure_values(one.figures),
                "ledger": [_entry(entry) for entry in one.ledger],
            }
            for one in observation.ranks
        ],
        "refusals": list(observation.refusals),
    }


def _value(value: Value) -> int | str | float | None:
    return float(value.text) if isinstance(value, Quantity) else value


def _figure_values(figures: Figures) -> dict[str, Any]:
    return {name: _figure_value(name, reading) for name, reading in figures.items()}


def _figure_value(name: str, reading: Reading) -> Any:
    quantity = reading.quantity
    if quantity is None:
        return reading.text
    kind = FIGURES[name].kind
    if kind == "bytes":
        return _bytes(quantity)
    return float(quantity.text) if kind == "number" else quantity.nbytes


def _bytes(quantity: Quantity) -> dict[str, Any]:
    return {"nbytes": quantity.nbytes, "rounding_nbytes": quantity.rounding_nbytes}


def _entry(entry: Entry) -> dict[str, Any]:
    return {"component": entry.component, **_bytes(entry.quantity), "source": entry.source}


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "component": one.what,
        **_bytes(one.measured),
        "planned_nbytes": one.planned_nbytes,
        "planned_bound_nbytes": one.bound_nbytes,
        "exceeds": one.exceeds,
    }


def _title(observation: Observation) -> str:
    facts = row(observation)
    names = [observation.engine, facts["engine_version"], facts["model_id"]]
    names += [f"{axis}{facts[axis]}" for axis in ("tp", "pp", "dp", "ep") if facts[axis] is not None]
    return " · ".join(str(name) for name in names if name)


def _settings(observation: Observation) -> list[RenderableType]:
    shown = {name: reading.text for name, reading in observation.settings.items() if name not in ("version", "model")}
    return [Text(" ".join(f"{name}={text}" for name, text in shown.items()), style="dim")] if shown else []


def _figures(observation: Observation) -> RenderableType:
    table = new_table("figure", "GiB", "bytes", "number", "ranks")
    for name, reading in observation.figures.items():
        quantity, spec = reading.quantity, FIGURES[name]
        if quantity is None:
            continue
        spread = _spread(name, observation.ranks)
        if spec.kind == "bytes":
            add_row(table, spec.title, gib(quantity.nbytes), f"{quantity.nbytes:,}", "", spread)
        else:
            shown = quantity.text if spec.kind == "number" else f"{quantity.nbytes:,}"
            add_row(table, spec.title, "", "", shown, spread)
    return table


def _spread(name: str, ranks: Sequence[RankObservation]) -> str:
    """Say between which values the ranks lie, where they differ."""
    quantities = [q for one in ranks if name in one.figures and (q := one.figures[name].quantity) is not None]
    values = sorted((quantity.nbytes, quantity.text) for quantity in quantities)
    if not values or values[0] == values[-1]:
        return ""
    (smallest, low), (largest, high) = values[0], values[-1]
    if FIGURES[name].kind == "bytes":  # logs print some of them in GiB, some in bytes
        low, high = gib(smallest), f"{gib(largest)} GiB"
    return f"{len(values)} ranks, {low} to {high}"


def _tightest(ranks: Sequence[RankObservation]) -> RankObservation | None:
    """Return the rank with the least memory left; the first one where no log says so."""

    def left(one: RankObservation) -> tuple[bool, int]:
        rest = [entry.quantity.nbytes for entry in one.ledger if entry.component == "residual"]
        return not rest, rest[0] if rest else 0

    return min(ranks, key=left, default=None)


def _ledger(one: RankObservation, comparisons: Sequence[Comparison]) -> RenderableType:
    planned: Mapping[str, Comparison] = {c.what: c for c in comparisons if c.rank == one.rank.label}
    columns = ("bytes", "GiB", "plan GiB", "bound GiB") if planned else ("bytes", "GiB")
    table = new_table(f"rank {one.rank.label}", *columns, "from")
    for entry in one.ledger:
        cells = [entry.component, f"{entry.quantity.nbytes:,}", gib(entry.quantity.nbytes)]
        add_row(table, *cells, *_planned(planned, entry.component), entry.source)
    if "non-cache" in planned:
        whole = planned["non-cache"].measured.nbytes
        table.add_section()
        add_row(table, "non-cache", f"{whole:,}", gib(whole), *_planned(planned, "non-cache"), "all but the cache")
    return table


def _planned(planned: Mapping[str, Comparison], component: str) -> tuple[str, ...]:
    if not planned:
        return ()
    one = planned.get(component)
    return ("", "") if one is None else (gib(one.planned_nbytes), gib(one.bound_nbytes) + ("!" if one.exceeds else ""))


def _capacity(observation: Observation, plan: SavedPlan) -> list[RenderableType]:
    tokens = row(observation)["kv_tokens"]
    planned = plan.cache.capacity_tokens
    if not isinstance(tokens, int) or planned is None:
        return []
    return [Text(f"cache: {tokens:,} tokens measured, {planned:,} planned")]


def _verdict(observed: Observed) -> Text:
    over = excesses(observed)
    judged = [one for one in observed.comparisons if one.exceeds is not None]
    if over:
        return Text("CONTRADICTS THE PLAN: " + "\n".join(over), style="bold red")
    if not judged:
        return Text("nothing to judge: no figure of this log has lines in the plan")
    return Text(f"within every bound: {counted(len(judged), 'figure')} compared", style="bold green")
