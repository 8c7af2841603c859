"""A chain of certificates: from the one that signed to an authority that is trusted.

As the stock verifier does, a chain is judged at the moment its first certificate became valid: nothing in a bundle
without Sigstore says when it was signed. Unlike there, every certificate must be part of the way to the authority, and
stands once. Equal bundles are not the only ones that verify: an elliptic curve signature has two forms, both are taken.

Source:
    model-signing 1.1.1 ``sign_certificate.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from tonnage.errors import Problem, TonnageError
from tonnage.export.certificate_errors import CERTIFICATE_ERRORS
from tonnage.export.keys import check_public_key

_USE = "key usage digitalSignature, or extended key usage codeSigning"
_NO_USE = "certificate may not be used to sign"
_ERRORS: tuple[type[Exception], ...] = (*CERTIFICATE_ERRORS, crypto.Error)


def signing_key(
    chain: Sequence[bytes], anchors: Sequence[x509.Certificate], *, where: str, kind: type[TonnageError]
) -> tuple[ec.EllipticCurvePublicKey, str]:
    """Return the key of the certificate that signed, and its subject.

    Args:
        chain: Certificates in DER form; the first signed, each is issued by the next.
        anchors: Certificates of trusted authorities.
        where: The chain was found.
        kind: Of refusals.

    Raises:
        TonnageError: As ``kind``: the chain is malformed, does not end at an authority, or may not sign.
    """
    with _refused(where, kind):
        certificates = [x509.load_der_x509_certificate(one) for one in chain]
        verified = _verified(certificates, anchors, where, kind)
        if not set(chain) <= {one.to_cryptography().public_bytes(Encoding.DER) for one in verified}:
            raise kind(Problem(where=where, what="a certificate that is no part of the way to a trusted one"))
        if not _may_sign(certificates[0]):
            raise kind(Problem(where=where, what=_NO_USE, expected=_USE))
        key = check_public_key(certificates[0].public_key(), where=where, kind=kind)
        return key, certificates[0].subject.rfc4514_string()


def check_chain(
    certificates: Sequence[x509.Certificate], key: ec.EllipticCurvePublicKey, *, where: str, kind: type[TonnageError]
) -> None:
    """Refuse to sign with a certificate that nobody would accept: of another key, not to sign with, or out of order.

    Args:
        certificates: The first is that of the key, each is issued by the next.
        key: To sign with.
        where: The certificate is from.
        kind: Of refusals.

    Raises:
        TonnageError: As ``kind``.
    """
    with _refused(where, kind):
        if check_public_key(certificates[0].public_key(), where=where, kind=kind) != key:
            raise kind(Problem(where=where, what="certificate of another key"))
        if not _may_sign(certificates[0]):
            raise kind(Problem(where=where, what=_NO_USE, expected=_USE))
        for below, above in pairwise(certificates):
            try:
                below.verify_directly_issued_by(above)
            except (InvalidSignature, TypeError, ValueError) as error:
                expected, found = below.issuer.rfc4514_string(), above.subject.rfc4514_string()
                what = f"{below.subject.rfc4514_string()} is not issued by the next certificate of the chain"
                raise kind(Problem(where=where, what=what, expected=expected, found=found)) from error


def _verified(
    certificates: Sequence[x509.Certificate],
    anchors: Sequence[x509.Certificate],
    where: str,
    kind: type[TonnageError],
) -> list[crypto.X509]:
    """Return the certificates from the first to a trusted one, verified."""
    store = crypto.X509Store()
    for anchor in anchors:
        store.add_cert(crypto.X509.from_cryptography(anchor))
    store.set_time(certificates[0].not_valid_before_utc)
    first, *others = (crypto.X509.from_cryptography(one) for one in certificates)
    try:
        return crypto.X509StoreContext(store, first, others).get_verified_chain()
    except crypto.X509StoreContextError as error:
        raise kind(Problem(where=where, what="certificate is not trusted", found=str(error))) from error


def _may_sign(certificate: x509.Certificate) -> bool:
    for extension in certificate.extensions:
        usage = extension.value
        if isinstance(usage, x509.KeyUsage) and usage.digital_signature:
            return True
        if isinstance(usage, x509.ExtendedKeyUsage) and ExtendedKeyUsageOID.CODE_SIGNING in usage:
            return True
    return False


@contextmanager
def _refused(where: str, kind: type[TonnageError]) -> Iterator[None]:
    """Turn what a library says of a certificate into a refusal; its warnings about old encodings are left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except _ERRORS as error:
        raise kind(Problem(where=where, what="not a certificate", found=str(error))) from error
