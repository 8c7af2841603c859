"""Options that say by whom a package must be signed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tonnage.export.signature import Trust

Key = Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Public key that must have signed.")]
CertificateChain = Annotated[
    list[Path] | None,
    typer.Option("--certificate-chain", metavar="PEM", help="Certificates to trust instead of a key; repeatable."),
]
Identity = Annotated[
    str | None, typer.Option("--identity", help="Who must have signed with Sigstore, such as a mail address.")
]
Issuer = Annotated[str | None, typer.Option("--issuer", metavar="URL", help="OpenID Connect provider of the identity.")]
TrustConfig = Annotated[
    Path | None, typer.Option("--trust-config", help="Keys of another Sigstore instance than the public one.")
]
WAYS_OF_TRUST = "one of --key, --certificate-chain, and --identity with --issuer"


def trust_of(
    key: Path | None,
    chain: list[Path] | None,
    identity: str | None,
    issuer: str | None,
    trust_config: Path | None,
    *,
    where: str,
    ways: str = WAYS_OF_TRUST,
) -> Trust:
    """Return by whom a package must be signed.

    Raises:
        UnitError: Not exactly one way of saying so is used.
    """
    from tonnage.errors import Problem, UnitError
    from tonnage.export import signature

    if key is not None and not (chain or identity or issuer or trust_config):
        return signature.PublicKey(path=key)
    if chain and key is None and not (identity or issuer or trust_config):
        return signature.CertificateChain(paths=tuple(chain))
    if identity and issuer and key is None and not chain:
        return signature.SigstoreIdentity(identity=identity, issuer=issuer, trust_config=trust_config)
    raise UnitError(Problem(where=where, what="by whom it must be signed", expected=ways))
