"""What the libraries raise for bytes that make no certificate, or one that makes no sense: they have no common base."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

CERTIFICATE_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,  # a name of a type its field cannot have
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
