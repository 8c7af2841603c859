"""``tonnage export``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.cli.dates import date_of
from tonnage.cli.options import Context, Json, ProfileName, emit, emit_json, here, note
from tonnage.cli.progress import later, progress
from tonnage.units import counted, unit_for

if TYPE_CHECKING:
    from tonnage.export.comparison import Record
    from tonnage.export.io import Exported
    from tonnage.export.objects import Objects
    from tonnage.export.sign import Key, Signer, Sigstore
    from tonnage.export.upload import Uploaded

PasswordEnv = Annotated[
    str | None, typer.Option("--password-env", metavar="NAME", help="Variable with the password of the key.")
]
Certificate = Annotated[Path | None, typer.Option("--certificate", help="Certificate of the key, PEM.")]
Chain = Annotated[
    list[Path] | None, typer.Option("--chain", help="Certificates above it, in order, PEM; may be repeated.")
]
EXPORT_SCHEMA = "tonnage.export/1"
_MOST_TOKENS = 1 << 20
_PLAN_LIMIT_BYTES = 64 << 20


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `tonnage prepare` wrote, or a package.")],
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key to sign with: PEM, P-256, P-384 or P-521.")
    ] = None,
    password_env: PasswordEnv = None,
    certificate: Certificate = None,
    chain: Chain = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign without a key, as an identity Sigstore vouches for (network).")
    ] = False,
    identity_token_env: Annotated[
        str | None,
        typer.Option("--identity-token-env", metavar="NAME", help="Variable with the identity token for --sigstore."),
    ] = None,
    trust_config: Annotated[
        Path | None, typer.Option("--trust-config", help="Another instance of Sigstore than the public one.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Of the package; auto: arch-tpN-cC-pP-draft-kK-date.")] = "auto",
    date: Annotated[
        str | None, typer.Option("--date", help="In the name, YYYY-MM-DD; else SOURCE_DATE_EPOCH, else today in UTC.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="What `tonnage plan --json` said, in place of the recorded plan.")
    ] = None,
    profile: ProfileName = None,
    context: Context = None,
    draft_name: Annotated[str | None, typer.Option("--draft-name", help="The draft model it is served with.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option("--draft-tokens", min=1, max=_MOST_TOKENS, help="Tokens the draft guesses at once.")
    ] = None,
    hash_name: Annotated[
        Literal["blake3", "sha256"] | None,
        typer.Option(
            "--hash", help="Of the manifest's digests, if not as prepared. Digests not on record: files are read again."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", parser=here, metavar="PARENT", help="Move the finished package to PARENT/NAME."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="ADDRESS", help="Put the package into an object store: s3://bucket/prefix."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --to: remove what else is at the address.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --to: read back every object that is there then.")
    ] = False,
    add: Annotated[
        list[Path] | None,
        typer.Option("--add", metavar="FILE", help="Put a small file in, such as a README.md; may be repeated."),
    ] = None,
    compared: Annotated[
        Path | None,
        typer.Option("--compare", metavar="RECORD", help="Cite what `tonnage compare SOURCE DIR --save` wrote."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a signed package of what was prepared, where it is.

    No weight is read again, unless --hash asks for it.

    Example: tonnage export prepared --key key.pem --profile c4-p4096
    """
    from tonnage.checkpoint.io import read_json
    from tonnage.cli.interruption import interruptible
    from tonnage.export.io import export_package, read_added
    from tonnage.export.manifest import PackageError
    from tonnage.export.naming import check_name
    from tonnage.export.package import Options
    from tonnage.export.sign import load_signer
    from tonnage.profile import parse_profile
    from tonnage.saved_plan import SavedProfile

    served = parse_profile(profile, context_tokens=context)
    options = Options(
        today=date_of(date),
        date=None if date is None else date_of(date),
        name=None if name == "auto" else check_name(name),
        plan=None if plan is None else read_json(plan, limit_bytes=_PLAN_LIMIT_BYTES, kind=PackageError),
        profile=SavedProfile(
            name=served.name,
            concurrency=served.concurrency,
            prefill_chunk_tokens=served.prefill_chunk_tokens,
            context_tokens=served.context_tokens,
            draft_name=None if draft_name is None else check_name(draft_name, where="--draft-name"),
            draft_tokens=draft_tokens,
        ),
        hash=hash_name,
        added=read_added(add or []),
        compared=None if compared is None else _record(compared),
    )
    by_key = key_of(key, certificate, chain or [], password_env)
    signer = load_signer(_only(by_key, _sigstore(sigstore, identity_token_env, trust_config)))
    objects = _objects(to, force=force, check=check)
    with interruptible(), progress() as show:
        exported = export_package(directory, signer, options, into=into, on_progress=later(show))
    uploaded = None if objects is None else _upload(exported.path, objects, force=force, check=check)
    if as_json:
        emit_json(_document(exported, signer, uploaded))
    else:
        _emit_table(exported, signer, uploaded)


def _record(path: Path) -> Record:
    """Return a comparison that is to be cited."""
    from tonnage.checkpoint.io import read_json
    from tonnage.export.comparison import read_record
    from tonnage.export.manifest import PackageError

    return read_record(read_json(path, limit_bytes=_PLAN_LIMIT_BYTES, kind=PackageError), where=path.name)


def _objects(to: str | None, *, force: bool, check: bool) -> Objects | None:
    """Return where the package is to be put, looked at before anything is signed."""
    from tonnage.errors import Problem, UnitError

    if to is None:
        if force or check:
            raise UnitError(Problem(where="--force, --check", what="belong to an upload", expected="--to ADDRESS"))
        return None
    from tonnage.export.objects import Objects

    return Objects(to)


def _upload(directory: Path, objects: Objects, *, force: bool, check: bool) -> Uploaded:
    from tonnage.cli.interruption import interruptible
    from tonnage.export.upload import upload_package

    with interruptible(), progress() as show:
        return upload_package(directory, objects, force=force, check=check, on_progress=later(show))


def key_of(key: Path | None, certificate: Path | None, chain: list[Path], password_env: str | None) -> Key | None:
    """Return the key that is given, with what belongs to it."""
    from tonnage.errors import Problem, UnitError
    from tonnage.export.sign import Key

    if key is None:
        if certificate is not None or chain or password_env is not None:
            where = "--certificate, --chain, --password-env"
            raise UnitError(Problem(where=where, what="belong to a key", expected="--key"))
        return None
    if chain and certificate is None:
        raise UnitError(Problem(where="--chain", what="belongs to a certificate", expected="--certificate"))
    return Key(
        path=key, password=_variable(password_env, "--password-env"), certificate=certificate, chain=tuple(chain)
    )


def _sigstore(wanted: bool, token_env: str | None, trust_config: Path | None) -> Sigstore | None:
    from tonnage.errors import Problem, UnitError
    from tonnage.export.sign import Sigstore

    if not wanted:
        if token_env is not None or trust_config is not None:
            where = "--identity-token-env, --trust-config"
            raise UnitError(Problem(where=where, what="belong to Sigstore", expected="--sigstore"))
        return None
    return Sigstore(identity_token=_variable(token_env, "--identity-token-env"), trust_config=trust_config)


def _only(key: Key | None, sigstore: Sigstore | None) -> Key | Sigstore:
    from tonnage.errors import Problem, UnitError

    if key is not None and sigstore is not None:
        raise UnitError(Problem(where="--key, --sigstore", what="both given", expected="one of them"))
    source = key or sigstore
    if source is None:
        raise UnitError(Problem(where="--key", what="nothing to sign with", expected="--key KEY.pem, or --sigstore"))
    return source


def _variable(name: str | None, where: str) -> str | None:
    """Return what a variable of the environment holds; secrets are no words of a command line."""
    from tonnage.errors import Problem, UnitError

    if name is None:
        return None
    value = os.environ.get(name)
    if value is None:
        raise UnitError(Problem(where=where, what="no such variable in the environment", found=name))
    return value


# --- results ----------------------------------------------------------------------------------------------------------


def _document(exported: Exported, signer: Signer, uploaded: Uploaded | None) -> dict[str, object]:
    manifest = exported.package.manifest
    return {
        "schema": EXPORT_SCHEMA,
        "path": str(exported.path),
        "name": manifest.name,
        "hash": manifest.hash,
        "manifest_sha256": exported.package.digest,
        "files": exported.files,
        "bytes": exported.nbytes,
        "reread_bytes": exported.reread_bytes,
        "signer": {"method": signer.method, "identity": signer.identity},
        "changed": exported.changed,
        "moved": exported.moved,
        "uploaded": None if uploaded is None else asdict(uploaded),
    }


def _emit_table(exported: Exported, signer: Signer, uploaded: Uploaded | None) -> None:
    from tonnage.errors import one_line

    manifest = exported.package.manifest
    unit, text = unit_for(exported.nbytes)
    emit(f"package   {manifest.name}")
    emit(f"path      {one_line(str(exported.path))}")
    emit(f"contents  {counted(exported.files, 'file')}, {text(exported.nbytes)} {unit}, ranks {len(manifest.ranks)}")
    emit(f"manifest  sha256 {exported.package.digest}; of its files {manifest.hash}")
    emit(f"signed    {signer.method} {one_line(signer.identity or '')}".rstrip())
    if exported.reread_bytes:
        note(f"{text(exported.reread_bytes)} {unit} were read once more, to take or to check digests")
    if exported.moved:
        note(f"moved to {one_line(str(exported.path))}")
    elif not exported.changed:
        note("nothing was written: it was packaged and signed so before")
    if uploaded is not None:
        _emit_uploaded(uploaded)


def _emit_uploaded(uploaded: Uploaded) -> None:
    from tonnage.errors import one_line

    unit, text = unit_for(uploaded.nbytes)
    emit(f"uploaded  {one_line(uploaded.address)}: {uploaded.files:,} objects, {text(uploaded.nbytes)} {unit}")
    emit(f"          {uploaded.sent_bytes:,} bytes sent, {uploaded.found_bytes:,} were there")
    if uploaded.aborted:
        emit(f"          {uploaded.aborted:,} unfinished uploads of an earlier run aborted")
    unconfirmed = uploaded.sent - uploaded.confirmed
    if uploaded.read_bytes:
        emit(f"          {uploaded.read_bytes:,} bytes read back, all as they were sent")
    elif unconfirmed:
        emit(f"          {unconfirmed:,} objects of which the store states no more than the size; see --check")
