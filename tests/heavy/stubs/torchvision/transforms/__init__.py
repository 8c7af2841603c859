"""Names of torchvision.transforms."""

from enum import Enum


class InterpolationMode(Enum):
    """How an image would be resized, were there one."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
