"""The safetensors header: validated whole before one number of it is believed.

``parse_header`` takes the first bytes of a file and the size of the file, and returns every tensor with its place in
the payload, or refuses with all problems at once. Nothing here reads files; reading many headers fast is left to
``skeletons``.

A header msgspec decodes without any doubt takes the fast way; if its values are wrong, ``header_check`` says how.
Everything else (escapes in names, metadata in an unusual place, and whatever is no header) is decoded by
``header_check``, which reads it slowly, explains it, and still accepts what is legal, within bounds of its own.

Source:
    huggingface/safetensors, ``safetensors/src/tensor.rs`` (``read_metadata``, ``Metadata::validate``). Stricter here:
    duplicate names, unknown fields and names that do not print on one line are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from tonnage.checkpoint import header_check
from tonnage.checkpoint.header_check import (
    LARGEST,
    LONGEST_HEADER,
    LONGEST_NAME,
    METADATA,
    MOST_AXES,
    MOST_TENSORS,
    PREFIX_BYTES,
    Findings,
    Span,
)
from tonnage.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_LFS_POINTER = b"version "
"""How a git-lfs pointer begins. As a header length it is far out of range."""


class TensorEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One tensor of a shard file.

    A struct outside the garbage collector's sight rather than a dataclass: a large checkpoint has half a million.

    Attributes:
        name: As the header spells it; in a skeleton, with ``{layer}`` in place of the layer number.
        dtype: As safetensors spells it, a key of ``DTYPE_BITS``.
        shape: Elements per axis, row-major; ``()`` is a scalar.
        begin: First byte within the payload.
        end: Byte after the last, within the payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the payload bytes of this tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """A validated header. Compared by identity, so that work done once per distinct header can be remembered by it.

    Attributes:
        tensors: In the order of their bytes; together they cover the payload without gap or overlap.
        metadata: The strings under ``__metadata__``.
        data_begin: Where the payload begins in the file: 8 plus the length of the JSON.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_begin: int

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return self.tensors[-1].end if self.tensors else 0


def header_end(prefix: bytes, *, file_bytes: int, where: str) -> int:
    """Return where the header of a file ends and its payload begins, from the first 8 bytes.

    Raises:
        CheckpointError: The length cannot be true for a file of this size. Nothing was allocated for it.
    """
    if file_bytes < PREFIX_BYTES or len(prefix) < PREFIX_BYTES:
        found = f"{min(file_bytes, len(prefix))} bytes"
        expected = f"at least {PREFIX_BYTES} bytes of header length"
        raise CheckpointError(Problem(where=where, what="truncated", expected=expected, found=found))
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if prefix[:PREFIX_BYTES] == _LFS_POINTER:
        expected = "the file itself: run `git lfs pull`"
        raise CheckpointError(Problem(where=where, what="a git-lfs pointer", expected=expected))
    if not len(b"{}") <= length <= LONGEST_HEADER:
        expected = f"2 to {LONGEST_HEADER} bytes"
        raise CheckpointError(
            Problem(where=where, what="header length out of range", expected=expected, found=f"{length} bytes")
        )
    if PREFIX_BYTES + length > file_bytes:
        raise CheckpointError(_truncated(where, PREFIX_BYTES + length, file_bytes, "truncated inside the header"))
    return PREFIX_BYTES + length


def parse_header(prefix: bytes, *, file_bytes: int, where: str) -> Header:
    """Return the validated header of one shard file.

    Args:
        prefix: The file from its first byte to the end of its header at least; more is ignored.
        file_bytes: Size of the whole file.
        where: File name, for the refusal.

    Raises:
        CheckpointError: With every problem of this header, at most 20 written out.
    """
    data_begin = header_end(prefix, file_bytes=file_bytes, where=where)
    if len(prefix) < data_begin:
        raise CheckpointError(_truncated(where, data_begin, len(prefix), "truncated inside the header"))
    raw = prefix[PREFIX_BYTES:data_begin]
    plain = _decode_plain(raw)
    if not isinstance(plain, str) and _names_are_plain(plain.fields):
        tensors = _placed(plain.fields)
        if tensors is not None and (tensors[-1].end if tensors else 0) == file_bytes - data_begin:
            return Header(tensors=tensors, metadata=plain.metadata, data_begin=data_begin)
    return _parse_slowly(raw, plain, file_bytes, where)


def _truncated(where: str, expected: int, found: int, what: str) -> Problem:
    return Problem(where=where, what=what, expected=f"{expected} bytes", found=f"{found} bytes")


def _parse_slowly(raw: bytes, plain: _Plain | str, file_bytes: int, where: str) -> Header:
    data_begin = PREFIX_BYTES + len(raw)
    findings = Findings(where)
    metadata: Mapping[str, str]
    if isinstance(plain, str):
        spans, metadata = header_check.read(raw, findings, doubt=plain)
    else:
        values = ((name, field.dtype, field.shape, field.data_offsets) for name, field in plain.fields.items())
        spans, metadata = header_check.read_values(values, findings), plain.metadata
    header_check.check_layout(spans, data_begin, file_bytes, findings)
    findings.raise_if_any()
    return Header(tensors=tuple(map(_entry_of, spans)), metadata=metadata, data_begin=data_begin)


def _entry_of(span: Span) -> TensorEntry:
    return TensorEntry(name=span.name, dtype=span.dtype, shape=span.shape, begin=span.begin, end=span.end)


# ---- the fast way: accept, or have no opinion ------------------------------------------------------------------------

_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class _Fields(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MOST_AXES)]
    data_offsets: tuple[_Size, _Size]


_TENSORS = msgspec.json.Decoder(dict[str, _Fields])
_STRINGS = msgspec.json.Decoder(dict[str, str])
# Metadata as every writer places it: the first member, flat. A comma is taken only if a member follows.
_METADATA = re.compile(
    rb'\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*(\{[^{}\\]*\})[ \t\r\n]*(?:,(?=[ \t\r\n]*")|(?=\}))'
)
_MINUS_ZERO = re.compile(rb"[\[,: \t\r\n]-0")  # as a number, or in a text that looks like it
_QUOTES_PER_TENSOR = 10  # name, three field names, dtype
_BY_PLACE = attrgetter("begin", "end")


class _Plain(NamedTuple):
    """A header in which every name and field stands once and every value has its type."""

    metadata: dict[str, str]
    fields: dict[str, _Fields]


def _decode_plain(raw: bytes) -> _Plain | str:
    """Return the header if its structure is beyond doubt; the doubt to have it read slowly.

    Without backslashes every quote opens or closes a string, and the decoder has refused unknown fields, so the number
    of quotes says exactly whether any name or field was written twice.
    """
    written = raw.count(b'"')
    if written > _QUOTES_PER_TENSOR * MOST_TENSORS:
        return f"more text than {MOST_TENSORS} tensors have"
    if not raw.startswith(b"{") or b"\\" in raw or (b"-0" in raw and _MINUS_ZERO.search(raw)):
        return "an escape or -0"
    metadata: dict[str, str] = {}
    rest, quotes = raw, 0
    try:
        if found := _METADATA.match(raw):
            metadata = _STRINGS.decode(found[1])
            rest = b"{" + raw[found.end() :]
            quotes = 2 + 4 * len(metadata)
        fields = _TENSORS.decode(rest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    if written != quotes + _QUOTES_PER_TENSOR * len(fields) or METADATA in fields:
        return "a name or field twice, or metadata that is not the first member"
    return _Plain(metadata, fields)


def _names_are_plain(names: Iterable[str]) -> bool:
    names = tuple(names)
    return "".join(names).isprintable() and all(map(len, names)) and max(map(len, names), default=0) <= LONGEST_NAME


def _placed(fields: dict[str, _Fields]) -> tuple[TensorEntry, ...] | None:
    """Return the entries in payload order if each has exactly its bytes and they are contiguous from 0."""
    known: dict[tuple[str, tuple[int, ...]], tuple[int | None, str, tuple[int, ...]]] = {}
    tensors = []
    for name, field in fields.items():
        key = (field.dtype, field.shape)
        if key not in known:
            known[key] = (header_check.payload_bytes(*key), *key)
        nbytes, dtype, shape = known[key]
        begin, end = field.data_offsets
        if end - begin != nbytes:
            return None
        tensors.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
    if any(earlier.end != later.begin for earlier, later in pairwise(tensors)):
        tensors.sort(key=_BY_PLACE)
    edge = 0
    for tensor in tensors:
        if tensor.begin != edge:
            return None
        edge = tensor.end
    return tuple(tensors)
