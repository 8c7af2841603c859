"""Parsers of signatures, statements, certificates and keys."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from functools import cache
from random import Random

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fuzz import der
from fuzz.mutate import PART, bundle, in_parts, json_document, some_bytes
from fuzz.target import DATA, SEEDS, Target, each, files, parts, written
from tonnage.export.certificate_errors import CERTIFICATE_ERRORS
from tonnage.export.certificates import check_chain, signing_key
from tonnage.export.keys import is_signed, load_certificates, load_private_key, load_public_key
from tonnage.export.signature import (
    CertificateChain,
    PublicKey,
    SignatureRefusedError,
    SigstoreIdentity,
    Trust,
    read_signature,
    read_unverified,
)
from tonnage.export.statement import read_statement

_SIGNED = SEEDS / "signature"


def signature(raw: bytes) -> None:
    """Read a signature as by a key, as by a certificate, and without a look at by whom."""
    trusts = (PublicKey(path=_SIGNED / "key.pub.pem"), CertificateChain(paths=(_SIGNED / "root.crt.pem",)))
    said = read_unverified(raw)

    def by(trust: Trust) -> None:
        assert read_signature(raw, trust) == said, "what was verified is not what stands there"

    each(by, trusts)


def sigstore(raw: bytes) -> None:
    """Read a signature as by an identity that Sigstore vouches for, without a network."""
    identity = SigstoreIdentity(
        identity="stefanb@us.ibm.com",
        issuer="https://sigstore.verify.ibm.com/oauth2",
        trust_config=DATA / "signatures" / "trust.json",
    )
    read_signature(raw, identity)


def trust_config(raw: bytes) -> None:
    """Read a signature with a file that says whom to trust."""
    path = written("trust.json", raw)
    identity = SigstoreIdentity(identity="a@example.com", issuer="https://example.com", trust_config=path)
    read_signature((DATA / "signatures" / "sigstore-v1.1.0.sig").read_bytes(), identity)


def statement(raw: bytes) -> None:
    """Read a payload that somebody signed."""
    signed = read_statement(raw, where="model.sig", kind=SignatureRefusedError)
    assert all(not path.startswith(("/", "..")) for path in signed.digests)


def certificates(raw: bytes) -> None:
    """Read a chain in DER form: below an authority that is trusted, below itself, and as its owner would."""
    chain = raw.split(PART)[:17]
    anchors = list(load_certificates(_SIGNED / "root.crt.pem"))
    own: list[x509.Certificate] = []
    with suppress(*CERTIFICATE_ERRORS):
        own += [x509.load_der_x509_certificate(one) for one in chain]

    kind = SignatureRefusedError
    each(
        lambda read: read(),
        (
            lambda: signing_key(chain, anchors, where="model.sig", kind=kind),
            lambda: signing_key(chain, own, where="model.sig", kind=kind),
            lambda: check_chain(own, _key(), where="--certificate", kind=kind) if own else None,
        ),
    )


def key_file(raw: bytes) -> None:
    """Read a file as a public key, a private one, with a password and without, and as certificates."""
    path = written("file.pem", raw)
    each(
        lambda read: read(path),
        (
            lambda one: is_signed(load_public_key(one), b"0" * 70, b"payload"),
            lambda one: load_private_key(one, None),
            lambda one: load_private_key(one, "sesame"),
            load_certificates,
        ),
    )


def _pem(raw: bytes, rng: Random) -> bytes:
    """Change a PEM file: its text, or what it says as base64."""
    lines = raw.splitlines()
    if rng.randrange(3) == 0 or len(lines) < 3:
        return some_bytes(raw, rng)
    try:
        inner = base64.b64decode(b"".join(lines[1 : lines.index(lines[0].replace(b"BEGIN", b"END"))]))
    except ValueError:
        return some_bytes(raw, rng)
    end = lines[0].replace(b"BEGIN", b"END")
    return b"\n".join((lines[0], base64.encodebytes(der.changed(inner, rng)).strip(), end, b""))


@cache
def _key() -> object:
    return load_certificates(_SIGNED / "leaf.crt.pem")[0].public_key()


def _ders() -> list[bytes]:
    form = serialization.Encoding.DER
    leaf, middle = (one.public_bytes(form) for one in load_certificates(_SIGNED / "leaf.crt.pem"))
    [root] = (one.public_bytes(form) for one in load_certificates(_SIGNED / "root.crt.pem"))
    return [parts(leaf, middle), parts(leaf, middle, root), root]


def _statements() -> list[bytes]:
    return [base64.b64decode(json.loads(raw)["dsseEnvelope"]["payload"]) for raw in files(_SIGNED, "*.sig")]


TARGETS = (
    Target(run=signature, mutate=bundle, seeds=lambda: files(_SIGNED, "*.sig")),
    Target(run=sigstore, mutate=bundle, seeds=lambda: files(DATA / "signatures", "*.sig")),
    Target(run=trust_config, mutate=bundle, seeds=lambda: files(DATA / "signatures", "trust.json"), longest=1 << 17),
    Target(run=statement, mutate=json_document, seeds=_statements),
    Target(run=certificates, mutate=in_parts(der.changed), seeds=_ders),
    Target(run=key_file, mutate=_pem, seeds=lambda: files(_SIGNED, "*.pem")),
)
