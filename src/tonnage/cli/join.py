"""``tonnage join``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.export import Certificate, Chain, PasswordEnv, key_of
from tonnage.cli.options import Json, emit, emit_json, here, note
from tonnage.units import ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.export.joining import Part
    from tonnage.export.package import Package
    from tonnage.export.sign import Signer

JOIN_SCHEMA = "tonnage.join/1"


def join(
    parts: Annotated[
        list[Path],
        typer.Argument(metavar="PART...", help="Packages of some ranks each, or copies of their four documents."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", parser=here, metavar="PATH", help="Directory for the documents of the joint package."
        ),
    ],
    part_key: Annotated[
        list[Path],
        typer.Option("--part-key", metavar="PEM", help="Public key that must have signed the parts; repeatable."),
    ],
    key: Annotated[Path, typer.Option("--key", help="Private key to sign with: PEM, P-256, P-384 or P-521.")],
    password_env: PasswordEnv = None,
    certificate: Certificate = None,
    chain: Chain = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the package; that of the parts by default.")] = None,
    as_json: Json = False,
) -> None:
    """Make one signed package of packages of some ranks each.

    Only their documents are read: every host keeps the files it has.

    Example: tonnage join from-a from-b --part-key hosts.pub.pem --key release.pem -o joint
    """
    from tonnage.cli.interruption import interruptible, system_errors
    from tonnage.export.joining import join_parts
    from tonnage.export.parts import read_part, write_documents
    from tonnage.export.sign import load_signer
    from tonnage.export.signature import PublicKey

    by_key = key_of(key, certificate, chain or [], password_env)
    assert by_key is not None  # the option is required
    with interruptible(), system_errors(output):
        signer = load_signer(by_key)
        trusts = tuple(PublicKey(path=path) for path in part_key)
        found = [read_part(part, trusts) for part in parts]
        package = join_parts(found, name=name)
        changed = write_documents(output, package, signer.sign(package.signed))
    if as_json:
        emit_json(_document(found, package, output, signer, changed=changed))
    else:
        _emit(found, package, output, signer)
        if not changed:
            note("nothing was written: it was joined and signed so before")


def _absent(package: Package) -> list[int]:
    return sorted(set(range(package.manifest.topology.world_size)) - set(package.manifest.ranks))


def _document(
    parts: Sequence[Part], package: Package, output: Path, signer: Signer, *, changed: bool
) -> dict[str, object]:
    return {
        "schema": JOIN_SCHEMA,
        "path": str(output),
        "name": package.manifest.name,
        "manifest_sha256": package.digest,
        "parts": [{"path": part.where, "ranks": list(part.manifest.ranks)} for part in parts],
        "ranks": list(package.manifest.ranks),
        "absent_ranks": _absent(package),
        "files": len(package.manifest.files) + 2,
        "signer": {"method": signer.method, "identity": signer.identity},
        "changed": changed,
    }


def _emit(parts: Sequence[Part], package: Package, output: Path, signer: Signer) -> None:
    from tonnage.errors import one_line

    emit(f"package   {package.manifest.name}")
    emit(f"path      {one_line(str(output))}: its documents; every host puts them beside the files it has")
    for part in parts:
        emit(f"part      {part.where}: ranks {ranges(part.manifest.ranks)}")
    if absent := _absent(package):
        emit(f"absent    ranks {ranges(absent)}: no part has them")
    emit(f"manifest  sha256 {package.digest}; {len(package.manifest.files) + 2:,} files in all")
    emit(f"signed    {signer.method} {one_line(signer.identity or '')}".rstrip())
