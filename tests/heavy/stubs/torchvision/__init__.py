"""Stands in for torchvision, which vision models import and sizing never runs: the names that are read on import."""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0"
