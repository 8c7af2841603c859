"""What went over the network: counted where it is received, read where it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass(slots=True, eq=False)
class Transfer:
    """Counts of one source, for the process that opened it.

    Attributes:
        nbytes: Of the bodies of all answers, also of those that were refused.
        requests: Sent, also those that were sent again.
        kept_bytes: That were on this machine from an earlier time.
        expected_bytes: Of headers to come or come by now, once their lengths are known.
    """

    nbytes: int = 0
    requests: int = 0
    kept_bytes: int = 0
    expected_bytes: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, *, nbytes: int = 0, requests: int = 0, kept_bytes: int = 0) -> None:
        """Count more; many threads do."""
        with self._lock:
            self.nbytes += nbytes
            self.requests += requests
            self.kept_bytes += kept_bytes

    def expect(self, nbytes: int) -> None:
        """Note how much is to come."""
        with self._lock:
            self.expected_bytes += nbytes
