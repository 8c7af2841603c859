"""Laws of the index. The oracle is the json module of the standard library and a comparison of plain sets."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from samples import read_shards
from tonnage.checkpoint.index import check_index

KINDS = [["a", "b", "c"], ["a"], ["b", "d.layers.N.e"], []]


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, list[str]]:
    """Names by shard file: one layer per file mostly, sometimes two, sometimes none."""
    files: dict[str, list[str]] = {}
    for number in range(draw(st.integers(1, 6))):
        names = [f"m.layers.{number}.{part}".replace("N", str(number)) for part in draw(st.sampled_from(KINDS))]
        if draw(st.integers(0, 4)) == 0:
            names.append(f"extra{number}")
        files[f"model-{number}.safetensors"] = names
    return files


def is_right(raw: bytes, files: dict[str, list[str]]) -> bool:
    """Say whether an index names every tensor of every file it names, once, and nothing else."""
    try:
        document = json.loads(raw.decode(), object_pairs_hook=lambda pairs: ("object", pairs))
    except ValueError:
        return False
    if not isinstance(document, tuple) or len({key for key, _ in document[1]}) < len(document[1]):
        return False
    keys = dict(document[1])
    for key in ("weight_map", "metadata"):
        if not isinstance(keys.get(key, ("object", [])), tuple):
            return False
    metadata = [key for key, _ in keys.get("metadata", ("object", []))[1]]
    pairs = keys.get("weight_map", ("object", []))[1]
    if not pairs or len(set(metadata)) < len(metadata) or not all(isinstance(file, str) for _, file in pairs):
        return False
    named = {file for _, file in pairs}
    return sorted(pairs) == sorted((name, file) for file in named for name in files.get(file, ["missing"]))


@st.composite
def indexes(draw: st.DrawFn, files: dict[str, list[str]]) -> bytes:
    """A right index in some layout, then sometimes changed a little."""
    pairs = [(name, file) for file, names in files.items() for name in names]
    order = draw(st.sampled_from(["sorted", "as is", "shuffled"]))
    pairs = sorted(pairs) if order == "sorted" else draw(st.permutations(pairs)) if order == "shuffled" else pairs
    head = draw(st.sampled_from([{}, {"metadata": {}}, {"metadata": {"total_size": 1}}]))
    indent, separators = draw(st.sampled_from([(2, None), (None, None), (None, (",", ":")), ("\t", (" ,", " :"))]))
    raw = json.dumps({**head, "weight_map": dict(pairs)}, indent=indent, separators=separators).encode()
    for _ in range(draw(st.integers(0, 2))):
        start, other = draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))
        stop = start + draw(st.sampled_from([0, 0, 1, 3, 30]))
        pieces = [b"", b",", b'"', b"1", b"0", b"\\u0061", b"}", b" ", b"\n", b"\0", raw[other : other + 30]]
        raw = raw[:start] + draw(st.sampled_from(pieces)) + raw[stop:]
    return raw


@given(st.data())
def test_an_index_is_accepted_exactly_if_it_is_right(data: st.DataObject) -> None:
    files = data.draw(checkpoints())
    raw = data.draw(indexes(files))

    findings = check_index(raw, read_shards(files))

    assert (not findings.problems) == is_right(raw, files), findings.problems


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_findings(raw: bytes) -> None:
    assert check_index(raw, {}).problems
