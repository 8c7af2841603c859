"""A recipe: what one model family stores, as data. One TOML file per family beside this module.

::

    source = "..."                         # where the facts come from
    scope = "text_config"                  # config object the fields are looked up in first; optional

    [names]                                # text put in for {model}, {head}, ... in patterns and [let]
    [refuse]                               # condition = what this recipe does not describe; optional
    [let]                                  # named expressions, in order, each may use the ones above
    [index]                                # extent of {layer}, {expert}, ...: an expression, or { start, count }

    [module]                               # name pattern = one line of facts
    "{model}layers.{layer}.mlp.down_proj" = { role = "mlp", out = "hidden_size", in = "intermediate_size", ... }

    [vllm]                                 # what an engine does differently, by the same patterns
    [vllm.fused]                           # rules of its fused modules, by their names

    [[cache]]                              # what its layers keep between steps
    keeps = "attention"                    # attention, latent, indexer, compressed or state: memory/cache.py
    layers = "{layer}"                     # index whose values are the layers; optional
    when = "full"                          # condition for a layer to keep it; optional
    draft = true                           # only a draft model runs these layers; optional
    heads = "kv_heads"                     # numbers by the names in CACHE_KEYS

    [[include]]                            # another recipe as a part of this one
    recipe = "llama"
    names = { model = "language_model.model." }
    role = "mtp"                           # the role of everything in the part; optional, as is an engine's rule for it
    vllm = { absent_if = "True", why = "..." }

A module with ``out`` and ``in`` is a linear weight: it is stored as ``NAME.weight`` or in whatever tensors a storage
format has for it. A module with ``shape`` is one tensor stored under exactly its name. Every number is an expression
(:mod:`tonnage.recipes.expressions`) over config fields, ``[let]`` names, and ``layer`` where it differs by layer. A
list of expressions on the split axis means parts that are cut one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tonnage.recipes.expressions import Expression

Split = Literal["column", "row", "vocab", "replicated"]
"""How a role splits: column = ``out`` (first axis), row = ``in`` (last axis), vocab = padded ``out``, or whole."""

Stage = Literal["layer", "first", "last", "ends", "all"]
"""The pipeline stages that hold it: the one of its layer, the first, the last, both ends, or every one."""

ROLES = (
    "embedding", "attention", "indexer", "recurrent", "mlp", "router", "latent", "shared_expert", "expert",
    "norm", "residual", "head", "vision", "projector", "audio", "mtp",
)  # fmt: skip
"""What a tensor is for, in the order reports list them."""

Credit = Literal["projection", "latent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One run of an axis: ``size`` elements in ``units`` indivisible units (heads); ``None``: cut anywhere."""

    size: Expression
    units: Expression | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of ``[module]``: the facts about one kind of module.

    Attributes:
        pattern: Name with ``{layer}``-style indices; for a linear weight without the ``.weight``.
        role: One of :data:`ROLES`.
        out: Output axis of a linear weight, as one or several parts.
        in_: Input axis of a linear weight.
        shape: Axes of a single tensor; the split axis may have several parts.
        split: How the role is split over tensor-parallel ranks.
        why: The reason, where every rank holds it whole.
        replicas: Units may be held by several ranks where there are fewer units than ranks (KV heads, groups).
        when: Condition for the module to exist; may use ``layer``.
        bias: Condition for ``NAME.bias`` to exist.
        stack: Leading axis: experts stored in one tensor.
        transposed: A plain weight is stored ``[in, out]``.
        bare: A plain weight is stored under exactly its name, without ``.weight``.
        dtype: Stored dtype; ``model`` for the checkpoint's own.
        quantizes: A quantised checkpoint may store it in another format.
        convert: Preparation may turn it from BF16 into MXFP8.
        credit: The share of the credit estimator it is counted in.
        fused: Engine module it is loaded into together with its siblings.
        stage: Pipeline stages that hold it.
        last_if: Condition for the last stage to hold it as well as the first: an embedding that is the head too.
        optional: Condition under which a checkpoint without it is complete too (a head tied to the embedding).
    """

    pattern: str
    role: str
    out: tuple[Extent, ...] = ()
    in_: tuple[Extent, ...] = ()
    shape: tuple[tuple[Extent, ...], ...] = ()
    split: Split
    why: str = ""
    replicas: bool = False
    when: Expression | None = None
    bias: Expression | None = None
    stack: Expression | None = None
    transposed: bool = False
    bare: bool = False
    dtype: str = "model"
    quantizes: bool = True
    convert: bool = False
    credit: Credit | None = None
    fused: str = ""
    stage: Stage = "layer"
    last_if: Expression | None = None
    optional: Expression | None = None

    @property
    def is_routed(self) -> bool:
        """Whether these are routed experts, whatever part of the model they are in."""
        return self.role == "expert" or "{expert}" in self.pattern or self.stack is not None

    @property
    def is_linear(self) -> bool:
        """Whether this is a linear weight, whose stored tensors depend on the storage format."""
        return bool(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRule:
    """What one engine does with a module beyond the plain split; expressions may use ``tp``, ``ep``, and ``etp``.

    ``etp`` is the number of ranks one expert is cut over: ``tp``, or 1 under expert parallelism.

    Attributes:
        split: It splits the module this way instead.
        replicas: As in :class:`Rule`, where this is true.
        whole_if: Every rank holds the module whole where this is true.
        absent_if: The engine holds nothing for the module where this is true.
        dtype: It holds the tensor in this dtype; a quantised weight is held plain, without scales.
        dtype_if: Condition for that, where it is not so always.
        held: It holds this many elements per rank.
        copies: It holds its part this many times.
        slice_size: Elements of the split axis it holds per rank, zero-filled where that is more than the slice.
        stage: It places the module on these pipeline stages instead.
        why: The reason, printed with the line.
    """

    split: Split | None = None
    replicas: Expression | None = None
    whole_if: Expression | None = None
    absent_if: Expression | None = None
    dtype: str = ""
    dtype_if: Expression | None = None
    held: Expression | None = None
    copies: Expression | None = None
    slice_size: Expression | None = None
    stage: Stage | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRule:
    """What one engine does with a fused module: rows per rank rounded up to a multiple, zero-filled."""

    rows_multiple: Expression
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRule:
    """Extent of one index: ``count`` values from ``start``, which is 0 unless given."""

    start: Expression | None = None
    count: Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """All exceptions of one engine for one section; one for every module goes before those of single modules."""

    modules: Mapping[str, EngineRule] = field(default_factory=dict)
    fused: Mapping[str, FusedRule] = field(default_factory=dict)
    every: EngineRule | None = None


CacheKind = Literal["attention", "latent", "indexer", "compressed", "state"]

CACHE_KEYS: Mapping[CacheKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention": (("heads", "key"), ("value", "window", "chunk")),
    "latent": (("rank", "rope"), ("sparse", "window")),
    "indexer": (("key",), ("scaled",)),
    "compressed": (("key", "rope", "window"), ("ratio", "index")),
    "state": (("kind",), ("heads", "key", "value", "conv", "conv_units", "replicas", "kernel", "dtype")),
}
"""Keys of every kind of cache beside those of every cache: those it must have, those it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRule:
    """One ``[[cache]]``: what some layers keep; the attributes of :mod:`tonnage.memory.cache` by shorter names.

    Attributes:
        keeps: Kind of cache.
        index: Index whose values are the layers.
        when: Condition for a layer to keep it; may use ``layer``.
        sizes: Numbers and conditions by their keys.
        conv: Channels of a state's convolution, as one or several parts.
        replicas: For every part of the convolution, whether several ranks may hold its units.
        kind: Which recurrence a state is of.
        draft: It belongs to layers that only a draft model runs.
        borrowed: Its layers read what earlier ones keep.
    """

    keeps: CacheKind
    index: str
    when: Expression | None = None
    sizes: Mapping[str, Expression]
    conv: tuple[Extent, ...] = ()
    replicas: tuple[bool, ...] = ()
    kind: str = ""
    draft: bool = False
    borrowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The rules of one recipe file under one scope of the config.

    Attributes:
        name: Recipe file, without suffix; the source of its lines.
        scope: Path to the config object its fields are looked up in first.
        when: Condition for the whole section, over the enclosing config.
        refusals: Conditions under which the recipe does not describe the checkpoint, with what is missing.
        lets: Named expressions in order.
        indices: Extent of every index its patterns use.
        rules: Its modules.
        caches: What its layers keep.
        engines: Exceptions by engine name.
    """

    name: str
    scope: tuple[str, ...]
    when: tuple[Expression, ...]
    refusals: tuple[tuple[Expression, str], ...] = ()
    lets: tuple[tuple[str, Expression], ...]
    indices: Mapping[str, IndexRule]
    rules: tuple[Rule, ...]
    caches: tuple[CacheRule, ...] = ()
    engines: Mapping[str, EngineRules]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One family: sections in the order a report lists them."""

    family: str
    source: str
    sections: tuple[Section, ...]
