"""Objects below one prefix of an object store, to be written: through obstore, with its own environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from tonnage.errors import Problem, SourceError
from tonnage.export.manifest import PackageError
from tonnage.export.unfinished import abort_unfinished
from tonnage.sources.limits import Limits
from tonnage.sources.parallel import waited
from tonnage.sources.remote import MOST_FILES
from tonnage.sources.store import listing_limit, new_store, plain_address, said

DIGEST = "tonnage-digest"
"""Metadata of an object: algorithm and digest of what was sent."""
STORES = ("s3:", "gs:")
"""What the address of an object store begins with."""
PARTS_AT_ONCE = 3
"""Of one large object."""
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class There:
    """An object that is there: its size."""

    nbytes: int


class Objects:
    """Objects below a prefix."""

    def __init__(self, address: str, limits: Limits | None = None) -> None:
        """Ask for nothing yet.

        Args:
            address: ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
            limits: What the store may cost; by default as the environment says.

        Raises:
            SourceError: It is no such address, or its settings are wrong.
        """
        if not address.lower().startswith(STORES):
            expected = "s3://bucket/prefix, or gs://bucket/prefix"
            raise SourceError(Problem(where=address, what="not an object store", expected=expected))
        self.address = plain_address(address)
        self._limits = limits or Limits.of_environment()
        self._store = new_store(self.address, self._limits)

    def listed(self) -> dict[str, There]:
        """Return all objects below the prefix, by relative path.

        Raises:
            SourceError: The store cannot be reached, or refuses, or there are too many.
        """
        limit = listing_limit(self.address, self._limits)
        with self._asking(""):
            return waited(self._listed, limit)

    def _listed(self) -> dict[str, There]:
        found: dict[str, There] = {}
        for page in obstore.list(self._store):
            found.update((one["path"], There(one["size"])) for one in page)
            if len(found) > MOST_FILES:
                what, expected = "too many objects", f"at most {MOST_FILES}"
                raise SourceError(Problem(where=self.address, what=what, expected=expected))
        return found

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """Return an object whole.

        Raises:
            SourceError: As above, or it is too large.
        """
        with self._asking(path):
            return waited(lambda: self._read_small(path, limit_bytes))

    def _read_small(self, path: str, limit_bytes: int) -> bytes:
        answer = obstore.get(self._store, path)
        nbytes = answer.meta["size"]
        if nbytes > limit_bytes:
            expected, found = f"at most {limit_bytes} bytes", f"{nbytes} bytes"
            raise SourceError(Problem(where=self._of(path), what="too large", expected=expected, found=found))
        return bytes(answer.bytes())

    def stated_digest(self, path: str) -> str | None:
        """Return the digest that stands beside an object; ``None`` if somebody else put it there.

        Raises:
            SourceError: As above.
        """
        with self._asking(path):
            answer = obstore.get(self._store, path, options={"head": True})
            found = {str(name).lower(): value for name, value in answer.attributes.items()}
            return found.get(DIGEST)

    def pieces(self, path: str, nbytes: int) -> Iterator[memoryview]:
        """Yield an object of this size from its first byte to its last.

        Raises:
            SourceError: As above, or it has another size.
        """
        for begin in range(0, nbytes, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, nbytes)
            with self._asking(path):
                piece = memoryview(obstore.get_range(self._store, path, start=begin, end=end))
            if len(piece) != end - begin:
                expected, found = f"{end - begin} bytes", f"{len(piece)} bytes"
                raise SourceError(Problem(where=self._of(path), what="truncated", expected=expected, found=found))
            yield piece

    def put(self, path: str, nbytes: int, pieces: Iterable[bytes], part_bytes: int, *, digest: str) -> str:
        """Write an object, in parts if it is large, and return its ETag without quotes.

        Args:
            path: Relative.
            nbytes: What the pieces are together.
            pieces: If they raise, there is no object.
            part_bytes: Of a part.
            digest: Put beside it.

        Raises:
            SourceError: As above, or the object has another size then.
        """
        attributes = {DIGEST: digest}
        with self._asking(path):
            if nbytes <= part_bytes:
                content = b"".join(pieces)
                obstore.put(self._store, path, content, attributes=attributes, use_multipart=False)
            else:
                obstore.put(
                    self._store,
                    path,
                    iter(pieces),
                    attributes=attributes,
                    chunk_size=part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                )
        return self._checked(path, nbytes)

    def put_whole(self, path: str, content: bytes) -> None:
        """Write a small object.

        Raises:
            SourceError: As :meth:`put`.
        """
        with self._asking(path):
            waited(lambda: obstore.put(self._store, path, content, use_multipart=False))
        self._checked(path, len(content))

    def delete(self, path: str) -> None:
        """Remove an object.

        Raises:
            SourceError: As above.
        """
        with self._asking(path):
            waited(lambda: obstore.delete(self._store, path))

    def abort_unfinished(self, paths: frozenset[str]) -> int | None:
        """Abort what a killed run left half-sent of these objects; see :func:`abort_unfinished`."""
        return abort_unfinished(self.address, paths, self._limits)

    def _checked(self, path: str, nbytes: int) -> str:
        """Return the ETag of an object that must have this size."""
        with self._asking(path):
            meta: Any = waited(lambda: obstore.head(self._store, path))
        if meta["size"] != nbytes:
            expected, found = f"{nbytes} bytes", f"{meta['size']} bytes"
            what = "the object is not what was sent"
            raise SourceError(Problem(where=self._of(path), what=what, expected=expected, found=found))
        return (meta["e_tag"] or "").strip('"')

    def _of(self, path: str) -> str:
        return f"{self.address}/{path}" if path else self.address

    @contextmanager
    def _asking(self, path: str) -> Iterator[None]:
        """Turn what obstore raises into a refusal; what it says of a request holds no credentials."""
        if self._limits.offline:
            raise SourceError(Problem(where=self._of(path), what="offline", expected="a run without --offline"))
        try:
            yield
        except FileNotFoundError as error:
            raise SourceError(Problem(where=self._of(path), what="no such object or bucket")) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            expected = "keys that may read and write it (AWS_ACCESS_KEY_ID...)"
            problem = Problem(where=self._of(path), what="not allowed", expected=expected, found=said(error))
            raise SourceError(problem) from error
        except (SourceError, PackageError):
            raise
        except BaseError as error:
            raise SourceError(Problem(where=self._of(path), what="no answer that helps", found=said(error))) from error
