from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from samples import read_shards
from tonnage.checkpoint.index import IndexFindings, check_index
from tonnage.checkpoint.io import read_checkpoint_headers
from tonnage.errors import CheckpointError
from tonnage.sources.model import is_plain_file_name

HOSTILE = Path(__file__).parent / "hostile"
SYNTAX = re.compile("(expected one JSON value; found ).*")

ONE, TWO, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"

# What each directory of hostile/index is refused with.
REFUSALS = {
    "array": ["{index}: not a JSON object; expected an object; found an array"],
    "deep-nesting": ["{index}: nested too deeply; expected at most 64 levels; found more"],
    "duplicate-name": ["{index}: a.weight: duplicate name; expected one entry; found another"],
    "duplicate-name-elsewhere": ["{index}: a.weight: not where the index says; expected in {two}; found in {one}"],
    "duplicate-name-escaped": ["{index}: a.weight: duplicate name; expected one entry; found another"],
    "duplicate-weight-map": ["{index}: duplicate key weight_map; expected 1; found 2"],
    "empty": ["{index}: not JSON; expected one JSON value; found ..."],
    "file-absolute": [
        "{index}: shard file name; expected a plain file name ending in .safetensors; found '/etc/passwd.safetensors'"
    ],
    "file-backslash": [
        "{index}: shard file name; expected a plain file name ending in .safetensors; found '..\\\\x.safetensors'"
    ],
    "file-dots": ["{index}: shard file name; expected a plain file name ending in .safetensors; found '..'"],
    "file-empty": ["{index}: shard file name; expected a plain file name ending in .safetensors; found ''"],
    "file-list": ["{index}: b.weight: weight_map; expected a file name; found an array"],
    "file-nul": [
        "{index}: shard file name; expected a plain file name ending in .safetensors; found 'x\\x00.safetensors'"
    ],
    "file-null": ["{index}: b.weight: weight_map; expected a file name; found null"],
    "file-number": ["{index}: b.weight: weight_map; expected a file name; found an integer"],
    "file-pickle": [
        "{index}: shard file name; expected a plain file name ending in .safetensors; found 'pytorch_model.bin'"
    ],
    "file-up": ["{index}: shard file name; expected a plain file name ending in .safetensors; found '../{two}'"],
    "metadata-duplicate-key": ["{index}: duplicate key metadata.total_size; expected 1; found 2"],
    "metadata-list": ["{index}: metadata; expected an object; found an array"],
    "metadata-nan": ["{index}: not JSON; expected a finite number; found NaN"],
    "missing-all-shards": [
        "{index}: shard file is missing; expected {one} beside the index; found no such file",
        "{index}: shard file is missing; expected {two} beside the index; found no such file",
    ],
    "missing-shard": ["{index}: shard file is missing; expected {two} beside the index; found no such file"],
    "no-weight-map": ["{index}: weight_map; expected an object of tensor names and file names; found no such key"],
    "not-utf-8": ["{index}: not UTF-8; expected UTF-8 text; found byte 0xff at offset 118"],
    "tensor-in-two-shards": ["{two}: a.weight: name in two shard files; expected one file; found in {one} and {two}"],
    "tensor-not-indexed": ["{index}: c.weight: not in the index; expected in weight_map; found in {one}"],
    "trailing-comma": ["{index}: not JSON; expected one JSON value; found ..."],
    "truncated": ["{index}: not JSON; expected one JSON value; found ..."],
    "truncated-shard": ["{two}: truncated; expected 72 bytes; found 71 bytes"],
    "two-values": ["{index}: not JSON; expected one JSON value; found ..."],
    "unknown-tensor": ["{index}: c.weight: not where the index says; expected in {one}; found in no shard file"],
    "weight-map-empty": ["{index}: weight_map is empty; expected shard files; found none"],
    "weight-map-list": ["{index}: weight_map; expected an object of tensor names and file names; found an array"],
    "wrong-shard": ["{index}: b.weight: not where the index says; expected in {one}; found in {two}"],
}


def test_every_hostile_index_has_its_refusal() -> None:
    assert {path.name for path in (HOSTILE / "index").iterdir()} == set(REFUSALS)


@pytest.mark.parametrize(("name", "expected"), REFUSALS.items(), ids=REFUSALS)
def test_hostile_index_is_refused_with_exactly_its_problems(name: str, expected: list[str]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint_headers(HOSTILE / "index" / name)

    assert [SYNTAX.sub(r"\1...", line) for line in str(refusal.value).splitlines()] == [
        line.format(one=ONE, two=TWO, index=INDEX) for line in expected
    ]


FILES = {
    f"model-{n:05}.safetensors": [f"m.layers.{n}.{part}" for part in ("a", "b", "c.10", "c.9", *"defgh")]
    for n in range(12)
}
FILES["rest.safetensors"] = ["head", "norm"]
WEIGHT_MAP = {name: shard_file for shard_file, names in FILES.items() for name in names}


def check(index: str | bytes, files: dict[str, list[str]] | None = None) -> IndexFindings:
    return check_index(index if isinstance(index, bytes) else index.encode(), read_shards(files or FILES))


STYLES = {
    "as Hugging Face writes": {"indent": 2, "sort_keys": True},
    "compact": {"separators": (",", ":")},
    "one line": {},
    "tabs": {"indent": "\t"},
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("head", [{}, {"metadata": {}}, {"metadata": {"total_size": 110, "format": "pt"}}])
def test_a_right_index_has_no_findings(style: dict[str, object], head: dict[str, object]) -> None:
    findings = check(json.dumps({**head, "weight_map": WEIGHT_MAP}, **style))  # type: ignore[arg-type]

    assert findings == IndexFindings(named=frozenset(FILES), problems=(), notes=())


@pytest.mark.parametrize(
    "tail", [{"metadata": {"total_size": 110}}, {"other": {"a": [1]}}, {"metadata": {"config": "{\\"}}]
)
def test_an_unusual_layout_is_read_as_well(tail: dict[str, object]) -> None:
    findings = check(json.dumps({"weight_map": WEIGHT_MAP, **tail}))

    assert findings == IndexFindings(named=frozenset(FILES), problems=(), notes=())


def test_escapes_spell_the_same_names() -> None:
    text = json.dumps({"weight_map": WEIGHT_MAP}, indent=2).replace("m.layers.3.a", "m.l\\u0061yers.3.a")

    assert check(text).problems == ()


def test_a_wrong_total_is_a_note() -> None:
    findings = check(json.dumps({"metadata": {"total_size": 111}, "weight_map": WEIGHT_MAP}, indent=2))

    assert findings.problems == ()
    assert [str(note) for note in findings.notes] == [
        f"{INDEX}: metadata.total_size differs from the headers; expected 110 bytes; found 111 bytes"
    ]


def changed(old: str, new: str) -> list[str]:
    text = json.dumps({"weight_map": WEIGHT_MAP}, indent=2, sort_keys=True)
    assert text.count(old) == 1
    return [str(problem).removeprefix(f"{INDEX}: ") for problem in check(text.replace(old, new)).problems]


def test_one_wrong_name_in_a_run_is_found() -> None:
    assert changed('"m.layers.7.e"', '"m.layers.7.E"') == [
        "m.layers.7.E: not where the index says; expected in model-00007.safetensors; found in no shard file",
        "m.layers.7.e: not in the index; expected in weight_map; found in model-00007.safetensors",
    ]


def test_one_wrong_file_in_a_run_is_found() -> None:
    assert changed('7.e": "model-00007', '7.e": "model-00008') == [
        "m.layers.7.e: not where the index says; expected in model-00008.safetensors; found in model-00007.safetensors",
        "m.layers.7.e: not in the index; expected in weight_map; found in model-00007.safetensors",
    ]


def test_a_run_written_twice_is_found() -> None:
    text = json.dumps({"weight_map": WEIGHT_MAP}, indent=2, sort_keys=True)
    begin, end = text.index('"m.layers.7.a"'), text.index('"m.layers.8.a"')

    problems = check(text[:end] + text[begin:end] + text[end:]).problems

    assert [(p.tensor, p.what) for p in problems] == [
        (f"m.layers.7.{part}", "duplicate name") for part in ("a", "b", "c.10", "c.9", *"defgh")
    ]


def test_a_missing_member_in_a_run_is_found() -> None:
    assert changed('    "m.layers.7.e": "model-00007.safetensors",\n', "") == [
        "m.layers.7.e: not in the index; expected in weight_map; found in model-00007.safetensors"
    ]


def test_problems_beyond_twenty_are_counted() -> None:
    findings = check(json.dumps({"weight_map": {f"t{n:04}": "rest.safetensors" for n in range(5000)}}))

    assert len(findings.problems) == 21
    assert findings.problems[-1].what == "and 4982 more problems"  # the two tensors of the file are missing as well


def test_one_file_per_tensor_is_read_in_linear_time() -> None:
    files = {f"{n:05}.safetensors": [f"t{n}"] for n in range(3000)}
    weight_map = {names[0]: shard_file for shard_file, names in files.items()}

    assert check(json.dumps({"weight_map": weight_map}), files).problems == ()


def test_tensors_of_refused_shards_are_not_compared() -> None:
    text = json.dumps({"weight_map": {**WEIGHT_MAP, "x": "broken.safetensors"}}).encode()

    findings = check_index(text, read_shards(FILES), unreadable={"broken.safetensors"})

    assert findings == IndexFindings(named=frozenset({*FILES, "broken.safetensors"}), problems=(), notes=())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "a\n", "x" * 256, "\u2028"])
def test_a_path_is_no_plain_file_name(name: str) -> None:
    assert not is_plain_file_name(name)


@pytest.mark.parametrize("name", ["a", "model-00001-of-00002.safetensors", "größe.safetensors", "..a", "a b"])
def test_a_plain_file_name(name: str) -> None:
    assert is_plain_file_name(name)


def test_space_before_the_last_brace_is_legal() -> None:
    text = json.dumps({"weight_map": {name: file for name, file in WEIGHT_MAP.items() if file != "rest.safetensors"}})

    assert check(text.replace("}}", " \n} }\n")).problems == ()
    assert check(text.replace("}}", " , }}")).problems[0].what == "not JSON"


def test_a_name_without_the_number_is_in_no_run() -> None:
    files = {f"{n}.safetensors": [f"m.layers.{n}.a", f"m.layers.{n}.b", f"extra{n}"] for n in range(4)}
    weight_map = {name: shard_file for shard_file, names in files.items() for name in names}

    assert check(json.dumps({"weight_map": weight_map}, indent=2), files).problems == ()
