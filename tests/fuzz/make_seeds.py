"""Write the seeds that no other test data holds: documents of one small package. ``python -m fuzz.make_seeds``.

Run from the root with ``PYTHONPATH=tests``. The keys are new every time, and so are the signatures.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from cryptography.hazmat.primitives import serialization

from fuzz.target import SEEDS
from packages import run
from samples import certify, prepare_small, write_key
from tonnage.export.sign import Key, load_signer
from tonnage.export.statement import Signed
from tonnage.measure.io import measure_packages
from tonnage.measure.packages import measurement_document
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, SIGNATURE, SUMMARY
from tonnage.prepare.journal import JobRecord, OutputList
from tonnage.prepare.summary import read_summary

_PEM = serialization.Encoding.PEM


def main() -> None:
    """Write them all anew."""
    with TemporaryDirectory() as name:
        place = Path(name)
        private, public = write_key(place)
        prepared = prepare_small(place / "source", place / "prepared")
        summary = (prepared / SUMMARY).read_bytes()
        _write("summary", {"small.json": summary})
        _write("journal", {"small.jsonl": _journal(summary)})
        _write("outputs", {"small.json": _outputs(summary)})
        run("export", prepared, "--key", private, "--date", "2026-01-31")
        manifest, provenance, plan, signature = (
            (prepared / one).read_bytes() for one in (MANIFEST, PROVENANCE, PLAN, SIGNATURE)
        )
        _write("package_manifest", {"small.json": manifest})
        _write("package_documents", {"provenance.json": provenance, "plan.json": plan})
        _write("signature", {"key.sig": signature, "key.pub.pem": public.read_bytes()})
        _write("signature", _certified(place))
        document = measurement_document(measure_packages([prepared]), date="2026-01-31")
        _write("measurement", {"small.json": json.dumps(document).encode()})
        _write_by_rank(place, private)


def _write_by_rank(place: Path, private: Path) -> None:
    """Write the documents of packages of one rank each, and all of a package of one rank but its weights."""
    for rank in (0, 1):
        part = prepare_small(place / "source", place / f"part-{rank}", ranks=(rank,))
        run("export", part, "--key", private, "--date", "2026-01-31", "--name", "small")
        _write("joined", {f"{rank}-{name}": (part / name).read_bytes() for name in (MANIFEST, PLAN, PROVENANCE)})
    whole = prepare_small(place / "source", place / "whole", tp=1)
    summary = (whole / SUMMARY).read_bytes()
    run("export", whole, "--key", private, "--date", "2026-01-31")
    documents = (MANIFEST, SIGNATURE, PROVENANCE, PLAN)
    weights, index = sorted((whole / "weights" / "tp1" / "rank-0").iterdir())
    head = weights.read_bytes()
    contents = [
        *((whole / name).read_bytes() for name in documents),
        summary,
        (whole / "config.json").read_bytes(),
        head[: 8 + int.from_bytes(head[:8], "little")],
        index.read_bytes(),
    ]
    _write("rank_directory", {f"{number}": raw for number, raw in enumerate(contents)})


def _write(target: str, contents: dict[str, bytes]) -> None:
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def _journal(summary: bytes) -> bytes:
    read = read_summary(summary, where=SUMMARY)
    jobs = [
        JobRecord(job=number, files=(file,), converted=read.converted[:1], seconds=0.25, sources=read.sources)
        for number, file in enumerate(read.written)
    ]
    return b"".join(msgspec.json.encode(one) + b"\n" for one in (read.identity, *jobs))


def _outputs(summary: bytes) -> bytes:
    files = {file.path: file.file_bytes for file in read_summary(summary, where=SUMMARY).written}
    return msgspec.json.encode(OutputList(file_bytes=files))


def _certified(place: Path) -> dict[str, bytes]:
    """Return an authority, and what the owner of a certificate of it signed."""
    root, middle, leaf = (_key(place, name) for name in ("root", "middle", "leaf"))
    chain = (
        certify("Leaf", leaf, "Middle", middle, authority=False),
        certify("Middle", middle, "Root", root, authority=True),
    )
    authority = certify("Root", root, "Root", root, authority=True)
    pems = [one.public_bytes(_PEM) for one in (*chain, authority)]
    (place / "chain.pem").write_bytes(pems[1])
    (place / "leaf.crt").write_bytes(pems[0])
    signed = Signed(name="small-tp2", hash="sha256", digests={"manifest.json": "00" * 32, "config.json": "0a" * 32})
    raw = load_signer(Key(path=place / "leaf.pem", certificate=place / "leaf.crt", chain=(place / "chain.pem",))).sign(
        signed
    )
    return {"certificate.sig": raw, "root.crt.pem": pems[2], "leaf.crt.pem": pems[0] + pems[1]}


def _key(place: Path, name: str) -> object:
    private, _ = write_key(place, name)
    return serialization.load_pem_private_key(private.read_bytes(), None)


if __name__ == "__main__":
    main()
