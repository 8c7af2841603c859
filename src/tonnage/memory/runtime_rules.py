"""What the runtime holds by rule: driver context, communicators, libraries, runner buffers, CUDA graphs.

Each function returns bytes on one rank before any calibration; :mod:`tonnage.memory.runtime` makes terms of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from tonnage.memory.workspace_shape import Deployment, GpuClass, ModelShape, Release, Serving
    from tonnage.topology import Topology

EARLY_COMMUNICATION: Release = (0, 27)
"""From this vLLM release communicators stand before the first snapshot; it also brings the runner with statistics."""
CONTEXT_BYTES = 512 * MIB
"""Driver context with lazily loaded kernels, one process."""
COMMUNICATION_BYTES = GIB
"""Communicators, custom all-reduce (two buffers of 8 MiB and more, 8 MiB of pointers) and symmetric memory (64 MiB)."""
ALL_TO_ALL_BYTES = GIB
ROUTED_COMMUNICATION_BYTES = 512 * MIB
LIBRARY_BYTES = 256 * MIB
"""Kernels and library workspaces loaded by the first forward pass."""
UNLINKED_LIBRARY_BYTES, LARGEST_UNLINKED_BYTES = 512 * MIB, 700 * MIB
"""The same on cards without such links, whatever their number: 0.3 GiB on small ones, 0.6 on large ones."""
LATE_COMMUNICATION_BYTES = 1894 * MIB
"""What the links of data centre GPUs take after the snapshot: fused all-reduce, multicast buffers, further channels."""
LINKED: frozenset[GpuClass] = frozenset({"a100", "hopper", "blackwell-dc"})
GRAPH_PER_LAYER_BYTES, GRAPH_FULL_TOKENS = 380 * KIB, 64
"""One captured size of one layer, its pieces and its full graph together; sizes under 64 take their share of it."""
POOL_PER_TOKEN_BYTES = 758 * KIB
"""Memory the graphs share, for every token of the largest size."""
ROUTED_POOL_PER_TOKEN_BYTES = 717 * KIB
LARGEST_CAPTURE, LARGEST_CAPTURE_DC = 512, 1024
FLASHINFER_WORKSPACE_BYTES = 394 * MIB


def context_bytes(topology: Topology, *, routed: bool) -> int:
    """Return what is held before the engine takes its first snapshot."""
    if topology.world_size == 1:
        return CONTEXT_BYTES
    experts = ROUTED_COMMUNICATION_BYTES if routed else 0
    return CONTEXT_BYTES + COMMUNICATION_BYTES + experts + (ALL_TO_ALL_BYTES if topology.ep > 1 else 0)


def library_bytes(deployment: Deployment) -> tuple[int, int]:
    """Return what a forward pass adds outside the allocator after the first snapshot, expected and at most."""
    gpu, release = deployment.gpu_class, deployment.release
    if gpu is not None and gpu not in LINKED:
        return UNLINKED_LIBRARY_BYTES, UNLINKED_LIBRARY_BYTES
    early = release is not None and release >= EARLY_COMMUNICATION
    nbytes = LIBRARY_BYTES + (LATE_COMMUNICATION_BYTES if deployment.topology.tp > 1 and not early else 0)
    return nbytes, max(nbytes, LARGEST_UNLINKED_BYTES if gpu is None else 0)


def capture_sizes(serving: Serving, gpu: GpuClass | None) -> tuple[int, ...]:
    """Return the batch sizes vLLM captures by default.

    Source:
        vLLM 0.33.0 ``config/vllm.py``: 1, 2, 4, every 8 below 256, every 16 from there, up to twice the sequences with
        their drafts, 512 (1024 on data centre Blackwell), and the tokens of a step.
    """
    largest = LARGEST_CAPTURE_DC if gpu == "blackwell-dc" else LARGEST_CAPTURE
    last = serving.largest_capture or min(2 * serving.max_seqs * (1 + serving.draft_tokens), largest)
    last = min(last, serving.batched_tokens)
    every = (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE_DC + 1, 16))
    return tuple(size for size in every if size <= last)


def graph_bytes(shape: ModelShape, serving: Serving, sizes: tuple[int, ...], gpu: GpuClass | None = None) -> int:
    """Return what captured graphs hold: a little for every layer and size, and a pool as large as the largest step.

    AMD's graphs take about twice that: 3.9 GiB were logged on an MI300X.
    """
    if serving.eager or not sizes:
        return 0
    pool = POOL_PER_TOKEN_BYTES + (ROUTED_POOL_PER_TOKEN_BYTES if shape.routed is not None else 0)
    tokens = sum(min(size, GRAPH_FULL_TOKENS) for size in sizes)
    nbytes = tokens * shape.layers * GRAPH_PER_LAYER_BYTES // GRAPH_FULL_TOKENS + sizes[-1] * pool
    return nbytes * (2 if gpu == "amd" else 1)


def buffer_bytes(shape: ModelShape, serving: Serving, *, statistics: bool) -> int:
    """Return the buffers vLLM's runner keeps: tables, inputs, masks, statistics of penalties, a draft's probabilities.

    Args:
        shape: The rank.
        serving: What is served.
        statistics: Whether counts of every token of every sequence are kept.

    Source:
        vLLM 0.33.0 ``v1/worker/gpu``: ``block_table.py``, ``sample/states.py``, ``structured_outputs.py``.
    """
    pages = -(-serving.context_tokens // serving.page_tokens)
    tables = 2 * serving.cache_groups * serving.max_seqs * pages * 4
    inputs = serving.batched_tokens * (8 * serving.cache_groups + 13)
    if not shape.logits:
        return tables + inputs
    words = -(-shape.vocab_size // 32) * 4
    masks = serving.max_seqs * (1 + serving.draft_tokens) * words
    counts = serving.max_seqs * (shape.vocab_size * 4 + words) if statistics else 0
    kept = serving.max_seqs * serving.draft_tokens * shape.vocab_size * shape.dtype_bytes
    return tables + inputs + masks + counts + (kept if serving.sampled_draft else 0)


def vllm_limits(total_bytes: int | None, gpu: GpuClass | None) -> tuple[int, int]:
    """Return the tokens of a step and the sequences vLLM's server takes where nobody states them.

    Source:
        vLLM 0.33.0 ``engine/arg_utils.py``: 16384 and 1024 from 160 GiB, 8192 and 1024 from 70 GiB except on A100 and
        GB10, else 2048 and 256.
    """
    if total_bytes is not None and total_bytes >= 160 * GIB:
        return 16384, 1024
    if total_bytes is not None and total_bytes >= 70 * GIB and gpu not in ("a100", "gb10"):
        return 8192, 1024
    return 2048, 256
