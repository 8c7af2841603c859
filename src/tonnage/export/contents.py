"""The files of a trusted manifest: there, as they were signed, and saying the same; read once, hashed while read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.errors import Problem, TonnageError
from tonnage.export.agreement import Numerics, document_problems, read_package_plan, read_provenance
from tonnage.export.hashing import Content, Keep, Target, read_targets
from tonnage.export.manifest import Manifest, PackagedFile
from tonnage.export.rank_checks import directory_problems, header_problems, stage_problems
from tonnage.export.statement import Signed
from tonnage.export.walk import Tree, tree_problems, walk_tree
from tonnage.prepare.documents import MANIFEST, PLAN, PROVENANCE, SIGNATURE
from tonnage.prepare.layout import rank_directory
from tonnage.prepare.slots import SLOTS_FILE
from tonnage.sources.model import INDEX_FILE, SUFFIX

if TYPE_CHECKING:
    from tonnage.prepare.io import Hash
    from tonnage.topology import Topology

_KEPT_WHOLE = frozenset({PLAN, PROVENANCE, INDEX_FILE, SLOTS_FILE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far the reading of a package is."""

    done_bytes: int
    total_bytes: int
    resumed_bytes: int = 0
    tasks_done: int
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of a trusted manifest is checked.

    Attributes:
        signed: What the signature says.
        manifest: As signed.
        topology: Of the manifest.
        ranks: Those checked.
        files: Theirs, and those of all ranks.
        closed: Directories of other ranks.
        fast: As asked for.
        besides: Files that are there and not listed.
    """

    signed: Signed
    manifest: Manifest
    topology: Topology
    ranks: tuple[int, ...]
    files: tuple[PackagedFile, ...]
    closed: frozenset[str]
    fast: bool
    besides: tuple[str, ...] = (MANIFEST, SIGNATURE)

    @property
    def hashes(self) -> tuple[Hash, ...]:
        """The manifest's algorithm, and the signature's if it is one by which the manifest states no digests."""
        stated = self.signed.hash in (self.manifest.hash, "sha256")
        return (self.manifest.hash,) if stated else (self.manifest.hash, self.signed.hash)

    def expected(self, file: PackagedFile) -> tuple[str, ...]:
        """Return the digest of a file by each of the algorithms."""
        return (file.digest, self.signed.digests[file.path])[: len(self.hashes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of checking files.

    Attributes:
        hashed_bytes: Bytes hashed.
        ignored: What stands in the directory, is not of the package, and was not looked at.
        absent: Ranks of which there is no file.
        problems: Everything that is wrong with tree, files, and what they say together.
        numerics: What the provenance says of the weights, where nothing is wrong.
    """

    hashed_bytes: int
    ignored: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    problems: tuple[Problem, ...]
    numerics: Numerics | None = None


Read = Callable[[Sequence[Target], Callable[[int, int], None]], Iterator[Content]]
"""Reads files of a package; :func:`tonnage.export.hashing.read_targets` of an open directory."""


def check_files(root: int, scope: Scope, on_progress: Callable[[Standing], None]) -> Checked:
    """Return what is wrong with the files of a package."""
    try:
        tree = walk_tree(root, closed=scope.closed)
    except OSError as error:
        changed = Problem(where="directory", what="changed while it was read", found=error.strerror)
        return Checked(hashed_bytes=0, problems=(changed,))
    return check_tree(tree, partial(read_targets, root), scope, on_progress)


def check_tree(tree: Tree, read: Read, scope: Scope, on_progress: Callable[[Standing], None]) -> Checked:
    """Return what is wrong with the files of a package that were found.

    Args:
        tree: What was found.
        read: Reads some of it.
        scope: What is checked.
        on_progress: Told how far it is.
    """
    paths = [file.path for file in scope.files]
    problems = list(tree_problems(tree, (*paths, *scope.besides), scope.closed))
    present = [file for file in scope.files if file.path in tree.files]
    problems += (
        Problem(
            where=file.path,
            what=f"size{_whose(file)}",
            expected=f"{file.nbytes} bytes",
            found=f"{tree.files[file.path]} bytes",
        )
        for file in present
        if tree.files[file.path] != file.nbytes
    )
    reading = _Reading(scope, [file for file in present if tree.files[file.path] == file.nbytes])
    reading.run(read, on_progress)
    problems += reading.problems
    problems += reading.together(complete=not problems)
    return Checked(
        hashed_bytes=reading.hashed_bytes,
        ignored=tuple(tree.ignored),
        absent=tuple(_absent(tree, scope)),
        problems=tuple(problems),
        numerics=None if problems else reading.numerics,
    )


def _absent(tree: Tree, scope: Scope) -> Iterator[int]:
    """Yield the ranks of which there is nothing: no file, no directory, and nothing in its place that is refused."""
    here = {file.rank for file in scope.files if file.path in tree.files}
    stated = {file.rank for file in scope.files}
    refused = {problem.where for problem in tree.problems}
    for rank in scope.ranks:
        folder = rank_directory(scope.topology, rank)
        parts = folder.split("/")
        places = {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        if rank in stated and rank not in here and folder not in tree.folders and places.isdisjoint(refused):
            yield rank


class _Reading:
    """Reads files, compares digests, and keeps what headers and documents say of those that are as signed."""

    def __init__(self, scope: Scope, files: Sequence[PackagedFile]) -> None:
        self.problems: list[Problem] = []
        self.hashed_bytes = 0
        self.numerics: Numerics | None = None
        self._scope = scope
        self._files = {file.path: file for file in files}
        self._owners = {file.digest: file.path for file in scope.manifest.files}
        self._readers: dict[int | None, HeaderReader] = {}
        self._shards: dict[str, dict[str, ShardHeader]] = {}
        self._documents: dict[str, bytes] = {}
        self._taken: set[str] = set()

    def run(self, read: Read, on_progress: Callable[[Standing], None]) -> None:
        """Read everything, in the order of what is done first; problems come in the order of paths."""
        targets = [self._target(file) for file in self._files.values()]
        total = sum(target.nbytes for target in targets if target.hashes)

        def tell(nbytes: int, files: int) -> None:
            on_progress(Standing(done_bytes=nbytes, total_bytes=total, tasks_done=files, tasks=len(targets)))

        for content in read(targets, tell):
            self._take(content)
        self.hashed_bytes = total
        self.problems.sort(key=lambda problem: problem.where)

    def _target(self, file: PackagedFile) -> Target:
        keep = keep_of(file.path)
        hashes = () if self._scope.fast and keep == "header" else self._scope.hashes
        return Target(path=file.path, nbytes=file.nbytes, keep=keep, hashes=hashes)

    def _take(self, content: Content) -> None:
        file = self._files[content.path]
        problems = list(content.problems)
        if not problems and content.digests:
            problems += self._differences(file, content.digests)
        if not problems and keep_of(file.path) == "header":
            problems += self._take_header(file, content.kept)
        elif not problems:
            self._documents[file.path] = content.kept
        if not problems:
            self._taken.add(file.path)
        self.problems += problems

    def _differences(self, file: PackagedFile, found: tuple[str, ...]) -> Iterator[Problem]:
        for name, wanted, digest in zip(self._scope.hashes, self._scope.expected(file), found, strict=True):
            if digest != wanted:
                owner = self._owners.get(digest)
                other = f", that of {owner}" if owner else ""
                what = f"contents are not those signed{_whose(file)}"
                yield Problem(where=file.path, what=what, expected=f"{name} {wanted}", found=f"{name} {digest}{other}")

    def _take_header(self, file: PackagedFile, prefix: bytes) -> Iterator[Problem]:
        folder, _, name = file.path.rpartition("/")
        try:
            shard = self._readers.setdefault(file.rank, HeaderReader()).read(
                prefix, shard_file=name, file_bytes=file.nbytes
            )
        except TonnageError as error:
            yield from (replace(problem, where=file.path) for problem in error.problems)
            return
        self._shards.setdefault(folder, {})[name] = shard
        yield from header_problems(file, shard, self._scope.manifest, self._scope.topology)

    def together(self, *, complete: bool) -> Iterator[Problem]:
        """Yield what does not fit together; a directory only if all of it is as signed."""
        apart = {_folder(file.path) for file in self._scope.files if file.path not in self._taken}
        for folder in sorted(self._shards.keys() - apart):
            prefix = f"{folder}/" if folder else ""
            documents = (self._documents.get(prefix + name) for name in (INDEX_FILE, SLOTS_FILE))
            yield from directory_problems(prefix, self._shards[folder], *documents)
        if complete and not self.problems:
            try:
                yield from self._across()
            except TonnageError as error:
                yield from error.problems

    def _across(self) -> Iterator[Problem]:
        """Compare plan, provenance and manifest, and the ranks of every pipeline stage that is here as a whole.

        Raises:
            TonnageError: A document, or what a header says of its tensors, makes no sense.
        """
        manifest, topology = self._scope.manifest, self._scope.topology
        plan = read_package_plan(self._documents[PLAN])
        provenance = read_provenance(self._documents[PROVENANCE])
        self.numerics = provenance.numerics
        yield from document_problems(plan, provenance, manifest)
        for stage in range(topology.pp) if manifest.layout == "tp" else ():
            ranks = range(stage * topology.tp, (stage + 1) * topology.tp)
            if set(ranks) <= set(self._scope.ranks):
                held = {rank: self._shards.get(rank_directory(topology, rank), {}) for rank in ranks}
                where = f"{_folder(rank_directory(topology, ranks[0]))}/rank-{ranks[0]}..{ranks[-1]}"
                for problem in stage_problems(held, topology, engine=plan.engine):
                    yield replace(problem, where=f"{where}/{problem.where}")


def keep_of(path: str) -> Keep:
    """Return what of a file is parsed."""
    name = path.rpartition("/")[2]
    return "all" if name in _KEPT_WHOLE else "header" if name.endswith(SUFFIX) else "nothing"


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _whose(file: PackagedFile) -> str:
    return "" if file.rank is None else f" (rank {file.rank})"
