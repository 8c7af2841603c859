"""``tonnage verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json, emit, emit_json
from tonnage.cli.progress import later, progress
from tonnage.units import unit_for

if TYPE_CHECKING:
    from tonnage.errors import Problem
    from tonnage.export.signature import Trust
    from tonnage.export.verify import Verification

VERIFY_SCHEMA = "tonnage.verify/1"


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A signed package.")],
    key: Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Public key that must have signed.")] = None,
    certificate_chain: Annotated[
        list[Path] | None,
        typer.Option("--certificate-chain", metavar="PEM", help="Certificates to trust instead of a key; repeatable."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option("--identity", help="Who must have signed with Sigstore, such as a mail address.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option("--issuer", metavar="URL", help="OpenID Connect provider of the identity.")
    ] = None,
    trust_config: Annotated[
        Path | None, typer.Option("--trust-config", help="Keys of another Sigstore instance than the public one.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, help="Check this rank's files alone; repeatable.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="TP size the package must be cut for.")] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Check signature, sizes and headers only: weights are not hashed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a package is, file by file, what was signed, and that its ranks, shapes and plan agree.

    Exit code 4 if not. Example: tonnage verify ./package --key release.pub.pem --rank 3
    """
    from tonnage.export.verify import VerifyRequest, verify_package

    trust = _trust(key, certificate_chain, identity, issuer, trust_config)
    request = VerifyRequest(ranks=tuple(rank) if rank else None, tp=tp, fast=fast)
    with progress() as show:
        found = verify_package(directory, trust, request, later(show))
    if as_json:
        emit_json(verification_document(found, trust))
    elif found.verified:
        _emit_table(found, trust)
    found.check()


def _trust(
    key: Path | None, chain: list[Path] | None, identity: str | None, issuer: str | None, trust_config: Path | None
) -> Trust:
    """Return by whom a package must be signed; exactly one way of saying so."""
    from tonnage.errors import Problem, UnitError
    from tonnage.export.signature import CertificateChain, PublicKey, SigstoreIdentity

    if key is not None and not (chain or identity or issuer or trust_config):
        return PublicKey(path=key)
    if chain and key is None and not (identity or issuer or trust_config):
        return CertificateChain(paths=tuple(chain))
    if identity and issuer and key is None and not chain:
        return SigstoreIdentity(identity=identity, issuer=issuer, trust_config=trust_config)
    expected = "one of --key, --certificate-chain, and --identity with --issuer"
    raise UnitError(Problem(where="verify", what="by whom it must be signed", expected=expected))


def _signer(trust: Trust) -> dict[str, str]:
    """Return by whom a verified package is signed, in the terms it was asked for."""
    from tonnage.export.keys import key_hint, load_public_key
    from tonnage.export.signature import CertificateChain, PublicKey

    if isinstance(trust, PublicKey):
        return {"method": "key", "identity": key_hint(load_public_key(trust.path))}
    if isinstance(trust, CertificateChain):
        return {"method": "certificate", "trusted": ", ".join(map(str, trust.paths))}
    return {"method": "sigstore", "identity": trust.identity, "issuer": trust.issuer}


def verification_document(found: Verification, trust: Trust) -> dict[str, Any]:
    """Return ``verify --json``; what an untrusted manifest says is not in it."""
    manifest, topology = found.manifest, found.manifest.topology if found.manifest else None
    return {
        "schema": VERIFY_SCHEMA,
        "verified": found.verified,
        "mode": "fast" if found.request.fast else "full",
        "package": manifest.name if manifest else None,
        "hash": manifest.hash if manifest else None,
        "layout": manifest.layout if manifest else None,
        "topology": {"tp": topology.tp, "ep": topology.ep, "pp": topology.pp} if topology else None,
        "signer": _signer(trust) if found.signed else None,
        "ranks": list(found.ranks),
        "files": found.files,
        "bytes": found.nbytes,
        "hashed_bytes": found.hashed_bytes,
        "seconds": round(found.seconds, 3),
        "not_checked": list(found.unchecked),
        "problems": [_problem(problem) for problem in found.problems],
    }


def _problem(problem: Problem) -> dict[str, str]:
    fields = {"where": problem.where, "tensor": problem.tensor, "what": problem.what}
    fields |= {"expected": problem.expected, "found": problem.found}
    return {
        name: text.encode("utf-8", "backslashreplace").decode() for name, text in fields.items() if text is not None
    }


def _emit_table(found: Verification, trust: Trust) -> None:
    from rich.table import Table

    from tonnage.errors import one_line
    from tonnage.report.tables import render

    assert found.manifest is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rank", "files", "tensors", "payload bytes", "file bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in found.ranks:
        files = found.manifest.of_rank(rank)
        sums = (sum(getattr(file, name) for file in files) for name in ("tensors", "payload_bytes", "nbytes"))
        table.add_row(str(rank), *(f"{value:,}" for value in (len(files), *sums)))
    emit(render(table))
    unit, text = unit_for(found.nbytes)
    emit(f"signed: {one_line(', '.join(_signer(trust).values()))}")
    for what in found.unchecked:
        emit(f"not checked: {one_line(what)}")
    how = f"{found.manifest.hash}, {text(found.hashed_bytes)} of {text(found.nbytes)} {unit} hashed"
    name = one_line(found.manifest.name)
    emit(f"{name}: verified; {found.files} files, {how} in {found.seconds:.1f} s")
