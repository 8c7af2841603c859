"""A large index compared by its size and by pieces: true ones pass, and whatever is not plain is read whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from samples import read_shards
from tonnage.checkpoint.index import check_index
from tonnage.checkpoint.index_sample import check_sample, sample_places
from tonnage.checkpoint.skeletons import ShardHeader

FILES = {
    f"m-{number}.safetensors": [f"model.layers.{number}.mlp.experts.{e}.up" for e in range(900)] for number in range(9)
}


@pytest.fixture(scope="module")
def shards() -> dict[str, ShardHeader]:
    return read_shards(FILES)


def written(change: Callable[[dict[str, str]], None] = lambda _: None, **style: object) -> bytes:
    members = {name: file for file, names in FILES.items() for name in names}
    change(members)
    document = {"metadata": {"total_size": 8100}, "weight_map": members}
    return json.dumps(document, **({"indent": 2} | style)).encode()


def sampled(text: bytes, shards: Mapping[str, ShardHeader]):
    pieces = {place: text[place.start : place.stop] for place in sample_places(len(text))}
    return check_sample(len(text), pieces, shards)


STYLES = {
    "as libraries write it": {},
    "sorted": {"sort_keys": True},
    "compact": {"indent": None, "separators": (",", ":")},
    "on one line": {"indent": None},
    "tabs": {"indent": "\t"},
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("end", ["", "\n"])
def test_an_index_that_agrees_is_found_to(shards: dict[str, ShardHeader], style: dict[str, object], end: str) -> None:
    text = written(**style) + end.encode()
    found, whole = sampled(text, shards), check_index(text, shards)
    assert found is not None
    assert (found.named, found.problems) == (whole.named, whole.problems) == (frozenset(FILES), ())
    assert [str(note) for note in found.notes] == [
        "model.safetensors.index.json: its size and 16 pieces agree with the headers; the rest was not fetched"
    ]


def test_a_wrong_total_is_noted_as_ever(shards: dict[str, ShardHeader]) -> None:
    text = written().replace(b'"total_size": 8100', b'"total_size": 8101')
    found = sampled(text, shards)
    assert found is not None
    assert found.notes[:1] == check_index(text, shards).notes


NAME, FILE = "model.layers.4.mlp.experts.5.up", "m-4.safetensors"
CHANGES = {
    "a name is missing": lambda m: m.pop(NAME),
    "a name too many": lambda m: m.update(more=FILE),
    "a name in another way": lambda m: m.update({NAME + "x": m.pop(NAME)}),
    "a file nobody has": lambda m: m.update(dict.fromkeys(list(m)[::2], "m-x.safetensors")),
    "names of other files": lambda m: m.update({name: f"m-{(int(m[name][2]) + 1) % 9}.safetensors" for name in m}),
    "an escape": lambda m: m.update({"\u00e9": m.pop(NAME)}),
    "empty": lambda m: m.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_index_that_differs_is_read_whole(
    shards: dict[str, ShardHeader], change: Callable[[dict[str, str]], None]
) -> None:
    text = written(change)
    assert check_index(text, shards).problems
    assert sampled(text, shards) is None


BROKEN = {
    "another space": lambda text: text.replace(b'": "', b'":  "', 1),
    "another order of keys": lambda text: json.dumps(dict(reversed(json.loads(text).items())), indent=2).encode(),
    "cut": lambda text: text[:-3],
    "more behind": lambda text: text + b"{}",
    "nothing": lambda text: b" " * len(text),
    "metadata twice": lambda text: text.replace(b'"total_size": 8100', b'"a": 1, "a": 2', 1),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_an_index_that_is_not_plain_is_read_whole(
    shards: dict[str, ShardHeader], change: Callable[[bytes], bytes]
) -> None:
    assert sampled(change(written()), shards) is None


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, 59_266_877])
def test_pieces_begin_at_the_beginning_and_end_at_the_end(nbytes: int) -> None:
    places = sample_places(nbytes)
    assert (places[0].start, places[-1].stop, len(places)) == (0, nbytes, 16)
    assert all(len(place) == 4096 for place in places)
