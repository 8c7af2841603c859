"""Where packages are made: in the directory of a preparation, under its lock; nothing looks like one before it is one.

``plan.json``, ``provenance.json`` and ``manifest.json`` are written first, then ``prepare.json`` goes, then the lock.
Last ``model.sig`` gets its name: without it nothing is a package. Killed anywhere, the next run goes on from there. No
weight is read, unless a digest is asked for that was not taken while writing: sizes are looked up, of safetensors files
the headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.checkpoint.io import read_bytes, read_checkpoint_headers
from tonnage.errors import Problem, raise_if_any
from tonnage.export.contents import Standing
from tonnage.export.digests import Digests, files_without, hash_of, read_digests, recorded_digests
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackageError
from tonnage.export.package import Contents, Options, Package, keep_package, make_package
from tonnage.export.signature import SIGNATURE_LIMIT_BYTES
from tonnage.export.walk import Tree, tree_problems, walk_tree
from tonnage.prepare.documents import MANIFEST, PACKAGE_DOCUMENTS, SIGNATURE, SUMMARY
from tonnage.prepare.io import NewFile, PrepareError, sync_directory, write_whole, writing
from tonnage.prepare.output_dir import (
    JOURNAL_FILE,
    LOCK_FILE,
    STATE,
    STATE_FILES,
    check_state,
    is_still,
    locked,
    make_parents,
    path_within,
    remove_partials,
    remove_state,
)
from tonnage.prepare.reader import layer_files
from tonnage.prepare.summary import SUMMARY_LIMIT_BYTES, read_summary

if TYPE_CHECKING:
    from tonnage.export.sign import Signer
    from tonnage.prepare.io import Hash
    from tonnage.prepare.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished package.

    Attributes:
        path: Where it is.
        package: What it is.
        signature_bytes: Size of its signature.
        reread_bytes: Of files that were read once more for digests that were not on record.
        changed: Whether anything was written; not if it was finished and signed with this key.
    """

    path: Path
    package: Package
    signature_bytes: int
    reread_bytes: int
    changed: bool

    @property
    def files(self) -> int:
        """All of them, manifest and signature included."""
        return len(self.package.manifest.files) + 2

    @property
    def nbytes(self) -> int:
        """Of all files."""
        listed = sum(file.nbytes for file in self.package.manifest.files)
        return listed + len(self.package.documents[MANIFEST]) + self.signature_bytes


def export_package(
    directory: Path,
    signer: Signer,
    options: Options,
    *,
    into: Path | None = None,
    on_progress: Callable[[Standing], None] = lambda _: None,
) -> Exported:
    """Make a package of a complete preparation and sign it; a finished one is signed again, if by another key.

    Args:
        directory: What ``prepare`` wrote.
        signer: Signs it.
        options: Its name, its plan.
        into: Directory to move it into, under its name, when it is whole; it stays where it is without.
        on_progress: Told how far it is if files are read once more: when digests are asked for that are not on record.

    Raises:
        PackageError: The preparation is not complete, its files are not those on record, or there is no such name.
        PrepareError: Another run is at work, or the system refuses.
    """
    try:
        _check_begun(directory)
        with _held(directory) as lock:
            remove_partials(directory, (*PACKAGE_DOCUMENTS, SIGNATURE, SUMMARY))
            package, reread_bytes = _read(directory, options, on_progress)
            goal = None if into is None else _goal(directory, into, package.manifest.name)
            signature = signer.sign(package.signed)
            changed = _publish(directory, package, signature, lock)
        if goal is not None:
            _move(directory, goal)
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(directory)
        raise PackageError(Problem(where=where, what="cannot be used", found=error.strerror)) from error
    return Exported(
        path=goal or directory,
        package=package,
        signature_bytes=len(signature),
        reread_bytes=reread_bytes,
        changed=changed,
    )


# --- what is there ----------------------------------------------------------------------------------------------------


def _check_begun(directory: Path) -> None:
    """Refuse, before there is a lock, what is no preparation, or one that is not complete."""
    there = {name for name in (SUMMARY, MANIFEST, STATE, JOURNAL_FILE) if os.path.lexists(directory / name)}
    where = str(directory)
    if not directory.is_dir():
        raise PackageError(Problem(where=where, what="no such directory", expected="what `tonnage prepare` wrote"))
    if SUMMARY not in there and (JOURNAL_FILE in there or (STATE in there and MANIFEST not in there)):
        what = "preparation is not complete; run `tonnage prepare` again"
        raise PackageError(Problem(where=where, what=what, expected=SUMMARY, found="no such file"))
    if not there & {SUMMARY, MANIFEST}:
        what = "neither a preparation nor a package"
        raise PackageError(Problem(where=where, what=what, expected=f"{SUMMARY} or {MANIFEST}", found="neither"))


@contextmanager
def _held(directory: Path) -> Iterator[int]:
    """Hold the directory as a preparation does; leave no lock in it, unless another run put it there."""
    check_state(directory)
    with locked(make_parents(directory, LOCK_FILE)) as lock:
        try:
            yield lock
        finally:
            if is_still(directory / LOCK_FILE, lock):
                remove_state(directory, (LOCK_FILE,))


def _read(directory: Path, options: Options, on_progress: Callable[[Standing], None]) -> tuple[Package, int]:
    """Return the package that is there, or will be, and the bytes read for its digests.

    Its files are there, with their sizes, and no others.
    """
    tree = _walk(directory)
    if SUMMARY not in tree.files:
        documents = {
            name: read_bytes(path_within(directory, name), limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
            for name in PACKAGE_DOCUMENTS
        }
        package = keep_package(documents, options)
        sizes = {file.path: file.nbytes for file in package.manifest.files}
        _check_tree(tree, sizes, (MANIFEST, *({SIGNATURE} & tree.files.keys())))
        return package, 0
    raw = read_bytes(directory / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES, kind=PackageError)
    summary = read_summary(raw, where=SUMMARY)
    sizes = {file.path: file.file_bytes for file in summary.written}
    _check_tree(tree, sizes, (SUMMARY, *(tree.files.keys() & set(PACKAGE_DOCUMENTS))))
    contents = _contents(directory, summary)
    digests, reread_bytes = _digests(directory, summary, options.hash, on_progress)
    return make_package(summary, contents, digests, options), reread_bytes


def _walk(directory: Path) -> Tree:
    with _opened_root(directory) as root:
        return walk_tree(root, closed=(STATE,))


@contextmanager
def _opened_root(directory: Path) -> Iterator[int]:
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def _check_tree(tree: Tree, sizes: Mapping[str, int], others: tuple[str, ...]) -> None:
    """Refuse files that are missing, of another size, or not of the package."""
    problems = list(tree_problems(tree, (*sizes, *others), closed=(STATE,)))
    problems += [
        Problem(where=path, what="not as it was written", expected=f"{nbytes} bytes", found=f"{found} bytes")
        for path, nbytes in sizes.items()
        if (found := tree.files.get(path, nbytes)) != nbytes
    ]
    raise_if_any(PackageError, problems)


def _contents(directory: Path, summary: Summary) -> dict[str, Contents]:
    """Return what the header of every recorded safetensors file holds."""
    paths = {file.path for file in summary.written if file.path.endswith(".safetensors")}
    found: dict[str, Contents] = {}
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        path = directory / folder
        for shard in read_checkpoint_headers(path, also=layer_files(path)).shards:
            relative = f"{folder}/{shard.shard_file}".removeprefix("/")
            found[relative] = Contents(tensors=len(shard), payload_bytes=shard.payload_bytes)
    raise_if_any(
        PackageError,
        (Problem(where=path, what="not named by the index beside it") for path in sorted(paths - found.keys())),
    )
    return found


def _digests(
    directory: Path, summary: Summary, asked: Hash | None, on_progress: Callable[[Standing], None]
) -> tuple[Digests, int]:
    """Return the digests of every file, and the bytes read for those that are not on record.

    Raises:
        PackageError: Files would have to be read, and it was not asked for; or they are not those on record.
    """
    recorded, wanted = recorded_digests(summary), asked or hash_of(summary)
    lacking = frozenset(files_without(recorded, wanted))
    if not lacking:
        return recorded, 0
    if asked is None:
        what = f"no SHA-256 of {len(lacking)} files on record; prepare again, or let export read them once more"
        raise PackageError(Problem(where=SUMMARY, what=what, expected=f"prepare --force, or export --hash {wanted}"))
    sizes = {file.path: file.file_bytes for file in summary.written if file.path in lacking}
    total = sum(sizes.values())

    def tell(nbytes: int, files: int) -> None:
        on_progress(Standing(done_bytes=nbytes, total_bytes=total, tasks_done=files, tasks=len(sizes)))

    with _opened_root(directory) as root:
        return {**recorded, **read_digests(root, sizes, recorded, wanted, tell)}, total


# --- what is written --------------------------------------------------------------------------------------------------


def _publish(directory: Path, package: Package, signature: bytes, lock: int) -> bool:
    """Write what is not there yet, the signature last; return whether anything was."""
    missing = [name for name in PACKAGE_DOCUMENTS if not _holds(directory / name, package.documents[name])]
    for name in missing:
        write_whole(path_within(directory, name), package.documents[name])
    if not missing and not os.path.lexists(directory / SUMMARY) and _holds(directory / SIGNATURE, signature):
        return False
    file = NewFile(path_within(directory, SIGNATURE), len(signature), tag="whole")
    try:
        file.write(memoryview(signature))
        file.sync()
        if not is_still(directory / LOCK_FILE, lock):
            raise PrepareError(Problem(where=str(directory), what="removed or replaced while it was packaged"))
        with writing(directory / SUMMARY):
            (directory / SUMMARY).unlink(missing_ok=True)
        sync_directory(directory)
        remove_state(directory, STATE_FILES)
        file.publish()
    finally:
        file.close()
    sync_directory(directory)
    return True


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file has this content."""
    with suppress(OSError):
        if path.lstat().st_size == len(content):
            return read_bytes(path, limit_bytes=max(len(content), SIGNATURE_LIMIT_BYTES), kind=PackageError) == content
    return False


def _goal(directory: Path, into: Path, name: str) -> Path:
    """Return where a package is moved to, on the same file system; nothing may be there but itself.

    Raises:
        PackageError: As said.
    """
    goal = into / name
    if not into.is_dir():
        raise PackageError(Problem(where=str(into), what="no such directory", expected="where packages are kept"))
    if into.resolve().is_relative_to(directory.resolve()):
        raise PackageError(Problem(where=str(into), what="inside the package", expected="another directory"))
    if os.path.lexists(goal) and goal.resolve() != directory.resolve():
        raise PackageError(Problem(where=str(goal), what="exists already", expected="no such file"))
    if into.stat().st_dev != directory.stat().st_dev:
        raise PackageError(Problem(where=str(into), what="on another file system", expected=f"that of {directory}"))
    return goal


def _move(directory: Path, goal: Path) -> None:
    """Give a package its name, if it has not got it."""
    source = directory.resolve()
    if goal.resolve() != source:
        with writing(goal):
            source.rename(goal)
        for parent in {source.parent, goal.parent}:
            sync_directory(parent)
