"""What the terms beside weights and cache depend on: one rank's widths, what is served, and on what.

Values only. :mod:`tonnage.model_shape` makes a :class:`ModelShape` from a placement; :mod:`tonnage.memory.workspace`
and :mod:`tonnage.memory.runtime` turn these values into terms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tonnage.topology import Topology

if TYPE_CHECKING:
    from tonnage.memory.supply import Gpu
    from tonnage.topology import Engine

GpuClass = Literal["ampere-ada", "a100", "hopper", "blackwell-dc", "sm120", "gb10", "amd", "other"]
"""GPUs whose drivers, links and kernels cost alike: consumer and workstation Ampere and Ada; A100; H100, H200, H20;
B200 and B300; RTX 50 and RTX PRO Blackwell; machines whose memory is the host's as well; AMD."""

Kind = Literal[
    "dense", "routed", "latent", "sparse", "hybrid",
    "dense+vision", "routed+vision", "latent+vision", "sparse+vision", "hybrid+vision",
]  # fmt: skip
"""Models whose activations are dominated by the same tensors: ``sparse`` has an indexer, ``latent`` MLA without one."""

Release = tuple[int, int]
"""Major and minor number of an engine's version."""

_RELEASE = re.compile(r"v?(\d{1,3})\.(\d{1,4})(?![\dx])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape:
    """The routed experts of one layer on one rank.

    Attributes:
        top_k: Experts a token goes to.
        local_experts: Experts of which this rank holds a part.
        hidden_size: Inputs of an expert.
        width: Inputs of its down projection on this rank.
        up_width: Outputs of gate and up together on this rank.
        fmt: Storage format of its weights.
        stack_bytes: The larger of the two stacks of one layer on this rank.
    """

    top_k: int
    local_experts: int
    hidden_size: int
    width: int
    up_width: int
    fmt: str
    stack_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """A vision tower on one rank.

    Attributes:
        hidden_size: Width of a patch's residual stream.
        width: Widest output of a block on this rank.
        patches_per_token: Patches merged into one token of the language model.
        item_tokens: Tokens of the largest item it is profiled with; 0 where items are smaller than a prefill step.
    """

    hidden_size: int
    width: int
    patches_per_token: int
    item_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One rank of a placed model, as far as its activations, buffers and graphs depend on it.

    Attributes:
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the whole vocabulary with the engine's padding.
        layers: Decoder layers of this stage.
        dtype_bytes: Bytes of an activation element.
        mlp_width: Outputs of gate and up plus inputs of down on this rank, widest layer, shared experts included.
        mixer_width: Outputs that attention or recurrence computes from the hidden state on this rank, widest layer.
        logits: Whether this stage has the head.
        recurrent: Whether some layers are recurrent.
        routed: Routed experts, if any.
        latent_width: Elements an MLA cache keeps per token; 0 without MLA.
        latent_up_width: Outputs of this rank's key and value up-projection of one latent.
        index_width: Elements of an indexer key; 0 without an indexer.
        index_pool: Tokens that share an indexer key.
        encoder: Vision tower of this rank, if any.
        multimodal: Whether the model reads images or sound, on whatever rank.
        layer_bytes: Weights of the heaviest layer on this rank.
        module_bytes: Largest fused weight on this rank, stacks of experts excepted.
        module_elements: Elements of the largest single weight on this rank.
        tensor_bytes: Largest stored tensor, whole.
        repacked: Whether some weights are stored in a format whose kernels want another layout.
    """

    hidden_size: int
    vocab_size: int
    layers: int
    dtype_bytes: int
    mlp_width: int
    mixer_width: int
    logits: bool = True
    recurrent: bool = False
    routed: RoutedShape | None = None
    latent_width: int = 0
    latent_up_width: int = 0
    index_width: int = 0
    index_pool: int = 1
    encoder: EncoderShape | None = None
    multimodal: bool = False
    layer_bytes: int = 0
    module_bytes: int = 0
    module_elements: int = 0
    tensor_bytes: int = 0
    repacked: bool = False

    def __post_init__(self) -> None:
        """Refuse what no model is."""
        if min(self.hidden_size, self.vocab_size, self.layers, self.dtype_bytes) < 1:
            raise ValueError(f"a model of {self.layers} layers, hidden size {self.hidden_size}")

    @property
    def kind(self) -> Kind:
        """Which tensors its activations are dominated by."""
        kinds: tuple[tuple[object, Kind, Kind], ...] = (
            (self.recurrent, "hybrid", "hybrid+vision"),
            (self.index_width, "sparse", "sparse+vision"),
            (self.latent_width, "latent", "latent+vision"),
            (self.routed, "routed", "routed+vision"),
            (True, "dense", "dense+vision"),
        )
        plain, seeing = next((plain, seeing) for has, plain, seeing in kinds if has)
        return plain if self.encoder is None else seeing


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served, as the engine's flags say it.

    Attributes:
        max_seqs: Most sequences at once.
        batched_tokens: Most tokens of one step.
        context_tokens: Longest context.
        draft_tokens: Tokens a draft proposes per step; 0 without one.
        page_tokens: Tokens of a cache page.
        cache_groups: Groups of cache layers, each with its own block table.
        tapped_layers: Layers whose hidden states a draft reads.
        eager: No CUDA graphs.
        largest_capture: Largest batch captured in a graph, where a flag says so.
        sampled_draft: The draft's probabilities are kept; off for greedy drafting.
        vision: Images are served; the encoder is profiled.
        assumed: Which of these nobody stated: the engine's defaults.
    """

    max_seqs: int
    batched_tokens: int
    context_tokens: int
    draft_tokens: int = 0
    page_tokens: int = 16
    cache_groups: int = 1
    tapped_layers: int = 0
    eager: bool = False
    largest_capture: int | None = None
    sampled_draft: bool = False
    vision: bool = True
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what serves nothing."""
        if min(self.max_seqs, self.batched_tokens, self.context_tokens, self.page_tokens, self.cache_groups) < 1:
            raise ValueError(f"{self.max_seqs} sequences, {self.batched_tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """On what a model is served.

    Attributes:
        engine: Which engine's rules.
        release: Its version, if known.
        gpu_class: What the ranks run on, if known.
        topology: Parallel sizes.
    """

    engine: Engine
    release: Release | None = None
    gpu_class: GpuClass | None = None
    topology: Topology


def parse_release(text: str | None) -> Release | None:
    """Return major and minor of a version such as ``0.27.1``; ``None`` for names of builds and for ``0.0``."""
    match = _RELEASE.match(text.strip()) if text else None
    release = (int(match[1]), int(match[2])) if match else None
    return None if release == (0, 0) else release


def gpu_class(gpu: Gpu) -> GpuClass:
    """Return the class of a GPU of the table."""
    capability = gpu.compute_capability
    if capability.startswith("gfx"):
        return "amd"
    if gpu.unified_memory:
        return "gb10"
    by_capability: dict[str, GpuClass] = {
        "8.0": "a100", "8.6": "ampere-ada", "8.9": "ampere-ada", "9.0": "hopper", "10.0": "blackwell-dc",
        "10.3": "blackwell-dc", "12.0": "sm120",
    }  # fmt: skip
    return by_capability.get(capability, "other")
