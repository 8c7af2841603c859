"""Write the hostile files: one lie each, all tiny. ``python tests/hostile/make.py [DIRECTORY]``.

What each must be refused with stands in ``test_headers.py`` (headers), ``test_index.py`` (index) and
``test_checkpoint_io.py`` (config).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

Json = Mapping[str, object]
NAME = "model.layers.0.mlp.up_proj.weight"
GOOD = {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}


def shard(header: Json | str | bytes, payload: int = 16, *, length: int | None = None) -> bytes:
    """Return a shard file: length, header, zeros."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else compact(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(payload)


def compact(value: Json) -> str:
    """Return JSON as the safetensors library writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def one(**changes: object) -> Json:
    """Return a header of one tensor with some fields changed; None removes a field."""
    fields = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    return {NAME: fields}


def two(first: tuple[int, int], second: tuple[int, int]) -> Json:
    """Return a header of two tensors of 8 elements at these places."""
    return {
        "a.weight": {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": list(first)},
        "b.weight": {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": list(second)},
    }


def fields(text: str) -> str:
    """Return the JSON of a header of one good tensor with raw text put in place of the closing brace."""
    return compact({NAME: GOOD})[:-2] + text


HEADERS: dict[str, bytes] = {
    "empty-file": b"",
    "seven-bytes": b"\2\0\0\0\0\0\0",
    "length-0": shard("", 0),
    "length-2-to-the-60": shard({}, 0, length=1 << 60),
    "length-all-ones": shard({}, 0, length=(1 << 64) - 1),
    "length-100000001": shard({}, 0, length=100_000_001),
    "length-beyond-file": shard({}, 0, length=3),
    "truncated-header": shard(compact(one())[:40], 0, length=90),
    "truncated-payload": shard(one(), 15),
    "no-payload": shard(one(), 0),
    "extra-byte": shard(one(), 17),
    "empty-header-with-payload": shard({}, 4),
    "array": shard("[]", 0),
    "leading-space": shard(" {}", 0),
    "byte-order-mark": shard(b"\xef\xbb\xbf{}", 0),
    "two-values": shard("{}{}", 0),
    "cut-json": shard('{"a.weight":{"dtype":"U8"', 0),
    "nul-padding": shard(b"{}\0\0\0\0\0\0", 0),
    "not-utf-8": shard(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0),
    "deep-nesting": shard('{"a":' + "[" * 5000, 0),
    "nan-in-shape": shard(compact(one(shape=[8])).replace("[8]", "[NaN]")),
    "digits-without-end": shard(compact(one(shape=[8])).replace("[8]", "[" + "9" * 500 + "]")),
    "duplicate-tensor": shard(fields('},"' + NAME + '":' + compact(GOOD) + "}")),
    "duplicate-tensor-escaped": shard(fields('},"\\u006d' + NAME[1:] + '":' + compact(GOOD) + "}")),
    "duplicate-field": shard(fields(',"dtype":"BF16"}}')),
    "duplicate-metadata": shard('{"__metadata__":{"a":"b"},"__metadata__":{}}', 0),
    "duplicate-metadata-key": shard('{"__metadata__":{"a":"b","a":"c"}}', 0),
    "metadata-null": shard('{"__metadata__":null}', 0),
    "metadata-number": shard('{"__metadata__":{"step":3}}', 0),
    "metadata-then-comma": shard('{"__metadata__":{},}', 0),
    "metadata-half-a-surrogate": shard('{"__metadata__":{"a":"\\ud800"}}', 0),
    "tensor-is-a-list": shard({NAME: [1, 2]}, 0),
    "missing-dtype": shard(one(dtype=None)),
    "missing-offsets": shard(one(data_offsets=None)),
    "unknown-field": shard(one(stride=[2, 1])),
    "unknown-dtype": shard(one(dtype="BF17")),
    "dtype-lower-case": shard(one(dtype="bf16")),
    "dtype-number": shard(one(dtype=16)),
    "shape-object": shard(one(shape={"0": 4})),
    "shape-negative": shard(one(shape=[-4, -2])),
    "shape-boolean": shard(one(shape=[True, 8])),
    "shape-fraction": shard(compact(one(shape=[8])).replace("[8]", "[8.0]")),
    "shape-minus-zero": shard(compact(one(shape=[0], data_offsets=[0, 0])).replace("[0]", "[-0]"), 0),
    "shape-2-to-the-63": shard(one(shape=[1 << 63])),
    "shape-product-overflows": shard(one(shape=[1 << 32, 1 << 32, 2])),
    "shape-overflow-hidden-by-zero": shard(one(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0]), 0),
    "shape-33-axes": shard(one(shape=[1] * 33, data_offsets=[0, 2]), 2),
    "half-a-byte": shard(one(dtype="F4", shape=[3], data_offsets=[0, 2]), 2),
    "offsets-three": shard(one(data_offsets=[0, 8, 16])),
    "offsets-backwards": shard(one(data_offsets=[16, 0])),
    "offsets-negative": shard(one(data_offsets=[-16, 0])),
    "offsets-text": shard(one(data_offsets="0,16")),
    "offsets-2-to-the-63": shard(one(data_offsets=[0, 1 << 63])),
    "bytes-too-few": shard(one(data_offsets=[0, 8]), 8),
    "bytes-too-many": shard(one(data_offsets=[0, 32]), 32),
    "begins-late": shard(one(data_offsets=[8, 24]), 24),
    "overlap": shard(two((0, 8), (4, 12)), 12),
    "hole": shard(two((0, 8), (9, 17)), 17),
    "same-place": shard(two((0, 8), (0, 8)), 8),
    "name-empty": shard({"": GOOD}),
    "name-newline": shard({"a\nmodel.safetensors: fine": GOOD}),
    "name-nul": shard({"a\0b": GOOD}),
    "name-right-to-left": shard({"a\u202eb": GOOD}),
    "name-too-long": shard({"a" * 1025: GOOD}),
    "three-lies": shard({"a.weight": {"dtype": "U9", "shape": [8], "data_offsets": [0, 8]}, **one(shape=[3])}, 15),
}

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
TENSOR = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
SHARDS = {SHARD: shard({"a.weight": TENSOR}, 4), OTHER: shard({"b.weight": TENSOR}, 4)}
WEIGHTS: dict[str, object] = {"a.weight": SHARD, "b.weight": OTHER}


def mapped(weights: Json) -> dict[str, bytes]:
    """Return a directory of two shards and an index with changes to ``weight_map``."""
    index = json.dumps({"metadata": {"total_size": 8}, "weight_map": {**WEIGHTS, **weights}}, indent=2) + "\n"
    return {**SHARDS, "model.safetensors.index.json": index.encode()}


def indexed(index: str | bytes | None = None) -> dict[str, bytes]:
    """Return a directory of two shards and an index, if given with a text of its own."""
    if index is None:
        return mapped({})
    return {**SHARDS, "model.safetensors.index.json": index if isinstance(index, bytes) else index.encode()}


def replaced(old: str, new: str) -> dict[str, bytes]:
    """Return a directory with some text of its good index replaced."""
    return indexed(indexed()["model.safetensors.index.json"].decode().replace(old, new))


def without(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Return a directory less one file."""
    return {key: value for key, value in files.items() if key != name}


INDEXES: dict[str, dict[str, bytes]] = {
    "missing-shard": without(indexed(), OTHER),
    "missing-all-shards": {"model.safetensors.index.json": indexed()["model.safetensors.index.json"]},
    "wrong-shard": mapped({"b.weight": SHARD}),
    "unknown-tensor": mapped({"c.weight": SHARD}),
    "tensor-not-indexed": {**indexed(), SHARD: shard({"a.weight": TENSOR, "c.weight": EMPTY}, 4)},
    "tensor-in-two-shards": {**indexed(), OTHER: shard({"a.weight": EMPTY, "b.weight": TENSOR}, 4)},
    "truncated-shard": {**indexed(), OTHER: SHARDS[OTHER][:-1]},
    "file-up": mapped({"b.weight": "../" + OTHER}),
    "file-absolute": mapped({"b.weight": "/etc/passwd.safetensors"}),
    "file-backslash": mapped({"b.weight": "..\\x.safetensors"}),
    "file-nul": mapped({"b.weight": "x\0.safetensors"}),
    "file-empty": mapped({"b.weight": ""}),
    "file-dots": mapped({"b.weight": ".."}),
    "file-pickle": mapped({"b.weight": "pytorch_model.bin"}),
    "file-number": mapped({"b.weight": 2}),
    "file-null": mapped({"b.weight": None}),
    "file-list": mapped({"b.weight": [OTHER]}),
    "duplicate-name": replaced('"b.weight": ', f'"a.weight": "{SHARD}", "b.weight": '),
    "duplicate-name-escaped": replaced('"b.weight": ', f'"\\u0061.weight": "{SHARD}", "b.weight": '),
    "duplicate-name-elsewhere": replaced('"b.weight": ', f'"a.weight": "{OTHER}", "b.weight": '),
    "duplicate-weight-map": replaced('{\n  "metadata', '{\n  "weight_map": {},\n  "metadata'),
    "no-weight-map": indexed('{"metadata": {}}'),
    "weight-map-list": indexed('{"weight_map": ["a.weight"]}'),
    "weight-map-empty": indexed('{"weight_map": {}}'),
    "metadata-list": indexed(json.dumps({"metadata": [], "weight_map": WEIGHTS})),
    "metadata-duplicate-key": replaced('"total_size": 8', '"total_size": 8, "total_size": 9'),
    "metadata-nan": replaced('"total_size": 8', '"total_size": NaN'),
    "array": indexed("[]"),
    "empty": indexed(""),
    "truncated": indexed(indexed()["model.safetensors.index.json"][:-20]),
    "trailing-comma": replaced('"\n  }', '",\n  }'),
    "two-values": indexed(indexed()["model.safetensors.index.json"] + b"{}"),
    "not-utf-8": indexed(indexed()["model.safetensors.index.json"].replace(b"b.weight", b"\xff.weight")),
    "deep-nesting": indexed('{"weight_map": ' + '{"a":' * 5000),
}

CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"model_type": "llama", "hidden_size": 5',
    "array": b'["llama"]',
    "string": b'"llama"',
    "null": b"null",
    "duplicate-key": b'{"model_type": "llama", "hidden_size": 576, "hidden_size": 9}',
    "duplicate-key-escaped": b'{"hidden_size": 576, "hidden_siz\\u0065": 9}',
    "duplicate-key-nested": b'{"text_config": {"layers": [{"a": 1, "a": 2}]}}',
    "deep-arrays": b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep-objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "not-utf-8": b'{"model_type": "ll\xe4ma"}',
    "utf-16": '{"model_type": "llama"}'.encode("utf-16"),
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "nan": b'{"rope_theta": NaN}',
    "infinity": b'{"rope_theta": -Infinity}',
    "float-overflow": b'{"rope_theta": 1e999}',
    "huge-integer": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "comment": b'{"model_type": "llama" /* base */}',
    "trailing-comma": b'{"model_type": "llama",}',
    "single-quotes": b"{'model_type': 'llama'}",
    "two-values": b'{"model_type": "llama"} {}',
    "control-character": b'{"model_type": "lla\nma"}',
    "lone-surrogate": b'{"model_type": "\\ud800"}',
    "lone-surrogate-key": b'{"model_type": "llama", "rope": [{"\\udfff": 1, "a": 2}]}',
}


def write_all(directory: Path) -> None:
    """Write every hostile file below a directory, replacing what is there."""
    for kind in ("headers", "index", "config"):
        shutil.rmtree(directory / kind, ignore_errors=True)
        (directory / kind).mkdir(parents=True)
    for name, content in HEADERS.items():
        (directory / "headers" / f"{name}.safetensors").write_bytes(content)
    for name, files in INDEXES.items():
        (directory / "index" / name).mkdir()
        for file_name, content in files.items():
            (directory / "index" / name / file_name).write_bytes(content)
    for name, content in CONFIGS.items():
        (directory / "config" / f"{name}.json").write_bytes(content)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
