"""How the next-token distributions of two models differ, as values: what ``end_to_end`` measures. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two models at the same positions of the same tokens.

    Attributes:
        positions: Next-token distributions compared.
        agreeing: Those with the same most likely token.
        kl_sum: Sum of the Kullback-Leibler divergences of the second from the first, in nats.
        kl_largest: The largest of them.
        nll: Sums of the negative log-likelihoods, in nats, that each model gives the tokens that follow.
    """

    positions: int = 0
    agreeing: int = 0
    kl_sum: float = 0.0
    kl_largest: float = 0.0
    nll: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Agreement) -> Agreement:
        """Return the figures of both together."""
        return Agreement(
            positions=self.positions + other.positions,
            agreeing=self.agreeing + other.agreeing,
            kl_sum=self.kl_sum + other.kl_sum,
            kl_largest=max(self.kl_largest, other.kl_largest),
            nll=(self.nll[0] + other.nll[0], self.nll[1] + other.nll[1]),
        )

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token."""
        return self.agreeing / self.positions

    @property
    def kl_mean(self) -> float:
        """Mean divergence, in nats."""
        return self.kl_sum / self.positions

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexity of both: e to the mean negative log-likelihood."""
        return exp(self.nll[0] / self.positions), exp(self.nll[1] / self.positions)

    def document(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "positions": self.positions,
            "top1_agreement": self.top1,
            "kl_mean": self.kl_mean,
            "kl_largest": self.kl_largest,
            "perplexity_a": self.perplexities[0],
            "perplexity_b": self.perplexities[1],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """What both models make of a text and of prompts.

    Attributes:
        text: At every token of the text but the first of each window.
        text_title: Which text.
        text_sha256: Of its bytes.
        prompts: At every token of the first model's greedy answers.
        answers: For every prompt, whether both would go on with the same token all the way.
        ignored: Names of tensors the model's class has no use for, of both.
        versions: Of what computed it, by name.
    """

    text: Agreement
    text_title: str
    text_sha256: str
    prompts: Agreement
    answers: tuple[bool, ...]
    ignored: tuple[tuple[str, ...], tuple[str, ...]]
    versions: dict[str, str]

    def document(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "text": {"title": self.text_title, "sha256": self.text_sha256, **self.text.document()},
            "prompts": {"count": len(self.answers), "same_answers": sum(self.answers), **self.prompts.document()},
            "ignored_a": list(self.ignored[0]),
            "ignored_b": list(self.ignored[1]),
            "weights": "BF16",
            "computed_in": "F32",
            "device": "cpu",
            "versions": self.versions,
        }
