"""All targets by name."""

from __future__ import annotations

from fuzz import checkpoints, documents, signatures, texts
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for module in (checkpoints, documents, signatures, texts) for target in module.TARGETS
}
