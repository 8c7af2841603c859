"""Names of torchvision.transforms.v2."""
