"""The digests a package states: on record of its preparation, or taken of its files once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from tonnage.errors import Problem, raise_if_any
from tonnage.export.hashing import Target, read_targets
from tonnage.export.manifest import PackageError
from tonnage.prepare.documents import SUMMARY
from tonnage.sources.model import SUFFIX

if TYPE_CHECKING:
    from tonnage.prepare.io import Hash
    from tonnage.prepare.summary import Summary

Digests = Mapping[str, Mapping["Hash", str]]
"""Lower-case hex by path and algorithm."""


def hash_of(summary: Summary) -> Hash:
    """Return the algorithm of a preparation.

    Raises:
        PackageError: There is no such algorithm.
    """
    found = summary.identity.hash
    if found == "blake3":
        return "blake3"
    if found == "sha256":
        return "sha256"
    raise PackageError(Problem(where=SUMMARY, what="unknown hash", expected="blake3 or sha256", found=repr(found)))


def recorded_digests(summary: Summary) -> dict[str, dict[Hash, str]]:
    """Return what was taken while the files were written.

    Raises:
        PackageError: As :func:`hash_of`.
    """
    name = hash_of(summary)
    found: dict[str, dict[Hash, str]] = {}
    for file in summary.written:
        also: dict[Hash, str] = {} if file.sha256 is None or name == "sha256" else {"sha256": file.sha256}
        found[file.path] = {name: file.digest, **also}
    return found


def weights_digest(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for all weights, of the paths and SHA-256 of their files; other files count for nothing."""
    whole = sha256()
    for path in sorted(path for path in digests if path.endswith(SUFFIX)):
        whole.update(f"{digests[path]} {path}\n".encode())
    return whole.hexdigest()


def recorded_weights(summary: Summary) -> str | None:
    """Return the digest of the weights of a preparation; ``None`` where a SHA-256 is not on record.

    Raises:
        PackageError: As :func:`hash_of`.
    """
    known = {
        path: digests.get("sha256") for path, digests in recorded_digests(summary).items() if path.endswith(SUFFIX)
    }
    stated = {path: digest for path, digest in known.items() if digest is not None}
    return weights_digest(stated) if len(stated) == len(known) else None


def files_without(digests: Digests, wanted: Hash) -> tuple[str, ...]:
    """Return the files that lack a digest a package must state: by the algorithm wanted, and SHA-256."""
    return tuple(path for path, known in digests.items() if not known.keys() >= {wanted, "sha256"})


def read_digests(
    root: int, sizes: Mapping[str, int], recorded: Digests, wanted: Hash, on_progress: Callable[[int, int], None]
) -> dict[str, dict[Hash, str]]:
    """Read files once more and return their digests, those on record among them.

    Args:
        root: Descriptor of the directory.
        sizes: Bytes of the files to read.
        recorded: What is on record of each.
        wanted: The algorithm of the manifest.
        on_progress: Told the bytes and files done so far.

    Raises:
        PackageError: A file cannot be read, or is not the one on record; every such file is named.
    """
    problems: list[Problem] = []
    found: dict[str, dict[Hash, str]] = {}
    targets = {
        path: Target(
            path=path,
            nbytes=nbytes,
            keep="nothing",
            hashes=tuple(sorted({wanted, "sha256", *recorded[path]})),
        )
        for path, nbytes in sizes.items()
    }
    for content in read_targets(root, tuple(targets.values()), on_progress):
        problems += content.problems
        taken = dict(zip(targets[content.path].hashes, content.digests, strict=False))
        problems += (
            Problem(
                where=content.path,
                what="not as it was written",
                expected=f"{name} {digest}",
                found=f"{name} {taken[name]}",
            )
            for name, digest in recorded[content.path].items()
            if taken.get(name, digest) != digest
        )
        found[content.path] = taken
    raise_if_any(PackageError, sorted(problems, key=lambda problem: problem.where))
    return found
