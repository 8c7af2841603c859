"""What exllamav3 holds beside weights and cache: it test-runs every layer while it loads, and keeps a margin.

Source:
    exllamav3 1.6.5 ``model/model.py`` autosplit: a device is closed 256 MiB above its largest measured transient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tonnage.memory.runtime_rules import CONTEXT_BYTES
from tonnage.memory.term import Term
from tonnage.memory.terms import calibrated, case_of
from tonnage.memory.workspace import activation_peak
from tonnage.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.memory.terms import TermRecord
    from tonnage.memory.workspace_shape import Deployment, ModelShape, Serving

AUTOSPLIT_MARGIN_BYTES = 256 * MIB
DEFAULT_LIMITS = 2048, 4
"""Chunk and batch TabbyAPI takes where nobody states them."""


def exllamav3_terms(
    shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> tuple[Term, ...]:
    """Return exllamav3's terms: context, margin, and the transient of a prefill chunk.

    Logits are made for the last token of a chunk and for one token of every sequence; there are no step graphs of the
    whole model. Half-precision copies of a quantised weight are made for long chunks, one weight at a time.
    """
    context = calibrated(
        "runtime.context", (CONTEXT_BYTES, CONTEXT_BYTES), case_of("context", deployment, shape.kind), records,
        rule="driver context of one process per device",
    )  # fmt: skip
    margin = Term(
        component="runtime.slack", nbytes=0, bound_nbytes=AUTOSPLIT_MARGIN_BYTES, basis="modelled",
        source="exllamav3 1.6.5 keeps 256 MiB free beyond its largest transient (EXL3_AUTOSPLIT_MARGIN_MB)",
    )  # fmt: skip
    peak = activation_peak(shape, replace(serving, draft_tokens=0))
    unpacked = shape.module_elements * shape.dtype_bytes if shape.repacked else 0
    activation = calibrated(
        "workspace.activation", (peak.nbytes, peak.most + unpacked), case_of("activation", deployment, shape.kind),
        records, transient=True, rule=f"chunk of {serving.batched_tokens} tokens: {peak.binding}",
    )  # fmt: skip
    return context, margin, activation
