"""From what a user types to where the files are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tonnage.sources.local import LocalSource
from tonnage.sources.model import Source

if TYPE_CHECKING:
    from tonnage.sources.limits import Limits
    from tonnage.sources.transfer import Transfer

REMOTE = ("hf:", "https:", "http:", "s3:", "gs:")
"""What the address of a source elsewhere begins with."""


def is_remote(text: str | Path) -> bool:
    """Whether an address leads off this machine. A path that begins like one is written with ``./``."""
    return isinstance(text, str) and text.lower().startswith(REMOTE)


def open_source(
    text: str | Path,
    *,
    limits: Limits | None = None,
    transfer: Transfer | None = None,
    whole: bool = True,
    in_one: bool = False,
) -> Source:
    """Return the source at an address; a directory on this machine is not looked at yet.

    Args:
        text: ``hf:org/name[@revision]``, ``https://host/directory/``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            or a path.
        limits: How long servers are waited for, and whether they are asked at all; by default as the environment says.
        transfer: Where it is counted what goes over the network; a new one by default.
        whole: Whether it is wanted whole. A web server lists nothing: without, it is asked for no index, and what is
            in the directory are the files that were asked for by name.
        in_one: Whether a web server that ignores ranges will do, as every file is read from front to back.

    Raises:
        SourceError: The address cannot be read, or its server cannot be reached or answers wrong.
    """
    if not is_remote(text):
        return LocalSource(Path(text))
    from tonnage.sources.limits import Limits  # noqa: PLC0415 - a directory on this machine needs none
    from tonnage.sources.transfer import Transfer  # noqa: PLC0415 - as above

    assert isinstance(text, str)
    scheme = text.partition(":")[0].lower()
    limits, transfer = limits or Limits.of_environment(), transfer or Transfer()
    if scheme in ("http", "https"):
        from tonnage.sources.web import open_web  # noqa: PLC0415 - as above

        return open_web(text, limits, transfer, whole=whole, in_one=in_one)
    return _OPENERS[scheme](text, limits, transfer)


def open_folder(source: Source, folder: str) -> Source:
    """Return the source of a directory in a package, at any depth; its files are read from front to back.

    Args:
        source: Open.
        folder: Relative, with ``/``.

    Raises:
        SourceError: As :func:`open_source`.
    """
    if isinstance(source, LocalSource):
        return LocalSource(source.directory / folder)
    if source.address.startswith("hf:"):
        from tonnage.sources.hub import open_hub  # noqa: PLC0415 - as below
        from tonnage.sources.limits import Limits  # noqa: PLC0415 - as below
        from tonnage.sources.transfer import Transfer  # noqa: PLC0415 - as below

        return open_hub(source.address, Limits.of_environment(), source.transfer or Transfer(), folder)
    quoted = quote(folder) if source.address.startswith("http") else folder
    return open_source(f"{source.address.rstrip('/')}/{quoted}", whole=False, in_one=True)


def split_file(text: str) -> tuple[str, str | None]:
    """Return the address of a directory and, where an address ends in ``.json``, the file in it that is meant.

    On the hub, where repositories may be called anything, that is ``config.json``.

    >>> split_file("https://example.com/m/config.json")
    ('https://example.com/m', 'config.json')
    >>> split_file("s3://bucket/m")
    ('s3://bucket/m', None)
    >>> split_file("hf:org/name@main/config.json"), split_file("hf:org/name.json")
    (('hf:org/name@main', 'config.json'), ('hf:org/name.json', None))
    """
    parent, slash, file = text.rpartition("/")
    meant = file == "config.json" if text.lower().startswith("hf:") else file.endswith(".json")
    return (parent, file) if slash and meant else (text, None)


def _open_hub(text: str, limits: Limits, transfer: Transfer) -> Source:
    from tonnage.sources.connections import origin_of  # noqa: PLC0415 - a directory on this machine needs none

    if endpoint := os.environ.get("HF_ENDPOINT"):  # with one that is no URL the client library cannot be imported
        origin_of(endpoint, where=endpoint, plain=True)
    from tonnage.sources.hub import open_hub  # noqa: PLC0415 - its client library takes long to import

    return open_hub(text, limits, transfer)


def _open_store(text: str, limits: Limits, transfer: Transfer) -> Source:
    from tonnage.sources.store import open_store  # noqa: PLC0415 - as above

    return open_store(text, limits, transfer)


_OPENERS = {"hf": _open_hub, "s3": _open_store, "gs": _open_store}
