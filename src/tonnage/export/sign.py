"""``model.sig``: an OpenSSF model-signing bundle over digests taken before. No file of the package is read.

With a key or a certificate equal content gives equal bytes (RFC 6979); Sigstore's keys are made for one signature.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tonnage.errors import Problem, TonnageError
from tonnage.export.manifest import PackageError
from tonnage.export.statement import PAYLOAD_TYPE, Signed, read_statement
from tonnage.export.walk import IGNORED
from tonnage.prepare.documents import SIGNATURE
from tonnage.sources.hanging_up import sigpipe_held_back

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


class SigningError(TonnageError):
    """Sigstore does not sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An elliptic curve key to sign with.

    Attributes:
        path: PEM file of the private key.
        password: Of an encrypted one.
        certificate: PEM file of the certificate of the key.
        chain: PEM files of the certificates above it, in order.
    """

    path: Path
    password: str | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigstore:
    """An identity that Sigstore vouches for; without a token the user is asked in a browser.

    Attributes:
        identity_token: Of an OpenID Connect provider.
        trust_config: File that names another instance than the public one.
    """

    identity_token: str | None = None
    trust_config: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """What signs, ready to.

    Attributes:
        method: How.
        identity: Hint of the key, subject of the certificate; ``None`` where only the signature tells.
        sign: Returns the bytes of a signature.
    """

    method: Literal["key", "certificate", "sigstore"]
    identity: str | None
    sign: Callable[[Signed], bytes]


def load_signer(source: Key | Sigstore) -> Signer:
    """Return a signer.

    Raises:
        KeyFileError: A file is no key or certificate that can sign, or they do not belong together.
    """
    from tonnage.export.keys import key_hint, load_private_key, read_key_file  # noqa: PLC0415 - an extra

    if isinstance(source, Sigstore):
        if source.trust_config is not None:
            read_key_file(source.trust_config)  # bounded; the library reads whatever it is told to
        return Signer(method="sigstore", identity=None, sign=lambda signed: _sign_with_sigstore(source, signed))

    key = load_private_key(source.path, source.password)
    if source.certificate is None:
        hint = key_hint(key.public_key())
        material: dict[str, Any] = {"publicKey": {"hint": hint}}
        return Signer(method="key", identity=hint, sign=lambda signed: _sign_with_key(key, material, signed))
    certificates = _chain(source, key)
    encoded = [{"rawBytes": _base64(_der(certificate))} for certificate in certificates]
    material = {"x509CertificateChain": {"certificates": encoded}}
    subject = certificates[0].subject.rfc4514_string()
    return Signer(method="certificate", identity=subject, sign=lambda signed: _sign_with_key(key, material, signed))


def _chain(source: Key, key: ec.EllipticCurvePrivateKey) -> list[x509.Certificate]:
    """Return the certificate of a key and those above it."""
    from tonnage.export.certificates import check_chain  # noqa: PLC0415 - an extra
    from tonnage.export.keys import KeyFileError, load_certificates  # noqa: PLC0415 - an extra

    assert source.certificate is not None
    certificates = [one for path in (source.certificate, *source.chain) for one in load_certificates(path)]
    check_chain(certificates, key.public_key(), where=str(source.certificate), kind=KeyFileError)
    return certificates


def _sign_with_key(key: ec.EllipticCurvePrivateKey, material: dict[str, Any], signed: Signed) -> bytes:
    from google.protobuf import json_format  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    from tonnage.export.keys import sign_payload  # noqa: PLC0415 - an extra

    payload = json_format.MessageToJson(_payload(signed).statement.pb, indent=None, sort_keys=True).encode()
    if read_statement(payload, where=SIGNATURE, kind=PackageError) != signed:
        raise PackageError(Problem(where=SIGNATURE, what="statement does not say what is to be signed"))
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": _base64(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": _base64(sign_payload(key, payload)), "keyid": ""}],
        },
    }
    return msgspec.json.encode(bundle)


def _sign_with_sigstore(source: Sigstore, signed: Signed) -> bytes:
    with redirect_stdout(sys.stderr), sigpipe_held_back():  # what the user is asked is no result
        from model_signing._signing import sign_sigstore  # noqa: PLC0415 - an extra, and slow
        from sigstore.errors import Error  # noqa: PLC0415 - an extra

        try:
            signer = sign_sigstore.Signer(
                use_ambient_credentials=True, identity_token=source.identity_token, trust_config=source.trust_config
            )
            return signer.sign(_payload(signed)).bundle.to_json().encode()
        except (Error, ValueError, OSError) as error:
            found = str(error) or type(error).__name__
            raise SigningError(Problem(where="--sigstore", what="does not sign", found=found)) from error


def _payload(signed: Signed) -> Any:
    """Return the statement as the library writes it."""
    from model_signing import manifest  # noqa: PLC0415 - an extra, and slow
    from model_signing._hashing.hashing import Digest  # noqa: PLC0415 - an extra
    from model_signing._signing.signing import Payload  # noqa: PLC0415 - an extra

    serialization = manifest.SerializationType.from_args(
        {"method": "files", "hash_type": signed.hash, "allow_symlinks": False, "ignore_paths": [*IGNORED, SIGNATURE]}
    )
    items = [
        manifest.FileManifestItem(path=PurePosixPath(path), digest=Digest(signed.hash, bytes.fromhex(digest)))
        for path, digest in signed.digests.items()
    ]
    return Payload(manifest.Manifest(signed.name, items, serialization))


def _der(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415 - an extra

    return certificate.public_bytes(Encoding.DER)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
