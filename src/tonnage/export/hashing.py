"""Files of a package read and hashed at the speed of the machine, without a mapping: a file that shrinks is refused.

Several files at a time, each in a window that stays in the cache of a core. A file so large that the others would be
done before it is hashed by all cores together where the algorithm can be (BLAKE3 is a tree); meanwhile its next window
is read. What is to be parsed of a file is kept while it is hashed, so that the bytes verified are the bytes parsed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Literal

from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end
from tonnage.errors import CheckpointError, Problem, TonnageError
from tonnage.export.walk import opened
from tonnage.prepare.io import new_digest
from tonnage.sources.parallel import as_done

if TYPE_CHECKING:
    from tonnage.prepare.io import Digest, Hash

WINDOW_BYTES = 1 << 20
LARGE_WINDOW_BYTES = 4 << 20
MOST_READERS = 8

Keep = Literal["nothing", "header", "all"]
"""What of a file is kept: nothing, a safetensors header, the whole of it."""


class ReadRefusedError(TonnageError):
    """A file is not as large as it must be, or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A file to be read.

    Attributes:
        path: Below the package, with ``/``.
        nbytes: Size it must have.
        keep: What of it is kept. A file kept whole is in memory: its size was bounded by the caller.
        hashes: Digests to take; of a file without any, only what is kept is read.
    """

    path: str
    nbytes: int
    keep: Keep
    hashes: tuple[Hash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file that was read.

    Attributes:
        path: As in its target.
        kept: Its first bytes, as many as were to be kept.
        digests: One per hash, lower-case hex.
        problems: Why it could not be read; then the rest is empty.
    """

    path: str
    kept: bytes = b""
    digests: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_targets(
    root: int, targets: Sequence[Target], on_progress: Callable[[int, int], None], *, cores: int | None = None
) -> Iterator[Content]:
    """Yield the content of every target, in the order they are done.

    Args:
        root: Descriptor of the package's directory.
        targets: What to read.
        on_progress: Told the bytes and files done so far, a few times a second.
        cores: How many to use; those this process may run on by default.
    """
    account = Account(on_progress)
    width = cores or len(os.sched_getaffinity(0))
    large, small = _parted(targets, width)
    yield from read_all(partial(_content, root, account, width), large, account, at_once=1)
    long = sum(target.nbytes > LARGE_WINDOW_BYTES for target in small)
    each = 2 if long <= width // 2 else 1
    yield from read_all(partial(_content, root, account, each), small, account, at_once=width)


def read_whole(root: int, path: str, *, limit_bytes: int) -> bytes:
    """Return a small file.

    Raises:
        ReadRefusedError: It is no regular file, is too large, or cannot be read.
    """
    try:
        with opened(root, path) as (descriptor, nbytes):
            if nbytes > limit_bytes:
                expected = f"at most {limit_bytes} bytes"
                raise ReadRefusedError(
                    Problem(where=path, what="file too large", expected=expected, found=f"{nbytes} bytes")
                )
            return _read(descriptor, nbytes, path)
    except FileNotFoundError as error:
        raise ReadRefusedError(Problem(where=path, what="file is missing")) from error
    except OSError as error:
        raise ReadRefusedError(_unreadable(path, error)) from error


def digest_of(content: bytes, name: Hash) -> str:
    """Return the digest of bytes at hand."""
    digest = new_digest(name)
    digest.update(memoryview(content))
    return digest.hexdigest()


class Account:
    """What is done so far, counted by the threads, told by the one that waits for them.

    Attributes:
        stopped: Whether nobody waits for what is under way any more.
    """

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        """Begin with nothing done."""
        self.stopped = False
        self._told = on_progress
        self._lock = threading.Lock()
        self._nbytes = self._files = 0

    def add(self, nbytes: int, files: int = 0) -> None:
        """Count more."""
        with self._lock:
            self._nbytes += nbytes
            self._files += files

    def stop(self) -> None:
        """Let what is under way end."""
        self.stopped = True

    def tell(self) -> None:
        """Say how far it is."""
        self._told(self._nbytes, self._files)


def _parted(targets: Sequence[Target], width: int) -> tuple[list[Target], list[Target]]:
    """Return files all cores hash together, one after the other, and the rest, large ones first."""
    ordered = sorted(targets, key=lambda target: -target.nbytes)
    share = sum(target.nbytes for target in targets) // width
    together = [
        target
        for target in ordered
        if width > 1 and target.hashes == ("blake3",) and target.nbytes > max(share, LARGE_WINDOW_BYTES)
    ]
    chosen = {target.path for target in together}
    return together, [target for target in ordered if target.path not in chosen]


def read_all(
    work: Callable[[Target], Content], targets: Sequence[Target], account: Account, *, at_once: int
) -> Iterator[Content]:
    """Yield what work makes of every target, by so many threads, in the order they are done."""
    with closing(as_done(work, targets, threads=at_once, on_poll=account.tell, stop=account.stop)) as contents:
        yield from contents
    account.stopped = False


def _content(root: int, account: Account, width: int, target: Target) -> Content:
    try:
        with opened(root, target.path) as (descriptor, nbytes):
            check_size(target, nbytes)
            kept = _kept(descriptor, target)
            digests = _hash(descriptor, target, kept, account, width) if target.hashes else ()
    except ReadRefusedError as error:
        return Content(path=target.path, problems=error.problems)
    except OSError as error:
        return Content(path=target.path, problems=(_unreadable(target.path, error),))
    account.add(0, files=1)
    return Content(path=target.path, kept=kept, digests=digests)


def check_size(target: Target, nbytes: int) -> None:
    """Refuse a file of another size.

    Raises:
        ReadRefusedError: As said.
    """
    if nbytes != target.nbytes:
        expected, found = f"{target.nbytes} bytes", f"{nbytes} bytes"
        raise ReadRefusedError(Problem(where=target.path, what="size", expected=expected, found=found))


def _kept(descriptor: int, target: Target) -> bytes:
    """Return what is to be kept; of a header that cannot be one its length alone, for whoever parses it to refuse."""
    if target.keep != "header":
        return _read(descriptor, target.nbytes, target.path) if target.keep == "all" else b""
    start = _read(descriptor, min(PREFIX_BYTES, target.nbytes), target.path)
    try:
        end = header_end(start, file_bytes=target.nbytes, where=target.path)
    except CheckpointError:
        return start
    return start + _read(descriptor, end - len(start), target.path, len(start))


def _read(descriptor: int, nbytes: int, where: str, offset: int = 0) -> bytes:
    buffer = bytearray(nbytes)
    _fill(descriptor, memoryview(buffer), offset, where)
    return bytes(buffer)


def _fill(descriptor: int, view: memoryview, offset: int, where: str) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            expected, found = f"{offset + len(view)} bytes", f"{offset + done} bytes"
            raise ReadRefusedError(
                Problem(where=where, what="truncated while it was read", expected=expected, found=found)
            )
        done += count


def _hash(descriptor: int, target: Target, kept: bytes, account: Account, width: int) -> tuple[str, ...]:
    """Return the digests of a file, of which the first bytes are at hand."""
    with suppress(OSError):  # advice
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digests = [_wide_digest() if name == "blake3" and width > 1 else new_digest(name) for name in target.hashes]
    windows = _windows if width == 1 or target.nbytes <= LARGE_WINDOW_BYTES else _windows_ahead
    _update(digests, memoryview(kept), account)
    for window in windows(descriptor, target, len(kept), width):
        if account.stopped:
            break
        _update(digests, window, account)
    return tuple(digest.hexdigest() for digest in digests)


def _update(digests: list[Digest], window: memoryview, account: Account) -> None:
    for digest in digests:
        digest.update(window)
    account.add(len(window))


def _wide_digest() -> Digest:
    from blake3 import blake3  # noqa: PLC0415 - not needed for SHA-256

    return blake3(max_threads=blake3.AUTO)


def _windows(descriptor: int, target: Target, begin: int, _width: int) -> Iterator[memoryview]:
    """Yield the rest of a file through one buffer."""
    buffer = memoryview(bytearray(min(WINDOW_BYTES, target.nbytes)))
    for offset, nbytes in _places(begin, target.nbytes, WINDOW_BYTES):
        _fill(descriptor, buffer[:nbytes], offset, target.path)
        yield buffer[:nbytes]


def _windows_ahead(descriptor: int, target: Target, begin: int, width: int) -> Iterator[memoryview]:
    """Yield the rest of a file through two buffers; while one is in use the other is filled, by several if it pays."""
    readers = min(max(width // 2, 1), MOST_READERS)
    window = LARGE_WINDOW_BYTES * readers
    buffers = cycle([memoryview(bytearray(window)) for _ in range(2)])
    with ThreadPoolExecutor(readers) as pool:

        def fill(view: memoryview, offset: int) -> list[Future[None]]:
            return [
                pool.submit(_fill, descriptor, view[at : at + LARGE_WINDOW_BYTES], offset + at, target.path)
                for at in range(0, len(view), LARGE_WINDOW_BYTES)
            ]

        before: tuple[memoryview, list[Future[None]]] | None = None
        for offset, nbytes in _places(begin, target.nbytes, window):
            view = next(buffers)[:nbytes]
            filling = fill(view, offset)
            if before is not None:
                yield _filled(*before)
            before = view, filling
        if before is not None:
            yield _filled(*before)


def _places(begin: int, end: int, window: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of every window; they begin at multiples of their size. A file may be of any size."""
    while begin < end:
        nbytes = min(window - begin % window, end - begin)
        yield begin, nbytes
        begin += nbytes


def _filled(view: memoryview, filling: list[Future[None]]) -> memoryview:
    for future in filling:
        future.result()
    return view


def _unreadable(path: str, error: OSError) -> Problem:
    expected = "a regular file, no link on the way to it"
    return Problem(where=path, what="cannot be read", expected=expected, found=error.strerror or "something else")
