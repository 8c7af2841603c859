"""Checkpoints to begin with: a Mixtral small enough to write out, public configs, indexes, slot containers."""

from __future__ import annotations

import json
from functools import cache

from fuzz.target import DATA, PART, TESTS, files, parts
from samples import LLAMA, PAIRS, SMALL
from tonnage.assignment import assign_blueprint
from tonnage.checkpoint.config import parse_config
from tonnage.formats.exl3_v1 import SlotGeometry, layer_metadata, layer_tensors
from tonnage.formats.exl3_v1_manifest import manifest_document
from tonnage.recipes.blueprint import Blueprint, blueprint_of

_LONG = 20_000
_QUANTIZATION = ("quantization_config", "_hf_quant_config", "expert_dtype")
CONFIG = LLAMA | {
    "model_type": "mixtral",
    "hidden_size": 8,
    "intermediate_size": 8,
    "vocab_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
}
"""A Mixtral small enough to write out."""


def file_of(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """Return a safetensors file of zeros; of large tensors no more than their headers can be tried."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = {"U8": 1, "BF16": 2, "F16": 2, "I16": 2, "F32": 4}[dtype]
        for axis in shape:
            nbytes *= axis
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def file_of_names(names: bytes) -> bytes:
    """Return a file of one-byte tensors, of which these lines are the names."""
    listed = dict.fromkeys(names.decode("utf-8", "replace").split("\n"))
    return file_of(dict.fromkeys(listed, ("U8", (1,))))


@cache
def model() -> Blueprint:
    """Return what the small model stores."""
    return blueprint_of(parse_config(CONFIG, name="tiny"))


@cache
def module_names() -> frozenset[str]:
    """Return the name of every module of the model."""
    entries = assign_blueprint(model()).entries
    return frozenset(entry.module.name(*instance) for entry in entries for instance in entry.module.instances())


def checkpoints() -> list[bytes]:
    """Return a checkpoint of the model in one file, and in one file per layer."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in assign_blueprint(model()).entries:
        for instance in entry.module.instances():
            name = entry.module.name(*instance)
            tensors |= {name + stored.suffix: (stored.dtype, stored.shape) for stored in entry.stored}
    by_file: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, kind in tensors.items():
        by_file.setdefault(name.partition("layers.")[2][:1], {})[name] = kind
    return [file_of(tensors), parts(*map(file_of, by_file.values()))]


def configs(*extra: bytes) -> list[bytes]:
    """Return the public configs that are not too long to be changed often."""
    return [raw for raw in (*files(DATA / "configs", "*.json"), json.dumps(LLAMA).encode(), *extra) if len(raw) < _LONG]


def quantizations() -> list[bytes]:
    """Return what public configs say of their quantisation."""
    found = []
    for raw in files(DATA / "configs", "*.json"):
        fields = json.loads(raw)
        kept = {key: fields[key] for key in _QUANTIZATION if key in fields}
        inner = fields.get("text_config")
        if isinstance(inner, dict) and "quantization_config" in inner:
            kept["text_config"] = inner
        text = json.dumps(kept).encode()
        if kept and len(text) < _LONG:
            found.append(text)
    return found


def directories() -> list[bytes]:
    """Return the checkpoint of the model as files, with an index and without, and as its config alone."""
    config = json.dumps(CONFIG).encode()
    whole, by_layer = checkpoints()
    files_of = by_layer.split(PART)
    weight_map = {}
    for number, one in enumerate(files_of, start=1):
        header = json.loads(one[8 : 8 + int.from_bytes(one[:8], "little")])
        weight_map |= dict.fromkeys(header, f"model-{number:05}-of-00002.safetensors")
    listed = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    quant = b'{"producer":{"name":"modelopt"},"quantization":{"quant_algo":"FP8","exclude_modules":["*"]}}'
    return [
        parts(config, b"", b"", listed, *files_of),
        parts(config, b"", b"", b"", whole),
        parts(config, quant, b"", b"", whole),
        parts(config, b"", containers()[0], b"", whole),
        parts(config),
    ]


def indexes() -> list[bytes]:
    """Return indexes, each with the names of two shards."""
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("up", "down")]
    lists = ["\n".join(names[:2]), "\n".join(names[2:])]
    weight_map = {name: f"model-0000{1 + number // 2}-of-00002.safetensors" for number, name in enumerate(names)}
    texts = [
        json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map}, indent=2),
        json.dumps({"weight_map": weight_map}),
        json.dumps({"weight_map": {}, "metadata": {}}),
    ]
    hostile = [path.read_bytes() for path in sorted((TESTS / "hostile" / "index").rglob("*.index.json"))]
    return [parts(text, *(one.encode() for one in lists)) for text in (*(one.encode() for one in texts), *hostile)]


def containers() -> list[bytes]:
    """Return manifests, with the layer files of one so small that they can stand beside it."""
    found = []
    for geometry in (SMALL, PAIRS):
        digests = {layer: f"{layer:064x}" for layer in geometry.moe_layer_indices}
        found.append(json.dumps(manifest_document(geometry, digests)).encode())
    tiny = SlotGeometry(
        num_experts=1, hidden_size=128, intermediate_size=128, moe_layer_indices=(0,), codebook="mcg", bits=2
    )
    layer = {tensor.name: (tensor.dtype, tensor.shape) for tensor in layer_tensors(tiny)}
    found.append(
        parts(json.dumps(manifest_document(tiny, {0: "0" * 64})).encode(), file_of(layer, layer_metadata(tiny, 0)))
    )
    return found
