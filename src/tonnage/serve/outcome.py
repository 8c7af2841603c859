"""How serving ended, as an exit code, and what a measurement contradicts of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tonnage.observe.reader import Observation
    from tonnage.plan import Plan

End = Literal["checked", "stopped", "died", "late"]
CONTRADICTED = 5
UNUSABLE = 2
_SIGNALLED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it ended.

    Attributes:
        end: Measured and stopped as asked, stopped by the user, died by itself, or not ready in time.
        ready: Whether it ever served.
        signal: Which signal the user sent; 0 for none.
        contradicts: Whether a measurement is over its bound, or the engine refused for memory what the plan says fits.
    """

    end: End
    ready: bool
    signal: int = 0
    contradicts: bool = False

    @property
    def exit_code(self) -> int:
        """0 where it served and was ended by whoever started it, 5 where a measurement contradicts the plan."""
        if self.end in ("died", "late"):
            return CONTRADICTED if self.contradicts and not self.ready else UNUSABLE
        if not self.ready:
            return _SIGNALLED + self.signal
        return CONTRADICTED if self.contradicts else 0


def cache_shortfall(observation: Observation, plan: Plan) -> tuple[str, ...]:
    """Say that the engine's cache holds less than the profile is."""
    service = plan.ranks[plan.binding_rank].service
    said = observation.figures.get("kv_tokens")
    if service is None or service.cache is None or said is None or said.quantity is None:
        return ()
    measured, needed = said.quantity.nbytes, service.concurrency * service.context_tokens
    if measured >= needed:
        return ()
    requests = f"{service.concurrency} x {service.context_tokens:,} tokens"
    return (f"cache: {measured:,} tokens measured, the profile is {requests}",)
