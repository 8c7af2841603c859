"""Hold the planned ranks of Kimi-K3.1-Pro EXL3-2bit against the measured ones and write ``docs/k31-ranks.md``.

The measurement (tests/data/seed_case.json) gives two totals, largest and smallest rank, of 12 identical exports made by
another preparer; it does not say which tensor class holds what. The report says what this plan holds class by class,
how far the totals are apart, and which classes could carry the difference. The capacity published with the package says
what its ranks hold beside weights and cache: the evidence of ``calibrations/terms/split.json``, written here too.

Run: python scripts/k31_ranks.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tonnage import PlanRequest, open_checkpoint, plan_checkpoint
from tonnage.api import Checkpoint, place_checkpoint, read_config
from tonnage.calibrations.term_records import shipped_file, shipped_terms, write_terms
from tonnage.draft import Draft
from tonnage.fit_terms import fit_files
from tonnage.memory.cache_vllm import VllmCache
from tonnage.memory.supply import PRINTED_GIB_ERROR_BYTES, Supply, find_gpu, parse_supply
from tonnage.memory.term import Term
from tonnage.memory.terms import LogEvidence, TermFile, case_of
from tonnage.memory.workspace_shape import Deployment, Kind, gpu_class
from tonnage.plan import Plan, RankLedger
from tonnage.profile import Profile
from tonnage.serving import Service, rank_shapes, serve
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.term_evidence import Seen
from tonnage.units import gib, mib

ROOT = Path(__file__).resolve().parent.parent
SEED = ROOT / "tests" / "data" / "seed_case.json"
CONFIG = ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json"
REPORT = ROOT / "docs" / "k31-ranks.md"
TERMS = ROOT / "src" / "tonnage" / "calibrations" / "terms" / "split.json"
PACKAGE = "kimi-k3.1-pro-exl3-2bit-tp8"
CONCURRENCY, PREFILL_TOKENS, DRAFT_TOKENS, DCP = 4, 3072, 7, 8
"""As the package's profile is called: tp8 dcp8 c4 p3072 dflash2 k7."""
DRAFT_WINDOW = 1024
"""Tokens the layers of the published preview of a dflash2 draft look back."""

CAPACITY = """
## What the published capacity says

The card of the prepared package (TP 8, DCP {dcp}, C {concurrency}, P {prefill}, {drafted} tokens of dflash2,
{context:,} tokens of context) gives a shared KV capacity of {tokens:,} tokens. No source of its runtime is at hand;
the figure decides between layouts, because it is a whole number of blocks:

* A latent in FP8 takes 656 bytes, its index key 132. In one page they are {per_token} bytes per token, and the rule
  that makes a page hold the state of a layer (884,736 bytes with {drafted} draft tokens) gives blocks of {block:,}
  tokens, {span:,} over {dcp} ranks. {tokens:,} = {spans} x {span:,} exactly.
* With pages of their own for the keys, blocks have 1,408 or 1,536 tokens, and in BF16 768. Over {dcp} ranks the
  figure is no multiple of any of them.
* {groups} groups of up to {layers} layers share pages of {page:,} bytes. {concurrency} requests x {state_groups} groups
  of states x {slots} slots (one, {drafted} drafted, one of prefix caching) are {state_blocks} blocks; one block is
  never given out.
* No blocks are set aside for windows of the draft. The {window} that vLLM would take for windows of 1,024 tokens would
  leave {window_left} GiB for everything else, about what libraries alone take.

So the layout of the cache is *calibrated*, by one figure, and not read from a source. The same figure is the only
evidence of what such a runtime holds beside weights and cache:

| of rank 0 | bytes |
| --- | ---: |
| supply of a GPU, 94.010 GiB as reported | {supply:,} |
| weights of the largest rank, draft included, as measured | {weights:,} |
| pool of {blocks} blocks of {block_bytes:,} bytes | {pool:,} |
| **left for everything else** | {left:,} |
| predicted of it by the records of vLLM | {predicted:,} |

It counts what no further block fitted into (less than a block), and what the draft keeps beside its weights; that
the package ran with the supply of the seed case, and with all of it, is assumed. Only the sum is known, so only the
sum is calibrated (`calibrations/terms/split.json`, written by this script): the bounds of the terms together are
10 % above it. A single term is given more; the errors of several do not add up. Of a larger sum, the excess keeps the
bounds of its own terms.

The measured rank also bounds the draft: {least:,} bytes of it if the rest is held as planned, {most:,} if
everything this plan holds whole were cut. An even cut of the draft is {even:,}.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published package, taken apart.

    Attributes:
        seed: The seed case.
        cache: Its cache on one rank, as planned.
        terms: What a rank is predicted to hold beside weights and cache, by the records of vLLM alone.
        kind: Kind of model.
    """

    seed: dict[str, Any]
    cache: VllmCache
    terms: tuple[Term, ...]
    kind: Kind

    @property
    def capacity_tokens(self) -> int:
        """Tokens all requests may have together, as measured."""
        return int(self.seed["published_package"]["measured_shared_kv_capacity_tokens"])

    @property
    def span(self) -> int:
        """Tokens of one block, over the ranks that share them."""
        return self.cache.block_tokens * DCP

    @property
    def state_blocks(self) -> int:
        """Blocks of the states of all requests."""
        groups = sum(not group.grows for group in self.cache.groups)
        return CONCURRENCY * groups * self.cache.state_slots_per_request

    @property
    def pool_blocks(self) -> int:
        """Blocks of attention, of states, and the one never given out."""
        return self.capacity_tokens // self.span + self.state_blocks + 1

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool on one rank."""
        return self.cache.allocated_bytes(self.pool_blocks)

    @property
    def beside_bytes(self) -> int:
        """What weights and pool leave of the supply: everything else, and what no block fitted into."""
        return supply(self.seed).nbytes - self.seed["measured"]["largest_rank_bytes"] - self.pool_bytes

    @property
    def predicted_bytes(self) -> int:
        """What was predicted of it."""
        return sum(term.nbytes for term in self.terms)


@cache
def checkpoint() -> Checkpoint:
    """Return the full-size rehearsal checkpoint; its files are gone, its headers are in it."""
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / "kimi-k3.1-pro"
        write_rehearsal(read_config(CONFIG), directory, RehearsalOptions(experts="exl3-v1"))
        return open_checkpoint(directory)


def supply(seed: dict[str, Any]) -> Supply:
    """Return what a GPU of the seed case supplies."""
    return parse_supply(f"{seed['profile']['supply_gib_as_reported']}GiB")


def weights_request() -> PlanRequest:
    """Return the request of the weights alone, the draft cut evenly."""
    seed = json.loads(SEED.read_text())
    return PlanRequest(tp=seed["tp_size"], engine="split", draft_bytes=seed["draft_bytes"], convert="mxfp8")


def served_request() -> PlanRequest:
    """Return the request of the published profile."""
    seed = json.loads(SEED.read_text())
    return replace(
        weights_request(),
        dcp=DCP,
        supply=supply(seed),
        context_held=False,
        gpu=find_gpu("rtx-pro-6000"),
        profile=Profile(
            name=f"c{CONCURRENCY}-p{PREFILL_TOKENS}",
            concurrency=CONCURRENCY,
            prefill_chunk_tokens=PREFILL_TOKENS,
            context_tokens=seed["published_package"]["context_tokens"],
            kv_dtype="fp8",
        ),
        draft_method="dflash2",
        draft_tokens=DRAFT_TOKENS,
    )


def plans() -> tuple[Plan, Plan]:
    """Return the plan as stored and the plan converted, both with the draft cut evenly."""
    request = weights_request()
    return plan_checkpoint(checkpoint(), replace(request, convert="none")), plan_checkpoint(checkpoint(), request)


def published() -> Published:
    """Return the published package beside what vLLM's records say of it."""
    request = served_request()
    placement = place_checkpoint(checkpoint(), request)
    service = Service(
        profile=request.profile,
        gpu=request.gpu,
        draft=Draft(method="dflash2", tokens=DRAFT_TOKENS),
        context_held=False,
    )
    shapes = rank_shapes(placement, service)
    rank = serve(placement, service, shipped_terms("vllm"), shapes)[0]
    if not isinstance(rank.cache, VllmCache):
        raise TypeError("no cache of vLLM's kind")
    seed = json.loads(SEED.read_text())
    return Published(seed=seed, cache=rank.cache, terms=rank.terms, kind=shapes[0].model.kind)


def split_file(package: Published) -> TermFile:
    """Return the records of package runtimes, fitted to the published package."""
    request = served_request()
    deployment = Deployment(engine="split", gpu_class=gpu_class(find_gpu("rtx-pro-6000")), topology=request.topology)
    evidence = LogEvidence(
        term="total",
        id=PACKAGE,
        source="model card of the package; derived in docs/k31-ranks.md",
        measured_bytes=package.beside_bytes + PRINTED_GIB_ERROR_BYTES // 10,
        predicted_bytes=package.predicted_bytes,
    )
    seen = Seen(case=case_of("total", deployment, package.kind), evidence=evidence, model=PACKAGE)
    return fit_files([seen])["split"]


def report(stored: Plan, converted: Plan, package: Published, served: Plan) -> str:
    """Return the Markdown report."""
    return "\n".join([*_ranks(stored, converted), *_capacity(package, converted), *_served(package, served)]) + "\n"


def _ranks(stored: Plan, converted: Plan) -> list[str]:
    measured = json.loads(SEED.read_text())["measured"]
    ordered = sorted(converted.ranks, key=lambda ledger: ledger.fixed_bytes)
    smallest, largest = ordered[0], ordered[-1]
    lines = [
        "# Kimi-K3.1-Pro EXL3-2bit at TP 8: planned and measured ranks",
        "",
        "`tonnage plan DIR --tp 8 --engine split --convert mxfp8 --draft-bytes 5373504512` on the full-size rehearsal",
        "checkpoint, against the measured ranks of the seed case (12 identical exports of another preparer;",
        "`tests/data/seed_case.json`). Written by `scripts/k31_ranks.py`; a test holds it true.",
        "",
        "| class | stored BF16, rank 0 | planned, largest rank | planned, smallest rank |",
        "| --- | ---: | ---: | ---: |",
    ]
    before = {line.component: line.nbytes for line in stored.ranks[largest.rank].lines}
    least = {line.component: line.nbytes for line in smallest.lines}
    lines += [
        f"| {line.component} | {before[line.component]:,} | {line.nbytes:,} | {least[line.component]:,} |"
        for line in largest.lines
    ]
    spread = largest.fixed_bytes - smallest.fixed_bytes
    measured_spread = measured["largest_rank_bytes"] - measured["smallest_rank_bytes"]
    total = stored.ranks[largest.rank].fixed_bytes
    apart = [
        _difference(ledger, measured[f"{name}_rank_bytes"])
        for ledger, name in ((largest, "largest"), (smallest, "smallest"))
    ]
    lines += [
        f"| **sum** | {total:,} | {largest.fixed_bytes:,} | {smallest.fixed_bytes:,} |",
        f"| measured | | {measured['largest_rank_bytes']:,} | {measured['smallest_rank_bytes']:,} |",
        f"| **planned - measured** | | {apart[0]} | {apart[1]} |",
        "",
        f"The spread between largest and smallest rank: {spread:,} bytes planned, {measured_spread:,} measured. It is",
        "one vision head of `wqkv` in MXFP8 over 27 blocks: 12 heads over 8 ranks are 2, 2, 2, 2, 1, 1, 1, 1.",
        "",
        "What the plan holds whole and another preparer may cut bounds where the rest can lie:",
        "",
        "| held whole by this plan | bytes per rank | cut over 8 ranks it would save |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| {remark.role}: {remark.why} | {remark.nbytes:,} | {remark.nbytes * 7 // 8:,} |"
        for remark in converted.remarks
        if remark.kind == "whole on every rank" and remark.nbytes >= 1 << 20
    ]
    lines += [
        "",
        "The draft's own placement is unknown (its config is not published); its bytes are taken to be cut evenly.",
        "The plan is above every measured rank, as it has to be.",
    ]
    return lines


def _capacity(package: Published, converted: Plan) -> list[str]:
    """Say what the published capacity shows of the cache's layout and of everything else."""
    groups, block = package.cache.groups, package.cache.block_tokens
    page = groups[0].pages[0].page.nbytes
    window = CONCURRENCY * (-(-(DRAFT_WINDOW - 1 + 2 * PREFILL_TOKENS) // block) + 1)
    ledger = max(converted.ranks, key=lambda one: one.fixed_bytes)
    least = package.seed["measured"]["largest_rank_bytes"] - ledger.weights_bytes
    cut = sum(remark.nbytes * 7 // 8 for remark in converted.remarks if remark.kind == "whole on every rank")
    return CAPACITY.format(
        dcp=DCP, concurrency=CONCURRENCY, prefill=PREFILL_TOKENS, drafted=DRAFT_TOKENS, tokens=package.capacity_tokens,
        context=package.seed["published_package"]["context_tokens"], per_token=page // block, block=block,
        span=package.span, spans=package.capacity_tokens // package.span,
        groups=len(groups), state_groups=len(groups) - 1,
        layers=max(len(group.pages) for group in groups), page=page, slots=package.cache.state_slots_per_request,
        state_blocks=package.state_blocks, window=window, blocks=package.pool_blocks,
        window_left=gib(package.beside_bytes - window * package.cache.bytes_per_block, digits=2),
        block_bytes=package.cache.bytes_per_block, supply=supply(package.seed).nbytes, left=package.beside_bytes,
        weights=package.seed["measured"]["largest_rank_bytes"], pool=package.pool_bytes,
        predicted=package.predicted_bytes, least=least, most=least + cut, even=-(-package.seed["draft_bytes"] // 8),
    ).splitlines()  # fmt: skip


def _served(package: Published, served: Plan) -> list[str]:
    """Show the plan of the published profile."""
    ledger = served.ranks[served.binding_rank]
    spare, service = served.spare_bytes(ledger.rank), ledger.service
    capacity, expected = served.capacity_tokens(shared=True), served.capacity_tokens(expected=True, shared=True)
    if spare is None or service is None or capacity is None or expected is None:
        raise ValueError("a plan without a supply or a cache")
    weights, held, cache = f"{ledger.weights_bytes:,}", ledger.cache_bytes, service.cache_basis[0]
    request = f"{service.concurrency} x {service.context_tokens:,}"
    rows = [
        ("weights, as above", weights, weights, "exact"),
        *(
            (line.component, f"{line.nbytes:,}", f"{line.bound_nbytes:,}", line.basis)
            for line in ledger.lines
            if line.component.startswith(("runtime.", "workspace.", "draft."))
        ),
        ("**fixed**", f"{ledger.expected_bytes:,}", f"{ledger.fixed_bytes:,}", ""),
        (f"cache of {request} tokens", f"{held:,}", f"{held:,}", cache),
        ("spare", f"{spare + ledger.fixed_bytes - ledger.expected_bytes:,}", f"{spare:,}", ""),
        ("shared capacity in tokens", f"{expected:,}", f"{capacity:,}", ""),
        ("of the measured", *(_percent(tokens, package.capacity_tokens) for tokens in (expected, capacity)), ""),
    ]
    return [
        "",
        "## The plan of the published profile",
        "",
        f"| rank {ledger.rank} | expected | bound | basis |",
        "| --- | ---: | ---: | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "The plan stays under the measured capacity by its weights, which are above the measured ones (first table),",
        "and by the bound. It is consistent with the package its records come from; it predicts no other.",
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _difference(ledger: RankLedger, measured: int) -> str:
    difference = ledger.fixed_bytes - measured
    permille = 1000 * difference / measured
    return f"{difference:,} ({mib(difference, digits=1)} MiB, {permille:.2f} permille)"


def main() -> int:
    """Write the records and the report, and print the report."""
    package = published()
    TERMS.write_bytes(write_terms(split_file(package)))
    shipped_file.cache_clear()
    text = report(*plans(), package, plan_checkpoint(checkpoint(), served_request()))
    REPORT.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
