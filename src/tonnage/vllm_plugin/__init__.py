"""The plug-in vLLM finds by itself: ``--load-format tonnage`` reads one rank's files as ``prepare`` wrote them.

vLLM and torch are imported nowhere else in this program.
"""

from __future__ import annotations

LOAD_FORMAT = "tonnage"


def register() -> None:
    """Tell vLLM of the load format, and on a CPU of MXFP8 by emulation; as often as vLLM asks."""
    from tonnage.vllm_plugin.emulation import register_emulation  # noqa: PLC0415 - vLLM is there only when it calls
    from tonnage.vllm_plugin.loader import register_loader  # noqa: PLC0415 - same

    register_loader(LOAD_FORMAT)
    register_emulation()
