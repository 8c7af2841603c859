"""The name of a package: ``arch-tpN-cC-pP-draft-kK-date``, or one the user chose."""

from __future__ import annotations

import re

from tonnage.errors import Problem
from tonnage.export.manifest import NAME_RULE, PackageError, Parallel, is_package_name
from tonnage.saved_plan import SavedProfile

_DATE = re.compile(r"-(\d{4})(\d{2})(\d{2})\Z", re.ASCII)


def package_name(family: str, topology: Parallel, profile: SavedProfile, date: str) -> str:
    """Return the name of a package; parts that do not apply are left out.

    Args:
        family: Of the model.
        topology: Sizes the ranks were cut for.
        profile: What is to be served.
        date: ``YYYY-MM-DD``.

    Raises:
        PackageError: The parts make no name.

    >>> package_name("kimi_k3", Parallel(tp=8), SavedProfile(concurrency=4, prefill_chunk_tokens=4096), "2026-11-30")
    'kimi-k3-tp8-c4-p4096-20261130'
    """
    parts = [family.replace("_", "-"), f"tp{topology.tp}"]
    parts += [f"{name}{size}" for name, size in (("ep", topology.ep), ("pp", topology.pp)) if size > 1]
    if profile.concurrency is not None:
        parts.append(f"c{profile.concurrency}")
    if profile.prefill_chunk_tokens is not None:
        parts.append(f"p{profile.prefill_chunk_tokens}")
    if profile.draft_name is not None:
        parts.append(profile.draft_name)
    if profile.draft_tokens is not None:
        parts.append(f"k{profile.draft_tokens}")
    return check_name("-".join((*parts, date.replace("-", ""))))


def check_name(name: str, *, where: str = "--name") -> str:
    """Return a plain name; it is that of a directory.

    Raises:
        PackageError: It is none.
    """
    if not is_package_name(name):
        raise PackageError(Problem(where=where, what="not the name of a package", expected=NAME_RULE, found=repr(name)))
    return name


def date_in(name: str) -> str | None:
    """Return the date a name ends with.

    >>> date_in("llama-tp2-20261130"), date_in("llama")
    ('2026-11-30', None)
    """
    match = _DATE.search(name)
    return None if match is None else "-".join(match.groups())
