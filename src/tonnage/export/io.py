"""Where packages are made: in the directory of a preparation, under its lock; nothing looks like one before it is one.

``plan.json``, ``provenance.json`` and ``manifest.json`` are written first, then ``prepare.json`` goes, then the lock.
Last ``model.sig`` gets its name: without it nothing is a package. Killed anywhere, the next run goes on from there. No
weight is read, unless a digest is asked for that was not taken while writing, or only an unsigned manifest states one:
sizes are looked up, of safetensors files the headers are read.

In a finished package nothing is written but another signature, which comes from beside it by one rename: it verifies at
any moment. Exports keep apart by a lock on the directory itself, which is no file in it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.checkpoint.io import read_bytes, read_checkpoint_headers
from tonnage.errors import Problem, one_line, raise_if_any
from tonnage.export.contents import Standing
from tonnage.export.digests import Digests, files_without, hash_of, read_digests, recorded_digests
from tonnage.export.finished import check_signed, check_unsigned
from tonnage.export.manifest import MANIFEST_LIMIT_BYTES, PackageError
from tonnage.export.moving import goal_of, move, resolved
from tonnage.export.package import Contents, Options, Package, keep_package, make_package
from tonnage.export.rank_checks import scale_problems
from tonnage.export.signature import SIGNATURE_LIMIT_BYTES
from tonnage.export.walk import Tree, grouped, tree_problems, walk_tree
from tonnage.prepare.documents import MANIFEST, PACKAGE_DOCUMENTS, SIGNATURE, STATE, SUMMARY
from tonnage.prepare.io import NewFile, PrepareError, own_tag, sync_directory, write_whole, writing
from tonnage.prepare.layout import SIDE_FILE_BYTES, is_side_name
from tonnage.prepare.output_dir import (
    JOURNAL_FILE,
    LOCK_FILE,
    STATE_FILES,
    check_state,
    is_package,
    is_still,
    locked,
    make_parents,
    path_within,
    remove_empty,
    remove_partials,
    remove_state,
)
from tonnage.prepare.reader import layer_files
from tonnage.prepare.slots import SLOTS_FILE
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
        moved: Whether it got another place.
    """

    path: Path
    package: Package
    signature_bytes: int
    reread_bytes: int
    changed: bool
    moved: bool

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
    goal = None
    try:
        _check_begun(directory)
        here = resolved(directory)
        with alone(here) as root, nullcontext() if is_package(here) else _held(here) as lock:
            if lock is None:
                package, reread_bytes = _keep(here, root, options), 0
            else:
                remove_partials(here, (*options.added, *PACKAGE_DOCUMENTS, SIGNATURE, SUMMARY))
                package, reread_bytes = _read(here, root, options, on_progress)
            if into is not None:
                goal = goal_of(here, into, package.manifest.name)
            signature = signer.sign(package.signed)
            changed = _sign_again(here, signature) if lock is None else _publish(here, package, signature, lock)
            moved = goal is not None and move(here, goal)
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(directory)
        raise PackageError(Problem(where=where, what="cannot be used", found=error.strerror)) from error
    return Exported(
        path=goal or directory,
        package=package,
        signature_bytes=len(signature),
        reread_bytes=reread_bytes,
        changed=changed,
        moved=moved,
    )


def read_added(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return small files of the user that are to be put into a package, by name.

    Raises:
        PackageError: One cannot be read, is too large, or has no name that a file beside the weights may have.
    """
    found: dict[str, bytes] = {}
    for path in paths:
        where = f"--add {one_line(str(path))}"
        if not is_side_name(path.name) or path.name == SLOTS_FILE:
            expected = "no code, weights, pickles or indexes, no hidden file, none of those every package has"
            raise PackageError(Problem(where=where, what="not a name of a file to add", expected=expected))
        if path.name in found:
            raise PackageError(Problem(where=where, what="two files of one name", found=path.name))
        found[path.name] = read_bytes(path, limit_bytes=SIDE_FILE_BYTES, kind=PackageError)
    return found


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
def alone(directory: Path) -> Iterator[int]:
    """Keep others out and yield the directory's descriptor; the lock is on the directory: no file shows it.

    Raises:
        PrepareError: Another export, fetch or join is at work.
    """
    with _opened_root(directory) as root:
        try:
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(
                Problem(where=str(directory), what="another export, fetch or join is at work here")
            ) from None
        except OSError:  # some file systems lock no directories; the lock of preparations is still to come
            pass
        yield root


@contextmanager
def _held(directory: Path) -> Iterator[int]:
    """Hold the directory as a preparation does; leave no lock in it, unless another run put it there."""
    check_state(directory)
    try:
        with locked(make_parents(directory, LOCK_FILE)) as lock:
            try:
                yield lock
            finally:
                if is_still(directory / LOCK_FILE, lock):
                    remove_state(directory, (LOCK_FILE,))
    finally:
        remove_empty([directory / STATE])


def _keep(directory: Path, root: int, options: Options) -> Package:
    """Return the finished package that is there, as its signature states it."""
    package = keep_package(_documents(directory), options)
    _check_listed(_walk(root), package, (SIGNATURE,))
    path = path_within(directory, SIGNATURE)
    check_signed(root, package, read_bytes(path, limit_bytes=SIGNATURE_LIMIT_BYTES, kind=PackageError))
    return package


def _documents(directory: Path) -> dict[str, bytes]:
    return {
        name: read_bytes(path_within(directory, name), limit_bytes=MANIFEST_LIMIT_BYTES, kind=PackageError)
        for name in PACKAGE_DOCUMENTS
    }


def _read(directory: Path, root: int, options: Options, on_progress: Callable[[Standing], None]) -> tuple[Package, int]:
    """Return the package that a preparation will be, or one that lacks only its signature, and the bytes read for it.

    Its files are there, with their sizes, and no others.
    """
    tree = _walk(root)
    if SUMMARY not in tree.files:
        package = keep_package(_documents(directory), options)
        _check_listed(tree, package, (), closed=(STATE,))
        files = package.manifest.files
        return package, check_unsigned(root, package, _telling(on_progress, [file.nbytes for file in files]))
    raw = read_bytes(directory / SUMMARY, limit_bytes=SUMMARY_LIMIT_BYTES, kind=PackageError)
    summary = read_summary(raw, where=SUMMARY)
    sizes = {file.path: file.file_bytes for file in summary.written}
    _check_tree(tree, sizes, (SUMMARY, *(tree.files.keys() & {*PACKAGE_DOCUMENTS, *options.added})))
    raise_if_any(PackageError, _in_the_way(directory, tree, options.added))
    contents = _contents(directory, summary)
    digests, reread_bytes = _digests(root, summary, options.hash, on_progress)
    return make_package(summary, contents, digests, options), reread_bytes


def _walk(root: int) -> Tree:
    return walk_tree(root, closed=(STATE,))


@contextmanager
def _opened_root(directory: Path) -> Iterator[int]:
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def _check_listed(tree: Tree, package: Package, others: tuple[str, ...], closed: tuple[str, ...] = ()) -> None:
    sizes = {file.path: file.nbytes for file in package.manifest.files}
    _check_tree(tree, sizes, (MANIFEST, *others), closed)


def _check_tree(
    tree: Tree, sizes: Mapping[str, int], others: tuple[str, ...], closed: tuple[str, ...] = (STATE,)
) -> None:
    """Refuse files that are missing, of another size, or not of the package."""
    problems = list(grouped(tree_problems(tree, (*sizes, *others), closed=closed)))
    problems += [
        Problem(where=path, what="not as it was written", expected=f"{nbytes} bytes", found=f"{found} bytes")
        for path, nbytes in sizes.items()
        if (found := tree.files.get(path, nbytes)) != nbytes
    ]
    raise_if_any(PackageError, problems)


def _in_the_way(directory: Path, tree: Tree, added: Mapping[str, bytes]) -> Iterator[Problem]:
    """Yield files that would be written over: those of the names of added ones that are not the same."""
    for name, raw in added.items():
        if name in tree.files and not holds(directory / name, raw):
            what = "another file of this name is here; call yours otherwise, or prepare a checkpoint with yours in it"
            yield Problem(where=name, what=what, expected="none, or the one to be added")


def _contents(directory: Path, summary: Summary) -> dict[str, Contents]:
    """Return what the header of every recorded safetensors file holds."""
    paths = {file.path for file in summary.written if file.path.endswith(".safetensors")}
    found: dict[str, Contents] = {}
    problems: list[Problem] = []
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        path = directory / folder
        for shard in read_checkpoint_headers(path, also=layer_files(path)).shards:
            relative = f"{folder}/{shard.shard_file}".removeprefix("/")
            found[relative] = Contents(tensors=len(shard), payload_bytes=shard.payload_bytes)
            problems += scale_problems(relative, shard)
    raise_if_any(PackageError, problems)
    raise_if_any(
        PackageError,
        (Problem(where=path, what="not named by the index beside it") for path in sorted(paths - found.keys())),
    )
    return found


def _digests(
    root: int, summary: Summary, asked: Hash | None, on_progress: Callable[[Standing], None]
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
    taken = read_digests(root, sizes, recorded, wanted, _telling(on_progress, list(sizes.values())))
    return {**recorded, **taken}, sum(sizes.values())


def _telling(on_progress: Callable[[Standing], None], sizes: Sequence[int]) -> Callable[[int, int], None]:
    total = sum(sizes)

    def tell(nbytes: int, files: int) -> None:
        on_progress(Standing(done_bytes=nbytes, total_bytes=total, tasks_done=files, tasks=len(sizes)))

    return tell


# --- what is written --------------------------------------------------------------------------------------------------


def _publish(directory: Path, package: Package, signature: bytes, lock: int) -> bool:
    """Write what is not there yet, the signature last; return that something was written."""
    files = {**package.added, **{name: package.documents[name] for name in PACKAGE_DOCUMENTS}}
    missing = [name for name, raw in files.items() if not holds(directory / name, raw)]
    for name in missing:
        write_whole(path_within(directory, name), files[name])
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


def _sign_again(directory: Path, signature: bytes) -> bool:
    """Put a signature in the place of another by one rename, and return whether it is another.

    Until then it is beside the package: a file in it that is not of it would fail every verification.
    """
    if holds(directory / SIGNATURE, signature):
        return False
    parent = directory.parent
    if not os.access(parent, os.W_OK) or parent.stat().st_dev != directory.stat().st_dev:
        what = "a package is signed again by way of a file beside it, and there can be none"
        expected = "a directory around it that can be written, on the same file system"
        raise PackageError(Problem(where=str(directory), what=what, expected=expected))
    file = NewFile(directory / SIGNATURE, len(signature), tag=own_tag(), folder=parent)
    try:
        file.write(memoryview(signature))
        file.sync()
        file.publish()
    finally:
        file.close()
    sync_directory(directory)
    return True


def holds(path: Path, content: bytes) -> bool:
    """Whether a file has this content."""
    with suppress(OSError):
        if path.lstat().st_size == len(content):
            return read_bytes(path, limit_bytes=max(len(content), SIGNATURE_LIMIT_BYTES), kind=PackageError) == content
    return False
