"""Lines of TabbyAPI and of exllamav3's loader, 1.6.

They print settings, and with verbose loading what each device had left; there is no ledger of memory.

Source: exllamav3/model/model_ls.py and TabbyAPI's exllamav3 backend.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tonnage.observe.figures import Reading
from tonnage.observe.lines import EngineLog, figure, pattern, reading, refusal


def _device(match: re.Match[str]) -> tuple[Reading, ...]:
    """Return what one device needed and kept, with the device where the line names it."""
    device = None if match["device"] is None else int(match["device"])
    return tuple(replace(reading(name, match[name]), device=device) for name in ("transient", "free_after_load"))


_PATTERNS = (
    pattern("Using configured cache_size", rf"Using configured cache_size: {figure('cache_size_tokens')} tokens"),
    pattern("Using configured max_seq_len", rf"Using configured max_seq_len: {figure('max_model_len')} tokens"),
    pattern(
        "largest measured transient",
        r"(?:(?:cuda:|[Dd]evice |GPU )(?P<device>\d{1,3})[^\d]{0,40})?"
        rf"largest measured transient {figure('transient')} MiB, {figure('free_after_load')} MiB free after load",
        _device,
    ),
    refusal("nsufficient VRAM in split", "the split has too little memory for model and cache"),
)

_MARKERS = ("Using configured", "largest measured transient", "nsufficient VRAM in split")
"""Short texts of which every line above holds at least one."""

EXLLAMAV3 = EngineLog(
    name="exllamav3",
    patterns=_PATTERNS,
    markers=_MARKERS,
    starts=(),
    again=("Using configured cache_size", ("cache_size_tokens", "free_after_load", "refusal")),
    ready=(),
)
"""TabbyAPI: no line begins a start; the size of the cache, said again, does."""
