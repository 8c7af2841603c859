"""A draft: what proposes tokens for another model to verify, where its weights stand, and what its layers keep.

:func:`draft_of` makes one from a checkpoint of its own or from the MTP layers of the target; :func:`place_draft` places
it; :mod:`tonnage.draft_terms` says what it adds to a rank.

A draft is cut over the tensor-parallel ranks of the target's last pipeline stage and is no pipeline itself. exllamav3
loads drafts whole on one GPU.

Source:
    vLLM 0.32.0 ``config/speculative.py`` (create_draft_parallel_config), ``v1/worker/gpu/spec_decode``; SGLang 0.5.23
    ``srt/speculative``; exllamav3 1.6.5: no tensor parallelism for drafts and MTP parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tonnage.assignment import Assigned, Assignment
from tonnage.errors import ConfigError, PlacementError, Problem
from tonnage.memory.cache import Attention, Latent, LayerCache
from tonnage.placement import place
from tonnage.recipes.drafts import WHOLE_MODEL
from tonnage.recipes.loader import families
from tonnage.recipes.modules import stored_tensors
from tonnage.topology import Topology

if TYPE_CHECKING:
    from tonnage.engines.model import EngineModel
    from tonnage.memory.cache_vllm_options import VllmCacheOptions
    from tonnage.memory.workspace_shape import Serving
    from tonnage.placement import Placement
    from tonnage.recipes.modules import Module

DraftMethod = Literal["eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark", "draft-model", "ngram", "suffix"]
WITHOUT_MODEL: tuple[DraftMethod, ...] = ("ngram", "suffix")
"""Methods that run no model."""
OWN_CHECKPOINT: tuple[DraftMethod, ...] = ("eagle", "eagle3", "dflash", "dflash2", "dspark", "draft-model")
BLOCK_METHODS: tuple[DraftMethod, ...] = ("dflash", "dflash2")
"""Methods that fill a block of masked tokens in one pass."""
TAPPING_METHODS: tuple[DraftMethod, ...] = ("eagle3", *BLOCK_METHODS)
"""Methods that read hidden states of several of the target's layers, joined by ``fc``."""
SPARSE_RECORDS = "_ds_mla"
"""KV dtypes with this end are record formats of sparse kernels."""
MOST_TOKENS = 1 << 10
JOIN = "fc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What proposes tokens.

    Attributes:
        method: How.
        tokens: Tokens proposed per step.
        assignment: Every stored tensor that is loaded for it; ``None`` for methods that run no model.
        caches: What its layers keep, all with ``draft=True``; to be put behind those of the target.
        tapped_layers: Layers of the target whose hidden states it reads.
        sampled: Its probabilities are kept for the verification; not for greedy drafting, the default of engines.
        kv_dtype: Dtype of its cache where that differs from the target's, as the cache options name it.
    """

    method: DraftMethod
    tokens: int
    assignment: Assignment | None = None
    caches: tuple[LayerCache, ...] = ()
    tapped_layers: int = 0
    sampled: bool = False
    kv_dtype: str = ""

    @property
    def replicated(self) -> bool:
        """Whether every rank of decode context parallelism keeps all its tokens, under vLLM.

        DFlash shares the tokens of a latent cache only. A window is shared by no draft: the engine has no such cache.
        """
        kept = [cache.kept for cache in self.caches]
        windows = any(isinstance(k, Attention | Latent) and k.window_tokens for k in kept)
        return windows or (self.method in BLOCK_METHODS and not any(isinstance(k, Latent) for k in kept))

    def with_caches(self, target: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """Return what the layers of both keep, for the cache of an engine."""
        return (*target, *self.caches)

    def cache_options(self, options: VllmCacheOptions) -> VllmCacheOptions:
        """Return a launch's cache options with the draft: more slots of states, wider convolutions, its own dtype."""
        modules = sum(len(cache.layers) for cache in self.caches if isinstance(cache.kept, Attention | Latent))
        return replace(
            options,
            draft_tokens=self.tokens,
            draft_kv_dtype=self.kv_dtype or options.draft_kv_dtype or self._plain_dtype(options.kv_dtype),
            draft_replicated=self.replicated,
            retained_tokens=max(modules - 1, 0) if self.method == "mtp" else options.retained_tokens,
        )

    def _plain_dtype(self, kv_dtype: str) -> str:
        """Return the dtype of what no indexer reads, beside a target whose records are those of sparse kernels."""
        kept = [cache.kept for cache in self.caches]
        plain = any(isinstance(k, Attention) or (isinstance(k, Latent) and not k.sparse) for k in kept)
        return kv_dtype.removesuffix(SPARSE_RECORDS) if plain and kv_dtype.endswith(SPARSE_RECORDS) else ""

    def serving(self, serving: Serving) -> Serving:
        """Return what is served with the draft: rows to verify and hidden states to hand on.

        ``sampled_draft`` stays off: the probabilities are a term of the draft's own.
        """
        return replace(serving, draft_tokens=self.tokens, tapped_layers=self.tapped_layers, sampled_draft=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDraft:
    """A draft on its ranks.

    Attributes:
        draft: What is placed.
        placement: Its slices, over the tensor-parallel ranks of one stage; ``None`` for methods that run no model.
        target: Where the model it drafts for stands.
    """

    draft: Draft
    placement: Placement | None
    target: Placement

    def tp_rank(self, pp_rank: int, tp_rank: int) -> int | None:
        """Return which rank of the draft's placement a rank of the target is; ``None`` if it holds none of it."""
        if self.placement is None or pp_rank != self.target.topology.pp - 1:
            return None
        return tp_rank if tp_rank < self.placement.topology.tp else None


def draft_of(
    method: DraftMethod | None,
    tokens: int,
    *,
    target: Assignment,
    checkpoint: Assignment | None = None,
    from_headers: bool = False,
    sampled: bool = False,
) -> Draft:
    """Return a draft for a model.

    Args:
        method: How it drafts; ``None`` takes the method the checkpoint is made for.
        tokens: Tokens proposed per step.
        target: The model it drafts for.
        checkpoint: Its own, for methods that have one; its blueprint is drawn with ``draft_method``.
        from_headers: The target's tensors are those of its headers: MTP layers that are not stored are not there.
        sampled: Its probabilities are kept.

    Raises:
        ConfigError: Tokens out of range, a checkpoint too many or missing, no MTP layers in the target, or a draft made
            for a model of another width.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise _refused("--draft-tokens", "out of range", f"1..{MOST_TOKENS}", tokens)
    method = method or (method_of(checkpoint) if checkpoint is not None else "mtp")
    if (checkpoint is None) == (method in OWN_CHECKPOINT):
        wanted = "a draft checkpoint (--draft)" if checkpoint is None else f"--draft-method {method} alone"
        raise _refused(
            "--draft", f"{method} reads {'a' if checkpoint is None else 'no'} draft checkpoint", wanted, None
        )
    draft = Draft(method=method, tokens=tokens, sampled=sampled)
    if method in WITHOUT_MODEL:
        return draft
    if checkpoint is None:
        own = _own_layers(target, from_headers=from_headers)
        return replace(draft, assignment=own, caches=target.blueprint.draft_caches)
    if method == WHOLE_MODEL:
        _check_vocabulary(checkpoint, target)
    caches = tuple(replace(cache, draft=True) for cache in checkpoint.blueprint.caches)
    return replace(draft, assignment=checkpoint, caches=caches, tapped_layers=_taps(method, checkpoint, target))


def method_of(checkpoint: Assignment) -> DraftMethod:
    """Return the method a checkpoint is made for: that of its family, or the one of whole models."""
    method: DraftMethod = families()[checkpoint.blueprint.recipe.family].get("draft", WHOLE_MODEL)
    return method


def place_draft(draft: Draft, target: Placement) -> PlacedDraft:
    """Return a draft placed beside its target, by the same engine's rules.

    Raises:
        PlacementError: It cannot be cut over the target's ranks; the problems say that it is the draft.
    """
    if draft.assignment is None:
        return PlacedDraft(draft=draft, placement=None, target=target)
    topology = _topology(draft.assignment, target.topology, target.engine)
    try:
        placement = place(draft.assignment, topology, target.engine)
    except PlacementError as error:
        raise PlacementError(*(replace(p, where=f"draft {p.where}") for p in error.problems)) from error
    return PlacedDraft(draft=draft, placement=placement, target=target)


def _check_vocabulary(draft: Assignment, target: Assignment) -> None:
    """Refuse a whole model as a draft whose tokens are not the target's.

    Source:
        vLLM 0.32.0 ``config/speculative.py`` verify_equal_vocab_size_if_draft_model.
    """
    own, asked = embedding_of(draft), embedding_of(target)
    if own is not None and asked is not None and own.out_size != asked.out_size:
        raise _refused("--draft", "another vocabulary than the model's", f"{asked.out_size} tokens", own.out_size)


def embedding_of(assignment: Assignment) -> Module | None:
    """Return the module that turns a model's tokens into hidden states, stored or not."""
    for module in assignment.blueprint.modules:
        if module.rule.is_linear and module.rule.split == "vocab" and module.rule.role == "embedding":
            return module
    return None


def _topology(assignment: Assignment, target: Topology, engine: EngineModel) -> Topology:
    """Return the ranks of a draft: those of one stage, with whole experts where it has experts."""
    if engine.name == "exllamav3":
        return Topology()
    routed = any(entry.module.rule.is_routed for entry in assignment.entries)
    return Topology(tp=target.tp, ep=target.ep if routed else 1)


def _own_layers(target: Assignment, *, from_headers: bool) -> Assignment:
    """Return the MTP layers of a model as an assignment, without the rule that an engine leaves them out."""
    entries = [entry for entry in target.entries if entry.module.rule.role == "mtp"]
    if not entries and not from_headers:
        entries = [_assigned(m, target) for m in target.blueprint.modules if m.rule.role == "mtp"]
    if not entries:
        stored = "stored in its files" if from_headers else "in its config"
        raise _refused("--draft-method mtp", f"no MTP layers {stored}", "a model with MTP layers", None)
    loaded = tuple(replace(entry, module=_loaded(entry.module)) for entry in entries)
    blueprint = replace(
        target.blueprint,
        modules=tuple(_loaded(m) for m in target.blueprint.modules if m.rule.role == "mtp"),
        caches=(),
    )
    return Assignment(blueprint=blueprint, entries=loaded, notes=target.notes)


def _assigned(module: Module, target: Assignment) -> Assigned:
    """Return an optional module as a config promises it."""
    stored = stored_tensors(module, module.fmt, target.blueprint.config.dtype)
    return Assigned(module=module, fmt=module.fmt, stored=stored, first=module.first, copies=module.copies)


def _loaded(module: Module) -> Module:
    """Return a module without the rule for every module of its part."""
    engines = {name: replace(rules, every=None) for name, rules in module.section.engines.items()}
    return replace(module, section=replace(module.section, engines=engines))


def _taps(method: DraftMethod, checkpoint: Assignment, target: Assignment) -> int:
    """Return how many hidden states a draft reads for every token.

    Raises:
        ConfigError: Its inputs are no whole number of the target's hidden states.
    """
    join = next((entry.module for entry in checkpoint.entries if entry.module.rule.pattern == JOIN), None)
    embedding = embedding_of(target)
    if join is None or embedding is None:
        return 0
    width = embedding.in_size
    if join.in_size % width or (method == "eagle" and join.in_size != 2 * width):
        raise _refused(
            "--draft", "made for a model of another width", f"inputs of hidden states of {width}", join.in_size
        )
    return join.in_size // width if method in TAPPING_METHODS else 0


def _refused(where: str, what: str, expected: str, found: object) -> ConfigError:
    text = None if found is None else str(found)
    return ConfigError(Problem(where=where, what=what, expected=expected, found=text))
