"""Many headers, each distinct one parsed once.

A large checkpoint often stores one layer per shard file, so that the headers of a hundred files are equal but for the
layer number. Such a header is kept as a template: its bytes with the number cut out. A later file whose header is,
byte for byte, the template with its own number filled in has the same tensors, and has been validated already but for
the size of the file, which is checked for each.

Why this cannot confuse two headers: a template is compared by its bytes, never by a digest, and it is only made when
(1) no backslash is in the header, so that a name is spelled in one way; (2) every ``.layers.<digit>`` in it belongs to
that one number in canonical form, so that names that differ in the template differ under every number; (3) the
placeholder does not occur in it, nor the number in its metadata. ``tests/property`` holds the equality with
``parse_header``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.checkpoint.header_check import LONGEST_NAME, PREFIX_BYTES
from tonnage.checkpoint.headers import Header, TensorEntry, header_end, parse_header
from tonnage.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACEHOLDER = "{layer}"
_MASK = f".layers.{PLACEHOLDER}."
_LAYER = re.compile(rb"\.layers\.(0|[1-9][0-9]{0,5})\.")
_ANY_LAYER = re.compile(rb"\.layers\.(?=[0-9])")
_MEMO_BYTES = 64 << 20
_MOST_PADDING = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardHeader:
    """The header of one shard file, sharing its tensors with every file of the same skeleton.

    Attributes:
        shard_file: Plain file name.
        layer: The layer number that stands for ``{layer}`` in the names of ``skeleton``; None if the names are
            written out.
        skeleton: The validated tensors. The same object for files that differ in their layer number only, so
            ``dict[Header, ...]`` remembers work done per distinct skeleton. Its ``data_begin`` is that of the first
            such file; use the one here.
        data_begin: Where the payload begins in this file.
        file_bytes: Size of this file.
    """

    shard_file: str
    layer: int | None
    skeleton: Header
    data_begin: int
    file_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors in this file."""
        return self.skeleton.payload_bytes

    def __len__(self) -> int:
        """Return the number of tensors in this file."""
        return len(self.skeleton.tensors)

    def real_name(self, name: str) -> str:
        """Return a name of the skeleton as it is written in this file."""
        return name if self.layer is None else name.replace(PLACEHOLDER, str(self.layer))

    def names(self) -> Iterator[str]:
        """Yield the tensor names as written in this file, in payload order."""
        return (self.real_name(tensor.name) for tensor in self.skeleton.tensors)

    def entries(self) -> Iterator[TensorEntry]:
        """Yield the tensors under their names in this file, in payload order."""
        if self.layer is None:
            yield from self.skeleton.tensors
            return
        for entry in self.skeleton.tensors:
            yield TensorEntry(
                name=self.real_name(entry.name),
                dtype=entry.dtype,
                shape=entry.shape,
                begin=entry.begin,
                end=entry.end,
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Template:
    """Header bytes without trailing padding, cut at each layer number."""

    parts: tuple[bytes, ...]
    fixed_bytes: int
    skeleton: Header

    def matches(self, prefix: bytes, number: bytes) -> bool:
        """Say whether the header in ``prefix`` is this template with ``number`` filled in, then only spaces."""
        begin = PREFIX_BYTES + self.fixed_bytes + len(number) * (len(self.parts) - 1)
        if not 0 <= len(prefix) - begin <= _MOST_PADDING or prefix[begin:].strip(b" "):
            return False
        return prefix.startswith((b".layers." + number + b".").join(self.parts), PREFIX_BYTES)


class HeaderReader:
    """Reads the headers of one checkpoint; remembers templates, at most 64 MiB of them."""

    def __init__(self) -> None:
        """Begin with nothing remembered."""
        self._templates: list[_Template] = []
        self._room = _MEMO_BYTES

    def read(self, prefix: bytes, *, shard_file: str, file_bytes: int) -> ShardHeader:
        """Return the validated header of one file.

        Args:
            prefix: Exactly the first bytes of the file up to the end of its header.
            shard_file: Plain file name.
            file_bytes: Size of the whole file.

        Raises:
            CheckpointError: As ``parse_header``, with the names as they are in this file.
        """
        data_begin = header_end(prefix, file_bytes=file_bytes, where=shard_file)
        found = _LAYER.search(prefix, PREFIX_BYTES)
        if found is None or len(prefix) != data_begin:
            header = parse_header(prefix, file_bytes=file_bytes, where=shard_file)
            return _shard(shard_file, None, header, data_begin, file_bytes)
        number = found[1]
        for template in self._templates:
            if template.matches(prefix, number):
                _check_size(template.skeleton, data_begin, file_bytes, shard_file)
                return _shard(shard_file, int(number), template.skeleton, data_begin, file_bytes)
        header = parse_header(prefix, file_bytes=file_bytes, where=shard_file)
        new = _template(prefix, number, header)
        if new is None:
            return _shard(shard_file, None, header, data_begin, file_bytes)
        self._remember(new)
        return _shard(shard_file, int(number), new.skeleton, data_begin, file_bytes)

    def _remember(self, template: _Template) -> None:
        cost = template.fixed_bytes + 64 * len(template.parts)
        if cost <= self._room:
            self._room -= cost
            self._templates.append(template)


def _shard(shard_file: str, layer: int | None, skeleton: Header, data_begin: int, file_bytes: int) -> ShardHeader:
    return ShardHeader(
        shard_file=shard_file, layer=layer, skeleton=skeleton, data_begin=data_begin, file_bytes=file_bytes
    )


def _check_size(skeleton: Header, data_begin: int, file_bytes: int, where: str) -> None:
    expected = data_begin + skeleton.payload_bytes
    if expected != file_bytes:
        what = "truncated" if expected > file_bytes else "extra bytes after the last tensor"
        raise CheckpointError(
            Problem(where=where, what=what, expected=f"{expected} bytes", found=f"{file_bytes} bytes")
        )


def _template(prefix: bytes, number: bytes, header: Header) -> _Template | None:
    """Return a validated header with its layer number cut out, or None if that would be ambiguous."""
    raw = prefix[PREFIX_BYTES:].rstrip(b" ")
    parts = tuple(raw.split(b".layers." + number + b"."))
    placeholder = PLACEHOLDER.encode()
    if b"\\" in raw or placeholder in raw or len(_ANY_LAYER.findall(raw)) != len(parts) - 1:
        return None
    written = f".layers.{number.decode()}."
    if any(written in text for pair in header.metadata.items() for text in pair):
        return None
    tensors = tuple(
        TensorEntry(
            name=entry.name.replace(written, _MASK),
            dtype=entry.dtype,
            shape=entry.shape,
            begin=entry.begin,
            end=entry.end,
        )
        for entry in header.tensors
    )
    if max(len(entry.name) for entry in tensors) > LONGEST_NAME:
        return None
    skeleton = Header(tensors=tensors, metadata=header.metadata, data_begin=header.data_begin)
    fixed = len(raw) - len(number) * (len(parts) - 1)
    return _Template(parts=parts, fixed_bytes=fixed, skeleton=skeleton)
