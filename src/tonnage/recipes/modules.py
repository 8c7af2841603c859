"""Modules with numbers, and the tensors they are stored in.

A :class:`Module` is one rule on the layers where its numbers are equal. Its stored tensors follow from its storage
format (:func:`stored_tensors`); a config alone gives the format the config states, headers give the real one
(:mod:`tonnage.assignment`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from tonnage.checkpoint.name_tests import Kind
from tonnage.formats.dtypes import payload_bytes
from tonnage.formats.storage import MODEL_DTYPE, Dim, Part, StorageFormat, stored_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tonnage.recipes.schema import Rule, Section

TOWER_ROLES = frozenset({"vision", "projector", "audio"})
"""Roles of modules that take in images or sound."""
INDEX = re.compile(r"\{([a-z_]+)\}")
_SPELLED = re.compile(r"\.[0-9]+(?:\.|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Run:
    """Part of an axis: ``size`` elements in ``units`` indivisible units."""

    size: int
    units: int


Axis = tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One rule with its numbers, on the layers where they are equal.

    Attributes:
        rule: The recipe line.
        section: The recipe file and its engine exceptions.
        first: Values of the pattern's first index (layers, blocks); empty without one.
        rest: Extents of the further indices (experts), as ranges.
        out: Output axis; empty for a single tensor.
        in_: Input axis.
        shape: Axes of a single tensor.
        stack: Experts in one tensor; 0 if not stacked.
        bias: Whether ``NAME.bias`` exists.
        optional: A checkpoint without it is complete too.
        fmt: Storage format the config states.
        method: ``quant_method`` of the config; engines treat some formats differently by it.
        model_dtype: Dtype the config states for unquantised tensors.
        names: What its expressions were evaluated with, for those of the engines.
    """

    rule: Rule
    section: Section
    first: tuple[int, ...]
    rest: tuple[range, ...]
    out: tuple[Run, ...]
    in_: tuple[Run, ...]
    shape: tuple[tuple[Run, ...], ...]
    stack: int
    bias: bool
    optional: bool
    fmt: StorageFormat
    method: str = "none"
    model_dtype: str = "BF16"
    names: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def layered(self) -> bool:
        """Whether the first index is the decoder layer."""
        return "{layer}" in self.rule.pattern

    @property
    def experts(self) -> int:
        """Routed experts of one layer that have tensors of their own; 1 for everything else."""
        names = INDEX.findall(self.rule.pattern)
        return len(self.rest[names.index("expert") - 1]) if "expert" in names else 1

    @property
    def copies(self) -> int:
        """Instances for one value of the first index."""
        return prod(len(r) for r in self.rest)

    @property
    def out_size(self) -> int:
        """Logical outputs of a linear weight."""
        return sum(run.size for run in self.out)

    @property
    def in_size(self) -> int:
        """Logical inputs of a linear weight."""
        return sum(run.size for run in self.in_)

    @property
    def held_in(self) -> tuple[str, str]:
        """Section and pattern of what it is loaded into: a fused module, all experts of a layer, or itself."""
        rule = self.rule
        name = f"{rule.pattern.rpartition('.')[0]}.{rule.fused}" if rule.fused else rule.pattern
        return self.section.name, name.replace(".{expert}", "") if rule.is_routed else name

    @property
    def kind(self) -> Kind:
        """What quantisation rules see in it."""
        return kind_of(self.rule)

    def name(self, *indices: int) -> str:
        """Return one instance's name."""
        values = iter(indices)
        return INDEX.sub(lambda _: str(next(values)), self.rule.pattern)

    def instances(self) -> Iterator[tuple[int, ...]]:
        """Yield the index values of every instance."""
        firsts: tuple[tuple[int, ...], ...] = tuple((i,) for i in self.first) if self.first else ((),)
        rest: list[tuple[int, ...]] = [()]
        for extent in self.rest:
            rest = [(*head, i) for head in rest for i in extent]
        for first in firsts:
            for tail in rest:
                yield (*first, *tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One stored tensor of a module: how it is called, its dtype and shape, and which logical axes its axes walk.

    Attributes:
        suffix: What follows the module's name.
        dtype: As safetensors spells it.
        shape: Stored shape.
        dims: For every stored axis the logical axis it walks and what one index covers.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]

    @property
    def nbytes(self) -> int:
        """Exact payload bytes."""
        return payload_bytes(self.dtype, self.shape)


def stored_tensors(module: Module, fmt: StorageFormat, model_dtype: str) -> tuple[Stored, ...]:
    """Return the tensors one instance of a module is stored in.

    Raises:
        UnknownFormatError: An extent does not suit the format.
    """
    rule = module.rule
    if not rule.is_linear:
        return (_single(module, model_dtype),)
    where = rule.pattern
    out, in_ = (-(-size // fmt.pads_to) * fmt.pads_to for size in (module.out_size, module.in_size))
    stack, experts = ((Dim("stack"),), (module.stack,)) if module.stack else ((), ())
    tensors = []
    for part in fmt.parts:
        dims = part.dims
        suffix = part.suffix
        if fmt.is_plain:
            dims = dims[::-1] if rule.transposed else dims
            suffix = "" if rule.bare else suffix
        shape = stored_shape(Part(suffix, part.dtype, dims), out, in_, where=where)
        dtype = rule.dtype if fmt.is_plain else part.dtype
        tensors.append(
            Stored(
                suffix=suffix,
                dtype=model_dtype if dtype == MODEL_DTYPE else dtype,
                shape=(*experts, *shape),
                dims=(*stack, *dims),
            )
        )
    if module.bias:
        dtype = model_dtype if fmt.bias_dtype == MODEL_DTYPE else fmt.bias_dtype
        suffix = "_bias" if rule.bare else ".bias"
        tensors.append(Stored(suffix=suffix, dtype=dtype, shape=(*experts, out), dims=(*stack, Dim("out"))))
    return tuple(tensors)


def kind_of(rule: Rule) -> Kind:
    """Return what quantisation rules see in the modules of a rule."""
    if rule.is_routed:
        return "expert"
    if rule.role in TOWER_ROLES:
        return "tower"
    return "head" if rule.role == "head" else "linear"


def masked(pattern: str) -> str:
    """Return a pattern with ``#`` for every index, as :class:`tonnage.checkpoint.tally.Masker` writes names."""
    return INDEX.sub("#", pattern)


def spells_number(pattern: str) -> bool:
    """Whether the names of a pattern hold a number that is no index."""
    return _SPELLED.search(pattern) is not None


def _single(module: Module, model_dtype: str) -> Stored:
    """A single tensor: its split axis is called ``out`` (first) or ``in`` (last)."""
    rule = module.rule
    axis: Mapping[int, Dim] = {}
    if rule.split in ("column", "vocab"):
        axis = {0: Dim("out")}
    elif rule.split == "row":
        axis = {len(module.shape) - 1: Dim("in")}
    sizes = tuple(sum(run.size for run in runs) for runs in module.shape)
    return Stored(
        suffix="",
        dtype=model_dtype if rule.dtype == MODEL_DTYPE else rule.dtype,
        shape=sizes,
        dims=tuple(axis.get(i, Dim("none", size)) for i, size in enumerate(sizes)),
    )
