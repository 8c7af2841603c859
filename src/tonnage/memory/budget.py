"""What an engine lets one process use of a GPU, and the rest of the GPU with the reason it is not used.

:class:`Allowance` is the answer for every engine: what weights, draft and cache may take together, what is left beside
them for graphs and activations, and what is held back. The parts add up to the GPU. vLLM's rules are here, those of
SGLang and exllamav3 in :mod:`tonnage.memory.budget_sglang` and :mod:`tonnage.memory.budget_exllamav3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.errors import Problem
from tonnage.memory.runtime_rules import vllm_limits
from tonnage.memory.term import Term
from tonnage.units import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.workspace_shape import GpuClass, Release

DEFAULT_UTILIZATION = Fraction(92, 100)
"""vLLM 0.24 to 0.33, ``config/cache.py``."""
UTILIZATION_DIGITS = 4
GRAPHS_COUNTED: Release = (0, 21)
"""First vLLM release that takes its estimate of CUDA graphs off the cache."""
OFFLINE_TOKENS, LARGE_OFFLINE_TOKENS = 8192, 16384
LARGE_SEQS = 1024
"""Sequences of the cards that take the larger steps offline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one process may hold on one GPU, and what of the GPU it may not.

    Attributes:
        pool_bytes: For weights, draft and cache; with vLLM and exllamav3 for graphs, buffers and activations as well.
        slack_bytes: For graphs, buffers and activations beside the pool; 0 where they are part of it.
        held_back: The rest of the GPU, each part with its reason.
        refusal: Why the engine does not start at all; ``None`` if it does.
    """

    pool_bytes: int
    slack_bytes: int = 0
    held_back: tuple[Term, ...]
    refusal: Problem | None = None

    def __post_init__(self) -> None:
        """Refuse negative memory."""
        if min(self.pool_bytes, self.slack_bytes) < 0:
            raise ValueError(f"pool of {self.pool_bytes} bytes, slack of {self.slack_bytes}")

    @property
    def usable_bytes(self) -> int:
        """Pool and slack together."""
        return self.pool_bytes + self.slack_bytes

    @property
    def total_bytes(self) -> int:
        """The GPU: what is used and what is held back."""
        return self.usable_bytes + sum(term.nbytes for term in self.held_back)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What vLLM's profile run finds, in the terms of 0.27 and later.

    Attributes:
        consumed_bytes: Free memory that is gone after it: weights, draft, buffers, kernels, library workspaces.
        transient_bytes: What a step held for a moment beyond that.
        graph_estimate_bytes: What CUDA graphs are expected to take.
    """

    consumed_bytes: int
    transient_bytes: int
    graph_estimate_bytes: int = 0


def profiled_before_0_27(weights_bytes: int, peak_bytes: int, non_torch_bytes: int, graphs_bytes: int) -> Profiled:
    """Return the split of releases up to 0.26, as printed; memory outside PyTorch may shrink and be negative."""
    return Profiled(
        consumed_bytes=weights_bytes + non_torch_bytes, transient_bytes=peak_bytes, graph_estimate_bytes=graphs_bytes
    )


def profiled_from_0_27(consumed_bytes: int, peak_bytes: int, graphs_bytes: int) -> Profiled:
    """Return the split of releases from 0.27, whose printed peak has the estimate of the graphs in it."""
    return Profiled(
        consumed_bytes=consumed_bytes, transient_bytes=peak_bytes - graphs_bytes, graph_estimate_bytes=graphs_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBudget:
    """vLLM's budget on one rank.

    Attributes:
        total_bytes: Total the allocator sees.
        free_bytes: Free at the first snapshot: context and communicators are there, weights are not.
        utilization: ``--gpu-memory-utilization``, exact.
        cache_bytes: ``--kv-cache-memory-bytes``; the utilization then only decides whether the worker starts.
        multimodal_bytes: Reserved for items that reach the worker over CUDA IPC; off the cache in both cases.

    Source:
        vLLM 0.32.0 ``v1/worker/utils.py`` request_memory, ``v1/worker/gpu_worker.py`` determine_available_memory.
        The engine multiplies in double precision, which can differ by a byte.
    """

    total_bytes: int
    free_bytes: int
    utilization: Fraction = DEFAULT_UTILIZATION
    cache_bytes: int | None = None
    multimodal_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what no GPU is and no flag takes."""
        if not 0 <= self.free_bytes <= self.total_bytes or not self.total_bytes:
            raise ValueError(f"{self.free_bytes} bytes free of {self.total_bytes}")
        if not 0 < self.utilization <= 1 or min(self.cache_bytes or 0, self.multimodal_bytes) < 0:
            raise ValueError(f"utilization {self.utilization}, cache of {self.cache_bytes} bytes")

    @property
    def baseline_bytes(self) -> int:
        """Held before the snapshot: this process' context and communicators, and other processes."""
        return self.total_bytes - self.free_bytes

    @property
    def requested_bytes(self) -> int:
        """What the utilization asks for, rounded up as the engine does."""
        return -(-self.total_bytes * self.utilization.numerator // self.utilization.denominator)

    @property
    def highest_utilization(self) -> Fraction:
        """The highest utilization, to four digits, with which the worker starts."""
        return floor_utilization(Fraction(self.free_bytes, self.total_bytes))

    @property
    def refusal(self) -> Problem | None:
        """Why the worker does not start; also checked where the cache is given in bytes."""
        if self.free_bytes >= self.requested_bytes:
            return None
        return Problem(
            where="--gpu-memory-utilization",
            what="vLLM does not start: free memory is less than it asks for",
            expected=f"at most {utilization_text(self.highest_utilization)}",
            found=f"{utilization_text(self.utilization)}, {gib(self.requested_bytes)} GiB of {gib(self.free_bytes)} "
            f"GiB free",
        )

    @property
    def allowance(self) -> Allowance:
        """What the process may hold; all of it comes off one pool."""
        whole = self.cache_bytes is not None
        pool = self.free_bytes if whole else min(self.requested_bytes, self.free_bytes)
        flag = f"beyond --gpu-memory-utilization {utilization_text(self.utilization)}"
        kept = (
            held("budget.baseline", self.baseline_bytes, "total less free at vLLM's first snapshot"),
            held("budget.unrequested", self.free_bytes - pool, flag),
        )
        return Allowance(pool_bytes=pool, held_back=kept, refusal=self.refusal)

    def kv_bytes(self, profiled: Profiled, release: Release | None = None) -> int:
        """Return what is left for the cache; negative where the model does not fit.

        Args:
            profiled: What the profile run finds.
            release: Major and minor; up to 0.20 the graphs come on top, and so they do not come off here.
        """
        if self.cache_bytes is not None:
            return self.cache_bytes - self.multimodal_bytes
        graphs = profiled.graph_estimate_bytes if release is None or release >= GRAPHS_COUNTED else 0
        taken = profiled.consumed_bytes + profiled.transient_bytes + graphs + self.multimodal_bytes
        return self.requested_bytes - taken


def floor_utilization(value: Fraction) -> Fraction:
    """Return a fraction of a GPU rounded down to the four digits that are passed on."""
    scale = 10**UTILIZATION_DIGITS
    return Fraction(value.numerator * scale // value.denominator, scale)


def utilization_text(value: Fraction) -> str:
    """Return a fraction of a GPU as a flag takes it: ``0.92``, ``0.9417``; rounded down."""
    digits = floor_utilization(value) * 10**UTILIZATION_DIGITS
    whole, rest = divmod(digits.numerator, 10**UTILIZATION_DIGITS)
    return f"{whole}.{rest:0{UTILIZATION_DIGITS}d}".rstrip("0").removesuffix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmUse:
    """How vLLM is run, as far as its defaults depend on it.

    Attributes:
        offline: As a library (``LLM``) and not as a server.
        throughput: ``--performance-mode throughput``.
        chunked_prefill: A prompt may take several steps.
    """

    offline: bool = False
    throughput: bool = False
    chunked_prefill: bool = True


def vllm_defaults(
    total_bytes: int | None, where: GpuClass | None, use: VllmUse | None = None, *,
    max_seqs: int | None = None, context_tokens: int,
) -> tuple[int, int]:  # fmt: skip
    """Return ``max_num_batched_tokens``, which nobody stated, and ``max_num_seqs``.

    Args:
        total_bytes: Total of the GPU; ``None`` where it is not known, which gives the smallest.
        where: Its class.
        use: How the engine is run; by default as a server.
        max_seqs: Sequences, where they are stated.
        context_tokens: Longest context.

    Source:
        vLLM 0.32.0 ``engine/arg_utils.py`` get_batch_defaults and what follows it.
    """
    use = VllmUse() if use is None else use
    tokens, seqs = vllm_limits(total_bytes, where)
    if use.offline:
        tokens = LARGE_OFFLINE_TOKENS if seqs == LARGE_SEQS else OFFLINE_TOKENS
    factor = 2 if use.throughput else 1
    tokens, seqs = tokens * factor, seqs * factor if max_seqs is None else max_seqs
    if not use.chunked_prefill:
        tokens = max(tokens, context_tokens)
    return min(tokens, seqs * context_tokens), seqs


def least_free_rank(free_bytes: Sequence[int]) -> int:
    """Return the rank with the least free memory, the first of several: it decides for all.

    Raises:
        ValueError: There is no rank.
    """
    return min(range(len(free_bytes)), key=free_bytes.__getitem__)


def held(component: str, nbytes: int, source: str) -> Term:
    """Return a part of a GPU that is held back."""
    return Term(component=component, nbytes=nbytes, bound_nbytes=nbytes, basis="exact", source=source)
