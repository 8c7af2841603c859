"""``model.sig``: written as the stock library reads it, and every lie in one that was read."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from samples import PATIENCE, certify, write_key
from tonnage.export.keys import KeyFileError, load_private_key, sign_payload
from tonnage.export.sign import Key, SigningError, Sigstore, load_signer
from tonnage.export.signature import (
    CertificateChain,
    PublicKey,
    SignatureRefusedError,
    SigstoreIdentity,
    read_signature,
)
from tonnage.export.statement import Signed

SIGNATURES = Path(__file__).resolve().parent / "data" / "signatures"
STOCK = Path(sys.executable).with_name("model_signing")
SIGNED = Signed(
    name="small-tp2",
    hash="sha256",
    digests={"manifest.json": "00" * 32, "weights/tp2/rank-0/a.safetensors": "ff" * 32, "config.json": "0a" * 32},
)
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the curve's group: SEC 2, section 2.4.2."""
PEM = serialization.Encoding.PEM
SESAME = "open sesame"
PLAIN = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys, ``key`` and ``other``."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("key", "other"):
        write_key(folder, name)
    return folder


@pytest.fixture(scope="module")
def bundle(keys: Path) -> bytes:
    """What the first key signed."""
    return load_signer(Key(path=keys / "key.pem")).sign(SIGNED)


def trust(keys: Path, name: str = "key") -> PublicKey:
    return PublicKey(path=keys / f"{name}.pub.pem")


def refused(raw: bytes, by: PublicKey | CertificateChain | SigstoreIdentity) -> str:
    with pytest.raises(SignatureRefusedError) as caught:
        read_signature(raw, by)
    said = str(caught.value)
    assert said.startswith("model.sig: ")
    return said


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_what_a_key_signs_is_read_with_its_other_half(tmp_path: Path, curve: str) -> None:
    private, public = write_key(tmp_path, curve=curve)
    signer = load_signer(Key(path=private))
    raw = signer.sign(SIGNED)
    assert read_signature(raw, PublicKey(path=public)) == SIGNED
    assert (signer.method, signer.identity) == ("key", sha256(public.read_bytes()).hexdigest())


def test_the_same_content_gives_the_same_bytes_in_another_process(keys: Path, bundle: bytes) -> None:
    words = (
        "import sys; from pathlib import Path; from tonnage.export.sign import *; from tonnage.export.statement import *\n"
        f"signed = Signed(name={SIGNED.name!r}, hash={SIGNED.hash!r}, digests={dict(reversed(SIGNED.digests.items()))!r})\n"
        "sys.stdout.buffer.write(load_signer(Key(path=Path(sys.argv[1]))).sign(signed))"
    )
    done = subprocess.run(
        [sys.executable, "-c", words, keys / "key.pem"], capture_output=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert done.stdout == bundle


def test_statement_is_that_of_the_page(bundle: bytes) -> None:
    statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    page = (Path(__file__).parent.parent / "docs" / "package-format.md").read_text()
    assert statement == json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[1])
    root = sha256(bytes.fromhex("0a" * 32 + "00" * 32 + "ff" * 32)).hexdigest()
    assert statement["subject"] == [{"name": "small-tp2", "digest": {"sha256": root}}]


def test_encrypted_key_signs_with_its_password_only(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    path, public = tmp_path / "key.pem", tmp_path / "pub.pem"
    path.write_bytes(
        key.private_bytes(
            PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(SESAME.encode())
        )
    )
    public.write_bytes(key.public_key().public_bytes(PEM, PLAIN))
    raw = load_signer(Key(path=path, password=SESAME)).sign(SIGNED)
    assert read_signature(raw, PublicKey(path=public)) == SIGNED
    with pytest.raises(KeyFileError, match=r"key is encrypted; expected its password, .*--password-env NAME"):
        load_signer(Key(path=path))
    with pytest.raises(KeyFileError, match="key is encrypted, and the password given is empty"):
        load_signer(Key(path=path, password=""))
    with pytest.raises(KeyFileError, match="wrong password"):
        load_signer(Key(path=path, password=SESAME + "!"))


def test_wrong_password_of_a_key_in_the_older_form_is_called_so(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    form, path = serialization.PrivateFormat.TraditionalOpenSSL, tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(PEM, form, serialization.BestAvailableEncryption(SESAME.encode())))
    with pytest.raises(KeyFileError, match="wrong password"):
        load_signer(Key(path=path, password=SESAME + "!"))


def test_password_of_a_plain_key_is_refused(keys: Path) -> None:
    with pytest.raises(KeyFileError, match="not encrypted"):
        load_signer(Key(path=keys / "key.pem", password=SESAME))


def other_keys(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made = {
        "rsa": rsa.generate_private_key(65537, 2048),
        "edwards": ed25519.Ed25519PrivateKey.generate(),
        "curve": ec.generate_private_key(ec.SECP256K1()),
    }
    found = {
        name: (key.private_bytes(PEM, form, plain), key.public_key().public_bytes(PEM, PLAIN))
        for name, key in made.items()
    }
    halves = ((folder / "key.pub.pem").read_bytes(), (folder / "key.pem").read_bytes())
    return {
        **found,
        "other half": halves,
        "text": (b"hello", b"hello"),
        "nothing": (b"", b""),
        "torn": (halves[1][:90], halves[0][:90]),
    }


def test_files_that_are_no_keys_are_refused(tmp_path: Path, keys: Path, bundle: bytes) -> None:
    expected = {
        "rsa": "not an elliptic curve key; expected .*; found RSA key$",
        "edwards": "not an elliptic curve key; expected .*; found Ed25519 key$",
        "curve": "key on another curve; expected P-256, P-384 or P-521; found secp256k1",
        "other half": "not a (public|private) key",
        "text": "no PEM text",
        "nothing": "no PEM text",
        "torn": "not a (public|private) key",
    }
    for name, (private, public) in other_keys(keys).items():
        path = tmp_path / f"{name}.pem"
        path.write_bytes(private)
        with pytest.raises(KeyFileError, match=expected[name]):
            load_signer(Key(path=path))
        path.write_bytes(public)
        with pytest.raises(KeyFileError, match=expected[name]):
            read_signature(bundle, PublicKey(path=path))
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(KeyFileError, match=str(path)):
            load_signer(Key(path=path))
        with pytest.raises(KeyFileError, match=str(path)):
            read_signature(bundle, PublicKey(path=path))


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority ``root``, an intermediate one below it, and certificates of a key below that."""
    folder = tmp_path_factory.mktemp("authority")
    loaded = {}
    for name in ("root", "middle", "leaf", "stranger"):
        private, _ = write_key(folder, name)
        loaded[name] = load_private_key(private, None)
    certificates = {
        "root": certify("root", loaded["root"], "root", loaded["root"], authority=True),
        "middle": certify("middle", loaded["middle"], "root", loaded["root"], authority=True),
        "leaf": certify("leaf", loaded["leaf"], "middle", loaded["middle"], authority=False),
        "no-use": certify("leaf", loaded["leaf"], "middle", loaded["middle"], authority=False, signs=False),
        "stranger": certify("root", loaded["stranger"], "root", loaded["stranger"], authority=True),
    }
    for name, certificate in certificates.items():
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(PEM))
    return folder


def by_leaf(authority: Path, certificate: str = "leaf", chain: tuple[str, ...] = ("middle",)) -> Key:
    paths = tuple(authority / f"{name}.crt" for name in chain)
    return Key(path=authority / "leaf.pem", certificate=authority / f"{certificate}.crt", chain=paths)


def test_what_a_certificate_signs_is_read_by_who_trusts_its_authority(authority: Path) -> None:
    signer = load_signer(by_leaf(authority))
    assert (signer.method, signer.identity) == ("certificate", "CN=leaf")
    raw = signer.sign(SIGNED)
    assert raw == signer.sign(SIGNED)
    assert read_signature(raw, CertificateChain(paths=(authority / "root.crt",))) == SIGNED
    whole = load_signer(by_leaf(authority, chain=("middle", "root"))).sign(SIGNED)
    assert read_signature(whole, CertificateChain(paths=(authority / "root.crt",))) == SIGNED


def test_certificates_of_strangers_are_refused(authority: Path, keys: Path, bundle: bytes) -> None:
    raw = load_signer(by_leaf(authority)).sign(SIGNED)
    assert "not trusted" in refused(raw, CertificateChain(paths=(authority / "stranger.crt",)))
    assert "not trusted" in refused(raw, CertificateChain(paths=()))
    alone = load_signer(by_leaf(authority, chain=())).sign(SIGNED)
    assert "not trusted" in refused(alone, CertificateChain(paths=(authority / "root.crt",)))
    assert "signed with a certificate, not with a key" in refused(raw, trust(keys))
    by_root = CertificateChain(paths=(authority / "root.crt",))
    assert "signed with a key, not with a chain of certificates" in refused(bundle, by_root)
    with pytest.raises(KeyFileError, match="not certificates"):
        read_signature(raw, CertificateChain(paths=(keys / "key.pem",)))


def test_certificates_that_cannot_have_signed_are_not_signed_with(authority: Path) -> None:
    for key, said in (
        (by_leaf(authority, "no-use"), "may not be used to sign"),
        (by_leaf(authority, "root"), "certificate of another key"),
        (by_leaf(authority, chain=("root",)), "CN=leaf is not issued by the next certificate"),
        (by_leaf(authority, chain=("stranger",)), "expected CN=middle; found CN=root"),
    ):
        with pytest.raises(KeyFileError, match=said):
            load_signer(key)


def test_certificate_without_use_is_refused_when_read(authority: Path) -> None:
    raw = load_signer(by_leaf(authority)).sign(SIGNED)
    useless = x509.load_pem_x509_certificate((authority / "no-use.crt").read_bytes())
    document = json.loads(raw)
    chain = document["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain[0]["rawBytes"] = base64.b64encode(useless.public_bytes(serialization.Encoding.DER)).decode()
    said = refused(json.dumps(document).encode(), CertificateChain(paths=(authority / "root.crt",)))
    assert "may not be used to sign" in said


def test_certificate_that_stands_twice_is_refused(authority: Path) -> None:
    document = json.loads(load_signer(by_leaf(authority)).sign(SIGNED))
    chain = document["verificationMaterial"]["x509CertificateChain"]["certificates"]
    for again in (chain[0], chain[-1]):
        document["verificationMaterial"]["x509CertificateChain"]["certificates"] = [*chain, again]
        said = refused(json.dumps(document).encode(), CertificateChain(paths=(authority / "root.crt",)))
        assert "a certificate stands twice" in said


@pytest.mark.parametrize(
    ("leaf", "middle", "said"),
    [
        ((2020, 2021), (2019, 2021), ""),
        ((2020, 2030), (2020, 2021), ""),
        ((2020, 2021), (2021, 2030), "not trusted"),
        ((2020, 2030), (2015, 2019), "not trusted"),
    ],
    ids=["all over now", "over soon after", "issuer of later", "issuer of earlier"],
)
def test_certificates_are_judged_at_the_beginning_of_the_first_as_the_stock_verifier_does(
    tmp_path: Path, leaf: tuple[int, int], middle: tuple[int, int], said: str
) -> None:
    keys = {name: load_private_key(write_key(tmp_path, name)[0], None) for name in ("root", "middle", "leaf")}
    long = (2000, 2100)
    certificates = {
        "root": certify("root", keys["root"], "root", keys["root"], authority=True, years=long),
        "middle": certify("middle", keys["middle"], "root", keys["root"], authority=True, years=middle),
        "leaf": certify("leaf", keys["leaf"], "middle", keys["middle"], authority=False, years=leaf),
    }
    for name, certificate in certificates.items():
        (tmp_path / f"{name}.crt").write_bytes(certificate.public_bytes(PEM))
    raw = load_signer(by_leaf(tmp_path)).sign(SIGNED)
    by = CertificateChain(paths=(tmp_path / "root.crt",))
    if said:
        assert said in refused(raw, by)
    else:
        assert read_signature(raw, by) == SIGNED


def test_no_bit_of_a_chain_is_without_a_meaning(authority: Path) -> None:
    raw = load_signer(by_leaf(authority, chain=("middle", "root"))).sign(SIGNED)
    by = CertificateChain(paths=(authority / "root.crt",))
    for at, bit in flips(raw, 400):
        refused(flipped(raw, at, bit), by)


# --- what is read -----------------------------------------------------------------------------------------------------


def flips(raw: bytes, count: int) -> list[tuple[int, int]]:
    chance = random.Random(20261130)
    return [(chance.randrange(len(raw)), chance.randrange(8)) for _ in range(count)]


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def test_no_bit_of_a_signature_is_without_a_meaning(keys: Path, bundle: bytes) -> None:
    for at, bit in flips(bundle, 1500):
        refused(flipped(bundle, at, bit), trust(keys))


def test_the_other_form_of_an_elliptic_curve_signature_says_the_same(keys: Path, bundle: bytes) -> None:
    """Stock signers write either form, so both are read; nothing is known by the bytes of its signature."""
    document = json.loads(bundle)
    sig = base64.b64decode(document["dsseEnvelope"]["signatures"][0]["sig"])
    r, s = decode_dss_signature(sig)
    other = encode_dss_signature(r, P256_ORDER - s)
    document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(other).decode()
    assert read_signature(json.dumps(document).encode(), trust(keys)) == read_signature(bundle, trust(keys)) == SIGNED
    for wrong in ((r, P256_ORDER - s + 1), (P256_ORDER - r, s), (r, s + P256_ORDER), (0, s), (r, 0)):
        forged = base64.b64encode(encode_dss_signature(*wrong)).decode()
        document["dsseEnvelope"]["signatures"][0]["sig"] = forged
        assert "does not verify" in refused(json.dumps(document).encode(), trust(keys))


def test_another_key_is_refused_by_its_hint_and_without(keys: Path, bundle: bytes) -> None:
    assert "signed with another key" in refused(bundle, trust(keys, "other"))
    document = json.loads(bundle)
    hint = sha256((keys / "other.pub.pem").read_bytes()).hexdigest()
    document["verificationMaterial"]["publicKey"]["hint"] = hint
    assert "does not verify" in refused(json.dumps(document).encode(), trust(keys, "other"))


BUNDLES: dict[str, Callable[[dict[str, Any]], object]] = {
    "media type of earlier": lambda d: d.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2"),
    "no media type": lambda d: d.pop("mediaType"),
    "no envelope": lambda d: d.pop("dsseEnvelope"),
    "unknown member": lambda d: d.update(more=1),
    "message signature": lambda d: d.update(messageSignature={}),
    "no key": lambda d: d["verificationMaterial"].pop("publicKey"),
    "no hint": lambda d: d["verificationMaterial"]["publicKey"].pop("hint"),
    "empty hint": lambda d: d["verificationMaterial"]["publicKey"].update(hint=""),
    "key itself": lambda d: d["verificationMaterial"]["publicKey"].update(rawBytes="AA=="),
    "a log entry": lambda d: d["verificationMaterial"]["tlogEntries"].append({}),
    "a certificate too": lambda d: d["verificationMaterial"].update(certificate={"rawBytes": "AA=="}),
    "no signature": lambda d: d["dsseEnvelope"]["signatures"].clear(),
    "two signatures": lambda d: d["dsseEnvelope"]["signatures"].append(d["dsseEnvelope"]["signatures"][0]),
    "empty signature": lambda d: d["dsseEnvelope"]["signatures"][0].update(sig=""),
    "no base64": lambda d: d["dsseEnvelope"]["signatures"][0].update(sig="????"),
    "no ASCII": lambda d: d["dsseEnvelope"]["signatures"][0].update(sig="é"),
    "blanks in base64": lambda d: d["dsseEnvelope"].update(payload=" " + d["dsseEnvelope"]["payload"]),
    "payload type": lambda d: d["dsseEnvelope"].update(payloadType="application/json"),
    "payload of a number": lambda d: d["dsseEnvelope"].update(payload=7),
    "empty payload": lambda d: d["dsseEnvelope"].update(payload=""),
    "key id": lambda d: d["dsseEnvelope"]["signatures"][0].update(keyid="x"),
}  # fmt: skip


@pytest.mark.parametrize("change", BUNDLES.values(), ids=BUNDLES)
def test_bundle_that_is_otherwise_is_refused(
    keys: Path, bundle: bytes, change: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(bundle)
    change(document)
    refused(json.dumps(document).encode(), trust(keys))


NO_BUNDLES = {
    "nothing": b"",
    "no JSON": b"hello",
    "no UTF-8": b"\xff\xfe",
    "an array": b"[]",
    "null": b"null",
    "deep": b'{"a":' * 200_000,
    "deep array": b"[" * 200_000,
    "many": b'{"a":[' + b"[]," * 200_000 + b"[]]}",
    "huge number": b'{"a":' + b"9" * 10_000 + b"}",
    "key twice": b'{"mediaType":1,"mediaType":2}',
}


@pytest.mark.parametrize("raw", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_other_bytes_are_no_signature(keys: Path, raw: bytes) -> None:
    refused(raw, trust(keys))


def test_signature_beyond_any_size_is_refused_unread(keys: Path) -> None:
    assert "too large" in refused(bytes((64 << 20) + 1), trust(keys))


def signed_by_hand(keys: Path, bundle: bytes, payload: bytes) -> bytes:
    """Sign any payload, as a careless or hostile signer might."""
    document = json.loads(bundle)
    signature = sign_payload(load_private_key(keys / "key.pem", None), payload)
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return json.dumps(document).encode()


def resource(number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change a resource, and the digest over all digests with it."""

    def change(statement: dict[str, Any]) -> None:
        resources = statement["predicate"]["resources"]
        resources[number].update(fields)
        reroot(statement)

    return change


def reroot(statement: dict[str, Any]) -> None:
    digests = (one.get("digest", "") for one in statement["predicate"]["resources"])
    raw = b"".join(bytes.fromhex(digest) for digest in digests if set(digest) <= set("0123456789abcdefABCDEF"))
    statement["subject"][0]["digest"]["sha256"] = sha256(raw).hexdigest()


def twice(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].append(statement["predicate"]["resources"][0])
    reroot(statement)


def compat(statement: dict[str, Any]) -> None:
    """As version 0.2 wrote it: files are subjects."""
    resources = statement["predicate"]["resources"]
    statement["predicateType"] = "https://model_signing/Digests/v0.1"
    statement["subject"] = [{"name": one["name"], "digest": {"sha256": one["digest"]}} for one in resources]


STATEMENTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "predicate of earlier": (compat, "signs something else"),
    "unknown predicate": (lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"), "signs something else"),
    "statement of earlier": (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), "signs something else"),
    "no predicate": (lambda s: s.pop("predicate"), "signs something else"),
    "shards": (lambda s: s["predicate"]["serialization"].update(method="shards", shard_size=1), "signs something else"),
    "links": (lambda s: s["predicate"]["serialization"].update(allow_symlinks=True), "signs something else"),
    "other hash": (lambda s: s["predicate"]["serialization"].update(hash_type="blake2"), "signs something else"),
    "two hashes": (resource(0, algorithm="blake3"), "by another algorithm; expected sha256; found blake3"),
    "no subject": (lambda s: s["subject"].clear(), "signs something else"),
    "two subjects": (lambda s: s["subject"].append(s["subject"][0]), "signs something else"),
    "other root": (lambda s: s["subject"][0]["digest"].update(sha256="00" * 32), "digest over all digests"),
    "twice": (twice, "config.json is signed twice"),
    "up": (resource(0, name="../config.json"), "not a path"),
    "absolute": (resource(0, name="/etc/passwd"), "not a path"),
    "unclean": (resource(0, name="a//b"), "not a path"),
    "itself": (resource(0, name="model.sig"), "not a path"),
    "control": (resource(0, name="a\x1b[2J"), "not a path"),
    "short digest": (resource(0, digest="0a"), "signs something else"),
    "upper digest": (resource(0, digest="0A" * 32), "signs something else"),
    "no digest": (lambda s: s["predicate"]["resources"][0].pop("digest"), "signs something else"),
    "resources no list": (lambda s: s["predicate"].update(resources={}), "signs something else"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), STATEMENTS.values(), ids=STATEMENTS)
def test_statement_that_is_otherwise_is_refused_though_signed(
    keys: Path, bundle: bytes, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    change(statement)
    assert said in refused(signed_by_hand(keys, bundle, json.dumps(statement).encode()), trust(keys))


def test_further_members_of_the_predicate_are_ignored_as_the_specification_says(keys: Path, bundle: bytes) -> None:
    statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    statement["predicate"]["more"] = {"a": 1}
    assert read_signature(signed_by_hand(keys, bundle, json.dumps(statement).encode()), trust(keys)) == SIGNED


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"[" * 200_000, b'{"_type":1,"_type":2}'])
def test_payload_that_is_no_statement_is_refused_though_signed(keys: Path, bundle: bytes, raw: bytes) -> None:
    refused(signed_by_hand(keys, bundle, raw), trust(keys))


def test_encoding_of_version_0_2_is_refused(keys: Path, bundle: bytes) -> None:
    from model_signing._signing.sign_sigstore_pb import pae_compat

    document = json.loads(bundle)
    payload = base64.b64decode(document["dsseEnvelope"]["payload"])
    key = load_private_key(keys / "key.pem", None)
    signature = key.sign(pae_compat(payload), ec.ECDSA(hashes.SHA256()))
    document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    assert "does not verify" in refused(json.dumps(document).encode(), trust(keys))


# --- the stock library ------------------------------------------------------------------------------------------------


def stock(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STOCK, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of two files."""
    folder = tmp_path / "model"
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights" / "a.safetensors").write_bytes(bytes(1000))
    return folder


def digests(folder: Path) -> dict[str, str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "model.sig")
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in found}


def test_stock_command_verifies_what_a_key_signed(keys: Path, model: Path) -> None:
    signed = Signed(name="model", hash="sha256", digests=digests(model))
    (model / "model.sig").write_bytes(load_signer(Key(path=keys / "key.pem")).sign(signed))
    words = ("verify", "key", model, "--signature", model / "model.sig", "--public_key")
    done = stock(*words, keys / "key.pub.pem")
    assert done.returncode == 0, done.stderr
    assert stock(*words, keys / "other.pub.pem").returncode != 0
    (model / "config.json").write_text("[]")
    assert stock(*words, keys / "key.pub.pem").returncode != 0


def test_stock_command_verifies_what_a_certificate_signed(authority: Path, model: Path) -> None:
    signed = Signed(name="model", hash="sha256", digests=digests(model))
    (model / "model.sig").write_bytes(load_signer(by_leaf(authority)).sign(signed))
    done = stock(
        "verify",
        "certificate",
        model,
        "--signature",
        model / "model.sig",
        "--certificate_chain",
        authority / "root.crt",
    )
    assert done.returncode == 0, done.stderr


def test_what_the_stock_command_signs_is_read(keys: Path, authority: Path, model: Path) -> None:
    done = stock("sign", "key", model, "--signature", model / "model.sig", "--private_key", keys / "key.pem")
    assert done.returncode == 0, done.stderr
    expected = Signed(name="model", hash="sha256", digests=digests(model))
    assert read_signature((model / "model.sig").read_bytes(), trust(keys)) == expected
    done = stock(
        "sign", "certificate", model, "--signature", model / "model.sig", "--private_key", authority / "leaf.pem",
        "--signing_certificate", authority / "leaf.crt", "--certificate_chain", authority / "middle.crt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read_signature((model / "model.sig").read_bytes(), CertificateChain(paths=(authority / "root.crt",)))
    assert found == expected


# --- Sigstore, without a network --------------------------------------------------------------------------------------


class FakeBundle:
    """A bundle of the library, as far as it is looked at."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_json(self) -> str:
        return self.text


def test_sigstore_signs_the_same_statement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from model_signing._signing import sign_sigstore

    asked: dict[str, Any] = {}

    class FakeSigner:
        def __init__(self, **words: Any) -> None:
            asked.update(words)

        def sign(self, payload: Any) -> Any:
            print("open your browser")  # noqa: T201 - as the library does
            names = [one["name"] for one in payload.statement.pb.predicate["resources"]]
            return sign_sigstore.Signature(FakeBundle(json.dumps(names)))

    monkeypatch.setattr(sign_sigstore, "Signer", FakeSigner)
    signer = load_signer(Sigstore(identity_token=SESAME))
    assert json.loads(signer.sign(SIGNED)) == sorted(SIGNED.digests)
    assert asked["identity_token"] == SESAME
    assert capsys.readouterr().out == ""


def test_sigstore_that_does_not_answer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from model_signing._signing import sign_sigstore
    from sigstore.errors import TUFError

    def fail(**_: Any) -> None:
        raise TUFError("no network")

    monkeypatch.setattr(sign_sigstore, "Signer", fail)
    with pytest.raises(SigningError, match="--sigstore: does not sign; found no network"):
        load_signer(Sigstore()).sign(SIGNED)


def by(identity: str) -> SigstoreIdentity:
    return SigstoreIdentity(
        identity=identity, issuer="https://sigstore.verify.ibm.com/oauth2", trust_config=SIGNATURES / "trust.json"
    )


def test_what_an_identity_signed_is_read_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    raw = (SIGNATURES / "sigstore-v1.1.0.sig").read_bytes()
    signed = read_signature(raw, by("stefanb@us.ibm.com"))
    assert (signed.name, signed.hash, signed.signer) == ("v1.1.0-sigstore", "sha256", "stefanb@us.ibm.com")
    assert signed.digests == {
        "signme-1": "f6310066c7320497ea554260c32c43660bff648cb2a61194832cc086077085e1",
        "signme-2": "32dcb1f8e1ae52d5963e56a6ba06ab58b424c15ed2a6b70d2feca1d089370028",
    }
    assert "expected signed by a@example.com" in refused(raw, by("a@example.com"))
    other = SigstoreIdentity(
        identity="stefanb@us.ibm.com", issuer="https://example.com", trust_config=SIGNATURES / "trust.json"
    )
    refused(raw, other)
    assert capsys.readouterr() == ("", "")


def test_content_that_an_identity_did_not_sign_is_refused() -> None:
    raw = (SIGNATURES / "sigstore-v1.1.0.sig").read_bytes()
    begin = raw.index(b'"dsseEnvelope"')
    for at, bit in flips(raw[begin:], 60):
        refused(flipped(raw, begin + at, bit), by("stefanb@us.ibm.com"))


def test_bundles_of_keys_and_of_identities_are_told_apart(keys: Path, authority: Path, bundle: bytes) -> None:
    raw = (SIGNATURES / "sigstore-v1.1.0.sig").read_bytes()
    assert "signed by Sigstore, not with a key" in refused(raw, trust(keys))
    assert "signed by Sigstore, not with a chain" in refused(raw, CertificateChain(paths=(authority / "root.crt",)))
    assert "signed with a key, not by Sigstore" in refused(bundle, by("stefanb@us.ibm.com"))


def test_what_no_identity_signed_is_refused_before_any_network(
    authority: Path, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model_signing._signing import sign_sigstore

    def fetch(**_: Any) -> None:
        raise AssertionError("keys of Sigstore are fetched")

    monkeypatch.setattr(sign_sigstore, "Verifier", fetch)
    identity = SigstoreIdentity(identity="a@example.com", issuer="https://example.com")
    assert "signed with a key, not by Sigstore" in refused(bundle, identity)
    by_certificate = load_signer(by_leaf(authority)).sign(SIGNED)
    assert "signed with a certificate, not by Sigstore" in refused(by_certificate, identity)


@pytest.mark.parametrize("text", [None, "{}", "hello", "[" * 5000])
def test_trust_config_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    bundle = (SIGNATURES / "sigstore-v1.1.0.sig").read_bytes()
    if text is not None:
        (tmp_path / "trust.json").write_text(text)
    other = SigstoreIdentity(
        identity="a@example.com", issuer="https://example.com", trust_config=tmp_path / "trust.json"
    )
    said = "cannot be read" if text is None else "not a trust config"
    with pytest.raises(KeyFileError, match=rf"trust\.json: {said}"):
        read_signature(bundle, other)


def test_trust_config_is_not_read_without_end(tmp_path: Path) -> None:
    bundle = (SIGNATURES / "sigstore-v1.1.0.sig").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 1 << 40)
    for path, said in ((tmp_path / "pipe", "regular file"), (tmp_path / "endless", "too large")):
        trusted = SigstoreIdentity(identity="a@example.com", issuer="https://example.com", trust_config=path)
        with pytest.raises(KeyFileError, match=said):
            read_signature(bundle, trusted)
        with pytest.raises(KeyFileError, match=said):
            load_signer(Sigstore(trust_config=path))
