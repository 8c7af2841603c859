"""The slow reading of a safetensors header: every rule on its own, every breach a problem that says what was found.

``headers`` comes here when its fast way is not certain. This module decides; the fast way only ever accepts what this
one would accept. A header of which only values are wrong is not decoded again.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from tonnage.checkpoint.strict_json import (
    Members,
    NotJsonError,
    has_too_much,
    is_unicode,
    kind_of,
    members,
    repeated,
)
from tonnage.errors import CheckpointError, Problem, TonnageError
from tonnage.formats.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PREFIX_BYTES = 8
LONGEST_HEADER = 100_000_000  # safetensors/src/tensor.rs, MAX_HEADER_SIZE
MOST_TENSORS = 1_000_000
"""Of one file. The largest checkpoint known has half as many, in 96 files."""
LONGEST_NAME = 1024
MOST_AXES = 32
LARGEST = (1 << 63) - 1
METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_MOST_VALUES, _MOST_CONTAINERS = 1_000_000, 600_000
"""Of a header that is decoded here: those of 200,000 tensors."""
_WRITTEN_OUT = 20
_SHOWN_NAME, _SHOWN_ITEMS = 200, 8


class Span(NamedTuple):
    """One tensor with usable offsets; dtype and shape may still be wrong if a problem was noted for it."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


_PLACE = attrgetter("begin", "end")


class Findings:
    """The problems of one file: the first 20 kept, the rest counted."""

    def __init__(self, where: str, kind: type[TonnageError] = CheckpointError) -> None:
        """Begin without problems in the file ``where``."""
        self.where = where
        self.kind = kind
        self._kept: list[Problem] = []
        self._count = 0

    def add(
        self, what: str, *, tensor: str | None = None, expected: str | None = None, found: str | None = None
    ) -> None:
        """Note one problem."""
        self._count += 1
        if self._count <= _WRITTEN_OUT:
            self._kept.append(
                Problem(where=self.where, what=what, tensor=_short(tensor), expected=expected, found=found)
            )

    @property
    def full(self) -> bool:
        """Say whether further problems are only counted."""
        return self._count >= _WRITTEN_OUT

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problems kept, and one line for the others."""
        if self._count <= _WRITTEN_OUT:
            return tuple(self._kept)
        return (*self._kept, Problem(where=self.where, what=f"and {self._count - _WRITTEN_OUT} more problems"))

    def raise_if_any(self) -> None:
        """Refuse the file if anything was found."""
        if self._count:
            raise self.kind(*self.problems)


def _short(name: str | None) -> str | None:
    return name if name is None or len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}..."


def payload_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the bytes of a dense tensor, or None if there is no such tensor.

    None: the dtype is unknown, the bits are more than 2^63 - 1 even if another axis is 0 (so that no order of
    multiplication overflows), or the elements do not fill whole bytes.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None or prod(axis for axis in shape if axis) * bits > LARGEST:
        return None
    whole, rest = divmod(prod(shape) * bits, 8)
    return None if rest else whole


def read(raw: bytes, findings: Findings, *, doubt: str = "") -> tuple[list[Span], dict[str, str]]:
    """Return all tensors with usable offsets and the metadata; note everything that is wrong except the layout.

    The layout cannot be judged when a tensor has no usable offsets: then no spans are returned. A header of more than a
    file has that is not written as all are is not decoded, and refused with the doubt the fast way had.
    """
    if not raw.startswith(b"{"):
        found = repr(chr(raw[0])) if chr(raw[0]).isascii() else f"byte 0x{raw[0]:02x}"
        findings.add("header: not a JSON object", expected="'{' first", found=found)
        return [], {}
    if has_too_much(raw, values=_MOST_VALUES, containers=_MOST_CONTAINERS):
        expected = "tensors as safetensors writes them"
        findings.add("header: not plain, and too large to be explained", expected=expected, found=doubt)
        return [], {}
    try:
        document = members(raw)
    except NotJsonError as error:
        findings.add(f"header: {error.what}", expected=error.expected, found=error.found)
        return [], {}
    assert isinstance(document, Members)
    for key, count in repeated(document):
        findings.add("duplicate name", tensor=key, expected="one entry", found=f"{count} entries")
    metadata: dict[str, str] = {}
    spans: list[Span | None] = []
    for name, value in document:
        if name == METADATA:
            metadata = _metadata(value, findings)
        else:
            _check_name(name, findings)
            spans.append(_tensor(name, value, findings))
    return _usable(spans), metadata


def read_values(tensors: Iterable[tuple[str, str, tuple[int, ...], tuple[int, int]]], findings: Findings) -> list[Span]:
    """Return what ``read`` does of tensors that were decoded: name, dtype, shape and offsets, each of its type.

    Args:
        tensors: No name twice; at most 32 axes; all numbers from 0 to 2^63 - 1.
        findings: Gets what is wrong with names and values.
    """
    sizes: dict[tuple[str, tuple[int, ...]], int | None] = {}
    spans: list[Span | None] = []
    for name, dtype, shape, (begin, end) in tensors:
        key = (dtype, shape)
        if key not in sizes:
            sizes[key] = payload_bytes(dtype, shape)
        if sizes[key] == end - begin and 0 < len(name) <= LONGEST_NAME and name.isprintable():
            spans.append(Span(begin, end, name, dtype, shape))
            continue
        _check_name(name, findings)
        spans.append(_judged(name, {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}, findings))
    return _usable(spans)


def _usable(spans: Sequence[Span | None]) -> list[Span]:
    """Return the tensors by their place; none if one of them has none."""
    known = sorted((span for span in spans if span is not None), key=_PLACE)
    return known if len(known) == len(spans) else []


def check_layout(spans: Iterable[Span], data_begin: int, file_bytes: int, findings: Findings) -> None:
    """Note overlaps, holes, missing and extra bytes, of names written twice for the last only.

    With nothing to judge (a tensor without usable offsets was already refused) the size is not judged either.
    """
    ordered = sorted({span.name: span for span in spans}.values(), key=_PLACE)
    if not ordered and findings.problems:
        return
    edge = 0
    for span in ordered:
        if span.begin != edge:
            what = "overlaps the tensor before it" if span.begin < edge else "leaves a hole before it"
            findings.add(
                f"data_offsets: {what}", tensor=span.name, expected=f"begin {edge}", found=f"begin {span.begin}"
            )
        edge = max(edge, span.end)
    if data_begin + edge != file_bytes:
        what = "truncated" if data_begin + edge > file_bytes else "extra bytes after the last tensor"
        findings.add(what, expected=f"{data_begin + edge} bytes", found=f"{file_bytes} bytes")


def _metadata(value: object, findings: Findings) -> dict[str, str]:
    if not isinstance(value, Members):
        findings.add(METADATA, expected="an object of strings", found=kind_of(value))
        return {}
    for key, count in repeated(value):
        findings.add(f"{METADATA}: duplicate key {key}", expected="one entry", found=f"{count} entries")
    strings = {}
    for key, text in value:
        if not isinstance(text, str):
            findings.add(f"{METADATA}: {key}", expected="a string", found=kind_of(text))
        elif not is_unicode(key + text):
            findings.add(f"{METADATA}: {key}", expected="Unicode text", found="half of a surrogate pair")
        else:
            strings[key] = text
    return strings


def _check_name(name: str, findings: Findings) -> None:
    if not name:
        findings.add("empty tensor name", expected="a name", found="''")
    elif len(name) > LONGEST_NAME:
        found = f"{len(name)} characters"
        findings.add("tensor name too long", tensor=name, expected=f"at most {LONGEST_NAME} characters", found=found)
    elif not name.isprintable():
        bad = next(character for character in name if not character.isprintable())
        findings.add("tensor name", tensor=name, expected="printable characters", found=f"U+{ord(bad):04X}")


def _tensor(name: str, value: object, findings: Findings) -> Span | None:
    """Return the tensor if its offsets can be used, noting every problem of its fields."""
    if not isinstance(value, Members):
        findings.add("not a tensor", tensor=name, expected="an object of " + ", ".join(_FIELDS), found=kind_of(value))
        return None
    for key, count in repeated(value):
        findings.add(f"duplicate field {key}", tensor=name, expected="one", found=str(count))
    fields = dict(value)
    for key in fields:
        if key not in _FIELDS:
            findings.add("unknown field", tensor=name, expected=", ".join(_FIELDS), found=repr(key)[:80])
    for key in _FIELDS:
        if key not in fields:
            findings.add(f"missing field {key}", tensor=name, expected=", ".join(_FIELDS), found=", ".join(fields)[:80])
    return _judged(name, fields, findings)


def _judged(name: str, fields: Mapping[str, object], findings: Findings) -> Span | None:
    """Return the tensor if its offsets can be used, noting what is wrong with the values of its fields."""
    dtype = _dtype(name, fields["dtype"], findings) if "dtype" in fields else None
    shape = _shape(name, fields["shape"], findings) if "shape" in fields else None
    offsets = _offsets(name, fields["data_offsets"], findings) if "data_offsets" in fields else None
    if offsets is None:
        return None
    if dtype is not None and shape is not None:
        _check_bytes(name, dtype, shape, offsets, findings)
    return Span(*offsets, name, dtype or "", shape or ())


def _dtype(name: str, value: object, findings: Findings) -> str | None:
    if isinstance(value, str) and value in DTYPE_BITS:
        return value
    found = repr(value)[:80] if isinstance(value, str) else kind_of(value)
    findings.add("unknown dtype", tensor=name, expected="a safetensors dtype such as BF16, F8_E4M3 or U8", found=found)
    return None


def _shape(name: str, value: object, findings: Findings) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        findings.add("shape", tensor=name, expected="an array of non-negative integers", found=kind_of(value))
        return None
    if len(value) > MOST_AXES:
        findings.add("shape", tensor=name, expected=f"at most {MOST_AXES} axes", found=f"{len(value)} axes")
        return None
    axes = _sizes(value)
    if axes is None:
        findings.add("shape", tensor=name, expected="non-negative integers below 2^63", found=_written(value))
    return axes


def _offsets(name: str, value: object, findings: Findings) -> tuple[int, int] | None:
    match _sizes(value) if isinstance(value, list) else None:
        case (begin, end) if begin <= end:
            return begin, end
    found = _written(value) if isinstance(value, list) else kind_of(value)
    findings.add("data_offsets", tensor=name, expected="[begin, end] with 0 <= begin <= end < 2^63", found=found)
    return None


def _sizes(values: list[object]) -> tuple[int, ...] | None:
    sizes = tuple(value for value in values if type(value) is int and 0 <= value <= LARGEST)
    return sizes if len(sizes) == len(values) else None


def _written(values: list[object]) -> str:
    """Return an array as JSON spells it, numbers written out, anything else by its kind."""
    shown = [str(value) if type(value) in (int, float) else kind_of(value) for value in values[:_SHOWN_ITEMS]]
    return f"[{', '.join(text[:40] for text in shown)}{', ...' if len(values) > _SHOWN_ITEMS else ''}]"


def _check_bytes(name: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, int], findings: Findings) -> None:
    begin, end = offsets
    nbytes = payload_bytes(dtype, shape)
    if nbytes is None:
        overflow = prod(axis for axis in shape if axis) * DTYPE_BITS[dtype] > LARGEST
        expected = "fewer than 2^63 bits" if overflow else "whole bytes"
        findings.add("size of the tensor", tensor=name, expected=expected, found=f"{dtype} {_written(list(shape))}")
    elif nbytes != end - begin:
        expected = f"{nbytes} bytes for {dtype} {_written(list(shape))}"
        findings.add("data_offsets", tensor=name, expected=expected, found=f"{end - begin} bytes")
