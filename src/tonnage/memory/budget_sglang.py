"""SGLang's budget: a fraction of the memory that is free before weights is for weights and cache, the rest is slack.

Nothing is measured at start: graphs, attention workspaces and activations must fit into the slack, or the engine fails
later. Where no fraction is stated, the engine derives one from the size of the card, the prefill chunk and the largest
decode graph.

Source:
    SGLang 0.5.23 ``srt/arg_groups/memory_hook.py``, ``srt/model_executor/model_runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.errors import Problem
from tonnage.memory.budget import UTILIZATION_DIGITS, Allowance, held, utilization_text
from tonnage.memory.runtime_sglang import prefill_sizes, sglang_limits
from tonnage.units import MIB, gib

if TYPE_CHECKING:
    from tonnage.memory.term import Term

EMBEDDING_CACHE_BYTES = 100 * MIB
"""Reserve of a multimodal model: its embedding cache."""
FEATURE_TRANSPORT_BYTES = 1024 * MIB
"""And where features travel over CUDA IPC."""
META_MIB = 512
LEAST_ACTIVATION_TOKENS = 2048
MIB_PER_RANK = 128
LARGE_CARD_MIB, LARGE_CARD_RESERVE_MIB = 60 * 1024, 10 * 1024
LARGE_BATCH = 300
LATENT_PREFILL_MIB = 1536
PREFILL_SIZE_MIB = 8
DEEPEP_MIB, DEEPEP_PREFILL_MIB = 2048, 1024
POST_CAPTURE_MIB, POST_CAPTURE_VISION_MIB = 1536, 8 * 1024
BALANCE = Fraction(9, 10)
THOUSAND = 1000
VISION_LAYERS, VISION_HIDDEN = 24, 1024
"""The vision tower a factor of 0.95 stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangUse:
    """How SGLang is run, as far as its default fraction depends on it.

    Attributes:
        driver_total_mib: Smallest total the driver reports (nvidia-smi), MiB.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        prefill_tokens: ``--chunked-prefill-size``, where it is stated.
        decode_batch: ``--cuda-graph-max-bs-decode``, where it is stated.
        max_running: ``--max-running-requests``, where it is stated.
        attention_dp: ``--attn-dp-size``; 1 without DP attention.
        latent: MLA.
        decode_graphs: Decode graphs are captured.
        prefill_graphs: Prefill graphs are captured.
        deepep: DeepEP moves the tokens of experts.
        breakable_prefill: Prefill graphs are of the breakable kind.
        post_capture: The cache is sized after graphs are captured (an environment switch, off by default).
        vision: Layers and hidden size of the vision tower; ``None`` for text.
    """

    driver_total_mib: int
    tp: int = 1
    pp: int = 1
    prefill_tokens: int | None = None
    decode_batch: int | None = None
    max_running: int | None = None
    attention_dp: int = 1
    latent: bool = False
    decode_graphs: bool = True
    prefill_graphs: bool = True
    deepep: bool = False
    breakable_prefill: bool = False
    post_capture: bool = False
    vision: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse what no deployment is."""
        sizes = (self.driver_total_mib, self.tp, self.pp, self.attention_dp, self.tokens, self.batch)
        if min(sizes) < 1 or (self.vision is not None and min(self.vision) < 1):
            raise ValueError(f"out of range: {self}")

    @property
    def tokens(self) -> int:
        """Tokens of a prefill chunk, the engine's default where nobody states them."""
        return self._limits[0] if self.prefill_tokens is None else self.prefill_tokens

    @property
    def batch(self) -> int:
        """Largest decode batch with a graph, the engine's default where nobody states it; no more than can run."""
        batch = self._limits[1] if self.decode_batch is None else self.decode_batch
        return batch if self.max_running is None else min(batch, self.max_running)

    @property
    def _limits(self) -> tuple[int, int]:
        return sglang_limits(self.driver_total_mib * MIB, self.tp)


def default_reserve(use: SglangUse) -> tuple[Term, ...]:
    """Return what the default fraction leaves outside the pool, each part with its reason; fractions of a byte up."""
    ranks = use.tp * use.pp
    slack = (f"{ranks} ranks, {MIB_PER_RANK} MiB each", Fraction(MIB_PER_RANK * ranks))
    if use.post_capture:
        parts = {"floor": ("after capture", Fraction(POST_CAPTURE_MIB)), "ranks": slack}
        return _terms(parts)
    activation = Fraction(3 * max(use.tokens, LEAST_ACTIVATION_TOKENS), 2)
    parts = {
        "meta": ("constants of backends", Fraction(META_MIB)),
        "activation": (f"1.5 MiB for each of {use.tokens} tokens, at least {LEAST_ACTIVATION_TOKENS}", activation),
        "ranks": slack,
        **_graph_parts(use),
    }
    counted = sum(mib for _, mib in parts.values())
    if use.driver_total_mib > LARGE_CARD_MIB and counted < LARGE_CARD_RESERVE_MIB:
        parts["floor"] = ("at least 10240 MiB on cards above 60 GiB", Fraction(LARGE_CARD_RESERVE_MIB) - counted)
    if use.deepep and use.decode_graphs:
        parts["all-to-all"] = ("DeepEP buffers of decode graphs", Fraction(DEEPEP_MIB))
    return _terms(parts)


def default_fraction(use: SglangUse) -> Fraction:
    """Return ``mem_fraction_static`` where nobody states it: three digits, for vision models times a factor.

    Half a thousandth is rounded up; the engine rounds what double precision makes of it.
    """
    reserve = sum(term.nbytes for term in default_reserve(use))
    total = use.driver_total_mib * MIB
    fraction = Fraction((2 * THOUSAND * (total - reserve) + total) // (2 * total), THOUSAND)
    if use.vision is None:
        return fraction
    if use.post_capture:
        return fraction - Fraction(POST_CAPTURE_VISION_MIB, use.driver_total_mib)
    return fraction * vision_factor(*use.vision)


def vision_factor(layers: int, hidden_size: int) -> Fraction:
    """Return what the default fraction is multiplied with for a vision tower: 0.76 for large ones to 0.9975."""
    ratio = Fraction(layers * hidden_size**2, VISION_LAYERS * VISION_HIDDEN**2)
    factor = 1 - (ratio - 1) * Fraction(1, 10)
    return Fraction(95, 100) * max(Fraction(8, 10), min(Fraction(105, 100), factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangBudget:
    """SGLang's budget, one for all ranks.

    Attributes:
        total_bytes: Total the allocator sees on the rank with the least free memory.
        free_bytes: The least memory free on any rank after communicators are set up and before weights.
        fraction: ``--mem-fraction-static``.
        multimodal_bytes: Off the cache for multimodal models.
    """

    total_bytes: int
    free_bytes: int
    fraction: Fraction
    multimodal_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what no GPU is and no flag takes."""
        if not 0 <= self.free_bytes <= self.total_bytes or not 0 < self.fraction < 1 or self.multimodal_bytes < 0:
            raise ValueError(f"{self.free_bytes} bytes free of {self.total_bytes}, fraction {self.fraction}")

    @property
    def slack_bytes(self) -> int:
        """What is left for graphs, workspaces and activations."""
        rest = self.free_bytes * (1 - self.fraction)
        return -(-rest.numerator // rest.denominator)

    @property
    def allowance(self) -> Allowance:
        """Pool for weights, draft and caches; slack for the rest."""
        static = self.free_bytes - self.slack_bytes
        reserve = min(self.multimodal_bytes, static)
        kept = (
            held("budget.baseline", self.total_bytes - self.free_bytes, "total less free before weights"),
            held("budget.multimodal", reserve, "embedding cache and feature transport of a multimodal model"),
        )
        return Allowance(pool_bytes=static - reserve, slack_bytes=self.slack_bytes, held_back=kept)

    def kv_bytes(self, after_weights_bytes: int) -> int:
        """Return what is left for caches and recurrent states; 0 or less where the engine does not start.

        Args:
            after_weights_bytes: The least memory free on any rank with the weights of target and draft loaded.
        """
        return after_weights_bytes - self.slack_bytes - self.multimodal_bytes

    def smallest_fraction(self, after_weights_bytes: int) -> Fraction:
        """Return the smallest fraction, to four digits, that leaves a cache of one byte or more."""
        least = 1 - Fraction(after_weights_bytes - self.multimodal_bytes - 1, self.free_bytes)
        scale = 10**UTILIZATION_DIGITS
        return Fraction(-(-least.numerator * scale // least.denominator), scale)

    def refusal(self, after_weights_bytes: int) -> Problem | None:
        """Return why there is no cache, or ``None``."""
        if self.kv_bytes(after_weights_bytes) > 0:
            return None
        return Problem(
            where="--mem-fraction-static",
            what="SGLang does not start: weights leave nothing for the cache",
            expected=f"at least {utilization_text(self.smallest_fraction(after_weights_bytes))}",
            found=utilization_text(self.fraction),
        )


def unbalanced(free_bytes: tuple[int, ...]) -> Problem | None:
    """Return why SGLang refuses ranks with so much free memory, or ``None``: the least is under 0.9 of another's."""
    least, most = min(free_bytes), max(free_bytes)
    if least >= most * BALANCE:
        return None
    return Problem(
        where="free memory of the ranks",
        what="SGLang does not start: unbalanced GPUs",
        expected="the least at least 0.9 of the most",
        found=f"{gib(least)} and {gib(most)} GiB",
    )


def _graph_parts(use: SglangUse) -> dict[str, tuple[str, Fraction]]:
    parts: dict[str, tuple[str, Fraction]] = {}
    if use.decode_graphs:
        parts["decode-graphs"] = (f"2 MiB for each of {use.batch} sequences", Fraction(2 * use.batch))
    if use.attention_dp > 1:
        per_sequence = Fraction(9, 2) if use.batch > LARGE_BATCH else Fraction(3)
        padding = use.batch * use.attention_dp * per_sequence
        parts["attention-dp"] = (f"padding of {use.attention_dp} attention replicas", padding)
    if use.prefill_graphs:
        sizes = len(prefill_sizes(use.tokens))
        plain = (f"{PREFILL_SIZE_MIB} MiB for each of {sizes} sizes", Fraction(PREFILL_SIZE_MIB * sizes))
        parts["prefill-graphs"] = ("MLA", Fraction(LATENT_PREFILL_MIB)) if use.latent else plain
        if use.breakable_prefill and use.deepep:
            parts["prefill-all-to-all"] = ("DeepEP in breakable graphs", Fraction(DEEPEP_PREFILL_MIB))
    return parts


def _terms(parts: dict[str, tuple[str, Fraction]]) -> tuple[Term, ...]:
    return tuple(
        held(f"budget.{name}", -(-mib.numerator * MIB // mib.denominator), f"SGLang 0.5.23: {why}")
        for name, (why, mib) in parts.items()
    )
