"""Names of torchvision.io; what would read an image is not there."""

ImageReadMode = decode_image = None
