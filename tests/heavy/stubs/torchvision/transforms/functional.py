"""Names of torchvision.transforms.functional."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]
pil_to_tensor = None
