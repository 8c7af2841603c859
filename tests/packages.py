"""Small signed packages for tests, and ways to sign what nobody should."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from samples import prepare_small, rehearse, write_key
from tonnage.cli import app
from tonnage.export.manifest import Manifest, manifest_bytes, parse_manifest
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer
from tonnage.export.statement import Signed
from tonnage.prepare.documents import MANIFEST, SIGNATURE

OPTIONS = Options(today="2026-11-30")
RANK = "weights/tp2/rank-0/model-00001-of-00001.safetensors"
"""The file of the first rank of :func:`prepared_place`."""
HASHES: dict[str, Callable[[bytes], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}


def run(*words: object) -> None:
    """Run the command in this process; it must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def prepared_place(folder: Path) -> Path:
    """Write into a folder a checkpoint ``small``, what is ``prepared`` of it, and the keys ``key`` and ``other``."""
    prepare_small(folder / "small", folder / "prepared")
    for name in ("key", "other"):
        write_key(folder, name)
    return folder


def make_package(directory: Path, private: Path, fields: dict[str, Any], *words: object, **how: Any) -> Path:
    """Rehearse a checkpoint of a config, prepare it into a new directory with these options, and sign it."""
    checkpoint = directory.with_name(f"{directory.name}-checkpoint")
    rehearse(checkpoint, fields, **how)
    run("prepare", checkpoint, "-o", directory, "--workers", 1, *words)
    run("export", directory, "--key", private, "--date", "2026-01-31")
    return directory


def call_scales(file: Path) -> None:
    """Give the scales of a safetensors file the dtype that is named after what they are, and not the one that is read."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    for name, tensor in header.items():
        if name.endswith("_scale"):
            tensor["dtype"] = "F8_E8M0"
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def sign_anew(
    directory: Path,
    private: Path,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    *,
    only: str = "",
) -> Manifest:
    """Sign the files of a package as they are now, under a manifest that was changed after their digests were taken.

    Only those whose path ends as given are hashed again.
    """
    manifest = parse_manifest((directory / MANIFEST).read_bytes())
    files = [
        replace(file, **stated((directory / file.path).read_bytes(), manifest.hash))
        if file.path.endswith(only)
        else file
        for file in manifest.files
    ]
    changed = change(replace(manifest, files=tuple(files)))
    raw = manifest_bytes(changed)
    (directory / MANIFEST).write_bytes(raw)
    digests = {file.path: file.sha256 or file.digest for file in changed.files}
    digests[MANIFEST] = hashlib.sha256(raw).hexdigest()
    signed = Signed(name=changed.name, hash="sha256", digests=dict(sorted(digests.items())))
    (directory / SIGNATURE).write_bytes(load_signer(Key(path=private)).sign(signed))
    return changed


def stated(raw: bytes, name: str) -> dict[str, Any]:
    """Return what a manifest by this algorithm says of a file's bytes."""
    sha256 = hashlib.sha256(raw).hexdigest()
    own = (
        {"digest": sha256, "sha256": None}
        if name == "sha256"
        else {"digest": blake3(raw).hexdigest(), "sha256": sha256}
    )
    return {"nbytes": len(raw), **own}


def sign_statement(directory: Path, private: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Sign, with the right key, a statement that was changed: what no signer of ours writes."""
    bundle = json.loads((directory / SIGNATURE).read_bytes())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    resources = statement["predicate"]["resources"]
    root = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
    statement["subject"][0]["digest"]["sha256"] = root
    payload = json.dumps(statement).encode()
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signature = key.sign(pre_authentication(payload), ec.ECDSA(hashes.SHA256()))
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    (directory / SIGNATURE).write_text(json.dumps(bundle))


def pre_authentication(payload: bytes) -> bytes:
    """DSSE's encoding of what is signed."""
    kind = b"application/vnd.in-toto+json"
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def put_certificates(directory: Path, *chain: x509.Certificate) -> None:
    """Say in a signature that it was made with the first of these certificates; it is left as it is otherwise."""
    bundle = json.loads((directory / SIGNATURE).read_bytes())
    encoded = [base64.b64encode(one.public_bytes(serialization.Encoding.DER)).decode() for one in chain]
    material = {"x509CertificateChain": {"certificates": [{"rawBytes": one} for one in encoded]}, "tlogEntries": []}
    (directory / SIGNATURE).write_text(json.dumps({**bundle, "verificationMaterial": material}))
