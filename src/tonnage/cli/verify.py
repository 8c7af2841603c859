"""``tonnage verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json, emit, emit_json
from tonnage.cli.progress import later, progress
from tonnage.cli.ranks import parse_ranks
from tonnage.cli.trust import CertificateChain, Identity, Issuer, Key, TrustConfig, trust_of
from tonnage.errors import Problem
from tonnage.prepare.documents import SIGNATURE
from tonnage.units import counted, unit_for

if TYPE_CHECKING:
    from tonnage.export.agreement import Numerics
    from tonnage.export.signature import Trust
    from tonnage.export.statement import Signed
    from tonnage.export.verify import Verification

VERIFY_SCHEMA = "tonnage.verify/1"


def verify(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A signed package: a directory, or s3://, https://, hf:org/name.")
    ],
    key: Key = None,
    certificate_chain: CertificateChain = None,
    identity: Identity = None,
    issuer: Issuer = None,
    trust_config: TrustConfig = None,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, help="Check the files of this rank and of all ranks; repeatable."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Check the files of these ranks, such as 0-7, and of all ranks.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="TP size the package must be cut for.")] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Check signature, sizes and headers only: weights are not hashed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check file by file that a package is what was signed.

    And that its ranks, shapes and plan agree. Exit code 4 if not.

    Example: tonnage verify ./package --key release.pub.pem --rank 3
    """
    from tonnage.export.remote import RemotePackage
    from tonnage.export.verify import VerifyRequest, verify_package
    from tonnage.sources.addresses import is_remote, open_source

    trust = trust_of(key, certificate_chain, identity, issuer, trust_config, where="verify")
    request = VerifyRequest(ranks=chosen_ranks(rank, ranks), tp=tp, fast=fast)
    place = RemotePackage(open_source(directory, whole=False, in_one=True)) if is_remote(directory) else Path(directory)
    with progress() as show:
        found = verify_package(place, trust, request, later(show))
    if as_json:
        emit_json(verification_document(found, trust))
    elif found.verified:
        _emit_table(found, trust)
    found.check()


def chosen_ranks(rank: list[int] | None, ranks: str | None) -> tuple[int, ...] | None:
    """Return the ranks asked for in either way; ``None`` for all."""
    chosen = {*(rank or ()), *(parse_ranks(ranks) or ())}
    return tuple(sorted(chosen)) or None


def _signer(signed: Signed, trust: Trust) -> dict[str, str]:
    """Return by whom a verified package is signed."""
    from tonnage.export.signature import PublicKey, SigstoreIdentity

    if isinstance(trust, SigstoreIdentity):
        return {"method": "sigstore", "identity": signed.signer, "issuer": trust.issuer}
    return {"method": "key" if isinstance(trust, PublicKey) else "certificate", "identity": signed.signer}


def verification_document(found: Verification, trust: Trust) -> dict[str, Any]:
    """Return ``verify --json``; what an untrusted manifest says is not in it."""
    manifest, topology = found.manifest, found.manifest.topology if found.manifest else None
    return {
        "schema": VERIFY_SCHEMA,
        "verified": found.verified,
        "mode": "in part" if found.in_part else "full",
        "fast": found.request.fast,
        "package": manifest.name if manifest else None,
        "hash": manifest.hash if manifest else None,
        "layout": manifest.layout if manifest else None,
        "topology": {"tp": topology.tp, "ep": topology.ep, "pp": topology.pp} if topology else None,
        "signer": _signer(found.signed, trust) if found.signed else None,
        "ranks": _rows(found),
        "files": found.files,
        "bytes": found.nbytes,
        "hashed_bytes": found.hashed_bytes,
        "signature_bytes": found.signature_bytes,
        "absent_ranks": list(found.absent),
        "seconds": round(found.seconds, 3),
        "numerics": _numerics_document(found.numerics),
        "not_checked": list(found.unchecked),
        "problems": [_problem(problem) for problem in found.problems],
    }


def _numerics_document(numerics: Numerics | None) -> dict[str, Any] | None:
    """Return the class, the worst of what was converted, and what the package cites of a comparison."""
    from msgspec import to_builtins

    if numerics is None:
        return None
    worst = numerics.worst
    return {
        "class": numerics.kind,
        "converted_tensors": len(numerics.converted),
        "least_sqnr_db": worst.sqnr_db if worst else None,
        "least_sqnr_tensor": worst.tensor if worst else None,
        "compared": to_builtins(numerics.compared),
    }


def _numerics(numerics: Numerics) -> str:
    """Return what the weights are to those of the source, in words; figures are the signer's."""
    said: list[str] = [numerics.kind]
    if worst := numerics.worst:
        said.append(
            f"{counted(len(numerics.converted), 'tensor')}, SQNR at least {worst.sqnr_db:.2f} dB ({worst.tensor})"
        )
    if compared := numerics.compared:
        total = compared.total.sqnr_db
        said.append("compared: identical" if compared.identical else f"compared: {compared.tensors.differing:,} differ")
        said += [f"SQNR {total:.2f} dB in all"] if total is not None else []
        if compared.end_to_end:
            text = compared.end_to_end.text
            said.append(f"top-1 {text.top1_agreement:.2%}, KL {text.kl_mean:.3g} nats over {text.positions:,} tokens")
    return ", ".join(said)


def _problem(problem: Problem) -> dict[str, str]:
    fields = {"where": problem.where, "tensor": problem.tensor, "what": problem.what}
    fields |= {"expected": problem.expected, "found": problem.found}
    return {
        name: text.encode("utf-8", "backslashreplace").decode() for name, text in fields.items() if text is not None
    }


def _rows(found: Verification) -> list[dict[str, int]]:
    """Return what every rank that was checked has: tensors, their bytes, and the bytes of all its files."""
    rows = []
    by_rank = found.manifest.by_rank() if found.manifest else {}
    for rank in found.ranks:
        files = by_rank.get(rank, [])
        rows.append(
            {
                "rank": rank,
                "files": len(files),
                "tensors": sum(file.tensors for file in files),
                "payload_bytes": sum(file.payload_bytes for file in files),
                "bytes": sum(file.nbytes for file in files),
            }
        )
    return rows


def _emit_table(found: Verification, trust: Trust) -> None:
    from tonnage.errors import one_line
    from tonnage.report.tables import add_row, new_table, render

    assert found.manifest is not None
    assert found.signed is not None
    table = new_table("rank", "files", "tensors", "payload bytes", "bytes of all files")
    rows = _rows(found)
    for row in rows:
        add_row(table, *(f"{value:,}" for value in row.values()))
    files, nbytes = (sum(row[name] for row in rows) for name in ("files", "bytes"))
    add_row(table, "shared", f"{found.files - files:,}", "0", "0", f"{found.nbytes - nbytes:,}")
    emit(render(table))
    emit(f"signed: {one_line(', '.join(_signer(found.signed, trust).values()))}")
    if found.numerics:
        emit(f"numerics: {one_line(_numerics(found.numerics))}")
    for what in found.unchecked:
        emit(f"not checked: {one_line(what)}")
    emit(f"{one_line(found.manifest.name)}: {_verdict(found, found.manifest.hash)}, in {found.seconds:.1f} s")


def _verdict(found: Verification, hash_name: str) -> str:
    """Say how much was verified, in parts that add up to the bytes of all files."""
    unit, text = unit_for(found.nbytes)
    unread = found.nbytes - found.hashed_bytes - found.signature_bytes
    parts = [f"{found.hashed_bytes:,} hashed ({hash_name}), documents included"]
    parts += [f"{unread:,} of weight files whose headers alone were read"] * (unread > 0)
    parts += [f"{found.signature_bytes:,} of {SIGNATURE}"]
    said = "verified in part" if found.in_part else "verified"
    files = counted(found.files, "file")
    return f"{said}: {files}, {found.nbytes:,} bytes ({text(found.nbytes)} {unit}): {', '.join(parts)}"
