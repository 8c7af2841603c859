"""Manifests of the slot container: both spellings, and every lie refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import KIMI_K3, PAIRS, SMALL
from tonnage.errors import ConfigError
from tonnage.formats.exl3_v1 import SlotGeometry
from tonnage.formats.exl3_v1_manifest import SlotLayer, manifest_document, parse_manifest
from tonnage.formats.exl3_v1_names import BTX, EXL3_V1, Dialect

HOSTILE = Path(__file__).parent / "hostile" / "manifests"


def digests(geometry: SlotGeometry) -> dict[int, str]:
    return {layer: f"{layer:064x}" for layer in geometry.moe_layer_indices}


@pytest.mark.parametrize("dialect", [EXL3_V1, BTX], ids=["exl3-v1", "btx"])
@pytest.mark.parametrize("geometry", [KIMI_K3, SMALL, PAIRS], ids=["kimi-k3", "plain", "pairs"])
def test_manifest_round_trips(geometry: SlotGeometry, dialect: Dialect) -> None:
    document = json.loads(json.dumps(manifest_document(geometry, digests(geometry), dialect=dialect)))
    manifest = parse_manifest(document, where=dialect.manifest_name)
    assert manifest.geometry == geometry
    assert manifest.dialect == dialect
    first = geometry.moe_layer_indices[0]
    file = f"{dialect.layer_prefix}{first:05d}.safetensors"
    assert manifest.layers[0] == SlotLayer(index=first, file=file, sha256=f"{first:064x}")
    assert [layer.index for layer in manifest.layers] == list(geometry.moe_layer_indices)


def test_btx_manifest_uses_its_own_names() -> None:
    document: Any = manifest_document(KIMI_K3, digests(KIMI_K3), dialect=BTX)
    assert (document["kind"], document["schema"], document["codebook"]) == ("btx-manifest", "btx-atoms-v1", "sqg_e4m3")
    assert (document["geometry"]["atom_channels"], document["geometry"]["atom_slots"]) == (32, 96)
    assert document["hadamard"]["coupled"] is True
    assert document["layout"]["atom_row_alignment"] == 4096


def test_order_of_layers_and_absent_barriers_and_null_seed_are_free() -> None:
    geometry = replace(KIMI_K3, moe_layer_indices=(1, 2), extent_barriers=())
    document: Any = manifest_document(geometry, digests(geometry))
    document["geometry"]["moe_layer_indices"] = [2, 1]
    del document["layout"]["extent_barriers"]
    document["codebook_seed"] = None
    assert parse_manifest(document, where="m").geometry == geometry


MANIFEST_LIES = {
    "alignment-does-not-divide": "layout.extent_alignment_slots: impossible; expected a divisor of 32 slots; found 5",
    "another-schema": "not a slot container manifest; expected kind exl3-manifest with schema exl3-v1",
    "barrier-outside": "layout.extent_barriers: impossible; expected distinct slots between 0 and 32; found [32]",
    "bits-beside-pairs": "rates.bits: unknown key",
    "block-does-not-divide": "impossible block; expected a multiple of 32 that divides 512; found 384",
    "boolean-for-a-number": "geometry.num_experts: not an integer; expected an integer; found bool True",
    "btx-with-exl3-key": "layout.row_alignment: unknown key",
    "file-leaves-directory": "layers.1.file: not a plain file name",
    "hadamard-without-block": "hadamard.post_block: required key is missing",
    "hidden-not-whole-tiles": "geometry.hidden_size: not a whole number of blocks; expected a multiple of 16",
    "layer-is-no-object": "layers.1: not an object; expected an object; found str",
    "layer-key-with-zero": "layers.01: not a layer number; expected a decimal without leading zeros",
    "mcg-without-seed": "codebook_seed: required key is missing",
    "missing-layer-file": "layers.3: layer is declared and has no file",
    "negative-experts": "geometry.num_experts: not a positive number; expected 1 or more; found -8",
    "no-geometry": "geometry: required key is missing",
    "num-slots-lie": "geometry.num_slots: wrong value; expected 32; found 31",
    "one-file-for-two-layers": "layers.2.file: file belongs to two layers",
    "pair-kind-unknown": "rates.pair_kinds: not a list of known values; expected a list of P22, P33, P24",
    "rate-of-another-codebook": "rates.bits: not a rate of codebook lut_e4m3; expected one of [2, 3, 4]; found 5",
    "repeated-layer": "geometry.moe_layer_indices: not a set of layers",
    "seed-without-mcg": "codebook_seed: codebook lut_e4m3 has no seed; expected no such key; found 3417055213",
    "slot-channels-lie": "geometry.slot_channels: wrong value; expected 32; found 64",
    "undeclared-layer-file": "layers.7: layer is not declared in moe_layer_indices",
    "unknown-layer-key": "layers.1.bytes: unknown key",
    "unknown-top-key": "writer: unknown key",
    "upper-case-digest": "layers.1.sha256: not a SHA-256; expected 64 lower-case hexadecimal digits",
    "wrong-seed": "codebook_seed: wrong value; expected 3417055213; found 1",
    "zero-row-alignment": "layout.row_alignment: not a positive number; expected 1 or more; found 0",
}


@pytest.mark.parametrize("path", sorted(HOSTILE.glob("*.json")), ids=lambda path: path.stem)
def test_hostile_manifest_is_refused_in_one_line(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(json.loads(path.read_text()), where="manifest.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("manifest.json: ")
    assert MANIFEST_LIES[path.stem] in lines[0]


def test_every_lie_has_a_file() -> None:
    assert {path.stem for path in HOSTILE.glob("*.json")} == MANIFEST_LIES.keys()


def test_all_problems_of_a_manifest_are_reported_at_once() -> None:
    document: Any = copy.deepcopy(manifest_document(SMALL, digests(SMALL)))
    document["geometry"]["hidden_size"] = 500
    document["rates"]["bits"] = 9
    document["layers"]["3"]["sha256"] = "short"
    document["note"] = "hello"
    document["hadamard"] = []
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document, where="m.json")
    assert [problem.where for problem in caught.value.problems] == [
        "m.json: hadamard",
        "m.json: layers.3.sha256",
        "m.json: note",
    ]
    document["hadamard"] = {"intermediate_hadamard": False, "per_expert_input_rotations": False}
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document, where="m.json")
    assert [problem.where for problem in caught.value.problems] == [
        "m.json: geometry.hidden_size",
        "m.json: rates.bits",
        "m.json: layers.3.sha256",
        "m.json: note",
    ]


@pytest.mark.parametrize("document", [None, [], 7, "exl3-manifest", {}, {"kind": ["exl3-manifest"]}], ids=repr)
def test_something_else_is_no_manifest(document: object) -> None:
    with pytest.raises(ConfigError, match=r"not a slot container manifest|not an object"):
        parse_manifest(document, where="m.json")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
)


@given(path=st.integers(0, 40), value=anything)
def test_any_value_anywhere_is_a_manifest_or_a_refusal(path: int, value: object) -> None:
    document: Any = copy.deepcopy(manifest_document(SMALL, digests(SMALL)))
    places = [(document, key) for key in document]
    places += [(section, key) for section in document.values() if isinstance(section, dict) for key in section]
    section, key = places[path % len(places)]
    section[key] = value
    try:
        parse_manifest(document, where="m.json")
    except ConfigError as error:
        assert all(problem.where.startswith("m.json") for problem in error.problems)  # noqa: PT017 - the law


def test_manifest_needs_a_digest_of_every_layer() -> None:
    with pytest.raises(ConfigError, match=r"layers\.3: layer is declared and has no file"):
        manifest_document(SMALL, {1: "0" * 64})
    with pytest.raises(ConfigError, match=r"layers\.9: layer is not declared"):
        manifest_document(SMALL, {**digests(SMALL), 9: "0" * 64})
