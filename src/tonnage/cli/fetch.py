"""``tonnage fetch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json, emit, emit_json, here
from tonnage.cli.progress import later, progress
from tonnage.units import counted, unit_for

if TYPE_CHECKING:
    from tonnage.export.fetch import Fetched

FETCH_SCHEMA = "tonnage.fetch/1"


def fetch(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="A signed package: s3://bucket/prefix, https://host/dir/, hf:org/name."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            parser=here,
            metavar="PATH",
            help="Directory of the package here: new, empty, or one to be resumed.",
        ),
    ],
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
        list[int] | None,
        typer.Option("--rank", min=0, help="Fetch the files of this rank and of all ranks only; repeatable."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Fetch the files of these ranks, such as 0-7, and of all ranks only.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="TP size the package must be cut for.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a signed package here, or some ranks of it.

    Verified while it comes, resumable after anything. Exit code 4 if it is not what was signed.

    Example: tonnage fetch s3://models/kimi-k3-tp8 --key release.pub.pem --rank 3 -o ./kimi-k3-tp8
    """
    from tonnage.cli.interruption import interruptible, system_errors
    from tonnage.cli.trust import trust_of
    from tonnage.cli.verify import chosen_ranks
    from tonnage.export.fetch import fetch_package
    from tonnage.export.remote import RemotePackage
    from tonnage.export.verify import VerifyRequest
    from tonnage.sources.addresses import open_source

    trust = trust_of(key, certificate_chain, identity, issuer, trust_config, where="fetch")
    request = VerifyRequest(ranks=chosen_ranks(rank, ranks), tp=tp)
    with interruptible(), system_errors(output):
        package = RemotePackage(open_source(address, whole=False, in_one=True))
        with progress() as show:
            fetched = fetch_package(package, output, trust, request, later(show))
    if as_json:
        emit_json(_document(fetched))
    else:
        _emit_table(fetched)


def _document(fetched: Fetched) -> dict[str, object]:
    return {
        "schema": FETCH_SCHEMA,
        "path": str(fetched.path),
        "package": fetched.manifest.name,
        "signer": fetched.signer,
        "ranks": list(fetched.ranks),
        "files": fetched.files,
        "bytes": fetched.nbytes,
        "fetched_bytes": fetched.fetched_bytes,
    }


def _emit_table(fetched: Fetched) -> None:
    from tonnage.errors import one_line

    unit, text = unit_for(fetched.nbytes)
    here = fetched.nbytes - fetched.fetched_bytes
    ranks = ", ".join(map(str, fetched.ranks))
    emit(f"package   {one_line(fetched.manifest.name)}, signed {one_line(fetched.signer)}".rstrip())
    emit(f"path      {one_line(str(fetched.path))}")
    emit(f"contents  {counted(fetched.files, 'file')}, {text(fetched.nbytes)} {unit}, ranks {ranks}")
    emit(f"fetched   {fetched.fetched_bytes:,} bytes, each hashed on its way; {here:,} bytes were here")
