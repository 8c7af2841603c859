"""What a server is told when it is started."""

from __future__ import annotations

from msgspec import Struct

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Settings(Struct, frozen=True, kw_only=True):
    """What a server may do; its workers are told the same.

    Attributes:
        directories: Where checkpoints may be read, as they were typed.
        hosts: Names it answers to, without a port.
        hub: Whether repositories of the hub may be read.
        workers: Processes that plan.
        waiting: Requests that may wait for a worker.
        seconds: After which a request is cut off, and its worker with it.
        body_bytes: Longest body.
        memory_bytes: Address space of a worker.
    """

    directories: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOOPBACK
    hub: bool = False
    workers: int = 2
    waiting: int = 64
    seconds: float = 20.0
    body_bytes: int = 16 << 20
    memory_bytes: int = 4 << 30
