from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from pathlib import Path

import pytest

from tonnage.checkpoint.io import CheckpointHeaders, digest_headers, read_bytes, read_checkpoint_headers, read_json
from tonnage.errors import CheckpointError, ConfigError

HOSTILE = Path(__file__).parent / "hostile"
INDEX = "model.safetensors.index.json"
SYNTAX = re.compile("(expected one JSON value; found ).*")

# What each file of hostile/config is refused with: the lines after the file name.
REFUSALS = {
    "array": ["not a JSON object; expected an object; found an array"],
    "byte-order-mark": ["not JSON; expected one JSON value; found ..."],
    "comment": ["not JSON; expected one JSON value; found ..."],
    "control-character": ["not JSON; expected one JSON value; found ..."],
    "deep-arrays": ["nested too deeply; expected at most 64 levels; found more"],
    "deep-objects": ["nested too deeply; expected at most 64 levels; found more"],
    "duplicate-key": ["duplicate key hidden_size; expected 1; found 2"],
    "duplicate-key-escaped": ["duplicate key hidden_size; expected 1; found 2"],
    "duplicate-key-nested": ["duplicate key text_config.layers[0].a; expected 1; found 2"],
    "empty": ["not JSON; expected one JSON value; found ..."],
    "float-overflow": ["number out of range; expected a finite number; found 1e999"],
    "huge-integer": ["number too long; expected at most 400 digits; found 5000 digits"],
    "infinity": ["not JSON; expected a finite number; found -Infinity"],
    "lone-surrogate": ["model_type; expected Unicode text; found half of a surrogate pair"],
    "lone-surrogate-key": [r"a key of rope[0]; expected Unicode text; found '\udfff'"],
    "nan": ["not JSON; expected a finite number; found NaN"],
    "not-utf-8": ["not UTF-8; expected UTF-8 text; found byte 0xe4 at offset 18"],
    "null": ["not a JSON object; expected an object; found null"],
    "single-quotes": ["not JSON; expected one JSON value; found ..."],
    "string": ["not a JSON object; expected an object; found a string"],
    "trailing-comma": ["not JSON; expected one JSON value; found ..."],
    "truncated": ["not JSON; expected one JSON value; found ..."],
    "two-values": ["not JSON; expected one JSON value; found ..."],
    "utf-16": ["not UTF-8; expected UTF-8 text; found byte 0xff at offset 0"],
}


def test_every_hostile_config_has_its_refusal() -> None:
    assert {path.stem for path in (HOSTILE / "config").iterdir()} == set(REFUSALS)


@pytest.mark.parametrize(("name", "expected"), REFUSALS.items(), ids=REFUSALS)
def test_hostile_config_is_refused_with_exactly_its_problems(name: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_json(HOSTILE / "config" / f"{name}.json")

    lines = [SYNTAX.sub(r"\1...", line) for line in str(refusal.value).splitlines()]
    assert lines == [f"{name}.json: {line}" for line in expected]


def test_json_comes_back_as_plain_values(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, "ä", None, True, {"b": {}}], "big": 10**30}
    (tmp_path / "config.json").write_text(json.dumps(value), encoding="utf-8")

    assert read_json(tmp_path / "config.json") == value


def test_every_duplicate_key_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2, "b": {"c": 1, "c": 2, "c": 3}}')

    with pytest.raises(ConfigError) as refusal:
        read_json(tmp_path / "config.json")

    assert str(refusal.value).splitlines() == [
        "config.json: duplicate key a; expected 1; found 2",
        "config.json: duplicate key b.c; expected 1; found 3",
    ]


def test_json_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(ConfigError, match="file too large; expected at most 8388608 bytes; found 1099511627776 bytes"):
        read_json(tmp_path / "config.json")


def test_a_missing_file_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: cannot be read; .*; found No such file or directory"):
        read_bytes(tmp_path / "config.json")


SHORTER_THAN_ITS_SIZE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not SHORTER_THAN_ITS_SIZE.exists(), reason="needs a file that ends before its size")
def test_a_file_that_ends_early_is_truncated() -> None:
    with pytest.raises(ConfigError, match="truncated while it was read; expected 4096 bytes; found "):
        read_bytes(SHORTER_THAN_ITS_SIZE)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def shard(*names: str) -> bytes:
    header = {
        name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * place, 2 * place + 2]}
        for place, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(2 * len(names))


def write(directory: Path, files: dict[str, tuple[str, ...]], index: dict[str, str] | None = None) -> None:
    for name, tensors in files.items():
        (directory / name).write_bytes(shard(*tensors))
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def names(headers: CheckpointHeaders) -> dict[str, list[str]]:
    return {shard.shard_file: list(shard.names()) for shard in headers.shards}


def refusal_lines(directory: Path, *also: str) -> list[str]:
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint_headers(directory, also=also)
    return str(refusal.value).splitlines()


def test_without_index_all_shard_files_count(tmp_path: Path) -> None:
    write(tmp_path, {"b.safetensors": ("y",), "a.safetensors": ("x", "z"), "notes.txt": ("q",)})

    headers = read_checkpoint_headers(tmp_path)

    assert names(headers) == {"a.safetensors": ["x", "z"], "b.safetensors": ["y"]}
    assert (headers.payload_bytes, headers.tensor_count, headers.notes) == (6, 3, ())


def test_with_index_other_shard_files_are_a_note(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": ("x",), "consolidated.safetensors": ("x",)}, {"x": "a.safetensors"})
    (tmp_path / "broken.safetensors").write_bytes(b"?")

    headers = read_checkpoint_headers(tmp_path)

    assert names(headers) == {"a.safetensors": ["x"]}
    assert [str(note) for note in headers.notes] == [
        "broken.safetensors: not named by the index, not counted",
        "consolidated.safetensors: not named by the index, not counted",
    ]


def test_files_of_a_manifest_count_beside_the_index(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": ("x",), "exl3-layer-00001.safetensors": ("codes",)}, {"x": "a.safetensors"})

    headers = read_checkpoint_headers(tmp_path, also=["exl3-layer-00001.safetensors"])

    assert names(headers) == {"a.safetensors": ["x"], "exl3-layer-00001.safetensors": ["codes"]}
    assert headers.notes == ()


def test_a_missing_file_of_a_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": ("x",)}, {"x": "a.safetensors"})

    assert refusal_lines(tmp_path, "../b.safetensors") == [
        "../b.safetensors: shard file is missing; expected a .safetensors file in the directory; found none"
    ]


def test_all_problems_of_a_checkpoint_are_reported_at_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"a.safetensors": ("x",), "b.safetensors": ("y", "w")},
        {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors", "v": "d.safetensors"},
    )
    (tmp_path / "a.safetensors").write_bytes(shard("x")[:-1])
    (tmp_path / "d.safetensors").write_bytes(b"")

    assert refusal_lines(tmp_path) == [
        "a.safetensors: truncated; expected 70 bytes; found 69 bytes",
        "d.safetensors: truncated; expected at least 8 bytes of header length; found 0 bytes",
        f"{INDEX}: shard file is missing; expected c.safetensors beside the index; found no such file",
        f"{INDEX}: w: not in the index; expected in weight_map; found in b.safetensors",
    ]


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "1.safetensors": ("m.layers.1.a", "norm"),
            "2.safetensors": ("m.layers.2.a", "norm"),
            "3.safetensors": ("m.layers.1.a",),
            "4.safetensors": ("m.layers.2.a", "m.layers.3.a"),
        },
    )

    found = [line.split("; found ")[1] for line in refusal_lines(tmp_path)]

    assert sorted(found) == [
        "in 1.safetensors and 2.safetensors",
        "in 1.safetensors and 3.safetensors",
        "in 4.safetensors and 2.safetensors",
    ]


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    assert refusal_lines(tmp_path) == [f"{tmp_path}: no shard files; expected *.safetensors; found none"]


def test_no_directory_is_refused(tmp_path: Path) -> None:
    assert refusal_lines(tmp_path / "x") == [
        f"{tmp_path}/x: cannot list the checkpoint directory; found No such file or directory"
    ]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


SPECIAL = {
    "a directory": Path.mkdir,
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
}


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_refused_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    SPECIAL[kind](Path(file))
    write(tmp_path, {"other.safetensors": ("x",)})

    assert refusal_lines(tmp_path) == [f"{file}: not a regular file; expected a regular file; found {kind}"]


def test_links_to_files_are_followed_as_in_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(shard("x"))
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")

    assert names(read_checkpoint_headers(tmp_path / "snapshot")) == {"model.safetensors": ["x"]}


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")

    assert refusal_lines(tmp_path) == [
        "model.safetensors: cannot be read; expected a readable regular file; found No such file or directory"
    ]


def test_a_file_name_that_does_not_print_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a\nb.safetensors": ("x",)})

    assert refusal_lines(tmp_path) == [r"a\nb.safetensors: shard file name; expected printable characters"]


def test_an_index_too_large_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": ("x",)})
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)

    assert refusal_lines(tmp_path) == [
        "model.safetensors.index.json: file too large; expected at most 201326592 bytes; found 1099511627776 bytes"
    ]


def test_sparse_weights_are_never_read(tmp_path: Path) -> None:
    raw = json.dumps({"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + (1 << 40))

    assert read_checkpoint_headers(tmp_path).payload_bytes == 1 << 40


def test_digest_covers_name_size_and_header(tmp_path: Path) -> None:
    write(tmp_path, {"b.safetensors": ("y",), "a.safetensors": ("x",)})
    headers = read_checkpoint_headers(tmp_path)
    expected = hashlib.sha256()
    for name, tensor in (("a.safetensors", "x"), ("b.safetensors", "y")):
        content = shard(tensor)
        expected.update((13).to_bytes(8, "little") + name.encode() + len(content).to_bytes(8, "little"))
        expected.update(content[:-2])

    assert digest_headers(tmp_path, headers) == expected.hexdigest()


def test_digest_refuses_a_file_that_changed(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": ("x",)})
    headers = read_checkpoint_headers(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(shard("x") + b"!")

    with pytest.raises(
        CheckpointError, match=r"a.safetensors: changed while it was read; expected 70 bytes; found 71 bytes"
    ):
        digest_headers(tmp_path, headers)


def test_names_shared_beyond_twenty_are_counted(tmp_path: Path) -> None:
    tensors = tuple(f"t{number}" for number in range(30))
    write(tmp_path, {"a.safetensors": tensors, "b.safetensors": tensors})

    lines = refusal_lines(tmp_path)

    assert len(lines) == 21
    assert lines[-1] == "b.safetensors: and 10 more shared names"
