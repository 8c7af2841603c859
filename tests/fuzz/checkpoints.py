"""Parsers of what a checkpoint says: headers, index, configs, manifests of slots, and what is derived from them."""

from __future__ import annotations

import json

from fuzz.checkpoint_seeds import (
    checkpoints,
    configs,
    containers,
    directories,
    file_of_names,
    indexes,
    model,
    module_names,
    quantizations,
)
from fuzz.mutate import PART, in_parts, json_document, shard_file, text_lines, words
from fuzz.target import DATA, TESTS, Target, directory, each, files
from samples import LLAMA
from tonnage.api import Checkpoint, PlanRequest, checkpoint_from_config, open_checkpoint, plan_checkpoint
from tonnage.assignment import assign_blueprint, convert_to_mxfp8
from tonnage.checkpoint.config import parse_config
from tonnage.checkpoint.header_check import PREFIX_BYTES
from tonnage.checkpoint.headers import header_end
from tonnage.checkpoint.index import check_index, is_plain_file_name
from tonnage.checkpoint.name_patterns import BadPatternError, compile_name_pattern
from tonnage.checkpoint.quant import parse_quantization
from tonnage.checkpoint.shared_names import check_distinct
from tonnage.checkpoint.skeletons import HeaderReader, ShardHeader
from tonnage.checkpoint.strict_json import parse_object
from tonnage.container import check_container
from tonnage.errors import CheckpointError, ConfigError
from tonnage.formats.exl3_v1_manifest import parse_manifest
from tonnage.inspection import inspect_assignment
from tonnage.matching import assign_headers
from tonnage.measure.io import measure_packages
from tonnage.measure.packages import measurement_document
from tonnage.prepare.reader import cuts_of, is_layer_file
from tonnage.profile import Profile
from tonnage.recipes.blueprint import blueprint_of, draw_blueprint
from tonnage.recipes.expressions import compile_expression
from tonnage.recipes.loader import parse_recipe
from tonnage.topology import Engine

_ENGINES: tuple[Engine, ...] = ("split", "vllm", "sglang", "exllamav3")


def headers(raw: bytes) -> None:
    """Read a safetensors file twice by one reader: by itself, and as it compares with what was read before."""
    reader = HeaderReader()
    first = _shard(raw, "model-00001.safetensors", reader)
    again = _shard(raw, "model-00002.safetensors", reader)
    assert list(first.entries()) == list(again.entries())
    assert first.payload_bytes == sum(entry.nbytes for entry in first.entries())
    assert first.data_begin + first.payload_bytes == len(raw)


def index(raw: bytes) -> None:
    """Compare an index with shards, of which the further parts say the names."""
    text, *lists = raw.split(PART)
    reader = HeaderReader()
    shards = {}
    for number, names in enumerate(lists[:8], start=1):
        name = f"model-{number:05}-of-00002.safetensors"
        shards[name] = _shard(file_of_names(names), name, reader)
    findings = check_index(text, shards, unreadable=("model-00009-of-00009.safetensors",))
    assert all(is_plain_file_name(name) for name in findings.named)
    for problem in (*findings.problems, *findings.notes, *check_distinct(list(shards.values()))):
        str(problem)


def config(raw: bytes) -> None:
    """Read config.json up to every tensor the recipe promises, plain and converted."""
    checkpoint = _from_config(raw)
    for assignment in (checkpoint.assignment, convert_to_mxfp8(checkpoint.assignment)):
        inspection = inspect_assignment(assignment)
        assert inspection.total.nbytes == assignment.payload_bytes


def plan(raw: bytes) -> None:
    """Plan what a config promises: by every engine, with a cache and all that is held beside it."""
    checkpoint = _from_config(raw)
    profile = Profile(name="c2-p64", concurrency=2, prefill_chunk_tokens=64, context_tokens=128)

    def by(engine: Engine) -> None:
        made = plan_checkpoint(checkpoint, PlanRequest(tp=2, engine=engine, profile=profile))
        assert all(line.bound_nbytes >= line.nbytes >= 0 for ledger in made.ranks for line in ledger.lines)

    each(by, _ENGINES)


def draft(raw: bytes) -> None:
    """Read the config of a draft, as it drafts by every method."""
    config = parse_config(parse_object(raw, where="config.json", kind=ConfigError, constants=True), name="draft")
    each(lambda method: assign_blueprint(blueprint_of(config, draft_method=method)), ("", "eagle3", "dflash"))


def quantization(raw: bytes) -> None:
    """Read a quantisation config and ask it for the formats of some modules."""
    fields = parse_object(raw, where="config.json", kind=ConfigError, constants=True)
    beside = fields.pop("_hf_quant_config", None)
    scheme = parse_quantization(fields, beside if isinstance(beside, dict) else None)
    for name in ("lm_head", "model.layers.0.mlp.experts.3.w1", "model.layers.11.self_attn.q_proj", "a" * 200):
        for kind in ("linear", "expert", "head"):
            assert scheme.format_of(name, kind).name
    assert all(note.isprintable() for note in scheme.notes)


def matching(raw: bytes) -> None:
    """Hold the headers of shard files against a recipe."""
    reader = HeaderReader()
    shards = [_shard(one, f"model-{number}.safetensors", reader) for number, one in enumerate(raw.split(PART)[:8])]
    problems = check_distinct(shards)
    if problems:
        raise CheckpointError(*problems)
    assert assign_headers(model(), shards).payload_bytes == sum(shard.payload_bytes for shard in shards)
    found = {name for shard in shards for name in shard.names()}
    whole = {name for name in module_names() if any(one == name or one.startswith(f"{name}.") for one in found)}
    assert len(whole) == len(module_names()), "a tensor is missing"
    assert all(any(one == name or one.startswith(f"{name}.") for name in whole) for one in found), "one too many"


def checkpoint_directory(raw: bytes) -> None:
    """Open a directory of config, quantisation config, manifest of slots, index and shard files; measure it too."""
    names = ("config.json", "hf_quant_config.json", "exl3-manifest.json", "model.safetensors.index.json")
    contents = raw.split(PART)[:8]
    shards = [f"model-{number:05}-of-00002.safetensors" for number in range(1, 5)]
    place = directory(dict(zip((*names, *shards), contents, strict=False)))

    def opened() -> None:
        checkpoint = open_checkpoint(place)
        assert checkpoint.headers is None or checkpoint.assignment.payload_bytes == checkpoint.headers.payload_bytes

    each(lambda read: read(), (opened, lambda: measurement_document(measure_packages([place]), date="2026-01-31")))


def slots(raw: bytes) -> None:
    """Read the manifest of a slot container, and hold layer files against it."""
    document, *layers = raw.split(PART)
    manifest = parse_manifest(parse_object(document, where="manifest", kind=ConfigError), where="manifest")
    assert all(is_plain_file_name(layer.file) for layer in manifest.layers)
    for layer in manifest.layers:
        is_layer_file(layer.file)
    reader = HeaderReader()
    shards = [_shard(one, layer.file, reader) for one, layer in zip(layers, manifest.layers, strict=False) if one]
    for shard in shards:
        cuts_of(shard)
    check_container(manifest, shards)


def name_pattern(raw: bytes) -> None:
    """Compile a pattern of a stranger's config and match it with names."""
    pattern, _, name = raw.decode("utf-8", "surrogateescape").partition("\n")
    try:
        compiled = compile_name_pattern(pattern)
    except BadPatternError:
        return
    for one in (name[:1024], "model.layers.10.mlp.experts.127.down_proj", "a" * 1024):
        compiled.matches(one)


def expression(raw: bytes) -> None:
    """Compile an expression of a recipe and evaluate it over the fields of a config."""
    text, _, fields = raw.decode("utf-8", "surrogateescape").partition("\n")
    compiled = compile_expression(text, where="fuzz")
    try:
        scope = json.loads(fields or "{}")
    except (ValueError, RecursionError):
        scope = {}
    compiled.evaluate({**_SCOPE, **scope} if isinstance(scope, dict) else _SCOPE)


def recipe(raw: bytes) -> None:
    """Read a recipe, and draw the model of a config with it."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    draw_blueprint(parse_recipe("fuzz.toml", text), parse_config(LLAMA, name="fuzz"))


def _from_config(raw: bytes) -> Checkpoint:
    fields = parse_object(raw, where="config.json", kind=ConfigError, constants=True)
    return checkpoint_from_config(fields, name="fuzz")


def _shard(raw: bytes, name: str, reader: HeaderReader) -> ShardHeader:
    """Read a file as a directory is read: a length first, then that much."""
    data_begin = header_end(raw[:PREFIX_BYTES], file_bytes=len(raw), where=name)
    return reader.read(raw[:data_begin], shard_file=name, file_bytes=len(raw))


_SCOPE: dict[str, object] = {
    "n": 3,
    "text": "ab",
    "flag": True,
    "none": None,
    "many": [1, 2, 3],
    "inner": {"n": 4, "list": ["a", "b"]},
    "big": 10**30,
}
_EXPRESSIONS = (
    "n + 1", "n * 2 // 3 - -n", "(n if flag else 2)", "len(many)", "ceil_div(n, 2)", "round_up(n, 64)", "inner.n", "many[1]",
    "'a' in inner.list", "text == 'ab' and not none", "sum(many)", "count(many, 1)", "char(text, 0)", "int(flag)", "min(n, 2)",
    "max(n, 1) % 7", "floor_mul(n, 2)", "n <= 2 < 5 or flag", "big * big", "optional(inner, 'n')", "n ** 9999", "many * 99999999",
)  # fmt: skip
_PATTERNS = (
    "model.layers.\\d+.mlp", "(a|aa)+$", ".*experts.*(up|down)_proj", "^lm_head$", "[a-z_]{1,9}(?!x)", "(?=.*a)b", "((a{1,9}){1,9}){1,9}",
    "a" * 500, "(.|..)+x",
)  # fmt: skip

TARGETS = (
    Target(run=headers, mutate=shard_file, seeds=lambda: [*files(TESTS / "hostile" / "headers"), *checkpoints()[:1]]),
    Target(run=index, mutate=in_parts(json_document, text_lines), seeds=indexes),
    Target(run=config, mutate=json_document, seeds=lambda: configs(*files(TESTS / "hostile" / "config"))),
    Target(run=plan, mutate=json_document, seeds=configs),
    Target(run=draft, mutate=json_document, seeds=lambda: files(DATA / "drafts", "*.json")),
    Target(run=quantization, mutate=json_document, seeds=quantizations),
    Target(run=matching, mutate=in_parts(shard_file), seeds=checkpoints),
    Target(run=checkpoint_directory, mutate=in_parts(*[json_document] * 4, shard_file), seeds=directories, longest=1 << 16),
    Target(run=slots, mutate=in_parts(json_document, shard_file), seeds=containers, longest=1 << 18),
    Target(run=name_pattern, mutate=words(*_PATTERNS, "(", ")", "{9}", "{1,999}", "*", "+", "?", "|", "(?!"), seeds=lambda: [f"{one}\nmodel.layers.0".encode() for one in _PATTERNS], longest=2048),
    Target(run=expression, mutate=words(*_EXPRESSIONS, "(", ")", "[", "]", ".", "**", "<<", " if ", " else ", "lambda: ", "f'{n}'", "__class__"), seeds=lambda: [one.encode() for one in _EXPRESSIONS], longest=4096),
    Target(run=recipe, mutate=text_lines, seeds=lambda: files(TESTS.parent / "src" / "tonnage" / "recipes", "*.toml"), longest=1 << 16),
)  # fmt: skip
