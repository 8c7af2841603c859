"""Elliptic curve keys and certificates in PEM files, and what is signed with them: DSSE's pre-authentication encoding.

The curves and their hashes are those of OpenSSF model signing. A key file is the user's own: what is wrong with it is
unusable input, not a failed verification.

Source:
    https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md and model-signing 1.1.1 ``sign_ec_key.py``.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tonnage.checkpoint.io import read_bytes
from tonnage.errors import Problem, TonnageError
from tonnage.export.statement import PAYLOAD_TYPE

if TYPE_CHECKING:
    from cryptography import x509

KEY_LIMIT_BYTES = 4 << 20
_CURVES: dict[str, type[hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256,
    "secp384r1": hashes.SHA384,
    "secp521r1": hashes.SHA512,
}
_CURVE_NAMES = "P-256, P-384 or P-521"
_ENCRYPTED = b"ENCRYPTED"
"""What the text of an encrypted key holds: in its label (PKCS #8), or in a line below it (SEC 1)."""


class KeyFileError(TonnageError):
    """A file is not the key or the certificates it was given as."""


def load_private_key(path: Path, password: str | None) -> ec.EllipticCurvePrivateKey:
    """Return a private key.

    Args:
        path: PEM file: PKCS #8 or SEC 1.
        password: Of an encrypted key.

    Raises:
        KeyFileError: It is none, is encrypted and the password is missing or wrong, or is on another curve.
    """
    raw = read_key_file(path)
    try:
        key = serialization.load_pem_private_key(raw, None if password is None else password.encode())
    except TypeError as error:
        encrypted = _ENCRYPTED in raw
        given = "key is encrypted" if password is None else "key is encrypted, and the password given is empty"
        what = given if encrypted else "key is not encrypted, and a password was given"
        expected = "its password, in a variable: --password-env NAME" if encrypted else "no --password-env"
        raise KeyFileError(Problem(where=str(path), what=what, expected=expected)) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if password is not None and _ENCRYPTED in raw:
            what, expected = "wrong password, or a damaged key", "the password it was encrypted with"
            raise KeyFileError(Problem(where=str(path), what=what, expected=expected)) from error
        what = "not a private key"
        expected = f"an elliptic curve private key in PEM form ({_CURVE_NAMES})"
        raise KeyFileError(Problem(where=str(path), what=what, expected=expected, found=_kind(raw))) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _not_elliptic(str(path), key)
    _check_curve(str(path), key.curve)
    return key


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return a public key.

    Raises:
        KeyFileError: It is none, or is on another curve.
    """
    raw = read_key_file(path)
    try:
        key = serialization.load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        expected = f"an elliptic curve public key in PEM form ({_CURVE_NAMES})"
        raise KeyFileError(
            Problem(where=str(path), what="not a public key", expected=expected, found=_kind(raw))
        ) from error
    return check_public_key(key, where=str(path), kind=KeyFileError)


def load_certificates(path: Path) -> tuple[x509.Certificate, ...]:
    """Return the certificates of a file, in order; at least one.

    Raises:
        KeyFileError: There is none, or something in it is none.
    """
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415 - only for certificates, and slow

    from tonnage.export.certificate_errors import CERTIFICATE_ERRORS  # noqa: PLC0415 - same

    raw = read_key_file(path)
    try:
        with warnings.catch_warnings():  # about how old certificates are encoded
            warnings.simplefilter("ignore")
            return tuple(load_pem_x509_certificates(raw))
    except CERTIFICATE_ERRORS as error:
        expected = "certificates in PEM form"
        raise KeyFileError(
            Problem(where=str(path), what="not certificates", expected=expected, found=_kind(raw))
        ) from error


def check_public_key(key: object, *, where: str, kind: type[TonnageError]) -> ec.EllipticCurvePublicKey:
    """Return a public key that can have made a signature of ours.

    Raises:
        TonnageError: As ``kind``: it is no elliptic curve key, or is on another curve.
    """
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise _not_elliptic(where, key, kind)
    _check_curve(where, key.curve, kind)
    return key


def key_hint(key: ec.EllipticCurvePublicKey) -> str:
    """Return how a signature names its key: SHA-256 of the PEM text of the public key."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def sign_payload(key: ec.EllipticCurvePrivateKey, payload: bytes) -> bytes:
    """Return the DER signature of a payload; RFC 6979, so that a payload has one signature per key."""
    algorithm = _CURVES[key.curve.name]()
    return key.sign(_encoding(payload), ec.ECDSA(algorithm, deterministic_signing=True))


def is_signed(key: ec.EllipticCurvePublicKey, signature: bytes, payload: bytes) -> bool:
    """Whether a signature is of this payload, by this key."""
    try:
        key.verify(signature, _encoding(payload), ec.ECDSA(_CURVES[key.curve.name]()))
    except InvalidSignature:
        return False
    return True


def _encoding(payload: bytes) -> bytes:
    """Return what is signed: version, type and payload with their lengths."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def read_key_file(path: Path) -> bytes:
    """Return a small file of keys, certificates, or where to find them.

    Raises:
        KeyFileError: It is no regular file, is too large, or cannot be read.
    """
    try:
        return read_bytes(path, limit_bytes=KEY_LIMIT_BYTES, kind=KeyFileError)
    except KeyFileError as error:
        problem = error.problems[0]
        raise KeyFileError(
            Problem(where=str(path), what=problem.what, expected=problem.expected, found=problem.found)
        ) from error


def _check_curve(where: str, curve: ec.EllipticCurve, kind: type[TonnageError] = KeyFileError) -> None:
    if curve.name not in _CURVES:
        raise kind(Problem(where=where, what="key on another curve", expected=_CURVE_NAMES, found=curve.name))


def _not_elliptic(where: str, key: object, kind: type[TonnageError] = KeyFileError) -> TonnageError:
    found = re.sub("(Private|Public)Key$", " key", type(key).__name__.lstrip("_"))
    expected = f"an elliptic curve key ({_CURVE_NAMES})"
    return kind(Problem(where=where, what="not an elliptic curve key", expected=expected, found=found))


def _kind(raw: bytes) -> str:
    """Return what a PEM file calls itself."""
    begin = raw.find(b"-----BEGIN ")
    if begin < 0:
        return "no PEM text"
    label = raw[begin + 11 : begin + 60].partition(b"-----")[0]
    return label.decode("ascii", "replace").lower()
