"""How long a server is waited for, how often it is asked, and whether it is asked at all."""

from __future__ import annotations

import os
from dataclasses import dataclass

OFFLINE = ("TONNAGE_OFFLINE", "HF_HUB_OFFLINE")
"""Environment variables that keep everything on this machine."""

ALLOW_HTTP = "TONNAGE_ALLOW_HTTP"
"""Environment variable that lets http lead to other machines."""

_TRUE = frozenset({"1", "on", "true", "yes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what a server can cost.

    Attributes:
        offline: No server is asked; only what is on this machine counts.
        attempts: How often one request is sent, at most.
        connect_seconds: For a connection, and for any silence within an answer.
        answer_seconds: For a whole answer, beside the time that its bytes take at ``slowest``.
        slowest: Bytes per second that an answer must come at, at least.
        total_seconds: For one request with everything that is sent again, its pauses included.
        planning_seconds: For all headers of a checkpoint.
        pause_seconds: Before the second attempt, doubled each time, unless the server says how long.
        parallel: Requests at once.
    """

    offline: bool = False
    attempts: int = 5
    connect_seconds: float = 20
    answer_seconds: float = 30
    slowest: int = 64 << 10
    total_seconds: float = 180
    planning_seconds: float = 3600
    pause_seconds: float = 0.5
    parallel: int = 16

    @classmethod
    def of_environment(cls) -> Limits:
        """Return the usual limits, offline if an environment variable says so."""
        return cls(offline=any(map(is_set, OFFLINE)))


def is_set(name: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(name, "").lower() in _TRUE
