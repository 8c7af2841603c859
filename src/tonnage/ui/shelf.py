"""What a worker keeps between requests: checkpoints that were opened, placements, and what of their ranks is at hand.

A change of context, concurrency, supply or KV dtype plans again with what is here; nothing kept changes an answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from tonnage.api import (
    Checkpoint,
    PlanRequest,
    checkpoint_from_config,
    open_checkpoint,
    place_checkpoint,
    plan_checkpoint,
)
from tonnage.checkpoint.io import JSON_LIMIT_BYTES
from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import CheckpointError, ConfigError, Problem, RequestError, one_line
from tonnage.fit import Planner
from tonnage.placement import Placement
from tonnage.plan import Plan
from tonnage.ui.bodies import Address
from tonnage.ui.checkpoints import served_path, state_of
from tonnage.ui.settings import Settings

CHECKPOINTS_KEPT = 256
RANKS_KEPT = 8192
"""Of placements, whose size is that of their tensor-parallel ranks: about 6 KiB each."""

Value = TypeVar("Value")
Key = tuple[Hashable, ...]


class Lru(Generic[Value]):
    """The values used last, as many as weigh no more than is kept."""

    def __init__(self, most: int) -> None:
        """Keep so much."""
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[int, Value]] = OrderedDict()
        self.weight = 0

    def get(self, key: Hashable, make: Callable[[], Value], weight: int = 1) -> Value:
        """Return the value of a key, made if it is not at hand; what making raises is not kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        value = make()
        self._kept[key] = weight, value
        self.weight += weight
        while self.weight > self._most and len(self._kept) > 1:
            self.weight -= self._kept.popitem(last=False)[1][0]
        return value

    def __len__(self) -> int:
        return len(self._kept)


class Shelf:
    """Opens checkpoints and plans them."""

    def __init__(self, settings: Settings) -> None:
        """Take what may be opened."""
        self.settings = settings
        self._checkpoints: Lru[Checkpoint] = Lru(CHECKPOINTS_KEPT)
        self._placements: Lru[Placement] = Lru(RANKS_KEPT)
        self._planners: Lru[Planner] = Lru(RANKS_KEPT)

    def open(self, address: Address, draft_method: str = "") -> tuple[Key, Checkpoint]:
        """Return the checkpoint at an address, and what it is kept by.

        Raises:
            RequestError: Not exactly one of path, hub and config is given.
            NotServedError: The path is not served.
            TonnageError: The checkpoint is wrong; every problem is named.
        """
        given = [name for name in ("path", "hub", "config") if getattr(address, name) is not UNSET]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                Problem(where="checkpoint", what="not one address", expected="path, hub or config", found=found)
            )
        if address.hub is not UNSET:
            return self._open_hub(address.hub, draft_method)
        if address.path is not UNSET:
            path = served_path(address.path, self.settings.directories)
            key: Key = ("path", address.path, draft_method, state_of(path))
            return key, self._checkpoints.get(key, lambda: self._open_path(path, key))
        assert address.config is not UNSET
        name = "config" if address.name is UNSET else one_line(address.name)
        return self._open_config(address.config, name, draft_method)

    def _open_path(self, path: Path, key: Key) -> Checkpoint:
        """Open what is served, and look again whether it was that which was read.

        Raises:
            CheckpointError: It was changed meanwhile.
            NotServedError: The same, and now it leads elsewhere.
        """
        _, text, draft_method, state = key
        checkpoint = open_checkpoint(path, draft_method=str(draft_method))
        if served_path(str(text), self.settings.directories) != path or state != state_of(path):
            raise CheckpointError(Problem(where=str(text), what="changed while it was read", expected="another try"))
        return checkpoint

    def _open_config(self, config: dict[str, Any] | str, name: str, draft_method: str) -> tuple[Key, Checkpoint]:
        """Open a config that was sent: as the text of its file, or as what it holds."""
        raw = config.encode("utf-8", "surrogatepass") if isinstance(config, str) else msgspec.json.encode(config)
        if len(raw) > JSON_LIMIT_BYTES:
            expected, found = f"at most {JSON_LIMIT_BYTES} bytes", f"{len(raw)} bytes"
            raise ConfigError(Problem(where=name, what="too large", expected=expected, found=found))
        digest = hashlib.sha256(raw).hexdigest()
        key: Key = ("config", digest, name, draft_method)

        def opened() -> Checkpoint:
            text = isinstance(config, str)
            fields = parse_object(raw, where=name, kind=ConfigError, constants=True) if text else config
            assert isinstance(fields, dict)
            return checkpoint_from_config(fields, name=name, digest=digest, draft_method=draft_method)

        return key, self._checkpoints.get(key, opened)

    def _open_hub(self, name: str, draft_method: str) -> tuple[Key, Checkpoint]:
        """Open a repository of the hub, where that is allowed.

        Raises:
            CheckpointError: It is not.
        """
        if not self.settings.hub:
            raise CheckpointError(Problem(where=name, what="hub sources are not enabled", expected="tonnage ui --hub"))
        key: Key = ("hub", name, draft_method)
        return key, self._checkpoints.get(key, lambda: open_checkpoint(f"hf:{name}", draft_method=draft_method))

    def plan(self, key: Key, checkpoint: Checkpoint, request: PlanRequest) -> Plan:
        """Return the plan of a checkpoint.

        Raises:
            TonnageError: As :func:`tonnage.api.plan_checkpoint`.
        """
        if request.estimator == "credit" or not request.serves:
            return plan_checkpoint(checkpoint, request)
        return self.planner(key, checkpoint, request).plan_request(request)

    def planner(self, key: Key, checkpoint: Checkpoint, request: PlanRequest) -> Planner:
        """Return what plans a checkpoint shared like this.

        Raises:
            TonnageError: It cannot be shared so.
        """
        placed: Key = (key, request.topology, request.engine, request.convert)
        placement = self.placement(key, checkpoint, request)
        gpu = None if request.gpu is None else request.gpu.slug
        return self._planners.get(
            (placed, gpu, request.version),
            lambda: Planner(checkpoint=checkpoint, placement=placement, request=request),
            request.tp,
        )

    def placement(self, key: Key, checkpoint: Checkpoint, request: PlanRequest) -> Placement:
        """Return where the weights go.

        Raises:
            PlacementError: The topology cannot work for these tensors.
        """
        placed: Key = (key, request.topology, request.engine, request.convert)
        return self._placements.get(placed, lambda: place_checkpoint(checkpoint, request), request.tp)
