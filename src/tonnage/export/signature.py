"""What a ``model.sig`` says, once it is verified: the digest of every file. Verified and read are the same bytes.

OpenSSF model signing v1.0: a Sigstore bundle, a DSSE envelope in it, a statement in that. What signatures of earlier
releases need (other encodings and predicates, keys without a name) is not accepted. Nothing in a bundle is unchecked.
"""

from __future__ import annotations

import base64
import binascii
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tonnage.checkpoint.strict_json import parse_object
from tonnage.errors import Problem, TonnageError
from tonnage.export.statement import PAYLOAD_TYPE, Signed, read_statement
from tonnage.prepare.documents import SIGNATURE
from tonnage.sources.hanging_up import sigpipe_held_back

SIGNATURE_LIMIT_BYTES = 64 << 20
_MOST_CERTIFICATES = 16


class SignatureRefusedError(TonnageError):
    """A signature is not what it must be, or not by whom it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """Trust in one elliptic curve key; ``path`` is its PEM file."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateChain:
    """Trust in certificate authorities; ``paths`` are PEM files of their certificates."""

    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SigstoreIdentity:
    """Trust in an identity that Sigstore vouches for.

    Attributes:
        identity: Such as a mail address.
        issuer: Who established it: the address of an OpenID Connect provider.
        trust_config: File of the keys to trust instead of those of the public instance, which are fetched.
    """

    identity: str
    issuer: str
    trust_config: Path | None = None


Trust = PublicKey | CertificateChain | SigstoreIdentity


def read_signature(raw: bytes, trust: Trust, *, where: str = SIGNATURE) -> Signed:
    """Verify a signature and return what it says.

    Args:
        raw: The whole file.
        trust: By whom it must be.
        where: Name of the file in refusals.

    Raises:
        SignatureRefusedError: It is malformed, by somebody else, or signs anything but files by their digests.
        KeyFileError: The file of a trusted key or certificate is none.
    """
    bundle = _read_bundle(raw, where)
    if isinstance(trust, PublicKey):
        payload, signer = _by_key(bundle, trust, where)
    elif isinstance(trust, CertificateChain):
        payload, signer = _by_certificate(bundle, trust, where)
    else:
        _check_by_sigstore(bundle.verification_material, trust, where)
        payload, signer = _by_identity(raw, trust, where), trust.identity
    return replace(read_statement(payload, where=where, kind=SignatureRefusedError), signer=signer)


def read_unverified(raw: bytes, *, where: str = SIGNATURE) -> Signed:
    """Return what a signature says, without a look at by whom it is: to compare, never to believe.

    Raises:
        SignatureRefusedError: It is malformed, or signs anything but files by their digests.
    """
    payload = _contents(_read_bundle(raw, where), where)[1]
    return read_statement(payload, where=where, kind=SignatureRefusedError)


# --- the bundle -------------------------------------------------------------------------------------------------------


class _Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hint: str


class _Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    raw_bytes: str


class _Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    certificates: Annotated[list[_Certificate], msgspec.Meta(min_length=1, max_length=_MOST_CERTIFICATES)]


class _Material(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    public_key: _Hint | None = None
    x509_certificate_chain: _Chain | None = None
    certificate: _Certificate | None = None
    tlog_entries: list[object] = []
    timestamp_verification_data: object = None

    @property
    def how(self) -> str:
        """By what it says it is signed, in words."""
        if self.public_key is not None:
            return "with a key"
        if self.x509_certificate_chain is not None:
            return "with a certificate"
        return "by Sigstore" if self.certificate is not None else "by nobody"


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sig: str
    keyid: Literal[""] = ""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[list[_Signature], msgspec.Meta(min_length=1, max_length=1)]


class _Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


def _read_bundle(raw: bytes, where: str) -> _Bundle:
    if len(raw) > SIGNATURE_LIMIT_BYTES:
        expected = f"at most {SIGNATURE_LIMIT_BYTES} bytes"
        raise _refusal(where, "signature too large", expected=expected, found=f"{len(raw)} bytes")
    document = parse_object(raw, where=where, kind=SignatureRefusedError)
    try:
        return msgspec.convert(document, type=_Bundle)
    except msgspec.ValidationError as error:
        raise _refusal(where, "not a signature of a model", expected="a Sigstore bundle", found=str(error)) from error


def _by_key(bundle: _Bundle, trust: PublicKey, where: str) -> tuple[bytes, str]:
    """Return the payload that a key signed, and the hint of the key."""
    from tonnage.export.keys import is_signed, key_hint, load_public_key  # noqa: PLC0415 - an extra

    key = load_public_key(trust.path)
    material = bundle.verification_material
    if material.public_key is None:
        raise _refusal(where, f"signed {material.how}, not with a key", expected=f"the key {trust.path}")
    _check_one_way(material, where)
    if material.public_key.hint != (expected := key_hint(key)):
        raise _refusal(where, "signed with another key", expected=expected, found=material.public_key.hint)
    signature, payload = _contents(bundle, where)
    if not is_signed(key, signature, payload):
        raise _refusal(where, "does not verify: another content was signed, or with another key")
    return payload, expected


def _by_certificate(bundle: _Bundle, trust: CertificateChain, where: str) -> tuple[bytes, str]:
    """Return the payload that the owner of a certificate signed, and its subject."""
    from tonnage.export.certificates import signing_key  # noqa: PLC0415 - an extra
    from tonnage.export.keys import is_signed, load_certificates  # noqa: PLC0415 - an extra

    anchors = [one for path in trust.paths for one in load_certificates(path)]
    material = bundle.verification_material
    if material.x509_certificate_chain is None:
        raise _refusal(where, f"signed {material.how}, not with a chain of certificates")
    _check_one_way(material, where)
    chain = [_decode(one.raw_bytes, where) for one in material.x509_certificate_chain.certificates]
    if len(set(chain)) != len(chain):
        raise _refusal(where, "a certificate stands twice in the chain")
    key, subject = signing_key(chain, anchors, where=where, kind=SignatureRefusedError)
    signature, payload = _contents(bundle, where)
    if not is_signed(key, signature, payload):
        raise _refusal(where, "does not verify: another content was signed, or with another certificate")
    return payload, subject


def _check_by_sigstore(material: _Material, trust: SigstoreIdentity, where: str) -> None:
    """Refuse what cannot be by an identity, before its keys are fetched from a network."""
    if material.certificate is None:
        raise _refusal(where, f"signed {material.how}, not by Sigstore", expected=f"signed by {trust.identity}")


def _by_identity(raw: bytes, trust: SigstoreIdentity, where: str) -> bytes:
    """Return the payload that an identity signed, as Sigstore's own library says."""
    if trust.trust_config is not None:
        from tonnage.export.keys import read_key_file  # noqa: PLC0415 - an extra

        read_key_file(trust.trust_config)  # bounded; the library reads whatever it is told to
    with _quiet(), sigpipe_held_back():
        from model_signing._signing import sign_sigstore  # noqa: PLC0415 - an extra, and slow
        from sigstore.errors import Error  # noqa: PLC0415 - an extra
        from sigstore.models import Bundle  # noqa: PLC0415 - an extra

        from tonnage.export.certificate_errors import CERTIFICATE_ERRORS  # noqa: PLC0415 - an extra

        refusals: tuple[type[Exception], ...] = (*CERTIFICATE_ERRORS, Error, LookupError, AttributeError, OSError)
        try:
            verifier = sign_sigstore.Verifier(
                identity=trust.identity, oidc_issuer=trust.issuer, trust_config=trust.trust_config
            )
        except refusals as error:
            raise _no_trust(trust, error) from error
        try:
            signature = sign_sigstore.Signature(Bundle.from_json(raw))
            kind, payload = verifier._verify_signed_content(signature)  # noqa: SLF001 - the bytes, not what it reads
        except refusals as error:
            expected = f"signed by {trust.identity}"
            raise _refusal(where, "does not verify", expected=expected, found=_reason(error)) from error
    if kind != PAYLOAD_TYPE:
        raise _refusal(where, "signs something else", expected=PAYLOAD_TYPE, found=str(kind))
    return payload


def _no_trust(trust: SigstoreIdentity, error: Exception) -> TonnageError:
    """Return the refusal of keys that are none, or could not be fetched: no word on the signature."""
    from tonnage.export.keys import KeyFileError  # noqa: PLC0415 - an extra

    if trust.trust_config is None:
        return KeyFileError(Problem(where="Sigstore", what="its keys cannot be fetched", found=_reason(error)))
    return KeyFileError(Problem(where=str(trust.trust_config), what="not a trust config", found=_reason(error)))


def _reason(error: Exception) -> str:
    """Return what a library says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _contents(bundle: _Bundle, where: str) -> tuple[bytes, bytes]:
    """Return signature and payload."""
    envelope = bundle.dsse_envelope
    return _decode(envelope.signatures[0].sig, where), _decode(envelope.payload, where)


def _decode(text: str, where: str) -> bytes:
    """Return bytes from base64 in its one canonical spelling."""
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise _refusal(where, "not base64", found=str(error)) from error
    if base64.b64encode(raw).decode("ascii") != text:
        raise _refusal(where, "base64 with bits that mean nothing")
    return raw


def _check_one_way(material: _Material, where: str) -> None:
    """Refuse what nobody would check: a second way of saying by whom, a log entry or a time beside a key or a chain."""
    ways = (material.public_key, material.x509_certificate_chain, material.certificate)
    if sum(way is not None for way in ways) != 1:
        raise _refusal(where, "says in several ways by whom it is", expected="one key or one chain of certificates")
    if material.tlog_entries or material.timestamp_verification_data is not None:
        raise _refusal(where, "log entries or times beside a key or a chain", expected="none")


def _refusal(where: str, what: str, *, expected: str | None = None, found: str | None = None) -> SignatureRefusedError:
    return SignatureRefusedError(Problem(where=where, what=what, expected=expected, found=found))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep a library from printing, logging and warning."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
