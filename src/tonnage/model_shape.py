"""A placement to the widths its activations, buffers and graphs depend on: one :class:`ModelShape` per rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.container import slot_bytes
from tonnage.cuts import extent
from tonnage.memory.workspace_shape import EncoderShape, ModelShape, RoutedShape
from tonnage.recipes.modules import TOWER_ROLES
from tonnage.topology import expert_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tonnage.placement import Placed, Placement
    from tonnage.recipes.modules import Module
    from tonnage.shares import Share

MIXERS = frozenset({"attention", "indexer", "recurrent"})
FEED_FORWARD = frozenset({"mlp", "shared_expert"})
SERVED_BYTES = 2
"""Activations are BF16 or F16 unless a flag says otherwise, whatever the checkpoint is stored in."""
LARGEST_IMAGE_TOKENS = 16384
"""What the processors of the Qwen-VL line turn their largest image into."""
DEFAULT_MERGE = 4
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(slots=True)
class _Layer:
    """What one layer adds up to on one rank."""

    mlp: int = 0
    mixer: int = 0
    up: int = 0
    down: int = 0
    nbytes: int = 0
    stacks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    fused: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def model_shape(
    placement: Placement, *, pp_rank: int = 0, tp_rank: int = 0, dtype_bytes: int = SERVED_BYTES
) -> ModelShape:
    """Return the shape of one rank.

    An indexer counts where the config states its key size beside the attention's (``index_head_dim``). That of Kimi
    K3.1, stated in ``dsa_config``, is left out: the measured capacity of its package has no room for gathered contexts.

    Args:
        placement: The placed model.
        pp_rank: Pipeline stage.
        tp_rank: Rank within the stage.
        dtype_bytes: Bytes of an activation element.
    """
    here = [p for p in placement.placed if p.how != "absent" and placement.multiplicity(p, pp_rank)]
    layers: dict[int, _Layer] = defaultdict(_Layer)
    for placed in here:
        _add(layers, placed, placement, pp_rank, tp_rank)
    widest = list(layers.values()) or [_Layer()]
    modules = [p.entry.module for p in placement.placed]
    names = _names(placement)
    recurrent = any(module.rule.role == "recurrent" for module in modules)
    latent = _integer(names, "kv_lora_rank")
    indexed = next((m.names for m in modules if m.rule.role == "indexer"), {})
    elements = max((_elements(p, tp_rank) for p in here if not p.entry.module.rule.is_routed), default=0)
    return ModelShape(
        hidden_size=_hidden_size(modules, names),
        vocab_size=_vocab_size(placement),
        layers=max(len(placement.stages[pp_rank]), 1),
        dtype_bytes=dtype_bytes,
        mlp_width=max(layer.mlp for layer in widest),
        mixer_width=max(layer.mixer for layer in widest),
        logits=pp_rank == placement.topology.pp - 1,
        recurrent=recurrent,
        routed=_routed(placement, widest, pp_rank, tp_rank),
        latent_width=latent + _integer(names, "qk_rope_head_dim") if latent else 0,
        latent_up_width=_latent_up(here, tp_rank) if latent else 0,
        index_width=_integer(indexed, "index_head_dim"),
        index_pool=_integer(indexed, "index_kpool", "ratio") or 1,
        encoder=_encoder(here, tp_rank),
        multimodal=any(module.rule.role in TOWER_ROLES for module in modules),
        layer_bytes=max(layer.nbytes for layer in widest),
        module_bytes=max((n for layer in widest for n in layer.fused.values()), default=0),
        module_elements=elements,
        tensor_bytes=max((stored.nbytes for p in here for stored in p.entry.stored), default=0),
        repacked=placement.assignment.container is not None or any(not p.entry.fmt.is_plain for p in here),
    )


def _add(layers: dict[int, _Layer], placed: Placed, placement: Placement, pp_rank: int, tp_rank: int) -> None:
    """Add a module to the layers of the stage that have it."""
    module, share = placed.entry.module, placed.shares[tp_rank]
    if not module.layered:
        return
    row = module.rule.split == "row"
    role = module.rule.role
    out, in_ = _local(share, "out", module.out_size), _local(share, "in", module.in_size)
    for index in placed.entry.first:
        if index not in placement.stages[pp_rank]:
            continue
        layer = layers[index]
        layer.nbytes += share.held_bytes
        if module.rule.is_routed:
            layer.stacks["down" if row else "up"] += share.held_bytes
            layer.up = layer.up + (0 if row else out)
            layer.down = max(layer.down, in_ if row else 0)
            continue
        if not module.rule.is_linear:
            continue
        layer.fused[module.rule.fused or module.rule.pattern] += share.held_bytes
        if role in FEED_FORWARD:
            layer.mlp += in_ if row else out
        elif role in MIXERS and not row:
            layer.mixer += out


def _local(share: Share, axis: str, size: int) -> int:
    return extent(share.ranges) if share.axis == axis and share.ranges else size


def _elements(placed: Placed, tp_rank: int) -> int:
    module, share = placed.entry.module, placed.shares[tp_rank]
    if not module.layered:
        return 0
    return _local(share, "out", module.out_size) * _local(share, "in", module.in_size)


def _names(placement: Placement) -> Mapping[str, object]:
    """Return the config fields the decoder's modules were evaluated with."""
    for placed in placement.placed:
        if placed.entry.module.rule.role in MIXERS and placed.entry.module.layered:
            return placed.entry.module.names
    return placement.assignment.blueprint.config.fields


def _integer(names: Mapping[str, object], *keys: str) -> int:
    for key in keys:
        value = names.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _hidden_size(modules: list[Module], names: Mapping[str, object]) -> int:
    """Return the width of the embedding's rows, which is that of the residual stream."""
    for module in modules:
        if module.rule.role in ("embedding", "head") and module.rule.split == "vocab" and module.rule.is_linear:
            return module.in_size
    return _integer(names, "hidden_size") or 1


def _vocab_size(placement: Placement) -> int:
    for role in ("head", "embedding"):
        for placed in placement.placed:
            module = placed.entry.module
            if module.rule.role == role and module.rule.is_linear:
                return placement.engine.vocab_rows(module.out_size, placement.topology.tp)
    return 1


def _latent_up(here: list[Placed], tp_rank: int) -> int:
    """Return the outputs of this rank's up-projection of the latent."""
    widths = (
        _local(p.shares[tp_rank], "out", p.entry.module.out_size)
        for p in here
        if p.entry.module.rule.pattern.endswith("kv_b_proj")
    )
    return max(widths, default=0)


def _routed(placement: Placement, layers: list[_Layer], pp_rank: int, tp_rank: int) -> RoutedShape | None:
    """Return the routed experts of the widest layer, or of the container that stores them."""
    module = next(
        (m for m in placement.assignment.blueprint.modules if m.rule.is_routed and m.rule.split != "row"), None
    )
    if module is None:
        return None
    topology, experts = placement.topology, module.stack or module.experts
    down, up = max(layer.down for layer in layers), max(layer.up for layer in layers)
    stack = max((n for layer in layers for n in layer.stacks.values()), default=0)
    fmt = next((p.entry.fmt.name for p in placement.placed if p.entry.module.rule.is_routed), module.fmt.name)
    container = placement.assignment.container
    if container is not None and not up:
        down = -(-module.out_size // topology.tp)
        up, fmt = 2 * down, "exl3_v1"
        stack = max((ranks[tp_rank] for ranks in slot_bytes(container, topology.tp)), default=0)
    if not up or not placement.stages[pp_rank]:
        return None
    return RoutedShape(
        top_k=min(_top_k(module.names), experts),
        local_experts=expert_counts(experts, topology.ep)[tp_rank] if topology.ep > 1 else experts,
        hidden_size=module.in_size,
        width=down or up,
        up_width=up,
        fmt=fmt,
        stack_bytes=stack,
    )


def _top_k(names: Mapping[str, object]) -> int:
    return _integer(names, *TOP_K) or 1


def _encoder(here: list[Placed], tp_rank: int) -> EncoderShape | None:
    """Return the vision tower: the widest output of its blocks, and how many patches make a token."""
    blocks = [
        p for p in here if p.entry.module.rule.role == "vision" and p.entry.first and p.entry.module.rule.is_linear
    ]
    if not blocks:
        return None
    names = blocks[0].entry.module.names
    streams = Counter(
        p.entry.module.in_size for p in blocks for _ in p.entry.first if p.entry.module.rule.split != "row"
    )
    return EncoderShape(
        hidden_size=streams.most_common(1)[0][0] if streams else blocks[0].entry.module.in_size,
        width=max(_local(p.shares[tp_rank], "out", p.entry.module.out_size) for p in blocks),
        patches_per_token=_merged(names),
        item_tokens=LARGEST_IMAGE_TOKENS if {"spatial_merge_size", "temporal_patch_size"} <= names.keys() else 0,
    )


def _merged(names: Mapping[str, object]) -> int:
    """Return the patches merged into one token of the language model."""
    kernel = names.get("merge_kernel_size")
    if isinstance(kernel, list) and len(kernel) == 2 and all(isinstance(n, int) and n > 0 for n in kernel):
        return int(kernel[0]) * int(kernel[1])
    side = _integer(names, "spatial_merge_size", "pooling_kernel_size")
    if side:
        return side * side
    image, patch, tokens = (_integer(names, key) for key in ("image_size", "patch_size", "mm_tokens_per_image"))
    if image and patch and tokens:
        return max((image // patch) ** 2 // tokens, 1)
    return DEFAULT_MERGE
