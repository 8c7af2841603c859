"""The version of the package, which every written artefact names."""

from __future__ import annotations

__version__ = "0.1.0"
