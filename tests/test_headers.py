from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tonnage.checkpoint import header_check, headers
from tonnage.checkpoint.headers import Header, TensorEntry, parse_header
from tonnage.checkpoint.skeletons import HeaderReader
from tonnage.errors import CheckpointError
from tonnage.formats.dtypes import DTYPE_BITS

HOSTILE = Path(__file__).parent / "hostile"
UP = "model.layers.0.mlp.up_proj.weight"

# What each file of hostile/headers is refused with: the lines after "model.safetensors: ".
REFUSALS = {
    "array": ["header: not a JSON object; expected '{' first; found '['"],
    "begins-late": [UP + ": data_offsets: leaves a hole before it; expected begin 0; found begin 8"],
    "byte-order-mark": ["header: not a JSON object; expected '{' first; found byte 0xef"],
    "bytes-too-few": [UP + ": data_offsets; expected 16 bytes for BF16 [4, 2]; found 8 bytes"],
    "bytes-too-many": [UP + ": data_offsets; expected 16 bytes for BF16 [4, 2]; found 32 bytes"],
    "cut-json": ["header: not JSON; expected one JSON value; found ..."],
    "deep-nesting": ["header: nested too deeply; expected at most 64 levels; found more"],
    "digits-without-end": ["header: number too long; expected at most 400 digits; found 500 digits"],
    "dtype-lower-case": [
        UP + ": unknown dtype; expected a safetensors dtype such as BF16, F8_E4M3 or U8; found 'bf16'"
    ],
    "dtype-number": [
        UP + ": unknown dtype; expected a safetensors dtype such as BF16, F8_E4M3 or U8; found an integer"
    ],
    "duplicate-field": [UP + ": duplicate field dtype; expected one; found 2"],
    "duplicate-metadata": ["__metadata__: duplicate name; expected one entry; found 2 entries"],
    "duplicate-metadata-key": ["__metadata__: duplicate key a; expected one entry; found 2 entries"],
    "duplicate-tensor": [UP + ": duplicate name; expected one entry; found 2 entries"],
    "duplicate-tensor-escaped": [UP + ": duplicate name; expected one entry; found 2 entries"],
    "empty-file": ["truncated; expected at least 8 bytes of header length; found 0 bytes"],
    "empty-header-with-payload": ["extra bytes after the last tensor; expected 10 bytes; found 14 bytes"],
    "extra-byte": ["extra bytes after the last tensor; expected 114 bytes; found 115 bytes"],
    "half-a-byte": [UP + ": size of the tensor; expected whole bytes; found F4 [3]"],
    "hole": ["b.weight: data_offsets: leaves a hole before it; expected begin 8; found begin 9"],
    "leading-space": ["header: not a JSON object; expected '{' first; found ' '"],
    "length-0": ["header length out of range; expected 2 to 100000000 bytes; found 0 bytes"],
    "length-100000001": ["header length out of range; expected 2 to 100000000 bytes; found 100000001 bytes"],
    "length-2-to-the-60": [
        "header length out of range; expected 2 to 100000000 bytes; found 1152921504606846976 bytes"
    ],
    "length-all-ones": ["header length out of range; expected 2 to 100000000 bytes; found 18446744073709551615 bytes"],
    "length-beyond-file": ["truncated inside the header; expected 11 bytes; found 10 bytes"],
    "metadata-half-a-surrogate": ["__metadata__: a; expected Unicode text; found half of a surrogate pair"],
    "metadata-null": ["__metadata__; expected an object of strings; found null"],
    "metadata-number": ["__metadata__: step; expected a string; found an integer"],
    "metadata-then-comma": ["header: not JSON; expected one JSON value; found ..."],
    "missing-dtype": [UP + ": missing field dtype; expected dtype, shape, data_offsets; found shape, data_offsets"],
    "missing-offsets": [UP + ": missing field data_offsets; expected dtype, shape, data_offsets; found dtype, shape"],
    "name-empty": ["empty tensor name; expected a name; found ''"],
    "name-newline": ["a\\nmodel.safetensors: fine: tensor name; expected printable characters; found U+000A"],
    "name-nul": ["a\\x00b: tensor name; expected printable characters; found U+0000"],
    "name-right-to-left": ["a\\u202eb: tensor name; expected printable characters; found U+202E"],
    "name-too-long": ["a" * 200 + "...: tensor name too long; expected at most 1024 characters; found 1025 characters"],
    "nan-in-shape": ["header: not JSON; expected a finite number; found NaN"],
    "no-payload": ["truncated; expected 114 bytes; found 98 bytes"],
    "not-utf-8": ["header: not UTF-8; expected UTF-8 text; found byte 0xff at offset 2"],
    "nul-padding": ["header: not JSON; expected one JSON value; found ..."],
    "offsets-2-to-the-63": [
        UP + ": data_offsets; expected [begin, end] with 0 <= begin <= end < 2^63; found [0, 9223372036854775808]"
    ],
    "offsets-backwards": [UP + ": data_offsets; expected [begin, end] with 0 <= begin <= end < 2^63; found [16, 0]"],
    "offsets-negative": [UP + ": data_offsets; expected [begin, end] with 0 <= begin <= end < 2^63; found [-16, 0]"],
    "offsets-text": [UP + ": data_offsets; expected [begin, end] with 0 <= begin <= end < 2^63; found a string"],
    "offsets-three": [UP + ": data_offsets; expected [begin, end] with 0 <= begin <= end < 2^63; found [0, 8, 16]"],
    "overlap": ["b.weight: data_offsets: overlaps the tensor before it; expected begin 8; found begin 4"],
    "same-place": ["b.weight: data_offsets: overlaps the tensor before it; expected begin 8; found begin 0"],
    "seven-bytes": ["truncated; expected at least 8 bytes of header length; found 7 bytes"],
    "shape-2-to-the-63": [UP + ": shape; expected non-negative integers below 2^63; found [9223372036854775808]"],
    "shape-33-axes": [UP + ": shape; expected at most 32 axes; found 33 axes"],
    "shape-boolean": [UP + ": shape; expected non-negative integers below 2^63; found [a boolean, 8]"],
    "shape-fraction": [UP + ": shape; expected non-negative integers below 2^63; found [8.0]"],
    "shape-minus-zero": [UP + ": shape; expected non-negative integers below 2^63; found [-0.0]"],
    "shape-negative": [UP + ": shape; expected non-negative integers below 2^63; found [-4, -2]"],
    "shape-object": [UP + ": shape; expected an array of non-negative integers; found an object"],
    "shape-overflow-hidden-by-zero": [
        f"{UP}: size of the tensor; expected fewer than 2^63 bits; found BF16 [{1 << 62}, {1 << 62}, 0]"
    ],
    "shape-product-overflows": [
        UP + ": size of the tensor; expected fewer than 2^63 bits; found BF16 [4294967296, 4294967296, 2]"
    ],
    "tensor-is-a-list": [UP + ": not a tensor; expected an object of dtype, shape, data_offsets; found an array"],
    "three-lies": [
        "a.weight: unknown dtype; expected a safetensors dtype such as BF16, F8_E4M3 or U8; found 'U9'",
        UP + ": data_offsets; expected 6 bytes for BF16 [3]; found 16 bytes",
        UP + ": data_offsets: overlaps the tensor before it; expected begin 8; found begin 0",
        "truncated; expected 171 bytes; found 170 bytes",
    ],
    "truncated-header": ["truncated inside the header; expected 98 bytes; found 48 bytes"],
    "truncated-payload": ["truncated; expected 114 bytes; found 113 bytes"],
    "two-values": ["header: not JSON; expected one JSON value; found ..."],
    "unknown-dtype": [UP + ": unknown dtype; expected a safetensors dtype such as BF16, F8_E4M3 or U8; found 'BF17'"],
    "unknown-field": [UP + ": unknown field; expected dtype, shape, data_offsets; found 'stride'"],
}
# What json says is wrong with a text, and where, differs between versions of Python.
SYNTAX = re.compile("(expected one JSON value; found ).*")


def test_every_hostile_header_has_its_refusal() -> None:
    assert {path.stem for path in (HOSTILE / "headers").iterdir()} == set(REFUSALS)


@pytest.mark.parametrize(("name", "expected"), REFUSALS.items(), ids=REFUSALS)
def test_hostile_header_is_refused_with_exactly_its_problems(name: str, expected: list[str]) -> None:
    content = (HOSTILE / "headers" / f"{name}.safetensors").read_bytes()

    with pytest.raises(CheckpointError) as refusal:
        parse_header(content, file_bytes=len(content), where="model.safetensors")

    lines = [SYNTAX.sub(r"\1...", line) for line in str(refusal.value).splitlines()]
    assert lines == [f"model.safetensors: {line}" for line in expected]


def test_hostile_files_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, HOSTILE / "make.py", tmp_path], check=True)

    written, committed = (
        {
            path.relative_to(root): path.read_bytes()
            for kind in ("headers", "index", "config")
            for path in (root / kind).rglob("*")
            if path.is_file()
        }
        for root in (tmp_path, HOSTILE)
    )
    assert written == committed


def shard(header: object, payload: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(payload)


def parse(content: bytes) -> Header:
    return parse_header(content, file_bytes=len(content), where="model.safetensors")


def tensor(nbytes: int, begin: int = 0) -> dict[str, object]:
    return {"dtype": "U8", "shape": [nbytes], "data_offsets": [begin, begin + nbytes]}


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = parse(shard({"b": tensor(4, 2), "a": tensor(2), "__metadata__": {"format": "pt"}}, 6))

    assert header.tensors == (
        TensorEntry(name="a", dtype="U8", shape=(2,), begin=0, end=2),
        TensorEntry(name="b", dtype="U8", shape=(4,), begin=2, end=6),
    )
    assert header.metadata == {"format": "pt"}
    assert header.payload_bytes == 6
    assert [entry.nbytes for entry in header.tensors] == [2, 4]


LEGAL = {
    "no tensors": ({}, 0, {}),
    "scalar": ({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, 4, {"a": ()}),
    "empty tensor": ({"a": tensor(0)}, 0, {"a": (0,)}),
    "empty between": ({"a": tensor(3), "b": tensor(0, 3), "c": tensor(1, 3)}, 4, {"a": (3,), "b": (0,), "c": (1,)}),
    "four bits": ({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, 3, {"a": (2, 3)}),
    "quote in name": ({'a"b\\c': tensor(1)}, 1, {'a"b\\c': (1,)}),
    "unicode name": ({"größe-0": tensor(1)}, 1, {"größe-0": (1,)}),
    "a name like a field": ({"dtype": tensor(1), "shape": tensor(1, 1)}, 2, {"dtype": (1,), "shape": (1,)}),
    "metadata with braces": ({"__metadata__": {"config": "{}"}, "a": tensor(1)}, 1, {"a": (1,)}),
    "metadata last": ({"a": tensor(1), "__metadata__": {"x": "y"}}, 1, {"a": (1,)}),
    "name of 1024": ({"n" * 1024: tensor(1)}, 1, {"n" * 1024: (1,)}),
}


@pytest.mark.parametrize(("header", "payload", "shapes"), LEGAL.values(), ids=LEGAL)
def test_legal_header_is_accepted(header: object, payload: int, shapes: dict[str, tuple[int, ...]]) -> None:
    assert {entry.name: entry.shape for entry in parse(shard(header, payload)).tensors} == shapes


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_every_dtype_has_its_width(dtype: str, bits: int) -> None:
    header = parse(shard({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}, bits))

    assert header.tensors[0].nbytes == bits


@pytest.mark.parametrize("padding", [b"", b" ", b"       ", b"\n"])
def test_padding_after_the_object_is_part_of_the_header(padding: bytes) -> None:
    header = parse(shard(json.dumps({"a": tensor(1)}).encode() + padding, 1))

    assert header.data_begin == 8 + len(json.dumps({"a": tensor(1)})) + len(padding)


def test_twenty_problems_are_written_out_and_the_rest_counted() -> None:
    content = shard({f"t{number:03}": {"dtype": "X", "shape": [], "data_offsets": [0, 0]} for number in range(100)})

    with pytest.raises(CheckpointError) as refusal:
        parse(content)

    assert len(refusal.value.problems) == 21
    assert str(refusal.value).splitlines()[-1] == "model.safetensors: and 80 more problems"


def test_a_claim_of_2_to_the_60_bytes_costs_nothing() -> None:
    content = (1 << 60).to_bytes(8, "little") + b"{}"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            parse_header(content, file_bytes=1 << 62, where="model.safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 100_000


ENTRY = b'"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]}'
TOO_MUCH = {
    "objects": (b'{"":{}' + b',"":{}' * 700_000 + b"}", "Object missing required field"),
    "arrays": (b'{"a":[[]' + b",[]" * 700_000 + b"]}", "Expected `object`, got `array`"),
    "axes": (b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[0' + b",0" * 1_100_000 + b"]}}", "Expected `array` of"),
    "strings": (b'{"a":[""' + b',""' * 2_100_000 + b"]}", "Expected `object`, got `array`"),
    "one name": (b"{" + ENTRY + (b"," + ENTRY) * 210_000 + b"}", "a name or field twice"),
    "metadata": (b'{"__metadata__":{"":""' + b',"":""' * 1_100_000 + b"}}", "a name or field twice"),
}


@pytest.mark.parametrize(("raw", "doubt"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_is_no_header_is_refused_before_it_is_decoded(raw: bytes, doubt: str) -> None:
    """An object costs a hundred times the bytes it is written with."""
    with pytest.raises(CheckpointError) as refusal:
        parse(shard(raw))

    (problem,) = refusal.value.problems
    assert problem.what == "header: not plain, and too large to be explained"
    assert problem.found is not None
    assert problem.found.startswith(doubt)


def test_no_file_has_more_tensors_than_a_large_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that many tensors would have is not decoded."""
    monkeypatch.setattr(headers, "MOST_TENSORS", 3)
    monkeypatch.setattr(header_check, "_MOST_VALUES", 5)
    content = shard({name: tensor(1, place) for place, name in enumerate("abcd")}, 4)

    with pytest.raises(CheckpointError, match=r"too large to be explained; .* found more text than 3 tensors have$"):
        parse(content)


def test_what_strings_spell_is_not_counted() -> None:
    text = ",[{" * 600_000 + '"'
    header = parse(shard({"__metadata__": {"tags": text}, "a": tensor(1)}, 1))

    assert header.metadata == {"tags": text}


def test_a_large_header_with_wrong_values_says_which() -> None:
    """Not decoded a second time: 210,000 are more than that would be done for."""
    entry = '"t%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    raw = "{" + ",".join(entry % (n, n, n + 1 + (n == 205_000)) for n in range(210_000)) + "}"

    with pytest.raises(CheckpointError) as refusal:
        parse(shard(raw.encode(), 10))

    assert str(refusal.value).splitlines() == [
        "model.safetensors: t205000: data_offsets; expected 1 bytes for U8 [1]; found 2 bytes",
        "model.safetensors: t205001: data_offsets: overlaps the tensor before it; expected begin 205002; found begin 205001",
        "model.safetensors: truncated; expected 14156684 bytes; found 13946694 bytes",
    ]


def test_a_prefix_shorter_than_the_header_is_truncated_whatever_the_file_size() -> None:
    with pytest.raises(CheckpointError, match="expected 18 bytes; found 10 bytes"):
        parse_header(shard(b"{}        ")[:10], file_bytes=18, where="model.safetensors")


# ---- skeletons -------------------------------------------------------------------------------------------------------


def layer_file(*names: str, size: int = 2, metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    header |= {name: tensor(size, size * place) for place, name in enumerate(names)}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return shard(raw + b" " * (-len(raw) % 8), size * len(names))


def read_all(*contents: bytes) -> list[tuple[int | None, list[str]]]:
    """Return layer and names of each file, after comparing all entries with a reading on their own."""
    reader = HeaderReader()
    results = []
    for content in contents:
        end = 8 + int.from_bytes(content[:8], "little")
        read = reader.read(content[:end], shard_file="x.safetensors", file_bytes=len(content))
        alone = parse(content)
        assert tuple(read.entries()) == alone.tensors
        assert tuple(read.names()) == tuple(entry.name for entry in alone.tensors)
        assert (read.data_begin, read.payload_bytes) == (alone.data_begin, alone.payload_bytes)
        assert read.skeleton.metadata == alone.metadata
        assert len(read) == len(alone.tensors)
        results.append((read.layer, list(read.names())))
    return results


def test_files_of_one_layer_share_their_skeleton() -> None:
    reader = HeaderReader()
    contents = [layer_file(f"m.layers.{n}.a", f"m.layers.{n}.b", "norm") for n in (9, 10, 0, 123456)]

    headers = [
        reader.read(c[: 8 + int.from_bytes(c[:8], "little")], shard_file="x", file_bytes=len(c)) for c in contents
    ]

    assert len({header.skeleton for header in headers}) == 1
    assert [header.layer for header in headers] == [9, 10, 0, 123456]
    assert [entry.name for entry in headers[0].skeleton.tensors] == ["m.layers.{layer}.a", "m.layers.{layer}.b", "norm"]
    assert list(headers[1].names()) == ["m.layers.10.a", "m.layers.10.b", "norm"]


NOT_SHARED = {
    "no layer": ["lm_head.weight"],
    "two layers": ["m.layers.1.a", "m.layers.2.a"],
    "leading zero": ["m.layers.01.a"],
    "seven digits": ["m.layers.1234567.a"],
    "number at the end": ["m.layers.1.a", "m.layers.1"],
    "number twice in a row": ["m.layers.1.layers.1.a"],
    "letters after the number": ["m.layers.1.a", "m.layers.1b.a"],
    "placeholder in a name": ["m.layers.1.a", "m.layers.{layer}.b"],
    "backslash": ["m.layers.1.a", 'm.layers.1."b"'],
    "unicode digit": ["m.layers.\u0661.a"],
}


@pytest.mark.parametrize("names", NOT_SHARED.values(), ids=NOT_SHARED)
def test_ambiguous_headers_keep_their_names_written_out(names: list[str]) -> None:
    assert read_all(layer_file(*names), layer_file(*names)) == [(None, names), (None, names)]


def test_the_number_twice_in_a_name_is_filled_in_twice() -> None:
    one, two = (f"m.layers.{n}.sub.layers.{n}.a" for n in (1, 2))

    assert read_all(layer_file(one), layer_file(two)) == [(1, [one]), (2, [two])]


def test_metadata_with_the_layer_number_is_not_shared() -> None:
    files = [layer_file(f"m.layers.{n}.a", metadata={"from": f"old.layers.{n}.a"}) for n in (1, 2)]

    assert [layer for layer, _ in read_all(*files)] == [None, None]


def test_other_sizes_or_metadata_are_another_skeleton() -> None:
    files = [
        layer_file("m.layers.1.a"),
        layer_file("m.layers.2.a", size=3),
        layer_file("m.layers.3.a", metadata={"format": "pt"}),
        layer_file("m.layers.4.b"),
    ]

    assert [layer for layer, _ in read_all(*files)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "problem"),
    [(-1, "truncated; expected 74 bytes; found 73 bytes"), (1, "extra bytes after the last tensor; expected 74")],
)
def test_the_size_of_every_file_is_checked(change: int, problem: str) -> None:
    reader = HeaderReader()
    for number, wrong in ((1, 0), (2, change)):
        content = layer_file(f"m.layers.{number}.a")
        end = 8 + int.from_bytes(content[:8], "little")
        if not wrong:
            reader.read(content[:end], shard_file="1.safetensors", file_bytes=len(content))
            continue
        with pytest.raises(CheckpointError, match=re.escape(f"2.safetensors: {problem}")):
            reader.read(content[:end], shard_file="2.safetensors", file_bytes=len(content) + wrong)


def test_a_wrong_header_is_refused_under_its_own_name() -> None:
    reader = HeaderReader()
    for number in (1, 2):
        raw = shard({f"m.layers.{number}.a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}})
        with pytest.raises(CheckpointError, match=rf"{number}.safetensors: m.layers.{number}.a: data_offsets"):
            reader.read(raw, shard_file=f"{number}.safetensors", file_bytes=len(raw) + 2)


def test_a_name_too_long_with_the_placeholder_is_not_shared() -> None:
    names = ["m.layers.1." + "a" * 1010]

    assert read_all(layer_file(*names), layer_file(*names)) == [(None, names), (None, names)]
