"""Laws of headers. The independent oracle is the safetensors library."""

from __future__ import annotations

import json

import numpy as np
import safetensors
from hypothesis import assume, example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from tonnage.checkpoint import header_check
from tonnage.checkpoint.headers import TensorEntry, parse_header
from tonnage.checkpoint.skeletons import HeaderReader
from tonnage.errors import CheckpointError
from tonnage.formats.dtypes import DTYPE_BITS

NUMPY_NAMES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}

names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
specs = st.dictionaries(
    names.filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from(sorted(NUMPY_NAMES)), shapes), max_size=6
)
metadata = st.none() | st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3)


def parse(content: bytes) -> tuple[TensorEntry, ...] | None:
    """Return the tensors of a file, or None if it is refused in the one way a file may be."""
    try:
        return parse_header(content, file_bytes=len(content), where="model.safetensors").tensors
    except CheckpointError as error:
        refusal = error
    assert refusal.problems
    assert len(str(refusal).splitlines()) == len(refusal.problems)
    return None


def by_the_library(content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    """Return dtype, shape and bytes of each tensor as the safetensors library reads them, None if it refuses."""
    try:
        read = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (info["dtype"], tuple(info["shape"]), len(info["data"])) for name, info in read}


def as_dict(tensors: tuple[TensorEntry, ...]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in tensors}


@given(specs, metadata)
def test_what_the_library_writes_is_read_as_written(
    tensors: dict[str, tuple[str, tuple[int, ...]]], strings: dict[str, str] | None
) -> None:
    assume(tensors or strings is None)  # the library writes no JSON for metadata alone, and does not read it either
    arrays = {name: np.zeros(shape, NUMPY_NAMES[dtype]) for name, (dtype, shape) in tensors.items()}
    content = save(arrays, strings)

    header = parse_header(content, file_bytes=len(content), where="model.safetensors")

    assert as_dict(header.tensors) == {name: (*tensors[name], array.nbytes) for name, array in arrays.items()}
    assert header.metadata == (strings or {})
    assert as_dict(header.tensors) == by_the_library(content)
    edges = [0, *(entry.end for entry in header.tensors)]
    assert edges[:-1] == [entry.begin for entry in header.tensors]
    assert header.data_begin + edges[-1] == len(content)


TOKENS = [
    *(f'"{dtype}"' for dtype in DTYPE_BITS),
    *("-0", "-1", "0", "1", "2.0", "1e2", "true", "null", "NaN", "{}", "[]", '""', '"\\u0061"', "\\", '"', ",", ":"),
    *('"__metadata__":{"a":"b"},', '"__metadata__":{"a":1}', '"dtype":"U8",', '"shape":[2],', '"extra":0,'),
    *("[", "]", "{", "}", " ", "\n", "\0", "é", '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'),
    str(1 << 62),
    str(1 << 64),
]


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """Files made from a good header by replacing some of its JSON by a token or by other parts of itself."""
    tensors = draw(specs)
    arrays = {name: np.zeros(shape, NUMPY_NAMES[dtype]) for name, (dtype, shape) in tensors.items()}
    content = save(arrays, draw(metadata))
    end = 8 + int.from_bytes(content[:8], "little")
    raw, payload = content[8:end], content[end:]
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = min(len(raw), start + draw(st.sampled_from([0, 0, 1, 2, 4, 8])))
        other = draw(st.integers(0, len(raw)))
        piece = draw(st.sampled_from([*(token.encode() for token in TOKENS), raw[other : other + 8], b""]))
        raw = raw[:start] + piece + raw[stop:]
    payload = payload[: draw(st.sampled_from([len(payload), len(payload), len(payload) // 2]))]
    return len(raw).to_bytes(8, "little") + raw + payload


@given(mutated_files())
def test_whatever_is_accepted_the_library_accepts_equally(content: bytes) -> None:
    tensors = parse(content)

    if tensors is not None:
        assert as_dict(tensors) == by_the_library(content)


@given(mutated_files())
def test_the_fast_way_agrees_with_the_slow_one(content: bytes) -> None:
    end = 8 + int.from_bytes(content[:8], "little")
    findings = header_check.Findings("model.safetensors")
    spans: list[header_check.Span] = []
    if end >= 10:
        spans, _ = header_check.read(content[8:end], findings)
        header_check.check_layout(spans, end, len(content), findings)

    tensors, problems = (), ()
    try:
        tensors = parse_header(content, file_bytes=len(content), where="model.safetensors").tensors
    except CheckpointError as refusal:
        problems = refusal.problems

    assert end < 10 or problems == findings.problems
    assert problems or [(t.begin, t.end, t.name, t.dtype, t.shape) for t in tensors] == spans


@given(st.binary(max_size=200))
@example(b"\x02" + bytes(7) + b"{}")
def test_arbitrary_bytes_are_accepted_or_refused(content: bytes) -> None:
    parse(content)


@given(st.binary(min_size=2, max_size=200))
@example(b'{"a":' * 40)
def test_arbitrary_headers_are_accepted_or_refused(raw: bytes) -> None:
    parse(len(raw).to_bytes(8, "little") + raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_arbitrary_json_is_accepted_or_refused(value: object) -> None:
    raw = json.dumps({"a": value}).encode()
    parse(len(raw).to_bytes(8, "little") + raw)


PATTERNS = [
    "m.layers.N.a",
    "m.layers.N.b",
    "m.layers.N.x.layers.N.c",
    "m.layers.N.layers.N.c",
    "v.layers.N",
    "m.layers.0N.a",
    "m.layers.1.a",
    "m.layers.12.a",
    "norm",
    "{layer}",
    "m.layers.{layer}.a",
    'm.layers.N."q"',
]


@st.composite
def layer_headers(draw: st.DrawFn) -> bytes:
    """Headers out of a few patterns, so that many are equal but for the number."""
    number = str(draw(st.sampled_from([0, 1, 2, 12, 10**6])))
    chosen = draw(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True))
    step = draw(st.sampled_from([1, 1, 2]))
    header: dict[str, object] = {}
    if draw(st.booleans()):
        header["__metadata__"] = {"from": draw(st.sampled_from(["pt", "m.layers.N.a"])).replace("N", number)}
    for place, pattern in enumerate(chosen):
        offsets = [place * step, (place + 1) * step]
        header[pattern.replace("N", number)] = {"dtype": "U8", "shape": [step], "data_offsets": offsets}
    raw = json.dumps(header).encode() + draw(st.sampled_from([b"", b" ", b"      ", b"\n"]))
    return len(raw).to_bytes(8, "little") + raw


@given(st.lists(st.tuples(layer_headers(), st.integers(0, 6)), max_size=8))
def test_reading_many_headers_is_reading_each_alone(files: list[tuple[bytes, int]]) -> None:
    reader = HeaderReader()
    for prefix, payload in files:
        file_bytes = len(prefix) + payload
        expected: object
        found: object
        try:
            alone = parse_header(prefix, file_bytes=file_bytes, where="x")
            expected = (alone.tensors, alone.metadata, alone.data_begin)
        except CheckpointError as error:
            expected = error.problems
        try:
            shard = reader.read(prefix, shard_file="x", file_bytes=file_bytes)
            found = (tuple(shard.entries()), shard.skeleton.metadata, shard.data_begin)
        except CheckpointError as error:
            found = error.problems
        assert found == expected
