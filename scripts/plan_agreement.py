"""Plan every collected log as a user would and write ``docs/plan-agreement.md``.

The other scripts hold a part each against the logs; here it is the whole plan, by :func:`tonnage.plan_checkpoint`:
weights as the engine logs them, everything beside the cache, the tokens of the cache, and what the engine refused.

Run: python scripts/plan_agreement.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import kv_agreement
import msgspec

from tonnage import PlanRequest, plan_checkpoint
from tonnage.api import Checkpoint, checkpoint_from_config, open_checkpoint
from tonnage.errors import UnknownGpuError
from tonnage.fit import Fit, fit_checkpoint
from tonnage.memory.runtime_rules import vllm_limits
from tonnage.memory.supply import Gpu, Supply, find_gpu, parse_supply
from tonnage.plan import RankLedger
from tonnage.profile import Profile
from tonnage.term_evidence import LogRow, consumed_gib
from tonnage.units import GIB, gib

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
REPORT = ROOT / "docs" / "plan-agreement.md"
LOGGED_AS_WEIGHTS = ("weights.", "padding.", "engine.")
ROOMY = "4096GiB"
"""A supply that refuses nothing but the cache."""
OLD_RELEASE = "0.20"
"""For logs that count blocks, as releases up to this one do, and do not say which they are."""
NOT_HERE = {
    "llama-3.1-8b-instruct-vllm-tp1-021": "--dtype float32: planned in a 16-bit dtype",
}
PREFACE = """\
# Agreement of whole plans with logs

Every log of `tests/data/logs_{weights,runtime,kv}.json` is planned as a user would: engine and release, sizes, GPU by
its name where the table has it, the limits the log states. Written by `scripts/plan_agreement.py`; a test holds it
true.

* weights: the lines `weights.`, `padding.` and `engine.` of the rank that holds most
* beside the cache: weights, buffers, graphs and activations of the first rank, which logs first; without
  `runtime.context`, which vLLM does not count (its first engine does); graphs where the log prints them
* cache by utilization: what `--utilization` leaves for the cache; least is with every line at its bound
* tokens: with the logged bytes given to the cache (`--kv-bytes`); rounded to 0.01 GiB in the log
* refusals: the same, and `tonnage fit` for the longest context

Rows without a known config, and those other reports set aside, are left out here for the same reasons:
`docs/weights-agreement.md`, `docs/runtime-agreement.md`, `docs/kv-agreement.md`. Rows were seen while the rules were
written, but for five of the weights; splits are reported there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A logged size and the plan's: bytes."""

    row: Mapping[str, Any]
    logged: int
    expected: int
    bound: int

    @property
    def is_unsafe(self) -> bool:
        """Whether the bound is on the wrong side: below what is held, or above what is left for the cache."""
        return self.bound > self.logged if self.bound < self.expected else self.bound < self.logged

    @property
    def error_permille(self) -> int:
        """Expected over logged, less one, in thousandths."""
        return round((self.expected - self.logged) * 1000 / self.logged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Logged tokens of the cache and the plan's."""

    row: Mapping[str, Any]
    logged: int
    planned: int

    @property
    def error_permille(self) -> int:
        """Planned over logged, less one, in thousandths, away from zero."""
        more = (self.planned - self.logged) * 1000
        return -(-more // self.logged) if more > 0 else -(more // -self.logged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A launch the engine refused, and what the plan says of it."""

    row: Mapping[str, Any]
    fit: Fit


# --- requests --------------------------------------------------------------------------------------------------------


def _json(name: str) -> dict[str, Any]:
    return dict(json.loads((DATA / f"logs_{name}.json").read_text()))


def gpu_of(name: str | None) -> Gpu | None:
    """Return the GPU of the table that a log names, without its number (``(8x)``)."""
    try:
        return find_gpu(re.sub(r" \(\d+x\)", "", name)) if name else None
    except UnknownGpuError:
        return None


def weighed() -> Iterator[tuple[Mapping[str, Any], Checkpoint, PlanRequest]]:
    """Yield the rows whose weights are known, with what the same log says of limits and memory."""
    logs, limits = _json("weights"), {row["id"]: row for row in _json("runtime")["rows"]}
    for facts in logs["rows"]:
        row = {**limits.get(facts["id"], {}), **facts}
        config = logs["configs"].get(row["config"])
        path = DATA / "configs" / f"{row['config']}.json"
        fields = {**(config or json.loads(path.read_text())), **row["changes"]}
        yield row, checkpoint_from_config(fields, name=row["model"]), _weighed_request(row)


def _weighed_request(row: Mapping[str, Any]) -> PlanRequest:
    total = row.get("gpu_mem_gib")
    return PlanRequest(
        engine=row["engine"],
        version=row["version"] or row.get("engine_version"),
        tp=row["tp"],
        pp=row["pp"],
        ep=row.get("ep") or 1,
        gpu=gpu_of(row["gpu"]),
        supply=parse_supply(f"{total}GiB") if total else None,
        context_held=False,
        eager="eager" in (row.get("notes") or ""),
        profile=Profile(
            concurrency=row.get("max_num_seqs"),
            prefill_chunk_tokens=row.get("max_num_batched_tokens"),
            context_tokens=row.get("max_model_len") or row["context_tokens"] or 8192,
        ),
    )


def _cache_request(row: Mapping[str, Any]) -> PlanRequest:
    """Return a launch of which the bytes of the cache are known; of a draft elsewhere only its tokens are."""
    own = "MTP" in row.get("draft", "") and not row["draft"].startswith("Gemma") and "gemma" not in row["id"]
    version = OLD_RELEASE if row.get("counts") == "blocks" and not row.get("version") else row.get("version")
    return PlanRequest(
        engine="vllm",
        version=version,
        tp=row["tp"],
        pp=row["pp"],
        dcp=row["dcp"],
        supply=parse_supply(f"{row['gpu_gib']}GiB"),
        context_held=False,
        kv_bytes=round(row["kv_gib"] * GIB),
        draft_method="mtp" if own and row["draft_tokens"] else None,
        draft_bytes=GIB if row["draft_tokens"] and not own else 0,
        draft_tokens=row["draft_tokens"] or None,
        profile=Profile(
            prefill_chunk_tokens=row.get("max_batched_tokens"),
            context_tokens=row.get("context_tokens"),
            kv_dtype=row["kv_dtype"],
        ),
    )


def cache_checkpoint(row: Mapping[str, Any]) -> Checkpoint:
    """Return the model of a row."""
    if isinstance(row["config"], str):
        return open_checkpoint(DATA / "configs" / f"{row['config']}.json")
    return checkpoint_from_config(row["config"], name=row["model"])


# --- comparisons -----------------------------------------------------------------------------------------------------


@cache
def weights() -> list[Size]:
    """Return every row with logged weights."""
    found = []
    for row, checkpoint, request in weighed():
        ledger = max(plan_checkpoint(checkpoint, request).ranks, key=lambda one: one.weights_bytes)
        bound = sum(line.bound_nbytes for line in ledger.lines if line.component.startswith(LOGGED_AS_WEIGHTS))
        logged = int(Decimal(row["weights_gib"]) * GIB)
        found.append(Size(row=row, logged=logged, expected=ledger.weights_bytes, bound=bound))
    return found


@cache
def totals() -> list[Size]:
    """Return every row whose log prints all of what is held beside the cache."""
    found = []
    for row, checkpoint, request in weighed():
        logged = logged_total(row)
        if logged is not None:
            first_engine = (row["version"] or "").startswith("V0")
            without = set() if first_engine else {"runtime.context"}
            if row.get("graph_gib") is None and "consumed" not in (row.get("notes") or ""):
                without.add("runtime.graphs")
            ledger = plan_checkpoint(checkpoint, request).ranks[0]
            left = replace(ledger, lines=tuple(line for line in ledger.lines if line.component not in without))
            found.append(_total(row, logged, left))
    return found


def _total(row: Mapping[str, Any], logged: int, ledger: RankLedger) -> Size:
    return Size(row=row, logged=logged, expected=ledger.expected_bytes, bound=ledger.fixed_bytes)


@cache
def budgets() -> list[Size]:
    """Return every row that says its share of the GPU, with what the plan has left for the cache: least as bound."""
    spare = {row["id"]: row for row in _json("runtime")["budget"]}
    found = []
    for facts, checkpoint, request in weighed():
        row = {**spare.get(facts["id"], {}), **facts}
        share, total, left = row.get("gpu_memory_utilization"), row.get("gpu_mem_gib"), row.get("kv_available_gib")
        if row["engine"] == "vllm" and share and total and left:
            whole = int(Fraction(str(total)) * GIB)
            asked = ceil(whole * Fraction(str(share)))
            supply = Supply(nbytes=asked, basis="exact", source=f"utilization {share}", whole_bytes=whole)
            plan = plan_checkpoint(checkpoint, replace(request, supply=supply))
            expected, least = (
                min(plan.cache_budget(one, expected=how) or 0 for one in plan.ranks) for how in (True, False)
            )
            found.append(Size(row=row, logged=int(Decimal(str(left)) * GIB), expected=expected, bound=least))
    return found


def logged_total(row: Mapping[str, Any]) -> int | None:
    """Return weights, activations, other memory and graphs as a vLLM log prints them; bytes."""
    if row["engine"] != "vllm" or row.get("activation_gib") is None:
        return None
    printed = {name: value for name, value in row.items() if name != "config"}
    log = msgspec.json.decode(json.dumps(printed), type=LogRow)
    consumed, peak, other = consumed_gib(log), log.activation_gib, log.non_torch_gib
    assert peak is not None
    if other is not None and log.weights_gib_per_gpu is not None:
        return int((log.weights_gib_per_gpu + peak + other + (log.graph_gib or 0)) * GIB)
    return None if consumed is None else int((consumed + peak) * GIB)


def compared_caches() -> Iterator[Mapping[str, Any]]:
    """Yield the rows with bytes of a cache that ``docs/kv-agreement.md`` does not set aside."""
    for answer in kv_agreement.answers():
        if not answer.aside and answer.row["id"] not in NOT_HERE:
            yield answer.row


@cache
def tokens() -> list[Count]:
    """Return every row with bytes and tokens of the cache."""
    found = []
    for row in compared_caches():
        if row.get("kv_tokens"):
            planned = plan_checkpoint(cache_checkpoint(row), _cache_request(row)).capacity_tokens()
            found.append(Count(row=row, logged=row["kv_tokens"], planned=planned or 0))
    return found


@cache
def refusals() -> list[Refusal]:
    """Return every launch that was refused for want of cache."""
    return [
        Refusal(row=row, fit=fit_checkpoint(cache_checkpoint(row), _refused_request(row)))
        for row in compared_caches()
        if kv_agreement.was_refused(row)
    ]


def _refused_request(row: Mapping[str, Any]) -> PlanRequest:
    """Return one request of the context that was refused, on a GPU on which nothing but the cache is short."""
    request = _cache_request(row)
    chunk = row.get("max_batched_tokens") or vllm_limits(row["gpu_gib"] * GIB, None)[0]
    profile = replace(request.profile, concurrency=1, prefill_chunk_tokens=chunk)
    return replace(request, supply=parse_supply(ROOMY), profile=profile)


# --- report ----------------------------------------------------------------------------------------------------------


def report() -> str:
    """Return the Markdown report."""
    sized, total, shares, counted, refused = weights(), totals(), budgets(), tokens(), refusals()
    exact = [count for count in counted if count.row["exact"]]
    lines = [
        PREFACE,
        "| what | rows | within | largest miss | bound on the wrong side |",
        "| --- | ---: | --- | ---: | ---: |",
        f"| weights | {_sizes(sized, 10)} |",
        f"| beside the cache | {_sizes(total, 100)} |",
        f"| cache by utilization | {_sizes(shares, 10)} |",
        f"| tokens, exact model id | {_counts(exact)} |",
        f"| tokens, all | {_counts(counted)} |",
        f"| refusals | {len(refused)} | {_refused(refused)} | | |",
        "",
        "## Tokens outside 1 %",
        "",
        "| log | exact id | printed | planned | excess | reason |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        *(_outside(count) for count in counted if abs(count.error_permille) > 10),
        "",
        "## Refusals",
        "",
        "| log | exact id | needed GiB | planned | longest | planned | remark |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        *map(_refusal, refused),
        "",
        "## Beside the cache",
        "",
        "| log | engine | GPU | tp | logged GiB | expected | bound |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        *map(_size, total),
        "",
        "## Weights",
        "",
        "| log | engine | GPU | tp | logged GiB | expected | bound |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        *map(_size, sized),
        "",
        "## Cache by utilization",
        "",
        "| log | engine | GPU | tp | logged GiB | expected | least |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        *map(_size, shares),
    ]
    return "\n".join(lines) + "\n"


def _sizes(sizes: list[Size], permille: int) -> str:
    errors = [abs(size.error_permille) for size in sizes]
    within, under = sum(error <= permille for error in errors), sum(size.is_unsafe for size in sizes)
    middle = f"{permille // 10} % on {within}, median {_percent(round(median(errors)))}"
    return f"{len(sizes)} | {middle} | {_percent(max(errors))} | {under}"


def _counts(counts: list[Count]) -> str:
    within = sum(abs(count.error_permille) <= 10 for count in counts)
    over = sum(count.error_permille > 10 for count in counts)
    largest = max(abs(count.error_permille) for count in counts)
    return f"{len(counts)} | 1 % on {within}, over by more on {over} | {_percent(largest)} | "


def _refused(refused: list[Refusal]) -> str:
    agreed = sum(one.fit.plan.fits is False for one in refused)
    stated = [one for one in refused if one.row.get("longest_tokens")]
    return f"{agreed} refused; longest context within 2 % on {sum(map(is_close, stated))} of {len(stated)}"


def is_close(one: Refusal) -> bool:
    """Whether the longest context is within 2 % of the engine's."""
    longest = one.row["longest_tokens"]
    return abs(one.fit.longest_context - longest) * 50 <= longest


def _outside(count: Count) -> str:
    why = kv_agreement.REASONS.get(count.row["id"], "")
    sizes = f"{count.logged:,} | {count.planned:,} | {_percent(count.error_permille, sign=True)}"
    return f"| `{count.row['id']}` | {_exact(count.row)} | {sizes} | {why} |"


def _refusal(one: Refusal) -> str:
    row, needed = one.row, max(ledger.cache_bytes for ledger in one.fit.plan.ranks)
    longest = f"{row['longest_tokens']:,}" if row.get("longest_tokens") else "not printed"
    why = kv_agreement.REASONS.get(row["id"], "")
    sizes = f"{row.get('needed_gib', 'not printed')} | {_gib(needed)} | {longest} | {one.fit.longest_context:,}"
    return f"| `{row['id']}` | {_exact(row)} | {sizes} | {why} |"


def _size(size: Size) -> str:
    row, bound = size.row, round((size.bound - size.logged) * 1000 / size.logged)
    what = f"{row['engine']} {row['version'] or ''} | {row['gpu'] or 'not stated'} | {row['tp']}"
    errors = f"{_percent(size.error_permille, sign=True)} | {_percent(bound, sign=True)}"
    return f"| {row['id']} | {what} | {_gib(size.logged)} | {errors} |"


def _exact(row: Mapping[str, Any]) -> str:
    return "yes" if row["exact"] else ""


def _percent(permille: int, *, sign: bool = False) -> str:
    return f"{permille / 10:+.1f} %" if sign else f"{permille / 10:.1f} %"


def _gib(nbytes: int) -> str:
    return gib(nbytes, digits=2)


def main() -> int:
    """Write the report, or with ``--check`` say whether it is up to date."""
    text = report()
    if "--check" in sys.argv[1:]:
        return 0 if REPORT.exists() and REPORT.read_text() == text else 1
    REPORT.write_text(text)
    print(text.partition("## Tokens")[0], end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
