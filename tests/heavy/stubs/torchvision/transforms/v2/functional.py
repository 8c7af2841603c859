"""Names of torchvision.transforms.v2.functional."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
