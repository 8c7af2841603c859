"""The weights of a draft on one rank: its own, those it shares with the target, and copies an engine makes of them.

Source:
    vLLM 0.32.0 ``v1/worker/gpu/spec_decode/eagle/utils.py`` for what is shared, ``models/qwen3_dflash.py``
    _build_context_kv_buffers and ``models/kimi_k3/nvidia/dspark_mla.py`` context_kv_proj for the copies. SGLang 0.5.23
    shares embedding and head alike.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tonnage.draft import BLOCK_METHODS, PlacedDraft, embedding_of
from tonnage.engines.sglang import ABSORBED_BYTES, ABSORBED_MODULE
from tonnage.formats.dtypes import payload_bytes
from tonnage.memory.term import Term
from tonnage.recipes.drafts import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.memory.supply import Basis
    from tonnage.placement import Placed, Placement

CONTEXT_PROJECTIONS = (".k_proj", ".v_proj", ".kv_a_proj_with_mqa")
EMBEDDING, HEAD, CONTEXT = "draft.embedding", "draft.head", "draft.context_kv"


def draft_weights(placed: PlacedDraft, *, tp_rank: int) -> tuple[Term, ...]:
    """Return the weights of a draft on one of its ranks.

    A head, or an embedding, that is not stored is the target's. An embedding of the target's shape is taken for a copy
    of it, which engines drop when it is equal value by value: expected to take nothing, at most itself. MTP layers that
    store both use the target's.
    """
    placement = placed.placement
    if placement is None:
        return ()
    source = f"recipe {placement.assignment.blueprint.recipe.family}, placed like the target"
    if placed.draft.method == WHOLE_MODEL:
        return (exact_term("draft.weights", placement.rank_bytes(0, tp_rank), source),)
    sums: dict[str, int] = defaultdict(int)
    for entry in placement.placed:
        sums[_part(entry)] += placement.multiplicity(entry, 0) * entry.shares[tp_rank].held_bytes
    for extra in placement.extras:
        sums["draft.weights"] += (len(extra.first) or 1) * extra.nbytes[tp_rank]
    sums["draft.weights"] += _mask_embedding(placed, placement, tp_rank)
    terms = [
        exact_term("draft.weights", sums["draft.weights"], source),
        *_embedding(placed, placement, sums[EMBEDDING]),
    ]
    if sums[HEAD] and placed.draft.method != "mtp":
        terms.append(exact_term(HEAD, sums[HEAD], "a head of its own"))
    return (*terms, *_context_copies(placed, placement, tp_rank), *_absorbed(placed, placement, tp_rank))


def _part(entry: Placed) -> str:
    rule = entry.entry.module.rule
    if rule.split != "vocab":
        return "draft.weights"
    return EMBEDDING if "embed" in rule.pattern else HEAD


def _embedding(placed: PlacedDraft, placement: Placement, stored: int) -> Iterator[Term]:
    """Yield the embedding of a draft head: its own, a copy of the target's, or one for a stage that has none.

    SGLang makes every draft an embedding and drops it once the target's takes its place: in the bound.
    """
    target, own = embedding_of(placed.target.assignment), embedding_of(placement.assignment)
    if target is None:
        return
    rows = placement.engine.vocab_rows(target.out_size, placement.topology.tp) // placement.topology.tp
    whole = max(stored, payload_bytes(target.model_dtype, (rows, target.in_size)))
    most = whole if placement.engine.name == "sglang" else 0 if placed.draft.method == "mtp" else stored
    if not _on_last_stage(placed.target):
        yield exact_term(EMBEDDING, whole, "the target's is on another pipeline stage", basis="modelled")
    elif stored and own is not None and (own.out_size, own.in_size) != (target.out_size, target.in_size):
        yield exact_term(EMBEDDING, stored, "an embedding of its own")
    elif most:
        yield Term(
            component=EMBEDDING, nbytes=0, bound_nbytes=most, basis="modelled",
            source="shared with the target, where a stored copy is equal (eagle/utils.py _should_share)",
        )  # fmt: skip


def _on_last_stage(target: Placement) -> bool:
    """Whether the last pipeline stage of the target holds its embedding."""
    last = target.topology.pp - 1
    return any(
        entry.entry.module.rule.role == "embedding" and target.multiplicity(entry, last) for entry in target.placed
    )


def _context_copies(placed: PlacedDraft, placement: Placement, tp_rank: int) -> Iterator[Term]:
    """Yield the second copy of all key and value projections a DFlash draft keeps, to run them as one."""
    if placed.draft.method not in BLOCK_METHODS or placement.engine.name != "vllm":
        return
    copied = [
        entry
        for entry in placement.placed
        if entry.entry.module.rule.pattern.endswith(CONTEXT_PROJECTIONS) and entry.entry.fmt.is_plain
    ]
    nbytes = sum(placement.multiplicity(entry, 0) * entry.shares[tp_rank].held_bytes for entry in copied)
    if nbytes:
        yield exact_term(
            CONTEXT, nbytes, "key and value projections of all layers once more, as one weight", basis="modelled"
        )


def _mask_embedding(placed: PlacedDraft, placement: Placement, tp_rank: int) -> int:
    """Return the embedding of masked slots, which vLLM's class for DFlash with plain attention makes, stored or not."""
    if placed.draft.method not in BLOCK_METHODS or placement.engine.name != "vllm":
        return 0
    by_pattern = {entry.entry.module.rule.pattern: entry.shares[tp_rank].held_bytes for entry in placement.placed}
    plain = any(pattern.endswith(".k_proj") for pattern in by_pattern)
    return by_pattern["hidden_norm.weight"] if plain else 0


def _absorbed(placed: PlacedDraft, placement: Placement, tp_rank: int) -> Iterator[Term]:
    """Yield SGLang's copies of the up-projections of MTP layers; a checkpoint of its own has them in its weights."""
    if placed.draft.method != "mtp" or placement.engine.name != "sglang":
        return
    nbytes = 0
    for entry in placement.placed:
        module, share = entry.entry.module, entry.shares[tp_rank]
        if module.rule.pattern.endswith(f".{ABSORBED_MODULE}"):
            rows = module.out_size // placement.topology.tp
            nbytes += placement.multiplicity(entry, 0) * share.copies * rows * module.in_size * ABSORBED_BYTES
    if nbytes:
        yield exact_term("draft.mla_absorbed", nbytes, "w_kc and w_vc, BF16 copies beside kv_b_proj (SGLang 0.5.23)")


def exact_term(component: str, nbytes: int, source: str, *, basis: Basis = "exact") -> Term:
    """Return a term whose bound is its value."""
    return Term(component=component, nbytes=nbytes, bound_nbytes=nbytes, basis=basis, source=source)
