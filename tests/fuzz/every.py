"""All targets by name."""

from __future__ import annotations

from fuzz import checkpoints, documents, elsewhere, served, signatures, texts
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (checkpoints, documents, elsewhere, served, signatures, texts)
    for target in module.TARGETS
}
