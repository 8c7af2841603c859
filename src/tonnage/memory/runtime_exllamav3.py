"""What exllamav3 holds beside weights and cache: it test-runs every layer while it loads, and keeps memory free.

Source:
    exllamav3 1.6.5 ``model/model_ls.py``: a device is closed 256 MiB above its largest measured transient, and where
    what is allocated and that transient leave less than the reserve. ``model/model.py``: the reserve is half a GiB on
    every device beyond the list that is given; TabbyAPI gives one for the first (96 MiB).
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
"""Kept on the one device of a model, more than TabbyAPI's reserve."""
RESERVE_BYTES = 512 * MIB
"""Kept on devices that share a model."""
DEFAULT_LIMITS = 2048, 4
"""Chunk and batch TabbyAPI takes where nobody states them."""


def exllamav3_terms(
    shape: ModelShape, serving: Serving, deployment: Deployment, records: Sequence[TermRecord]
) -> tuple[Term, ...]:
    """Return exllamav3's terms: context, what it keeps free, and the transient of a prefill chunk.

    Logits are made for the last token of a chunk and for one token of every sequence; there are no step graphs of the
    whole model. Half-precision copies of a quantised weight are made for long chunks, one weight at a time.
    """
    context = calibrated(
        "runtime.context", (CONTEXT_BYTES, CONTEXT_BYTES), case_of("context", deployment, shape.kind), records,
        rule="driver context of one process per device",
    )  # fmt: skip
    alone = deployment.topology.world_size == 1
    why = (
        "256 MiB free beyond its largest transient (EXL3_AUTOSPLIT_MARGIN_MB)"
        if alone
        else "half a GiB of every device"
    )
    kept = Term(
        component="runtime.slack", nbytes=0, bound_nbytes=AUTOSPLIT_MARGIN_BYTES if alone else RESERVE_BYTES,
        basis="modelled", source=f"exllamav3 1.6.5 keeps {why}",
    )  # fmt: skip
    peak = activation_peak(shape, replace(serving, draft_tokens=0))
    unpacked = shape.module_elements * shape.dtype_bytes if shape.repacked else 0
    activation = calibrated(
        "workspace.activation", (peak.nbytes, peak.most + unpacked), case_of("activation", deployment, shape.kind),
        records, transient=True, rule=f"chunk of {serving.batched_tokens} tokens: {peak.binding}",
    )  # fmt: skip
    return context, kept, activation
